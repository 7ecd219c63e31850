//! Simple services: echo (RFC 862), discard (RFC 863), and a source of bytes.

use super::client::{Awaited, Client, End};
use super::service::{BY_REFERENCE, Service};
use netmem::pool::{Frag, SharedPool};
use netmem_inet::Fragment;
use netmem_measure::endpoint::Mem;

/// Pages of the pattern, which these services need. Pages for headers and copies come on top.
pub(super) const PAGES: usize = 16;

/// Sends received bytes back.
pub(super) struct Echo;

impl Service for Echo {
    const PORT: u16 = 7;
    type State = ();

    async fn serve(&self, client: &mut Client, (): &mut ()) -> Result<(), End> {
        let mut fragments: [Fragment<Mem>; 16] = Default::default();
        loop {
            let n = client.receive(&mut fragments, Awaited::Request).await?;
            if n == 0 {
                client.shutdown();
                return Ok(());
            }
            for (at, place) in fragments[..n].iter_mut().enumerate() {
                let fragment = std::mem::take(place);
                match fragment.share().filter(|_| fragment.len() >= BY_REFERENCE) {
                    Some(part) => client.send(part, at + 1 < n).await?,
                    None => client.write(&fragment).await?,
                }
            }
        }
    }
}

/// Drops received bytes.
pub(super) struct Discard;

impl Service for Discard {
    const PORT: u16 = 9;
    type State = ();

    async fn serve(&self, client: &mut Client, (): &mut ()) -> Result<(), End> {
        let mut fragments: [Fragment<Mem>; 32] = Default::default();
        loop {
            let n = client.receive(&mut fragments, Awaited::Request).await?;
            if n == 0 {
                client.shutdown();
                return Ok(());
            }
            fragments[..n].iter_mut().for_each(|place| *place = Fragment::default());
        }
    }
}

/// An endless stream of bytes: a pattern of 64 KiB, repeated from the same pages.
pub(super) struct Pattern(Vec<Frag<Mem>>);

impl Pattern {
    /// Byte `n` of the pattern.
    fn byte(n: usize) -> u8 {
        (n + 7 * (n >> 8)) as u8
    }

    pub(super) fn new(pool: &SharedPool<Mem>) -> anyhow::Result<Self> {
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

    /// Up to `most` bytes from position `at` on: as many as lie in one page.
    pub(super) fn part(&self, at: u64, most: u64) -> Frag<Mem> {
        let page = self.0[0].len() as u64;
        let (n, offset) = ((at / page) as usize % self.0.len(), at % page);
        let len = most.min(page - offset);
        self.0[n].slice(offset as usize..(offset + len) as usize)
    }
}

/// Sends the pattern until the peer closes the connection. Received bytes are not read.
pub(super) struct Source(Pattern);

impl Source {
    pub(super) fn new(pool: &SharedPool<Mem>) -> anyhow::Result<Self> {
        Ok(Self(Pattern::new(pool)?))
    }
}

impl Service for Source {
    /// The port of the character generator (RFC 864). The pattern is not that of the RFC.
    const PORT: u16 = 19;
    /// Bytes that were sent.
    type State = u64;

    async fn serve(&self, client: &mut Client, at: &mut u64) -> Result<(), End> {
        while !client.leaves() {
            let part = self.0.part(*at, u64::MAX);
            let len = part.len() as u64;
            match client.send(part, true).await {
                Ok(()) => *at = at.wrapping_add(len),
                // The peer has closed the connection.
                Err(End::Broken(_)) => return Ok(()),
                Err(end) => return Err(end),
            }
        }
        Err(End::Leaves)
    }
}
