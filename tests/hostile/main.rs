//! Hosts on the network that attack `netmem serve`: by raw frames through a tap, without root's
//! help for the server. What they cost must be their own connections.
//!
//! Each test has a server, a namespace and a peer of its own. Before the attack, a connection is
//! established. After it, that connection goes on with each byte; the server answers a signal,
//! exits with 0, and reports that all pages came back.
//!
//! `NETMEM` is the command (see `netmem_testing::tree`). `NETMEM_HOSTILE_FRAMES` is the number of
//! mutated frames, `NETMEM_HOSTILE_SEED` their seed. The ratios, which are figures and no promises
//! of a test, are those of the example `ratios`.
#![allow(clippy::unwrap_used, missing_docs)]

mod errors;
mod generator;
mod handles;
mod mutations;
mod neighbors;
mod shares;

use generator::namespace::in_namespace;
use generator::peer::Peer;
use generator::server::{Report, Service};
use generator::witness::Witness;
use netmem_testing::tree;
use std::path::PathBuf;
use std::sync::OnceLock;

fn netmem() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(tree::netmem)
}

/// Attacks a server. `None`, and the reason is reported, if something is missing here.
#[track_caller]
fn attack<T: Send>(
    service: Service,
    args: &[&str],
    attack: impl FnOnce(&mut Peer, &mut Witness) -> T + Send,
) -> Option<(T, Report)> {
    in_namespace(|| {
        let mut peer = Peer::start(netmem(), service, args);
        let mut witness = Witness::open(&mut peer);
        let value = attack(&mut peer, &mut witness);
        witness.check(&mut peer);
        (value, peer.end())
    })
}
