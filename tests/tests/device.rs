//! The way into device memory, over the emulated device.

mod landing;
mod landing_back;
mod landing_direct;
mod layered;
mod layered_time;
mod turns;
