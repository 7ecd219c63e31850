//! The device, with a front end and a driver of the tests at the other end
//! (`netmem_testing::device`).

mod cloud_hypervisor;
mod direct;
mod direct_faults;
mod direct_threads;
mod formats;
mod hostile;
mod imported;
mod inflight;
mod link;
mod memory;
mod migration;
mod noise;
mod ports;
mod shared_file;
mod table;
mod traffic;
mod work;
mod workers;
