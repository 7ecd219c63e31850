//! What a program says of its virtio-net device.

use crate::options::Versioned;
use crate::status::Failure;
use netmem_virtio::device::Options;
use netmem_virtio::device::port::ALL_OFFLOADS;

/// What a device offers. Set `size` to sizeof(netmem_virtio_device_options), and the rest to zero
/// where the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_virtio_device_options {
    /// sizeof(netmem_virtio_device_options)
    pub size: usize,
    /// The most bytes of memory that a front end may have mapped here; 0: 16 TiB.
    pub max_memory: u64,
    /// The MAC address to offer; all zeros: none.
    pub mac: [u8; 6],
    /// The MTU to offer; 0: none.
    pub mtu: u16,
    /// Not zero: no offloads are offered, so that guests compute checksums and cut segments
    /// themselves. By default the device does both.
    pub no_offloads: u8,
    /// Not zero: memory that the front end can shorten is refused (files without F_SEAL_SHRINK).
    /// See netmem_sigbus_install.
    pub require_sealed: u8,
    /// Not zero: memory in files of any kind is accepted. Warning: if the front end serves the file
    /// system of such a file, it can block the device.
    pub any_memory_file: u8,
    /// Zero.
    pub reserved: [u8; 5],
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_virtio_device_options {
    const NAME: &'static str = "netmem_virtio_device_options";
    const LEAST: usize = 32;
}

impl netmem_virtio_device_options {
    pub(super) fn device(&self) -> Result<Options, Failure> {
        if self.reserved != [0; 5] {
            return Err(Failure::Argument("netmem_virtio_device_options.reserved is not zero".into()));
        }
        if self.mtu > 0 && self.mtu < 68 {
            return Err(Failure::Argument(format!("an MTU of {}: 68 is the least", self.mtu)));
        }
        Ok(Options {
            withhold: if self.no_offloads != 0 { ALL_OFFLOADS } else { 0 },
            mac: (self.mac != [0; 6]).then_some(self.mac),
            mtu: (self.mtu > 0).then_some(self.mtu),
            require_sealed: self.require_sealed != 0,
            any_memory_file: self.any_memory_file != 0,
            max_memory: (self.max_memory > 0).then_some(self.max_memory),
            ..Options::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: netmem_virtio_device_options = netmem_virtio_device_options {
        size: size_of::<netmem_virtio_device_options>(),
        max_memory: 0,
        mac: [0; 6],
        mtu: 0,
        no_offloads: 0,
        require_sealed: 0,
        any_memory_file: 0,
        reserved: [0; 5],
    };

    #[test]
    fn zeros_are_the_defaults() {
        let (made, defaults) = (NONE.device().expect("options"), Options::default());
        assert_eq!(format!("{made:?}"), format!("{defaults:?}"));
    }

    #[test]
    fn each_option_is_the_devices() {
        let given = netmem_virtio_device_options {
            max_memory: 1 << 30,
            mac: [2, 0, 0, 0, 0, 9],
            mtu: 9000,
            no_offloads: 1,
            require_sealed: 1,
            any_memory_file: 1,
            ..NONE
        };
        let made = given.device().expect("options");
        assert_eq!((made.max_memory, made.mac, made.mtu), (Some(1 << 30), Some([2, 0, 0, 0, 0, 9]), Some(9000)));
        assert_eq!(made.withhold, ALL_OFFLOADS);
        assert!(made.require_sealed && made.any_memory_file);
    }
}
