//! Ranges of addresses.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use super::text_form;

/// A range of addresses of one family, `10.0.0.0/8` or `2001:db8::/32`; a bare address is a range of one.
///
/// Bits behind the length are zero: `10.1.2.3/8` is refused, since whoever wrote it meant one thing or the other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr {
    address: IpAddr,
    length: u8,
}

/// A text that is not a [`Cidr`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCidr {
    /// Not an address with an optional length.
    #[error(
        "expected an address or a range such as 192.0.2.0/24 or 2001:db8::/32, in plain decimal or IPv6 form"
    )]
    Form,
    /// The length is beyond the family's.
    #[error("the length after / is at most {0}")]
    Length(u8),
    /// Bits behind the length are set.
    #[error("the address has bits behind the length; write {0}")]
    HostBits(Cidr),
    /// IPv4 written as IPv6.
    #[error("write an IPv4 range as one")]
    Mapped,
}

impl Cidr {
    /// All of IPv4: what the SDKs of E2B call `ALL_TRAFFIC`.
    pub const ALL_V4: Self = Self::v4(Ipv4Addr::UNSPECIFIED, 0);

    /// A range of IPv4 that is known to be right.
    ///
    /// # Panics
    /// The length is beyond 32, or bits behind it are set.
    #[must_use]
    pub const fn v4(address: Ipv4Addr, length: u8) -> Self {
        assert!(length <= 32 && address.to_bits() & !mask_v4(length) == 0, "not a range of IPv4");
        Self { address: IpAddr::V4(address), length }
    }

    /// A range of IPv6 that is known to be right.
    ///
    /// # Panics
    /// The length is beyond 128, or bits behind it are set.
    #[must_use]
    pub const fn v6(address: Ipv6Addr, length: u8) -> Self {
        assert!(length <= 128 && address.to_bits() & !mask_v6(length) == 0, "not a range of IPv6");
        Self { address: IpAddr::V6(address), length }
    }

    /// Parses as [`FromStr`] does, but clears bits behind the length, as Go's `net.ParseCIDR` and so E2B does.
    ///
    /// # Errors
    /// Every other error of [`FromStr`].
    pub fn parse_masked(text: &str) -> Result<Self, InvalidCidr> {
        match text.parse() {
            Err(InvalidCidr::HostBits(masked)) => Ok(masked),
            parsed => parsed,
        }
    }

    /// Whether `address` lies in the range. An IPv4 address never lies in a range of IPv6, nor the other way round.
    #[must_use]
    pub const fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(range), IpAddr::V4(address)) => {
                (range.to_bits() ^ address.to_bits()) & mask_v4(self.length) == 0
            }
            (IpAddr::V6(range), IpAddr::V6(address)) => {
                (range.to_bits() ^ address.to_bits()) & mask_v6(self.length) == 0
            }
            _ => false,
        }
    }

    /// Whether all of `other` lies in the range.
    #[must_use]
    pub const fn covers(&self, other: &Self) -> bool {
        self.length <= other.length && self.contains(other.address)
    }

    /// Whether it is a range of IPv6.
    #[must_use]
    pub const fn is_v6(&self) -> bool {
        self.address.is_ipv6()
    }
}

const fn mask_v4(length: u8) -> u32 {
    match length {
        0 => 0,
        length => u32::MAX << (32 - length),
    }
}

const fn mask_v6(length: u8) -> u128 {
    match length {
        0 => 0,
        length => u128::MAX << (128 - length),
    }
}

impl From<IpAddr> for Cidr {
    /// The range of one address.
    fn from(address: IpAddr) -> Self {
        Self { address, length: if address.is_ipv4() { 32 } else { 128 } }
    }
}

impl FromStr for Cidr {
    type Err = InvalidCidr;

    fn from_str(text: &str) -> Result<Self, InvalidCidr> {
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| InvalidCidr::Form)?;
        if address.to_canonical() != address {
            return Err(InvalidCidr::Mapped);
        }
        let whole = Self::from(address);
        let Some(length) = length else { return Ok(whole) };
        if length.is_empty()
            || !length.bytes().all(|byte| byte.is_ascii_digit())
            || (length.len() > 1 && length.starts_with('0'))
        {
            return Err(InvalidCidr::Form);
        }
        let length =
            length.parse().ok().filter(|l| *l <= whole.length).ok_or(InvalidCidr::Length(whole.length))?;
        let masked = match address {
            IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask_v4(length))),
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask_v6(length))),
        };
        let range = Self { address: masked, length };
        if masked == address { Ok(range) } else { Err(InvalidCidr::HostBits(range)) }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl fmt::Debug for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cidr({self})")
    }
}

text_form!(Cidr);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_the_plain_form_parses() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("1.2.3.4", "1.2.3.4/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:DB8::/32", "2001:db8::/32"),
            ("::/0", "::/0"),
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "/",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0.0/08",
            "10.0.0.0/33",
            "::/129",
            "10/8",
            "127.1",
            "0x7f.0.0.1",
            "010.0.0.0/8",
            "2130706433",
            "1.2.3.4/8/8",
            "[::1]",
            "fe80::1%eth0",
            " 1.2.3.4",
            "::ffff:10.0.0.0/104",
            "10.0.0.0/255.0.0.0",
            "10.0.0.0/4294967304",
        ] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }

    #[test]
    fn bits_behind_the_length_are_an_error_that_says_what_to_write() {
        let error = "10.1.2.3/8".parse::<Cidr>().unwrap_err();
        assert_eq!(error.to_string(), "the address has bits behind the length; write 10.0.0.0/8");
        assert_eq!(Cidr::parse_masked("10.1.2.3/8").unwrap(), "10.0.0.0/8".parse().unwrap());
        assert!(Cidr::parse_masked("10.1.2.3/33").is_err());
    }

    proptest! {
        #[test]
        fn a_range_holds_what_shares_its_first_bits(a: u32, b: u32, length in 0_u8..=32) {
            let (a, b) = (Ipv4Addr::from_bits(a), Ipv4Addr::from_bits(b));
            let range = Cidr::parse_masked(&format!("{a}/{length}")).unwrap();
            let shared = (a.to_bits() ^ b.to_bits()).leading_zeros() >= u32::from(length);
            prop_assert_eq!(range.contains(b.into()), shared);
            prop_assert!(range.contains(a.into()) && !range.contains(IpAddr::V6(a.to_ipv6_mapped())));
            prop_assert_eq!(range.to_string().parse::<Cidr>().unwrap(), range);
            prop_assert_eq!(range.covers(&Cidr::from(IpAddr::V4(b))), shared);
        }

        #[test]
        fn the_same_for_ipv6(a: u128, b: u128, length in 0_u8..=128) {
            let (a, b) = (Ipv6Addr::from_bits(a | 1 << 127), Ipv6Addr::from_bits(b));
            let range = Cidr::parse_masked(&format!("{a}/{length}")).unwrap();
            let shared = (a.to_bits() ^ b.to_bits()).leading_zeros() >= u32::from(length);
            prop_assert_eq!(range.contains(b.into()), shared);
            prop_assert_eq!(range.to_string().parse::<Cidr>().unwrap(), range);
        }
    }
}
