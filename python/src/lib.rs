//! The Python module `kvarts._kvarts`: what `kvarts/__init__.pyi` promises, over `kvarts-client` and `kvarts-store`.
//!
//! Invariants:
//! - Memory of Python objects is kept by whatever has a range of it, an operation under way among them; it is given back to
//!   the interpreter by a thread that has the interpreter's lock (`left`).
//! - The interpreter's lock is not held while anything waits or digests.
//! - In a process that was forked nothing is called and nothing is dropped: locks may be held there for ever (`guarded`).
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

// `stub!`, for the modules below: docstrings of the stubs, by `build.rs`.
include!(concat!(env!("OUT_DIR"), "/stub.rs"));

mod blocks;
mod buffer;
mod calls;
mod client;
mod completion;
mod dlpack;
mod error;
mod gpu;
mod guarded;
mod handle;
mod keys;
mod left;
mod memory;
mod missing;
mod open;
mod pages;
mod places;
mod planning;
mod pool;
mod reading;
mod registry;
mod routing;
mod session;
mod waiting;
mod watching;
mod windows;

use pyo3::prelude::*;

/// The module's classes and functions.
#[pymodule]
fn _kvarts(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(client::connect, module)?)?;
    module.add_function(wrap_pyfunction!(open::open, module)?)?;
    module.add_function(wrap_pyfunction!(keys::key, module)?)?;
    module.add_function(wrap_pyfunction!(keys::chain, module)?)?;
    module.add_function(wrap_pyfunction!(windows::kept_windows, module)?)?;
    module.add_function(wrap_pyfunction!(windows::window_interval, module)?)?;
    module.add_class::<handle::Client>()?;
    module.add_class::<pages::Pages>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<pool::Stage>()?;
    module.add_class::<pool::Draft>()?;
    module.add_class::<completion::Completion>()?;
    module.add_class::<places::Paged>()?;
    module.add_class::<calls::Match>()?;
    module.add_class::<missing::Missing>()?;
    module.add_class::<calls::Lease>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<planning::Times>()?;
    module.add_class::<planning::Plan>()?;
    module.add_class::<reading::Layers>()?;
    module.add_class::<reading::Layer>()?;
    module.add_class::<watching::Event>()?;
    module.add_class::<watching::Events>()?;
    module.add_class::<gpu::Device>()?;
    module.add_class::<gpu::Stream>()?;
    module.add_class::<gpu::Lander>()?;
    module.add_class::<gpu::DevicePages>()?;
    module.add_class::<gpu::Landed>()?;
    module.add_class::<gpu::Saving>()?;
    module.add_class::<gpu::Saved>()?;
    Ok(())
}
