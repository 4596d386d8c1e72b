//! `libkvarts`: what `include/kvarts.h` promises, for engines in C and for whatever calls C.
//!
//! The header is the contract: it says of each pointer what it points to and how long it lives, and this crate relies on it. What a call gets that can
//! be checked (null, text, lengths, handles' states) is checked.

mod blocks;
mod cost;
mod gpu;
mod memory;
mod names;
mod pool;
mod said;
mod transfers;
