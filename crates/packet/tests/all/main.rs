//! Tests of packets, and of offloads in software against another library's headers.
#![allow(clippy::unwrap_used)]

mod bulk;
mod capture;
mod group;
mod offload;
mod packet;
mod split;
