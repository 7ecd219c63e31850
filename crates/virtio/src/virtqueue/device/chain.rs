//! Chains of descriptors: the copy of a descriptor while a chain is read, and the heads of chains
//! that were popped.
//!
//! A descriptor is copied before it is checked, because the driver can change it at any time. A
//! head can be used once, because a chain is completed once.

use super::super::Desc;

/// A descriptor of a chain, as a private copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChainDescriptor<A> {
    /// Flags other than those of [`Desc`] are cleared.
    pub(super) desc: Desc,
    /// The descriptor's number in the ring, for messages.
    pub(super) index: u16,
    /// Where the chain begins.
    pub(super) at: A,
    /// The driver's id of the chain in this descriptor. In a packed ring, the id in the last
    /// descriptor counts.
    pub(super) id: u16,
    /// Descriptors of the chain so far, as in [`Head`].
    pub(super) span: u16,
}

#[cfg(all(test, loom))]
impl<A> ChainDescriptor<A> {
    /// The address of its buffer.
    pub(crate) fn addr(&self) -> u64 {
        self.desc.addr
    }
}

/// A chain that was popped. [`DeviceQueue::complete`] or [`DeviceQueue::add_used_read`] adds it to
/// the used ring. If a head is dropped, its chain stays available.
#[derive(Debug)]
#[must_use = "the chain stays the queue's next one until its head is given back"]
pub(crate) struct Head<A> {
    /// The chain's position. Chains are completed in the order of their positions.
    pub(super) at: A,
    /// The driver's id of the chain.
    pub(super) id: u16,
    /// By how much the chain moves the queue's position: its descriptors in a packed ring, 1 in a
    /// split ring.
    pub(super) span: u16,
    pub(super) bytes: u32,
}

impl<A> Head<A> {
    /// Bytes in the chain's buffers.
    #[inline(always)]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// The driver's id of the chain.
    pub(crate) fn id(&self) -> u16 {
        self.id
    }
}

/// The chains that were popped for one frame. Only a frame of several chains allocates.
#[derive(Debug)]
pub(crate) struct Heads<A> {
    first: Head<A>,
    more: Vec<Head<A>>,
    bytes: usize,
}

impl<A> Heads<A> {
    /// One chain.
    #[inline]
    pub(crate) fn new(first: Head<A>) -> Self {
        Self { bytes: first.bytes(), first, more: Vec::new() }
    }

    /// Adds the chain that follows.
    pub(crate) fn push(&mut self, head: Head<A>) {
        self.bytes += head.bytes();
        self.more.push(head);
    }

    /// The chains, in their order.
    #[inline]
    pub(super) fn into_iter(self) -> impl Iterator<Item = Head<A>> {
        std::iter::once(self.first).chain(self.more)
    }

    /// Bytes in the buffers of all chains.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Chains.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        1 + self.more.len()
    }

    /// How many of the chains have the first `bytes` bytes.
    #[inline]
    pub(crate) fn with_bytes(&self, bytes: usize) -> u16 {
        let (mut chains, mut held) = (1, self.first.bytes());
        for head in &self.more {
            if held >= bytes {
                break;
            }
            (held, chains) = (held + head.bytes(), chains + 1);
        }
        chains
    }
}
