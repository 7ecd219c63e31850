//! vhost-user in raw bytes, from either side. It shares no code with the crate that is tested, so
//! that both would have to be wrong alike.

pub mod back;
pub mod front;
