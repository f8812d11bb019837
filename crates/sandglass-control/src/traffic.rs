//! What opens the ports of a sandbox whose traffic is not public.
//!
//! A sandbox has one token, as E2B's clients know it, which opens all its ports. Whoever has it can give away less: a
//! token for one port, which is derived from it, so that nothing more has to be kept.

use std::fmt;
use std::num::NonZeroU16;

use data_encoding::HEXLOWER;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

/// What is signed for a port, before its number. Another way to derive would have another number.
const PORT: &[u8] = b"sandglass traffic token 1 port ";

/// The token of a sandbox.
#[derive(Clone, PartialEq, Eq)]
pub struct TrafficToken(String);

impl fmt::Debug for TrafficToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TrafficToken")
    }
}

impl TrafficToken {
    /// The token of a row.
    #[must_use]
    pub const fn new(token: String) -> Self {
        Self(token)
    }

    /// The token that opens one port and no other.
    #[must_use]
    pub fn for_port(&self, port: NonZeroU16) -> String {
        // A key of any length is right.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.0.as_bytes()) else { return String::new() };
        mac.update(PORT);
        mac.update(port.to_string().as_bytes());
        HEXLOWER.encode(&mac.finalize().into_bytes())
    }

    /// Whether what a client sent opens a port. The time that this takes says nothing about the token.
    #[must_use]
    pub fn opens(&self, port: NonZeroU16, sent: &[u8]) -> bool {
        let whole = self.0.as_bytes().ct_eq(sent);
        let one = self.for_port(port);
        !sent.is_empty() && (whole | one.as_bytes().ct_eq(sent)).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_opens_all_ports_and_one_for_a_port_only_that() {
        let token = TrafficToken::new("secret".into());
        let port = |number: u16| NonZeroU16::new(number).unwrap();
        let eighty = token.for_port(port(80));
        assert_eq!(eighty.len(), 64);
        for number in [1, 80, 8080, 65535] {
            assert!(token.opens(port(number), b"secret"));
            assert_eq!(token.opens(port(number), eighty.as_bytes()), number == 80, "{number}");
        }
        for wrong in ["", "secre", "secrets", "Secret", &eighty[1..], &eighty.to_uppercase()] {
            assert!(!token.opens(port(80), wrong.as_bytes()), "{wrong}");
        }
        assert!(!TrafficToken::new("other".into()).opens(port(80), eighty.as_bytes()));
        assert!(!format!("{token:?}").contains("secret"));
    }
}
