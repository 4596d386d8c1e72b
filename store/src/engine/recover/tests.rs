//! A shard is written, left as a crash leaves it, damaged or not, and recovered by a log that knows nothing.

mod damage;
pub(in crate::engine) mod harness;
mod order;
mod whole;
