//! Opening streams on a stack: connections out, listeners, and the table of tokens that all of them
//! share.
//!
//! A table for each stream would cost 8 bytes for each page of a binding, for each stream. The
//! streams of a stack run on one thread, so one table serves all of them.

use super::account::TokenTableHandle;
use super::context::Context;
use super::payload::OnDevice;
use super::range::InFlight;
use super::rx::StreamRx;
use super::socket::DeviceStream;
use super::tx::StreamTx;
use crate::binding::BindingCount;
use crate::tokens::TokenStats;
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, SocketError, Sockets, Stack, TcpListener};
use netmem_packet::{SplitRxQueue, SplitTxQueue, Wait};
use netmem_pool::{PeerMemory, PeerShared};
use netmem_refs::PercpuRef;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

/// Opens the sockets of a stack with device streams. All of them share one table of tokens. This
/// value stays on the stack's thread.
///
/// The table has a count of 8 bytes for each page of a binding, which becomes resident when payload
/// is received. So the memory of the table does not depend on the number of sockets.
pub struct Streams<C: BindingCount = PercpuRef, M: PeerMemory = PeerShared> {
    sockets: Sockets<OnDevice<C, M>>,
    pub(super) table: Rc<TokenTableHandle<C>>,
    pub(super) context: Arc<Context<C>>,
}

impl<C: BindingCount, M: PeerMemory> Streams<C, M> {
    /// Makes the streams of a stack. Make one value for each stack, because each value has a table
    /// of its own.
    pub fn new<Q, T>(stack: &mut Stack<StreamRx<Q, C>, StreamTx<T, C>>) -> Self
    where
        Q: SplitRxQueue<Mem = M>,
        T: SplitTxQueue<InFlight<C>, Mem = M> + Wait,
    {
        let context = stack.queues().1.context.clone();
        Self { sockets: stack.sockets(), table: Rc::new(TokenTableHandle::new()), context }
    }

    /// The sockets of the stack, which also open UDP sockets, whose payload is in host memory.
    #[must_use]
    pub fn sockets(&self) -> &Sockets<OnDevice<C, M>> {
        &self.sockets
    }

    /// Listens on `local`, as [`Sockets::listen`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Sockets::listen`].
    pub fn listen(&self, local: SocketAddr, options: ListenOptions) -> Result<DeviceListener<C, M>, SocketError> {
        Ok(DeviceListener { tcp: self.sockets.listen(local, options)?, streams: self.clone() })
    }

    /// Begins to connect to `remote`, as [`Sockets::connect`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Sockets::connect`].
    pub fn connect(&self, remote: SocketAddr, options: &Config) -> Result<DeviceStream<C, M>, SocketError> {
        DeviceStream::new(self.sockets.connect(remote, options)?, self)
    }

    /// The counters of the table of tokens that the streams share.
    #[must_use]
    pub fn stats(&self) -> TokenStats {
        self.table.stats()
    }

    /// Drops the table's references to bindings that are unbound and whose pages were all returned.
    /// Returns how many there were. Call it if the streams neither receive nor return tokens.
    pub fn release_drained(&self) -> usize {
        self.table.release_drained()
    }
}

impl<C: BindingCount, M: PeerMemory> Clone for Streams<C, M> {
    fn clone(&self) -> Self {
        Self { sockets: self.sockets.clone(), table: self.table.clone(), context: self.context.clone() }
    }
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for Streams<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Streams({:?})", self.stats())
    }
}

/// A socket that accepts device streams.
pub struct DeviceListener<C: BindingCount = PercpuRef, M: PeerMemory = PeerShared> {
    tcp: TcpListener<OnDevice<C, M>>,
    streams: Streams<C, M>,
}

impl<C: BindingCount, M: PeerMemory> DeviceListener<C, M> {
    /// Accepts the next connection. It begins without tokens.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: no connection waits.
    pub fn accept(&mut self) -> Result<DeviceStream<C, M>, SocketError> {
        DeviceStream::new(self.tcp.accept()?, &self.streams)
    }

    /// Like [`accept`](Self::accept); the waker is called when a connection waits.
    ///
    /// # Errors
    ///
    /// Those of [`accept`](Self::accept).
    pub fn poll_accept(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<DeviceStream<C, M>, SocketError>> {
        self.tcp.poll_accept(cx).map(|accepted| DeviceStream::new(accepted?, &self.streams))
    }

    /// The local address and port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.tcp.local_addr()
    }
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for DeviceListener<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceListener({})", self.local_addr())
    }
}
