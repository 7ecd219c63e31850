//! A value on cache lines of its own.

/// Two lines, because the processor fetches the adjacent line, too.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct Line<T>(pub(crate) T);
