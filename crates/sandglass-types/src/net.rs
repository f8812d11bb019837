//! What a network policy speaks of: names, addresses, ports, and what is seen of a request.
//!
//! Each is parsed once, into a type that has one spelling for one meaning. What decides and what acts then hold the
//! same value, so that no reader can be told something else than another.

mod cidr;
mod host;
mod path;
mod port;

pub use cidr::{Cidr, InvalidCidr};
pub use host::{HostPattern, Hostname, InvalidHostname, MAX_HOSTNAME};
pub use path::{AmbiguousPath, InvalidMethod, MAX_PATH, Method, PathPrefix, RequestPath};
pub use port::{InvalidPort, MAX_PORT_RANGES, Port, Ports};

/// Serde through the text form, with the text form's errors.
macro_rules! text_form {
    ($name:ident) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
use text_form;
