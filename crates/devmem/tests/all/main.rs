//! Tests of bindings, sockets, streams and tokens, with our own device, the kernel and DPDK as
//! peers.
//!
//! One program, because each program is linked with all libraries. Tests that cannot share a
//! process have programs of their own: `dying` (lost pages are counted for the process), `resident`
//! (memory is measured for the process), `stress` (CI runs it alone, optimised and under
//! sanitizers).
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, unreachable_pub, reason = "these are tests")]

mod common;
mod device_end;
mod kernel_common;
mod lossy_link;
mod memory_common;
mod net_common;
mod stream_common;
mod stream_link;
mod stream_scene;
mod stream_wire;

mod addresses;
mod area_traffic;
mod areas;
mod bindings;
mod elsewhere;
mod kernel;
mod senders;
mod several_pages;
mod sleeping;
mod sockets;
mod steering;
mod streams;
mod streams_dpdk;
mod streams_ends;
mod streams_hostile;
mod streams_kernel;
mod streams_steered;
mod tokens;
mod traffic;
mod trusted;
