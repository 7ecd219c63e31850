//! TCP and UDP of a stack: connections, listeners, timers, sockets for datagrams.

pub(crate) mod connections;
pub(crate) mod datagrams;
pub(crate) mod entry;
pub(crate) mod handles;
pub(crate) mod idle;
pub(crate) mod listeners;
pub(crate) mod process;
pub(crate) mod schedule;
pub(crate) mod segment;
pub(crate) mod tcp;
mod wheel;
pub(crate) mod write;
