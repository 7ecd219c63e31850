//! The control queue, for drivers whose front end does not serve it: how many queue pairs are in
//! use, and that the driver has announced itself. All other commands are refused: filters, hashes,
//! RSS, and offloads that change while queues run.

use std::convert::Infallible;

use super::DriverFault;
use super::budget::Budget;
use super::config::Config;
use super::stats::Tally;
use crate::guest_memory::MemoryTable;
use crate::guest_memory::copy::{gather, scatter};
use crate::net::{ctrl, feature};
use crate::virtqueue::Negotiated;
use crate::virtqueue::device::{AnyDeviceQueue, DeviceFormat, DeviceQueue, Direction, Heads, each};

/// Commands answered in one pass.
const COMMANDS: u16 = 16;

/// Answers the commands in `q`. A command whose feature was not negotiated is refused. `set_pairs`
/// receives the requested number of pairs, and returns the answer. If it returns `None`, the
/// command stays in the ring, and `set_pairs` is called again in the next pass.
///
/// # Errors
///
/// The rule that the driver has broken. The answers before that are published.
pub(super) fn command(
    q: &mut AnyDeviceQueue,
    memory: &MemoryTable,
    set_pairs: impl Fn(u16) -> Option<u8>,
    features: Negotiated,
    config: &Config,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    each!(q, q => {
        // Nearly all passes find no command.
        if !q.refresh()? {
            return Ok(());
        }
        let result = answer(q, memory, set_pairs, features, config, tally);
        q.publish();
        result
    })
}

fn answer<S: DeviceFormat>(
    q: &mut DeviceQueue<S>,
    memory: &MemoryTable,
    set_pairs: impl Fn(u16) -> Option<u8>,
    features: Negotiated,
    config: &Config,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    let mut memory = q.view(memory);
    let mut budget = Budget::of(COMMANDS, tally);
    while budget.lasts(tally) {
        let mut buffers = Vec::new();
        let popped = q.pop_chain(&mut q.cursor(), &mut memory, Direction::ReadThenWrite, &mut buffers)?;
        let Some(head) = popped else { break };
        let answer = DriverFault::answer(head.id(), buffers.iter().position(|b| b.write))?;
        // The longest command that is carried out has 4 bytes, and is recognised by its length.
        let mut text = [0; 5];
        let len = gather(memory.table(), &buffers[..answer], &mut text).unwrap_or(0);
        let verdict = match text[..len] {
            [ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET, low, high] if features.has(feature::MQ) => {
                let Some(verdict) = set_pairs(u16::from_le_bytes([low, high])) else { break };
                verdict
            }
            [ctrl::CLASS_ANNOUNCE, ctrl::ANNOUNCE_ACK] if features.has(feature::GUEST_ANNOUNCE) => {
                config.announced();
                ctrl::OK
            }
            _ => ctrl::ERR,
        };
        let answer = &buffers[answer..];
        let _chains = q.complete(Heads::new(head), answer, |_| {
            // The command was carried out, whether or not its answer can be written.
            let _ = scatter(memory.table(), [&[verdict], &[]], answer);
            Ok::<_, Infallible>(1)
        });
        tally.commands += 1;
        budget.spend_pieces(1, buffers.len());
    }
    Ok(())
}
