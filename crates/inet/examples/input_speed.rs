//! What the input of a stack costs: a queue lends groups of datagrams to a stack, for a socket of
//! this stack (`own`), or of another stack of the host (`handed over`, on both stacks). All take
//! turns on one thread, so that instructions can be counted:
//! `valgrind --tool=callgrind --toggle-collect='*input_speed::timed*'`. Run with
//! `cargo run --release -p netmem-inet --example input_speed [ROW [ROUNDS]]`.
#![allow(clippy::unwrap_used)]

use etherparse::PacketBuilder;
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Fragment, Host, Interface, Stack, StackOptions, Time, UdpSocket};
use netmem_packet::{
    Armed, Checksum, FrameCounts, Handler, Packet, Poll, Reach, RxGroup, RxQueue, Sendable, TxQueue, Wait,
};
use netmem_pool::{DataPage, Frag, Napi, PagePool, PoolOptions, Private, RegionOptions, RegionProvider};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

const ADDRESS: [u8; 4] = [10, 0, 0, 1];
const PORT: u16 = 53;
/// Frames in a poll.
const FRAMES: usize = 64;

/// A queue that lends the same frame again and again.
struct Lender {
    pool: PagePool<Private>,
    /// Frames in a group.
    group: usize,
    frames: Vec<Option<DataPage<Private>>>,
    event: OwnedFd,
}

struct Lending<'a> {
    napi: Napi<'a, Private>,
    group: usize,
    frames: &'a mut Vec<Option<DataPage<Private>>>,
}

impl Lender {
    fn new(group: usize) -> Self {
        let pool = PoolOptions::new("rx").build(provider(), None).unwrap();
        Self { pool, group, frames: Vec::new(), event: eventfd(0, EventfdFlags::NONBLOCK).unwrap() }
    }

    /// Fills `frames` frames, which the next poll receives.
    fn fill(&mut self, frame: &[u8], frames: usize) {
        let Self { pool, frames: filled, .. } = self;
        pool.poll(|napi| {
            filled.clear();
            filled.extend((0..frames).map(|_| {
                let mut page = napi.alloc().unwrap();
                page.copy_from(0, frame).unwrap();
                Some(DataPage::new(page, 0, frame.len()))
            }));
        });
    }
}

impl RxQueue for Lender {
    type Mem = Private;
    type Poll<'a> = Lending<'a>;

    fn poll<R>(&mut self, f: impl FnOnce(&mut Lending<'_>) -> R) -> R {
        let Self { pool, group, frames, .. } = self;
        pool.poll(|napi| f(&mut Lending { napi: napi.reborrow(), group: *group, frames }))
    }
}

impl Poll for Lending<'_> {
    type Mem = Private;

    fn receive<H: Handler<Private>>(&mut self, _: usize, handler: &mut H) -> usize {
        let mut counts = FrameCounts::default();
        for group in self.frames.chunks_mut(self.group) {
            let bytes = group.iter().flatten().map(|page| page.data().len() as u64).sum();
            handler.run_batch(&mut RxGroup::new(group, bytes, Checksum::Verified, &mut counts));
        }
        self.frames.clear();
        handler.flush();
        counts.frames as usize
    }

    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, Private>) -> R) -> R {
        f(&mut self.napi)
    }
}

/// A queue that completes each packet at once.
struct Sink(OwnedFd);

impl TxQueue for Sink {
    type Mem = Private;

    fn send(&mut self, _: Packet<Private>) -> Result<(), Packet<Private>> {
        Ok(())
    }

    fn sendable(&self, _: &Packet<Private>) -> Sendable {
        Sendable::Now
    }

    fn flush(&mut self) {}

    fn complete(&mut self) -> usize {
        0
    }

    fn reach(&self, _: &Frag<Private>) -> Reach {
        Reach::Mapped(0)
    }
}

impl AsFd for Lender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Wait for Lender {
    fn arm(&mut self) -> io::Result<Armed> {
        Ok(Armed::Waits)
    }
    fn disarm(&mut self) {}
    fn check(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Wait for Sink {
    fn arm(&mut self) -> io::Result<Armed> {
        Ok(Armed::Waits)
    }
    fn disarm(&mut self) {}
    fn check(&self) -> io::Result<()> {
        Ok(())
    }
}

fn provider() -> Arc<RegionProvider<Private>> {
    RegionProvider::new(RegionOptions::new(1024).huge_pages(false).build::<Private>().unwrap())
}

#[inline(never)]
fn timed(turn: impl FnOnce()) -> f64 {
    let start = Instant::now();
    turn();
    start.elapsed().as_nanos() as f64
}

/// The socket is on stack `owner`; the frames arrive by the queue of stack 0.
fn row(what: &str, owner: usize, frames: usize, rounds: usize) {
    let addresses = vec![Address { addr: IpAddr::from(ADDRESS), prefix_len: 24 }];
    let host = Host::new(Interface { mac: Mac([2, 0, 0, 0, 0, 1]), mtu: 1500, addresses });
    let pool = Arc::new(PoolOptions::new("tx").build_shared(provider(), None).unwrap());
    let mut stacks: Vec<_> = (0..=owner)
        .map(|_| {
            let tx = Sink(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
            Stack::new(&host, Lender::new(FRAMES), tx, pool.clone(), StackOptions::default(), Time::ZERO).unwrap()
        })
        .collect();
    let mut socket: UdpSocket<Private> = stacks[owner].sockets().bind((Ipv4Addr::from(ADDRESS), PORT).into()).unwrap();
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 1]);
    builder.ipv4([10, 0, 0, 9], ADDRESS, 64).udp(1000, PORT).write(&mut frame, &[7; 100]).unwrap();
    let mut places: [Fragment<Private>; 1] = Default::default();
    let mut turns = Vec::with_capacity(rounds);
    for round in 0..rounds {
        let now = Time::from_micros(round as u64);
        stacks[0].queues().0.fill(&frame, frames);
        let ns = timed(|| stacks.iter_mut().for_each(|stack| _ = stack.poll(now)));
        turns.push(ns / frames as f64);
        let received = std::iter::from_fn(|| socket.recv_from(&mut places).ok()).count();
        assert_eq!(received, frames, "{:?}", stacks[0].stats());
        places = Default::default();
    }
    turns.sort_by(f64::total_cmp);
    println!("{what:<24} {:8.2} ns a frame, {:8.2} in the best tenth", turns[rounds / 2], turns[rounds / 10]);
}

fn main() {
    let mut args = std::env::args().skip(1);
    let only = args.next().unwrap_or_default();
    let rounds = args.next().map_or(20_000, |n| n.parse().unwrap());
    for frames in [FRAMES, 8, 1] {
        for (what, owner) in [("own", 0), ("handed over", 1)] {
            let what = format!("{what} {frames}");
            if only.is_empty() || what == only {
                row(&what, owner, frames, rounds);
            }
        }
    }
}
