//! An XDP program of a user's own, which writes metadata in front of each frame.

use crate::bpf::{XSKMAP, insn, load, map, pin};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The first four bytes of the metadata.
pub const MARK: i32 = 0x6d65_7461;

/// The user's program: makes 8 bytes of metadata, writes a mark and four bytes of the frame into
/// it, and redirects the frame to the map. A frame whose byte 14 is 0 gets no metadata.
fn program(map: &OwnedFd) -> OwnedFd {
    let code = [
        insn(0xbf, 6, 1, 0, 0),  // r6 = the context
        insn(0x61, 2, 6, 0, 0),  // r2 = data
        insn(0x61, 3, 6, 4, 0),  // r3 = the end of the data
        insn(0xbf, 4, 2, 0, 0),  // r4 = r2
        insn(0x07, 4, 0, 0, 18), // r4 += 18
        insn(0x2d, 4, 3, 13, 0), // a shorter frame: no metadata
        insn(0x61, 7, 2, 14, 0), // r7 = four bytes of the frame
        insn(0x71, 5, 2, 14, 0), // r5 = the first of them
        insn(0x15, 5, 0, 10, 0), // 0: no metadata
        insn(0xbf, 1, 6, 0, 0),  // adjust_meta(context, -8)
        insn(0xb7, 2, 0, 0, -8),
        insn(0x85, 0, 0, 0, 54),
        insn(0x61, 2, 6, 8, 0), // r2 = metadata
        insn(0x61, 3, 6, 0, 0), // r3 = data
        insn(0xbf, 4, 2, 0, 0), // r4 = r2 + 8
        insn(0x07, 4, 0, 0, 8),
        insn(0x2d, 4, 3, 2, 0),               // there is no room for it
        insn(0x62, 2, 0, 0, MARK),            // metadata[0..4] = the mark
        insn(0x63, 2, 7, 4, 0),               // metadata[4..8] = r7
        insn(0x18, 1, 1, 0, map.as_raw_fd()), // redirect_map(map, queue, pass)
        0,
        insn(0x61, 2, 6, 16, 0),
        insn(0xb7, 3, 0, 0, 2),
        insn(0x85, 0, 0, 0, 51),
        insn(0x95, 0, 0, 0, 0),
    ];
    load(&code, "")
}

/// Pins the program and its map of sockets, of one queue, in a folder of a BPF file system. Returns
/// both paths.
pub fn pin_metadata_program(folder: &Path) -> (PathBuf, PathBuf) {
    let (program_at, map_at) = (folder.join("program"), folder.join("map"));
    let map = map(XSKMAP, 1);
    pin(&map, &map_at);
    pin(&program(&map), &program_at);
    (program_at, map_at)
}
