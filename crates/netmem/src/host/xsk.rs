//! A host on a network interface, by AF_XDP: a socket and a stack for each queue.

use super::{Apart, Behind, Driven, Drives, OpenError, Opened, Queue, SPIN, check};
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface};
use netmem_packet::{PollThenSleep, Wait};
use netmem_pool::{KernelShared, PoolOptions};
use netmem_xsk::{Filter, Program, ProgramOptions, QueueOptions, Rule, Umem, Xsk, XskOptions, XskRx, XskTx};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of a queue: what the kernel has to receive into, caches, what connections and their users
/// hold, and those to send from.
const PAGES: usize = 8192;
/// Pages of a queue for headers and for payload that is copied.
const SENT: usize = 2048;

/// A queue of a host on an interface.
pub type XskQueue = Queue<XskRx, XskTx, XskInterface>;
/// A stack on an interface, on the thread that drives it.
pub type XskStack = Driven<XskRx, XskTx, XskInterface>;

/// The XDP program of the interface, and how the stack's thread sleeps.
#[derive(Debug)]
pub struct XskInterface {
    pause: PollThenSleep,
    shared: Arc<(Option<Program>, Umem<KernelShared>)>,
}

/// Opens a host on the interface `name` with these addresses, and a queue for each queue of the
/// interface that is in use. All of them are opened, because the interface chooses the queue of a
/// connection: one that no stack polled would lose its connections. (`ethtool -L NAME combined N`
/// changes their number.)
///
/// The kernel keeps its own addresses and all other traffic of the interface. The host has the
/// interface's Ethernet address and MTU, and answers ARP and neighbour solicitations for its own
/// addresses. When the last queue is dropped, the kernel has all traffic again.
///
/// The interface is to have its segmentation offloads for received frames off (`ethtool -K NAME gro
/// off lro off`), and the peer of a veth its checksum and segmentation offloads: such frames are
/// incomplete, and AF_XDP does not report this.
///
/// Needs CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON, and 32 MiB of locked memory for each
/// queue (CAP_IPC_LOCK, or `ulimit -l`).
///
/// # Errors
///
/// [`OpenError`]; nothing is left behind.
pub fn on_xsk(name: &str, addresses: &[Address]) -> Result<Opened<KernelShared, XskQueue>, OpenError> {
    check(addresses)?;
    let rule = |own: &Address| Rule { address: Some(own.addr), ..Rule::default() };
    let program = ProgramOptions { filter: Filter::new(addresses.iter().map(rule))?, ..ProgramOptions::default() };
    let options = XskOptions::new(name).pages(PAGES).program(program);
    let xsk = Xsk::<KernelShared>::open(options, |_| QueueOptions::new())?;
    let interface = netmem_xsk::Interface::by_name(name);
    let interface = interface.map_err(|source| OpenError::Interface { name: name.to_owned(), source })?;
    let (mac, mtu) = (Mac(interface.mac.unwrap_or_default()), u16::try_from(interface.mtu).unwrap_or(u16::MAX));
    let host = Host::new(Interface { mac, mtu, addresses: addresses.to_vec() });
    let pools = xsk.pairs.iter().map(|_| xsk.pool(PoolOptions::new(name).limit(SENT)).map(Arc::new));
    let pools = pools.collect::<Result<Vec<_>, _>>()?;
    let Xsk { program, pairs, umem, .. } = xsk;
    let (shared, beginning) = (Arc::new((program, umem)), Instant::now());
    let queues = pairs.into_iter().zip(pools).map(|((rx, tx), pool)| {
        let behind = XskInterface { pause: PollThenSleep::new(SPIN), shared: shared.clone() };
        Queue { host: host.clone(), rx, tx, pool, user_pool: None, behind, beginning }
    });
    let queues = queues.collect();
    Ok(Opened { host, queues })
}

impl Behind for XskInterface {}

impl Drives for XskInterface {
    /// The kernel does the work.
    fn poll(&mut self) -> usize {
        0
    }

    fn pause(&mut self, work: usize, stack: &mut dyn Wait, at_most: Option<Duration>) -> io::Result<()> {
        self.pause.turn(work, &mut [stack], at_most).map(drop)
    }

    fn apart(self) -> io::Result<Apart> {
        Ok(Apart(Box::new(self.shared)))
    }
}
