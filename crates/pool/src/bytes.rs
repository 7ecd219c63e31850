//! The check that a range of bytes lies within a page or fragment.

/// An access outside of a page or fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} reach beyond the {have} bytes there are")]
pub struct OutOfRange {
    /// The first byte of the access.
    pub offset: usize,
    /// Bytes asked for.
    pub len: usize,
    /// Bytes that the page or fragment has.
    pub have: usize,
}

impl OutOfRange {
    /// Checks that `len` bytes at `offset` lie within `have`.
    ///
    /// # Errors
    ///
    /// Itself, if they do not.
    #[inline]
    pub fn check(offset: usize, len: usize, have: usize) -> Result<(), Self> {
        if offset <= have && len <= have - offset { Ok(()) } else { Err(Self { offset, len, have }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_checks_do_not_overflow() {
        assert!(OutOfRange::check(4, 4, 8).is_ok());
        assert!(OutOfRange::check(8, 0, 8).is_ok());
        assert!(OutOfRange::check(5, 4, 8).is_err());
        assert!(OutOfRange::check(usize::MAX, 2, 8).is_err());
        assert!(OutOfRange::check(2, usize::MAX, 8).is_err());
    }
}
