//! The end of a test that failed: packetdrill ends at once, with a message.

/// Ends packetdrill with a message, because the script cannot go on.
pub fn fail(why: &str) -> ! {
    eprintln!("netmem-packetdrill: {why}");
    // SAFETY: `_exit` has no preconditions. Other threads may hold any lock, so that nothing is to
    // be cleaned up.
    unsafe { libc::_exit(1) }
}
