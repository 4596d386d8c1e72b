//! For tests: a bucket in memory, a bucket with faults, and virtual time. One seed decides everything.

mod faulty;
mod memory;
mod virtual_time;

pub use faulty::{Faulty, Kind, Op, Plan};
pub use memory::MemoryBucket;
pub use virtual_time::{Skewed, VirtualTime};
