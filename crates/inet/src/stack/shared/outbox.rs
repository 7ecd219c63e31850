//! Frames for other stacks of the host, which the input of a poll gathers: a group for each stack.

use crate::stack::payload::{Payload, ReceivedFrame};
use crate::stack::shared::directory::StackId;
use crate::stack::shared::host::Host;
use crate::stack::shared::mailbox::Mailbox;
use crate::stack::stats::StackStats;
use crate::tcp::{Budget, Charges};
use std::sync::Arc;

/// Frames that are handed over at the end of the input.
pub(crate) struct Outbox<P: Payload> {
    /// One for each stack to which a frame was handed over.
    groups: Vec<Group<P>>,
    /// The place of the stack of the last frame.
    last: usize,
    /// Whether there are frames.
    filled: bool,
}

/// Frames for a stack.
struct Group<P: Payload> {
    stack: StackId,
    mailbox: Arc<Mailbox<P>>,
    /// Each with the number of its pages.
    frames: Vec<(P::Frame, u32)>,
    /// Those of the pages of all frames. `None` if there is no frame.
    charges: Option<Charges>,
}

impl<P: Payload> Outbox<P> {
    pub(crate) fn new() -> Self {
        Self { groups: Vec::new(), last: 0, filled: false }
    }

    /// Adds a frame for a stack, whose pages are charged. A frame with payload is dropped if the
    /// budget has no room for it.
    pub(crate) fn add(
        &mut self,
        (host, budget): (&Host<P>, &Budget),
        stats: &mut StackStats,
        stack: StackId,
        (frame, has_payload): (P::Frame, bool),
    ) {
        let Some(group) = self.group(host, stack) else {
            stats.mailbox_full += 1;
            return;
        };
        let pages = frame.pages();
        if has_payload && !budget.admits(pages) {
            stats.over_budget += 1;
            return;
        }
        match &mut group.charges {
            Some(charges) => charges.add(budget, pages),
            none => *none = Some(budget.charge_many(pages)),
        }
        group.frames.push((frame, pages));
        self.filled = true;
    }

    /// The group of a stack. `None` if the host has no such stack.
    fn group(&mut self, host: &Host<P>, stack: StackId) -> Option<&mut Group<P>> {
        if self.groups.get(self.last).is_none_or(|group| group.stack != stack) {
            let found = self.groups.iter().position(|group| group.stack == stack);
            self.last = match found {
                Some(at) => at,
                None => {
                    let mailbox = host.mailbox(stack)?;
                    self.groups.push(Group { stack, mailbox, frames: Vec::new(), charges: None });
                    self.groups.len() - 1
                }
            };
        }
        self.groups.get_mut(self.last)
    }

    /// Hands the frames over. Those for which a mailbox has no room are dropped.
    #[inline]
    pub(crate) fn flush(&mut self, stats: &mut StackStats) {
        if std::mem::take(&mut self.filled) {
            self.hand_over(stats);
        }
    }

    #[inline(never)]
    fn hand_over(&mut self, stats: &mut StackStats) {
        for Group { mailbox, frames, charges, .. } in &mut self.groups {
            if let Some(charges) = charges.take() {
                let all = frames.len() as u64;
                mailbox.push(frames, charges);
                stats.handed_over += all - frames.len() as u64;
                stats.mailbox_full += frames.len() as u64;
                frames.clear();
            }
        }
    }

    /// Drops all frames.
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }
}
