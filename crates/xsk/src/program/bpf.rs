//! The commands of `bpf(2)` that this crate uses, each with its part of the kernel's argument.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

mod command {
    pub(super) const MAP_CREATE: u32 = 0;
    pub(super) const MAP_UPDATE: u32 = 2;
    pub(super) const MAP_DELETE: u32 = 3;
    pub(super) const PROG_LOAD: u32 = 5;
    pub(super) const OBJ_GET: u32 = 7;
    #[cfg(test)]
    pub(super) const OBJ_PIN: u32 = 6;
    #[cfg(test)]
    pub(super) const TEST_RUN: u32 = 10;
    pub(super) const PROG_GET_FD_BY_ID: u32 = 13;
    pub(super) const OBJ_GET_INFO: u32 = 15;
    pub(super) const LINK_CREATE: u32 = 28;
    pub(super) const LINK_UPDATE: u32 = 29;
    pub(super) const LINK_DETACH: u32 = 34;
}

const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
/// The place where a program is attached: at a device, not at an entry of a map.
const ATTACH_XDP: u32 = 37;
/// The program can handle frames of several buffers.
const HAS_FRAGS: u32 = 1 << 5;
/// The program runs on the CPU, and calls functions of the driver of one device.
const DEVICE_BOUND: u32 = 1 << 6;

/// The number of bytes of a verifier's log that are kept.
const LOG: usize = 64 << 10;

fn call<T>(command: u32, argument: &mut T) -> io::Result<i32> {
    // SAFETY: each caller pairs the command with a `repr(C)` argument of integers that begins as
    // the kernel's does for it. The kernel reads and writes that many bytes there, takes fields
    // that it has and this does not to be zero, and goes to other memory only through addresses in
    // the argument, whose buffers the callers keep.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(argument), size_of::<T>()) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
}

/// Runs a command whose result is a new descriptor, which the kernel makes close-on-exec.
fn open<T>(command: u32, argument: &mut T) -> io::Result<OwnedFd> {
    let fd = call(command, argument)?;
    // SAFETY: the command has made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd() as u32
}

fn address<T: ?Sized>(of: *const T) -> u64 {
    of.cast::<u8>().addr() as u64
}

/// The name of a map or program: at most 15 bytes and a zero byte.
type Name = [u8; 16];

const NAME: Name = *b"netmem_xsk\0\0\0\0\0\0";

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: Name,
}

/// Makes a map of AF_XDP sockets with the keys 0 to `entries - 1`.
pub(super) fn create_xskmap(entries: u32) -> io::Result<OwnedFd> {
    let mut argument = MapCreate {
        map_type: MAP_TYPE_XSKMAP,
        key_size: 4,
        value_size: 4,
        max_entries: entries,
        map_name: NAME,
        ..MapCreate::default()
    };
    open(command::MAP_CREATE, &mut argument)
}

#[repr(C)]
#[derive(Default)]
struct MapElement {
    map_fd: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Stores `value` at `key` of a map of words.
pub(super) fn update(map: BorrowedFd<'_>, key: u32, value: u32) -> io::Result<()> {
    let (key, value) = (address(&raw const key), address(&raw const value));
    call(command::MAP_UPDATE, &mut MapElement { map_fd: raw(map), key, value, ..MapElement::default() }).map(drop)
}

/// Removes the entry at `key`.
pub(super) fn delete(map: BorrowedFd<'_>, key: u32) -> io::Result<()> {
    let key = address(&raw const key);
    call(command::MAP_DELETE, &mut MapElement { map_fd: raw(map), key, ..MapElement::default() }).map(drop)
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: Name,
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// The reason why a program was not loaded.
#[derive(Debug)]
pub(super) struct NotLoaded {
    pub(super) source: io::Error,
    /// The verifier's log. It is empty if the verifier has not seen the program.
    pub(super) log: String,
}

/// Loads an XDP program. With `bound_to`, it can call the metadata functions of the driver of this
/// interface, and be attached there only.
pub(super) fn load(code: &[u64], frags: bool, bound_to: Option<u32>) -> Result<OwnedFd, NotLoaded> {
    // The verifier lets a program call a function of the kernel only if the program's licence is
    // compatible with the GPL, and compares the string with a list, in which "MIT" alone is not.
    // The program is these few instructions of ours, under our MIT licence, so it may be offered
    // under both. Nothing else of the crate is concerned: the string is that of the loaded program.
    let license = if bound_to.is_some() { c"Dual MIT/GPL" } else { c"MIT" };
    let attempt = |log: &mut [u8]| {
        let mut argument = ProgLoad {
            prog_type: PROG_TYPE_XDP,
            insn_cnt: code.len() as u32,
            insns: address(code.as_ptr()),
            license: address(license.as_ptr()),
            log_level: u32::from(!log.is_empty()),
            log_size: log.len() as u32,
            log_buf: if log.is_empty() { 0 } else { address(log.as_ptr()) },
            prog_flags: if frags { HAS_FRAGS } else { 0 } | if bound_to.is_some() { DEVICE_BOUND } else { 0 },
            prog_name: NAME,
            prog_ifindex: bound_to.unwrap_or(0),
            expected_attach_type: ATTACH_XDP,
            ..ProgLoad::default()
        };
        // A signal can interrupt the verifier, and the command is then repeated.
        loop {
            match open(command::PROG_LOAD, &mut argument) {
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
                other => return other,
            }
        }
    };
    let source = match attempt(&mut []) {
        Ok(program) => return Ok(program),
        Err(source) => source,
    };
    // Load the program once more, with a buffer for the verifier's log.
    let mut log = vec![0; LOG];
    let _ = attempt(&mut log);
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    Err(NotLoaded { source, log: String::from_utf8_lossy(&log[..end]).trim_end().to_owned() })
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// Attaches an XDP program to an interface until the last descriptor of the link is closed. `flags`
/// are the bits of `XDP_FLAGS_*` for the mode.
pub(super) fn attach(program: BorrowedFd<'_>, ifindex: u32, flags: u32) -> io::Result<OwnedFd> {
    let mut argument = LinkCreate { prog_fd: raw(program), target_ifindex: ifindex, attach_type: ATTACH_XDP, flags };
    open(command::LINK_CREATE, &mut argument)
}

#[repr(C)]
#[derive(Default)]
struct LinkUpdate {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

/// Replaces the program of a link, between two frames.
pub(super) fn replace(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut argument = LinkUpdate { link_fd: raw(link), new_prog_fd: raw(program), ..LinkUpdate::default() };
    call(command::LINK_UPDATE, &mut argument).map(drop)
}

/// Detaches the program of a link from its interface, even if other processes have descriptors of
/// the link.
pub(super) fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    call(command::LINK_DETACH, &mut raw(link)).map(drop)
}

#[repr(C)]
#[derive(Default)]
struct Object {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

fn path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Opens the object that is pinned at a path of a BPF file system.
pub(super) fn pinned(at: &Path) -> io::Result<OwnedFd> {
    let at = path(at)?;
    open(command::OBJ_GET, &mut Object { pathname: address(at.as_ptr()), ..Object::default() })
}

#[repr(C)]
#[derive(Default)]
struct GetInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// Reads the kernel's information about an object, as many bytes as `T` has. If the kernel has
/// fewer, the rest is not changed.
fn info<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let (info, info_len) = (address(std::ptr::from_mut(info)), size_of::<T>() as u32);
    call(command::OBJ_GET_INFO, &mut GetInfo { bpf_fd: raw(fd), info_len, info }).map(drop)
}

/// The first fields of the kernel's information about a map.
#[repr(C)]
#[derive(Default)]
pub(super) struct MapInfo {
    pub(super) map_type: u32,
    pub(super) id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

impl MapInfo {
    /// The number of entries of a map of AF_XDP sockets. `None` if it is another kind of map, or
    /// another object: of those, the sizes are other fields.
    pub(super) fn xskmap_entries(&self) -> Option<u32> {
        let is_xskmap = self.map_type == MAP_TYPE_XSKMAP && self.key_size == 4 && self.value_size == 4;
        is_xskmap.then_some(self.max_entries)
    }
}

/// The kernel's information about a map. `None` if the object is no map.
pub(super) fn map_info(map: BorrowedFd<'_>) -> io::Result<Option<MapInfo>> {
    let mut found = MapInfo::default();
    match info(map, &mut found) {
        // The object has no information of this kind, or is no object of BPF.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL)) => Ok(None),
        Err(e) => Err(e),
        // A program or a link has other fields at these places. The name of the descriptor tells
        // them apart; without /proc, only `xskmap_entries` checks the fields.
        Ok(()) => Ok(is_map(map).then_some(found)),
    }
}

/// Whether a descriptor of BPF is that of a map. True if it is unknown, because there is no /proc.
fn is_map(fd: BorrowedFd<'_>) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.map_or(true, |link| link.as_os_str() == "anon_inode:bpf-map")
}

/// The first fields of the kernel's information about a program. Lengths and addresses of buffers
/// stay zero, so that the kernel fills no buffer.
#[repr(C)]
#[derive(Default)]
struct ProgInfo {
    prog_type: u32,
    id: u32,
    tag: [u8; 8],
    jited_prog_len: u32,
    xlated_prog_len: u32,
    jited_prog_insns: u64,
    xlated_prog_insns: u64,
    load_time: u64,
    created_by_uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
    name: Name,
}

/// The name of the program with this number. `None` if it has no name, or this process may not read
/// it.
pub(super) fn program_name(id: u32) -> Option<String> {
    let program = open(command::PROG_GET_FD_BY_ID, &mut [id, 0, 0]).ok()?;
    let mut found = ProgInfo::default();
    info(program.as_fd(), &mut found).ok()?;
    let name = found.name.split(|byte| *byte == 0).next()?;
    (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}

/// The numbers of the maps that the program with this number uses. `None` if this process may not
/// read them.
pub(super) fn program_maps(id: u32) -> Option<Vec<u32>> {
    let program = open(command::PROG_GET_FD_BY_ID, &mut [id, 0, 0]).ok()?;
    // No program uses more (MAX_USED_MAPS).
    let mut maps = vec![0_u32; 64];
    let mut found = ProgInfo { nr_map_ids: 64, map_ids: address(maps.as_mut_ptr()), ..ProgInfo::default() };
    info(program.as_fd(), &mut found).ok()?;
    maps.truncate(found.nr_map_ids as usize);
    Some(maps)
}

/// The number of a program.
#[cfg(test)]
pub(super) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut found = ProgInfo::default();
    info(program, &mut found)?;
    Ok(found.id)
}

/// The kernel's information about a link of an XDP program.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    link_type: u32,
    id: u32,
    prog_id: u32,
    _pad: u32,
    ifindex: u32,
    _union: [u32; 7],
}

/// The interface to which the link's program is attached. `None` if the interface is gone.
pub(super) fn attached_to(link: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut found = LinkInfo::default();
    info(link, &mut found)?;
    Ok((found.ifindex != 0).then_some(found.ifindex))
}

#[cfg(test)]
pub(super) fn pin(fd: BorrowedFd<'_>, at: &Path) -> io::Result<()> {
    let at = path(at)?;
    call(command::OBJ_PIN, &mut Object { pathname: address(at.as_ptr()), bpf_fd: raw(fd), file_flags: 0 }).map(drop)
}

/// An XDP program has the number of its type at the place of the map's type, and its tag at that of
/// the sizes.
#[cfg(test)]
#[test]
fn a_map_of_sockets_has_keys_and_values_of_four_bytes() {
    let map = |key_size, value_size| {
        let map = MapInfo { map_type: MAP_TYPE_XSKMAP, key_size, value_size, max_entries: 2, ..MapInfo::default() };
        map.xskmap_entries()
    };
    assert_eq!([map(4, 4), map(8, 4), map(4, 8)], [Some(2), None, None]);
}

#[cfg(test)]
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

/// Runs an XDP program over `frame`, and returns its result.
#[cfg(test)]
pub(super) fn test_run(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<u32> {
    test_output(program, frame).map(|(result, _)| result)
}

/// Runs an XDP program over `frame`, and returns its result and the frame behind its metadata.
#[cfg(test)]
pub(super) fn test_output(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<(u32, Vec<u8>)> {
    let mut output = vec![0_u8; frame.len() + 256];
    let mut argument = TestRun {
        prog_fd: raw(program),
        data_size_in: frame.len() as u32,
        data_in: address(frame.as_ptr()),
        data_size_out: output.len() as u32,
        data_out: address(output.as_mut_ptr()),
        repeat: 1,
        ..TestRun::default()
    };
    call(command::TEST_RUN, &mut argument)?;
    output.truncate(argument.data_size_out as usize);
    Ok((argument.retval, output))
}
