//! The jobs of `bench/peers/xsk.sh` on netmem's AF_XDP queues. The same jobs on xsk-rs are in
//! `bench/peers/xsk_rs`.
//!
//! | job | where a page is when its packet is done |
//! | --- | --- |
//! | drop | the program's verdict posts it again |
//! | echo | a completion drops it in the poll of the receive queue: in the cache of the queue's pool |
//! | thread | the second thread drops the packet |
//! | transmit | a completion drops it in the poll of the pool |

#[path = "../peers/meter.rs"]
mod meter;

use meter::{Arguments, BATCH, CHANNEL, Counts, FRAME, FRAMES, Job, RING, measure, pin, report, second};
use netmem_packet::{Handler, Packet, Poll, RxQueue, TxQueue, Verdict, XdpFrame};
use netmem_pool::{Frag, KernelShared, PagePool, PoolOptions, RegionOptions, RegionProvider};
use netmem_xsk::{BusyPoll, Interface, Mode, QueueOptions, Umem, UmemOptions, Xsk, XskOptions, XskRx, XskTx};
use quanta::Clock;
use rtrb::{Consumer, RingBuffer};
use std::error::Error;
use std::hint::black_box;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::thread;

struct Drop;

impl Handler<KernelShared> for Drop {
    const READS: bool = false;

    fn run(&mut self, _: &mut XdpFrame<KernelShared>) -> Verdict {
        Verdict::Drop
    }

    fn pass(&mut self, _: Packet<KernelShared>) {}
}

struct Echo(XskTx);

impl Handler<KernelShared> for Echo {
    fn run(&mut self, frame: &mut XdpFrame<KernelShared>) -> Verdict {
        let Some(addresses) = frame.data_mut().first_chunk_mut::<12>() else { return Verdict::Drop };
        let (to, from) = addresses.split_at_mut(6);
        to.swap_with_slice(from);
        Verdict::Tx
    }

    fn pass(&mut self, _: Packet<KernelShared>) {}

    #[inline(always)]
    fn tx(&mut self, packet: Packet<KernelShared>) {
        // A packet that there is no room for is dropped; the queue counts it.
        let _ = self.0.send(packet);
    }

    fn flush(&mut self) {
        self.0.flush();
    }
}

/// Keeps the fragments of a batch, unread. A frame is in one buffer, so that its packet is one
/// fragment: two words, where xsk-rs has a descriptor of four.
struct Batch(Vec<Frag<KernelShared>>);

impl Handler<KernelShared> for Batch {
    const READS: bool = false;

    fn pass(&mut self, packet: Packet<KernelShared>) {
        if let Ok(frag) = packet.into_head() {
            self.0.push(frag);
        }
    }
}

fn drop_all(mut rx: XskRx, clock: &Clock, arguments: &Arguments) -> Counts {
    measure(clock, arguments.time, || rx.poll(|poll| poll.receive(BATCH, &mut Drop)))
}

fn echo(mut rx: XskRx, tx: XskTx, clock: &Clock, arguments: &Arguments) -> Counts {
    let mut echo = Echo(tx);
    measure(clock, arguments.time, || {
        rx.poll(|poll| {
            let received = poll.receive(BATCH, &mut echo);
            echo.0.complete();
            received
        })
    })
}

/// The second thread: receives up to a batch of fragments, and drops them.
fn consume(from: &mut Consumer<Frag<KernelShared>>) -> usize {
    let n = from.slots().min(BATCH);
    let Ok(frags) = from.read_chunk(n) else { return 0 };
    for frag in frags {
        black_box(frag.first_chunk::<16>().copied());
    }
    n
}

fn hand_over(mut rx: XskRx, clock: &Clock, arguments: &Arguments) -> Result<(Counts, Counts), Box<dyn Error>> {
    let (mut to, mut from) = RingBuffer::new(CHANNEL);
    thread::scope(|scope| {
        let worker = scope.spawn(move || second(clock, arguments, || consume(&mut from)));
        let mut batch = Batch(Vec::with_capacity(BATCH));
        let first = measure(clock, arguments.time, || {
            let room = to.slots().min(BATCH);
            rx.poll(|poll| poll.receive(room, &mut batch));
            let n = batch.0.len();
            if let Ok(chunk) = to.write_chunk_uninit(n) {
                chunk.fill_from_iter(batch.0.drain(..));
            }
            n
        });
        let second = worker.join().map_err(|_| "the second thread has ended")??;
        Ok((first, second))
    })
}

/// Sends from a pool of its own, by a queue that only sends.
fn transmit(clock: &Clock, arguments: &Arguments) -> Result<Counts, Box<dyn Error>> {
    let memory = RegionProvider::new(RegionOptions::new(FRAMES as usize).build::<KernelShared>()?);
    let umem = Umem::new(memory.region().clone(), &UmemOptions::new())?;
    let mut pool: PagePool<KernelShared> = PoolOptions::new("frames").build(memory.clone(), Some(umem.domain()))?;
    let ifindex = Interface::by_name(&arguments.interface)?.index;
    let mut tx = umem.open_tx(ifindex, 0, memory, queue(arguments))?;
    Ok(measure(clock, arguments.time, || {
        pool.poll(|napi| {
            for _ in 0..BATCH {
                let Some(mut page) = napi.alloc() else { break };
                let written = page.copy_from(0, &FRAME).is_ok();
                if !written || tx.send(Packet::new(page.freeze_range(0..FRAME.len()))).is_err() {
                    break;
                }
            }
            tx.flush();
            tx.complete()
        })
    }))
}

/// As in the other programs: the ring's size of frames is posted, and a frame is in one buffer.
fn queue(arguments: &Arguments) -> QueueOptions {
    let options = QueueOptions::new().rx_ring(RING).tx_ring(RING).fill(RING).mode(Mode::Copy).multi_buffer(false);
    if arguments.busy_poll { options.busy_poll(BusyPoll::default()) } else { options }
}

/// Whether the kernel knows what to poll for a socket (`SO_INCOMING_NAPI_ID`). It
/// learns that from the driver when the socket is bound, or from the first frame.
fn polls_a_driver(socket: BorrowedFd<'_>) -> bool {
    let (mut id, mut len) = (0u32, size_of::<u32>() as libc::socklen_t);
    let (option, at) = (libc::SO_INCOMING_NAPI_ID, (&raw mut id).cast());
    // SAFETY: the kernel writes a value of this length, which is there.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, at, &raw mut len) };
    rc == 0 && id != 0
}

fn main() -> anyhow::Result<()> {
    run().map_err(|error| anyhow::anyhow!("{error}"))
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::read()?;
    pin(arguments.cpu)?;
    let clock = Clock::new();
    if arguments.job == Job::Transmit {
        report(transmit(&clock, &arguments)?, Counts::default());
        return Ok(());
    }
    let options = XskOptions::new(&arguments.interface).queues([0]).pages(FRAMES as usize);
    let mut xsk: Xsk = Xsk::open(options, |_| queue(&arguments))?;
    let (rx, tx) = xsk.pairs.pop().ok_or("the interface has no queue")?;
    let socket = rx.socket().as_fd().try_clone_to_owned()?;
    let (first, second) = match arguments.job {
        Job::Drop | Job::Transmit => (drop_all(rx, &clock, &arguments), Counts::default()),
        Job::Echo => (echo(rx, tx, &clock, &arguments), Counts::default()),
        Job::Thread => hand_over(rx, &clock, &arguments)?,
    };
    if arguments.busy_poll && !polls_a_driver(socket.as_fd()) {
        return Err("the driver has no NAPI that this socket can poll".into());
    }
    report(first, second);
    Ok(())
}
