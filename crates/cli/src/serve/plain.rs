//! The services of the first RFCs: echo (862), discard (863), and a source of bytes.

use super::{BY_REFERENCE, Service, Shared};
use crate::host::tasks::{Conn, Task, receive, send, write};
use crate::host::{Mem, Running};
use netmem::Frag;
use netmem_inet::Fragment;

/// Pages that these services need beside those for headers and copies: a pattern.
pub(super) const PAGES: usize = 16;

/// Sends back what comes.
pub(super) struct Echo;

impl Service for Echo {
    const PORT: u16 = 7;

    fn serve(&self, mut stream: Conn, counts: Shared) -> Task<'static> {
        Box::pin(async move {
            let mut fragments: [Fragment<Mem>; 16] = Default::default();
            loop {
                let n = receive(&mut stream, &mut fragments).await?;
                if n == 0 {
                    stream.shutdown();
                    return Ok(());
                }
                for (at, place) in fragments[..n].iter_mut().enumerate() {
                    let fragment = std::mem::take(place);
                    let len = fragment.len() as u64;
                    counts.borrow_mut().received += len;
                    match fragment.share().filter(|_| fragment.len() >= BY_REFERENCE) {
                        Some(part) => send(&mut stream, part, at + 1 < n).await?,
                        None => write(&mut stream, &fragment).await?,
                    }
                    counts.borrow_mut().sent += len;
                }
            }
        })
    }
}

/// Takes what comes.
pub(super) struct Discard;

impl Service for Discard {
    const PORT: u16 = 9;

    fn serve(&self, mut stream: Conn, counts: Shared) -> Task<'static> {
        Box::pin(async move {
            let mut fragments: [Fragment<Mem>; 32] = Default::default();
            loop {
                let n = receive(&mut stream, &mut fragments).await?;
                if n == 0 {
                    stream.shutdown();
                    return Ok(());
                }
                let taken: usize = fragments[..n].iter_mut().map(|place| std::mem::take(place).len()).sum();
                counts.borrow_mut().received += taken as u64;
            }
        })
    }
}

/// Bytes without end: a pattern of 64 KiB, again and again, from the same pages.
#[derive(Clone)]
pub(super) struct Pattern(Vec<Frag<Mem>>);

impl Pattern {
    /// Byte `n` of the pattern.
    fn byte(n: usize) -> u8 {
        (n + 7 * (n >> 8)) as u8
    }

    pub(super) fn new(running: &mut Running) -> anyhow::Result<Self> {
        let pool = &running.pool;
        let page = |n: usize| {
            let mut page = pool.alloc()?;
            let bytes = page.as_mut_slice();
            let start = n * bytes.len();
            bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = Self::byte(start + at));
            Some(page.freeze())
        };
        let pages: Option<Vec<_>> = (0..PAGES).map(page).collect();
        Ok(Self(pages.ok_or_else(|| anyhow::anyhow!("no pages for the pattern"))?))
    }

    /// Up to `most` bytes from byte `at` on, which are in one page.
    pub(super) fn part(&self, at: u64, most: u64) -> Frag<Mem> {
        let page = self.0[0].len() as u64;
        let (n, offset) = ((at / page) as usize % self.0.len(), at % page);
        let len = most.min(page - offset);
        self.0[n].slice(offset as usize..(offset + len) as usize)
    }
}

/// Sends the pattern until the peer closes. What comes is dropped.
pub(super) struct Source(Pattern);

impl Source {
    pub(super) fn new(running: &mut Running) -> anyhow::Result<Self> {
        Ok(Self(Pattern::new(running)?))
    }
}

impl Service for Source {
    /// Of the character generator (RFC 864), whose pattern is another.
    const PORT: u16 = 19;

    fn serve(&self, mut stream: Conn, counts: Shared) -> Task<'static> {
        let pattern = self.0.clone();
        Box::pin(async move {
            let mut at = 0;
            loop {
                let part = pattern.part(at, u64::MAX);
                let len = part.len() as u64;
                if send(&mut stream, part, true).await.is_err() {
                    // The peer has seen enough.
                    return Ok(());
                }
                at += len;
                counts.borrow_mut().sent += len;
            }
        })
    }
}
