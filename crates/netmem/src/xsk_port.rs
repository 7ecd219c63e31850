//! A port of the virtio-net device that is a queue of a network interface: a virtual machine
//! reaches the wire without a tap.

use netmem_packet::{Armed, Packet, Poll, RxQueue, TxQueue, Wait};
use netmem_pool::{KernelShared, PoolOptions, SharedPool};
use netmem_virtio::device::port::{MAX_WIRE, Port, PortError};
use netmem_virtio::net::VnetHdr;
use netmem_xsk::{Program, ProgramOptions, Promiscuous, QueueOptions, Xsk, XskError, XskOptions, XskRx, XskTx};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Frames that are received at a time, and sent before the kernel is notified.
const FRAMES_PER_CALL: usize = 64;
/// Frames that are dropped at most when a front end has left: more than a ring holds.
const WAITING: usize = 65_536;
/// Pages of a queue: twice a transmit ring, and what the kernel has to receive into.
const PAGES: usize = 8192;
/// Pages of them that frames from the driver are copied into.
const SENT: usize = 4096;

/// A queue pair of AF_XDP as the [port](Port) of a queue pair of a virtio-net device. Needs the
/// features `device` and `xsk`.
///
/// It accepts and delivers plain frames only. What the driver leaves to the device is therefore
/// done in software, by the device: checksums are completed and segments are cut before a frame
/// comes here, and none leaves incomplete.
///
/// A frame from the interface is copied once, out of the UMEM into the driver's buffers: its header
/// is written into the headroom in front of it. A frame from the driver is copied into the UMEM,
/// after the device has read it from the ring and checked it.
///
/// The interface is to have its segmentation offloads for received frames off
/// (`ethtool -K IFACE gro off lro off`), and a veth peer its checksum and segmentation offloads:
/// frames that the kernel left incomplete are not marked in AF_XDP.
#[derive(Debug)]
pub struct XskPort {
    rx: XskRx<KernelShared>,
    tx: XskTx<KernelShared>,
    pages: Arc<SharedPool<KernelShared>>,
    /// Received frames; the first may have been shown.
    waiting: VecDeque<Packet<KernelShared>>,
    shown: Shown,
    /// What is to end with the last of the interface's ports.
    _interface: Option<Arc<Interface>>,
    /// A frame in wire form, if it cannot be shown where it lies.
    wire: Vec<u8>,
    /// Frames that were queued since the kernel was notified.
    queued: usize,
}

/// Where the first of the waiting frames is in wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Nowhere,
    /// In its own page, with the header in its headroom.
    InPlace,
    /// In memory of the port.
    Copied,
}

/// What all ports of an interface need.
#[derive(Debug)]
struct Interface {
    // First, so that the program leaves before the sockets do, if it can.
    _program: Option<Program>,
    _promiscuous: Promiscuous,
}

impl XskPort {
    /// Ports of the interface `name`, one for each of `queues`; without them, for each queue that
    /// is in use. The interface then receives frames for every MAC address, and `program` brings
    /// them here. `queue` is called for the options of each queue.
    ///
    /// # Errors
    ///
    /// [`PortError::Other`] has an [`XskError`](netmem_xsk::XskError).
    pub fn open(
        name: &str,
        queues: Option<Vec<u32>>,
        program: ProgramOptions,
        queue: impl Fn(u32) -> QueueOptions,
    ) -> Result<Vec<Self>, PortError> {
        let open = || {
            let options = XskOptions::new(name).pages(PAGES).program(program);
            let options = queues.into_iter().fold(options, XskOptions::queues);
            let xsk = Xsk::<KernelShared>::open(options, queue)?;
            let ifindex = xsk.pairs.first().map_or(0, |(rx, _)| rx.socket().ifindex());
            let promiscuous = Promiscuous::new(ifindex)
                .map_err(|source| XskError::System { step: "receive frames for every address", source })?;
            let mut pools = Vec::with_capacity(xsk.pairs.len());
            for _ in 0..xsk.pairs.len() {
                pools.push(Arc::new(xsk.pool(PoolOptions::new(name).limit(SENT))?));
            }
            let Xsk { program, pairs, .. } = xsk;
            let interface = Arc::new(Interface { _program: program, _promiscuous: promiscuous });
            let port = |((rx, tx), pages)| Self { _interface: Some(interface.clone()), ..Self::new(rx, tx, pages) };
            Ok(pairs.into_iter().zip(pools).map(port).collect())
        };
        open().map_err(|e: XskError| PortError::Other(Box::new(e)))
    }

    /// A port of the two halves of a socket. `pages` are of the same UMEM: frames from the driver
    /// are copied into them.
    ///
    /// Note: a socket of another network namespace is not watched, so a sleeping thread is not
    /// woken when its interface goes; the port notices it with the next frame from the driver.
    pub fn new(rx: XskRx<KernelShared>, tx: XskTx<KernelShared>, pages: Arc<SharedPool<KernelShared>>) -> Self {
        let (waiting, wire) = (VecDeque::with_capacity(FRAMES_PER_CALL), Vec::new());
        Self { rx, tx, pages, waiting, shown: Shown::Nowhere, _interface: None, wire, queued: 0 }
    }

    /// The two halves, for their counters.
    pub fn queues(&self) -> (&XskRx<KernelShared>, &XskTx<KernelShared>) {
        (&self.rx, &self.tx)
    }

    fn receive(&mut self) -> usize {
        let Self { rx, tx, waiting, .. } = self;
        rx.poll(|poll| {
            // In the poll context, and before pages are allocated.
            tx.complete();
            poll.receive(FRAMES_PER_CALL, &mut |packet: Packet<KernelShared>| {
                if packet.len() + VnetHdr::LEN <= MAX_WIRE {
                    waiting.push_back(packet);
                }
            })
        })
    }

    /// Puts the first waiting frame into wire form.
    fn show(&mut self) {
        let Some(packet) = self.waiting.front_mut() else { return };
        let header = VnetHdr { num_buffers: 1, ..VnetHdr::PLAIN }.to_bytes();
        if packet.frags().is_empty() && packet.prepend(&header) {
            self.shown = Shown::InPlace;
            return;
        }
        self.wire.clear();
        self.wire.extend_from_slice(&header);
        packet.fragments().for_each(|frag| self.wire.extend_from_slice(frag));
        self.shown = Shown::Copied;
    }

    /// The frame in pages of the UMEM.
    fn packet(&self, frame: &[u8]) -> Option<Packet<KernelShared>> {
        let mut packet: Option<Packet<KernelShared>> = None;
        let mut rest = frame;
        while !rest.is_empty() {
            let mut page = self.pages.alloc()?;
            let (now, later) = rest.split_at(rest.len().min(page.len()));
            page.as_mut_slice()[..now.len()].copy_from_slice(now);
            let frag = page.freeze_range(0..now.len());
            match &mut packet {
                None => packet = Some(Packet::new(frag)),
                Some(packet) => packet.push(frag).ok()?,
            }
            rest = later;
        }
        packet
    }

    fn flush(&mut self) {
        if self.queued > 0 {
            self.tx.flush();
            self.queued = 0;
        }
    }
}

impl Port for XskPort {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = 0;

    #[inline]
    fn peek(&mut self) -> Option<&[u8]> {
        if self.shown == Shown::Nowhere {
            if self.waiting.is_empty() {
                self.receive();
            }
            self.show();
        }
        match self.shown {
            Shown::Nowhere => None,
            Shown::InPlace => self.waiting.front().map(|packet| &packet.head()[..]),
            Shown::Copied => Some(&self.wire),
        }
    }

    #[inline]
    fn consume(&mut self) {
        self.shown = Shown::Nowhere;
        drop(self.waiting.pop_front());
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        let frame = wire.get(VnetHdr::LEN..).unwrap_or_default();
        for last in [false, true] {
            if let Some(packet) = self.packet(frame)
                && self.tx.send(packet).is_ok()
            {
                self.queued += 1;
                if self.queued == FRAMES_PER_CALL {
                    self.flush();
                }
                return true;
            }
            if !last {
                // No page, or no room in the ring: what the kernel is done with has both.
                self.flush();
                self.tx.complete();
            }
        }
        false
    }

    /// Before each pass, and so after the last one that sent, and after a sleep.
    #[inline]
    fn served(&mut self, _: bool) {
        self.flush();
        self.rx.disarm();
    }

    fn drop_waiting(&mut self) -> u64 {
        self.shown = Shown::Nowhere;
        let mut dropped = 0;
        while dropped < WAITING {
            dropped += self.waiting.drain(..).count();
            if self.receive() == 0 {
                break;
            }
        }
        dropped as u64
    }

    fn arm(&mut self) -> bool {
        self.flush();
        self.peek().is_some() || !matches!(self.rx.arm(), Ok(Armed::Waits))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.rx.as_fd())
    }

    /// While the queue is not armed, only the end of the interface makes it readable.
    fn failure(&self) -> Option<BorrowedFd<'_>> {
        Some(self.rx.as_fd())
    }

    fn take_error(&mut self) -> Option<PortError> {
        // The halves then report it, too. A queue that is neither polled nor armed has not checked.
        let _ = self.rx.socket().is_gone();
        let error = self.rx.check().and_then(|()| self.tx.check()).err()?;
        Some(PortError::Other(Box::new(error)))
    }
}
