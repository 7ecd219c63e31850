//! The stack: a turn of its work, the wait between two turns, pages to send from, its end.

use crate::frag::{self, netmem_frag};
use crate::handle::Kind;
use crate::options::{self, Versioned};
use crate::owned::{self, Owned};
use crate::region::Kept;
use crate::stack::events::{Ready, netmem_event};
use crate::stack::handles::netmem_stack;
use crate::stack::memory::{SendMemory, to_c};
use crate::stack::{Over, each, status, value};
use crate::status::{Failure, netmem_status};
use netmem::host::Apart;
use netmem::tcp::{SocketError, Sockets, Stack, StackStats, Time};
use netmem::virtio::{VirtioRx, VirtioTx};
use netmem_packet::{Armed, TxQueue, Wait};
use netmem_pool::{Mapped, Readable, SharedPool, TrustedPeer};
use netmem_xsk::{XskRx, XskTx};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

impl Kind for netmem_stack {
    type Value = Running;
    const NAME: &'static str = "netmem_stack";
    const NUMBER: u64 = 0x6e65_746d_656d_0020;
}

impl Owned for netmem_stack {}

/// A stack, and what it needs.
pub(crate) struct Parts<M: Mapped, R: netmem::tcp::Source<Payload = M>, T: TxQueue<Mem = M>> {
    // The queues stop before the device ends.
    pub(crate) stack: Stack<R, T>,
    /// The thread of a tap's device.
    pub(crate) device: Option<Apart>,
    /// Headers, and payload that is copied.
    pub(crate) pool: Arc<SharedPool<M>>,
    /// What the program allocates. It counts in no share of the stack's, so it is a pool of its
    /// own.
    pub(crate) user_pool: Arc<SharedPool<M>>,
}

type OnTap = Parts<TrustedPeer, VirtioRx<TrustedPeer>, VirtioTx<TrustedPeer>>;
type OnXsk = Parts<Kept, XskRx<Kept>, XskTx<Kept>>;

/// The value of the handle.
pub(crate) struct Running {
    over: Over<OnTap, OnXsk>,
    memory: SendMemory,
    ready: Arc<Ready>,
    beginning: Instant,
    /// Connections were notified that the device or the interface is gone.
    stopped: bool,
    /// Its end has begun: nothing new begins.
    shut_down: bool,
}

impl Running {
    pub(crate) fn new(over: Over<OnTap, OnXsk>, memory: SendMemory, beginning: Instant) -> Self {
        Self { over, memory, ready: Arc::default(), beginning, stopped: false, shut_down: false }
    }

    pub(crate) fn ready(&self) -> &Arc<Ready> {
        &self.ready
    }

    pub(crate) fn memory(&self) -> &SendMemory {
        &self.memory
    }

    /// What opens listeners and connections. An error after the shutdown.
    pub(crate) fn sockets(&self) -> Result<Over<Sockets<TrustedPeer>, Sockets<Kept>>, Failure> {
        match &self.over {
            _ if self.shut_down => Err(SocketError::StackGone.into()),
            Over::Tap(parts) => Ok(Over::Tap(parts.stack.sockets())),
            Over::Xsk(parts) => Ok(Over::Xsk(parts.stack.sockets())),
        }
    }

    fn now(&self) -> Time {
        Time::ZERO + self.beginning.elapsed()
    }

    fn poll(&mut self) -> Result<usize, Failure> {
        let now = self.now();
        let work = each!(&mut self.over, parts => parts.stack.poll(now));
        self.ready.publish();
        // While there is work, the queues work.
        if work == 0
            && let Err(stopped) = each!(&self.over, parts => parts.stack.check())
        {
            return Err(self.stop(stopped));
        }
        Ok(work)
    }

    /// Ends all connections, once: their events report it.
    #[cold]
    fn stop(&mut self, why: std::io::Error) -> Failure {
        if !self.stopped {
            self.stopped = true;
            let now = self.now();
            each!(&mut self.over, parts => {
                parts.stack.handle_device_gone();
                parts.stack.poll(now);
            });
            self.ready.publish();
        }
        Failure::Stopped(why)
    }

    /// Nanoseconds until the stack must be polled: 0 if there is work, -1 if it can wait for ever.
    fn arm(&mut self) -> Result<i64, Failure> {
        if !self.ready.is_empty() {
            return Ok(0);
        }
        let now = self.now();
        let due = each!(&self.over, parts => parts.stack.poll_timeout());
        let left = due.map(|at| at.since(now));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(0);
        }
        match each!(&mut self.over, parts => parts.stack.arm()) {
            Ok(Armed::Waits) => Ok(left.map_or(-1, |left| i64::try_from(left.as_nanos()).unwrap_or(i64::MAX))),
            Ok(Armed::Work) => Ok(0),
            Err(stopped) => Err(self.stop(stopped)),
        }
    }
}

fn alloc<M: Readable>(pool: &SharedPool<M>, out: &mut [std::mem::MaybeUninit<netmem_frag>]) -> usize {
    let mut done = 0;
    for room in out {
        let Some(page) = pool.alloc() else { break };
        room.write(to_c(page.freeze()));
        done += 1;
    }
    done
}

/// Does all work that is due: receives frames, passes them to connections, fires timers, sends what
/// is due. Never blocks. `work` gets how much there was, unless it is null: not 0 if the next call
/// may find more. Call netmem_stack_next_event then.
///
/// Calls for listeners and connections take effect in the next turn, which sends the segments.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (the tap or
/// the interface is gone; all connections have ended, and their events report it).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_poll(stack: *mut netmem_stack, work: *mut usize) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let done = unsafe { owned::get_mut(stack) }?.poll()?;
        if let Some(work) = NonNull::new(work) {
            // SAFETY: the caller has room for a number there.
            unsafe { work.write(done) };
        }
        Ok(())
    })
}

/// Writes the next event to `event`, whose `size` is set, and returns whether there is one. Call it
/// after netmem_stack_poll until it returns false. A handle is in at most one event at a time, and
/// after its close in none.
///
/// A call that does less than was asked requests the event, once: netmem_tcp_accept that finds no
/// connection, netmem_tcp_receive that fills fewer than `n` fragments, netmem_tcp_send and
/// netmem_tcp_write that accept less than `n`, and netmem_tcp_connect. So after an event, call
/// again until a call does less than was asked. A connection that was accepted has no event before
/// that: call receive at once.
///
/// No system call, no allocation. Returns false with a text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_next_event(stack: *mut netmem_stack, event: *mut netmem_event) -> bool {
    value(|| {
        // SAFETY: as the header says.
        let stack = unsafe {
            options::room(event)?;
            owned::get_mut(stack)?
        };
        let Some(next) = stack.ready.next() else { return Ok(false) };
        // SAFETY: as the header says.
        unsafe { options::write(event, &next) }?;
        Ok(true)
    })
    .unwrap_or(false)
}

/// The descriptor on which to wait, with poll, select or epoll, for POLLIN: readable after
/// netmem_stack_arm when the stack has work. It is the stack's, and the same until it is closed.
/// Never read, write or close it. -1 with a text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_fd(stack: *const netmem_stack) -> i32 {
    let fd = |stack: &Running| each!(&stack.over, parts => parts.stack.as_fd().as_raw_fd());
    // SAFETY: as the header says.
    value(|| Ok(fd(unsafe { owned::peek(stack) }?))).unwrap_or(-1)
}

/// Asks for a wake-up, and writes to `nanoseconds` how long to sleep at most, until the next timer:
/// 0 if there is work or an event already, -1 if there is no timer. A thread that was woken calls
/// netmem_stack_disarm and netmem_stack_poll. A few system calls.
///
/// A program that turns without a sleep for some microseconds after the last work is woken less
/// often.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_arm(stack: *mut netmem_stack, nanoseconds: *mut i64) -> netmem_status {
    status(|| {
        let out = NonNull::new(nanoseconds).ok_or_else(|| Failure::null("nanoseconds"))?;
        // SAFETY: as the header says.
        let left = unsafe { owned::get_mut(stack) }?.arm()?;
        // SAFETY: the caller has room for it there.
        unsafe { out.write(left) };
        Ok(())
    })
}

/// Ends the request for a wake-up: without it each frame wakes the descriptor. Misuse leaves a
/// text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_disarm(stack: *mut netmem_stack) {
    status(|| {
        // SAFETY: as the header says.
        each!(&mut unsafe { owned::get_mut(stack) }?.over, parts => parts.stack.disarm());
        Ok(())
    });
}

/// Allocates up to `n` whole pages to send from, and returns how many: fewer only if the program
/// holds, or sends, all pages that the stack has for this, which are 2048 on a tap. No event
/// reports that one has returned: try again after each netmem_stack_poll that did work. The
/// variables are not read. Write them before the first netmem_tcp_send. A page that was sent
/// returns when the peer has acknowledged it.
///
/// Returns 0 with a text for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_alloc(stack: *mut netmem_stack, frags: *mut netmem_frag, n: usize) -> usize {
    value(|| {
        // SAFETY: as the header says.
        let (stack, out) = unsafe { (owned::get_mut(stack)?, frag::room(frags, n)?) };
        Ok(each!(&stack.over, parts => alloc(&parts.user_pool, out)))
    })
    .unwrap_or(0)
}

/// What a stack received, sent and lost. Set `size` to sizeof(netmem_stack_stats).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_stack_stats {
    /// sizeof(netmem_stack_stats)
    pub size: usize,
    /// frames received; segments that were merged count as one
    pub received: u64,
    /// frames posted to the device or the kernel
    pub sent: u64,
    /// frames whose headers are wrong, or of unknown protocols
    pub malformed: u64,
    /// frames for other stations
    pub foreign: u64,
    /// packets whose transport checksum is wrong
    pub wrong_checksum: u64,
    /// bytes that netmem_tcp_write copied into pages
    pub copied_sent: u64,
    /// resets sent for segments of no connection
    pub resets: u64,
    /// frames not sent because there was no page for their headers
    pub no_page: u64,
    /// packets dropped because their next hop did not answer
    pub unresolved: u64,
    /// payload dropped because the program holds too many received pages
    pub short_of_pages: u64,
    /// acknowledgements dropped because the accept queue was full
    pub accept_overflows: u64,
    /// connections that ended before they were accepted
    pub ended_unaccepted: u64,
    /// connections now, those that are closing included
    pub connections: u64,
    /// of these, connections in TIME-WAIT
    pub time_wait: u64,
    /// received pages that wait for the program now
    pub pages: u64,
    /// pages for sending that are held or sent now
    pub send_pages: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_stack_stats {
    const NAME: &'static str = "netmem_stack_stats";
    const LEAST: usize = 136;
}

impl Running {
    fn stats(&self) -> netmem_stack_stats {
        let (stats, connections, time_wait, pages, send_pages): (StackStats, _, _, _, _) = each!(&self.over, parts => (
            parts.stack.stats(),
            parts.stack.connections(),
            parts.stack.connections_in_time_wait(),
            parts.stack.pages(),
            parts.pool.stats().inflight + parts.user_pool.stats().inflight,
        ));
        netmem_stack_stats {
            size: size_of::<netmem_stack_stats>(),
            received: stats.received,
            sent: stats.sent,
            malformed: stats.malformed,
            foreign: stats.foreign,
            wrong_checksum: stats.wrong_checksum,
            copied_sent: stats.copied_sent,
            resets: stats.resets,
            no_page: stats.no_page,
            unresolved: stats.unresolved,
            short_of_pages: stats.short,
            accept_overflows: stats.accept_overflows,
            ended_unaccepted: stats.ended_unaccepted,
            connections: connections as u64,
            time_wait: time_wait as u64,
            pages: pages.into(),
            send_pages,
        }
    }
}

/// Counts of the stack. Linear in the connections.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_get_stats(
    stack: *mut netmem_stack,
    stats: *mut netmem_stack_stats,
) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { options::write(stats, &owned::get_mut(stack)?.stats()) })
}

/// Begins the stack's end: listeners and connections are closed, as if the program had closed each.
/// What was sent still arrives, and then the end of the stream. Continue with the program's loop
/// until netmem_stack_is_shut_down. netmem_tcp_listen and netmem_tcp_connect return
/// NETMEM_ERR_CLOSED from now on. Handles of listeners and connections stay with the program:
/// calls for them return NETMEM_ERR_CLOSED as soon as the connection has ended.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_shutdown(stack: *mut netmem_stack) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let running = unsafe { owned::get_mut(stack) }?;
        running.shut_down = true;
        each!(&mut running.over, parts => parts.stack.close());
        Ok(())
    })
}

/// Whether nothing is left to be sent after netmem_stack_shutdown: each peer has acknowledged all
/// of it. A peer that does not answer can delay this for minutes. Linear in the connections. False
/// for misuse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_is_shut_down(stack: *mut netmem_stack) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(each!(&unsafe { owned::get_mut(stack) }?.over, parts => parts.stack.is_closed()))).unwrap_or(false)
}

/// Closes the stack. Its connections end without a segment to their peers: call
/// netmem_stack_shutdown before, or abort them and poll once. Fragments that the program holds stay
/// valid. Handles of listeners and connections stay with the program, which closes each; other
/// calls for them return NETMEM_ERR_CLOSED. The stack's memory is freed with the last of them and
/// the last fragment. `stats` gets the final counts, unless it is null. If it has a wrong size, the
/// stack stays.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_close(stack: *mut netmem_stack, stats: *mut netmem_stack_stats) -> netmem_status {
    let end = |running: Running| {
        let stats = running.stats();
        running.ready.close();
        match running.over {
            Over::Tap(Parts { stack, device, pool, user_pool }) => {
                drop(stack);
                drop((device, pool, user_pool));
            }
            Over::Xsk(Parts { stack, pool, user_pool, .. }) => drop((stack, pool, user_pool)),
        }
        stats
    };
    // SAFETY: as the header says.
    status(|| unsafe { owned::close_counted(stack, stats, end) })
}
