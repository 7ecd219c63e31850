//! Forwards frames between two devices: what arrives at one leaves by the other, and no payload is
//! copied.
//!
//!     netmem device --listen a.sock --port tap:a &
//!     netmem device --listen b.sock --port tap:b &
//!     cargo run --release -p netmem --all-features --example forward a.sock,all b.sock,none gro
//!
//! `none`, `checksum` or `all` are the offloads that are requested on each side. Large segments
//! from one side go to the other as they are if both have them. If the other lacks them, they are
//! cut on the way (`SoftwareTx`). With `gro`, consecutive segments are joined before they go on.
//! The program ends when a device does, and prints what it did. `tests/kernel/forward.sh` measures
//! it between two network namespaces, with TCP of the kernel at both ends.
//!
//! ```text
//!   tap a ── device a ── rx ──► Gro ──► TxBulk ──► SoftwareTx ──► tx ── device b ── tap b
//!                        tx ◄── SoftwareTx ◄── TxBulk ◄── Gro ◄── rx
//! ```
//!
//! Both drivers receive into one region of memory and have one DMA domain, so that frames are not
//! mapped again.

use netmem::net::{Gro, GroStats, Handler, Packet, Poll, PollThenSleep, RxQueue, SoftwareTx, TxBulk, Wait};
use netmem::pool::{DmaDomain, Page, PeerShared, PoolOptions, RegionOptions, RegionProvider, SharedPool};
use netmem::virtio::{NetOptions, OFFLOAD_FRAME, Offload, QueuePair, RxMode, VhostUser, VirtioNet, VirtioRx, VirtioTx};
use std::cell::OnceCell;
use std::io::ErrorKind;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Pages for all queues, and those of each device for headers of segments that are cut.
const PAGES: usize = 8192;
const HEADER_PAGES: usize = 1024;
/// Packets that wait for room in a transmit queue.
const WAITING: usize = 256;

/// Turns between two checks of whether the devices are still connected. A turn after a round with
/// work does not notice that.
const LOOK_EVERY: u64 = 1024;

/// A transmit queue that accepts every packet, with pages from `P` for headers.
type Target<P> = TxBulk<SoftwareTx<VirtioTx, P>>;

/// Sends what is passed by another device.
struct Forward<P: FnMut() -> Option<Page<PeerShared>>> {
    to: Target<P>,
    frames: u64,
}

impl<P: FnMut() -> Option<Page<PeerShared>>> Forward<P> {
    /// Whether packets, or segments of one, wait for room.
    fn waits(&mut self) -> bool {
        self.to.held() + self.to.target().waiting() > 0
    }
}

impl<P: FnMut() -> Option<Page<PeerShared>>> Handler<PeerShared> for Forward<P> {
    fn pass(&mut self, packet: Packet<PeerShared>) {
        self.frames += 1;
        self.to.push(packet);
    }

    fn flush(&mut self) {
        self.to.flush();
    }
}

/// One direction, with segments joined or not.
enum Way<P: FnMut() -> Option<Page<PeerShared>>> {
    Plain(Forward<P>),
    Joined(Gro<Forward<P>, PeerShared>),
}

impl<P: FnMut() -> Option<Page<PeerShared>>> Way<P> {
    fn new(tx: VirtioTx, pages: P, gro: bool) -> Self {
        let to = TxBulk::holding(SoftwareTx::new(tx, pages), WAITING);
        let forward = Forward { to, frames: 0 };
        if gro { Self::Joined(Gro::new(forward)) } else { Self::Plain(forward) }
    }

    fn forward(&mut self) -> &mut Forward<P> {
        match self {
            Self::Plain(forward) => forward,
            Self::Joined(gro) => gro.inner(),
        }
    }

    fn summary(&mut self) -> String {
        let joined = match self {
            Self::Plain(_) => GroStats::default(),
            Self::Joined(gro) => gro.stats(),
        };
        let Forward { to, frames } = self.forward();
        let (bulk, software) = (to.stats(), to.target().stats());
        format!(
            "{frames} packets, {} of them joined of {} segments; in software {} checksummed, {} cut into {}; {} dropped",
            joined.packets,
            joined.segments,
            software.checksummed,
            software.segmented,
            software.segments,
            bulk.dropped + software.dropped,
        )
    }

    /// Receives as many frames as there is room for: a slow target slows the sender down, and no
    /// frame is lost for it.
    fn run(&mut self, rx: &mut VirtioRx) -> usize {
        let budget = self.forward().to.room();
        rx.poll(|poll| match self {
            Self::Plain(forward) => poll.receive(budget, forward),
            Self::Joined(gro) => poll.receive(budget, gro),
        })
    }
}

/// The driver of a device, and the pool for its headers. The first one makes the domain that both
/// share.
fn driver(
    argument: &str,
    memory: &Arc<RegionProvider<PeerShared>>,
    domain: &Rc<OnceCell<Arc<dyn DmaDomain>>>,
) -> anyhow::Result<(VirtioNet, QueuePair, SharedPool<PeerShared>)> {
    let (socket, offload) = argument.split_once(',').unwrap_or((argument, "all"));
    let (offload, frame) = match offload {
        "none" => (Offload::None, 1518),
        "checksum" => (Offload::Checksum, 1518),
        "all" => (Offload::All, OFFLOAD_FRAME),
        other => anyhow::bail!("{other}: none, checksum or all"),
    };
    let domain = domain.clone();
    let options = NetOptions::new(RxMode::Mergeable)
        .offloads(offload)
        .max_frame(frame)
        .memory(memory.region().clone(), memory.clone())
        .domain(move |table| domain.get_or_init(|| Arc::new(table)).clone())
        .tx_pages(HEADER_PAGES);
    let (net, mut pairs) = VirtioNet::probe(VhostUser::connect(Path::new(socket))?, options)?;
    let pool = net.tx_pool(PoolOptions::new("headers"))?;
    println!("{socket}: features {:#x}", net.features());
    Ok((net, pairs.remove(0), pool))
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (a, b, gro) = match &arguments[..] {
        [a, b] => (a, b, false),
        [a, b, gro] if gro == "gro" => (a, b, true),
        _ => anyhow::bail!("usage: forward SOCKET[,none|checksum|all] SOCKET[,none|checksum|all] [gro]"),
    };
    let memory = RegionProvider::new(RegionOptions::new(PAGES).build::<PeerShared>()?);
    let domain = Rc::new(OnceCell::new());
    let (net_a, pair_a, pool_a) = driver(a, &memory, &domain)?;
    let (net_b, pair_b, pool_b) = driver(b, &memory, &domain)?;
    let (mut rx_a, mut rx_b) = (pair_a.rx, pair_b.rx);
    let mut to_b = Way::new(pair_b.tx, || pool_b.alloc(), gro);
    let mut to_a = Way::new(pair_a.tx, || pool_a.alloc(), gro);

    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    let mut turn = 0_u64;
    let ended = loop {
        let work = to_b.run(&mut rx_a) + to_a.run(&mut rx_b);
        let waiting = [to_a.forward().waits(), to_b.forward().waits()];
        let (tx_a, tx_b) = (&mut to_a.forward().to, &mut to_b.forward().to);
        let mut queues: Vec<&mut dyn Wait> = vec![&mut rx_a, &mut rx_b];
        // A completion makes room for packets that wait, if there are any.
        let targets = [tx_a.target().queue() as &mut dyn Wait, tx_b.target().queue()];
        queues.extend(targets.into_iter().zip(waiting).filter(|(_, waits)| *waits).map(|(tx, _)| tx));
        let paused = pause.turn(work, &mut queues, None);
        turn += 1;
        let check = || if turn.is_multiple_of(LOOK_EVERY) { rx_a.check().and(rx_b.check()) } else { Ok(()) };
        if let Err(error) = paused.and_then(|_| check()) {
            break error;
        }
    };
    println!("a to b: {}", to_b.summary());
    println!("b to a: {}", to_a.summary());
    println!("{:?}", pause.stats());
    drop((net_a, net_b));
    // A device may leave.
    if ended.kind() == ErrorKind::NotConnected { Ok(()) } else { Err(ended.into()) }
}
