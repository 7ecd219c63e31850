//! How a restartable sequence, or its portable version, can end.
//!
//! Why apart from `sequence.rs`: both versions return these, and `sequence.rs` chooses between
//! them.

use crate::lane::Position;
use std::num::NonZeroUsize;

/// How a push ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The item is on this CPU's magazine.
    Done,
    /// The magazine is full.
    Full,
    /// This CPU has no magazine yet.
    Missing,
}

/// How a rotation of magazines ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rotated {
    /// An empty magazine is loaded, and the full one is to be published, at this position.
    Done(Position),
    /// The magazine in place has room.
    NotNeeded,
    /// This CPU has no magazine yet.
    Missing,
    /// The full magazine of the rotation before is not published.
    Unpublished,
    /// No empty magazine is at the next position.
    NoEmpty,
}

/// How an exchange of a full magazine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exchanged {
    /// The full magazine is the caller's.
    Old(usize),
    /// There is no magazine, it has room, or another is unpublished.
    NotNeeded,
}

/// The largest word that can be an item: the sequences answer with larger ones.
pub(crate) const LARGEST_ITEM: usize = usize::MAX - 3;

/// How a pop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Popped {
    /// The item is the caller's.
    Item(NonZeroUsize),
    /// The loaded magazine is empty, or this CPU has none.
    Edge,
}

/// How an exchange of the loaded magazine with the previous one ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Swapped {
    /// The previous one is loaded.
    Done,
    /// The loaded one is not at its edge.
    NotNeeded,
    /// Both are at their edge, or there are not two.
    Edge,
}

/// How the loading of another magazine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replaced {
    /// It is loaded. The number of the magazine that was the previous one, or 0.
    Old(u32),
    /// One of the two is not at its edge.
    NotNeeded,
}
