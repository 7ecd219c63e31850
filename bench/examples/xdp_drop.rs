//! The job `drop` of `bench/peers/xsk.sh` in the kernel: an XDP program drops each frame and counts
//! it, as the command `xdp-bench drop` does. No receiver in user space gets more packets, so this
//! is the upper bound for the others.
//!
//! The arguments are those of `xsk_peer`. The CPU of the arguments is for the thread that reads the
//! count; the kernel runs the program where it receives.

#[allow(dead_code, reason = "the kernel has one of the jobs")]
#[path = "../peers/meter.rs"]
mod meter;

use anyhow::{Context, ensure};
use meter::{Arguments, Counts, Job, measure, pin, report};
use netmem_testing::bpf::{ARRAY, attach, count_and_drop, first_word, map};
use netmem_xsk::Interface;
use quanta::Clock;
use std::thread::sleep;
use std::time::Duration;

/// Time between two readings of the count. Each takes the count's cache line from the CPU that the
/// program runs on.
const PAUSE: Duration = Duration::from_millis(1);

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::read().map_err(|error| anyhow::anyhow!("{error}"))?;
    ensure!(arguments.job == Job::Drop && !arguments.busy_poll, "the kernel has the job `drop` only");
    pin(arguments.cpu).map_err(|error| anyhow::anyhow!("{error}"))?;
    let interface = Interface::by_name(&arguments.interface).context(arguments.interface.clone())?;
    let array = map(ARRAY, 1);
    let _link = attach(&count_and_drop(&array), interface.index);
    let mut seen = 0;
    let counts = measure(&Clock::new(), arguments.time, || {
        sleep(PAUSE);
        // The count is of 32 bits, and wraps.
        let count = first_word(&array);
        (count.wrapping_sub(std::mem::replace(&mut seen, count))) as usize
    });
    report(counts, Counts::default());
    Ok(())
}
