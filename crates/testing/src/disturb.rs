//! Disturbs threads while they work, so that restartable sequences are restarted. A timer sends a
//! signal to each thread every 50 us. The threads are moved between CPUs. There are more threads
//! than CPUs, so they are also preempted.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The threads to disturb.
#[derive(Default)]
pub struct Disturbed {
    threads: Mutex<Vec<libc::pid_t>>,
    moves: AtomicU64,
}

/// The number of threads for a stress test: more than CPUs.
pub fn stress_threads() -> u64 {
    std::thread::available_parallelism().map_or(4, |cpus| 2 * cpus.get() as u64)
}

impl Disturbed {
    /// Disturbs the calling thread while `work` runs.
    pub fn during<R>(&self, work: impl FnOnce() -> R) -> R {
        // SAFETY: the call has no arguments.
        let tid = unsafe { libc::gettid() };
        self.threads.lock().expect("nobody panics with it").push(tid);
        let timer = signal_often(tid);
        let answer = work();
        // SAFETY: the timer was made above, and is not used any more.
        unsafe { libc::timer_delete(timer) };
        // Removed under the lock: afterwards, no thread moves this thread.
        self.threads.lock().expect("nobody panics with it").retain(|&other| other != tid);
        answer
    }

    /// How often a thread was moved so far.
    pub fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Moves the threads until `stop` is set, and calls `also` in between.
    pub fn move_about(&self, stop: &AtomicBool, mut also: impl FnMut()) {
        let cpus = usable_cpus();
        for round in 0_usize.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let threads = self.threads.lock().expect("nobody panics with it");
            for (n, &tid) in threads.iter().enumerate() {
                // SAFETY: these are threads of this process that exist while the lock is held, and
                // the set of CPUs has the given size. A CPU that went offline is refused, and
                // nothing happens.
                unsafe {
                    let mut set: libc::cpu_set_t = std::mem::zeroed();
                    libc::CPU_SET(cpus[(n + round) % cpus.len()], &mut set);
                    let moved = libc::sched_setaffinity(tid, size_of_val(&set), &set) == 0;
                    self.moves.fetch_add(u64::from(moved), Ordering::Relaxed);
                }
            }
            drop(threads);
            also();
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }
}

/// The CPUs that the calling thread may use. In a container, their numbers may begin anywhere.
fn usable_cpus() -> Vec<usize> {
    // SAFETY: the set of CPUs has the given size, and the numbers are in it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &mut set), 0);
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// Sends SIGUSR1 to one thread of this process, every 50 us.
fn signal_often(tid: libc::pid_t) -> libc::timer_t {
    let often = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    let often = libc::itimerspec { it_interval: often, it_value: often };
    // SAFETY: the event is zero except for the fields that are set, and the timer is written to a
    // valid place.
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
pub fn on_signal(handler: extern "C" fn(libc::c_int)) {
    // SAFETY: the handler has the right type; zeroes are an empty mask and no flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
}
