//! What the child of a fork may do with regions, providers and their pages. Each test forks while the process has other
//! threads.
#![allow(clippy::unwrap_used)]

use netmem_pool::{GrowingProvider, PeerShared, Private, Region, RegionOptions, RegionProvider};
use rustix::mm::{MapFlags, ProtFlags};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// Runs `child` in a child of this process, and says how that ended: 0, or 1 for a panic, or a signal. A child that hangs is
/// ended by the alarm.
fn in_child(child: impl FnOnce()) -> Result<i32, i32> {
    // SAFETY: the C library makes its own locks usable in the child; no other thread holds one of the pool's.
    match unsafe { libc::fork() } {
        -1 => panic!("no child: {}", std::io::Error::last_os_error()),
        0 => {
            // SAFETY: takes a number; no handler. The address sanitizer has one, which would exit.
            unsafe {
                libc::alarm(60);
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            }
            let ended = catch_unwind(AssertUnwindSafe(child));
            // SAFETY: ends the process, without the destructors that are the parent's.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `status` is ours.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            if libc::WIFEXITED(status) { Ok(libc::WEXITSTATUS(status)) } else { Err(libc::WTERMSIG(status)) }
        }
    }
}

/// A mapping at `at`, where there is none.
fn map_at(at: *mut u8, len: usize) -> &'static mut [u8] {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: it replaces nothing, and stays.
    unsafe {
        let got = rustix::mm::mmap_anonymous(at.cast(), len, ProtFlags::READ | ProtFlags::WRITE, flags).unwrap();
        assert_eq!(got.cast(), at);
        std::slice::from_raw_parts_mut(at, len)
    }
}

/// Proves decision 4: memory is not in a child, whose own mapping may then be at its addresses. The child may drop all that
/// it inherited: that unmaps nothing of its own, and the parent sees nothing of it.
#[test]
fn a_child_drops_what_it_inherited() {
    fn check<M: netmem_pool::SystemMemory>() {
        let region = RegionOptions::new(64).huge_pages(false).build::<M>().unwrap();
        let (at, len) = (region.as_ptr(), region.len());
        let memory = RegionProvider::new(region);
        let growing = GrowingProvider::<M>::new(RegionOptions::new(8).huge_pages(false), 16).unwrap();
        let mut page = memory.page().unwrap();
        page.copy_from(0, b"the parent's").unwrap();
        let other = page.split_off(2048).freeze();
        // Moved in, and dropped by the child alone: it never returns.
        let inherited = std::mem::ManuallyDrop::new((memory, growing, page, other));
        let ended = in_child(|| {
            let own = map_at(at, len);
            own.fill(7);
            // SAFETY: the child's copies, which it drops once.
            let (memory, growing, page, other) = unsafe { ptr::read(&*inherited) };
            drop((other, page));
            let fresh = memory.page().unwrap();
            assert_eq!(fresh.index(), 0, "the page is home, in the child");
            drop((fresh, memory, growing));
            assert!(own.iter().all(|&b| b == 7), "the child's own mapping");
            // A region of the child's own is its own to unmap.
            let region = RegionOptions::new(8).huge_pages(false).build::<M>().unwrap();
            let (at, len) = (region.as_ptr(), region.len());
            drop(region);
            map_at(at, len)[0] = 1;
            // And it is not in the child's child.
            let region = RegionOptions::new(8).huge_pages(false).build::<M>().unwrap();
            let at = region.as_ptr();
            assert_eq!(
                in_child(|| {
                    let own = map_at(at, 4096);
                    drop(region);
                    own[0] = 1;
                }),
                Ok(0)
            );
        });
        assert_eq!(ended, Ok(0));
        let (memory, growing, mut page, other) = std::mem::ManuallyDrop::into_inner(inherited);
        assert_eq!(page.read_at(0), Ok(*b"the parent's"));
        assert!(!page.prepend(b""), "the other part is still out");
        drop(other);
        assert!(page.prepend(b""));
        drop((page, memory, growing));
    }
    check::<Private>();
    check::<PeerShared>();
}

/// Proves decision 4: bytes of an inherited page are not there in a child. To look at them is a signal, and not a copy of
/// which the device knows nothing.
#[test]
fn a_child_has_no_bytes() {
    let file = rustix::fs::memfd_create("bytes", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 1 << 16).unwrap();
    let provided = RegionProvider::new(Region::from_fd(file, .., 0).unwrap());
    let own = RegionProvider::<Private>::new(RegionOptions::new(8).huge_pages(false).build().unwrap());
    let (provided, own) = (provided.page().unwrap(), own.page().unwrap());
    assert_eq!(in_child(|| _ = provided.read_at::<1>(0)), Err(libc::SIGSEGV));
    assert_eq!(in_child(|| _ = std::hint::black_box(own.as_slice()[0])), Err(libc::SIGSEGV));
    assert_eq!(provided.read_at(0), Ok([0]));
}
