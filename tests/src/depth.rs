//! How far a test goes: a part before each change, all of it each night.
//!
//! This is the one place that says so. Crates that this one is built upon have the file itself as a module (`#[path]`).
#![allow(dead_code, unreachable_pub, reason = "each crate that has this as a module uses a part of it")]

/// Whether the night's depth is asked for, as `scripts/nightly` does: `KVARTS_NIGHTLY=1`.
pub fn is_nightly() -> bool {
    std::env::var_os("KVARTS_NIGHTLY").is_some_and(|value| value == "1")
}

/// `few`, or `all` where the night's depth is asked for.
pub fn depth<T>(few: T, all: T) -> T {
    if is_nightly() { all } else { few }
}

/// Seeds of each kind: as many as `KVARTS_SEEDS` says, otherwise `few`, or `all` where the night's depth is asked for.
pub fn seeds(few: u64, all: u64) -> u64 {
    let asked = std::env::var("KVARTS_SEEDS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or_else(|| depth(few, all))
}
