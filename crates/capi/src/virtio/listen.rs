//! A thread that listens on a vhost-user socket, and serves front ends one after another.

use netmem_virtio::device::{Control, DeviceError};
use netmem_virtio::socket::Listener;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the thread waits after a connection could not be accepted, for instance because there
/// are no descriptors.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The thread, until it is dropped: that hangs up, and waits for the thread.
pub(crate) struct Listening {
    state: Arc<Mutex<State>>,
    /// Its other end is closed with this one, which wakes the thread.
    end: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    over: bool,
    /// The front end that is served.
    front: Option<UnixStream>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Listening {
    /// Serves front ends. `failed` gets the error that has ended a connection.
    pub(crate) fn start(
        listener: Listener,
        control: Control,
        failed: impl Fn(DeviceError) + Send + 'static,
    ) -> io::Result<Self> {
        let (end, other) = UnixStream::pair()?;
        let state = Arc::<Mutex<State>>::default();
        let shared = state.clone();
        let body = move || run(&listener, &control, &other, &shared, failed);
        let thread = std::thread::Builder::new().name("netmem-listen".into()).spawn(body)?;
        Ok(Self { state, end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        {
            let mut state = lock(&self.state);
            state.over = true;
            if let Some(front) = &state.front {
                // The front end may have hung up already.
                let _ = front.shutdown(Shutdown::Both);
            }
        }
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(listener: &Listener, control: &Control, end: &UnixStream, state: &Mutex<State>, failed: impl Fn(DeviceError)) {
    loop {
        let mut fds = [PollFd::new(end, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        // A signal is no event.
        let _ = poll(&mut fds, None);
        let front = listener.accept(Duration::ZERO).ok().and_then(|stream| Some((stream.try_clone().ok()?, stream)));
        let stream = {
            let mut state = lock(state);
            if state.over {
                return;
            }
            front.map(|(front, stream)| {
                state.front = Some(front);
                stream
            })
        };
        match stream {
            Some(stream) => {
                if let Err(error) = control.handle(stream) {
                    failed(error);
                }
                lock(state).front = None;
            }
            // No connection, or no descriptor for it.
            None => {
                let _ = poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&PAUSE));
            }
        }
    }
}
