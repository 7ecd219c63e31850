//! Callbacks of the program, whose exceptions must not unwind the frames of the library.

/// A callback that has not returned.
struct Running;

impl Drop for Running {
    /// The callback is being unwound: an exception of C++, or a panic of Rust.
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// Runs code of the program, by a pointer that is `extern "C-unwind"`: through `extern "C"`,
/// unwinding is undefined. If the code throws, the process aborts.
pub(crate) fn run(callback: impl FnOnce()) {
    let running = Running;
    callback();
    std::mem::forget(running);
}
