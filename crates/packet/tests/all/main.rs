//! Tests of packets, and of offloads in software against another library's headers.
#![allow(clippy::unwrap_used)]

mod offload;
mod packet;
mod split;
