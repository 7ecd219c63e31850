//! A packet: a head and up to 17 more fragments.

use crate::frags::Frags;
use crate::meta::Meta;
use netmem_pool::{Frag, Mapped, Memory, OutOfRange, Page};

/// A frame as its pages: what a device delivered and nobody else has, or what is to be sent.
///
/// ```text
///   Packet { head: Frag, frags: [Frag; 0..=17], len, meta }      fragments behind the head are on the heap
/// ```
///
/// Dropping it drops each fragment, and each page goes home when its last one is gone.
#[derive(Debug)]
pub struct Packet<M: Memory> {
    head: Frag<M>,
    frags: Frags<M>,
    len: u32,
    /// Offload information.
    pub meta: Meta,
}

/// A packet has no room for one more fragment, which is returned.
#[derive(Debug, thiserror::Error)]
#[error("a packet has at most 17 fragments behind its head")]
pub struct TooManyFrags<M: Memory>(pub Frag<M>);

impl<M: Memory> Packet<M> {
    /// A packet of one fragment.
    #[inline]
    #[must_use]
    pub fn new(head: Frag<M>) -> Self {
        let len = head.len() as u32;
        Self { head, frags: Frags::NONE, len, meta: Meta::default() }
    }

    #[inline]
    pub(crate) fn from_parts(head: Frag<M>, frags: Frags<M>, len: u32, meta: Meta) -> Self {
        Self { head, frags, len, meta }
    }

    /// Adds a fragment at the end. Allocates if it is the first behind the head.
    ///
    /// # Errors
    ///
    /// [`TooManyFrags`] returns the fragment.
    pub fn push(&mut self, frag: Frag<M>) -> Result<(), TooManyFrags<M>> {
        let len = frag.len() as u32;
        self.frags.push(frag).map_err(TooManyFrags)?;
        self.len += len;
        Ok(())
    }

    /// Bytes in all fragments.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty packet is of no interest")]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// The first fragment.
    #[inline]
    #[must_use]
    pub fn head(&self) -> &Frag<M> {
        &self.head
    }

    /// The fragments behind the head.
    #[inline]
    #[must_use]
    pub fn frags(&self) -> &[Frag<M>] {
        self.frags.as_slice()
    }

    /// All fragments, in order.
    pub fn fragments(&self) -> impl Iterator<Item = &Frag<M>> {
        std::iter::once(&self.head).chain(self.frags())
    }

    /// Takes `n` bytes off the front of the head. Touches no count: no atomic.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the head is shorter; nothing has changed then.
    pub fn pull(&mut self, n: usize) -> Result<(), OutOfRange> {
        OutOfRange::check(0, n, self.head.len())?;
        self.head.advance(n);
        self.len -= n as u32;
        Ok(())
    }

    /// Takes the packet apart: the head, and the rest in order.
    pub fn into_fragments(self) -> (Frag<M>, impl Iterator<Item = Frag<M>>) {
        (self.head, self.frags.into_vec().into_iter())
    }
}

impl<M: Mapped> Packet<M> {
    /// Copies `to.len()` bytes from `offset` out, across fragments.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; how much was copied is then undefined.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        let short = OutOfRange { offset, len: to.len(), have: self.len() };
        copy_across(self.fragments().map(|f| (f.len(), f)), offset, to, Frag::copy_to).ok_or(short)
    }

    /// Puts `header` in front of the packet, as [`Frag::prepend`] does.
    #[inline]
    #[must_use]
    pub fn prepend(&mut self, header: &[u8]) -> bool {
        let done = self.head.prepend(header);
        if done {
            self.len += header.len() as u32;
        }
        done
    }

    /// All bytes, copied.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = vec![0; self.len()];
        let copied = self.copy_to(0, &mut all);
        debug_assert!(copied.is_ok());
        all
    }
}

impl<M: Memory> From<Page<M>> for Packet<M> {
    fn from(page: Page<M>) -> Self {
        Self::new(page.freeze())
    }
}

/// Copies out of a sequence of parts as if they were one. `None` if they end too early.
pub(crate) fn copy_across<P>(
    parts: impl Iterator<Item = (usize, P)>,
    mut skip: usize,
    mut to: &mut [u8],
    copy: impl Fn(P, usize, &mut [u8]) -> Result<(), OutOfRange>,
) -> Option<()> {
    for (len, part) in parts {
        if to.is_empty() {
            break;
        }
        if skip >= len {
            skip -= len;
            continue;
        }
        let (now, later) = to.split_at_mut(to.len().min(len - skip));
        copy(part, skip, now).ok()?;
        (skip, to) = (0, later);
    }
    to.is_empty().then_some(())
}
