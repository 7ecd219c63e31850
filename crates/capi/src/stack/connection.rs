//! Connections.

use crate::frag::{self, netmem_frag};
use crate::handle::{self, Kind};
use crate::owned::{self, Owned};
use crate::region::Kept;
use crate::stack::endpoint::netmem_endpoint;
use crate::stack::events::{Of, Ready, Wakers};
use crate::stack::handles::{netmem_stack, netmem_tcp};
use crate::stack::memory::{SendMemory, from_c, to_c};
use crate::stack::tcp_options::{self, netmem_tcp_options};
use crate::stack::{Over, each, status};
use crate::status::{Failure, netmem_status};
use netmem::tcp::{SocketError, TcpStream};
use netmem_pool::{Readable, TrustedPeer};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Waker};

impl Kind for netmem_tcp {
    type Value = Connection;
    const NAME: &'static str = "netmem_tcp";
    const NUMBER: u64 = 0x6e65_746d_656d_0022;
}

impl Owned for netmem_tcp {}

type Stream = Over<TcpStream<TrustedPeer>, TcpStream<Kept>>;

/// The value of the handle.
pub(crate) struct Connection {
    stream: Stream,
    memory: SendMemory,
    wakers: Wakers,
}

impl Connection {
    pub(crate) fn new(stream: Stream, memory: &SendMemory, ready: &Arc<Ready>) -> Self {
        Self { stream, memory: memory.clone(), wakers: Wakers::new(ready, Of::Connection) }
    }

    /// A handle that belongs to this thread.
    pub(crate) fn into_handle(self) -> Result<*mut netmem_tcp, Failure> {
        let made = handle::create(self);
        // SAFETY: it was just made.
        unsafe { owned::get_mut::<netmem_tcp>(made) }?.wakers.set_handle(made);
        Ok(made)
    }

    /// Requests the event of a connection that can send again.
    fn await_room(&mut self) {
        await_room(&mut self.stream, &self.wakers.write);
    }
}

fn await_room(stream: &mut Stream, waker: &Waker) {
    let mut cx = Context::from_waker(waker);
    // It can be ready already: the program is to try again.
    if each!(stream, stream => stream.poll_writable(&mut cx).is_ready()) {
        waker.wake_by_ref();
    }
}

/// Fills the room. The event is requested if less than that arrived.
fn receive<M: Readable>(
    stream: &mut TcpStream<M>,
    out: &mut [MaybeUninit<netmem_frag>],
    waker: &Waker,
) -> Result<usize, Failure> {
    for (done, room) in out.iter_mut().enumerate() {
        match stream.recv_chunk(|_| true) {
            // The program's pages count in no window.
            Ok(Some(held)) => {
                room.write(to_c(held.into_parts().0));
            }
            Err(SocketError::WouldBlock) => {
                stream.register_reader(&mut Context::from_waker(waker));
                return Ok(done);
            }
            // The next call returns it, after the event of one that filled less than its room.
            Ok(None) | Err(_) if done > 0 => {
                waker.wake_by_ref();
                return Ok(done);
            }
            Ok(None) => return Err(Failure::End),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(out.len())
}

/// Queues a fragment, whose variable is empty then. False if there is no room.
///
/// # Safety
///
/// A fragment of the header.
unsafe fn send<M: Readable>(
    stream: &mut TcpStream<M>,
    variable: &mut netmem_frag,
    more: bool,
) -> Result<bool, Failure> {
    // SAFETY: as the caller promises.
    let frag = unsafe { variable.take() }.ok_or_else(Failure::empty)?;
    match stream.send(from_c(frag), more) {
        Ok(()) => Ok(true),
        Err((error, frag)) => {
            *variable = to_c(frag);
            if error.would_block() { Ok(false) } else { Err(error.into()) }
        }
    }
}

/// Why a fragment cannot be sent whose page the device does not reach.
#[cold]
fn unreachable(stream: &Stream) -> Failure {
    // No device reaches a page of a stack that was closed.
    match each!(stream, stream => stream.is_connected()) {
        Err(SocketError::StackGone) => SocketError::StackGone.into(),
        _ => Failure::Unsendable("its page is none of the stack's, and the device does not reach it"),
    }
}

/// Begins to connect to `remote`, and returns at once. The connection has an event with
/// NETMEM_EVENT_WRITE when it has been made, or has failed. What is sent before is sent then.
/// `options` may be null. The connection belongs to the stack's thread.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
/// NETMEM_ERR_ARGUMENT (also a local address that is none of the stack's, or a remote one of zeros,
/// or port 0), NETMEM_ERR_UNREACHABLE (no route), NETMEM_ERR_IN_USE, NETMEM_ERR_TOO_MANY,
/// NETMEM_ERR_CLOSED (the stack was shut down).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_connect(
    stack: *mut netmem_stack,
    remote: *const netmem_endpoint,
    options: *const netmem_tcp_options,
    connection: *mut *mut netmem_tcp,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(connection).ok_or_else(|| Failure::null("connection"))?;
        // SAFETY: as the header says.
        let (stack, remote, given) =
            unsafe { (owned::get_mut(stack)?, netmem_endpoint::read(remote, "remote")?, tcp_options::read(options)?) };
        if remote.ip().is_unspecified() || remote.port() == 0 {
            return Err(Failure::Argument("a remote endpoint without an address or a port".into()));
        }
        let stream = match (stack.sockets()?, given.local) {
            (Over::Tap(sockets), None) => Over::Tap(sockets.connect(remote, given.connection())?),
            (Over::Xsk(sockets), None) => Over::Xsk(sockets.connect(remote, given.connection())?),
            (Over::Tap(sockets), Some(local)) => Over::Tap(sockets.connect_from(local, remote, given.connection())?),
            (Over::Xsk(sockets), Some(local)) => Over::Xsk(sockets.connect_from(local, remote, given.connection())?),
        };
        let mut made = Connection::new(stream, stack.memory(), stack.ready());
        made.await_room();
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(made.into_handle()?) };
        Ok(())
    })
}

/// Writes whether the connection has been made. False while the handshake is under way.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD; and why the connection was not
/// made, or has ended: NETMEM_ERR_REFUSED, NETMEM_ERR_RESET, NETMEM_ERR_TIMED_OUT,
/// NETMEM_ERR_UNREACHABLE, NETMEM_ERR_STOPPED, NETMEM_ERR_SHUT_DOWN (netmem_tcp_shutdown, before it
/// was made), NETMEM_ERR_CLOSED (the stack).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_is_connected(connection: *mut netmem_tcp, connected: *mut bool) -> netmem_status {
    status(|| {
        let out = NonNull::new(connected).ok_or_else(|| Failure::null("connected"))?;
        // SAFETY: as the header says.
        let made = each!(&unsafe { owned::get_mut(connection) }?.stream, stream => stream.is_connected())?;
        // SAFETY: the caller has room for it there.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Both ends of the connection. Each may be null.
///
/// Errors: NETMEM_ERR_NULL (the connection), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_endpoints(
    connection: *mut netmem_tcp,
    local: *mut netmem_endpoint,
    remote: *mut netmem_endpoint,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let stream = &unsafe { owned::get_mut(connection) }?.stream;
        let ends = each!(stream, stream => [(local, stream.local_addr()), (remote, stream.peer_addr())]);
        for (out, addr) in ends {
            if let Some(out) = NonNull::new(out) {
                // SAFETY: the caller has room for an endpoint there.
                unsafe { out.write(addr.into()) };
            }
        }
        Ok(())
    })
}

/// Sets what the connection's events have as their context; null before. The program frees it.
///
/// Errors: NETMEM_ERR_NULL (the connection), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_set_context(connection: *mut netmem_tcp, context: *mut c_void) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        unsafe { owned::get_mut(connection) }?.wakers.set_context(context);
        Ok(())
    })
}

/// Receives up to `n` fragments of payload, in order, and does not wait. `received` gets how many;
/// 0 if nothing has arrived. The caller owns the fragments, which are in the pages in which they
/// arrived. The variables are not read: what they hold is to be released before. Fewer than `n`: an
/// event follows when there is more.
///
/// A program that does not receive closes the peer's window. Fragments that were received count in
/// no window: a program that keeps them stops receiving when it has enough. If the program holds
/// nearly all receive pages of the stack, payload of all connections is dropped, and sent again.
///
/// No copy, no system call. An atomic or two for a fragment.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (`n` is 0), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
/// NETMEM_ERR_END (the peer sends no more), and why the connection has ended, after what was
/// received before: NETMEM_ERR_REFUSED, NETMEM_ERR_RESET, NETMEM_ERR_TIMED_OUT,
/// NETMEM_ERR_UNREACHABLE, NETMEM_ERR_STOPPED, NETMEM_ERR_CLOSED (the stack).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_receive(
    connection: *mut netmem_tcp,
    frags: *mut netmem_frag,
    n: usize,
    received: *mut usize,
) -> netmem_status {
    status(|| {
        let count = NonNull::new(received).ok_or_else(|| Failure::null("received"))?;
        // SAFETY: as the header says.
        let (Connection { stream, wakers, .. }, out) = unsafe { (owned::get_mut(connection)?, frag::room(frags, n)?) };
        if out.is_empty() {
            return Err(Failure::Argument("room for no fragments".into()));
        }
        let done = each!(stream, stream => receive(stream, out, &wakers.read))?;
        // SAFETY: the caller has room for a number there.
        unsafe { count.write(done) };
        Ok(())
    })
}

/// Sends `n` fragments without a copy. `sent`, which is always written, gets how many were
/// accepted: their variables are empty. Their pages return when the peer has acknowledged them. The
/// other fragments stay with the caller. With NETMEM_OK they are fewer than `n` if the send buffer
/// is full: send the rest after the next event with NETMEM_EVENT_WRITE. Else the first of them
/// caused the error.
///
/// A fragment is one that a connection of the same stack has received, or one of
/// netmem_stack_alloc, or a part of one. On AF_XDP it can be of any pool on the UMEM's region. Its
/// bytes must not be written after this call. `more`: the program sends more soon, so a segment
/// that is not full may wait for that.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
/// fragment), NETMEM_ERR_UNSENDABLE (a page that the device does not reach), NETMEM_ERR_SHUT_DOWN,
/// and those of netmem_tcp_is_connected.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_send(
    connection: *mut netmem_tcp,
    frags: *mut netmem_frag,
    n: usize,
    more: bool,
    sent: *mut usize,
) -> netmem_status {
    status(|| {
        let count = NonNull::new(sent).ok_or_else(|| Failure::null("sent"))?;
        // SAFETY: the caller has room for a number there.
        unsafe { count.write(0) };
        // SAFETY: as the header says.
        let Connection { stream, memory, wakers } = unsafe { owned::get_mut(connection) }?;
        if n > 0 && frags.is_null() {
            return Err(Failure::null("frags"));
        }
        let is_accepted = |at: usize| {
            // SAFETY: the caller has `n` fragments there.
            at < n && unsafe { frag::get(frags.add(at)) }.is_ok_and(|frag| memory.has(frag))
        };
        let mut accepted = is_accepted(0);
        for done in 0..n {
            // SAFETY: the caller has so many fragments there.
            let variable = unsafe { &mut *frags.add(done) };
            if !accepted {
                // SAFETY: as the header says.
                unsafe { frag::get(variable) }?;
                return Err(unreachable(stream));
            }
            // A segment that is not full waits only for what this call sends, or the next.
            accepted = is_accepted(done + 1);
            // SAFETY: as the header says.
            if !each!(stream, stream => unsafe { send(stream, variable, more || accepted) })? {
                await_room(stream, &wakers.write);
                return Ok(());
            }
            // SAFETY: the caller has room for a number there.
            unsafe { count.write(done + 1) };
        }
        Ok(())
    })
}

/// Copies `n` bytes into pages of the stack and sends them. `written`, which is always written,
/// gets how many were accepted: fewer than `n` if the send buffer is full, or if the connection has
/// its share of the stack's pages. Write the rest after the next event with NETMEM_EVENT_WRITE.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_SHUT_DOWN, and those
/// of netmem_tcp_is_connected.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_write(
    connection: *mut netmem_tcp,
    bytes: *const c_void,
    n: usize,
    written: *mut usize,
) -> netmem_status {
    status(|| {
        let count = NonNull::new(written).ok_or_else(|| Failure::null("written"))?;
        // SAFETY: the caller has room for a number there.
        unsafe { count.write(0) };
        // SAFETY: as the header says.
        let connection = unsafe { owned::get_mut(connection) }?;
        let bytes = match NonNull::new(bytes.cast_mut()) {
            // SAFETY: the caller has so many bytes there.
            Some(bytes) => unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), n) },
            None if n == 0 => &[],
            None => return Err(Failure::null("bytes")),
        };
        let done = match each!(&mut connection.stream, stream => stream.write(bytes)) {
            Err(SocketError::WouldBlock) => 0,
            outcome => outcome?,
        };
        if done < n {
            connection.await_room();
        }
        // SAFETY: the caller has room for a number there.
        unsafe { count.write(done) };
        Ok(())
    })
}

/// Shuts down the sending direction: the peer sees the end of the stream after what was sent. What
/// the peer sends is still received. Before the connection has been made, it ends the connection,
/// and what was sent is lost.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_shutdown(connection: *mut netmem_tcp) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        each!(&mut unsafe { owned::get_mut(connection) }?.stream, stream => stream.shutdown());
        Ok(())
    })
}

/// Closes the connection, and ends its handle. What was sent still arrives, and then the end of the
/// stream, in later turns of the stack. If payload was received by the stack and not by the
/// program, the peer gets a reset instead. Also a connection whose stack was closed is closed by
/// this.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_close(connection: *mut netmem_tcp) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { owned::close(connection) }.map(drop))
}

/// Resets the connection, and ends its handle. What was sent and not acknowledged is lost.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_abort(connection: *mut netmem_tcp) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        each!(unsafe { owned::close(connection) }?.stream, stream => stream.abort());
        Ok(())
    })
}
