//! memcached: our server behind a tap, and Debian's memcached over a veth, with the same load.
//!
//! The load is one thread with connections of the kernel. Each connection has one command in
//! flight: 100 `get` for each `set`, with random keys and values of one length. The load reads each
//! value that it receives. Servers sleep when they are idle. CPU time is counted twice: that of the
//! server alone, and that of both sides. The first figure is too good for a server on the kernel's
//! sockets, because its segments are received in softirqs of the client. For our server, the kernel
//! receives the segments in softirqs of the server, which writes them into the tap. The server also
//! contains its own stack.

use super::account::Group;
use super::end::LOOK;
use super::net::{ADDRESSES, CONGESTION, Namespace, Outcome, TAP};
use super::rig::{Link, Offloads};
use super::run::Env;
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use anyhow::{Context, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections of the load.
const CONNECTIONS: usize = 32;
/// Keys. All of them have values.
const KEYS: u32 = 20_000;
/// Bytes of a value.
const VALUE: usize = 1000;
/// `get` commands for each `set`.
const GETS: u64 = 100;
const PORT: u16 = 11211;
/// The longest time for a server to start, and for an answer to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// Which server it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Ours,
    Debian,
}

/// A running server, and its CPU time. It is ended when this is dropped.
struct Running {
    child: Child,
    group: Group,
    load: Load,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Commands as the connections of one client send them.
struct Load {
    connections: Vec<Connection>,
    random: u64,
    commands: u64,
}

/// A command, and whether it is `get`.
type Sent = (Vec<u8>, bool);

struct Connection {
    stream: TcpStream,
    /// The part of the answer that has been received.
    answer: Vec<u8>,
    get: bool,
}

fn value(key: u32) -> Vec<u8> {
    vec![b'a' + (key % 26) as u8; VALUE]
}

/// Whether an answer is complete. Understands only the answers to this load's commands.
fn is_complete(answer: &[u8], get: bool) -> anyhow::Result<bool> {
    if !get {
        ensure!(
            answer.len() < 8 || answer == b"STORED\r\n",
            "a set was answered by {:?}",
            String::from_utf8_lossy(answer)
        );
        return Ok(answer.len() >= 8);
    }
    if !answer.ends_with(b"END\r\n") {
        return Ok(false);
    }
    ensure!(answer.len() > VALUE, "a get was answered by {:?}", String::from_utf8_lossy(answer));
    Ok(true)
}

impl Connection {
    fn send(&mut self, command: &[u8], get: bool) -> anyhow::Result<()> {
        self.answer.clear();
        self.get = get;
        // A command is shorter than any send buffer, and the buffer is empty, so the call does not
        // wait.
        self.stream.write_all(command).context("sending a command to memcached")
    }

    /// Receives the bytes that are there. Returns whether the answer is complete.
    fn receive(&mut self, buffer: &mut [u8]) -> anyhow::Result<bool> {
        match self.stream.read(buffer) {
            Ok(0) => anyhow::bail!("memcached has closed a connection"),
            Ok(n) => {
                super::memory::read(&buffer[..n]);
                self.answer.extend_from_slice(&buffer[..n]);
                is_complete(&self.answer, self.get)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(e) => Err(e).context("receiving from memcached"),
        }
    }
}

impl Load {
    fn new(namespace: &Namespace, to: SocketAddr) -> Outcome<Self> {
        let begin = Instant::now();
        let connect = || loop {
            match TcpStream::connect_timeout(&to, PATIENCE) {
                Ok(stream) => break Ok(stream),
                Err(_) if begin.elapsed() < PATIENCE => std::thread::sleep(LOOK),
                Err(e) => break Err(format!("memcached at {to}: {e}")),
            }
        };
        let connection = || {
            let stream = connect()?;
            stream
                .set_nodelay(true)
                .and_then(|()| stream.set_nonblocking(true))
                .map_err(|e| format!("a socket: {e}"))?;
            Ok(Connection { stream, answer: Vec::new(), get: false })
        };
        let connections = namespace.run(|| (0..CONNECTIONS).map(|_| connection()).collect())?;
        Ok(Self { connections, random: 1, commands: 0 })
    }

    fn next(&mut self) -> Sent {
        // The numbers of a linear congruential generator (Knuth); its upper bits are used.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let key = (self.random >> 33) as u32 % KEYS;
        self.commands += 1;
        match self.commands.is_multiple_of(GETS + 1) {
            true => (set(key), false),
            false => (format!("get key{key}\r\n").into_bytes(), true),
        }
    }

    /// Stores all values.
    fn fill(&mut self) -> anyhow::Result<()> {
        let mut keys = 0..KEYS;
        self.drive(&mut |_| keys.next().map(|key| (set(key), false)))
    }

    /// Sends commands for a time. Returns how many were answered, and how long that took.
    fn run(&mut self, duration: Duration) -> anyhow::Result<(u64, Duration)> {
        let begin = Instant::now();
        let before = self.commands;
        self.drive(&mut |load| (begin.elapsed() < duration).then(|| load.next()))?;
        Ok((self.commands - before, begin.elapsed()))
    }

    /// Sends the commands that `next` returns on all connections, until it returns none and all
    /// commands are answered.
    fn drive(&mut self, next: &mut dyn FnMut(&mut Self) -> Option<Sent>) -> anyhow::Result<()> {
        let mut buffer = vec![0; 16 << 10];
        let mut busy = [false; CONNECTIONS];
        for (n, busy) in busy.iter_mut().enumerate() {
            let Some((command, get)) = next(self) else { break };
            self.connections[n].send(&command, get)?;
            *busy = true;
        }
        while busy.contains(&true) {
            let mut fds: Vec<_> = self.connections.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)).collect();
            let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            let ready = match poll(&mut fds, Some(&patience)) {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            ensure!(ready > 0, "memcached does not answer");
            let ready: Vec<usize> = (0..fds.len()).filter(|&n| !fds[n].revents().is_empty()).collect();
            drop(fds);
            for n in ready {
                if self.connections[n].receive(&mut buffer)? {
                    busy[n] = false;
                    if let Some((command, get)) = next(self) {
                        self.connections[n].send(&command, get)?;
                        busy[n] = true;
                    }
                }
            }
        }
        Ok(())
    }
}

fn set(key: u32) -> Vec<u8> {
    let head = format!("set key{key} 0 0 {VALUE}\r\n");
    [head.as_bytes(), &value(key), b"\r\n"].concat()
}

/// A server that is measured.
struct Memcached {
    env: Arc<Env>,
    server: Server,
}

impl Memcached {
    fn start(&self) -> anyhow::Result<Running> {
        let link = Link { mtu: 1500, offloads: Offloads::All };
        let message = anyhow::Error::msg;
        let (to, group) = (SocketAddr::from((ADDRESSES[1], PORT)), Group::new("server").map_err(message)?);
        let spawn = |namespace: &Namespace, mut command: Command| {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = namespace.run(|| command.spawn().map_err(|e| format!("{:?}: {e}", command.get_program())));
            let mut child = child.map_err(message)?;
            if let Err(e) = group.add(child.id()) {
                let _ = child.kill();
                let _ = child.wait();
                anyhow::bail!(e);
            }
            Ok(child)
        };
        // All connections of the kernel use one congestion control, those of the server, too.
        let check = |namespace: &Namespace| namespace.check_congestion(CONNECTIONS).map_err(message);
        let (child, load) = match self.server {
            Server::Ours => {
                let tap = self.env.tap(link)?;
                let mut command = Command::new(our_command().map_err(message)?);
                command.args(["serve", "memcached", "--port", &format!("tap:{TAP}")]);
                command.args(["--addr", &format!("{}/24", ADDRESSES[1])]);
                let child = Kill(Some(spawn(&tap.0, command)?));
                let mut load = Load::new(&tap.0, to).map_err(message)?;
                load.fill()?;
                check(&tap.0)?;
                (child, load)
            }
            Server::Debian => {
                let ends = self.env.veth(link)?;
                let mut command = Command::new("memcached");
                // One thread, as our server has one. memcached refuses to run as root unless a user
                // is named.
                command.args(["-u", "nobody", "-t", "1", "-m", "64", "-U", "0", "-p", &PORT.to_string()]);
                command.args(["-l", &ADDRESSES[1].to_string()]);
                let child = Kill(Some(spawn(&ends[1], command)?));
                let mut load = Load::new(&ends[0], to).map_err(message)?;
                load.fill()?;
                ends.iter().try_for_each(check)?;
                (child, load)
            }
        };
        Ok(Running { child: child.keep()?, group, load })
    }
}

/// The command `netmem`: what the variable `NETMEM` names, or the program next to this one.
fn our_command() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("NETMEM") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(|e| format!("the path of this program: {e}"))?;
    let command = own.with_file_name("netmem");
    match command.is_file() {
        true => Ok(command),
        false => Err(format!("there is no {} (cargo build --release), and NETMEM names no other", command.display())),
    }
}

/// A process that is killed on drop, unless it was taken out.
struct Kill(Option<Child>);

impl Kill {
    fn keep(mut self) -> anyhow::Result<Child> {
        self.0.take().context("a process")
    }
}

impl Drop for Kill {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Benchmark for Memcached {
    fn heads(&self) -> Vec<Head> {
        let name = if self.server == Server::Ours { "ours" } else { "debian" };
        let rows = [
            ("memcached: throughput", "second", "requests"),
            ("memcached: CPU of the server", "CPU second", "requests"),
            ("memcached: CPU of both sides", "CPU second", "requests"),
            ("memcached: CPU in user mode", "request", "ns"),
        ];
        let head = |(section, per, unit)| Head { name: name.into(), section, threads: 1, per, unit, ..Head::default() };
        rows.map(head).into()
    }

    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        let unavailable = |why| BenchError::Unavailable { what: "memcached", why };
        self.env.can_run(super::run::Path::KernelToOurs).map_err(unavailable)?;
        match self.server {
            Server::Ours => drop(our_command().map_err(unavailable)?),
            Server::Debian => {
                let version = Command::new("memcached").arg("-V").stdin(Stdio::null()).output();
                version.map_err(|e| unavailable(format!("memcached: {e}")))?;
            }
        }
        Ok(())
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let measure = || -> anyhow::Result<Vec<Sample>> {
            let mut running = self.start()?;
            running.load.run(Duration::from_nanos(harness.duration_ns() / 4))?;
            let usage = |running: &Running| running.group.usage_ns().map_err(anyhow::Error::msg);
            let user = |running: &Running| running.group.user_ns().map_err(anyhow::Error::msg);
            let (server, in_user, all) = (usage(&running)?, user(&running)?, self.env.cpu_ns()?);
            let (requests, elapsed) = running.load.run(Duration::from_nanos(harness.duration_ns()))?;
            let (server, in_user) = (usage(&running)? - server, user(&running)? - in_user);
            let all = self.env.cpu_ns()? - all + server;
            let elapsed_ns = elapsed.as_nanos() as u64;
            let sample =
                |value| Sample { value, elapsed_ns: Some(elapsed_ns), operations: Some(requests), ..Sample::default() };
            let rate = |ns: u64| sample(requests as f64 * 1e9 / ns.max(1) as f64);
            let in_user = sample(in_user as f64 / requests.max(1) as f64);
            Ok(vec![rate(elapsed_ns), rate(server), rate(all), in_user])
        };
        let name = if self.server == Server::Ours { "memcached, ours" } else { "memcached, Debian's" };
        measure().map_err(|source| BenchError::Stream { variant: name.into(), source })
    }

    /// The server is started, and its values are stored.
    fn takes(&self, duration: Duration) -> Duration {
        Duration::from_millis(200) + duration + duration / 4
    }

    fn note(&self) -> Option<String> {
        Some(format!(
            "{CONNECTIONS} connections, {KEYS} values of {VALUE} bytes: beyond the caches of a CPU, within the last level; the \
             kernel's connections use {CONGESTION}, as ss lists them"
        ))
    }
}

/// Both servers.
pub(super) fn benchmarks(env: &Arc<Env>) -> Vec<Box<dyn Benchmark>> {
    let benchmark = |server| Box::new(Memcached { env: env.clone(), server }) as Box<dyn Benchmark>;
    [Server::Ours, Server::Debian].map(benchmark).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_complete_at_its_end() {
        assert!(!is_complete(b"VALUE key1 0 10", true).unwrap());
        let answer = [b"VALUE key1 0 1000\r\n", &value(1)[..], b"\r\nEND\r\n"].concat();
        assert!(is_complete(&answer, true).unwrap());
        assert!(!is_complete(&answer[..answer.len() - 1], true).unwrap());
        assert!(is_complete(b"END\r\n", true).unwrap_err().to_string().contains("END"));
        assert!(is_complete(b"STORED\r\n", false).unwrap());
        assert!(is_complete(b"SERVER_ERROR out of memory\r\n", false).is_err());
    }
}
