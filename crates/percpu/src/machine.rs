//! What the kernel and the C library report of this process: where a thread's rseq area is, and how
//! many CPUs there can be.
//!
//! The area of a thread is where the C library registered it: `__rseq_offset` bytes from the thread
//! pointer, if `__rseq_size` is not zero. glibc does so since 2.35, for each thread that it starts,
//! or ends the process; a tunable (`glibc.pthread.rseq=0`) turns it off. Its layout is the
//! kernel's: `cpu_id` at 4, `rseq_cs` at 8, `mm_cid` at 24.

/// No index beyond this is used: CPUs with higher numbers use the shared path.
pub(crate) const MAX_CPUS: usize = 4096;

/// A set of CPUs, a bit for each.
pub(crate) type CpuSet = [u64; MAX_CPUS / 64];

/// Asks the kernel for this thread's set of CPUs. Returns false if the kernel's own set is larger.
pub(crate) fn ask(set: &mut [u64]) -> bool {
    // SAFETY: memory of this size; the kernel writes no more than that.
    unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(set), set.as_mut_ptr()) >= 0 }
}

/// How many CPUs are in a list such as `0-3,8`.
pub(crate) fn possible(list: &str) -> Option<usize> {
    list.trim().split(',').try_fold(0_usize, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let count = last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?;
        sum.checked_add(count)?.checked_add(1)
    })
}

/// Bits in the kernel's own set of CPUs, up to the next multiple of 64: a smaller set is refused.
pub(crate) fn kernel_set() -> usize {
    let mut set: CpuSet = [0; _];
    let words = (1..=set.len()).find(|&words| ask(&mut set[..words]));
    words.map_or(MAX_CPUS, |words| words * 64)
}

/// The C library's answer.
#[cfg(not(all(target_feature = "crt-static", target_env = "gnu", target_arch = "x86_64")))]
pub(crate) fn area() -> Option<(isize, u32)> {
    // SAFETY: looks names up in the libraries that are loaded; both objects, where they exist, are
    // constants of the C library with these types, written before `main`.
    unsafe {
        let find = |name: &std::ffi::CStr| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        let size = find(c"__rseq_size").cast::<u32>().as_ref()?;
        let offset = find(c"__rseq_offset").cast::<isize>().as_ref()?;
        Some((*offset, *size))
    }
}

/// The C library's answer in a static program. That has no names to look up, but the linker knows
/// whether they exist. A dynamic program does not ask this way: it would not start with an older C
/// library than it was built with.
#[cfg(all(target_feature = "crt-static", target_env = "gnu", target_arch = "x86_64"))]
pub(crate) fn area() -> Option<(isize, u32)> {
    let (offset, size): (*const isize, *const u32);
    // SAFETY: loads two addresses, null for a weak name that no object defines; the types are as
    // above.
    unsafe {
        std::arch::asm!(
            ".weak __rseq_offset",
            ".weak __rseq_size",
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(nostack, preserves_flags, pure, readonly),
        );
        Some((*offset.as_ref()?, *size.as_ref()?))
    }
}

/// Bytes of the area that the kernel fills.
pub(crate) fn filled() -> usize {
    const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;
    // SAFETY: reads what the kernel handed to the process at its start; 0 if that has no such
    // entry.
    let filled = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) };
    usize::try_from(filled).unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Every CPU that the machine can have counts, and nothing else is a list.
    #[test]
    fn possible_cpus_are_counted() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-255", 256), ("0-3,8,10-11", 7)] {
            assert_eq!(possible(list), Some(count), "{list}");
        }
        for list in ["", "\n", "x", "3-1", "0-", "0,", "0-18446744073709551615", "-1"] {
            assert_eq!(possible(list), None, "{list}");
        }
    }
}
