//! The open registry of part kinds: well-known names with their meaning, and any other name a user brings.
//!
//! A kind says what bytes are, so it is part of the fingerprint: two specs whose sizes agree but whose kinds do
//! not are different specs. Kinds are compared as text and never interpreted by the store.

use std::fmt;

/// The most bytes a kind's name may have.
pub const MAX_KIND_BYTES: usize = 64;

/// What a part's bytes are. Always a valid name: `[a-z][a-z0-9_.-]*`, at most [`MAX_KIND_BYTES`] bytes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Kind(String);

/// The registered kinds and what each means.
pub const KNOWN_KINDS: &[(&str, &str)] = &[
    ("dense_kv", "keys and values of every KV head, one entry for each token"),
    ("mla", "latent attention: one compressed key-value entry for each token, shared by all heads"),
    ("mla_index", "the key of a sparse-attention indexer, one for each token"),
    ("csa_main", "compressed sparse attention: one main entry for every few tokens"),
    ("csa_index", "the indexer's key of a compressed sparse entry"),
    ("hca", "heavily compressed attention: one entry for many tokens"),
    ("swa_window", "keys and values of the last tokens of a sliding window"),
    ("mla_window", "latents of the last tokens of a sliding window"),
    ("compressor_tail", "inputs of a compressor that do not fill an entry yet"),
    ("recurrent_state", "the state of a linear-attention or state-space layer"),
    ("conv_state", "the last inputs of a short convolution"),
    ("draft", "state of a draft or multi-token-prediction layer"),
    ("opaque", "bytes whose meaning only the engine knows"),
];

impl Kind {
    /// A kind of any valid name, registered or not; `None` if the name is not valid.
    pub fn new(name: &str) -> Option<Self> {
        let valid = name.len() <= MAX_KIND_BYTES
            && name.starts_with(|first: char| first.is_ascii_lowercase())
            && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-'));
        valid.then(|| Self(name.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What the registry says about this kind, or `None` if it is the user's own.
    pub fn meaning(&self) -> Option<&'static str> {
        KNOWN_KINDS.iter().find(|(name, _)| *name == self.0).map(|(_, meaning)| *meaning)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_registered_kind_is_a_valid_name() {
        for (name, _) in KNOWN_KINDS {
            assert!(Kind::new(name).unwrap().meaning().is_some(), "{name}");
        }
    }

    #[test]
    fn a_name_of_the_users_own_is_a_kind_and_a_malformed_one_is_not() {
        assert_eq!(Kind::new("acme.v2-state").unwrap().meaning(), None);
        for name in ["", "Mla", "1mla", "mla index", "ml\u{e4}", &"k".repeat(MAX_KIND_BYTES + 1)] {
            assert_eq!(Kind::new(name), None, "{name:?}");
        }
    }
}
