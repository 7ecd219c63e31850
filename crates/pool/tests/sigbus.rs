//! Pages that are taken away: the SIGBUS handler of this crate, and the faults that it leaves to
//! other handlers. A program of its own: a signal has one handler in a process.
//!
//! Proves NET-10. If a test must end its process, it runs that part in a child: this program again,
//! with the name of the part.
#![allow(clippy::unwrap_used)]

use netmem_pool::{FileMapping, Region, sigbus};
use netmem_testing::skip;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use std::ffi::CString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr::null;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = 4096;

fn memfd(bytes: usize, flags: MemfdFlags) -> OwnedFd {
    let fd = memfd_create("sigbus", flags | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    fd
}

fn map(fd: &OwnedFd, bytes: usize) -> FileMapping {
    FileMapping::new(fd.as_fd(), 0, bytes as u64).unwrap()
}

/// Writes a byte, and reads it back.
fn touch(mapping: &FileMapping, at: usize) -> u8 {
    assert!(at < mapping.len());
    // SAFETY: within the mapping.
    unsafe {
        mapping.as_ptr().add(at).write_volatile(7);
        mapping.as_ptr().add(at).read_volatile()
    }
}

/// Runs one of the parts below in a process of its own.
fn child(part: &str) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap()).args(["--exact", part, "--ignored"]).status().unwrap()
}

/// Reads a lost page of a mapping that this crate does not know.
fn foreign_fault() {
    let fd = memfd(PAGE, MemfdFlags::empty());
    // SAFETY: the range is a new mapping of a file, and the file is then shortened.
    unsafe {
        let prot = rustix::mm::ProtFlags::READ;
        let at = rustix::mm::mmap(std::ptr::null_mut(), PAGE, prot, rustix::mm::MapFlags::SHARED, &fd, 0).unwrap();
        ftruncate(&fd, 0).unwrap();
        at.cast::<u8>().read_volatile();
    }
}

#[test]
fn a_truncated_file() {
    sigbus::install().unwrap();
    let fd = memfd(64 * PAGE, MemfdFlags::empty());
    let (mapping, other) = (map(&fd, 64 * PAGE), map(&fd, PAGE));
    assert_eq!(touch(&mapping, 63 * PAGE), 7);
    ftruncate(&fd, PAGE as u64).unwrap();
    let before = sigbus::faults();
    // The page is replaced once: the second access finds what the first one wrote.
    assert_eq!([touch(&mapping, 63 * PAGE), touch(&mapping, 63 * PAGE)], [7, 7]);
    assert_eq!(touch(&mapping, 0), 7, "still the file's");
    // Other tests of this process cause faults too.
    assert!(sigbus::faults() > before);
    assert_eq!((mapping.lost(), other.lost()), (1, 0));
    // A new mapping in the same slot starts with a count of 0.
    drop(mapping);
    assert_eq!(map(&fd, PAGE).lost(), 0);
}

/// Runs in a process of its own, because other tests count pages that are replaced one by one.
#[test]
fn a_long_truncated_file() {
    assert!(child("part_long_file").success());
}

/// More pages than are replaced one by one: then the whole mapping is replaced, and the kernel's
/// list of mappings stays short.
#[test]
#[ignore = "a part of another test"]
fn part_long_file() {
    sigbus::install().unwrap();
    const PAGES: usize = 40_000;
    let fd = memfd(PAGES * PAGE, MemfdFlags::empty());
    let mapping = map(&fd, PAGES * PAGE);
    ftruncate(&fd, 0).unwrap();
    // Every second page, because the kernel merges neighbours into one mapping.
    (0..PAGES).step_by(2).for_each(|page| assert_eq!(touch(&mapping, page * PAGE), 7));
    assert!(mapping.lost() < PAGES as u64 / 2, "{}", mapping.lost());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!(maps < 10_000, "{maps} mappings");
    drop(mapping);
    // The count of replaced pages has decreased with the mapping. Pages of another mapping are
    // replaced one by one again.
    let fd = memfd(4 * PAGE, MemfdFlags::empty());
    let mapping = map(&fd, 4 * PAGE);
    ftruncate(&fd, 0).unwrap();
    assert_eq!([touch(&mapping, 0), touch(&mapping, 2 * PAGE)], [7, 7]);
    assert_eq!(mapping.lost(), 2);
}

/// The driver's side: a file that the user provides. Another holder of the file shortens it, which
/// no seal forbids.
#[test]
fn a_region_whose_file_is_cut() {
    sigbus::install().unwrap();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("memory");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(8 * PAGE as u64).unwrap();
    let region = Region::from_fd(file.try_clone().unwrap(), .., 0).unwrap();
    assert_eq!(region.lost(), 0);
    file.set_len(0).unwrap();
    // SAFETY: within the region.
    unsafe { region.as_ptr().add(PAGE).write_volatile(1) };
    assert_eq!(region.lost(), 1);
}

#[test]
fn a_full_tmpfs() {
    sigbus::install().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let at = CString::new(dir.path().as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: changes only the mounts of this thread, which ends with the test.
    let mounted = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(null(), c"/".as_ptr(), null(), libc::MS_PRIVATE | libc::MS_REC, null()) == 0
            && libc::mount(c"tmpfs".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=64k".as_ptr().cast()) == 0
    };
    if !mounted {
        return skip("it takes root to mount a file system");
    }
    let file = File::options().read(true).write(true).create_new(true).open(dir.path().join("memory")).unwrap();
    file.set_len(1 << 20).unwrap();
    let mapping = FileMapping::new(file.as_fd(), 0, 1 << 20).unwrap();
    for page in 0..256 {
        assert_eq!(touch(&mapping, page * PAGE), 7, "page {page}");
    }
    assert_eq!(mapping.lost(), 256 - 16);
    drop((mapping, file));
    // A child of another test can have the file open for a moment.
    // SAFETY: a path, and what was mounted there.
    assert_eq!(unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) }, 0);
}

/// A hole in a file of huge pages, while no other huge page is free.
#[test]
fn a_hole_in_a_huge_page_file() {
    sigbus::install().unwrap();
    const HUGE: usize = 2 << 20;
    let reserved = "/proc/sys/vm/nr_hugepages";
    let had = std::fs::read_to_string(reserved).unwrap();
    // If the system has huge pages, two of them are used. If it has none, it gets two for the
    // duration of the test.
    let none = had.trim() == "0";
    if none && std::fs::write(reserved, "2").is_err() {
        return skip("it takes root to have two huge pages for a moment");
    }
    let fd = memfd(2 * HUGE, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
    let mapping = FileMapping::new(fd.as_fd(), 0, 2 * HUGE as u64);
    // All other huge pages are reserved for the duration of the test.
    let mut taken = Vec::new();
    if let Ok(mapping) = &mapping {
        assert_eq!([touch(mapping, 5), touch(mapping, HUGE + 5)], [7, 7]);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&fd, hole, HUGE as u64, HUGE as u64).unwrap();
        loop {
            let fd = memfd(HUGE, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
            let Ok(page) = FileMapping::new(fd.as_fd(), 0, HUGE as u64) else { break };
            taken.push(page);
        }
    }
    if none {
        std::fs::write(reserved, had).unwrap();
    }
    let mapping = match mapping {
        Ok(mapping) => mapping,
        Err(e) => return skip(&format!("no huge pages: {e}")),
    };
    assert!(!taken.is_empty(), "the page of the hole went to another process");
    assert_eq!([touch(&mapping, HUGE + 5), touch(&mapping, HUGE), touch(&mapping, 2 * HUGE - 1)], [7, 7, 7]);
    assert_eq!((mapping.lost(), touch(&mapping, 5)), (1, 7));
}

/// A range that does not begin or end at a page boundary.
#[test]
fn ranges() {
    let fd = memfd(3 * PAGE, MemfdFlags::empty());
    let mapping = FileMapping::new(fd.as_fd(), PAGE as u64 + 5, 100).unwrap();
    assert_eq!((mapping.len(), mapping.as_ptr().addr() % PAGE), (100, 5));
    for (offset, len) in [(0, 0), (u64::MAX, 1), (1, u64::MAX), (0, u64::MAX)] {
        let e = FileMapping::new(fd.as_fd(), offset, len).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput, "{offset} {len}");
    }
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(FileMapping::new(pipe.as_fd(), 0, 1).is_err());
}

/// All threads make and drop mappings while other threads fault.
#[test]
fn mappings_come_and_go_under_faults() {
    sigbus::install().unwrap();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for round in 0..500 {
                    let fds = [memfd(4 * PAGE, MemfdFlags::empty()), memfd(4 * PAGE, MemfdFlags::empty())];
                    let all: Vec<_> = (0..40).map(|n| map(&fds[n % 2], 4 * PAGE)).collect();
                    ftruncate(&fds[0], 2 * PAGE as u64).unwrap();
                    let cut = round % 20 * 2;
                    assert_eq!([touch(&all[cut], 3 * PAGE), touch(&all[cut + 1], 3 * PAGE)], [7, 7]);
                    assert!(all.iter().enumerate().all(|(n, m)| m.lost() == u64::from(n == cut)));
                }
            });
        }
    });
}

#[test]
fn a_fault_elsewhere_ends_the_process() {
    assert_eq!(child("part_foreign_fault").signal(), Some(libc::SIGBUS));
    assert_eq!(child("part_sent_signal").signal(), Some(libc::SIGBUS));
    assert!(child("part_chain").success());
}

#[test]
#[ignore = "a part of another test"]
fn part_foreign_fault() {
    sigbus::install().unwrap();
    foreign_fault();
}

/// A signal that another process sends. There was no handler before, not even that of the standard
/// library.
#[test]
#[ignore = "a part of another test"]
fn part_sent_signal() {
    // SAFETY: the default action.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    sigbus::install().unwrap();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::BUS).unwrap();
}

static CALLS: AtomicUsize = AtomicUsize::new(0);
static ADDRESS: AtomicUsize = AtomicUsize::new(0);

/// A program's own handler, set before: it gets the faults outside of this crate's mappings, with
/// the kernel's information.
#[test]
#[ignore = "a part of another test"]
fn part_chain() {
    extern "C" fn own(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the pointer is the kernel's information about a fault.
        let at = unsafe { (*info).si_addr() };
        ADDRESS.store(at.addr(), Ordering::Relaxed);
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::FIXED);
        // SAFETY: replaces the page of the test's own mapping.
        unsafe { rustix::mm::mmap_anonymous(at.map_addr(|a| a & !(PAGE - 1)), PAGE, prot, flags).unwrap() };
    }
    // SAFETY: the handler makes one system call.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = own;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()), 0);
    }
    sigbus::install().unwrap();
    sigbus::install().unwrap();
    let fd = memfd(PAGE, MemfdFlags::empty());
    let mapping = map(&fd, PAGE);
    ftruncate(&fd, 0).unwrap();
    assert_eq!((touch(&mapping, 0), CALLS.load(Ordering::Relaxed)), (7, 0));
    foreign_fault();
    assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    assert_ne!(ADDRESS.load(Ordering::Relaxed), 0);
}
