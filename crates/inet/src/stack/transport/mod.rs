//! TCP and UDP of a stack: connections, listeners, timers, sockets for datagrams.

pub(crate) mod connections;
pub(crate) mod datagrams;
pub(crate) mod listeners;
pub(crate) mod schedule;
pub(crate) mod wheel;
mod write;
