//! The handles' names: an event has some of them, and their values need events.

/// A TCP/IP stack with addresses of its own, on a tap or on an AF_XDP queue.
#[derive(Debug)]
pub struct netmem_stack(());

/// A socket that accepts connections.
#[derive(Debug)]
pub struct netmem_tcp_listener(());

/// A TCP connection.
#[derive(Debug)]
pub struct netmem_tcp(());
