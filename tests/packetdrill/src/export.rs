//! The functions of an object: the one that packetdrill looks up, and those of the C library that
//! the preloaded object replaces. See the [crate](crate).

use crate::calls;
use crate::fail::fail;
use crate::interface::{Init, Interface};
use crate::settings::Settings;
use crate::stack::Stack;
use crate::tcp_info::{TcpInfo, UNKNOWN};
use crate::world::{Shared, WORLD, World};
use libc::{c_char, c_int, c_long, c_void, socklen_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicI64, Ordering};

/// Exports the functions of an object for packetdrill. The argument makes its stack: a function
/// from [`Settings`] to a type that implements [`Stack`]. A library of the type `cdylib` calls it
/// once.
///
/// README.md has an example.
#[macro_export]
macro_rules! export {
    ($new:expr) => {
        const _: () = {
            use $crate::exported::{Interface, c_char, c_int, c_long, c_void, socklen_t};

            #[unsafe(no_mangle)]
            unsafe extern "C" fn packetdrill_interface_init(flags: *const c_char, interface: *mut Interface) {
                let new: fn($crate::Settings) -> _ = $new;
                // SAFETY: packetdrill passes a string, and room for the structure.
                unsafe { $crate::exported::init(flags, interface, new) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn getsockopt(
                fd: c_int,
                level: c_int,
                name: c_int,
                value: *mut c_void,
                len: *mut socklen_t,
            ) -> c_int {
                // SAFETY: the caller's pointers are those of the system call.
                unsafe { $crate::exported::getsockopt(fd, level, name, value, len) }
            }

            #[unsafe(no_mangle)]
            extern "C" fn times(_: *mut c_void) -> c_long {
                $crate::exported::times()
            }

            #[unsafe(no_mangle)]
            extern "C" fn mlockall(_: c_int) -> c_int {
                0
            }

            #[unsafe(no_mangle)]
            extern "C" fn sched_setscheduler(_: c_int, _: c_int, _: *const c_void) -> c_int {
                0
            }
        };
    };
}

/// A compile-time check that the function has the type that packetdrill expects.
const _: Init = {
    unsafe extern "C" fn init(_: *const c_char, _: *mut Interface) {}
    init
};

/// Makes the stack, and fills in `interface`. `flags` is the directory of [`Settings`].
///
/// # Safety
///
/// `flags` is null or a string, and `interface` has room for the structure.
pub unsafe fn init<S: Stack + 'static>(flags: *const c_char, interface: *mut Interface, new: fn(Settings) -> S) {
    if flags.is_null() {
        fail("--so_flags=DIRECTORY says where the settings are");
    }
    // SAFETY: the caller passes a string.
    let directory = unsafe { CStr::from_ptr(flags) }.to_string_lossy();
    // The commands that the scripts run do not need the preloaded object.
    // SAFETY: packetdrill's other thread sleeps at this time, and reads no environment.
    unsafe { std::env::remove_var("LD_PRELOAD") };
    let settings = Settings::new(&*directory);
    let world = World::new(Box::new(new(settings.clone())), settings);
    if WORLD.set(Shared::new(world)).is_err() {
        fail("there is one world");
    }
    // SAFETY: the caller has room for the structure.
    unsafe { interface.write(calls::interface()) };
}

/// `TCP_INFO`, and the other options that packetdrill reads, for descriptors of this object. For
/// all other descriptors the system is called.
///
/// # Safety
///
/// As for the system call.
pub unsafe fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int {
    const TCP_CC_INFO: c_int = 26;
    let ours = WORLD.get().filter(|shared| shared.lock().sockets.contains_key(&fd));
    // SAFETY: the caller's pointers are those of the system call.
    unsafe {
        match (ours, level, name) {
            (Some(shared), libc::SOL_TCP, libc::TCP_INFO) => {
                let info = shared.call(|world| info(world, fd));
                let room = (*len as usize).min(size_of::<TcpInfo>());
                value.cast::<u8>().write_bytes(UNKNOWN, *len as usize);
                std::ptr::copy_nonoverlapping((&raw const info).cast::<u8>(), value.cast::<u8>(), room);
                0
            }
            (Some(_), libc::SOL_TCP, TCP_CC_INFO) => {
                *len = 0;
                0
            }
            (Some(_), libc::SOL_SOCKET, libc::SO_MEMINFO) => {
                value.cast::<u8>().write_bytes(UNKNOWN, *len as usize);
                0
            }
            _ => libc::syscall(libc::SYS_getsockopt, fd, level, name, value, len) as c_int,
        }
    }
}

/// The state of the connection of a descriptor.
fn info(world: &World, fd: c_int) -> TcpInfo {
    world.connection(fd).map_or(TcpInfo::UNKNOWN, |id| world.stack.info(world.now, id))
}

/// The ticks of the clock. Each call returns one more.
pub fn times() -> c_long {
    static TICKS: AtomicI64 = AtomicI64::new(1);
    TICKS.fetch_add(1, Ordering::Relaxed)
}
