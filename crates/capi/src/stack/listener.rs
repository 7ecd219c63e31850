//! Listeners.

use crate::handle::{self, Kind};
use crate::owned::{self, Owned};
use crate::region::Kept;
use crate::stack::connection::Connection;
use crate::stack::endpoint::netmem_endpoint;
use crate::stack::events::{Of, Wakers};
use crate::stack::handles::{netmem_stack, netmem_tcp, netmem_tcp_listener};
use crate::stack::memory::SendMemory;
use crate::stack::tcp_options::{self, netmem_tcp_options};
use crate::stack::{Over, each, status};
use crate::status::{Failure, netmem_status};
use netmem::tcp::{SocketError, TcpListener};
use netmem_pool::TrustedPeer;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::task::{Context, Poll};

impl Kind for netmem_tcp_listener {
    type Value = Listener;
    const NAME: &'static str = "netmem_tcp_listener";
    const NUMBER: u64 = 0x6e65_746d_656d_0021;
}

impl Owned for netmem_tcp_listener {}

/// The value of the handle.
pub(crate) struct Listener {
    over: Over<TcpListener<TrustedPeer>, TcpListener<Kept>>,
    memory: SendMemory,
    wakers: Wakers,
}

impl Listener {
    /// The next connection. The event is requested if there is none.
    fn accept(&mut self) -> Result<Option<Connection>, Failure> {
        let mut cx = Context::from_waker(&self.wakers.read);
        let accepted = match &mut self.over {
            Over::Tap(listener) => listener.poll_accept(&mut cx).map_ok(Over::Tap),
            Over::Xsk(listener) => listener.poll_accept(&mut cx).map_ok(Over::Xsk),
        };
        match accepted {
            Poll::Pending => Ok(None),
            Poll::Ready(stream) => Ok(Some(Connection::new(stream?, &self.memory, self.wakers.ready()))),
        }
    }
}

/// Listens on `local`, whose address is one of the stack's, or each (address_length of 0). Port 0
/// is one that is free: netmem_tcp_listener_local. `options` may be null. The listener belongs to
/// the stack's thread. It has an event when a connection waits after a netmem_tcp_accept that found
/// none.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
/// NETMEM_ERR_ARGUMENT (also an address that is none of the stack's), NETMEM_ERR_IN_USE,
/// NETMEM_ERR_CLOSED (the stack was shut down).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_listen(
    stack: *mut netmem_stack,
    local: *const netmem_endpoint,
    options: *const netmem_tcp_options,
    listener: *mut *mut netmem_tcp_listener,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(listener).ok_or_else(|| Failure::null("listener"))?;
        // SAFETY: as the header says.
        let (stack, local, given) =
            unsafe { (owned::get_mut(stack)?, netmem_endpoint::read(local, "local")?, tcp_options::read(options)?) };
        let over = match stack.sockets()? {
            Over::Tap(sockets) => Over::Tap(sockets.listen(local, given.listen)?),
            Over::Xsk(sockets) => Over::Xsk(sockets.listen(local, given.listen)?),
        };
        let wakers = Wakers::new(stack.ready(), Of::Listener);
        let made = handle::create(Listener { over, memory: stack.memory().clone(), wakers });
        // SAFETY: it was just made, and the caller has room for a pointer there.
        unsafe {
            owned::get_mut::<netmem_tcp_listener>(made)?.wakers.set_handle(made);
            out.write(made);
        }
        Ok(())
    })
}

/// Accepts a connection, or writes null if none waits. The connection belongs to the same thread.
/// Its peer may have reset it already: what was received before can be received, then the error.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_CLOSED (the stack was
/// shut down or closed).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_accept(
    listener: *mut netmem_tcp_listener,
    connection: *mut *mut netmem_tcp,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(connection).ok_or_else(|| Failure::null("connection"))?;
        // SAFETY: as the header says.
        let accepted = unsafe { owned::get_mut(listener) }?.accept()?;
        let made = accepted.map_or(Ok(std::ptr::null_mut()), Connection::into_handle)?;
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// The address and the port on which it listens.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_listener_local(
    listener: *mut netmem_tcp_listener,
    local: *mut netmem_endpoint,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(local).ok_or_else(|| Failure::null("local"))?;
        // SAFETY: as the header says.
        let addr = each!(&unsafe { owned::get_mut(listener) }?.over, listener => listener.local_addr());
        // SAFETY: the caller has room for an endpoint there.
        unsafe { out.write(addr.into()) };
        Ok(())
    })
}

/// Sets what the listener's events have as their context; null before.
///
/// Errors: NETMEM_ERR_NULL (the listener), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_listener_set_context(
    listener: *mut netmem_tcp_listener,
    context: *mut c_void,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        unsafe { owned::get_mut(listener) }?.wakers.set_context(context);
        Ok(())
    })
}

/// Closes the listener. Connections that wait to be accepted are reset. Those that were accepted go
/// on.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_tcp_listener_close(listener: *mut netmem_tcp_listener) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { owned::close(listener) }.map(drop))
}

impl From<SocketError> for Failure {
    #[cold]
    fn from(error: SocketError) -> Self {
        Self::Socket(error)
    }
}
