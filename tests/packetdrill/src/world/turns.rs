//! The turns of packetdrill's two threads, and the clock. The module above has the rules.

use super::host::{Turn, World};
use crate::fail::fail;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// How far the clock moves while packetdrill waits for a packet. After this time the test has
/// failed.
const PATIENCE: Duration = Duration::from_secs(600);

/// The one world of a run.
pub(crate) static WORLD: OnceLock<Shared> = OnceLock::new();

/// The world. It is made before any call.
pub(crate) fn shared() -> &'static Shared {
    WORLD.get().unwrap_or_else(|| fail("a call before packetdrill_interface_init"))
}

/// The world, which packetdrill's two threads share.
pub(crate) struct Shared {
    world: Mutex<World>,
    turns: Condvar,
    main: ThreadId,
}

impl Shared {
    /// The calling thread is packetdrill's main thread.
    pub(crate) fn new(world: World) -> Self {
        Self { world: Mutex::new(world), turns: Condvar::new(), main: std::thread::current().id() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_main(&self) -> bool {
        std::thread::current().id() == self.main
    }

    /// Runs a call that does not block. Its effects can let the blocked call return.
    pub(crate) fn call<T>(&self, call: impl FnOnce(&mut World) -> T) -> T {
        let mut world = self.lock();
        let result = call(&mut world);
        world.collect();
        drop(self.settle(world));
        result
    }

    /// Runs a call that waits until `attempt` returns something. At `deadline`, `attempt` is called
    /// for the last time.
    pub(crate) fn blocking<T>(
        &self,
        deadline: Option<Duration>,
        mut attempt: impl FnMut(&mut World, bool) -> Option<T>,
    ) -> T {
        let mut world = self.lock();
        let deadline = deadline.map(|wait| world.now + wait);
        let mut blocked = false;
        loop {
            let over = deadline.is_some_and(|deadline| deadline <= world.now);
            let result = attempt(&mut world, over);
            world.collect();
            if let Some(result) = result {
                if blocked {
                    world.blocked = None;
                    world.turn = Turn::Ending;
                    self.turns.notify_all();
                } else {
                    drop(self.settle(world));
                }
                return result;
            }
            if self.is_main() {
                world = self.wait(world, "a call that blocks");
            } else {
                blocked = true;
                world.blocked = Some(deadline);
                world.turn = Turn::Main;
                self.turns.notify_all();
                world = self
                    .turns
                    .wait_while(world, |world| world.turn != Turn::Caller)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Lets the blocked call try again, and waits until it has done so. If the call returned, waits
    /// until its thread has read the time.
    fn settle<'w>(&self, mut world: MutexGuard<'w, World>) -> MutexGuard<'w, World> {
        if world.blocked.is_some() {
            world.turn = Turn::Caller;
            self.turns.notify_all();
            world =
                self.turns.wait_while(world, |world| world.turn != Turn::Main).unwrap_or_else(PoisonError::into_inner);
        }
        world
    }

    /// Moves the clock to `to`, from timer to timer.
    fn advance<'w>(&self, mut world: MutexGuard<'w, World>, to: Duration) -> MutexGuard<'w, World> {
        while let Some(at) = world.deadline().filter(|at| *at <= to) {
            world.now = world.now.max(at);
            world.timeout();
            world = self.settle(world);
            // A full queue, for example, lets a timer have no effect.
            if world.deadline() == Some(at) {
                break;
            }
        }
        world.now = world.now.max(to);
        world
    }

    /// Moves the clock to the next timer. If there is no timer, or none in time, the test ends.
    fn wait<'w>(&self, mut world: MutexGuard<'w, World>, what: &str) -> MutexGuard<'w, World> {
        let at = world.deadline().filter(|at| at.saturating_sub(world.now) <= PATIENCE);
        let Some(at) = at else { fail(&format!("{what}: nothing will happen")) };
        let was_due = at <= world.now;
        let mut world = self.advance(world, at);
        if was_due && world.deadline() == Some(at) {
            fail("a timer of the stack stays due: after handle_timeout, the deadline is later");
        }
        world
    }

    /// The time for packetdrill. Each call returns a later time.
    pub(crate) fn time(&self) -> Duration {
        let mut world = self.lock();
        if world.turn == Turn::Ending && !self.is_main() {
            world.turn = Turn::Main;
            self.turns.notify_all();
        } else {
            let next = world.now + Duration::from_micros(1);
            world = self.advance(world, next);
        }
        world.now
    }

    pub(crate) fn sleep(&self, time: Duration) {
        let world = self.lock();
        let to = world.now + time;
        drop(self.advance(world, to));
    }

    /// The next packet that the host sent, and the time at which it was sent.
    pub(crate) fn sent(&self) -> (Vec<u8>, Duration) {
        let mut world = self.lock();
        let since = world.now;
        loop {
            if let Some(packet) = world.sent.pop_front() {
                return packet;
            }
            if world.now - since > PATIENCE {
                fail("no packet for ten minutes");
            }
            world = self.wait(world, "waiting for a packet");
        }
    }
}
