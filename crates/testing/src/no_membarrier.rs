//! A thread to which the kernel refuses `membarrier`.

/// Runs `body` on a thread of its own, with a seccomp filter that refuses `membarrier` to this
/// thread alone.
pub fn without_membarrier<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(|| refuse().then(body)).join().expect("the thread ends"))
        .expect("the kernel takes a filter")
}

/// Installs the filter. The thread, and what it starts, cannot remove it.
fn refuse() -> bool {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS: the system call's number is the first word
    const JUMP_IF_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    const ALLOW: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0000;
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let mut steps = [
        step(LOAD, 0, 0),
        step(JUMP_IF_EQUAL, 1, libc::SYS_membarrier as u32),
        step(RETURN, 0, ALLOW),
        step(RETURN, 0, ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: a program of so many steps, which the kernel copies.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    }
}
