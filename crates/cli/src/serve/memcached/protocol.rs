//! memcached's text protocol: one session for each connection, over one store.
//!
//! ```text
//!   bytes ──► Session::feed ──► command line, or the bytes of a value ──► Store
//!                    └──► Output: text, and pieces of values ──► the connection
//! ```
//!
//! A value is copied once, when it is stored, into pages that the device can read; a page has many values. A GET sends
//! pieces of these pages without a copy. A piece that is being sent keeps its bytes, also if the item is changed or
//! removed meanwhile.
//!
//! The commands are get, gets, set, add, replace, cas, delete, touch, incr, decr, flush_all, version, verbosity, stats
//! and quit.

use super::store::{Item, MAX_VALUE, Memory, Store, expiration};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::str::FromStr;

/// The longest command line. Most commands have at most 300 bytes; a get may name many keys.
const MAX_LINE: usize = 8192;
/// The longest key.
const MAX_KEY: usize = 250;
/// Digits of the largest number of 64 bits.
const DIGITS: usize = 20;

/// A part of a session's answers.
#[derive(Debug)]
pub(super) enum Output<P> {
    /// Text.
    Text(Vec<u8>),
    /// A piece of a value.
    Part(P),
}

/// A session's answers that were not sent yet, in order.
#[derive(Debug)]
pub(super) struct Answers<P>(pub(super) VecDeque<Output<P>>);

impl<P> Default for Answers<P> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<P> Answers<P> {
    fn text(&mut self, text: &[u8]) {
        if let Some(Output::Text(last)) = self.0.back_mut() {
            return last.extend_from_slice(text);
        }
        self.0.push_back(Output::Text(text.to_vec()));
    }
}

/// A storage command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Verb {
    Set,
    Add,
    Replace,
    Cas(u64),
}

/// A value that is being received.
#[derive(Debug, Serialize, Deserialize)]
struct Coming<P> {
    verb: Verb,
    key: Vec<u8>,
    flags: u32,
    exptime: i64,
    len: usize,
    quiet: bool,
    /// Bytes that are not received yet, including the end of the line.
    left: usize,
    /// The last two bytes that were received. When the value is complete, they must be the end of the line.
    last: [u8; 2],
    parts: Vec<P>,
    /// Whether there was memory for all bytes so far.
    kept: bool,
}

#[derive(Debug, Serialize, Deserialize)]
enum State<P> {
    Line,
    Value(Coming<P>),
    /// Bytes of a refused value, which are dropped.
    Skip(usize),
    /// The client has quit, or has sent a line that is too long.
    Over,
}

/// A connection's state. If its pieces `P` are plain bytes, it can be saved in a file.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::serve) struct Session<P> {
    line: Vec<u8>,
    state: State<P>,
}

impl<P> Default for Session<P> {
    fn default() -> Self {
        Self { line: Vec::new(), state: State::Line }
    }
}

fn number<N: FromStr>(word: Option<&[u8]>) -> Option<N> {
    std::str::from_utf8(word?).ok()?.parse().ok()
}

fn is_key(word: &[u8]) -> bool {
    !word.is_empty() && word.len() <= MAX_KEY
}

const BAD_FORMAT: &[u8] = b"CLIENT_ERROR bad command line format\r\n";

impl<P: Clone> Session<P> {
    /// Whether the connection must be closed after the answers have been sent.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// The session, with copies of the pieces of a value that was received in part.
    pub(super) fn save<M: Memory<Part = P>>(self) -> Session<Vec<u8>> {
        self.map(|parts| parts.iter().map(|part| M::bytes(part).to_vec()).collect())
    }

    fn map<Q>(self, parts: impl FnOnce(Vec<P>) -> Vec<Q>) -> Session<Q> {
        let Self { line, state } = self;
        let state = match state {
            State::Line => State::Line,
            State::Value(Coming { verb, key, flags, exptime, len, quiet, left, last, parts: before, kept }) => {
                let parts = parts(before);
                State::Value(Coming { verb, key, flags, exptime, len, quiet, left, last, parts, kept })
            }
            State::Skip(left) => State::Skip(left),
            State::Over => State::Over,
        };
        Session { line, state }
    }

    /// Processes all of these bytes from the client. `now` is in seconds since 1970.
    pub(super) fn feed<M: Memory<Part = P>>(
        &mut self,
        mut bytes: &[u8],
        store: &mut Store<M>,
        now: u64,
        answers: &mut Answers<P>,
    ) {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Over => return,
                State::Skip(left) => {
                    let n = bytes.len().min(*left);
                    (bytes, *left) = (&bytes[n..], *left - n);
                    if *left == 0 {
                        self.state = State::Line;
                    }
                }
                State::Value(coming) => {
                    let n = bytes.len().min(coming.left);
                    coming.take(&bytes[..n], store);
                    bytes = &bytes[n..];
                    if coming.left == 0
                        && let State::Value(coming) = std::mem::replace(&mut self.state, State::Line)
                    {
                        coming.store(store, now, answers);
                    }
                }
                State::Line => {
                    let end = bytes.iter().position(|&byte| byte == b'\n');
                    let n = end.map_or(bytes.len(), |end| end + 1);
                    if self.line.len() + n > MAX_LINE {
                        answers.text(b"CLIENT_ERROR line too long\r\n");
                        self.state = State::Over;
                        return;
                    }
                    self.line.extend_from_slice(&bytes[..n]);
                    bytes = &bytes[n..];
                    if end.is_some() {
                        let line = std::mem::take(&mut self.line);
                        self.command(&line, store, now, answers);
                        // The line's buffer is kept for the next line.
                        self.line = line;
                        self.line.clear();
                    }
                }
            }
        }
    }

    fn command<M: Memory<Part = P>>(&mut self, line: &[u8], store: &mut Store<M>, now: u64, answers: &mut Answers<P>) {
        let line = line.trim_ascii_end();
        let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let command = words.next().unwrap_or_default();
        let mut answer = |text: &[u8], quiet: bool| {
            if !quiet {
                answers.text(text);
            }
        };
        let is_quiet = |word: Option<&[u8]>| word == Some(b"noreply");
        match command {
            b"get" | b"gets" => get(command == b"gets", words, store, now, answers),
            b"set" | b"add" | b"replace" | b"cas" => self.storage(command, words, answers),
            b"delete" => {
                let Some(key) = words.next().filter(|key| is_key(key)) else { return answer(BAD_FORMAT, false) };
                // Old clients send a time of 0.
                let quiet = words.any(|word| word == b"noreply");
                let there = store.get(key, now).is_some() && store.remove(key);
                answer(if there { b"DELETED\r\n" } else { b"NOT_FOUND\r\n" }, quiet);
            }
            b"touch" => {
                let key = words.next().filter(|key| is_key(key));
                let (Some(key), Some(exptime)) = (key, number(words.next())) else { return answer(BAD_FORMAT, false) };
                let there = store.touch(key, expiration(exptime, now), now);
                answer(if there { b"TOUCHED\r\n" } else { b"NOT_FOUND\r\n" }, is_quiet(words.next()));
            }
            b"incr" | b"decr" => {
                let Some(key) = words.next().filter(|key| is_key(key)) else { return answer(BAD_FORMAT, false) };
                let Some(by) = number::<u64>(words.next()) else {
                    return answer(b"CLIENT_ERROR invalid numeric delta argument\r\n", false);
                };
                let quiet = is_quiet(words.next());
                match count(store, key, by, command == b"incr", now) {
                    Ok(value) => answer(format!("{value}\r\n").as_bytes(), quiet),
                    Err(why) => answer(why, quiet),
                }
            }
            b"flush_all" => {
                store.clear();
                answer(b"OK\r\n", words.any(|word| word == b"noreply"));
            }
            b"verbosity" => answer(b"OK\r\n", words.any(|word| word == b"noreply")),
            b"version" => answer(concat!("VERSION netmem ", env!("CARGO_PKG_VERSION"), "\r\n").as_bytes(), false),
            b"stats" => answer(stats(store, now).as_bytes(), false),
            b"quit" => self.state = State::Over,
            _ => answer(b"ERROR\r\n", false),
        }
    }

    /// A storage command: a value follows its line.
    fn storage<'l>(&mut self, command: &[u8], mut words: impl Iterator<Item = &'l [u8]>, answers: &mut Answers<P>) {
        let key = words.next().unwrap_or_default();
        let (flags, exptime, len) = (number(words.next()), number(words.next()), number::<usize>(words.next()));
        let verb = match command {
            b"set" => Some(Verb::Set),
            b"add" => Some(Verb::Add),
            b"replace" => Some(Verb::Replace),
            _ => number(words.next()).map(Verb::Cas),
        };
        let quiet = words.next() == Some(b"noreply");
        let Some(len) = len.filter(|len| *len <= u32::MAX as usize) else { return answers.text(BAD_FORMAT) };
        let (Some(verb), Some(flags), Some(exptime), true) = (verb, flags, exptime, is_key(key)) else {
            answers.text(BAD_FORMAT);
            self.state = State::Skip(len + 2);
            return;
        };
        if len > MAX_VALUE {
            answers.text(b"SERVER_ERROR object too large for cache\r\n");
            self.state = State::Skip(len + 2);
            return;
        }
        let (key, left) = (key.to_vec(), len + 2);
        let last = [0; 2];
        self.state =
            State::Value(Coming { verb, key, flags, exptime, len, quiet, left, last, parts: Vec::new(), kept: true });
    }
}

impl Session<Vec<u8>> {
    /// Restores a saved session: the pieces are copied into the store's memory. If there is no memory for a value, or
    /// bytes of it are missing, the rest of the value is received and the command is refused.
    pub(super) fn restore<M: Memory>(self, store: &mut Store<M>) -> Session<M::Part> {
        let mut complete = true;
        let mut session = self.map(|pieces| {
            let mut parts = Vec::new();
            complete = pieces.iter().all(|piece| store.append(piece, &mut parts));
            parts
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
    fn take<M: Memory<Part = P>>(&mut self, bytes: &[u8], store: &mut Store<M>) {
        self.left -= bytes.len();
        for &byte in &bytes[bytes.len().saturating_sub(2)..] {
            self.last = [self.last[1], byte];
        }
        if self.kept && !store.append(bytes, &mut self.parts) {
            self.kept = false;
            self.parts.clear();
        }
    }

    /// Stores the value, all of which was received.
    fn store<M: Memory<Part = P>>(self, store: &mut Store<M>, now: u64, answers: &mut Answers<P>) {
        let Self { verb, key, flags, exptime, len, quiet, last, parts, kept, .. } = self;
        let unique = store.get(&key, now).map(|item| item.unique);
        store.counts.sets += 1;
        let answer: &[u8] = match (verb, unique) {
            _ if last != *b"\r\n" => b"CLIENT_ERROR bad data chunk\r\n",
            (Verb::Add, Some(_)) | (Verb::Replace, None) => b"NOT_STORED\r\n",
            (Verb::Cas(_), None) => b"NOT_FOUND\r\n",
            (Verb::Cas(expected), Some(unique)) if expected != unique => b"EXISTS\r\n",
            _ if kept && store.put(&key, flags, expiration(exptime, now), len, parts) => b"STORED\r\n",
            _ => {
                // The older value is removed, because the client wanted to replace it.
                store.remove(&key);
                b"SERVER_ERROR out of memory storing object\r\n"
            }
        };
        if !quiet {
            answers.text(answer);
        }
    }
}

fn get<'l, M: Memory>(
    with_unique: bool,
    keys: impl Iterator<Item = &'l [u8]>,
    store: &mut Store<M>,
    now: u64,
    answers: &mut Answers<M::Part>,
) {
    let mut any = false;
    for key in keys {
        if !is_key(key) {
            return answers.text(BAD_FORMAT);
        }
        (any, store.counts.gets) = (true, store.counts.gets + 1);
        let Some(Item { flags, unique, len, parts, .. }) = store.get(key, now) else { continue };
        answers.text(b"VALUE ");
        answers.text(key);
        answers.text(format!(" {flags} {len}").as_bytes());
        if with_unique {
            answers.text(format!(" {unique}").as_bytes());
        }
        answers.text(b"\r\n");
        answers.0.extend(parts.iter().cloned().map(Output::Part));
        store.counts.hits += 1;
    }
    answers.text(if any { b"END\r\n" } else { b"ERROR\r\n" });
}

/// Adds to a number that is stored as text, or subtracts from it, but not below 0.
fn count<M: Memory>(store: &mut Store<M>, key: &[u8], by: u64, up: bool, now: u64) -> Result<u64, &'static [u8]> {
    let item = store.get(key, now).ok_or(&b"NOT_FOUND\r\n"[..])?;
    let text = item.value::<M>(DIGITS);
    let value: Option<u64> = number(text.as_deref());
    let value = value.ok_or(&b"CLIENT_ERROR cannot increment or decrement non-numeric value\r\n"[..])?;
    let value = if up { value.wrapping_add(by) } else { value.saturating_sub(by) };
    if store.rewrite(key, value.to_string().as_bytes()) {
        Ok(value)
    } else {
        Err(b"SERVER_ERROR out of memory in incr\r\n")
    }
}

fn stats<M: Memory>(store: &Store<M>, now: u64) -> String {
    let c = store.counts;
    let rows = [
        ("pid", u64::from(std::process::id())),
        ("time", now),
        ("cmd_get", c.gets),
        ("cmd_set", c.sets),
        ("get_hits", c.hits),
        ("get_misses", c.gets - c.hits),
        ("curr_items", store.len() as u64),
        ("total_items", c.items_ever),
        ("bytes", store.bytes() as u64),
        ("limit_maxbytes", store.limit() as u64),
        ("evictions", c.evictions),
    ];
    let rows: String = rows.iter().map(|(name, value)| format!("STAT {name} {value}\r\n")).collect();
    rows + "END\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    /// Memory for a limited number of bytes. Dropped pieces are free again.
    struct Heap {
        free: Rc<std::cell::Cell<usize>>,
    }

    #[derive(Debug)]
    struct Piece(Vec<u8>, Rc<std::cell::Cell<usize>>);

    impl Drop for Piece {
        fn drop(&mut self) {
            self.1.set(self.1.get() + self.0.len());
        }
    }

    impl Memory for Heap {
        type Part = Rc<Piece>;

        fn append(&mut self, bytes: &[u8], value: &mut Vec<Rc<Piece>>) -> bool {
            // In small pieces, as if the memory had small pages.
            for piece in bytes.chunks(100) {
                let Some(left) = self.free.get().checked_sub(piece.len()) else { return false };
                self.free.set(left);
                value.push(Rc::new(Piece(piece.to_vec(), Rc::clone(&self.free))));
            }
            true
        }

        fn bytes(part: &Rc<Piece>) -> &[u8] {
            &part.0
        }
    }

    fn store(free: usize, limit: usize) -> Store<Heap> {
        Store::new(Heap { free: Rc::new(free.into()) }, limit)
    }

    fn told(answers: Answers<Rc<Piece>>) -> String {
        let bytes = answers.0.into_iter().flat_map(|output| match output {
            Output::Text(text) => text,
            Output::Part(part) => part.0.clone(),
        });
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
    }

    /// A client gets the same answers however its bytes are split.
    fn talk(store: &mut Store<Heap>, now: u64, input: &str) -> String {
        let mut answers = Answers::default();
        Session::default().feed(input.as_bytes(), store, now, &mut answers);
        told(answers)
    }

    const TALK: &str = "set a 7 0 5\r\nhello\r\nget a\r\nget a b\r\nadd a 0 0 1\r\nx\r\nreplace b 0 0 1\r\nx\r\nset n 0 0 2 noreply\r\n41\r\n\
        incr n 1\r\nget n\r\ndecr n 100\r\nincr a 1\r\nincr n x\r\ntouch a 100\r\ntouch b 1\r\ndelete a\r\ndelete a\r\nget a\r\nset e 0 0 0\r\n\r\n\
        get e\r\nset a 0 0 3\r\nhello\r\nversion\r\nbogus\r\nget\r\nset a b c d\r\nverbosity 1\r\n";
    const TOLD: &str = "STORED\r\nVALUE a 7 5\r\nhello\r\nEND\r\nVALUE a 7 5\r\nhello\r\nEND\r\nNOT_STORED\r\nNOT_STORED\r\n\
        42\r\nVALUE n 0 2\r\n42\r\nEND\r\n0\r\nCLIENT_ERROR cannot increment or decrement non-numeric value\r\n\
        CLIENT_ERROR invalid numeric delta argument\r\nTOUCHED\r\nNOT_FOUND\r\nDELETED\r\nNOT_FOUND\r\nEND\r\nSTORED\r\n\
        VALUE e 0 0\r\n\r\nEND\r\nCLIENT_ERROR bad data chunk\r\n";

    #[test]
    fn commands_are_answered() {
        let told = talk(&mut store(10_000, 10_000), 1_000_000, TALK);
        assert!(told.starts_with(TOLD), "{told}");
        // `hello` had two bytes more than were announced, which are a command then.
        let rest = format!(
            "ERROR\r\nVERSION netmem {}\r\nERROR\r\nERROR\r\nCLIENT_ERROR bad command line format\r\nOK\r\n",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(told[TOLD.len()..], rest);
    }

    #[test]
    fn bytes_come_in_any_pieces() {
        let whole = talk(&mut store(10_000, 10_000), 1_000_000, TALK);
        for size in 1..40 {
            let (mut store, mut session, mut answers) = (store(10_000, 10_000), Session::default(), Answers::default());
            TALK.as_bytes().chunks(size).for_each(|piece| session.feed(piece, &mut store, 1_000_000, &mut answers));
            assert_eq!(told(answers), whole, "pieces of {size}");
        }
    }

    #[test]
    fn uniques_guard_changes() {
        let mut store = store(10_000, 10_000);
        assert_eq!(talk(&mut store, 0, "cas a 0 0 1 1\r\nx\r\n"), "NOT_FOUND\r\n");
        talk(&mut store, 0, "set a 0 0 1\r\n1\r\n");
        let told = talk(&mut store, 0, "gets a\r\n");
        let unique = told.lines().next().unwrap().rsplit(' ').next().unwrap().to_owned();
        assert_eq!(talk(&mut store, 0, &format!("cas a 0 0 1 {unique}\r\n2\r\n")), "STORED\r\n");
        assert_eq!(
            talk(&mut store, 0, &format!("cas a 0 0 1 {unique}\r\n3\r\nget a\r\n")),
            "EXISTS\r\nVALUE a 0 1\r\n2\r\nEND\r\n"
        );
    }

    #[test]
    fn items_expire() {
        let mut store = store(10_000, 10_000);
        talk(
            &mut store,
            1000,
            "set a 0 10 1\r\n1\r\nset b 0 -1 1\r\n1\r\nset c 0 3000000000 1\r\n1\r\nset d 0 0 1\r\n1\r\n",
        );
        assert_eq!(talk(&mut store, 1009, "get a b c d\r\n").matches("VALUE").count(), 3);
        assert_eq!(talk(&mut store, 1010, "get a b c d\r\n").matches("VALUE").count(), 2);
        assert_eq!(talk(&mut store, 3_000_000_000, "get c d\r\n").matches("VALUE").count(), 1);
        assert_eq!(store.len(), 1);
    }

    /// Neither the items nor the memory of their values exceed a bound; the item that was used last stays.
    #[test]
    fn memory_is_bounded() {
        let value = "x".repeat(400);
        for (free, limit) in [(5000, 1_000_000), (1_000_000, 5000)] {
            let mut store = store(free, limit);
            for n in 0..100 {
                assert_eq!(talk(&mut store, 0, &format!("set k{n} 0 0 400\r\n{value}\r\n")), "STORED\r\n");
                assert!(store.bytes() <= limit);
                assert!(talk(&mut store, 0, "get k0\r\n").len() > 400, "k0 is used all the time");
            }
            assert!((3..13).contains(&store.len()) && store.counts.evictions > 80, "{store:?}");
        }
        // What does not fit at all.
        let mut store = store(300, 5000);
        talk(&mut store, 0, "set a 0 0 1\r\nx\r\n");
        let told = talk(&mut store, 0, &format!("set a 0 0 400\r\n{value}\r\nget a\r\n"));
        assert_eq!(told, "SERVER_ERROR out of memory storing object\r\nEND\r\n");
        assert_eq!((store.memory.free.get(), store.bytes()), (300, 0));
        let told = talk(&mut store, 0, &format!("set a 0 0 2000000\r\n{}\r\nversion\r\n", "y".repeat(2_000_000)));
        assert!(told.starts_with("SERVER_ERROR object too large for cache\r\nVERSION"), "{told}");
    }

    /// A client that sends no end of a line gets an end.
    #[test]
    fn lines_are_bounded() {
        let (mut store, mut session, mut answers) = (store(100, 1000), Session::default(), Answers::default());
        for _ in 0..100 {
            session.feed(&[b'x'; 1000], &mut store, 0, &mut answers);
            assert!(session.line.len() <= MAX_LINE);
        }
        assert!(session.is_over());
        assert_eq!(told(answers), "CLIENT_ERROR line too long\r\n");
        let mut session = Session::default();
        session.feed(b"quit\r\nversion\r\n", &mut store, 0, &mut Answers::default());
        assert!(session.is_over());
        let long = "k".repeat(MAX_KEY + 1);
        assert_eq!(talk(&mut store, 0, &format!("get {long}\r\n")).as_bytes(), BAD_FORMAT);
        assert_eq!(talk(&mut store, 0, &format!("set {long} 0 0 3\r\nabc\r\nversion\r\n")).matches("ERROR").count(), 1);
    }

    /// A value that is being sent stays what it was.
    #[test]
    fn values_in_flight_do_not_change() {
        let mut store = store(10_000, 10_000);
        talk(&mut store, 0, "set a 0 0 3\r\nold\r\n");
        let mut answers = Answers::default();
        Session::default().feed(b"get a\r\n", &mut store, 0, &mut answers);
        talk(&mut store, 0, "set a 0 0 3\r\nnew\r\ndelete a\r\nflush_all\r\n");
        assert_eq!(told(answers), "VALUE a 0 3\r\nold\r\nEND\r\n");
    }
}
