//! The suite `devmem`: device memory end to end, received into and sent from, on the embedded device.
//!
//! ```text
//!            first CPU, one thread, in turns                          second CPU
//!   receive  Device::poll ─► VirtioSplitRx ─► FlowQueue ─► mailbox ─► Socket: 16 at a time; a message complete: given back
//!   transmit Device::poll ◄─ VirtioSplitTx ◄─ Sender::send_again ◄─── ring ◄─ Sender::message
//! ```
//!
//! Four flows; a message is 4 MB as a sequence of datagrams of 1472 bytes. Variants are the binding's count and the socket's
//! tokens: `refcount+locked_map` is what was, `percpuref+ranges` what is.
//!
//! All of it is the product's: device, driver, header split, flow table, mailboxes, bindings with either count, senders; and with
//! `ranges` the socket as it is. With `locked_map` the socket hands out datagrams without a token, and ids come from
//! [`netmem_bench::tokens::Locked`], for 16 datagrams under one hold of the lock, as good as such a socket can be; pages go home
//! by the same put. In `transmit` no token takes part: rows that differ in tokens alone are the same work twice, and show what
//! chance does.
//!
//! The embedded device shares the network's thread whatever CPUs there are, so that every machine measures the same. Its passes
//! count for throughput, and for nobody's CPU time. CPU time is that of turns in which there was something to do; it is
//! taken at a pace that all variants can keep, [`cell`] says how. [`rig`] is what is connected with what, [`receive`] and
//! [`transmit`] are the two directions, [`ways`] the two kinds of tokens, and [`goals`] what it is all for.

mod cell;
mod goals;
mod receive;
mod rig;
mod source;
mod transmit;
mod ways;

use super::error::BenchError;
use super::plan::Plan;
use super::pool::Books;
use super::report::{Base, Goal, Head, Row, compare};
use super::rounds::{Cell, Skipped};
use cell::{EndToEnd, Pace, Traffic};
use netmem::refs::{PercpuRef, RefCount};
use receive::Receiving;
use rig::Memory;
use std::sync::Arc;
use transmit::Transmitting;
use ways::{LockedMap, Ranges};

/// Flows at the same time.
const FLOWS: usize = 4;
/// Bytes of payload in a datagram: all that fits into 1500 of IP.
const PAYLOAD: u64 = 1472;
/// Datagrams of a message of 4 MB.
const MESSAGE: u64 = 4_000_000u64.div_ceil(PAYLOAD);

/// A direction's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Receive,
    Transmit,
}

impl Direction {
    fn short(self) -> &'static str {
        match self {
            Self::Receive => "rx",
            Self::Transmit => "tx",
        }
    }

    /// Sections: throughput, network, application, both, loss.
    fn sections(self) -> [&'static str; 5] {
        match self {
            Self::Receive => {
                ["receive: throughput", "receive: network", "receive: application", "receive: both", "receive: loss"]
            }
            Self::Transmit => [
                "transmit: throughput",
                "transmit: network",
                "transmit: application",
                "transmit: both",
                "transmit: loss",
            ],
        }
    }

    /// The rows of a variant.
    fn heads(self, variant: &str) -> Vec<Head> {
        let units = [("Gb/s", "4 flows"), ("ms", "GB"), ("ms", "GB"), ("ms", "GB"), ("%", "datagrams")];
        let head = |(section, (unit, per))| Head {
            name: variant.to_owned(),
            section,
            threads: 2,
            per,
            unit,
            direction: Some(self.short()),
            ..Head::default()
        };
        self.sections().into_iter().zip(units).map(head).collect()
    }
}

/// Everything that the suite measures.
pub(super) fn cells(plan: &Plan, books: &Books) -> Vec<Box<dyn Cell>> {
    let enough = plan.most() > 1;
    let memory = Arc::new(Memory::default());
    let mut cells = Vec::new();
    let mut add = |direction: Direction, pace: &Arc<Pace>, variant, make: Make| {
        let heads = direction.heads(variant);
        if enough {
            cells.push(EndToEnd::cell(variant, heads, direction, pace.clone(), make));
        } else {
            let why = "the network and the application each take a CPU of their own; allow two threads".to_owned();
            cells.push(Box::new(Skipped { heads, why }) as Box<dyn Cell>);
        }
    };
    let pace = Arc::new(Pace::default());
    let rig = || (memory.clone(), books.clone());
    add(Direction::Receive, &pace, BEFORE, make(rig(), Receiving::<RefCount, LockedMap<_>>::new));
    add(Direction::Receive, &pace, "percpuref+locked_map", make(rig(), Receiving::<PercpuRef, LockedMap<_>>::new));
    add(Direction::Receive, &pace, "refcount+ranges", make(rig(), Receiving::<RefCount, Ranges<_>>::new));
    add(Direction::Receive, &pace, "percpuref+ranges", make(rig(), Receiving::<PercpuRef, Ranges<_>>::new));
    let pace = Arc::new(Pace::default());
    add(Direction::Transmit, &pace, BEFORE, make(rig(), Transmitting::<RefCount>::new));
    add(Direction::Transmit, &pace, "percpuref+locked_map", make(rig(), Transmitting::<PercpuRef>::new));
    add(Direction::Transmit, &pace, "refcount+ranges", make(rig(), Transmitting::<RefCount>::new));
    add(Direction::Transmit, &pace, "percpuref+ranges", make(rig(), Transmitting::<PercpuRef>::new));
    cells
}

/// What the others are compared with.
const BEFORE: &str = "refcount+locked_map";

/// What connects a variant, when its turn has come.
type Make = Box<dyn FnOnce() -> Result<Box<dyn Traffic>, BenchError>>;

fn make<T: Traffic + 'static>(
    (memory, books): (Arc<Memory>, Books),
    new: impl FnOnce(&Memory, &Books) -> Result<T, BenchError> + 'static,
) -> Make {
    Box::new(move || Ok(Box::new(new(&memory, &books)?)))
}

/// Compares the rows with each other, and with the goals.
pub(super) fn judge(rows: &mut [Row], percpu: &str) -> Vec<Goal> {
    compare(rows, |head| (head.unit == "ms").then_some(Base { name: BEFORE, called: "before" }));
    goals::goals(rows, percpu)
}
