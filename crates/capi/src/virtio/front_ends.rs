//! The front ends of a device: a thread that serves one after another of those that connect to a
//! socket, and threads for those that the caller has connected.
//!
//! One front end is served at a time. It is so from the moment when its stream is in [`State`]
//! until its error is stored. Only then is the caller's thread woken: a thread that sleeps on the
//! device's descriptor, and asks for the reason after each sleep, misses none.

use crate::status::{Failure, caught};
use netmem_virtio::device::{Control, DeviceError};
use netmem_virtio::socket::Listener;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the thread waits after a connection could not be accepted, for instance because there
/// are no descriptors.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Until it is dropped: that hangs up, and waits for the threads.
pub(crate) struct FrontEnds {
    shared: Arc<Shared>,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    listening: Option<Listening>,
    /// Of the last front end that the caller has connected.
    serving: Option<JoinHandle<()>>,
}

struct Listening {
    /// Its other end is closed with this one, which wakes the thread.
    end: UnixStream,
    thread: JoinHandle<()>,
}

/// What the threads have in common.
struct Shared {
    control: Control,
    state: Mutex<State>,
    /// No front end is served any more, or all is over.
    freed: Condvar,
}

#[derive(Default)]
struct State {
    over: bool,
    /// The front end that is served.
    front: Option<UnixStream>,
    /// Why the last front end that was dropped was dropped.
    failed: Option<Failure>,
}

/// A panic leaves the data of this crate's locks as it should be.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FrontEnds {
    pub(crate) fn new(control: Control) -> Self {
        let shared = Shared { control, state: Mutex::default(), freed: Condvar::new() };
        Self { shared: Arc::new(shared), threads: Mutex::default() }
    }

    /// Serves front ends that connect to a socket, by a thread.
    pub(crate) fn listen(&self, socket: &Path) -> Result<(), Failure> {
        let mut threads = lock(&self.threads);
        if threads.listening.is_some() {
            return Err(Failure::Listens);
        }
        let listener = Listener::bind(socket)?;
        let (end, other) = UnixStream::pair().map_err(Failure::System)?;
        let shared = self.shared.clone();
        let thread = spawn("netmem-listen", move || shared.listen(&listener, &other)).map_err(Failure::System)?;
        threads.listening = Some(Listening { end, thread });
        Ok(())
    }

    /// Serves a front end that is connected, by a thread.
    pub(crate) fn serve(&self, stream: UnixStream) -> Result<(), Failure> {
        let mut threads = lock(&self.threads);
        let front = stream.try_clone().map_err(Failure::System)?;
        {
            let mut state = lock(&self.shared.state);
            if state.front.is_some() {
                return Err(DeviceError::Busy.into());
            }
            state.front = Some(front);
        }
        let shared = self.shared.clone();
        match spawn("netmem-vhost", move || shared.serve(stream)) {
            Ok(thread) => {
                // The one before has left, so that its thread ends without waiting.
                let _ = threads.serving.replace(thread).map(JoinHandle::join);
                Ok(())
            }
            Err(error) => {
                self.shared.free(Ok(()));
                Err(Failure::System(error))
            }
        }
    }

    /// Why the last front end that was dropped was dropped, once.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        lock(&self.shared.state).failed.take().map_or(Ok(()), Err)
    }
}

impl Drop for FrontEnds {
    fn drop(&mut self) {
        {
            let mut state = lock(&self.shared.state);
            state.over = true;
            if let Some(front) = &state.front {
                // The front end may have hung up already.
                let _ = front.shutdown(Shutdown::Both);
            }
        }
        self.shared.freed.notify_all();
        let Threads { listening, serving } = std::mem::take(&mut *lock(&self.threads));
        let listening = listening.map(|Listening { end, thread }| {
            drop(end);
            thread
        });
        for thread in listening.into_iter().chain(serving) {
            let _ = thread.join();
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(body)
}

impl Shared {
    /// Serves a front end, whose stream is in the state, until it has left.
    fn serve(&self, stream: UnixStream) {
        self.free(caught(|| Ok(self.control.handle(stream)?)));
    }

    /// Stores why the front end has left, makes room for the next, and wakes the caller's thread.
    fn free(&self, outcome: Result<(), Failure>) {
        {
            let mut state = lock(&self.state);
            state.front = None;
            if let Err(failure) = outcome {
                state.failed = Some(failure);
            }
        }
        self.freed.notify_all();
        self.control.wake();
    }

    /// Waits until no front end is served, and makes this one the next. False if all is over.
    fn claim(&self, front: UnixStream) -> bool {
        let served = |state: &mut State| state.front.is_some() && !state.over;
        let mut state = self.freed.wait_while(lock(&self.state), served).unwrap_or_else(PoisonError::into_inner);
        state.front = Some(front);
        !state.over
    }

    /// Serves the front ends that connect, until the other end of `end` is closed.
    fn listen(&self, listener: &Listener, end: &UnixStream) {
        while !lock(&self.state).over {
            let mut fds = [PollFd::new(end, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
            // A signal is no event.
            let _ = poll(&mut fds, None);
            let accepted = listener.accept(Duration::ZERO).ok();
            match accepted.and_then(|stream| Some((stream.try_clone().ok()?, stream))) {
                Some((front, stream)) => {
                    if self.claim(front) {
                        self.serve(stream);
                    }
                }
                // No connection, or no descriptor for it.
                None => {
                    let _ = poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&PAUSE));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_virtio::device::port::Echo;
    use netmem_virtio::device::{NetDevice, Options};

    /// A front end whose messages make the library panic is dropped, the caller's thread is woken
    /// to be told, and the next can be served.
    #[test]
    fn a_panic_ends_one_front_end() {
        let mut device = NetDevice::new(Options::default(), |_| Ok(Echo::new())).expect("a device");
        let front_ends = FrontEnds::new(device.control());
        let (one, _other) = UnixStream::pair().expect("sockets");
        assert!(front_ends.shared.claim(one));
        let is_woken = |device: &NetDevice<Echo>| {
            let mut fds = device.wait_fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("descriptors") > 0
        };
        device.disarm();
        assert!(!is_woken(&device));
        front_ends.shared.free(caught(|| panic!("a message")));
        assert!(is_woken(&device));
        assert!(matches!(front_ends.check(), Err(Failure::Panic(text)) if text == "a message"));
        let (one, other) = UnixStream::pair().expect("sockets");
        front_ends.serve(one).expect("no other front end");
        drop(other);
        assert!(front_ends.check().is_ok());
    }
}
