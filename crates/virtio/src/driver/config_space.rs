//! The driver's side of the device's configuration space.

use super::error::NetError;
use super::virtio_net::VirtioNet;
use crate::net::config::NetConfig;
use crate::net::{ctrl, feature};
use crate::vhost_user::VhostUser;
use netmem_pool::PeerMemory;

/// Features that define fields of the configuration space. They change neither rings nor frames, so
/// a back end without them can replace one with them.
const FIELDS: u64 = feature::MTU | feature::MAC | feature::STATUS | feature::SPEED_DUPLEX | feature::GUEST_ANNOUNCE;

/// The features of this kind that are accepted from this back end. `control`: whether its control
/// queue is used.
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
    /// Reads the device's configuration: MAC address, MTU, link status, speed. Sends one message,
    /// and waits for the answer.
    ///
    /// If the back end has no configuration space (`VHOST_USER_PROTOCOL_F_CONFIG`; DPDK's has
    /// none), all fields are `None`, and the link counts as up. Changes are not reported, because
    /// no back end for network devices sends the message for them. A program that needs changes
    /// calls this again.
    ///
    /// The program must keep to the MTU: the driver does not compare it with the length of sent
    /// frames.
    ///
    /// # Errors
    ///
    /// [`NetError::Backend`]: the connection has ended.
    pub fn config(&self) -> Result<NetConfig, NetError> {
        Ok(self.state.with(|backend| backend.config(self.features.bits()))?)
    }

    /// Acknowledges to the device that the program has announced itself to the network, as
    /// [`NetConfig::announce`] requested. Does nothing if the device cannot request it.
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
