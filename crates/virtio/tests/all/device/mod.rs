//! The device, with a front end and a driver of the tests at the other end (`netmem_testing::device`).

mod cloud_hypervisor;
mod formats;
mod hostile;
mod imported;
mod link;
mod memory;
mod migration;
mod noise;
mod ports;
mod table;
mod traffic;
mod work;
mod workers;
