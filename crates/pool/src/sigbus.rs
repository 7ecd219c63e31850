//! A handler of SIGBUS, for mapped files whose pages another process removes.
//!
//! Every process that has a file can take pages of it away from the processes that map it. It
//! truncates the file, or it punches a hole into a file of huge pages while the system has no free
//! huge page. A hole in a file on tmpfs has the same effect once the file system is full. The next
//! access to such a page raises SIGBUS, which ends the process by default.
//!
//! [`install`] sets a handler after which the process continues:
//!
//! ```text
//!   access ──► SIGBUS ──► which mapping has the address? ── none ──► the handler before this one
//!                              │
//!                              └──► an anonymous page over the page that is gone;
//!                                   the mapping and the process count it
//!   the access is repeated, and reads zeros
//! ```
//!
//! The zeros are no worse than other contents, because another process can write the file at any
//! time. The code that works on the mapping reads [`faults`] now and then, which is one load. It
//! drops the mapping when the mapping has [lost](crate::FileMapping::lost) pages.
//!
//! # The registry
//!
//! Each mapping of a file has a `Guard`, which has a registration in a list. The handler searches
//! the list, which only grows. A registration is used again after its guard is dropped. The handler
//! may interrupt a thread that changes the list. Therefore the handler allocates nothing, and no
//! thread acquires a lock.
//!
//! * *The registration that the handler searches for does not change.* The faulting thread is
//!   inside the mapping, so the mapping's owner has not dropped it.
//! * *A registration that changes while the handler reads it is not the one that it searches for.*
//!   The version is odd while start and end are valid. The handler reads the version, then the
//!   fields, then the version again, and goes on if the two differ:
//!
//! ```text
//!   handler                                      thread that drops one mapping and makes another
//!   version: 5                                   version = 6
//!                                                fence(Release); start, end = new
//!   start: new, end: old
//!   fence(Acquire); version: 6 or 7, not 5       version = 7
//! ```
//!
//! * *Two threads that fault on one page each map a page over it.* What the first thread has
//!   written to its page is lost. That is allowed, because the contents are arbitrary.
//!
//! # Stack, other signals
//!
//! The handler runs on the thread's alternate stack if it has one, else on the stack that faulted;
//! both have room for it. The standard library's threads have an alternate stack. It also sets a
//! handler for SIGBUS, to report stack overflows, which is called for addresses that are not in a
//! guarded mapping. If a thread that blocks SIGBUS faults, the kernel ends the process.

use crate::forks;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The most pages that the handler replaces one at a time, in the whole process. Each costs up to
/// two entries of the kernel's list of mappings, which holds 65530 by default. When there are more,
/// the next fault replaces its whole mapping, in one entry.
const MOST_PAGES: usize = 4096;

/// Slots that the list grows by.
const CHUNK: usize = 64;

/// What the handler knows of one mapping. See the module.
struct Registration {
    taken: AtomicBool,
    /// Odd while the fields below are valid.
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Bytes in a page of the file.
    page: AtomicUsize,
    /// The [forks](forks::so_far) in the process that has the mapping.
    process: AtomicUsize,
    /// Faults in this mapping.
    lost: AtomicU64,
}

impl Registration {
    const fn free() -> Self {
        Self {
            taken: AtomicBool::new(false),
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            process: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
        }
    }

    /// The start, the end and the page size, if the mapping contains `addr` and belongs to this
    /// process.
    fn range_with(&self, addr: usize) -> Option<(usize, usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let [start, end, page, process] = [&self.start, &self.end, &self.page, &self.process].map(load);
        fence(Ordering::Acquire);
        let valid = version % 2 == 1 && self.version.load(Ordering::Relaxed) == version;
        let ours = process == forks::so_far() as usize;
        (valid && ours && (start..end).contains(&addr)).then_some((start, end, page))
    }
}

fn load(word: &AtomicUsize) -> usize {
    word.load(Ordering::Relaxed)
}

struct Chunk {
    registrations: [Registration; CHUNK],
    next: AtomicPtr<Chunk>,
}

impl Chunk {
    const fn free() -> Self {
        Self { registrations: [const { Registration::free() }; CHUNK], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Chunk> {
        // SAFETY: null, or a chunk that was leaked.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }
}

static FIRST: Chunk = Chunk::free();
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// Pages that are replaced now, in all mappings.
static REPLACED: AtomicUsize = AtomicUsize::new(0);
/// The action that was set before the handler. The handler calls it for other faults.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Every registration.
fn registrations() -> impl Iterator<Item = &'static Registration> {
    std::iter::successors(Some(&FIRST), |chunk| chunk.next()).flat_map(|chunk| &chunk.registrations)
}

/// Adds free registrations to the list.
#[cold]
fn grow() {
    let chunk = Box::into_raw(Box::new(Chunk::free()));
    let mut last = &FIRST;
    loop {
        match last.next.compare_exchange(ptr::null_mut(), chunk, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return,
            // SAFETY: what a chunk points to is leaked.
            Err(next) => last = unsafe { &*next },
        }
    }
}

/// A mapping of a file, known to the handler while this value exists.
#[derive(Debug)]
pub(crate) struct Guard {
    registration: &'static Registration,
}

impl Guard {
    /// Makes `len` bytes at `start` known, in pages of `page` bytes, to which `start` is aligned.
    /// The caller keeps the mapping until the guard is dropped. When the caller drops the guard, no
    /// code uses an address in the mapping any more.
    pub(crate) fn new(start: usize, len: usize, page: usize) -> Self {
        let registration = loop {
            let free = |registration: &&Registration| {
                !registration.taken.load(Ordering::Relaxed) && !registration.taken.swap(true, Ordering::Acquire)
            };
            if let Some(registration) = registrations().find(free) {
                break registration;
            }
            grow();
        };
        // Orders the fields after the even version that the last guard has left.
        fence(Ordering::Release);
        registration.start.store(start, Ordering::Relaxed);
        registration.end.store(start + len, Ordering::Relaxed);
        registration.page.store(page, Ordering::Relaxed);
        registration.process.store(forks::so_far() as usize, Ordering::Relaxed);
        registration.lost.store(0, Ordering::Relaxed);
        registration.version.fetch_add(1, Ordering::Release);
        Self { registration }
    }

    /// How many accesses found that a page of the mapping had been taken away.
    pub(crate) fn lost(&self) -> u64 {
        self.registration.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.registration.version.fetch_add(1, Ordering::Relaxed);
        REPLACED.fetch_sub(self.registration.lost.load(Ordering::Relaxed) as usize, Ordering::Relaxed);
        self.registration.taken.store(false, Ordering::Release);
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Registration({:#x}..{:#x}, {} lost)",
            load(&self.start),
            load(&self.end),
            self.lost.load(Ordering::Relaxed)
        )
    }
}

/// How many accesses of this process found that a page of a mapped file had been taken away, since
/// its start. One load.
#[inline]
#[must_use]
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// How many accesses found that a page had been taken away, in the mapping that contains `addr`.
/// Searches the registry.
pub(crate) fn lost_at(addr: usize) -> u64 {
    registrations()
        .find(|registration| registration.range_with(addr).is_some())
        .map_or(0, |registration| registration.lost.load(Ordering::Relaxed))
}

/// Whether [`install`] was called.
#[must_use]
pub fn installed() -> bool {
    INSTALLED.load(Ordering::Relaxed)
}

/// Sets the handler, for all threads of the process. See the [module](self). A second call does
/// nothing.
///
/// The handler that was set before is called for every SIGBUS that is not in a mapping of this
/// crate, with its arguments as the kernel gave them. If there was no handler, such a SIGBUS ends
/// the process as usual, with the same `siginfo_t`. A program that sets its own handler later must
/// call, for other faults, the action that `sigaction` returned to it.
///
/// # Errors
///
/// The system's answer.
pub fn install() -> io::Result<()> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if installed() {
        return Ok(());
    }
    // Stored before the handler is set, because the handler may run at once.
    let before = BEFORE.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the call changes nothing. If it fails, the value stays all zeros, which is valid:
        // the default action.
        unsafe {
            libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr());
            before.assume_init()
        }
    });
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = handle;
    let mut action = *before;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler is async-signal-safe (see the module). It blocks the signals that the
    // handler before it has blocked.
    match unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } {
        0 => {
            INSTALLED.store(true, Ordering::Relaxed);
            Ok(())
        }
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes its information to a handler with SA_SIGINFO. Only a fault has an
    // address.
    let at = unsafe {
        let fault = matches!((*info).si_code, libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR);
        fault.then(|| (*info).si_addr().addr())
    };
    if !at.is_some_and(replace) {
        // SAFETY: the arguments are the kernel's.
        unsafe { go_on(signal, info, context) };
    }
}

/// Maps an anonymous page over the page that contains `addr`, if `addr` is in a guarded mapping.
/// Returns whether it did.
fn replace(addr: usize) -> bool {
    let found =
        registrations().find_map(|registration| registration.range_with(addr).map(|range| (registration, range)));
    let Some((registration, (start, end, page))) = found else { return false };
    let one = REPLACED.fetch_add(1, Ordering::Relaxed) < MOST_PAGES;
    let (at, len) = if one { (addr - (addr - start) % page, page) } else { (start, end - start) };
    let at = ptr::without_provenance_mut::<c_void>(at);
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE);
    // SAFETY: whole pages of a mapping whose owner cannot unmap it meanwhile (see the module), and
    // whose contents another process can change at any time. Plain system calls, which touch no
    // `errno`.
    let mapped = unsafe { rustix::mm::mmap_anonymous(at, len, prot, flags) }.is_ok();
    if mapped {
        // SAFETY: this is the page that was just mapped. A child of a fork does not get it, as it
        // does not get the mapping.
        let _ = unsafe { rustix::mm::madvise(at, len, Advice::LinuxDontFork) };
    }
    registration.lost.fetch_add(1, Ordering::Relaxed);
    FAULTS.fetch_add(1, Ordering::Relaxed);
    mapped
}

/// Handles the signal as if this module did not exist.
///
/// # Safety
///
/// The arguments are those of the signal that is being handled.
#[cold]
unsafe fn go_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(before) = BEFORE.get() else { return };
    // SAFETY: the caller's.
    let fault = unsafe { (*info).si_code } > 0;
    match before.sa_sigaction {
        libc::SIG_IGN if !fault => {}
        // SIG_IGN counts as SIG_DFL here: the kernel does not ignore a fault.
        libc::SIG_DFL | libc::SIG_IGN => {
            // The signal is blocked now; it is delivered again, with the same information, when the
            // handler returns.
            // SAFETY: plain system calls, with memory that is there.
            unsafe {
                let mut default = MaybeUninit::<libc::sigaction>::zeroed();
                (*default.as_mut_ptr()).sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, default.as_ptr(), ptr::null_mut());
                libc::syscall(libc::SYS_rt_tgsigqueueinfo, libc::getpid(), libc::gettid(), signal, info);
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: by its flag, the handler has three arguments.
            unsafe {
                let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = std::mem::transmute(handler);
                handler(signal, info, context);
            }
        }
        handler => {
            // SAFETY: by its flag, the handler has one argument.
            unsafe {
                let handler: extern "C" fn(c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}
