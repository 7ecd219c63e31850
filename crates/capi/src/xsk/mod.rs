//! AF_XDP queues: the UMEM, the XDP program, and the two queues of a socket.

pub mod grant;
pub mod open;
pub mod program;
pub mod request;
pub mod rx;
pub mod tx;
pub mod umem;
