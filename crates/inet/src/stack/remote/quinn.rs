//! quinn's trait for sockets, so that QUIC runs on the stack's UDP.
//!
//! quinn runs on a runtime of any number of threads; the stack's thread is none of them.
//! `quinn::Endpoint::new_with_abstract_socket` has the socket, which must be
//! [bound](UdpSocket::poll_bound) before.

use crate::stack::error::SocketError;
use crate::stack::remote::udp::{DatagramOptions, UdpSocket};
use netmem_pool::Mapped;
use quinn::udp::{EcnCodepoint, RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A task that waits until the socket can send.
#[derive(Debug)]
struct Writable<M: Mapped>(Arc<UdpSocket<M>>);

impl<M: Mapped> UdpPoller for Writable<M> {
    fn poll_writable(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_writable(cx).map_err(io::Error::from)
    }
}

impl<M: Mapped> AsyncUdpSocket for UdpSocket<M> {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable(self))
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let Transmit { destination, ecn, contents, segment_size, src_ip } = *transmit;
        let ecn = ecn.map_or(0, |ecn| ecn as u8);
        Ok(self.send_to(contents, destination, &DatagramOptions { from: src_ip, ecn, segment_size })?)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut filled = 0;
        for (buf, meta) in bufs.iter_mut().zip(meta) {
            // Only the first one waits.
            let received = if filled == 0 { self.poll_recv_from(cx, buf) } else { Poll::Ready(self.recv_from(buf)) };
            let group = match received {
                Poll::Ready(Ok(group)) => group,
                Poll::Ready(Err(error)) if filled == 0 => return Poll::Ready(Err(error.into())),
                Poll::Ready(Err(_)) => break,
                Poll::Pending => return Poll::Pending,
            };
            *meta = RecvMeta {
                addr: group.from,
                len: group.len,
                stride: group.stride,
                ecn: EcnCodepoint::from_bits(group.ecn),
                dst_ip: Some(group.to),
            };
            filled += 1;
        }
        Poll::Ready(Ok(filled))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        UdpSocket::local_addr(self).ok_or_else(|| SocketError::NotConnected.into())
    }

    fn max_transmit_segments(&self) -> usize {
        self.max_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.max_segments()
    }

    /// Datagrams that are longer than the path's MTU are dropped, so quinn can search for it.
    fn may_fragment(&self) -> bool {
        false
    }
}
