//! The options of connections and listeners.

use crate::options::{self, Versioned};
use crate::stack::endpoint::netmem_endpoint;
use crate::status::Failure;
use netmem::tcp::{Config, KeepAlive, ListenOptions};
use std::net::SocketAddr;
use std::time::Duration;

/// How a connection behaves: one that netmem_tcp_connect makes, or those that a listener accepts.
/// Set `size` to sizeof(netmem_tcp_options), and the rest to zero where the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_tcp_options {
    /// sizeof(netmem_tcp_options)
    pub size: usize,
    /// netmem_tcp_connect: from which address and port. Null: the stack chooses both.
    pub local: *const netmem_endpoint,
    /// netmem_tcp_listen: connections that wait to be accepted, at most; 0: 1024. Further peers try
    /// again.
    pub backlog: u32,
    /// The largest receive window, in bytes; 0: 6 MiB.
    pub receive_buffer: u32,
    /// Bytes that were sent and not acknowledged, at most; 0: 1 MiB. At most 1 GiB.
    pub send_buffer: u32,
    /// Milliseconds that sent data may stay unacknowledged; 0: as long as it is sent again, which
    /// is fifteen times.
    pub user_timeout: u32,
    /// Seconds without traffic after which a peer is probed, and seconds between two probes; after
    /// nine the connection ends. 0: an idle peer is not probed.
    pub keep_alive: u32,
    /// netmem_tcp_connect: how often an unanswered SYN is sent again; 0: seven times, which takes
    /// minutes.
    pub syn_retries: u32,
    /// Not zero: small segments are sent at once, and do not wait for an acknowledgement (no
    /// Nagle).
    pub nodelay: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

// SAFETY: repr(C), `size` is first, integers and a pointer.
unsafe impl Versioned for netmem_tcp_options {
    const NAME: &'static str = "netmem_tcp_options";
    const LEAST: usize = 48;
}

/// The largest send buffer: numbers of the stream are compared modulo 2^32.
const MOST_SENT: u32 = 1 << 30;

/// The options, as they were validated.
#[derive(Default)]
pub(crate) struct Given {
    pub(crate) local: Option<SocketAddr>,
    pub(crate) listen: ListenOptions,
}

impl Given {
    /// The options of the connection.
    pub(crate) fn connection(&self) -> &Config {
        &self.listen.connection
    }
}

/// The options at `from`; the defaults if it is null.
///
/// # Safety
///
/// Null, or options of the header.
pub(crate) unsafe fn read(from: *const netmem_tcp_options) -> Result<Given, Failure> {
    let mut given = Given::default();
    if from.is_null() {
        return Ok(given);
    }
    // SAFETY: as the caller promises.
    let options = unsafe { options::read(from) }?;
    if options.reserved != [0; 7] {
        return Err(Failure::Argument("netmem_tcp_options.reserved is not zero".into()));
    }
    if !options.local.is_null() {
        // SAFETY: as the caller promises.
        given.local = Some(unsafe { netmem_endpoint::read(options.local, "netmem_tcp_options.local") }?);
    }
    if options.backlog > 0 {
        given.listen.backlog = options.backlog as usize;
    }
    if options.send_buffer > MOST_SENT {
        return Err(Failure::Argument(format!(
            "a send buffer of {} bytes; at most {MOST_SENT} can be unacknowledged",
            options.send_buffer
        )));
    }
    let config = &mut given.listen.connection;
    if options.receive_buffer > 0 {
        config.receive_buffer = options.receive_buffer;
    }
    if options.send_buffer > 0 {
        config.send.send_buffer = options.send_buffer as usize;
    }
    if options.user_timeout > 0 {
        config.send.user_timeout = Some(Duration::from_millis(options.user_timeout.into()));
    }
    if options.keep_alive > 0 {
        let seconds = Duration::from_secs(options.keep_alive.into());
        config.keep_alive = Some(KeepAlive { idle: seconds, interval: seconds, ..KeepAlive::default() });
    }
    if options.syn_retries > 0 {
        config.send.syn_retries = options.syn_retries;
    }
    config.send.nodelay = options.nodelay != 0;
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> netmem_tcp_options {
        // SAFETY: zeros are a value, as `Versioned` says.
        let zero: netmem_tcp_options = unsafe { std::mem::zeroed() };
        netmem_tcp_options { size: size_of::<netmem_tcp_options>(), ..zero }
    }

    #[test]
    fn each_option_is_read() {
        let local = netmem_endpoint::from(SocketAddr::from(([192, 0, 2, 2], 80)));
        let all = netmem_tcp_options {
            local: &raw const local,
            backlog: 2,
            receive_buffer: 3,
            send_buffer: 4,
            user_timeout: 5,
            keep_alive: 6,
            syn_retries: 7,
            nodelay: 1,
            ..options()
        };
        // SAFETY: options.
        let given = unsafe { read(&raw const all) }.expect("valid options");
        let config = given.connection();
        assert_eq!((given.local, given.listen.backlog), (Some(SocketAddr::from(([192, 0, 2, 2], 80))), 2));
        assert_eq!((config.receive_buffer, config.send.send_buffer), (3, 4));
        assert_eq!(config.send.user_timeout, Some(Duration::from_millis(5)));
        let probes = config.keep_alive.as_ref().map(|probes| (probes.idle, probes.interval));
        assert_eq!(probes, Some((Duration::from_secs(6), Duration::from_secs(6))));
        assert_eq!((config.send.syn_retries, config.send.nodelay), (7, true));
    }

    #[test]
    fn a_send_buffer_is_at_most_a_gigabyte() {
        for (send_buffer, is_valid) in [(1 << 30, true), ((1 << 30) + 1, false), (u32::MAX, false)] {
            let options = netmem_tcp_options { send_buffer, ..options() };
            // SAFETY: options.
            assert_eq!(unsafe { read(&raw const options) }.is_ok(), is_valid, "{send_buffer}");
        }
    }
}
