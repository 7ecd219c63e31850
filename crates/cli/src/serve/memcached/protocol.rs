//! memcached's text protocol: one session for each connection, over one store.
//!
//! ```text
//!   bytes ──► Session::feed ──► command line, or the bytes of a value ──► Store
//!                    └──► Answers: text, and pieces of values ──► the connection
//! ```
//!
//! A value is copied when it is stored, into pages that the device can read; a page has many
//! values. A GET sends pieces of these pages without a copy, except short ones. A piece that is
//! being sent keeps its bytes, also if the item is changed or removed meanwhile.
//!
//! **Bounds.** A session processes bytes only as long as its answers have room. So the answers of a
//! connection are bounded, whatever it asks for. The keys of a `get` are processed as they arrive:
//! their number is not bounded, and no line is kept for them.
//!
//! **Values are never commands.** What follows the line of a storage command is a value of the
//! announced length, which is received also if the command is refused. If the length is unreadable,
//! if the value does not end where it should, or if the command is unknown, the session does not
//! know where the next command begins, and ends.
//!
//! The commands are get, gets, set, add, replace, append, prepend, cas, delete, touch, incr, decr,
//! flush_all, version, verbosity, stats and quit.

use super::answers::Answers;
use super::commands::{BAD_FORMAT, Verb};
use super::store::{MAX_VALUE, Memory, OutOfPages, Store};
use serde::{Deserialize, Serialize};

/// The longest line of a command other than get and gets. Commands have at most 350 bytes.
const MAX_LINE: usize = 2048;
/// The longest key.
pub(super) const MAX_KEY: usize = 250;

/// What a session works on.
pub(super) struct Context<'a, M: Memory> {
    pub(super) store: &'a mut Store<M>,
    /// Seconds since 1970.
    pub(super) now: u64,
    /// Whether items are evicted if there is no memory for a value.
    pub(super) may_evict: bool,
    pub(super) answers: &'a mut Answers<M::Part>,
}

/// Why a session has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All bytes are processed.
    Done,
    /// The answers must be sent before more bytes are processed.
    AnswersFull,
    /// A value has no memory. If no memory becomes free, the next call may evict items.
    OutOfPages,
}

/// A value that is being received.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Coming<P> {
    pub(super) verb: Verb,
    pub(super) key: Vec<u8>,
    pub(super) flags: u32,
    pub(super) exptime: i64,
    pub(super) len: usize,
    pub(super) quiet: bool,
    /// Bytes that are not received yet, including the end of the line.
    pub(super) left: usize,
    /// The last two bytes that were received. When the value is complete, they must be the end of
    /// the line.
    pub(super) last: [u8; 2],
    pub(super) parts: Vec<P>,
    /// Whether there was memory for all bytes so far.
    pub(super) kept: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum State<P> {
    /// A command's line.
    Line,
    /// The keys of get or gets, whose first word is processed.
    Keys { with_unique: bool, any: bool },
    /// The rest of a line that is refused.
    Rest,
    /// A storage command's value.
    Value(Coming<P>),
    /// A refused value, which is dropped.
    Skip { left: usize, last: [u8; 2] },
    /// The client has quit, or it is not known where its next command begins.
    Over,
}

/// A connection's state. If its pieces `P` are plain bytes, it can be saved in a file.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::serve) struct Session<P> {
    /// The received part of a line or of a key. A complete line is here only if its command has had
    /// no memory.
    line: Vec<u8>,
    pub(super) state: State<P>,
    /// Bytes that were received and not processed yet, because the answers were full or there was
    /// no memory.
    pub(super) rest: Vec<u8>,
    done: u64,
}

impl<P> Default for Session<P> {
    fn default() -> Self {
        Self { line: Vec::new(), state: State::Line, rest: Vec::new(), done: 0 }
    }
}

impl<P: Clone> Session<P> {
    /// Whether the connection must be closed after the answers have been sent.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Whether a command has begun and is not complete.
    pub(super) fn has_begun(&self) -> bool {
        !matches!(self.state, State::Line | State::Over) || !self.line.is_empty()
    }

    /// A number that has changed if a command or a key has been answered since.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// Whether there is something to process before more is received.
    pub(super) fn has_work(&self) -> bool {
        !self.rest.is_empty() || self.is_pending()
    }

    /// Whether a value was received in part.
    pub(super) fn has_value(&self) -> bool {
        matches!(&self.state, State::Value(coming) if !coming.parts.is_empty())
    }

    /// The session, with copies of the pieces of a value that was received in part.
    pub(super) fn save<M: Memory<Part = P>>(self) -> Session<Vec<u8>> {
        self.map(|parts| parts.iter().map(|part| M::bytes(part).to_vec()).collect())
    }

    fn map<Q>(self, parts: impl FnOnce(Vec<P>) -> Vec<Q>) -> Session<Q> {
        let Self { line, state, rest, done } = self;
        let state = match state {
            State::Line => State::Line,
            State::Keys { with_unique, any } => State::Keys { with_unique, any },
            State::Rest => State::Rest,
            State::Value(Coming { verb, key, flags, exptime, len, quiet, left, last, parts: before, kept }) => {
                let parts = parts(before);
                State::Value(Coming { verb, key, flags, exptime, len, quiet, left, last, parts, kept })
            }
            State::Skip { left, last } => State::Skip { left, last },
            State::Over => State::Over,
        };
        Session { line, state, rest, done }
    }

    /// Processes bytes from the client. Returns how many were processed, and why not more.
    pub(super) fn feed<M: Memory<Part = P>>(&mut self, bytes: &[u8], cx: &mut Context<'_, M>) -> (usize, Outcome) {
        let mut at = 0;
        loop {
            if cx.answers.are_full() {
                return (at, Outcome::AnswersFull);
            }
            if self.is_over() {
                return (bytes.len(), Outcome::Done);
            }
            if at == bytes.len() && !self.is_pending() {
                return (at, Outcome::Done);
            }
            match self.step(&bytes[at..], cx) {
                Ok(taken) => at += taken,
                Err(OutOfPages) => return (at, Outcome::OutOfPages),
            }
            self.done += u64::from(!self.has_begun());
        }
    }

    /// Whether a command is complete, and has had no memory.
    fn is_pending(&self) -> bool {
        match &self.state {
            State::Line => self.line.ends_with(b"\n"),
            State::Value(coming) => coming.left == 0,
            _ => false,
        }
    }

    /// Processes some of the bytes, and returns how many. There are bytes, or a command is pending.
    fn step<M: Memory<Part = P>>(&mut self, bytes: &[u8], cx: &mut Context<'_, M>) -> Result<usize, OutOfPages> {
        match &mut self.state {
            State::Line => self.line(bytes, cx),
            State::Keys { .. } => Ok(self.key(bytes, cx)),
            State::Rest => match bytes.iter().position(|&byte| byte == b'\n') {
                Some(end) => {
                    self.state = State::Line;
                    Ok(end + 1)
                }
                None => Ok(bytes.len()),
            },
            State::Value(coming) if coming.left == 0 => {
                let is_whole = coming.finish(cx)?;
                self.state = if is_whole { State::Line } else { State::Over };
                Ok(0)
            }
            State::Value(coming) => coming.receive(bytes, cx),
            State::Skip { left, last } => {
                let n = bytes.len().min(*left);
                *left -= n;
                follow(last, &bytes[..n]);
                if *left == 0 {
                    self.state = if last == b"\r\n" { State::Line } else { State::Over };
                }
                Ok(n)
            }
            State::Over => Ok(bytes.len()),
        }
    }

    /// Receives a line, up to its first space or its end. If it is complete, carries out its
    /// command.
    fn line<M: Memory<Part = P>>(&mut self, bytes: &[u8], cx: &mut Context<'_, M>) -> Result<usize, OutOfPages> {
        if self.line.ends_with(b"\n") {
            let mut line = std::mem::take(&mut self.line);
            let outcome = self.command(without_end(&line), cx);
            if outcome.is_ok() {
                // The buffer is kept for the next line.
                line.clear();
            }
            self.line = line;
            return outcome.map(|()| 0);
        }
        if self.line.is_empty() && bytes[0] == b' ' {
            // Spaces before a command mean nothing.
            return Ok(bytes.iter().take_while(|&&byte| byte == b' ').count());
        }
        let is_first_word = !self.line.contains(&b' ');
        let end = bytes.iter().position(|&byte| byte == b'\n' || (is_first_word && byte == b' '));
        let n = end.map_or(bytes.len(), |end| end + 1);
        if self.line.len() + n > MAX_LINE {
            cx.answers.text(b"CLIENT_ERROR line too long\r\n");
            self.state = State::Over;
            return Ok(n);
        }
        self.line.extend_from_slice(&bytes[..n]);
        if matches!(self.line.as_slice(), b"get " | b"gets ") {
            self.state = State::Keys { with_unique: self.line == b"gets ", any: false };
            self.line.clear();
        }
        Ok(n)
    }

    /// Receives one key of get or gets, or a part of it. If it is complete, answers it.
    fn key<M: Memory<Part = P>>(&mut self, bytes: &[u8], cx: &mut Context<'_, M>) -> usize {
        let State::Keys { with_unique, any } = &mut self.state else { return 0 };
        let end = bytes.iter().position(|&byte| byte == b'\n' || byte == b' ');
        let n = end.unwrap_or(bytes.len());
        // At the end of a line, CR is behind the key.
        let is_possible = self.line.len() + n <= MAX_KEY + 1;
        if is_possible {
            self.line.extend_from_slice(&bytes[..n]);
        }
        let is_last = end.is_some_and(|end| bytes[end] == b'\n');
        let key = if is_last { without_end(&self.line) } else { &self.line };
        if !is_possible || (end.is_some() && key.len() > MAX_KEY) {
            cx.answers.text(BAD_FORMAT);
            self.line.clear();
            self.state = State::Rest;
            return n;
        }
        if end.is_none() {
            return n;
        }
        if !key.is_empty() {
            cx.get(key, *with_unique);
            self.done += 1;
            *any = true;
        }
        self.line.clear();
        if is_last {
            cx.answers.text(if *any { b"END\r\n" } else { b"ERROR\r\n" });
            self.state = State::Line;
        }
        n + 1
    }
}

/// A line without its end: LF, or CR and LF.
fn without_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Keeps the last two bytes of those that have come.
fn follow(last: &mut [u8; 2], bytes: &[u8]) {
    for &byte in &bytes[bytes.len().saturating_sub(2)..] {
        *last = [last[1], byte];
    }
}

impl Session<Vec<u8>> {
    /// Restores a saved session: the pieces are copied into the store's memory. If there is no
    /// memory for a value, or bytes of it are missing, the rest of the value is received and the
    /// command is refused.
    pub(super) fn restore<M: Memory>(self, store: &mut Store<M>) -> Session<M::Part> {
        let mut complete = true;
        let mut session = self.map(|pieces| {
            let parts = store.copy(&pieces.concat(), true).ok().flatten();
            complete = parts.is_some();
            parts.unwrap_or_default()
        });
        if let State::Value(coming) = &mut session.state {
            let came: usize = coming.parts.iter().map(|part| M::bytes(part).len()).sum();
            coming.kept &= complete && coming.len <= MAX_VALUE && came.checked_add(coming.left) == Some(coming.len + 2);
            if !coming.kept {
                coming.parts.clear();
            }
        }
        session
    }
}

impl<P: Clone> Coming<P> {
    /// Receives some of the bytes, and returns how many.
    fn receive<M: Memory<Part = P>>(&mut self, bytes: &[u8], cx: &mut Context<'_, M>) -> Result<usize, OutOfPages> {
        let mut n = bytes.len().min(self.left);
        if self.kept {
            match cx.store.append(&bytes[..n], &mut self.parts, cx.may_evict)? {
                0 => {
                    self.kept = false;
                    self.parts.clear();
                }
                copied => n = copied,
            }
        }
        self.left -= n;
        follow(&mut self.last, &bytes[..n]);
        Ok(n)
    }
}
