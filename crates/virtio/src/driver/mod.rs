//! The virtio-net driver: from a connection to a device to queues that receive into page pools.
//!
//! Why a driver in user space: a device in another process (or in this one) writes frames directly
//! into the pages that the program then owns, and no frame is copied on the way to it.
//!
//! * [`VirtioNet::probe`] negotiates, lays out memory, and starts the rings of all queue pairs.
//! * [`VirtioRx`] and [`VirtioTx`] are the queues; they can go to different threads, and stop their
//!   rings when dropped.
//! * A receive queue is restarted with a provider of device memory: then it is a [`VirtioSplitRx`],
//!   whose frames have their headers in host memory. A [`VirtioSplitTx`] sends such frames.
//! * [`VirtioRxQueues`] are the receive queues as one value, whose memory a control thread changes
//!   while others poll.
//! * [`VirtioNet`] changes how many pairs are in use, reads the device's configuration space
//!   ([`VirtioNet::config`]), reports whether the device is still connected, and connects to
//!   another one: [`VirtioNet::reconnect`].

// From the device down: `probe` and `reconnect` set up a connection; `rx`, `split_rx`, `tx` and
// `split_tx` are the queues; `receive` is their loop, over the layouts of `buffers`; `ring` is the
// memory of a ring. `state` is what all of them share.
mod big_buffers;
mod buffer_layout;
mod buffers;
mod config_space;
mod ctrl;
mod deliver;
mod device_memory;
mod disconnect;
mod either;
mod error;
mod handled;
mod headers;
mod idle;
mod modes;
mod options;
mod page_buffers;
mod panics;
mod probe;
mod queue_config;
mod queue_epolls;
mod queues;
mod receive;
mod reconnect;
mod reserve;
mod restart;
mod ring;
mod ring_layout;
mod rx;
mod split_buffers;
mod split_options;
mod split_rx;
mod split_tx;
mod state;
mod stats;
mod stop;
mod tx;
mod tx_groups;
mod tx_mappings;
mod virtio_net;
mod wait;

pub use error::NetError;
pub use modes::{Offload, RxMode};
pub use options::NetOptions;
pub use queues::{EitherRx, QueuesError, RxClosed, VirtioRxQueues};
pub use restart::{RestartError, Restarted};
pub use rx::{RxPoll, VirtioRx};
pub use split_options::{SplitClosed, SplitOptions};
pub use split_rx::{SplitPoll, VirtioSplitRx};
pub use split_tx::VirtioSplitTx;
pub use stats::{DeviceFault, RxStats, TxStats};
pub use tx::VirtioTx;
pub use virtio_net::{QueuePair, VirtioNet};
pub use wait::{QueueStopped, QueueWait};
