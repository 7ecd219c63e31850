//! Two sockets in memory: a transfer between them costs what quinn and rustls cost.

use super::ends::{self, Certificate, Side};
use quinn::udp::{EcnCodepoint, RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Endpoint, EndpointConfig, TokioRuntime, UdpPoller};
use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

/// Datagrams that a direction holds: more than may be in flight. Others would be lost.
const MOST: usize = 4096;
/// Datagrams of a group, as many as netmem's socket has.
const SEGMENTS: usize = 32;

/// A group of datagrams on its way.
struct Group {
    bytes: Vec<u8>,
    size: usize,
    ecn: Option<EcnCodepoint>,
}

#[derive(Default)]
struct Direction {
    groups: VecDeque<Group>,
    datagrams: usize,
    reader: Option<Waker>,
}

/// One end.
struct Memory {
    local: SocketAddr,
    peer: SocketAddr,
    inward: Arc<Mutex<Direction>>,
    outward: Arc<Mutex<Direction>>,
}

fn lock(direction: &Mutex<Direction>) -> MutexGuard<'_, Direction> {
    direction.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({})", self.local)
    }
}

/// A direction never refuses.
#[derive(Debug)]
struct Writable;

impl UdpPoller for Writable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl AsyncUdpSocket for Memory {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let size = transmit.segment_size.unwrap_or(transmit.contents.len()).max(1);
        let datagrams = transmit.contents.len().div_ceil(size);
        let mut outward = lock(&self.outward);
        if outward.datagrams + datagrams > MOST {
            return Ok(());
        }
        outward.datagrams += datagrams;
        outward.groups.push_back(Group { bytes: transmit.contents.to_vec(), size, ecn: transmit.ecn });
        let reader = outward.reader.take();
        drop(outward);
        reader.into_iter().for_each(Waker::wake);
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut inward = lock(&self.inward);
        let mut filled = 0;
        for (buf, meta) in bufs.iter_mut().zip(meta) {
            let Some(Group { bytes, size, ecn }) = inward.groups.pop_front() else { break };
            inward.datagrams -= bytes.len().div_ceil(size);
            buf[..bytes.len()].copy_from_slice(&bytes);
            *meta = RecvMeta { addr: self.peer, len: bytes.len(), stride: size, ecn, dst_ip: Some(self.local.ip()) };
            filled += 1;
        }
        if filled > 0 {
            return Poll::Ready(Ok(filled));
        }
        inward.reader = Some(cx.waker().clone());
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    fn max_transmit_segments(&self) -> usize {
        SEGMENTS
    }

    fn max_receive_segments(&self) -> usize {
        SEGMENTS
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

/// Sends or fetches so many MiB in memory, each end on a thread, and prints what each has cost.
pub(crate) fn measure(put: bool, mib: u64) -> anyhow::Result<()> {
    let (there, back) = (Arc::default(), Arc::default());
    let [near, far] = [1, 2].map(|number| SocketAddr::from(([192, 0, 2, number], super::PORT)));
    let client = Memory { local: near, peer: far, inward: Arc::clone(&back), outward: Arc::clone(&there) };
    let server = Memory { local: far, peer: near, inward: there, outward: back };
    let own = Certificate::new()?;
    let trusted = own.der().to_vec();
    let server = thread::spawn(move || -> anyhow::Result<()> {
        ends::runtime()?.block_on(ends::serve(Arc::new(server), &own, 1, Side::Thread))
    });
    ends::runtime()?.block_on(async {
        let runtime = Arc::new(TokioRuntime);
        let endpoint = Endpoint::new_with_abstract_socket(EndpointConfig::default(), None, Arc::new(client), runtime)?;
        ends::transfer(&endpoint, far, &trusted, (put, mib << 20), Side::Thread).await
    })?;
    server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
