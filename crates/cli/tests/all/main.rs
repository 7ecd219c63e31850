//! The command from outside: what it prints, how it ends, what it leaves behind, and how it treats
//! its peers.
//!
//! The soak of hostile peers is a program of its own: it starts itself again as each of the peers,
//! and it times a flow that must not stop.
#![allow(clippy::unwrap_used, missing_docs)]

mod cli;
mod clients;
mod command;
mod device;
mod flows;
mod hosts;
mod liar;
mod link;
mod load;
mod metrics;
mod pcap;
mod reconnect;
mod restart;
mod serve;
mod serve_limits;
mod xsk;
