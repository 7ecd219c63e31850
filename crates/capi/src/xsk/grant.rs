//! Grants: sockets that a helper with privileges has opened.

use crate::handle::{self, Kind};
use crate::options;
use crate::status::{Failure, netmem_status, status, value};
use netmem_xsk::Grant;
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the helper may take for each answer.
const LIMIT: Duration = Duration::from_secs(5);

/// Sockets of an interface, and the program that redirects frames to them, which a helper with
/// privileges has opened for this process.
#[derive(Debug)]
pub struct netmem_xsk_grant(());

impl Kind for netmem_xsk_grant {
    type Value = Mutex<Grant>;
    const NAME: &'static str = "netmem_xsk_grant";
    const NUMBER: u64 = 0x6e65_746d_656d_0009;
}

/// The grant of a handle.
///
/// # Safety
///
/// As for [`handle::get`].
pub(crate) unsafe fn lock<'a>(grant: *const netmem_xsk_grant) -> Result<MutexGuard<'a, Grant>, Failure> {
    // SAFETY: as the caller promises.
    Ok(unsafe { handle::get(grant) }?.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Asks the helper that listens on the path `socket` for its sockets (`netmem grant` is such a
/// helper). `interface` is the name of the interface that it must have; null: any. Needs no
/// privilege. The interface can be of another network namespace.
///
/// Then open the queues, with the grant in netmem_xsk_options, and call netmem_xsk_grant_bound. The
/// helper opens its sockets with busy polling or without: `busy_poll` in the options is only needed
/// if the helper has not set it.
///
/// Waits for the helper, for 5 s at each message.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_NOT_FOUND (no helper, or one of another interface),
/// NETMEM_ERR_PRIVILEGE (not for this user), NETMEM_ERR_BUSY (other processes have the queues),
/// NETMEM_ERR_UNSUPPORTED (a helper of another version), NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_grant_receive(
    socket: *const c_char,
    interface: *const c_char,
    grant: *mut *mut netmem_xsk_grant,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(grant).ok_or_else(|| Failure::null("grant"))?;
        if socket.is_null() {
            return Err(Failure::null("socket"));
        }
        // SAFETY: as the header says.
        let path = OsStr::from_bytes(unsafe { CStr::from_ptr(socket) }.to_bytes());
        let helper = UnixStream::connect(path).map_err(Failure::NoHelper)?;
        let made = if interface.is_null() {
            Grant::receive(helper, LIMIT)?
        } else {
            // SAFETY: as the header says.
            Grant::receive_interface(&unsafe { options::name(interface, "") }, helper, LIMIT)?
        };
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(handle::create(Mutex::new(made))) };
        Ok(())
    })
}

/// Writes the numbers of up to `n` queues for which the grant has a socket that was not used, and
/// returns how many these are, also if there is no room for them. Misuse returns 0, with a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_grant_queues(grant: *const netmem_xsk_grant, queues: *mut u32, n: usize) -> usize {
    value(|| {
        // SAFETY: as the header says.
        let grant = unsafe { lock(grant) }?;
        if queues.is_null() && n > 0 {
            return Err(Failure::null("queues"));
        }
        for (i, (queue, _)) in grant.sockets.iter().take(n).enumerate() {
            // SAFETY: the caller has room for `n`.
            unsafe { queues.add(i).write(*queue) };
        }
        Ok(grant.sockets.len())
    })
    .unwrap_or(0)
}

/// Reports to the helper that the queues are open, and waits until it has put them into the map of
/// its program: then frames arrive. The helper waits for this for a limited time, and detaches the
/// program otherwise. Call it once, when all queues are open, on any thread; later calls do
/// nothing. Sockets that were not used are closed: frames of their queues go to the kernel.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_SYSTEM (the helper has waited too long,
/// or has ended), NETMEM_ERR_BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_grant_bound(grant: *const netmem_xsk_grant) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let mut grant = unsafe { lock(grant) }?;
        // The helper puts all of them into the map. The kernel drops frames for a socket that is
        // not bound, until it is closed.
        grant.sockets.clear();
        Ok(grant.bound()?)
    })
}

/// Ends the grant: its program is detached, and all frames of the interface go to the kernel.
/// Queues that were opened with it stay open. Keep it as long as they receive.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_grant_close(grant: *mut netmem_xsk_grant) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { handle::close(grant) }.map(drop))
}
