//! The answers of a session that were not sent yet.

use super::store::Memory;
use crate::serve::service::BY_REFERENCE;
use std::collections::VecDeque;

/// If answers of so many bytes wait, they are sent before more of the connection's commands are
/// processed. One value may be on top.
const MOST: usize = 16 << 10;

/// A part of a session's answers.
#[derive(Debug)]
pub(super) enum Output<P> {
    /// Text.
    Text(Vec<u8>),
    /// A piece of a value.
    Part(P),
}

/// The parts, in order. They take at most [`MOST`] bytes of memory and a value's list of pieces:
/// the pieces are shared with the store.
#[derive(Debug)]
pub(super) struct Answers<P> {
    outputs: VecDeque<Output<P>>,
    bytes: usize,
}

impl<P> Default for Answers<P> {
    fn default() -> Self {
        Self { outputs: VecDeque::new(), bytes: 0 }
    }
}

impl<P: Clone> Answers<P> {
    /// Adds text.
    pub(super) fn text(&mut self, text: &[u8]) {
        self.bytes += text.len();
        if let Some(Output::Text(last)) = self.outputs.back_mut() {
            return last.extend_from_slice(text);
        }
        self.outputs.push_back(Output::Text(text.to_vec()));
    }

    /// Adds the pieces of a value. Short pieces are copied, because otherwise each of them would
    /// keep a page that is many times as long.
    pub(super) fn value<M: Memory<Part = P>>(&mut self, parts: &[P]) {
        for part in parts {
            let bytes = M::bytes(part);
            if bytes.len() < BY_REFERENCE {
                self.text(bytes);
            } else {
                self.bytes += bytes.len();
                self.outputs.push_back(Output::Part(part.clone()));
            }
        }
    }

    /// Whether so many bytes wait that they must be sent first.
    pub(super) fn are_full(&self) -> bool {
        self.bytes >= MOST
    }

    /// Removes the next part, and returns whether others follow.
    pub(super) fn next(&mut self) -> Option<(Output<P>, bool)> {
        let output = self.outputs.pop_front()?;
        let more = !self.outputs.is_empty();
        if !more {
            self.bytes = 0;
        }
        Some((output, more))
    }
}
