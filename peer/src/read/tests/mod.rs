//! Reads over paths that follow a script, in virtual time.

mod faults;
mod harness;
mod speed;
mod stores;
