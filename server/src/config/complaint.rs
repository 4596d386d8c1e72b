//! What is wrong with a configuration, and where.

use std::fmt;

/// What is wrong with a configuration, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Complaint {
    place: String,
    what: String,
}

impl Complaint {
    pub(super) fn new(place: &str, what: &str) -> Self {
        Self { place: place.to_owned(), what: what.to_owned() }
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// What is wrong, without its place.
    pub fn what(&self) -> &str {
        &self.what
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "configuration: {}: {}", self.place, self.what)
    }
}

impl std::error::Error for Complaint {}
