//! The limit of open descriptors: raised as far as the system allows, and checked before anything
//! starts. A process that runs out of descriptors in the middle of a handshake fails where the
//! cause does not show.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of descriptors to the hard limit, and checks that `needed` more can be
/// opened for `what`.
pub(crate) fn descriptors(needed: usize, what: &str) -> anyhow::Result<()> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // Where this fails, the limit stays as it was, and is checked as it is.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let open = std::fs::read_dir("/proc/self/fd").map_or(3, Iterator::count);
    let total = open + needed;
    anyhow::ensure!(
        total as u64 <= limit,
        "{what} needs {total} descriptors, and this process may open {limit}; raise the limit (ulimit -n {total}, or \
         LimitNOFILE= of a service)"
    );
    Ok(())
}
