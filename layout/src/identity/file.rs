//! Parts of identities as people and programs write them down in JSON and TOML: fingerprints, salts, extras.

use super::TenantSalt;
use crate::ids::Fingerprint;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// A fingerprint as hexadecimal text.
pub(super) fn fingerprint<S: Serializer>(value: &Fingerprint, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str::<dyn fmt::Display>(value)
}

/// The same, read.
pub(super) fn read_fingerprint<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Fingerprint>, D::Error> {
    let read = String::deserialize(from)?.parse();
    read.map(Some).map_err(|error| D::Error::custom(format!("spec_fingerprint: {error}")))
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
