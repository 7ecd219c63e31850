//! Disturbs threads while they work, so that restartable sequences are restarted: a timer of its own sends each of them a
//! signal every 50 us, they are moved between CPUs, and they are more than there are CPUs, so that they are preempted, too.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The threads to disturb.
#[derive(Default)]
pub(crate) struct Disturbed(Mutex<Vec<libc::pid_t>>);

/// Threads to do them: more than CPUs.
pub(crate) fn stress_threads() -> u64 {
    std::thread::available_parallelism().map_or(4, |cpus| 2 * cpus.get() as u64)
}

impl Disturbed {
    /// The calling thread joins those to be disturbed while `work` runs.
    pub(crate) fn during<R>(&self, work: impl FnOnce() -> R) -> R {
        // SAFETY: takes nothing.
        let tid = unsafe { libc::gettid() };
        self.0.lock().expect("nobody panics with it").push(tid);
        let timer = signal_often(tid);
        let answer = work();
        // SAFETY: made above, and used no more.
        unsafe { libc::timer_delete(timer) };
        // Under the lock: nobody moves it once it is gone.
        self.0.lock().expect("nobody panics with it").retain(|&other| other != tid);
        answer
    }

    /// Moves them until `stop`; `also` is done in between. The number of moves.
    pub(crate) fn move_about(&self, stop: &AtomicBool, mut also: impl FnMut()) -> u64 {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let mut moves = 0;
        for round in 0_usize.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let threads = self.0.lock().expect("nobody panics with it");
            for (n, &tid) in threads.iter().enumerate() {
                // SAFETY: our own threads, which are there while the lock is held; a set of CPUs of the size that is given. A
                // number that this process may not use is refused, and nothing happens.
                unsafe {
                    let mut set: libc::cpu_set_t = std::mem::zeroed();
                    libc::CPU_SET((n + round) % cpus, &mut set);
                    moves += u64::from(libc::sched_setaffinity(tid, size_of_val(&set), &set) == 0);
                }
            }
            drop(threads);
            also();
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        moves
    }
}

/// Sends SIGUSR1 to one thread of this process, every 50 us.
fn signal_often(tid: libc::pid_t) -> libc::timer_t {
    let often = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    let often = libc::itimerspec { it_interval: often, it_value: often };
    // SAFETY: an event that is zero but for what is set, a place for the timer, and no place for what was set before.
    unsafe {
        let mut event: libc::sigevent = std::mem::zeroed();
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGUSR1;
        event.sigev_notify_thread_id = tid;
        let mut timer = std::mem::zeroed();
        assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer), 0);
        assert_eq!(libc::timer_settime(timer, 0, &often, std::ptr::null_mut()), 0);
        timer
    }
}

/// Runs `handler` on every SIGUSR1 from now on.
pub(crate) fn on_signal(handler: extern "C" fn(libc::c_int)) {
    // SAFETY: a handler of the right type; zeroes are an empty mask and no flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
}
