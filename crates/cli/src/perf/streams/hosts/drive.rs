//! `netmem perf --to HOST,..`: drives the agents of other hosts, and this host's own end.
//!
//! Each step of a run is asked of all hosts before the first answer is waited for. A host that does
//! not answer in time, or is gone, is left out of what follows, and named in the report. If that
//! happens before a run has started, the run is made again without it.

use super::channel::{Channel, ChannelError, Key, Role, wait};
use super::member::{Member, with_ends};
use super::message::{Answer, Ask, Ended, Host, Measured, Prepare, Start};
use super::plan::{Drive, Own};
use super::report::{Clock, HostReport, Report, Run, boot};
use crate::args::SearchArg;
use crate::perf::streams::cookie::Cookie;
use crate::perf::streams::pace::intervals;
use crate::perf::streams::plan::Proto;
use crate::perf::streams::report::Interval;
use crate::perf::streams::search;
use crate::perf::streams::watch::Route;
use crate::perf::streams::{CHECK_EVERY, PATIENCE};
use anyhow::Context;
use netmem_measure::load::Meter;
use netmem_measure::output;
use netmem_measure::report::Done;
use netmem_measure::signals::Interrupted;
use netmem_measure::threads::{propagate, spawn};
use rustix::event::{PollFd, PollFlags};
use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest time for a connection to an agent. Hosts that are started together are not ready
/// together, so one that refuses it is asked again.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest time of an attempt.
const ATTEMPT: Duration = Duration::from_secs(2);
/// The longest text of another host that is printed.
const LONGEST_TEXT: usize = 200;
/// The longest time for an answer that needs no more than a look at a clock.
const ANSWER: Duration = Duration::from_secs(5);
/// Questions for a host's clock. The one that was answered soonest counts.
const QUESTIONS: usize = 64;
/// A run starts this long after the last host has begun.
const START_AFTER: Duration = Duration::from_millis(100);

/// Runs the measurement, and prints the report.
pub(super) fn run(plan: &Drive, own: &Own, stop: &AtomicBool) -> anyhow::Result<()> {
    let meter = Meter::new();
    let connections = connect_all(plan, stop)?;
    let (here, there) = UnixStream::pair().context("a pair of sockets")?;
    let (hosts, rows, highest, error) = std::thread::scope(|scope| {
        let member = move || {
            let mut channel = Channel::open(there.into(), Role::Agent, None, stop)?;
            let first = channel.recv(None)?;
            with_ends(own, |ends| Member::new(own, ends, channel).serve(first, |_, _| {}))
        };
        let member = spawn(scope, "netmem-member", member).context("cannot start a thread")?;
        let mut driver =
            Driver { plan, hosts: Vec::new(), epoch: Instant::now(), stop, rows: Vec::new(), highest: None };
        driver.open(here, connections, own.key.as_ref());
        let measured = driver.measure();
        let Driver { mut hosts, rows, highest, .. } = driver;
        // The members see the end of their connections.
        hosts.iter_mut().for_each(|host| host.channel = None);
        let ended = propagate(member.join());
        match (measured, ended) {
            // This host's own end has failed, and with it the measurement.
            (Err(error), Err(cause)) if !error.is::<Interrupted>() && !cause.is::<ChannelError>() => Err(cause),
            (Err(error), _) => Ok((hosts, rows, highest, Some(error))),
            (Ok(()), ended) => ended.map(|()| (hosts, rows, highest, None)),
        }
    })?;
    let interrupted = error.as_ref().is_some_and(|error| error.is::<Interrupted>());
    let done = Done::new(&meter, BTreeSet::new(), interrupted);
    let failed = hosts.iter().find_map(Peer::failure);
    if rows.iter().all(|(_, runs)| runs.is_empty()) {
        return Err(error.unwrap_or_else(|| anyhow::anyhow!(failed.unwrap_or_else(|| "no run was made".into()))));
    }
    let report = Report::new(plan, hosts.into_iter().map(Peer::report).collect(), rows, highest, done);
    if plan.json {
        output::json(&report)?
    } else {
        output::print(&report.to_string())?
    }
    match (error, failed) {
        (Some(error), _) => Err(error),
        (None, Some(failed)) => anyhow::bail!("{failed}; the figures are of the other hosts"),
        (None, None) => Ok(report.verdict()?),
    }
}

/// A host, as the driver knows it.
struct Peer<'s> {
    name: String,
    /// The agent's address, and this host's as the agent sees it.
    ips: [Option<IpAddr>; 2],
    channel: Option<Channel<'s>>,
    host: Option<Host>,
    /// Of netmem's stack there.
    address: Option<IpAddr>,
    clock: Clock,
    /// Why it takes no further part.
    failed: Option<String>,
}

impl<'s> Peer<'s> {
    fn new(name: String, ips: [Option<IpAddr>; 2], opened: Result<Channel<'s>, ChannelError>) -> Self {
        let (channel, failed) = match opened {
            Ok(channel) => (Some(channel), None),
            Err(error) => (None, Some(clean(&chain(error)))),
        };
        Self { name, ips, channel, host: None, address: None, clock: Clock::default(), failed }
    }

    fn fail(&mut self, why: impl Into<String>) {
        self.channel = None;
        self.failed.get_or_insert_with(|| clean(&why.into()));
    }

    /// Its name, and why it takes no further part.
    fn failure(&self) -> Option<String> {
        Some(format!("{}: {}", self.name, self.failed.as_ref()?))
    }

    fn ask(&mut self, ask: &Ask) -> Result<(), Interrupted> {
        match self.channel.as_mut().map(|channel| channel.send(ask)) {
            Some(Err(ChannelError::Interrupted(error))) => return Err(error),
            Some(Err(error)) => self.fail(chain(error)),
            _ => {}
        }
        Ok(())
    }

    /// What it has answered, if it has.
    fn answer(&mut self) -> Result<Option<Answer>, Interrupted> {
        match self.channel.as_mut().map(Channel::try_recv) {
            Some(Ok(Some(Answer::Failed(why)))) => self.fail(why),
            Some(Ok(answer)) => return Ok(answer),
            Some(Err(ChannelError::Interrupted(error))) => return Err(error),
            Some(Err(error)) => self.fail(chain(error)),
            None => {}
        }
        Ok(None)
    }

    fn report(self) -> HostReport {
        HostReport { name: self.name, host: self.host, address: self.address, clock: self.clock, failed: self.failed }
    }
}

/// An error with its causes.
fn chain(error: ChannelError) -> String {
    format!("{:#}", anyhow::Error::new(error))
}

/// A text of another host, for a terminal: one line, and not long.
fn clean(text: &str) -> String {
    text.chars().take(LONGEST_TEXT).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Connects to all agents at the same time. If one cannot be reached, none is asked for anything:
/// it would be another measurement without that host.
fn connect_all(plan: &Drive, stop: &AtomicBool) -> anyhow::Result<Vec<TcpStream>> {
    let opened: Vec<_> = std::thread::scope(|scope| {
        let connect = |(_, at): &'_ (String, Vec<SocketAddr>)| {
            let at = at.clone();
            scope.spawn(move || connect(&at, stop))
        };
        let threads: Vec<_> = plan.agents.iter().map(connect).collect();
        threads.into_iter().map(|thread| propagate(thread.join())).collect()
    });
    if stop.load(Ordering::Relaxed) {
        return Err(Interrupted.into());
    }
    let named = plan.agents.iter().zip(opened);
    let (streams, failed): (Vec<_>, Vec<_>) = named.partition(|(_, opened)| opened.is_ok());
    let failed: Vec<String> =
        failed.into_iter().filter_map(|((name, _), opened)| Some(format!("{name}: {}", opened.err()?))).collect();
    anyhow::ensure!(failed.is_empty(), "no agent can be reached there: {}", failed.join("; "));
    Ok(streams.into_iter().filter_map(|(_, opened)| opened.ok()).collect())
}

/// Tries the addresses of a host in turns.
fn connect(at: &[SocketAddr], stop: &AtomicBool) -> io::Result<TcpStream> {
    let until = Instant::now() + CONNECT;
    let mut next = at.iter().cycle();
    loop {
        let at = next.next().ok_or(ErrorKind::AddrNotAvailable)?;
        match TcpStream::connect_timeout(at, ATTEMPT) {
            Ok(stream) => return super::agent::keep_alive(&stream).map(|()| stream),
            Err(error) if Instant::now() >= until || stop.load(Ordering::Relaxed) => return Err(error),
            Err(_) => std::thread::sleep(CHECK_EVERY),
        }
    }
}

/// The runs of a measurement.
struct Driver<'d, 's> {
    plan: &'d Drive,
    hosts: Vec<Peer<'s>>,
    epoch: Instant,
    stop: &'s AtomicBool,
    /// For each rate, its runs.
    rows: Vec<(Option<u64>, Vec<Run>)>,
    /// The result of a search: the highest rate that reached the goal, or 0.
    highest: Option<u64>,
}

impl<'s> Driver<'_, 's> {
    /// Makes the handshakes.
    fn open(&mut self, here: UnixStream, connections: Vec<TcpStream>, key: Option<&Key>) {
        let own = Channel::open(here.into(), Role::Driver, None, self.stop);
        self.hosts.push(Peer::new("this host".into(), [None; 2], own));
        for ((name, _), stream) in self.plan.agents.iter().zip(connections) {
            let ips = [stream.peer_addr(), stream.local_addr()].map(|at| at.ok().map(|at| at.ip()));
            let channel = Channel::open(stream.into(), Role::Driver, key, self.stop);
            self.hosts.push(Peer::new(name.clone(), ips, channel));
        }
    }

    fn measure(&mut self) -> anyhow::Result<()> {
        let plan = self.plan;
        match plan.search {
            None => self.rates(&plan.rates),
            Some(goal) => {
                self.highest = Some(self.search(goal)?.unwrap_or_default());
                Ok(())
            }
        }
    }

    /// Finds the highest rate that reaches a goal. The search ends when a host is lost: without
    /// that host there are fewer flows, whose rates do not compare with those of more flows. It
    /// also ends when a flow fails, as in one process: what the other flows have counted does not
    /// show whether all reach the goal at this rate.
    fn search(&mut self, goal: SearchArg) -> anyhow::Result<Option<u64>> {
        let plan = self.plan;
        let everyone: Vec<usize> = (0..self.hosts.len()).collect();
        let flows = plan.pattern.pairs(&everyone).len() as u16 * plan.flows;
        search::search(goal, &plan.work, flows, |rate| {
            self.rates(&[rate])?;
            if let Some(lost) = self.hosts.iter().find_map(Peer::failure) {
                anyhow::bail!("{lost}; the search ends, because the rates before were of more flows");
            }
            let runs = self.rows.last().map_or(&[][..], |(_, runs)| runs);
            if let Some((host, why)) = runs.iter().find_map(Run::failure) {
                anyhow::bail!("{}: {why}; the search ends, because a flow has failed", self.hosts[host].name);
            }
            let boots: Vec<&str> = self.hosts.iter().map(|peer| boot(peer.host.as_ref())).collect();
            Ok(runs.iter().map(|run| run.sample(plan, &boots)).collect())
        })
    }

    /// Measures each rate, in turns.
    fn rates(&mut self, rates: &[Option<u64>]) -> anyhow::Result<()> {
        let first = self.rows.len();
        self.rows.extend(rates.iter().map(|rate| (*rate, Vec::new())));
        for _ in 0..self.plan.runs {
            for row in first..self.rows.len() {
                let run = loop {
                    if let Some(run) = self.run(self.rows[row].0)? {
                        break run;
                    }
                };
                self.rows[row].1.push(run);
            }
        }
        Ok(())
    }

    /// Hosts that take part.
    fn living(&self) -> Vec<usize> {
        (0..self.hosts.len()).filter(|&host| self.hosts[host].channel.is_some()).collect()
    }

    /// Waits until each of these hosts has done `what`, and for the answer that says so.
    fn gather<T>(
        &mut self,
        hosts: &[usize],
        what: &str,
        at_most: Duration,
        mut pick: impl FnMut(Answer) -> Option<T>,
    ) -> Result<Vec<(usize, T)>, Interrupted> {
        let until = Instant::now() + at_most;
        let (mut waiting, mut answers) = (hosts.to_vec(), Vec::new());
        while !waiting.is_empty() {
            let mut left = Vec::new();
            for host in waiting {
                let peer = &mut self.hosts[host];
                match peer.answer()?.map(&mut pick) {
                    Some(Some(answer)) => answers.push((host, answer)),
                    Some(None) => peer.fail("it answered something else than was asked for"),
                    None if peer.channel.is_none() => {}
                    None if Instant::now() >= until => {
                        peer.fail(format!("it has not {what} in {:.0} s", at_most.as_secs_f64()));
                    }
                    None => left.push(host),
                }
            }
            waiting = left;
            if answers.len() < hosts.len() && !waiting.is_empty() {
                self.wait(&waiting)?;
            }
        }
        answers.sort_by_key(|(host, _)| *host);
        Ok(answers)
    }

    fn wait(&self, hosts: &[usize]) -> Result<(), Interrupted> {
        let channels = hosts.iter().filter_map(|&host| self.hosts[host].channel.as_ref());
        wait(&mut channels.map(|channel| PollFd::new(channel, PollFlags::IN)).collect::<Vec<_>>());
        if self.stop.load(Ordering::Relaxed) { Err(Interrupted) } else { Ok(()) }
    }

    fn ask(&mut self, hosts: &[usize], mut ask: impl FnMut(usize) -> Ask) -> Result<(), Interrupted> {
        hosts.iter().try_for_each(|&host| self.hosts[host].ask(&ask(host)))
    }

    /// How far the hosts' clocks are from this thread's.
    fn clocks(&mut self) -> Result<(), Interrupted> {
        for host in self.living() {
            let mut best = None;
            for _ in 0..QUESTIONS {
                let before = self.epoch.elapsed();
                self.ask(&[host], |_| Ask::Clock)?;
                let answered = self.gather(&[host], "told its clock", ANSWER, |answer| match answer {
                    Answer::Clock { now_ns, host, address } => Some((now_ns, host, address)),
                    _ => None,
                })?;
                let after = self.epoch.elapsed();
                let Some((_, (now_ns, description, address))) = answered.into_iter().next() else { break };
                let Host { stack, kernel, boot, cpus } = description;
                let [stack, kernel, boot] = [stack, kernel, boot].map(|text| clean(&text));
                self.hosts[host].host = Some(Host { stack, kernel, boot, cpus });
                self.hosts[host].address = address;
                let error = (after - before) / 2;
                let offset = i128::from(now_ns) - (before + error).as_nanos() as i128;
                let clock = Clock { offset_ns: offset as i64, error_ns: error.as_nanos() as u64 };
                best = best.filter(|best: &Clock| best.error_ns <= clock.error_ns).or(Some(clock));
            }
            self.hosts[host].clock = best.unwrap_or_default();
        }
        Ok(())
    }

    /// One run, at this rate. `None`: a host was lost before it started.
    fn run(&mut self, rate: Option<u64>) -> anyhow::Result<Option<Run>> {
        // Clocks drift, so they are compared for each run.
        self.clocks()?;
        let living = self.living();
        if living.len() < 2 || living[0] != 0 {
            let why: Vec<String> = self.hosts.iter().filter_map(Peer::failure).collect();
            anyhow::bail!("no other host is left to measure with: {}", why.join("; "));
        }
        let routes = self.plan.pattern.pairs(&living);
        if !self.begin(&living, &routes, rate)? {
            let living = self.living();
            self.ask(&living, |_| Ask::Close)?;
            // What they answered before comes first: three answers at most.
            let until = Instant::now() + 3 * PATIENCE;
            for host in living {
                for _ in 0..4 {
                    let left = until.saturating_duration_since(Instant::now());
                    let pick = |answer| Some(matches!(answer, Answer::Ended(_)));
                    let ended = self.gather(&[host], "ended its flows", left, pick)?;
                    if ended.first().is_none_or(|(_, ended)| *ended) {
                        break;
                    }
                }
            }
            return Ok(None);
        }
        let measured = self.started(&living, rate)?;
        let ended = self.end(&living)?;
        Ok(Some(Run { routes, measured, ended }))
    }

    /// Lets all flows begin. Returns whether each host is still there.
    fn begin(&mut self, living: &[usize], routes: &[(usize, usize)], rate: Option<u64>) -> anyhow::Result<bool> {
        let (flows, cookie) = (self.plan.flows, Cookie::random()?);
        let all = routes.len() as u16 * flows;
        self.ask(living, |host| {
            let targets = routes.iter().filter(|(_, to)| *to == host).map(|_| flows).collect();
            let sent = routes.iter().filter(|(from, _)| *from == host).count() as u16 * flows;
            Ask::Prepare(Prepare { work: self.plan.work, targets, sent, all, rate, cookie })
        })?;
        let ready = self.gather(living, "prepared its flows", PATIENCE, |answer| match answer {
            Answer::Ready { ports } => Some(ports),
            _ => None,
        })?;
        if ready.len() < living.len() {
            return Ok(false);
        }
        let mut taken: Vec<usize> = vec![0; self.hosts.len()];
        let mut begin: Vec<Vec<Route>> = vec![Vec::new(); self.hosts.len()];
        for &(from, to) in routes {
            let ports = ready.iter().find(|(host, _)| *host == to).map_or(&[][..], |(_, ports)| ports);
            match (self.address(from, to), ports.get(taken[to])) {
                (Some(ip), Some(&port)) => begin[from].push(Route { to: SocketAddr::new(ip, port), flows }),
                _ => self.hosts[to].fail("it has no port for a flow"),
            }
            taken[to] += 1;
        }
        self.ask(living, |host| Ask::Begin(std::mem::take(&mut begin[host])))?;
        let begun = self.gather(living, "received something of each flow", PATIENCE, |answer| {
            matches!(answer, Answer::Begun).then_some(())
        })?;
        Ok(begun.len() == living.len())
    }

    /// The address of host `to` for flows of host `from`.
    fn address(&self, from: usize, to: usize) -> Option<IpAddr> {
        self.hosts[to].address.or_else(|| if to == 0 { self.hosts[from].ips[1] } else { self.hosts[to].ips[0] })
    }

    /// The measured time, which begins at one moment on all hosts.
    fn started(&mut self, living: &[usize], rate: Option<u64>) -> anyhow::Result<Vec<(usize, Measured)>> {
        let plan = self.plan;
        let worst = living.iter().map(|&host| self.hosts[host].clock.error_ns).max().unwrap_or(0);
        let at = self.epoch.elapsed() + START_AFTER + Duration::from_nanos(2 * worst);
        let offsets: Vec<i64> = self.hosts.iter().map(|host| host.clock.offset_ns).collect();
        self.ask(living, |host| {
            let at_ns = at.as_nanos() as i128 + i128::from(offsets[host]);
            Ask::Start(Start { at_ns: at_ns.max(0) as u64, duration: plan.duration, interval: plan.interval })
        })?;
        let took = plan.interval.unwrap_or_default();
        for until in intervals(plan.interval, plan.duration) {
            let amounts =
                self.gather(living, "sent an interval's figures", took + PATIENCE, |answer| match answer {
                    Answer::Interval { amount } => Some(amount),
                    _ => None,
                })?;
            let amount = amounts.iter().fold(0u64, |sum, (_, amount)| sum.saturating_add(*amount));
            let line = Interval { until, took, amount };
            if !plan.json {
                output::print(&line.show(&plan.work, rate))?;
            }
        }
        Ok(self.gather(living, "sent its figures", plan.duration + PATIENCE, |answer| match answer {
            Answer::Measured(mut measured) if measured.is_possible(plan.duration) => {
                measured.cpus.iter_mut().for_each(|cpu| cpu.role = clean(&cpu.role));
                Some(measured)
            }
            _ => None,
        })?)
    }

    /// Ends all flows: first their sources, then, when nothing is on its way any more, their
    /// targets.
    fn end(&mut self, living: &[usize]) -> Result<Vec<(usize, Ended)>, Interrupted> {
        let work = self.plan.work;
        self.gather(living, "ended its sources", 2 * PATIENCE + work.drain, |answer| {
            matches!(answer, Answer::Drained).then_some(())
        })?;
        let quiet = Instant::now() + if work.proto == Proto::Udp { work.on_way } else { Duration::ZERO };
        while Instant::now() < quiet {
            std::thread::sleep(CHECK_EVERY);
        }
        self.ask(living, |_| Ask::Close)?;
        self.gather(living, "ended its flows", 3 * PATIENCE, |answer| match answer {
            Answer::Ended(mut ended) if ended.is_possible() => {
                ended.failed = ended.failed.map(|why| clean(&why));
                Some(ended)
            }
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::streams::hosts::plan::Pattern;
    use crate::perf::streams::pace::{Latencies, Window};
    use crate::perf::streams::plan::Work;
    use std::net::Ipv4Addr;

    /// A host without flows, which answers as one whose requests are answered at once. In a run at
    /// a rate, its flows fail if there is a reason.
    fn host(socket: UnixStream, stop: &AtomicBool, why: Option<&str>) {
        let mut channel = Channel::open(socket.into(), Role::Agent, None, stop).unwrap();
        let (mut sources, mut has_rate) = (0, false);
        let window = Window::default();
        let since = *window.since.get_or_init(Instant::now);
        while let Ok(ask) = channel.recv(None) {
            let answer = match ask {
                Ask::Clock => {
                    let host = Host { stack: "none".into(), kernel: "6.1".into(), boot: "1".into(), cpus: 1 };
                    Answer::Clock { now_ns: 0, host, address: None }
                }
                Ask::Prepare(run) => {
                    (sources, has_rate) = (run.sent.into(), run.rate.is_some());
                    Answer::Ready { ports: vec![1; run.targets.len()] }
                }
                Ask::Begin(_) => Answer::Begun,
                Ask::Start(start) => {
                    let window_ns = [0, start.duration.as_nanos() as u64];
                    let (amounts, busy, cpus) = (vec![1000; sources], Vec::new(), Vec::new());
                    channel.send(&Answer::Measured(Measured { window_ns, amounts, sent: 0, busy, cpus })).unwrap();
                    Answer::Drained
                }
                Ask::Close => {
                    let mut latencies = Latencies::default();
                    latencies.answered(&window, since);
                    let failed = why.filter(|_| has_rate).map(String::from);
                    Answer::Ended(Ended { latencies, failed, ..Ended::default() })
                }
            };
            channel.send(&answer).unwrap();
        }
    }

    /// What a search finds if a flow fails at the first rate that is tried.
    fn found(why: Option<&str>) -> anyhow::Result<Option<u64>> {
        let work = Work { proto: Proto::Tcp, size: 1, answer: Some(1), on_way: Duration::ZERO, drain: Duration::ZERO };
        let plan = Drive {
            agents: Vec::new(),
            pattern: Pattern::Out,
            work,
            flows: 1,
            rates: Vec::new(),
            search: None,
            duration: Duration::from_millis(100),
            runs: 1,
            interval: None,
            json: true,
        };
        let stop = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let hosts = [None, why].into_iter().zip(["first", "second"]).map(|(why, name)| {
                let (here, there) = UnixStream::pair().unwrap();
                scope.spawn(move || host(there, stop, why));
                let opened = Channel::open(here.into(), Role::Driver, None, stop);
                Peer::new(name.into(), [Some(Ipv4Addr::LOCALHOST.into()); 2], opened)
            });
            let hosts = hosts.collect();
            let mut driver =
                Driver { plan: &plan, hosts, epoch: Instant::now(), stop, rows: Vec::new(), highest: None };
            driver.search(SearchArg::Within { percent: 100.0, limit: Duration::from_secs(1000) })
        })
    }

    /// The flows that are left do not decide whether a rate reaches the goal.
    #[test]
    fn a_search_ends_with_a_flow() {
        assert_eq!(found(None).unwrap(), Some(10_000));
        let error = found(Some("receiving a flow: reset")).unwrap_err().to_string();
        assert_eq!(error, "second: receiving a flow: reset; the search ends, because a flow has failed");
    }
}
