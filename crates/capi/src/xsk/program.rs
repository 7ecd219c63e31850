//! The XDP program, which redirects frames of an interface to its receive queues.

use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::owned;
use crate::status::{Failure, netmem_status, status};
use crate::xsk::rx::netmem_xsk_rx;
use netmem_xsk::{AttachError, AttachMode, Filter, Interface, Program, ProgramOptions, Rule};
use std::ffi::{CStr, OsStr, c_char};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

/// An XDP program on an interface.
#[derive(Debug)]
pub struct netmem_xdp_program(());

impl Kind for netmem_xdp_program {
    type Value = Program;
    const NAME: &'static str = "netmem_xdp_program";
    const NUMBER: u64 = 0x6e65_746d_656d_0006;
}

/// In netmem_xdp_options.mode: the kernel runs the program after it has made a socket buffer. Works
/// on every interface.
pub const NETMEM_XDP_GENERIC: u8 = 1;
/// In netmem_xdp_options.mode: the driver runs the program.
pub const NETMEM_XDP_DRIVER: u8 = 2;

/// A kind of frames: those in which each field that is not zero matches. Behind up to two VLAN
/// tags. Fragments of IP packets have no port.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_xdp_rule {
    /// The transport protocol's number: 6 for TCP, 17 for UDP; 0: any
    pub protocol: u8,
    /// The bytes of the destination address: 4, 16, or 0: any. A rule with only an address also
    /// matches ARP requests and neighbour solicitations for it.
    pub address_length: u8,
    /// The destination port, in the CPU's byte order; 0: any
    pub port: u16,
    /// The destination address, in network byte order
    pub address: [u8; 16],
}

impl netmem_xdp_rule {
    fn rule(&self) -> Result<Rule, Failure> {
        let address: Option<IpAddr> = match self.address_length {
            0 => None,
            4 => self.address.first_chunk::<4>().map(|&bytes| bytes.into()),
            16 => Some(self.address.into()),
            other => return Err(Failure::Argument(format!("an address of {other} bytes in a netmem_xdp_rule"))),
        };
        let protocol = (self.protocol > 0).then_some(self.protocol);
        Ok(Rule { protocol, port: (self.port > 0).then_some(self.port), address })
    }
}

/// Which program is attached. Set `size` to sizeof(netmem_xdp_options), and the rest to zero where
/// the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_xdp_options {
    /// sizeof(netmem_xdp_options)
    pub size: usize,
    /// The frames that are redirected; other frames go to the kernel. Null: all are redirected.
    pub rules: *const netmem_xdp_rule,
    /// How many rules: 1 to 64, and 0 if `rules` is null.
    pub rule_count: usize,
    /// The path of a program of the caller's own, which is pinned; null: this library's program.
    pub pinned_program: *const c_char,
    /// The path of the map of sockets to which that program redirects, which is pinned, too.
    /// Without `pinned_program`: of a program that the caller has attached to the interface, so
    /// that `mode` is not used.
    pub pinned_map: *const c_char,
    /// NETMEM_XDP_GENERIC, NETMEM_XDP_DRIVER, or 0: driver mode if the driver has it.
    pub mode: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

// SAFETY: repr(C), `size` is first, integers and pointers.
unsafe impl Versioned for netmem_xdp_options {
    const NAME: &'static str = "netmem_xdp_options";
    const LEAST: usize = 48;
}

/// # Safety
///
/// Null, or a string that ends with a zero byte.
unsafe fn string<'a>(from: *const c_char) -> Option<&'a CStr> {
    // SAFETY: as the caller promises.
    (!from.is_null()).then(|| unsafe { CStr::from_ptr(from) })
}

/// The index of an interface of this thread's network namespace.
///
/// # Safety
///
/// Null, or a string that ends with a zero byte.
pub(crate) unsafe fn ifindex(name: *const c_char) -> Result<u32, Failure> {
    // SAFETY: as the caller promises.
    let name = unsafe { string(name) }.ok_or_else(|| Failure::null("interface"))?.to_string_lossy();
    Ok(Interface::by_name(&name).map_err(|_| AttachError::NoInterface(name.into_owned()))?.index)
}

fn filter(rules: &[netmem_xdp_rule]) -> Result<Filter, Failure> {
    let rules = rules.iter().map(netmem_xdp_rule::rule).collect::<Result<Vec<_>, _>>()?;
    Filter::new(rules).map_err(|error| Failure::Argument(error.to_string()))
}

/// Attaches a program to an interface of this thread's network namespace. It is detached when the
/// handle is closed, or the process ends. Frames of queues that no netmem_xsk_rx was put into go to
/// the kernel.
///
/// With `pinned_map` alone nothing is attached: the handle puts queues into the map of a program
/// that is attached to the interface, or will be. It is an error if a program on another interface
/// uses the map, and none on this one; that is not found without CAP_SYS_ADMIN.
///
/// Needs CAP_BPF and CAP_NET_ADMIN; with rules also CAP_PERFMON.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_ARGUMENT (rules, mode, pinned
/// objects, a map of another interface), NETMEM_ERR_NOT_FOUND, NETMEM_ERR_PRIVILEGE,
/// NETMEM_ERR_BUSY (another program is attached), NETMEM_ERR_UNSUPPORTED, NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xdp_program_attach(
    interface: *const c_char,
    options: *const netmem_xdp_options,
    program: *mut *mut netmem_xdp_program,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(program).ok_or_else(|| Failure::null("program"))?;
        // SAFETY: as the header says.
        let given = unsafe { options::read(options) }?;
        if given.reserved != [0; 7] {
            return Err(Failure::Argument("netmem_xdp_options.reserved is not zero".into()));
        }
        let mode = match given.mode {
            0 => None,
            NETMEM_XDP_GENERIC => Some(AttachMode::Generic),
            NETMEM_XDP_DRIVER => Some(AttachMode::Driver),
            other => return Err(Failure::Argument(format!("netmem_xdp_options.mode is {other}"))),
        };
        let rules = match NonNull::new(given.rules.cast_mut()) {
            Some(_) if given.rule_count == 0 => {
                return Err(Failure::Argument(
                    "netmem_xdp_options.rules with a rule_count of 0; without rules, all frames are redirected".into(),
                ));
            }
            // SAFETY: the caller has so many rules there.
            Some(rules) => unsafe { std::slice::from_raw_parts(rules.as_ptr(), given.rule_count) },
            None if given.rule_count == 0 => &[],
            None => return Err(Failure::null("netmem_xdp_options.rules")),
        };
        let path = |path: &'static CStr| Path::new(OsStr::from_bytes(path.to_bytes()));
        // SAFETY: as the header says.
        let (own, map) = unsafe { (string(given.pinned_program).map(path), string(given.pinned_map).map(path)) };
        // SAFETY: as the header says.
        let ifindex = unsafe { ifindex(interface) }?;
        let made = match (own, map) {
            (None, None) => {
                Program::attach(ifindex, &ProgramOptions { mode, filter: filter(rules)?, ..ProgramOptions::default() })?
            }
            _ if !rules.is_empty() => return Err(Failure::Argument("rules for a program of the caller's own".into())),
            (Some(program), Some(map)) => Program::attach_pinned(ifindex, mode, program, map)?,
            (None, Some(map)) => {
                let made = Program::pinned_map(map)?;
                made.check_interface(ifindex)?;
                made
            }
            (Some(_), None) => return Err(Failure::null("netmem_xdp_options.pinned_map")),
        };
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(handle::create(made)) };
        Ok(())
    })
}

/// Redirects the frames of a receive queue to `rx`, which is a queue of the program's interface:
/// the kernel drops frames that are redirected to a queue of another one. The queue before it gets
/// no more frames. When `rx` is closed, its frames go to the kernel again, also if the program's
/// handle was closed before. Call it on the thread that uses `rx`, or before any thread does.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_NOT_FOUND (the
/// program's map has no such queue), NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xdp_program_insert(
    program: *const netmem_xdp_program,
    rx: *const netmem_xsk_rx,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let (program, rx) = unsafe { (handle::get(program)?, owned::peek(rx)?) };
        let socket = rx.queue.socket();
        Ok(program.insert(socket.queue(), socket.as_fd())?)
    })
}

/// Ends the handle: the program is detached, if the handle has attached it, and all frames of the
/// interface go to the kernel. A queue that was put into a map of the caller's own stays in it
/// until its `rx` is closed. The queues stay open.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xdp_program_close(program: *mut netmem_xdp_program) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { handle::close(program) }.map(drop))
}
