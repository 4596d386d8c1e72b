//! What commands have in common, whichever program they are of: how they fail and end, and how they print tables.

mod failure;
pub mod program;
mod table;
pub mod undo;

pub use failure::{Failure, Refusal};
pub use table::{Align, Table};
