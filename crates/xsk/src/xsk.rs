//! An interface with all its parts: memory, sockets on its queues, and the program that redirects
//! frames to them.

use crate::error::XskError;
use crate::ethtool;
use crate::helper::Grant;
use crate::netlink::Interface;
use crate::options::{QueueOptions, UmemOptions};
use crate::privileges::Privileges;
use crate::program::{AttachError, Program, ProgramOptions};
use crate::rx::XskRx;
use crate::tx::XskTx;
use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use netmem_pool::{KernelShared, PoolOptions, RegionOptions, RegionProvider, SharedPool, SystemMemory};
use std::os::fd::AsFd;
use std::sync::Arc;

/// The options for opening an interface. Start with [`XskOptions::new`].
#[derive(Debug)]
pub struct XskOptions {
    name: String,
    queues: Option<Vec<u32>>,
    pages: usize,
    memory: Option<RegionOptions>,
    umem: UmemOptions,
    program: ProgramSource,
    grant: Option<Grant>,
}

/// Where the program comes from.
#[derive(Debug)]
enum ProgramSource {
    /// It is assembled and attached.
    Own(ProgramOptions),
    /// The map of a program that is attached already.
    Map(Program),
    None,
}

impl XskOptions {
    /// The default number of pages for each queue. Pages have 4096 bytes on most systems, so that a
    /// process without `CAP_IPC_LOCK` needs a limit of locked memory (`RLIMIT_MEMLOCK`) of 32 MiB
    /// for each queue.
    pub const PAGES: usize = 8192;

    /// The defaults: all queues of the interface `name`, [`PAGES`](Self::PAGES) for each queue, and
    /// a program that redirects every frame.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            queues: None,
            pages: Self::PAGES,
            memory: None,
            umem: UmemOptions::new(),
            program: ProgramSource::Own(ProgramOptions::default()),
            grant: None,
        }
    }

    /// Uses the parts that a [helper](crate::helper) has opened: its sockets and queues, and its
    /// program. Needs no privilege but the limit of locked memory. `netmem grant` is such a helper.
    ///
    /// ```no_run
    /// use netmem_xsk::{Grant, QueueOptions, Xsk, XskOptions};
    /// use std::os::unix::net::UnixStream;
    /// use std::time::Duration;
    ///
    /// let helper = UnixStream::connect("/run/grant.sock")?;
    /// let grant = Grant::receive(helper, Duration::from_secs(5))?;
    /// let xsk: Xsk = Xsk::open(XskOptions::granted(grant), |_queue| QueueOptions::new())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn granted(grant: Grant) -> Self {
        Self { grant: Some(grant), ..Self::new("") }
    }

    /// Opens only these queues. The default is all receive and transmit queues that are in use, if
    /// the interface reports them.
    #[must_use]
    pub fn queues(mut self, queues: impl IntoIterator<Item = u32>) -> Self {
        self.queues = Some(queues.into_iter().collect());
        self
    }

    /// Pages for each queue. They are needed for: chunks that the kernel has to receive into (1024,
    /// and more for large rings), frames that are being sent, caches (512 pages in each pool), and
    /// pages that users hold.
    #[must_use]
    pub fn pages(mut self, pages: usize) -> Self {
        self.pages = pages;
        self
    }

    /// The memory of all queues together: the total number of pages, huge pages, NUMA node,
    /// locking. [`pages`](Self::pages) then has no effect.
    #[must_use]
    pub fn memory(mut self, memory: RegionOptions) -> Self {
        self.memory = Some(memory);
        self
    }

    /// The options of the UMEM: chunks, headroom and metadata.
    #[must_use]
    pub fn umem(mut self, umem: UmemOptions) -> Self {
        self.umem = umem;
        self
    }

    /// The options of the program.
    #[must_use]
    pub fn program(mut self, program: ProgramOptions) -> Self {
        self.program = ProgramSource::Own(program);
        self
    }

    /// Loads no program, and puts the sockets into the map of one that is attached already, by
    /// another library or another process: [`Program::map`], [`Program::pinned_map`]. Before
    /// anything is opened, it is checked that the map has an entry for each queue, and that it is
    /// not the map of [another interface](Program::check_interface). The sockets leave the map when
    /// their [`XskRx`] is dropped, also if [`Xsk::program`] was dropped before.
    #[must_use]
    pub fn map(mut self, map: Program) -> Self {
        self.program = ProgramSource::Map(map);
        self
    }

    /// Opens no program. This is for queues that only send, or whose sockets the user puts into a
    /// map. See also [`Umem::open_tx`].
    #[must_use]
    pub fn without_program(mut self) -> Self {
        self.program = ProgramSource::None;
        self
    }
}

impl ProgramSource {
    fn open(self, ifindex: u32) -> Result<Option<Program>, AttachError> {
        match self {
            Self::Own(options) => Program::attach(ifindex, &options).map(Some),
            Self::Map(map) => Ok(Some(map)),
            Self::None => Ok(None),
        }
    }
}

/// An open interface. Move its queues out, and pass each pair to a thread.
///
/// ```no_run
/// use netmem_packet::{Packet, Poll, RxQueue};
/// use netmem_xsk::{Filter, ProgramOptions, QueueOptions, Rule, Xsk, XskOptions};
///
/// let rule = Rule { protocol: Some(17), port: Some(7), ..Rule::default() };
/// let program = ProgramOptions { filter: Filter::new([rule])?, ..ProgramOptions::default() };
/// let options = XskOptions::new("eth1").program(program);
/// let xsk: Xsk = Xsk::open(options, |_queue| QueueOptions::new())?;
/// std::thread::scope(|scope| {
///     for (mut rx, _tx) in xsk.pairs {
///         scope.spawn(move || loop {
///             let mut print = |packet: Packet<_>| println!("{} bytes", packet.len());
///             rx.poll(|poll| poll.receive(64, &mut print));
///         });
///     }
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Xsk<M: UmemMemory = KernelShared> {
    /// The program. When it is dropped, it is detached from the interface, and frames go to the
    /// kernel. A program that the user has attached ([`XskOptions::map`]) stays.
    pub program: Option<Program>,
    /// A receive queue and a transmit queue for each opened queue, in the order of the options.
    pub pairs: Vec<(XskRx<M>, XskTx<M>)>,
    /// The memory of all queues.
    pub umem: Umem<M>,
    provider: Arc<RegionProvider<M>>,
}

impl<M: UmemMemory> Xsk<M> {
    /// Opens an interface. `queue` is called for the options of each queue.
    ///
    /// The program is attached first, because some drivers then make the queues for zero-copy. The
    /// sockets are put into its map when they are bound. Until then frames go to the kernel.
    ///
    /// # Errors
    ///
    /// [`XskError`]: a missing privilege is reported before anything is opened. If there is an
    /// error, nothing stays open.
    pub fn open(options: XskOptions, queue: impl Fn(u32) -> QueueOptions) -> Result<Self, XskError>
    where
        M: SystemMemory,
    {
        let XskOptions { name, queues, pages, memory, umem, program, grant } = options;
        let privileges = Privileges::current();
        let (ifindex, queues, mut grant) = match grant {
            Some(grant) => {
                let queues: Vec<_> = grant.sockets.iter().map(|(queue, _)| *queue).collect();
                (grant.ifindex, queues, Some(grant))
            }
            None => {
                privileges.check_socket()?;
                if let ProgramSource::Own(program) = &program {
                    privileges.check_program(&program.filter)?;
                }
                let ifindex = Interface::by_name(&name).map_err(|_| AttachError::NoInterface(name.clone()))?.index;
                let queues = queues.unwrap_or_else(|| {
                    let (rx, tx) = ethtool::queues(&name).unwrap_or((1, 1));
                    (0..rx.min(tx).max(1)).collect()
                });
                if let ProgramSource::Map(map) = &program {
                    map.check_interface(ifindex)?;
                    queues.iter().try_for_each(|queue| map.check_queue(*queue))?;
                }
                (ifindex, queues, None)
            }
        };
        let memory = memory.unwrap_or_else(|| RegionOptions::new(pages.saturating_mul(queues.len())));
        let provider = RegionProvider::new(memory.build::<M>()?);
        let region = provider.region();
        let for_queues = |error: XskError| error.for_queues(queues.len());
        let bytes = u64::from(region.pages()) * region.page_size() as u64;
        privileges.check_memory(bytes).map_err(|error| for_queues(error.into()))?;
        let umem = Umem::new(region.clone(), &umem)?;
        let own = if grant.is_some() { None } else { program.open(ifindex)? };
        let mut pairs = Vec::with_capacity(queues.len());
        for number in &queues {
            let mut options = queue(*number);
            if let Some(grant) = &mut grant {
                options = grant.take(*number, options)?;
            }
            let (rx, tx) = umem.open(ifindex, *number, provider.clone(), options).map_err(for_queues)?;
            // Where there is a helper, it does this: before Linux 5.19, a descriptor of the map is
            // not sufficient.
            let inserts = grant.as_ref().is_none_or(|grant| !grant.has_helper());
            if let Some(program) = own.as_ref().or_else(|| grant.as_ref()?.program.as_ref()).filter(|_| inserts) {
                program.insert(*number, rx.socket().as_fd())?;
            }
            pairs.push((rx, tx));
        }
        let program = match grant {
            Some(mut grant) => {
                grant.bound()?;
                grant.program
            }
            None => own,
        };
        Ok(Self { program, pairs, umem, provider })
    }

    /// A pool of pages to send from, which any thread can use. Its pages are from the UMEM's
    /// region, like those of received frames. A limit in `options` prevents that sending uses the
    /// pages for receiving.
    ///
    /// # Errors
    ///
    /// The memory for the pool could not be allocated.
    pub fn pool(&self, options: PoolOptions) -> Result<SharedPool<M>, XskError> {
        Ok(options.build_shared(self.provider.clone(), Some(self.umem.domain()))?)
    }
}
