//! The stack's end of a socket for datagrams of another thread.

use crate::stack::remote::parts::{DatagramParts, Prepared, StreamPort};
use crate::stack::remote::port::Asked;
use crate::stack::remote::waiting::PageRequests;
use crate::stack::sockets::udp::UdpSocket;
use netmem_pool::Mapped;
use std::sync::Arc;
use std::task::{Context, Waker};

/// The stack's end of a socket for datagrams.
pub(crate) struct DatagramEnd<M: Mapped> {
    pub(crate) port: Arc<StreamPort<M>>,
    socket: UdpSocket<M>,
    parts: Box<DatagramParts<M>>,
    requests: PageRequests,
}

impl<M: Mapped> DatagramEnd<M> {
    pub(crate) fn new(port: Arc<StreamPort<M>>, socket: UdpSocket<M>, parts: Box<DatagramParts<M>>) -> Self {
        port.set_local(socket.local_addr());
        port.set_connected();
        Self { port, socket, parts, requests: PageRequests::default() }
    }

    /// Moves datagrams between the rings and the socket. Returns false if the handle is gone, and
    /// this end is to be dropped.
    pub(crate) fn poll(&mut self) -> bool {
        // A request follows what was pushed before it.
        let asked = self.port.asked();
        let waker = Waker::from(self.port.clone());
        let cx = &mut Context::from_waker(&waker);
        let is_drained = self.send(cx);
        if asked.has(Asked::READER_GONE) && is_drained {
            return false;
        }
        self.receive(cx);
        self.offer_pages(cx);
        true
    }

    /// Moves datagrams from the ring to the outbox, as many as it has room for. Returns whether
    /// none is left.
    fn send(&mut self, cx: &mut Context<'_>) -> bool {
        let is_drained = loop {
            if !self.socket.has_room(cx) {
                break false;
            }
            match self.parts.sent.pop() {
                Some(Prepared { packet, pages, to, from, manner }) => {
                    self.parts.pages.release(pages);
                    self.socket.send_prepared((packet, pages as usize), to, from, manner);
                }
                None if self.parts.sent.wait_for_items() => break true,
                None => {}
            }
        };
        if self.parts.sent.release() {
            self.port.wake_writer();
        }
        is_drained
    }

    /// Moves received datagrams to the ring, as many as it has room for. Others wait in the socket.
    fn receive(&mut self, cx: &mut Context<'_>) {
        let ring = &mut self.parts.received;
        loop {
            if ring.room() == 0 {
                if ring.publish() {
                    self.port.wake_reader();
                }
                if ring.wait_for_room() {
                    return;
                }
                continue;
            }
            let Some(datagram) = self.socket.pop(cx) else { break };
            let pushed = ring.push(datagram);
            debug_assert!(pushed.is_ok());
        }
        if ring.publish() {
            self.port.wake_reader();
        }
    }

    /// Wakes writers that wait for pages, if there are as many as one of them needs.
    ///
    /// If the pool is empty although the counts admit them, they are not woken before the wait of
    /// the socket has ended once: they would find nothing, and ask again at once.
    fn offer_pages(&mut self, cx: &mut Context<'_>) {
        let Some((wanted, of_pool)) = self.requests.poll(&self.port, &self.parts.wanted) else { return };
        if of_pool || self.socket.awaits_page(cx) || !self.parts.pages.admits(wanted) {
            self.socket.wait_for_pages(cx, wanted as usize);
        } else {
            self.requests.answer(&self.port);
        }
    }
}
