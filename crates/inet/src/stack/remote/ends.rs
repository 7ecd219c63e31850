//! The stack's ends of sockets of other threads: what goes from a ring to a connection, and back.
//!
//! Why the stack's own sockets do the work: a stream of another thread is one of the stack's thread,
//! whose calls come through rings. The connection knows nothing of it.

use crate::stack::core::Core;
use crate::stack::error::SocketError;
use crate::stack::remote::option::StreamOption;
use crate::stack::remote::parts::{
    ACCEPTED, HandleParts, Outgoing, PLACES, Source, StackParts, StreamPort, Unaccepted,
};
use crate::stack::remote::port::Asked;
use crate::stack::remote::ring::Sender;
use crate::stack::sockets;
use crate::stack::sockets::fragment::Fragment;
use crate::stack::transport::write::can_write;
use netmem_pool::Mapped;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A send buffer that has room for what a ring has.
const ROOM_FOR_ALL: usize = 1 << 30;

/// The stack's end of a stream.
pub(crate) struct StreamEnd<M: Mapped> {
    pub(crate) port: Arc<StreamPort<M>>,
    stream: sockets::stream::TcpStream<M>,
    parts: StackParts<M>,
    /// What the connection had no room for.
    blocked: Option<Outgoing<M>>,
    is_shut: bool,
    is_reset: bool,
    /// All that can be received is in the ring.
    is_read: bool,
    /// The stream waits for a page.
    awaits_page: bool,
}

impl<M: Mapped> StreamEnd<M> {
    pub(crate) fn new(port: Arc<StreamPort<M>>, stream: sockets::stream::TcpStream<M>, parts: StackParts<M>) -> Self {
        if let Some(entry) = stream.core.borrow_mut().tcp.connections.get_mut(stream.id) {
            entry.written.remote = Some(parts.pages.clone());
        }
        port.set_local(stream.local_addr());
        let (is_shut, is_reset, is_read, awaits_page) = Default::default();
        Self { port, stream, parts, blocked: None, is_shut, is_reset, is_read, awaits_page }
    }

    /// Moves payload between the rings and the connection. Returns false if the handle is gone, and
    /// this end is to be dropped.
    pub(crate) fn poll(&mut self) -> bool {
        // A request follows the payload that was pushed before it.
        let asked = self.port.asked();
        if asked.has(Asked::RESET) && !self.is_reset {
            self.stream.reset();
            self.is_reset = true;
        }
        if asked.has(Asked::READER_GONE.and(Asked::WRITER_GONE)) {
            self.close(asked);
            return false;
        }
        let waker = Waker::from(self.port.clone());
        let cx = &mut Context::from_waker(&waker);
        let is_drained = self.send(cx);
        // A connection that is shut down in its handshake is given up.
        if asked.has(Asked::SHUTDOWN) && is_drained && !self.is_shut && self.stream.is_connected() == Ok(true) {
            self.stream.shutdown();
            self.is_shut = true;
        }
        self.receive(cx);
        self.report(cx);
        self.offer_page(cx);
        true
    }

    /// The handle is gone. What it has sent is sent still, then FIN.
    fn close(&mut self, asked: Asked) {
        self.send_all();
        if asked.has(Asked::UNREAD) || !self.parts.received.is_empty() {
            self.stream.reset();
        }
    }

    /// Moves all payload from the ring to the connection, because it will be closed. The ring has few
    /// places, so this needs no bound, and no peer can keep this end by reading nothing.
    pub(crate) fn send_all(&mut self) {
        self.stream.set_send_buffer(ROOM_FOR_ALL);
        self.send(&mut Context::from_waker(Waker::noop()));
    }

    /// Moves payload from the ring to the connection, as much as it has room for. Returns whether
    /// nothing is left.
    fn send(&mut self, cx: &mut Context<'_>) -> bool {
        let is_drained = loop {
            let Some(next) = self.blocked.take().or_else(|| self.parts.sent.pop()) else {
                if self.parts.sent.wait_for_items() {
                    break true;
                }
                continue;
            };
            if let Err(next) = self.send_next(next) {
                self.blocked = Some(next);
                let _: Poll<()> = self.stream.wait_to_write(cx);
                break false;
            }
        };
        if self.parts.sent.release() {
            self.port.wake_writer();
        }
        is_drained
    }

    /// # Errors
    ///
    /// Returns the payload: the connection has no room.
    fn send_next(&mut self, next: Outgoing<M>) -> Result<(), Outgoing<M>> {
        let (frag, more, source) = match next {
            Outgoing::Set(option) => {
                self.set(option);
                return Ok(());
            }
            Outgoing::Payload { frag, more, source } => (frag, more, source),
        };
        let len = frag.len();
        let sent = match self.stream.send_chunk(frag, more) {
            Err((SocketError::WouldBlock, frag)) => return Err(Outgoing::Payload { frag, more, source }),
            // A connection that has ended sends nothing.
            outcome => outcome.is_ok(),
        };
        let Source::Copied { fills } = source else { return Ok(()) };
        let Core { tcp, resources, .. } = &mut *self.stream.core.borrow_mut();
        match tcp.connections.get_mut(self.stream.id) {
            Some(entry) if sent => {
                resources.egress.stats.copied_sent += len as u64;
                let end = entry.connection.send_end();
                entry.written.restore(usize::from(fills), end);
            }
            _ => self.parts.pages.release(u32::from(fills)),
        }
        Ok(())
    }

    fn set(&mut self, option: StreamOption) {
        let stream = &mut self.stream;
        match option {
            StreamOption::NoDelay(nodelay) => stream.set_nodelay(nodelay),
            StreamOption::Cork(cork) => stream.set_cork(cork),
            StreamOption::QuickAck(quick) => stream.set_quick_ack(quick),
            StreamOption::KeepAlive(keep_alive) => stream.set_keep_alive(keep_alive),
            StreamOption::UserTimeout(timeout) => stream.set_user_timeout(timeout),
            StreamOption::SendBuffer(bytes) => stream.set_send_buffer(bytes),
            StreamOption::Ip(ip) => stream.set_ip(ip),
        }
    }

    /// Moves payload from the connection to the ring, as much as it has room for.
    fn receive(&mut self, cx: &mut Context<'_>) {
        let ring = &mut self.parts.received;
        let mut places = [const { None }; PLACES].map(|_: Option<()>| Fragment::default());
        let mut end = None;
        while !self.is_read {
            let room = ring.room();
            if room == 0 {
                if ring.publish() {
                    self.port.wake_reader();
                }
                if ring.wait_for_room() {
                    // The writer learns of the end although the reader does not read.
                    let _: Poll<()> = self.stream.wait_to_write(cx);
                    break;
                }
                continue;
            }
            match self.stream.recv(&mut places[..room]) {
                Ok(filled @ 1..) => {
                    for place in &mut places[..filled] {
                        let pushed = ring.push(std::mem::take(place));
                        debug_assert!(pushed.is_ok());
                    }
                }
                Err(SocketError::WouldBlock) => {
                    self.stream.register_reader(cx);
                    break;
                }
                outcome => {
                    end = Some(outcome.map(|_| ()));
                    self.is_read = true;
                }
            }
        }
        if ring.publish() {
            self.port.wake_reader();
        }
        // The end follows the payload.
        if let Some(end) = end {
            self.port.finish_reading(end);
        }
        if self.is_read {
            // The writer learns of the end, too.
            self.stream.register_reader(cx);
        }
    }

    /// Notifies the handle of the connection's state.
    fn report(&mut self, cx: &mut Context<'_>) {
        match self.stream.is_connected() {
            Ok(true) => self.port.set_connected(),
            Ok(false) => {
                let _: Poll<()> = self.stream.wait_to_write(cx);
            }
            Err(error) => self.port.fail(error),
        }
    }

    /// Wakes a writer that waits for a page, if there is one.
    fn offer_page(&mut self, cx: &mut Context<'_>) {
        self.awaits_page |= self.port.take(Asked::PAGE);
        if !self.awaits_page {
            return;
        }
        let mut guard = self.stream.core.borrow_mut();
        let Core { tcp, resources, .. } = &mut *guard;
        self.awaits_page = !can_write(&mut tcp.connections, resources, self.stream.id);
        drop(guard);
        if self.awaits_page {
            let _: Poll<()> = self.stream.wait_to_write(cx);
        } else {
            self.port.wake_writer();
        }
    }
}

/// The stack's end of a listener.
pub(crate) struct ListenerEnd<M: Mapped> {
    pub(crate) port: Arc<StreamPort<M>>,
    listener: sockets::listener::TcpListener<M>,
    accepted: Sender<Unaccepted<M>, ACCEPTED>,
}

impl<M: Mapped> ListenerEnd<M> {
    pub(crate) fn new(
        port: Arc<StreamPort<M>>,
        listener: sockets::listener::TcpListener<M>,
        accepted: Sender<Unaccepted<M>, ACCEPTED>,
    ) -> Self {
        port.set_local(listener.local_addr());
        port.set_connected();
        Self { port, listener, accepted }
    }

    /// Accepts connections, as many as the ring has room for. `adopt` makes the stream for another
    /// thread of each. Returns false if the handle is gone, and this end is to be dropped.
    pub(crate) fn poll(&mut self, mut adopt: impl FnMut(sockets::stream::TcpStream<M>) -> HandleParts<M>) -> bool {
        if self.port.asked().has(Asked::READER_GONE) {
            return false;
        }
        let waker = Waker::from(self.port.clone());
        let cx = &mut Context::from_waker(&waker);
        let mut end = None;
        while end.is_none() {
            if self.accepted.room() == 0 {
                if self.accepted.publish() {
                    self.port.wake_reader();
                }
                if self.accepted.wait_for_room() {
                    break;
                }
                continue;
            }
            match self.listener.poll_accept(cx) {
                Poll::Ready(Ok(stream)) => {
                    let pushed = self.accepted.push(Unaccepted::new(adopt(stream)));
                    debug_assert!(pushed.is_ok());
                }
                Poll::Ready(Err(error)) => end = Some(error),
                Poll::Pending => break,
            }
        }
        if self.accepted.publish() {
            self.port.wake_reader();
        }
        if let Some(error) = end {
            self.port.fail(error);
            self.port.finish_reading(Err(error));
        }
        true
    }
}
