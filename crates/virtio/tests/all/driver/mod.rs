//! The driver, with our own device or a hostile one at the other end (`netmem_testing::driver`).

mod backlog;
mod chaos;
mod dying;
mod forward;
mod groups;
mod hostile;
mod in_process;
mod offload;
mod panics;
mod probe;
mod reconnect;
mod redirect;
mod reserve;
mod rings;
mod split;
mod split_hostile;
mod split_life;
mod split_long;
mod split_tcp;
mod steering;
mod traffic;
mod trusted;
mod tx;
mod tx_pool;
mod wait;
mod xdp;
