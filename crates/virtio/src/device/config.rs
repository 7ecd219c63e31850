//! The device's configuration space ([`crate::net::config`]).
//!
//! Most of it follows from the device's options. The link status and the request to announce change
//! while the device runs. vhost-user has a message by which a back end reports such a change. No
//! front end for network devices accepts it, so the device does not send it. A driver sees a change
//! when it reads the configuration space again.

use super::options::Options;
use crate::net::config::NetConfig;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[derive(Debug)]
pub(super) struct Config {
    fixed: NetConfig,
    link_up: AtomicBool,
    announce: AtomicBool,
}

impl Config {
    pub(super) fn new(options: &Options) -> Self {
        let Options { mac, mtu, speed, .. } = *options;
        let (max_pairs, full_duplex) = (u16::try_from(options.max_pairs).ok(), speed.map(|_| true));
        let fixed = NetConfig { mac, max_pairs, mtu, speed, full_duplex, ..NetConfig::default() };
        Self { fixed, link_up: AtomicBool::new(true), announce: AtomicBool::new(false) }
    }

    /// `len` bytes from `offset`. A field that the device does not have is zero; the speed is
    /// "unknown" then.
    pub(super) fn read(&self, offset: u32, len: usize) -> Vec<u8> {
        let (link_up, announce) = (self.link_up.load(Relaxed), self.announce.load(Relaxed));
        let space = NetConfig { link_up, announce, ..self.fixed }.bytes();
        let byte = |n: usize| space.get((offset as usize).saturating_add(n)).copied().unwrap_or(0);
        (0..len).map(byte).collect()
    }

    pub(super) fn set_link(&self, up: bool) {
        self.link_up.store(up, Relaxed);
    }

    /// Asks the driver to announce itself.
    pub(super) fn ask_to_announce(&self) {
        self.announce.store(true, Relaxed);
    }

    /// Records that the driver has announced itself.
    pub(super) fn announced(&self) {
        self.announce.store(false, Relaxed);
    }
}
