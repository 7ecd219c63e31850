//! The device on a thread of its own: polls while there is work, then sleeps until a driver or a port wakes it.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::port::Port;
use super::state::State;
use super::{DeviceError, NetDevice};
use crate::virtqueue::Armed;
use crate::virtqueue::device::AnyDeviceQueue;

/// How long to go on polling after the last frame: at first, and within which bounds. The span doubles when a frame
/// comes while polling and halves when none does, so that an idle device costs next to nothing.
const SPIN: [Duration; 3] = [Duration::from_micros(20), Duration::from_micros(2), Duration::from_micros(100)];

/// A sleep without events ends after this, to look at the `stop` flag.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

impl<P: Port> NetDevice<P> {
    /// Moves frames until `stop` is set ([`super::Control::wake`] makes it look at once; otherwise within 100 ms).
    ///
    /// # Errors
    ///
    /// A port that no longer works, or a system call that fails.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<(), DeviceError> {
        let [mut spin, least, most] = SPIN;
        while !stop.load(Ordering::Relaxed) {
            if self.poll() > 0 {
                continue;
            }
            let since = Instant::now();
            let came = loop {
                if self.poll() > 0 {
                    break true;
                }
                if since.elapsed() >= spin {
                    break false;
                }
                std::hint::spin_loop();
            };
            if came {
                spin = (spin * 2).min(most);
                continue;
            }
            spin = (spin / 2).max(least);
            if let Some(e) = self.ports.iter_mut().find_map(Port::take_error) {
                return Err(e.into());
            }
            self.sleep()?;
        }
        Ok(())
    }

    fn sleep(&mut self) -> Result<(), DeviceError> {
        let failed = |e: rustix::io::Errno| DeviceError::Io { what: "poll", source: e.into() };
        // The control side has it, or waits for it: it may make work.
        let Some(mut state) = self.shared.try_lock() else { return Ok(()) };
        let work = queues(&mut state).fold(false, |work, q| work | (q.arm() == Armed::Work));
        let Some(ports) = sources(&mut state, &mut self.ports).filter(|_| !work) else {
            queues(&mut state).for_each(AnyDeviceQueue::disarm);
            return Ok(());
        };
        drop(state);
        let fds = [self.shared.awaited(), self.shared.kicks.as_fd()].into_iter();
        let fds = fds.chain(ports.iter().filter_map(|&i| self.ports[i].fd()));
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        self.shared.stats.sleeps.fetch_add(1, Ordering::Relaxed);
        match poll(&mut fds, Some(&NAP)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(failed(e)),
        }
        drop(fds);
        self.shared.slept();
        queues(&mut self.shared.lock()).for_each(AnyDeviceQueue::disarm);
        Ok(())
    }
}

/// The queue pairs whose port is waited for in a sleep, beside the kicks of all rings; none if there is work already.
fn sources<P: Port>(state: &mut State, ports: &mut [P]) -> Option<Vec<usize>> {
    let mut sources = Vec::new();
    for index in 0..state.rings.len() {
        let pair = index / 2;
        let receives = index % 2 == 0 && pair < ports.len();
        let active = state.enabled(index) && !(receives && state.unused(pair));
        let ring = &mut state.rings[index];
        let Some(q) = &mut ring.queue else { continue };
        // A jump of the index is for the next pass to find.
        let buffers = q.refresh().unwrap_or(true);
        if receives {
            if active && buffers && !q.starved() {
                if ports[pair].peek().is_some() {
                    return None;
                }
                sources.push(pair);
            }
        } else if buffers && (active || pair < ports.len()) {
            // Where the port has no room, the driver has to post receive buffers first, and notifies the device of them.
            let full = active && ports.get(pair).is_some_and(|port| !port.room());
            if !full {
                return None;
            }
        }
    }
    Some(sources)
}

fn queues(state: &mut State) -> impl Iterator<Item = &mut AnyDeviceQueue> {
    state.rings.iter_mut().filter_map(|r| r.queue.as_mut())
}

#[cfg(test)]
mod tests {
    use super::super::port::Echo;
    use super::*;
    use crate::device::Options;
    use std::sync::Arc;
    use std::thread;

    /// A device does not go to sleep, and waits for nothing, while the control side is at work.
    #[test]
    fn no_sleep_beside_the_control_side() {
        let mut device = NetDevice::new(Options::default(), |_| Ok(Echo::new())).unwrap();
        let shared = Arc::clone(&device.shared);
        let state = shared.lock();
        let worker = thread::spawn(move || device.sleep().map(|()| device.shared.stats.sleeps.load(Ordering::Relaxed)));
        let patience = Instant::now() + Duration::from_secs(60);
        while !worker.is_finished() {
            assert!(Instant::now() < patience, "it waits for the control side");
            thread::yield_now();
        }
        drop(state);
        assert_eq!(worker.join().unwrap().unwrap(), 0);
    }
}
