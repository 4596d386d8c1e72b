//! A cluster under a workload: discrete events on one virtual clock.
//!
//! - [`Cluster`]: what there is, from a file;
//! - [`work`]: a trace, or sessions made from a seed; [`clients`]: a trace whose requests wait for answers;
//! - [`Simulation`]: what happens;
//! - [`Counted`]: what it is worth, as JSON; [`page`] for people.
//!
//! One seed and one input give the same bytes of output. Memory grows with what tiers hold and with the requests that are
//! open, not with the length of the trace.

#![allow(
    clippy::indexing_slicing,
    reason = "the tables themselves return the indices: a wrong index is a bug of the simulation"
)]

mod batch;
mod choices;
pub mod clients;
mod directory;
mod figures;
mod hits;
mod moves;
mod node;
mod oracle;
mod page;
mod router;
mod run;
pub mod search;
mod spec;
mod swap;
mod tiers;
mod times;
pub mod work;

pub use choices::{Bounds, Choices, What};
pub use figures::{Batch, Counted, Histogram, Hits, Slice};
pub use page::page;
pub use run::{RunError, Simulation};
pub use spec::{
    Cluster, Cold, DRIVES_MAX, Disk, Engine, FILE_BYTES_MAX, Facts, Memory, NODES_MAX, Nodes, Policy,
    Prefetch, Price, RouterKind, Side, SpecError, Way,
};
pub use times::{EngineTimes, Measured, Step};
