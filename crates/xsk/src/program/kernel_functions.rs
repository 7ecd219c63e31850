//! The numbers of functions in the kernel's own BTF, by which a program calls them.

use super::metadata::NoRxMetadata;

/// Looks these functions up. The result is `None` for a function that the kernel does not have.
///
/// Reads a file of several megabytes of `/sys`.
#[cfg(feature = "metadata")]
pub(super) fn find<const N: usize>(names: [&str; N]) -> Result<[Option<u32>; N], NoRxMetadata> {
    use aya_obj::btf::{Btf, BtfError, BtfKind};

    let btf = Btf::from_sys_fs().map_err(|error| match error {
        BtfError::FileError { error, .. } => NoRxMetadata::NoBtf(error.kind()),
        error => NoRxMetadata::Btf(error.to_string()),
    })?;
    Ok(names.map(|name| btf.id_by_type_name_kind(name, BtfKind::Func).ok()))
}

#[cfg(not(feature = "metadata"))]
pub(super) fn find<const N: usize>(_: [&str; N]) -> Result<[Option<u32>; N], NoRxMetadata> {
    Err(NoRxMetadata::Feature)
}
