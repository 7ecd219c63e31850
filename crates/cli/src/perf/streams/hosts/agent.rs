//! `netmem perf --agent ADDR`: waits for drivers, one after another, and does what they ask for.
//! With `--one-off` it ends with the first.
//!
//! Any host can connect. Each connection has a thread and a few seconds until its first message,
//! which proves that it knows the key; so a connection that sends nothing delays no driver. While a
//! driver measures, another one is refused.

use super::channel::{self, Channel, ChannelError, Role, wait};
use super::member::{Member, with_ends};
use super::message::{Answer, Ask, Ended, Prepare};
use super::plan::Own;
use anyhow::Context;
use netmem_measure::output;
use netmem_measure::signals::Interrupted;
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The most connections at a time. Further ones are closed.
const MOST: usize = 64;

/// What the threads of the connections share.
struct Agent<'a> {
    own: &'a Own,
    one_off: bool,
    stop: &'a AtomicBool,
    connections: AtomicUsize,
    /// Whether a driver measures.
    busy: AtomicBool,
    /// The first driver's result, with `one_off`.
    result: Mutex<Option<anyhow::Result<()>>>,
}

/// Serves drivers until a signal comes, or one driver.
pub(super) fn run(at: SocketAddr, own: &Own, one_off: bool, stop: &AtomicBool) -> anyhow::Result<()> {
    let listener = TcpListener::bind(at).with_context(|| format!("--agent {at}"))?;
    listener.set_nonblocking(true)?;
    output::Log.line(&format!("ready: an agent on {}", listener.local_addr()?));
    let (connections, busy, result) = Default::default();
    let agent = Agent { own, one_off, stop, connections, busy, result };
    std::thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            if let Some(result) = agent.result.lock().ok().and_then(|mut result| result.take()) {
                // The other connections see it, and end.
                stop.store(true, Ordering::Relaxed);
                return result;
            }
            match listener.accept() {
                Ok((stream, from)) => {
                    if agent.connections.fetch_add(1, Ordering::Relaxed) < MOST {
                        let agent = &agent;
                        let run = move || agent.connection(stream, from);
                        let started = std::thread::Builder::new().name("netmem-agent".into()).spawn_scoped(scope, run);
                        started.context("cannot start a thread")?;
                    } else {
                        agent.connections.fetch_sub(1, Ordering::Relaxed);
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => wait(&mut [PollFd::new(&listener, PollFlags::IN)]),
                // Without descriptors, `accept` fails at once, again and again.
                Err(_) => std::thread::sleep(super::CHECK_EVERY),
            }
        }
        Ok(())
    })
}

/// A connection whose peer's host does not answer is closed by the kernel: idle or with data that
/// is not acknowledged.
pub(super) fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(sockopt::set_tcp_user_timeout(stream, 25_000)?)
}

impl Agent<'_> {
    fn connection(&self, stream: TcpStream, from: SocketAddr) {
        match self.open(stream) {
            Err(error) => output::Log.line(&format!("{from}: {:#}", anyhow::Error::new(error))),
            Ok((mut channel, _)) if self.busy.swap(true, Ordering::AcqRel) => {
                let _ = channel.send(&Answer::Failed("the agent measures for another driver".into()));
            }
            Ok((channel, first)) => {
                let served = self.serve(channel, first, from);
                if let Err(error) = &served {
                    output::Log.line(&format!("driver {from}: {error:#}"));
                }
                if self.one_off
                    && let Ok(mut result) = self.result.lock()
                {
                    *result = Some(served.with_context(|| format!("driver {from}")));
                }
                self.busy.store(false, Ordering::Release);
            }
        }
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// The channel of a driver, with its first message.
    fn open(&self, stream: TcpStream) -> Result<(Channel<'_>, Ask), ChannelError> {
        keep_alive(&stream)?;
        let mut channel = Channel::open(stream.into(), Role::Agent, self.own.key.as_ref(), self.stop)?;
        let first = channel.recv(Some(Instant::now() + channel::PATIENCE))?;
        Ok((channel, first))
    }

    fn serve(&self, channel: Channel<'_>, first: Ask, driver: SocketAddr) -> anyhow::Result<()> {
        let mut channel = Some(channel);
        let served = with_ends(self.own, |ends| {
            let channel = channel.take().context("an end that runs twice")?;
            let ended = |prepare: &Prepare, ended: &Ended| output::Log.line(&line(driver, prepare, ended));
            Member::new(self.own, ends, channel).serve(first, ended)
        });
        let Err(error) = served else { return Ok(()) };
        // The stack of this host could not be opened.
        if let Some(mut channel) = channel {
            let _ = channel.send(&Answer::Failed(format!("{error:#}")));
        }
        match error.downcast_ref() {
            Some(ChannelError::Interrupted(Interrupted)) => Ok(()),
            _ => Err(error),
        }
    }
}

/// A run, as this host saw it.
fn line(driver: SocketAddr, prepare: &Prepare, ended: &Ended) -> String {
    let incoming: u32 = prepare.targets.iter().copied().map(u32::from).sum();
    let [sent, received] = ended.bytes;
    let bytes = match sent + received {
        0 => String::new(),
        _ => format!("; bytes in all: {sent} sent, {received} received"),
    };
    let failed = ended.failed.as_ref().map(|error| format!("; {error}")).unwrap_or_default();
    format!("run of {driver}: {} flow(s) from here, {incoming} to here{bytes}{failed}", prepare.sent)
}
