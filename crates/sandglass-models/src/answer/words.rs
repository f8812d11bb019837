//! What is read of an answer: what was used, and whether that was the end. All the rest is looked over and not kept.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::usage::{Counts, Word};

/// An answer that came as a whole.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object")]
pub(super) struct Whole {
    pub(super) usage: Option<Counts>,
    service_tier: Option<Word>,
}

impl Whole {
    pub(super) fn is_beyond(&self) -> bool {
        self.service_tier.is_some_and(|tier| tier.dear) || self.usage.is_some_and(|counts| counts.is_beyond())
    }
}

/// An event of any protocol.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Event {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(rename = "usage")]
    pub(super) counts: Option<Counts>,
    /// Of Messages.
    pub(super) message: Option<Inner>,
    /// Of Messages.
    delta: Option<Delta>,
    /// Of Responses.
    pub(super) response: Option<Inner>,
    /// Of Chat Completions.
    pub(super) choices: Option<Choices>,
    /// Of any.
    error: Option<IgnoredAny>,
    service_tier: Option<Word>,
}

/// What some events are about.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Inner {
    #[serde(rename = "usage")]
    pub(super) counts: Option<Counts>,
    service_tier: Option<Word>,
}

/// What has changed. Only of Messages is it an object with something that matters.
#[derive(Debug, Clone, Copy, Default)]
struct Delta {
    stops: bool,
}

/// What of an answer comes with an event of Chat Completions.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Choices {
    count: usize,
    /// Whether one of them ends with it.
    pub(super) finish: bool,
}

impl Event {
    pub(super) fn is(&self, kind: &str) -> bool {
        self.kind.as_deref() == Some(kind)
    }

    /// Whether it is the provider's last word, that it could not go on.
    pub(super) fn failed(&self) -> bool {
        self.error.is_some() || self.is("error")
    }

    /// Whether a message of Messages ends with it, and its numbers are the last ones.
    pub(super) fn says_why_it_ends(&self) -> bool {
        self.is("message_delta") && self.delta.is_some_and(|delta| delta.stops)
    }

    pub(super) fn is_beyond(&self) -> bool {
        let inner = |inner: Option<Inner>| inner.and_then(|inner| inner.service_tier);
        [self.service_tier, inner(self.message), inner(self.response)]
            .into_iter()
            .flatten()
            .any(|tier| tier.dear)
    }
}

impl Choices {
    pub(super) const fn is_empty(self) -> bool {
        self.count == 0
    }
}

impl<'de> Deserialize<'de> for Delta {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Delta;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a change")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Delta, A::Error> {
                let mut stops = false;
                while let Some(name) = access.next_key::<Name>()? {
                    let value: Option<IgnoredAny> = access.next_value()?;
                    stops |= name.is_stop_reason && value.is_some();
                }
                Ok(Delta { stops })
            }

            /// Of Responses it is a text.
            fn visit_str<E>(self, _: &str) -> Result<Delta, E> {
                Ok(Delta::default())
            }
        }

        deserializer.deserialize_any(Any)
    }
}

/// The name of a member, which may be long.
struct Name {
    is_stop_reason: bool,
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, name: &str) -> Result<Name, E> {
                Ok(Name { is_stop_reason: name == "stop_reason" })
            }
        }

        deserializer.deserialize_identifier(Text)
    }
}

impl<'de> Deserialize<'de> for Choices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Choice {
            finish_reason: Option<IgnoredAny>,
        }

        struct Each;

        impl<'de> Visitor<'de> for Each {
            type Value = Choices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Choices, A::Error> {
                let mut choices = Choices::default();
                while let Some(choice) = access.next_element::<Choice>()? {
                    choices.count += 1;
                    choices.finish |= choice.finish_reason.is_some();
                }
                Ok(choices)
            }
        }

        deserializer.deserialize_seq(Each)
    }
}
