//! What a device tells about itself: the driver's side of its configuration space.

use super::{NetError, VirtioNet};
use crate::net::config::NetConfig;
use crate::net::{ctrl, feature};
use crate::vhost_user::VhostUser;
use netmem_pool::PeerMemory;

/// Features that say which fields the configuration space has, and nothing about rings and frames. A back end without them
/// can take the place of one that has them.
const FIELDS: u64 = feature::MTU | feature::MAC | feature::STATUS | feature::SPEED_DUPLEX | feature::GUEST_ANNOUNCE;

/// Those of the features with a field that are taken of this back end. `control`: whether its control queue is used.
pub(super) fn fields(backend: &VhostUser, control: bool) -> u64 {
    let read = if backend.has_config() { FIELDS } else { feature::MTU };
    let asked = if control { read } else { read & !feature::GUEST_ANNOUNCE };
    asked & backend.offered()
}

/// `features` without those that have a field.
pub(super) fn without_fields(features: u64) -> u64 {
    features & !FIELDS
}

impl<M: PeerMemory> VirtioNet<M> {
    /// What the device tells about itself now: MAC address, MTU, link status, speed. One message, for which the answer is
    /// waited for.
    ///
    /// A back end without a configuration space (`VHOST_USER_PROTOCOL_F_CONFIG`; DPDK's is one) tells nothing: all fields are
    /// `None`, and the link counts as up. The driver is not told of changes, because no back end for network devices sends
    /// the message for that. A program that is interested asks again.
    ///
    /// The program keeps to what is told: the driver does not compare the length of a sent frame with the MTU.
    ///
    /// # Errors
    ///
    /// [`NetError::Backend`]: the connection has ended.
    pub fn config(&self) -> Result<NetConfig, NetError> {
        Ok(self.link.with(|backend| backend.config(self.features.bits()))?)
    }

    /// Tells the device that the program has announced itself to the network, as [`NetConfig::announce`] asked for. Does
    /// nothing if the device cannot ask for it.
    ///
    /// # Errors
    ///
    /// [`NetError::AnnounceRefused`], [`NetError::ControlTimeout`].
    pub fn announced(&mut self) -> Result<(), NetError> {
        let Some(control) = self.control.as_mut().filter(|_| self.features.has(feature::GUEST_ANNOUNCE)) else {
            return Ok(());
        };
        match control.command(ctrl::CLASS_ANNOUNCE, ctrl::ANNOUNCE_ACK, &[])? {
            true => Ok(()),
            false => Err(NetError::AnnounceRefused),
        }
    }
}
