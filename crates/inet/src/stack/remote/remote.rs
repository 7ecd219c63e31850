//! The sockets of other threads, as the stack has them.

use crate::stack::places::Places;
use crate::stack::remote::datagrams::DatagramEnd;
use crate::stack::remote::ends::{ListenerEnd, StreamEnd};
use crate::stack::remote::parts::{Opening, StackParts, StreamHub, StreamPort};
use crate::stack::remote::port::{Hub, Signal};
use crate::stack::remote::sockets::Sockets;
use crate::stack::shared::notifier::Notifier;
use crate::stack::sockets;
use netmem_pool::Mapped;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The place of a listener has this bit.
const LISTENER: u32 = 1 << 31;
/// The place of a socket for datagrams has this bit.
const DATAGRAMS: u32 = 1 << 30;

/// The sockets of other threads. Why a trait: they are for payload in host memory, and a stack is
/// for each kind.
pub(crate) trait Remotes {
    /// Moves payload between handles and connections, and carries out the handles' requests. Returns
    /// how many ports were polled.
    fn poll(&mut self) -> usize;

    /// All connections will be closed: what handles have sent goes to them.
    fn close(&mut self);

    /// Whether a port is to be polled.
    fn has_work(&self) -> bool;

    /// For the user, the value itself.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// The sockets of other threads.
pub(crate) struct Remote<M: Mapped> {
    hub: Arc<StreamHub<M>>,
    /// Opens sockets of the stack's thread.
    own: sockets::sockets::Sockets<M>,
    /// Opens sockets of other threads.
    pub(crate) sockets: Sockets<M>,
    streams: Places<Box<StreamEnd<M>>>,
    listeners: Places<ListenerEnd<M>>,
    datagrams: Places<DatagramEnd<M>>,
}

impl<M: Mapped> Remote<M> {
    pub(crate) fn new(own: sockets::sockets::Sockets<M>, notifier: Arc<Notifier>) -> Self {
        let hub = Arc::new(Hub::new(notifier));
        let core = own.core.borrow();
        let resources = &core.resources;
        let (counts, egress) = (resources.pages.counts.clone(), &resources.egress);
        let sockets = Sockets::new(hub.clone(), counts, egress.pool.clone(), egress.uso);
        drop(core);
        Self { hub, own, sockets, streams: Places::new(), listeners: Places::new(), datagrams: Places::new() }
    }

    fn open(&mut self, port: Arc<StreamPort<M>>, opening: Opening<M>) {
        let refused = match opening {
            Opening::Listen { local, options, accepted } => match self.own.listen(local, *options) {
                Ok(listener) => {
                    let place = self.listeners.insert(ListenerEnd::new(port.clone(), listener, accepted));
                    port.place.store(place as u32 | LISTENER, Ordering::Relaxed);
                    return self.poll_port(&port);
                }
                Err(error) => error,
            },
            Opening::Bind { local, parts } => match self.own.bind(local) {
                Ok(socket) => {
                    let place = self.datagrams.insert(DatagramEnd::new(port.clone(), socket, parts));
                    port.place.store(place as u32 | DATAGRAMS, Ordering::Relaxed);
                    return self.poll_port(&port);
                }
                Err(error) => error,
            },
            Opening::Connect { local, remote, options, parts } => {
                let stream = match local {
                    Some(local) => self.own.connect_from(local, remote, &options),
                    None => self.own.connect(remote, &options),
                };
                match stream {
                    Ok(stream) => return insert(&mut self.streams, port, stream, parts),
                    Err(error) => error,
                }
            }
        };
        port.fail(refused);
        port.finish_reading(Err(refused));
    }

    /// Polls a port.
    fn poll_port(&mut self, port: &Arc<StreamPort<M>>) {
        let Self { streams, listeners, datagrams, sockets, .. } = self;
        let at = port.place.load(Ordering::Relaxed);
        let place = (at & !LISTENER & !DATAGRAMS) as usize;
        if at & LISTENER == 0 && at & DATAGRAMS != 0 {
            if datagrams.get_mut(place).is_some_and(|end| Arc::ptr_eq(&end.port, port) && !end.poll()) {
                datagrams.remove(place);
            }
            return;
        }
        if at & LISTENER == 0 {
            // A signal may come after the end of the port whose place another one has now.
            if streams.get_mut(place).is_some_and(|end| Arc::ptr_eq(&end.port, port) && !end.poll()) {
                streams.remove(place);
            }
            return;
        }
        let Some(listener) = listeners.get_mut(place).filter(|end| Arc::ptr_eq(&end.port, port)) else { return };
        let stays = listener.poll(|stream| {
            let (handle, parts) = sockets.accepted(stream.local_addr(), stream.peer_addr());
            insert(streams, handle.port.clone(), stream, parts);
            handle
        });
        if !stays {
            listeners.remove(place);
        }
    }
}

/// Inserts a stream, and polls it for the first time.
fn insert<M: Mapped>(
    streams: &mut Places<Box<StreamEnd<M>>>,
    port: Arc<StreamPort<M>>,
    stream: sockets::stream::TcpStream<M>,
    parts: StackParts<M>,
) {
    let mut end = Box::new(StreamEnd::new(port, stream, parts));
    end.port.place.store(streams.next() as u32, Ordering::Relaxed);
    // The handle may be gone already.
    if end.poll() {
        streams.insert(end);
    }
}

impl<M: Mapped> Remotes for Remote<M> {
    fn poll(&mut self) -> usize {
        // Those that are signalled meanwhile have their turn in the next poll.
        let waiting = self.hub.len();
        for n in 0..waiting {
            match self.hub.next() {
                Some(Signal { port, open: Some(opening) }) => self.open(port, opening),
                Some(Signal { port, open: None }) => self.poll_port(&port),
                None => return n,
            }
        }
        waiting
    }

    fn close(&mut self) {
        self.poll();
        self.streams.values_mut().for_each(|end| end.send_all());
    }

    fn has_work(&self) -> bool {
        self.hub.has_work()
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// The stack has ended: each handle gets an error.
impl<M: Mapped> Drop for Remote<M> {
    fn drop(&mut self) {
        self.hub.close();
        for (_, end) in self.streams.iter() {
            end.port.end();
        }
        for (_, end) in self.listeners.iter() {
            end.port.end();
        }
        for (_, end) in self.datagrams.iter() {
            end.port.end();
        }
    }
}
