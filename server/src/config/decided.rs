//! Values as they were set, and what was decided where nothing was.

use std::fmt;

use super::complaint::Complaint;
use super::{Setting, size};

/// Where what was decided comes from.
pub(super) struct Decided(pub(super) Vec<Setting>);

impl Decided {
    /// What a setting is: what was set, else the default, which is noted.
    pub(super) fn or(
        &mut self,
        name: &'static str,
        set: Option<&String>,
        default: impl fmt::Display,
    ) -> String {
        if let Some(set) = set {
            return set.clone();
        }
        let value = default.to_string();
        self.0.push(Setting { name, value: value.clone(), from: "default" });
        value
    }
}

pub(super) fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, Complaint> {
    text.trim()
        .parse()
        .map_err(|_| Complaint::new(name, &format!("{text:?} is not a whole number in the allowed range")))
}

pub(super) fn sized(name: &str, text: &str) -> Result<u64, Complaint> {
    size::parse(text).map_err(|complaint| Complaint::new(name, complaint.what()))
}
