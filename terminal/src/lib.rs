//! What the commands of `kvarts` have in common: how they fail, and how they print tables.

mod failure;
mod table;

pub use failure::{Failure, Refusal};
pub use table::{Align, Table};
