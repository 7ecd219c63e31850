//! AF_XDP queues: the UMEM, the XDP program, and the two queues of a socket.

pub mod open;
pub mod program;
pub mod rx;
pub mod tx;
pub mod umem;

/// In the flags of a fragment: the frame goes on in the next fragment of the array.
pub const NETMEM_FRAG_MORE: u8 = 1;

/// The most fragments that a frame has.
pub const NETMEM_FRAME_FRAGS: usize = 18;

const _: () = assert!(NETMEM_FRAME_FRAGS == netmem_packet::MAX_FRAGS + 1);
