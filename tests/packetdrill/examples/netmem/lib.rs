//! The TCP of `netmem-inet` under packetdrill: socket calls on `tcp::Connection` and
//! `tcp::Listener`.
//!
//! docs/design/streams.md states which scripts pass, and expected.txt why the others do not.
//!
//! The scripts expect of `write` that it accepts and divides bytes as Linux's does. That is here
//! (`calls`), and not in the connections of `netmem-inet`.

mod calls;
mod device;
mod host;
mod memory;
mod network;
mod stream;

netmem_packetdrill::export!(host::Netmem::new);
