//! A machine in a box: disk, clock, randomness and scheduler, all from one seed.
//!
//! The engine runs here unchanged: it sees [`SimIo`] as its `Io` and [`SimLauncher`] as its `Launcher`. Nothing
//! runs in parallel and no time passes by itself; [`SimWorld`] decides what happens next, so the same seed gives
//! the same [event log](log::EventLog), line for line.
//!
//! - [`media`]: what is on the disk, durable or not, and what a change does to it;
//! - [`crash`]: what of the changes that are not durable survives a power cut;
//! - [`faults`]: what goes wrong, and when;
//! - [`disk`]: operations under way, their latencies and completions;
//! - [`world`]: executors stepped against the disk.

pub mod clock;
pub mod crash;
pub mod disk;
pub mod faults;
pub mod log;
pub mod media;
pub mod rng;
pub mod world;

pub use clock::SimClock;
pub use crash::{Crash, CrashState};
pub use disk::{DiskConfig, Latency, SimDisk, SimIo};
pub use faults::{Effect, OpKind, Rule, When, Which};
pub use log::EventLog;
pub use media::Media;
pub use rng::{Rng, Seed};
pub use world::{Hang, SimLauncher, SimWorld, WorldConfig};
