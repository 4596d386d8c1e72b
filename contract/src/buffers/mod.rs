//! Memory that disks and streams read into and write from, and that another process may share.

pub mod aligned;
pub mod arena;
pub mod buf;
mod foreign;
pub mod region;
pub mod shared;
pub mod stream;
pub mod vectors;

pub use arena::{Arena, ArenaUse};
pub use buf::{Buf, BufMut, SharedBuf};
pub use region::Region;
