//! Addresses with a port.

use crate::status::{Failure, netmem_status, status};
use std::ffi::{CStr, c_char};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ptr::NonNull;

/// An IP address and a port.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_endpoint {
    /// The bytes of the address: 4, 16, or 0: no address, which means each address of the stack
    pub address_length: u8,
    /// Zero.
    pub reserved: u8,
    /// The port, in the CPU's byte order; 0: one that is free
    pub port: u16,
    /// The address, in network byte order
    pub address: [u8; 16],
}

impl netmem_endpoint {
    pub(crate) fn addr(&self) -> Result<SocketAddr, Failure> {
        if self.reserved != 0 {
            return Err(Failure::Argument("netmem_endpoint.reserved is not zero".into()));
        }
        let address: IpAddr = match self.address_length {
            0 => Ipv6Addr::UNSPECIFIED.into(),
            4 => self.address.first_chunk::<4>().map_or(Ipv4Addr::UNSPECIFIED, |&bytes| bytes.into()).into(),
            16 => self.address.into(),
            other => return Err(Failure::Argument(format!("an address of {other} bytes in a netmem_endpoint"))),
        };
        Ok(SocketAddr::new(address, self.port))
    }

    /// # Safety
    ///
    /// Null, or an endpoint.
    pub(crate) unsafe fn read(from: *const Self, name: &'static str) -> Result<SocketAddr, Failure> {
        // SAFETY: as the caller promises.
        unsafe { from.as_ref() }.ok_or_else(|| Failure::null(name))?.addr()
    }
}

impl From<SocketAddr> for netmem_endpoint {
    fn from(from: SocketAddr) -> Self {
        let mut address = [0; 16];
        let address_length = match from.ip() {
            IpAddr::V4(ip) => {
                address[..4].copy_from_slice(&ip.octets());
                4
            }
            IpAddr::V6(ip) => {
                address = ip.octets();
                16
            }
        };
        Self { address_length, reserved: 0, port: from.port(), address }
    }
}

/// Reads an endpoint from a text, such as `192.0.2.2:80`, `[2001:db8::2]:80`, or `[::]:80`.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_endpoint_parse(text: *const c_char, endpoint: *mut netmem_endpoint) -> netmem_status {
    status(|| {
        let out = NonNull::new(endpoint).ok_or_else(|| Failure::null("endpoint"))?;
        let text = NonNull::new(text.cast_mut()).ok_or_else(|| Failure::null("text"))?;
        // SAFETY: the caller has a string there.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
        let parsed: SocketAddr = text.parse().map_err(|_| {
            Failure::Argument(format!("`{text}` is not an address and a port, such as 192.0.2.2:80 or [fd00::2]:80"))
        })?;
        // SAFETY: the caller has room for an endpoint there.
        unsafe { out.write(parsed.into()) };
        Ok(())
    })
}
