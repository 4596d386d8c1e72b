//! Kvarts layers landing in device memory.
//!
//! A [`Pipeline`] reads layers from a store into an [`Arena`] of pinned host memory and copies each, as soon as it is
//! verified, to where the engine wants it on a [`Device`](device::Device). [`LayerStream::next_layer`] makes the
//! caller's stream wait for a layer, never the caller's thread for a copy. Nothing here needs CUDA to build, to start
//! or to be tested: the emulated device has the same contract.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)
)]

pub mod arena;
mod buddy;
pub mod crc;
pub mod cufile;
pub mod destination;
pub mod device;
pub mod device_arena;
pub mod error;
mod follow;
pub mod gather;
pub mod ipc;
pub mod lander;
pub mod pace;
pub mod pages;
pub mod pipeline;
pub mod ring;
pub mod store_layers;

pub use arena::Arena;
pub use destination::Destination;
pub use device_arena::DeviceArena;
pub use error::{DeviceError, EndReason};
pub use lander::Lander;
pub use pages::Pages;
pub use pipeline::{LandRequest, LayerEnd, LayerStream, Pipeline};
