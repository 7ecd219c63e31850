//! What the groups of a stack use together: the host, the time, the way out, pages, wakers.
//!
//! Why a group of its own: connections, listeners, datagrams and the input each own their tables,
//! and all of them send, count pages and wake users. They get this value as an argument, so that
//! the borrow checker separates it from their tables.

use crate::route::MIN_PATH_MTU_V6;
use crate::stack::egress::Egress;
use crate::stack::error::SocketError;
use crate::stack::options::StackOptions;
use crate::stack::pages::SendPages;
use crate::stack::path::Path;
use crate::stack::payload::Payload;
use crate::stack::shared::directory::StackId;
use crate::stack::shared::host::Host;
use crate::stack::shared::outbox::Outbox;
use crate::tcp::{Config, LocalBudget};
use crate::time::Time;
use crate::wire::Flow;
use std::net::IpAddr;
use std::task::Waker;

/// What the groups of a stack use together.
pub(crate) struct Resources<P: Payload> {
    pub(crate) host: Host<P>,
    pub(crate) id: StackId,
    pub(crate) options: StackOptions,
    /// The time of the last poll.
    pub(crate) now: Time,
    pub(crate) egress: Egress<P::Mem>,
    /// The pages of the pool, from which users write.
    pub(crate) pages: SendPages,
    /// Received pages that connections, sockets and users may hold.
    pub(crate) budget: LocalBudget,
    /// Frames for other stacks.
    pub(crate) outbox: Outbox<P>,
    /// Wakers that are called at the end of the poll, when no table is borrowed. A waker that is
    /// dropped is put here, too: it could drop a socket, which borrows the tables.
    pub(crate) wakers: Vec<Waker>,
    /// The task that drives the stack.
    pub(crate) driver: Option<Waker>,
    /// The stack was dropped.
    pub(crate) gone: bool,
}

impl<P: Payload> Resources<P> {
    /// `waker` ends the sleep of the stack's thread.
    pub(crate) fn new(
        host: Host<P>,
        id: StackId,
        egress: Egress<P::Mem>,
        options: StackOptions,
        now: Time,
        waker: Waker,
    ) -> Self {
        Self {
            host,
            id,
            options,
            now,
            pages: SendPages::new(egress.pool.limit()),
            egress,
            budget: LocalBudget::waking(options.pages, waker),
            outbox: Outbox::new(),
            wakers: Vec::new(),
            driver: None,
            gone: false,
        }
    }

    /// Wakes the task that polls the stack, if there is one.
    pub(crate) fn wake_driver(&mut self) {
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    /// A user waits for pages. The next poll decides when it tries again.
    pub(crate) fn await_page(&mut self) {
        self.pages.asked = true;
        self.wake_driver();
    }

    /// The path to `destination`, if there is one.
    pub(crate) fn find_path(&mut self, destination: IpAddr) -> Option<Path<P>> {
        self.egress.stats.lookups += 1;
        Path::find(&self.host, destination, self.now)
    }

    /// Whether a socket can be bound to an address.
    pub(crate) fn check_local(&self, local: IpAddr) -> Result<(), SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        let ours = local.is_unspecified() || self.host.interface().owns(local);
        if ours { Ok(()) } else { Err(SocketError::NotOurs) }
    }

    /// The initial options of a connection on the link, if its path is not known yet.
    pub(crate) fn config(&self, config: &Config, flow: &Flow) -> Config {
        let mss = self.host.interface().mtu.saturating_sub(header_len(flow));
        let mut config = Config { mss, max_payload: mss, ..*config };
        if flow.local.is_ipv6() {
            // "IPv6 requires that every link in the Internet have an MTU of 1280 octets or
            // greater" (RFC 8200, section 5).
            let least = MIN_PATH_MTU_V6 - header_len(flow);
            config.default_mss = config.default_mss.max(least);
            config.send.path_floor = config.send.path_floor.max(least.into());
        }
        config
    }

    /// The initial options of a connection on a path.
    pub(crate) fn config_on(&self, config: &Config, path: &Path<P>, flow: &Flow) -> Config {
        Config { max_payload: self.max_payload(path, flow), ..self.config(config, flow) }
    }

    /// Bytes of payload of the longest segment on a path, without options.
    pub(crate) fn max_payload(&self, path: &Path<P>, flow: &Flow) -> u16 {
        path.mtu(self.now).saturating_sub(header_len(flow))
    }
}

/// Bytes of IP and TCP headers without options.
pub(crate) fn header_len(flow: &Flow) -> u16 {
    if flow.local.is_ipv4() { 40 } else { 60 }
}
