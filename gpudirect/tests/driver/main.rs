//! The CUDA device over a stand-in for NVIDIA's libraries: in which order it calls what, with which addresses, what it
//! gives back and when, and what it makes of errors. What a GPU does with those calls only a GPU can show; `docs/GPU.md`
//! says what is shown by what.
//!
//! Every test runs in a process of its own and ends with the stand-in's books: nothing misused, nothing left. The
//! libraries are C11, because a C compiler is all that building this repository asks for. `KVARTS_DRIVER=real` runs the same
//! tests over the machine's own driver (`way.rs`).
#![allow(
    clippy::disallowed_methods,
    reason = "starts processes and threads, and works on real files, outside the simulation"
)]

mod bare;
mod copies;
mod devices;
mod digests;
mod failures;
mod figures;
mod files;
mod guests;
mod lander;
mod lives;
mod lost;
mod pipeline;
mod planted;
mod processes;
mod standin;
mod straight;
mod way;
