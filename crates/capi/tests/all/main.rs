//! The header and the library as C and C++ use them: built by two compilers, with their warnings as
//! errors, and run, also under the address and undefined-behaviour sanitizers and valgrind.

mod build;
mod device_memory;
mod echo;
mod http;
mod package;
mod programs;
mod queues;
mod streams;
mod virtio;
