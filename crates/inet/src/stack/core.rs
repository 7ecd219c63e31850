//! The groups of a stack, which its sockets share with it.
//!
//! ```text
//!   Core ──► Tcp: Connections, Listeners, Schedule (timers)
//!        ──► Datagrams
//!        ──► Fragments
//!        ──► Resources: host, time, egress, pages, budgets, wakers
//! ```
//!
//! Each group has its tables, and the calls that change them. What all groups use together is an
//! argument of those calls.

use crate::stack::control::Control;
use crate::stack::fragments::Fragments;
use crate::stack::payload::{Payload, Transmit};
use crate::stack::resources::Resources;
use crate::stack::shared::mailbox::Mailbox;
use crate::stack::transport::datagrams::Datagrams;
use crate::stack::transport::handles::{ConnectionId, ListenerId};
use crate::stack::transport::process::Process;
use crate::stack::transport::tcp::Tcp;
use crate::time::Time;
use netmem_packet::TxQueue;
use std::cell::RefCell;
use std::mem;
use std::rc::Rc;
use std::task::Waker;

/// The groups of a stack.
pub(crate) struct Core<P: Payload> {
    pub(crate) resources: Resources<P>,
    pub(crate) tcp: Tcp<P>,
    pub(crate) datagrams: Datagrams<P::Mem>,
    pub(crate) fragments: Fragments<P::Mem>,
    /// The number of changes of neighbours that connections have been notified of
    /// ([`Host::hop_changes`](crate::stack::shared::host::Host::hop_changes)).
    hop_changes: u64,
}

/// The groups of a stack, as its sockets have them.
pub(crate) type SharedCore<P> = Rc<RefCell<Core<P>>>;

impl<P: Payload> Core<P> {
    pub(crate) fn new(resources: Resources<P>) -> Self {
        Self {
            tcp: Tcp::new(resources.now),
            datagrams: Datagrams::new(),
            fragments: Fragments::new(resources.options.pages, &resources.budget),
            hop_changes: resources.host.hop_changes(),
            resources,
        }
    }

    /// Whether there is work for the next poll.
    pub(crate) fn has_work(&self) -> bool {
        let Self { resources: Resources { host, egress, pages, .. }, tcp, datagrams, .. } = self;
        let hops = tcp.schedule.waits_for_hops() && self.hop_changes != host.hop_changes();
        // A connection that a call has woken, and did nothing with, is to become idle again.
        let is_due = tcp.schedule.is_due() || tcp.connections.has_woken();
        is_due || hops || pages.asked || !egress.loopback.is_empty() || datagrams.has_work()
    }

    /// Whether a packet or a connection waits for the transmit queue.
    pub(crate) fn is_blocked(&self) -> bool {
        self.tcp.schedule.waits_for_ring() || self.datagrams.is_blocked()
    }

    /// When the first timer fires or moves. It is now if there is work.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        if self.has_work() {
            return Some(self.resources.now);
        }
        let own = [self.tcp.schedule.poll_timeout(), self.fragments.poll_timeout(), self.datagrams.poll_timeout()];
        let shared = [self.resources.pages.poll_timeout(), self.resources.host.neighbors_due()];
        own.into_iter().chain(shared).flatten().min()
    }

    /// The part of a poll that follows the received frames: runs timers, and sends what is due.
    /// `completed`: transmissions that the device has completed in this poll. Returns the amount of
    /// work.
    pub(crate) fn poll<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, completed: usize, mailbox: &Mailbox<P>) -> usize
    where
        P: Transmit<T>,
    {
        let mut work = Control { resources: &mut self.resources, tx }.poll_neighbors();
        self.resources.pages.asked = false;
        self.check_hops();
        self.fragments.handle_timeout(self.resources.now);
        let Self { resources, tcp, datagrams, .. } = self;
        work += Process { tcp, resources, tx }.poll(completed);
        work += datagrams.poll_transmit(resources, tx, completed);
        // The packets that were just sent may need a neighbour's address.
        Control { resources, tx }.poll_neighbors();
        mailbox.set_awaits_hop(tcp.schedule.waits_for_hops());
        tx.flush();
        if resources.pages.is_awaited() {
            Process { tcp, resources, tx }.wake_writers();
        }
        work + completed
    }

    /// Enqueues connections that wait for a next hop, if a stack of the host has reported a change
    /// of a neighbour.
    fn check_hops(&mut self) {
        let changes = self.resources.host.hop_changes();
        if mem::replace(&mut self.hop_changes, changes) != changes {
            self.tcp.schedule.handle_hop_change(&mut self.tcp.connections);
        }
    }

    /// The user has called a connection's socket: the connection is processed in the next poll.
    pub(crate) fn touch(&mut self, id: ConnectionId) {
        self.tcp.touch(&mut self.resources, id);
    }

    /// The owner of a connection releases it: the connection is closed, or reset.
    pub(crate) fn orphan(&mut self, id: ConnectionId, abort: bool) {
        self.tcp.orphan(&mut self.resources, id, abort);
    }

    /// The user has dropped a listener. Connections that were not accepted are reset.
    pub(crate) fn unlisten(&mut self, id: ListenerId) {
        self.tcp.unlisten(&mut self.resources, id);
    }

    /// The user closes the stack: all sockets are closed.
    pub(crate) fn close(&mut self) {
        for listener in self.tcp.listeners.ids() {
            self.unlisten(listener);
        }
        for id in self.tcp.connections.ids(|_| true) {
            self.orphan(id, false);
        }
    }

    /// The stack is dropped: everything ends. Returns the wakers to call.
    pub(crate) fn end(&mut self) -> Vec<Waker> {
        let Self { resources, tcp, .. } = self;
        resources.gone = true;
        tcp.end(resources);
        resources.egress.loopback.clear();
        resources.outbox.clear();
        resources.host.leave(resources.id);
        mem::take(&mut resources.wakers)
    }
}
