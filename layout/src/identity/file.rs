//! Identities in JSON and TOML, as people and programs write them down. What is read is validated, and a fault
//! is one line that says where it is.

use super::{Identity, IdentityError, MAX_IDENTITY_FILE_BYTES, TenantSalt, check_length};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

impl Identity {
    /// A valid identity from TOML, or the first fault and its line.
    pub fn from_toml(text: &str) -> Result<Self, IdentityError> {
        check_length("file", text.len(), MAX_IDENTITY_FILE_BYTES)?;
        let identity: Self = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            let line = before.map_or(0, |before| before.matches('\n').count().saturating_add(1));
            IdentityError::File { line, message: one_line(error.message()) }
        })?;
        identity.validate()?;
        Ok(identity)
    }

    /// A valid identity from JSON, or the first fault and its line.
    pub fn from_json(text: &str) -> Result<Self, IdentityError> {
        check_length("file", text.len(), MAX_IDENTITY_FILE_BYTES)?;
        let identity: Self = serde_json::from_str(text).map_err(|error| IdentityError::File {
            line: error.line(),
            message: one_line(&error.to_string()),
        })?;
        identity.validate()?;
        Ok(identity)
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A fingerprint as hexadecimal text.
pub(super) mod fingerprint {
    use super::{Deserialize, Deserializer, Serializer, fmt};
    use crate::ids::Fingerprint;
    use serde::de::Error as _;

    pub(in super::super) fn serialize<S: Serializer>(value: &Fingerprint, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str::<dyn fmt::Display>(value)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Fingerprint, D::Error> {
        String::deserialize(from)?
            .parse()
            .map_err(|error| D::Error::custom(format!("spec_fingerprint: {error}")))
    }
}

impl Serialize for TenantSalt {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        to.serialize_str(&hex)
    }
}

impl<'de> Deserialize<'de> for TenantSalt {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // The text is a secret: no message repeats it.
        let fault = || D::Error::custom("tenant_salt: expected an even number of hexadecimal digits");
        let text = String::deserialize(from)?;
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return Err(fault()) };
        let byte = |&[high, low]: &[u8; 2]| {
            let [high, low] = [high, low].map(|digit| char::from(digit).to_digit(16));
            u8::try_from(high? << 4 | low?).ok()
        };
        pairs.iter().map(byte).collect::<Option<Vec<u8>>>().map(Self).ok_or_else(fault)
    }
}

/// A map of texts in which no name occurs twice: the last one must not win in silence.
pub(super) fn extras<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    struct Extras;

    impl<'de> Visitor<'de> for Extras {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table of texts")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut extras = BTreeMap::new();
            while let Some((name, value)) = map.next_entry::<String, String>()? {
                if extras.contains_key(&name) {
                    return Err(A::Error::custom(format!("extras: {name:?} is given twice")));
                }
                extras.insert(name, value);
            }
            Ok(extras)
        }
    }

    from.deserialize_map(Extras)
}
