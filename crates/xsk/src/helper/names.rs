//! The numbers of users and groups.

use super::error::HelperError;
use std::ffi::{CStr, CString};
use std::{mem, ptr};

/// The most bytes of an entry. A group with many members is long.
const LARGEST: usize = 1 << 20;

/// The number of a user, by name or number.
pub(super) fn user(user: &str) -> Result<u32, HelperError> {
    let find = |name: &CStr, buffer: &mut [libc::c_char]| {
        // SAFETY: made of integers and pointers, which may be 0.
        let mut entry: libc::passwd = unsafe { mem::zeroed() };
        let mut found = ptr::null_mut();
        // SAFETY: a string that ends, and an entry and a buffer that are there. The result is read
        // before the buffer is used again.
        let error = unsafe {
            libc::getpwnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr(), buffer.len(), &raw mut found)
        };
        (error, (!found.is_null()).then_some(entry.pw_uid))
    };
    number(user, find).ok_or_else(|| HelperError::NoUser(user.to_owned()))
}

/// The number of a group, by name or number.
pub(super) fn group(group: &str) -> Result<u32, HelperError> {
    let find = |name: &CStr, buffer: &mut [libc::c_char]| {
        // SAFETY: as above.
        let mut entry: libc::group = unsafe { mem::zeroed() };
        let mut found = ptr::null_mut();
        // SAFETY: as above.
        let error = unsafe {
            libc::getgrnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr(), buffer.len(), &raw mut found)
        };
        (error, (!found.is_null()).then_some(entry.gr_gid))
    };
    number(group, find).ok_or_else(|| HelperError::NoGroup(group.to_owned()))
}

/// A number as it is, or that of a name. The largest number is no user and no group: to the kernel
/// it means "unchanged".
fn number(text: &str, find: impl Fn(&CStr, &mut [libc::c_char]) -> (i32, Option<u32>)) -> Option<u32> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok().filter(|number| *number != u32::MAX);
    }
    let name = CString::new(text).ok()?;
    let mut buffer = vec![0; 1024];
    loop {
        match find(&name, &mut buffer) {
            (libc::ERANGE, _) if buffer.len() < LARGEST => buffer.resize(2 * buffer.len(), 0),
            (_, found) => return found,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn users_and_groups_have_numbers() {
        assert_eq!((user("root").unwrap(), group("root").unwrap()), (0, 0));
        assert_eq!((user("1001").unwrap(), group("1002").unwrap()), (1001, 1002));
        for none in ["", "no such name", "-1", "4294967295", "99999999999", "a\0b"] {
            assert!(matches!(user(none), Err(HelperError::NoUser(name)) if name == none));
            assert!(matches!(group(none), Err(HelperError::NoGroup(name)) if name == none));
        }
    }
}
