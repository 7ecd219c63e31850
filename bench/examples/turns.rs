//! Lets groups of processes run in turns, so that two sides of a comparison stay connected, and a
//! disturbance of the machine affects both alike:
//!
//! ```text
//! turns --turn 20 --cpus 0,1 DRIVER,DEVICE DRIVER,DEVICE
//!
//!   first pair   runs 20 ms │ stopped        │ runs 20 ms │ stopped ...
//!   second pair  stopped    │ runs 20 ms     │ stopped    │ runs    ...
//!   hand-over               ▲ measured once a round, on the same CPUs
//! ```
//!
//! Processes are stopped by SIGSTOP, so that a program needs no code for turns. A group leaves when
//! its first process has ended; the others of the group are then ended by SIGTERM. The output is
//! the time in which a cache line goes from one of the CPUs to the other: machines have states in
//! which it differs by a factor of five (`docs/notes/dpdk-vhost.md`). Without a group it is
//! measured once.

use anyhow::{Context, ensure};
use clap::Parser;
use netmem_measure::cpus::pin;
use netmem_measure::stats::Spread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// Milliseconds of a turn.
    #[arg(long, default_value_t = 20)]
    turn: u64,
    /// The CPUs between which the hand-over of a cache line is measured.
    #[arg(long, value_delimiter = ',', required = true)]
    cpus: Vec<usize>,
    /// The processes of a group, with commas between them.
    groups: Vec<String>,
}

/// Signals processes. One that has ended gets no signal.
fn signal(processes: &[OwnedFd], signal: Signal) {
    for process in processes {
        let _ = pidfd_send_signal(process, signal);
    }
}

struct Group(Vec<OwnedFd>);

impl Group {
    fn parse(pids: &str) -> anyhow::Result<Self> {
        let open = |pid: &str| {
            let pid = pid.parse().ok().and_then(Pid::from_raw).with_context(|| format!("{pid} is no process id"))?;
            pidfd_open(pid, PidfdFlags::empty()).with_context(|| format!("process {pid:?}"))
        };
        Ok(Self(pids.split(',').map(open).collect::<Result<_, _>>()?))
    }

    /// Waits for the end of the first process.
    fn ends_within(&self, time: Duration) -> anyhow::Result<bool> {
        let mut ended = [PollFd::new(&self.0[0], PollFlags::IN)];
        let time = Timespec::try_from(time).context("the turn is too long")?;
        Ok(poll(&mut ended, Some(&time))? > 0)
    }

    /// One turn. Returns false if the group leaves.
    fn turn(&self, time: Duration) -> anyhow::Result<bool> {
        signal(&self.0, Signal::CONT);
        let ended = self.ends_within(time)?;
        if ended {
            signal(&self.0[1..], Signal::TERM);
        } else {
            signal(&self.0, Signal::STOP);
        }
        Ok(!ended)
    }
}

/// Measurements of a hand-over, of which the median counts, and the round trips of each.
const MEASUREMENTS: u32 = 15;
const ROUND_TRIPS: u32 = 128;

/// Nanoseconds in which a cache line goes from one CPU to the other. The median leaves out the
/// measurements in which another program had one of the CPUs.
fn hand_over([near, far]: [usize; 2]) -> f64 {
    let word = AtomicU32::new(0);
    // Waits for the number, and replaces it by the next one.
    let pass = |n: u32| {
        while word.load(Ordering::Acquire) != n {
            std::hint::spin_loop();
        }
        word.store(n + 1, Ordering::Release);
    };
    let measurement = |at: u32| {
        let begin = Instant::now();
        (0..ROUND_TRIPS).for_each(|trip| pass(2 * (at * ROUND_TRIPS + trip)));
        begin.elapsed().as_nanos() as f64 / f64::from(2 * ROUND_TRIPS)
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(far);
            (0..MEASUREMENTS * ROUND_TRIPS).for_each(|trip| pass(2 * trip + 1));
        });
        let near = scope.spawn(|| {
            pin(near);
            Spread::of((0..MEASUREMENTS).map(measurement)).median
        });
        near.join().unwrap_or_default()
    })
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut groups = args.groups.iter().map(|pids| Group::parse(pids)).collect::<Result<Vec<_>, _>>()?;
    let cpus = <[usize; 2]>::try_from(args.cpus).ok().context("--cpus needs two CPUs")?;
    ensure!(cpus[0] != cpus[1], "--cpus {},{}: a line needs two CPUs to go between", cpus[0], cpus[1]);
    groups.iter().for_each(|group| signal(&group.0, Signal::STOP));
    let mut hand_overs = vec![hand_over(cpus)];
    while !groups.is_empty() {
        let mut left = Vec::new();
        for group in groups {
            if group.turn(Duration::from_millis(args.turn))? {
                left.push(group);
            }
        }
        groups = left;
        hand_overs.push(hand_over(cpus));
    }
    let Spread { median, min, max, .. } = Spread::of(hand_overs.iter().copied());
    println!("hand-over {median:.0} {min:.0} {max:.0} ns, {} measurements", hand_overs.len());
    Ok(())
}
