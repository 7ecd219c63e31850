//! Bridges a vhost-user back end and an interface: what arrives at one leaves by the other, and no
//! payload is copied.
//!
//!     netmem device --listen tap.sock --port tap:t0 &
//!     cargo run --release -p netmem --all-features --example xsk_bridge -- tap.sock eth1
//!
//! ```text
//!   tap ── device ── VirtioRx ──► TxBulk ──► SoftwareTx ──► XskTx ── interface
//!                    VirtioTx ◄── TxBulk ◄───────────────── XskRx
//! ```
//!
//! One region of memory is the memory of both: the device's table has it, and it is registered as
//! the UMEM. A frame is therefore received into a page, and sent from the same page. The back end
//! may leave checksums and segments to us, and the interface supports neither, so that is done in
//! software on the way (`SoftwareTx`). The program ends when the back end or the interface does,
//! and prints what it did. The end of the interface is an error.

use netmem::net::{Handler, Packet, Poll, PollThenSleep, RxQueue, SoftwareTx, TxBulk, TxQueue, Wait};
use netmem::pool::{PeerShared, PoolOptions, RegionOptions, RegionProvider};
use netmem::virtio::{NetOptions, OFFLOAD_FRAME, RxMode, VhostUser, VirtioNet};
use netmem::xdp::{Interface, Program, ProgramOptions, Promiscuous, QueueOptions, Umem, UmemOptions, XskError};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

/// Pages for everything.
const PAGES: usize = 16_384;
/// Pages for the headers of segments that are cut.
const HEADER_PAGES: usize = 2048;
/// Packets that wait for room in a transmit queue.
const WAITING: usize = 256;
/// Turns between two checks of whether both sides still work. A turn after a round with work does
/// not notice that.
const LOOK_EVERY: u64 = 1024;

/// Sends what is passed by the other side.
struct Forward<T: TxQueue> {
    to: TxBulk<T>,
    frames: u64,
}

impl<T: TxQueue<Mem = PeerShared>> Handler<PeerShared> for Forward<T> {
    fn pass(&mut self, packet: Packet<PeerShared>) {
        self.frames += 1;
        self.to.push(packet);
    }

    fn flush(&mut self) {
        self.to.flush();
    }
}

impl<T: TxQueue<Mem = PeerShared>> Forward<T> {
    fn new(tx: T) -> Self {
        Self { to: TxBulk::holding(tx, WAITING), frames: 0 }
    }

    /// Receives as many frames as there is room for.
    fn run(&mut self, rx: &mut impl RxQueue<Mem = PeerShared>) -> usize {
        let room = self.to.room();
        rx.poll(|poll| {
            self.to.target().complete();
            let received = poll.receive(room, self);
            self.to.flush();
            received
        })
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, name] = &arguments[..] else { anyhow::bail!("usage: xsk_bridge SOCKET INTERFACE") };
    let memory = RegionProvider::new(RegionOptions::new(PAGES).build::<PeerShared>()?);

    let options = NetOptions::new(RxMode::Mergeable)
        .max_frame(OFFLOAD_FRAME)
        .memory(memory.region().clone(), memory.clone())
        .tx_pages(HEADER_PAGES);
    let (net, mut pairs) = VirtioNet::probe(VhostUser::connect(Path::new(socket))?, options)?;
    let headers = net.tx_pool(PoolOptions::new("headers"))?;
    let pair = pairs.remove(0);
    let (mut from_back_end, to_back_end) = (pair.rx, pair.tx);

    let interface = Interface::by_name(name)?;
    let program = Program::attach(interface.index, &ProgramOptions::default()).map_err(XskError::from)?;
    let umem = Umem::new(memory.region().clone(), &UmemOptions::new())?;
    let (mut from_wire, to_wire) = umem.open(interface.index, 0, memory.clone(), QueueOptions::new())?;
    // The hosts behind the back end have MAC addresses of their own.
    let promiscuous = Promiscuous::new(interface.index)?;
    program.insert(0, from_wire.socket().as_fd()).map_err(XskError::from)?;
    eprintln!("ready: {socket}, {name} in {} mode", from_wire.socket().mode());

    let mut out = Forward::new(SoftwareTx::new(to_wire, || headers.alloc()));
    let mut back = Forward::new(to_back_end);
    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    let mut turn = 0_u64;
    let ended = loop {
        let work = out.run(&mut from_back_end) + back.run(&mut from_wire);
        let waits = [out.to.held() + out.to.target().waiting() > 0, back.to.held() > 0];
        let mut queues: Vec<&mut dyn Wait> = vec![&mut from_back_end, &mut from_wire];
        // A completion makes room for packets that wait, if there are any.
        let targets = [out.to.target().queue() as &mut dyn Wait, back.to.target()];
        queues.extend(targets.into_iter().zip(waits).filter(|(_, waits)| *waits).map(|(tx, _)| tx));
        let paused = pause.turn(work, &mut queues, None);
        turn += 1;
        let check =
            || if turn.is_multiple_of(LOOK_EVERY) { from_back_end.check().and(from_wire.check()) } else { Ok(()) };
        if let Err(error) = paused.and_then(|_| check()) {
            break error;
        }
    };
    drop((program, promiscuous));
    let software = out.to.target().stats();
    println!(
        "to {name}: {} packets, {} checksummed, {} cut into {}, {} dropped",
        out.frames,
        software.checksummed,
        software.segmented,
        software.segments,
        out.to.stats().dropped + software.dropped
    );
    println!("from {name}: {} packets, {} dropped", back.frames, back.to.stats().dropped);
    // The back end may leave.
    if ended.kind() == ErrorKind::NotConnected { Ok(()) } else { Err(ended.into()) }
}
