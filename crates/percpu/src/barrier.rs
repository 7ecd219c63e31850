//! The barrier after which no sequence is left that saw a gate open: membarrier, or the portable
//! version's locks.

use crate::decision::mode;
use crate::error::BarrierError;
use crate::mode::Mode;
use crate::{membarrier, portable};

/// Restarts every sequence that is running in this process. The caller then sees what the sequences
/// that had ended have written.
pub(crate) fn barrier() -> Result<(), BarrierError> {
    if let Mode::Portable(_) = mode() {
        portable::barrier();
        return Ok(());
    }
    membarrier::restart_sequences().map_err(BarrierError)
}
