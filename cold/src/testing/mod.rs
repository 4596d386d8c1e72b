//! For tests: a bucket in memory, a bucket with faults, virtual time, and small blocks. One seed decides everything.

mod faulty;
mod memory;
mod virtual_time;

pub use faulty::{Conditional, Faulty, Kind, Op, Plan};
pub use memory::MemoryBucket;

pub use crate::format::samples::{BLOCK, bytes_of, key, namespace, namespace_id, run};

pub use virtual_time::{Skewed, VirtualTime};
