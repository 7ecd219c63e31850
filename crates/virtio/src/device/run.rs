//! A worker on a thread of its own: polls while there is work, then sleeps until a driver, a port
//! or the control side wakes it.
//!
//! An idle device executes nothing. So every cause of work has a descriptor, or its time is known
//! in advance:
//!
//! | work | what ends the sleep |
//! | --- | --- |
//! | the driver posts buffers | its kick, if the queue is armed ([`crate::virtqueue::event`]) |
//! | the port has a frame, or fails | the port's descriptor |
//! | a frame has crossed a slow link | the earliest deadline of a port ([`Port::deadline`]); a sleep has no other timeout |
//! | another worker leaves a frame for the port's queue ([`super::port::Steering`]) | the port's second descriptor |
//! | another pair's worker leaves a frame, or makes room for one ([`super::port::Cross`]) | the worker's own eventfd |
//! | a message changes a ring | the worker's own eventfd |
//! | `stop` is set | [`Control::wake`](super::Control::wake), which writes the same eventfd |
//!
//! A driver that shares no kick descriptor for a ring sends no notifications. A worker with such a
//! ring does not sleep.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use netmem_packet::{Armed, Wait, arm_all};
use netmem_pool::sigbus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::pair::Pair;
use super::port::Port;
use super::{DeviceError, Worker};
use crate::Spin;

/// Passes between two checks of whether the ports still work, in a worker that does not sleep.
const PASSES_BETWEEN_CHECKS: u32 = 1024;

impl<P: Port> Worker<P> {
    /// Moves frames until `stop` is set. A thread that sleeps notices that when
    /// [`Control::wake`](super::Control::wake) is called.
    ///
    /// After the last frame the thread continues to poll for the time of `spin`, then sleeps. With
    /// [`Spin::Forever`] it sleeps only while none of its rings runs.
    ///
    /// # Errors
    ///
    /// A port that no longer works, or a system call that fails.
    pub fn run(&mut self, stop: &AtomicBool, spin: Spin) -> Result<(), DeviceError> {
        while !stop.load(Ordering::Relaxed) {
            if self.poll() == 0 && self.stays_idle(spin, stop)? {
                self.check_ports()?;
                self.sleep(&mut [], None)?;
            }
        }
        Ok(())
    }

    /// The end of a round of a thread that drives the worker together with other queues, for
    /// example the queues of the driver of this device. The driver and the device then need no
    /// notifications to each other. Call [`Self::poll`], do the work of the other queues, and then
    /// call this with the amount of `work` in the round.
    ///
    /// After the last round with work, the thread continues to poll for the time of `spin`. Then
    /// this call sleeps until the worker or one of the queues `beside` may have work, but no longer
    /// than `at_most`. With [`Spin::Forever`] it sleeps only while none of the worker's rings runs.
    ///
    /// Cost: a load after a round with work, a clock reading after one without, and three system
    /// calls or more for a sleep.
    ///
    /// ```no_run
    /// use netmem_packet::{Packet, Poll, RxQueue, TxQueue, Wait};
    /// use netmem_virtio::Spin;
    /// use netmem_virtio::device::{DeviceError, Worker, port::Tap};
    ///
    /// fn serve<R: RxQueue + Wait, T: TxQueue + Wait>(
    ///     device: &mut Worker<Tap>,
    ///     rx: &mut R,
    ///     tx: &mut T,
    /// ) -> Result<(), DeviceError> {
    ///     loop {
    ///         let mut work = device.poll();
    ///         work += rx.poll(|poll| tx.complete() + poll.receive(256, &mut |packet: Packet<R::Mem>| drop(packet)));
    ///         device.turn(work, Spin::default(), &mut [rx], None)?;
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// A port that no longer works, a queue `beside` that has stopped, or a system call that fails.
    pub fn turn(
        &mut self,
        work: usize,
        spin: Spin,
        beside: &mut [&mut dyn Wait],
        at_most: Option<Duration>,
    ) -> Result<(), DeviceError> {
        if work > 0 {
            self.idle_rounds = 0;
            return Ok(());
        }
        if self.idle_rounds == 0 {
            self.idle_since = Instant::now();
        }
        let over = match spin.poll_for() {
            Some(time) => time.is_zero() || self.idle_since.elapsed() >= time,
            None => !self.rings_run,
        };
        self.idle_rounds = self.idle_rounds % PASSES_BETWEEN_CHECKS + 1;
        if over || self.idle_rounds == PASSES_BETWEEN_CHECKS {
            self.check_ports()?;
        }
        if over {
            self.idle_rounds = 0;
            self.sleep(beside, at_most)?;
        } else {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Polls for the time of `spin`; returns whether nothing came.
    fn stays_idle(&mut self, spin: Spin, stop: &AtomicBool) -> Result<bool, DeviceError> {
        let since = Instant::now();
        for pass in 1_u32.. {
            let over = spin.poll_for().map_or(!self.rings_run, |time| since.elapsed() >= time);
            if over || self.poll() > 0 {
                return Ok(over);
            }
            if pass.is_multiple_of(PASSES_BETWEEN_CHECKS) {
                self.check_ports()?;
                if stop.load(Ordering::Relaxed) {
                    return Ok(false);
                }
            }
            std::hint::spin_loop();
        }
        Ok(false)
    }

    fn check_ports(&mut self) -> Result<(), DeviceError> {
        self.take_error().map_or(Ok(()), |e| Err(e.into()))
    }

    /// Asks drivers and ports for the events that end a sleep. Returns what each port waits for,
    /// and the time at which one has work; nothing if there is work, or may be.
    fn arm_pairs(&mut self) -> Option<(Vec<PollFlags>, Option<Instant>)> {
        // Ports that were exchanged have no pair yet. A pair that another thread had locked was not
        // served, or not checked for lost memory.
        if self.ports_lent || self.left_out || sigbus::faults() != self.faults {
            return None;
        }
        let Self { shared, wakers, index, ports, .. } = self;
        let (mut awaited, mut deadline) = (Vec::with_capacity(ports.len()), None::<Instant>);
        for (n, port) in (*index..).step_by(wakers.len()).zip(ports.iter_mut()) {
            let mut pair = shared.try_pair(n)?;
            let delivers = pair.enabled(0) && !shared.unused(n, pair.features);
            let receives = match arm(&mut pair, delivers, port) {
                Idle::No => return None,
                Idle::UntilKicked => false,
                Idle::UntilKickedOrFrame => true,
            };
            awaited.push(if receives { PollFlags::IN } else { PollFlags::PRI });
            deadline = [deadline, port.deadline(receives)].into_iter().flatten().min();
        }
        if shared.options.serve_control && *index == 0 {
            let mut control = shared.try_pair(shared.options.max_pairs)?;
            if !arm_control(&mut control) {
                return None;
            }
        }
        Some((awaited, deadline))
    }

    /// Asks drivers for the events that end a sleep, for a thread that sleeps in a loop of its own
    /// and not in [`Self::turn`]. Call it after a [`Self::poll`] that moved nothing. If it returns
    /// [`Armed::Waits`], the thread sleeps until one of [`Self::wait_fds`] is readable, or an event
    /// of its ports: it has made the ports, and knows their descriptors and times. Then it calls
    /// [`Self::disarm`], and polls.
    ///
    /// Cost: a memory barrier for each ring.
    ///
    /// ```no_run
    /// use netmem_virtio::device::{Worker, port::Echo};
    /// use std::os::fd::BorrowedFd;
    ///
    /// fn serve(device: &mut Worker<Echo>, sleep: impl Fn([BorrowedFd<'_>; 2])) {
    ///     loop {
    ///         if device.poll() == 0 && device.arm().waits() {
    ///             sleep(device.wait_fds());
    ///             device.disarm();
    ///         }
    ///     }
    /// }
    /// ```
    pub fn arm(&mut self) -> Armed {
        if self.arm_pairs().is_some() { Armed::Waits } else { Armed::Work }
    }

    /// Forgets the events until now, after a sleep. Two system calls.
    pub fn disarm(&mut self) {
        let waker = &self.wakers[self.index];
        waker.clear();
        waker.kicks.clear();
    }

    /// The descriptors that are readable when the worker may have work, except those of its ports:
    /// messages of the front end and [`Control::wake`](super::Control::wake), and notifications of
    /// drivers. They are the same for as long as the worker lives.
    #[must_use]
    pub fn wait_fds(&self) -> [BorrowedFd<'_>; 2] {
        let waker = &self.wakers[self.index];
        [waker.awaited(), waker.kicks.as_fd()]
    }

    /// Sleeps until there may be work here or in a queue `beside`, but no longer than `at_most`.
    /// Returns at once if there is work, if another thread is at work in a pair of the worker, or
    /// if memory may be lost.
    fn sleep(&mut self, beside: &mut [&mut dyn Wait], at_most: Option<Duration>) -> Result<(), DeviceError> {
        let Some((awaited, deadline)) = self.arm_pairs() else { return Ok(()) };
        let Self { shared, wakers, index, ports, .. } = self;
        let waker = &wakers[*index];
        let mut fds = vec![
            PollFd::from_borrowed_fd(waker.awaited(), PollFlags::IN),
            PollFd::from_borrowed_fd(waker.kicks.as_fd(), PollFlags::IN),
        ];
        // A port can also fail while no frames are awaited. The kernel reports a failure in any
        // case, but some files wake a thread only if it waits for an event of incoming data: a
        // deleted tap signals input and `PRI`. Other ports have a descriptor for that.
        for (port, events) in ports.iter().zip(awaited) {
            let backlog = port.backlog_fd().filter(|_| events == PollFlags::IN);
            fds.extend(port.fd().into_iter().chain(backlog).map(|fd| PollFd::from_borrowed_fd(fd, events)));
            let failure = port.failure().filter(|_| events != PollFlags::IN);
            fds.extend(failure.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        }
        if !arm_all(beside).map_err(DeviceError::Queue)? {
            return Ok(());
        }
        let own = fds.len();
        fds.extend(beside.iter().map(|queue| PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)));
        let stats = &shared.stats;
        stats.polls.fetch_add(std::mem::take(&mut self.idle), Ordering::Relaxed);
        stats.sleeps.fetch_add(1, Ordering::Relaxed);
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        // A time that does not fit the type means for ever.
        let timeout = [left, at_most].into_iter().flatten().min().and_then(|left| Timespec::try_from(left).ok());
        let outcome = poll(&mut fds, timeout.as_ref());
        let ended = |by: &[PollFd<'_>]| by.iter().any(|fd| !fd.revents().is_empty());
        let [control, kick, port] = [&fds[..1], &fds[1..2], &fds[2..own]].map(ended);
        drop(fds);
        beside.iter_mut().for_each(|queue| queue.disarm());
        let timed_out = match outcome {
            Ok(ready) => ready == 0,
            Err(Errno::INTR) => false,
            Err(e) => return Err(DeviceError::Io { what: "poll", source: e.into() }),
        };
        // Counted before the cause, so that a reader who sees the cause also sees that the thread
        // is awake.
        stats.wakes.fetch_add(1, Ordering::Relaxed);
        if control {
            stats.woken_by_control.fetch_add(1, Ordering::Relaxed);
            waker.clear();
        }
        if kick {
            stats.woken_by_kick.fetch_add(1, Ordering::Relaxed);
            waker.kicks.clear();
        }
        if port {
            stats.woken_by_port.fetch_add(1, Ordering::Relaxed);
        }
        if timed_out {
            stats.woken_by_deadline.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The events for which a pair waits when it asks for notifications.
enum Idle {
    /// There is work already, or its driver sends no notifications.
    No,
    UntilKicked,
    /// The receive ring has buffers, so a frame of the port is awaited, too.
    UntilKickedOrFrame,
}

/// Asks the driver to notify the device of what it posts, and checks whether there is work already.
/// The pair's next pass asks for no more notifications. `delivers`: the receive ring is served; if
/// it is not, its buffers are no work.
fn arm<P: Port>(pair: &mut Pair, delivers: bool, port: &mut P) -> Idle {
    pair.armed = true;
    let takes = pair.enabled(1);
    let [receive, transmit] = &mut pair.rings;
    match transmit.arm() {
        Some(false) => {}
        // The driver must post receive buffers first, and will notify the device of them; or the
        // port ends the sleep.
        Some(true) if takes && !port.arm_room() => {}
        _ => return Idle::No,
    }
    if !delivers {
        return Idle::UntilKicked;
    }
    match receive.arm() {
        None => Idle::No,
        Some(true) if !receive.out_of_buffers() => match port.arm() {
            true => Idle::No,
            false => Idle::UntilKickedOrFrame,
        },
        Some(_) => Idle::UntilKicked,
    }
}

/// The same for the control queue. Returns whether to wait for a kick.
fn arm_control(control: &mut Pair) -> bool {
    control.armed = true;
    !control.enabled(0) || control.rings[0].arm() == Some(false)
}

#[cfg(test)]
mod tests {
    use super::super::port::Echo;
    use crate::device::{NetDevice, Options};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::thread;
    use std::time::{Duration, Instant};

    /// A worker does not go to sleep after a pass that has left a pair out: a ring that was started
    /// meanwhile is not served yet, so that its port refuses the frames that would wake the worker.
    #[test]
    fn no_sleep_after_a_pass_that_left_a_pair_out() {
        let mut device = NetDevice::new(Options::default(), |_| Ok(Echo::new())).unwrap();
        let (shared, stats) = (Arc::clone(&device.worker.shared), device.stats());
        let pair = shared.try_pair(0).unwrap();
        device.poll();
        drop(pair);
        let sleeps = || stats.sleeps.load(Ordering::Relaxed);
        device.worker.sleep(&mut [], Some(Duration::from_millis(1))).unwrap();
        assert_eq!(sleeps(), 0);
        device.poll();
        device.worker.sleep(&mut [], Some(Duration::from_millis(1))).unwrap();
        assert_eq!(sleeps(), 1);
    }

    /// A worker does not go to sleep, and waits for nothing, while the control side is at work in a
    /// pair.
    #[test]
    fn no_sleep_beside_the_control_side() {
        let mut device = NetDevice::new(Options::default(), |_| Ok(Echo::new())).unwrap();
        let shared = Arc::clone(&device.worker.shared);
        let pair = shared.try_pair(0).unwrap();
        let worker = thread::spawn(move || {
            device.worker.sleep(&mut [], None).map(|()| device.worker.shared.stats.sleeps.load(Ordering::Relaxed))
        });
        let patience = Instant::now() + Duration::from_secs(60);
        while !worker.is_finished() {
            assert!(Instant::now() < patience, "it waits for the control side");
            thread::yield_now();
        }
        drop(pair);
        assert_eq!(worker.join().unwrap().unwrap(), 0);
    }
}
