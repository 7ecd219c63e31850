//! The commands of memcached's text protocol.

use super::protocol::{Coming, Context, MAX_KEY, Session, State};
use super::store::{self, Item, MAX_VALUE, Memory, OutOfPages, Store, expiration};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Digits of the largest number of 64 bits.
const DIGITS: usize = 20;
pub(super) const BAD_FORMAT: &[u8] = b"CLIENT_ERROR bad command line format\r\n";
const BAD_CHUNK: &[u8] = b"CLIENT_ERROR bad data chunk\r\n";
const NOT_FOUND: &[u8] = b"NOT_FOUND\r\n";
const OUT_OF_MEMORY: &[u8] = b"SERVER_ERROR out of memory storing object\r\n";

/// A storage command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verb {
    Set,
    Add,
    Replace,
    Append,
    Prepend,
    Cas(u64),
}

fn number<N: FromStr>(word: Option<&[u8]>) -> Option<N> {
    std::str::from_utf8(word?).ok()?.parse().ok()
}

/// The length of a value. A sign would be read by some and not by others.
fn length(word: Option<&[u8]>) -> Option<usize> {
    word.filter(|word| word.iter().all(u8::is_ascii_digit))
        .and_then(|word| number::<u32>(Some(word)))
        .map(|len| len as usize)
}

fn is_key(word: &&[u8]) -> bool {
    !word.is_empty() && word.len() <= MAX_KEY
}

fn is_quiet(word: Option<&[u8]>) -> bool {
    word == Some(b"noreply")
}

impl<P: Clone> Session<P> {
    /// Carries out a command, or begins to receive its value. The line is without its end. It is
    /// neither get nor gets with keys.
    ///
    /// # Errors
    ///
    /// The command needs memory and has changed nothing.
    pub(super) fn command<M: Memory<Part = P>>(
        &mut self,
        line: &[u8],
        cx: &mut Context<'_, M>,
    ) -> Result<(), OutOfPages> {
        let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let command = words.next().unwrap_or_default();
        let now = cx.now;
        match command {
            b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" => self.storage(command, words, cx),
            b"delete" => match words.next().filter(is_key) {
                Some(key) => {
                    let there = cx.store.get(key, now).is_some() && cx.store.remove(key);
                    // Old clients send a time of 0 before `noreply`.
                    cx.answer(if there { b"DELETED\r\n" } else { NOT_FOUND }, is_quiet(words.next_back()));
                }
                None => cx.answer(BAD_FORMAT, is_quiet(words.next_back())),
            },
            b"touch" => match (words.next().filter(is_key), number(words.next())) {
                (Some(key), Some(exptime)) => {
                    let there = cx.store.touch(key, expiration(exptime, now), now);
                    cx.answer(if there { b"TOUCHED\r\n" } else { NOT_FOUND }, is_quiet(words.next_back()));
                }
                _ => cx.answer(BAD_FORMAT, is_quiet(words.next_back())),
            },
            b"incr" | b"decr" => match (words.next().filter(is_key), number(words.next())) {
                (Some(key), Some(by)) => {
                    let answer = cx.count(key, by, command == b"incr")?;
                    cx.answer(&answer, is_quiet(words.next_back()));
                }
                (Some(_), None) => {
                    cx.answer(b"CLIENT_ERROR invalid numeric delta argument\r\n", is_quiet(words.next_back()));
                }
                (None, _) => cx.answer(BAD_FORMAT, is_quiet(words.next_back())),
            },
            b"flush_all" => {
                cx.store.clear();
                cx.answer(b"OK\r\n", is_quiet(words.next_back()));
            }
            b"verbosity" => cx.answer(b"OK\r\n", is_quiet(words.next_back())),
            b"version" => cx.answer(concat!("VERSION netmem ", env!("CARGO_PKG_VERSION"), "\r\n").as_bytes(), false),
            b"stats" => cx.answer(stats(cx.store, now).as_bytes(), false),
            b"quit" => self.state = State::Over,
            // No value follows these.
            b"" | b"get" | b"gets" => cx.answer(b"ERROR\r\n", false),
            _ => {
                // A value may follow, and its length is not known.
                cx.answer(b"ERROR\r\n", false);
                self.state = State::Over;
            }
        }
        Ok(())
    }

    /// A storage command: a value follows its line.
    fn storage<'l, M: Memory<Part = P>>(
        &mut self,
        command: &[u8],
        mut words: impl Iterator<Item = &'l [u8]>,
        cx: &mut Context<'_, M>,
    ) {
        let key = words.next().filter(is_key);
        let (flags, exptime, len) = (number(words.next()), number(words.next()), length(words.next()));
        let verb = match command {
            b"set" => Some(Verb::Set),
            b"add" => Some(Verb::Add),
            b"replace" => Some(Verb::Replace),
            b"append" => Some(Verb::Append),
            b"prepend" => Some(Verb::Prepend),
            _ => number(words.next()).map(Verb::Cas),
        };
        let quiet = is_quiet(words.last());
        let Some(len) = len else {
            cx.answer(BAD_FORMAT, false);
            self.state = State::Over;
            return;
        };
        let (left, last) = (len + 2, [0; 2]);
        self.state = State::Skip { left, last };
        let (Some(key), Some(verb), Some(flags), Some(exptime)) = (key, verb, flags, exptime) else {
            return cx.answer(BAD_FORMAT, quiet);
        };
        if len > MAX_VALUE {
            cx.answer(b"SERVER_ERROR object too large for cache\r\n", quiet);
            if verb == Verb::Set {
                // The client believes that the older value is gone.
                cx.store.remove(key);
            }
            return;
        }
        let (key, parts) = (key.to_vec(), Vec::new());
        self.state = State::Value(Coming { verb, key, flags, exptime, len, quiet, left, last, parts, kept: true });
    }
}

impl<P: Clone> Coming<P> {
    /// Stores the value, all of which was received. Returns whether it ends as it should: else it
    /// is not known where the next command begins.
    pub(super) fn finish<M: Memory<Part = P>>(&mut self, cx: &mut Context<'_, M>) -> Result<bool, OutOfPages> {
        let is_whole = self.last == *b"\r\n";
        let answer = if is_whole { self.store(cx)? } else { BAD_CHUNK };
        cx.store.counts.sets += 1;
        cx.answer(answer, self.quiet);
        Ok(is_whole)
    }

    fn store<M: Memory<Part = P>>(&mut self, cx: &mut Context<'_, M>) -> Result<&'static [u8], OutOfPages> {
        let Context { store, now, may_evict, .. } = cx;
        let unique = store.get(&self.key, *now).map(|item| item.unique);
        let stored = match (self.verb, unique) {
            (Verb::Add, Some(_)) | (Verb::Replace | Verb::Append | Verb::Prepend, None) => {
                return Ok(b"NOT_STORED\r\n");
            }
            (Verb::Cas(_), None) => return Ok(NOT_FOUND),
            (Verb::Cas(expected), Some(unique)) if expected != unique => return Ok(b"EXISTS\r\n"),
            _ if !self.kept => false,
            (Verb::Append | Verb::Prepend, Some(_)) => {
                let more = store::bytes::<M>(&self.parts, self.len);
                let is_append = self.verb == Verb::Append;
                let Some(value) = joined(store, &self.key, &more, is_append, *now) else {
                    return Ok(b"NOT_STORED\r\n");
                };
                store.rewrite(&self.key, &value, *may_evict)?
            }
            _ => {
                let parts = std::mem::take(&mut self.parts);
                store.put(&self.key, self.flags, expiration(self.exptime, *now), self.len, parts)
            }
        };
        if !stored && self.verb == Verb::Set {
            // The client believes that the older value is gone.
            store.remove(&self.key);
        }
        Ok(if stored { b"STORED\r\n" } else { OUT_OF_MEMORY })
    }
}

/// The value of an item with `more` behind it, or before it. `None` if that is too long.
fn joined<M: Memory>(store: &mut Store<M>, key: &[u8], more: &[u8], is_append: bool, now: u64) -> Option<Vec<u8>> {
    let old = store.get(key, now)?.value::<M>(MAX_VALUE - more.len())?;
    Some(if is_append { [&old, more].concat() } else { [more, &old].concat() })
}

impl<M: Memory> Context<'_, M> {
    fn answer(&mut self, text: &[u8], quiet: bool) {
        if !quiet {
            self.answers.text(text);
        }
    }

    /// Answers one key of get or gets.
    pub(super) fn get(&mut self, key: &[u8], with_unique: bool) {
        let Self { store, now, answers, .. } = self;
        store.counts.gets += 1;
        let Some(Item { flags, unique, len, parts, .. }) = store.get(key, *now) else { return };
        answers.text(b"VALUE ");
        answers.text(key);
        let unique = if with_unique { format!(" {unique}") } else { String::new() };
        answers.text(format!(" {flags} {len}{unique}\r\n").as_bytes());
        answers.value::<M>(parts);
        store.counts.hits += 1;
    }

    /// Adds to a number that is stored as text, or subtracts from it, but not below 0. Returns the
    /// answer.
    fn count(&mut self, key: &[u8], by: u64, up: bool) -> Result<Vec<u8>, OutOfPages> {
        let Some(item) = self.store.get(key, self.now) else { return Ok(NOT_FOUND.into()) };
        let Some(value) = number::<u64>(item.value::<M>(DIGITS).as_deref()) else {
            return Ok(b"CLIENT_ERROR cannot increment or decrement non-numeric value\r\n".into());
        };
        let value = if up { value.wrapping_add(by) } else { value.saturating_sub(by) };
        let stored = self.store.rewrite(key, value.to_string().as_bytes(), self.may_evict)?;
        Ok(if stored { format!("{value}\r\n").into() } else { b"SERVER_ERROR out of memory in incr\r\n".into() })
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
