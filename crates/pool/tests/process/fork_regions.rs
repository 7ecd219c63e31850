//! What the child of a fork may do with regions, providers and their pages. The process has other
//! threads when a test forks.

use netmem_pool::{GrowingProvider, PeerShared, Private, Region, RegionOptions, RegionProvider};
use netmem_testing::is_emulated;
use netmem_testing::skip;
use rustix::mm::{MapFlags, ProtFlags};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// Runs `child` in a child process. Returns how the child ended: 0, 1 for a panic, or a signal. If
/// the child hangs, the alarm ends it.
fn in_child(child: impl FnOnce()) -> Result<i32, i32> {
    // SAFETY: the C library makes its own locks usable in the child, and no other thread holds a
    // lock of the pool.
    match unsafe { libc::fork() } {
        -1 => panic!("no child: {}", std::io::Error::last_os_error()),
        0 => {
            // SAFETY: the call takes a number and sets no handler. The address sanitizer has a
            // handler, which would exit.
            unsafe {
                libc::alarm(60);
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            }
            let ended = catch_unwind(AssertUnwindSafe(child));
            // SAFETY: ends the process without running the parent's destructors.
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

/// A mapping at `at`, where nothing is mapped.
fn map_at(at: *mut u8, len: usize) -> &'static mut [u8] {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: it replaces nothing, and stays.
    unsafe {
        let got = rustix::mm::mmap_anonymous(at.cast(), len, ProtFlags::READ | ProtFlags::WRITE, flags).unwrap();
        assert_eq!(got.cast(), at);
        std::slice::from_raw_parts_mut(at, len)
    }
}

/// The memory is not in a child, whose own mapping may then be at the same addresses. The child may
/// drop everything that it inherited: that unmaps nothing of its own, and does not affect the
/// parent.
#[test]
fn a_child_drops_what_it_inherited() {
    let _alone = crate::alone();
    if is_emulated() {
        return skip("it is emulated, and QEMU 7.2 ignores MADV_DONTFORK");
    }
    fn check<M: netmem_pool::SystemMemory>() {
        let region = RegionOptions::new(64).huge_pages(false).build::<M>().unwrap();
        let (at, len) = (region.as_ptr(), region.len());
        let memory = RegionProvider::new(region);
        let growing = GrowingProvider::<M>::new(RegionOptions::new(8).huge_pages(false), 16).unwrap();
        let mut page = memory.page().unwrap();
        page.copy_from(0, b"the parent's").unwrap();
        let other = page.split_off(2048).freeze();
        // The child alone drops these values: it never returns.
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
            // The child may unmap a region of its own.
            let region = RegionOptions::new(8).huge_pages(false).build::<M>().unwrap();
            let (at, len) = (region.as_ptr(), region.len());
            drop(region);
            map_at(at, len)[0] = 1;
            // That region is not in the child's child either.
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

/// The bytes of an inherited page are not in the child. Reading them raises a signal. A copy would
/// be wrong, because the device does not know it.
#[test]
fn a_child_has_no_bytes() {
    let _alone = crate::alone();
    if is_emulated() {
        return skip("it is emulated, and QEMU 7.2 ignores MADV_DONTFORK");
    }
    let file = rustix::fs::memfd_create("bytes", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 1 << 16).unwrap();
    let provided = RegionProvider::new(Region::from_fd(file, .., 0).unwrap());
    let own = RegionProvider::<Private>::new(RegionOptions::new(8).huge_pages(false).build().unwrap());
    let (provided, own) = (provided.page().unwrap(), own.page().unwrap());
    assert_eq!(in_child(|| _ = provided.read_at::<1>(0)), Err(libc::SIGSEGV));
    assert_eq!(in_child(|| _ = std::hint::black_box(own.as_slice()[0])), Err(libc::SIGSEGV));
    assert_eq!(provided.read_at(0), Ok([0]));
}
