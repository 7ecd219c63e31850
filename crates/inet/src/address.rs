//! An address and the length of its network's prefix as a text, such as `192.0.2.2/24`.

use crate::interface::Address;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

/// Why a text is not an [`Address`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadAddress {
    /// It has another form.
    #[error("`{0}` is not ADDR/LEN, such as 10.0.0.2/24 or fd00::2/64")]
    Form(String),
    /// The prefix is longer than the address.
    #[error("`{text}`: a prefix has at most {most} bits")]
    Prefix {
        /// The text.
        text: String,
        /// Bits of such an address.
        most: u8,
    },
    /// It is the address of a group, of all stations, of this station only, or none.
    #[error("`{0}`: the address of one station is needed")]
    Station(String),
}

/// ```
/// use netmem_inet::Address;
///
/// let own: Address = "192.0.2.2/24".parse()?;
/// assert_eq!(own.prefix_len, 24);
/// # Ok::<(), netmem_inet::BadAddress>(())
/// ```
impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(s: &str) -> Result<Self, BadAddress> {
        let wrong = || BadAddress::Form(s.to_owned());
        let (addr, len) = s.split_once('/').ok_or_else(wrong)?;
        let (addr, prefix_len): (IpAddr, u8) = (addr.parse().map_err(|_| wrong())?, len.parse().map_err(|_| wrong())?);
        let most = if addr.is_ipv4() { 32 } else { 128 };
        if prefix_len > most {
            return Err(BadAddress::Prefix { text: s.to_owned(), most });
        }
        let all = addr == IpAddr::V4(Ipv4Addr::BROADCAST);
        if addr.is_unspecified() || addr.is_multicast() || addr.is_loopback() || all {
            return Err(BadAddress::Station(s.to_owned()));
        }
        Ok(Self { addr, prefix_len })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_that_of_one_station() {
        for good in ["10.0.0.2/24", "fd00::2/64", "192.0.2.1/32", "2001:db8::1/0"] {
            assert_eq!(good.parse::<Address>().unwrap().to_string(), good);
        }
        let bad = [
            ("", "not ADDR/LEN"),
            ("10.0.0.2", "not ADDR/LEN"),
            ("a/8", "not ADDR/LEN"),
            ("10.0.0.2/-1", "not ADDR/LEN"),
            ("10.0.0.2/33", "at most 32 bits"),
            ("fd00::2/129", "at most 128 bits"),
            ("0.0.0.0/0", "one station"),
            ("224.0.0.1/4", "one station"),
            ("255.255.255.255/32", "one station"),
            ("::1/128", "one station"),
        ];
        for (bad, says) in bad {
            let error = bad.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(&format!("`{bad}`")), "{bad}: {error}");
        }
    }
}
