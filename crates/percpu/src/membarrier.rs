//! The system call behind the barrier: `membarrier`, for restartable sequences.

const QUERY: libc::c_int = 0;
const EXPEDITED_RSEQ: libc::c_int = 1 << 7;
const REGISTER_EXPEDITED_RSEQ: libc::c_int = 1 << 8;

fn membarrier(command: libc::c_int) -> std::io::Result<libc::c_long> {
    // SAFETY: takes two more numbers, which these commands want to be 0.
    match unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } {
        -1 => Err(std::io::Error::last_os_error()),
        answer => Ok(answer),
    }
}

/// Registers the process. Returns false if the kernel has no such barrier.
pub(crate) fn register() -> bool {
    let known = membarrier(QUERY).unwrap_or(0);
    known & libc::c_long::from(EXPEDITED_RSEQ) != 0 && membarrier(REGISTER_EXPEDITED_RSEQ).is_ok()
}

/// Restarts every sequence that is running in this process.
pub(crate) fn restart_sequences() -> std::io::Result<()> {
    match membarrier(EXPEDITED_RSEQ) {
        Ok(_) => Ok(()),
        // Registration belongs to the address space. After any kind of fork the process has another
        // address space, and registers again.
        Err(e) if e.raw_os_error() == Some(libc::EPERM) && register() => membarrier(EXPEDITED_RSEQ).map(drop),
        // The kernel is short of memory at the moment. This can happen on kernels for very many
        // CPUs.
        Err(e) if e.raw_os_error() == Some(libc::ENOMEM) => {
            std::thread::yield_now();
            membarrier(EXPEDITED_RSEQ).map(drop)
        }
        Err(e) => Err(e),
    }
}
