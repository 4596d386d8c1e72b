//! In which fields identities differ: what tells a typo from a model that is not here.

use super::Identity;
use std::fmt;

/// Differences that are told of; an identity that differs in more is another model.
const DIFFERENCES_MAX: usize = 3;
/// The most bytes of a value that are told.
const SHOWN_BYTES: usize = 64;

/// A field that differs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Its name.
    pub field: String,
    /// What the one that was asked for says.
    pub asked: String,
    /// What the other one says.
    pub there: String,
}

/// The identity that differs least from one that was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nearest {
    /// Its place among those that were compared.
    pub at: usize,
    /// In what it differs: one field at least.
    pub differences: Vec<Difference>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {} in the store but {} in the request",
            self.field,
            quoted(&self.there),
            quoted(&self.asked)
        )
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, difference) in self.differences.iter().enumerate() {
            let before = if at > 0 { ", " } else { "" };
            write!(f, "{before}{difference}")?;
        }
        Ok(())
    }
}

/// A value on one line, not too long.
fn quoted(text: &str) -> String {
    let end = (0..=SHOWN_BYTES.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    match text.get(..end) {
        Some(part) if part.len() < text.len() => format!("{part:?}..."),
        _ => format!("{text:?}"),
    }
}

impl Identity {
    /// The fields in which another identity differs; salts, which are secret, are not compared.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let mut all = Vec::new();
        let mut compare = |field: &str, asked: &str, there: &str| {
            if asked != there {
                let own = |text: &str| text.to_owned();
                all.push(Difference { field: own(field), asked: own(asked), there: own(there) });
            }
        };
        for ((field, asked, _), (_, there, _)) in self.texts().into_iter().zip(other.texts()) {
            compare(field, asked, there);
        }
        compare("block_tokens", &self.block_tokens.to_string(), &other.block_tokens.to_string());
        let fingerprint = |one: &Self| one.spec_fingerprint.to_string();
        compare("spec_fingerprint", &fingerprint(self), &fingerprint(other));
        let value = |of: &Self, name: &String| of.extras.get(name).cloned().unwrap_or_default();
        let others = other.extras.keys().filter(|name| !self.extras.contains_key(*name));
        for name in self.extras.keys().chain(others) {
            compare(&format!("extras.{name}"), &value(self, name), &value(other, name));
        }
        all
    }
}

/// The one of these identities that differs least from the one that was asked for, if it differs in a few fields only. One
/// that is equal is none.
pub fn nearest<'a>(asked: &Identity, known: impl Iterator<Item = &'a Identity>) -> Option<Nearest> {
    let near = known.enumerate().map(|(at, one)| Nearest { at, differences: asked.differences(one) });
    near.filter(|near| (1..=DIFFERENCES_MAX).contains(&near.differences.len()))
        .min_by_key(|near| near.differences.len())
}
