//! Sizes of windows that are needed before there is a receiver: the scale is announced in SYN, and
//! a cookie promises a window for which no state is kept.

/// The initial window, if the window adapts.
pub(super) const FIRST_WINDOW: u32 = 64 << 10;

/// The largest window that a header can announce.
pub(super) const LARGEST_WINDOW: u32 = (u16::MAX as u32) << 14;

/// Returns the largest window of at most `most` bytes, and the shift for it. The shift is announced
/// in SYN, when the later size of the window is not known yet.
pub(super) fn scale(most: u32) -> (u32, u8) {
    let scale = (0..14).find(|scale| most >> scale <= u32::from(u16::MAX)).unwrap_or(14);
    (most.min(u32::from(u16::MAX) << scale).max(1), scale)
}

/// The window of a SYN, which is not scaled.
pub(super) fn first_window(most: u32) -> u16 {
    u16::try_from(most.min(FIRST_WINDOW)).unwrap_or(u16::MAX)
}

/// The window of a SYN-ACK with a cookie, if windows have up to `most` bytes: ten segments. No
/// buffers are counted for it, and the connection may be made when many of them are in use.
pub(super) fn cookie_window(most: u32) -> u16 {
    u16::try_from(most).unwrap_or(u16::MAX).min(14_600)
}
