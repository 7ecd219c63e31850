//! Device memory for sockets: payload in the memory of a GPU, which this process does not map.
//!
//! A [`Binding`] is bound memory, into which the queues of a [`Netdev`] receive. A [`Socket`]
//! delivers datagrams as offsets with [`Token`]s, which a [`Returner`] returns on any thread;
//! [`stream`] does the same for TCP. A [`Sender`] sends from a binding.
//!
//! The package is `netmem-devmem`.

#[doc(inline)]
pub use netmem_devmem::{
    Address, AreaError, AreaProvider, AreaStats, AttachError, BindError, Binding, BindingCount, BindingRef,
    BindingStats, BoundMemory, Buffer, CountMode, DeliverError, DetachError, Endpoint, FlowBindError, FlowQueue,
    FlowStats, FlowTable, Fragment, Interface, MAX_FRAGMENTS, MAX_RANGES, Mac, Message, Netdev, Pages, Receive,
    ReceiveOne, Received, RecvError, RefillRing, Returner, SendError, Sender, SenderError, Socket, SocketOptions,
    SocketStats, StillAttached, Token, TokenRange, TokenStats, TokenTable, TooManyRanges, UnbindError, cleaned_up,
    lost_pages,
};

/// TCP streams whose payload is in device memory.
pub mod stream {
    #[doc(inline)]
    pub use netmem_devmem::stream::{
        Bindings, DeviceListener, DeviceStream, InFlight, OnDevice, Sent, StreamError, StreamFragment, StreamReturner,
        StreamRx, StreamSendError, StreamStats, StreamTx, Streams,
    };
}
