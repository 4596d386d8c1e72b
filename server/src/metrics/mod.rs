//! How a server's counters and its state are told: to Prometheus, and to the status page.

mod answer;
mod calls;
mod cluster;
mod cold;
pub mod history;
mod host;
pub mod http;
mod lines;
mod page;
mod prefixes;
mod process;
mod segments;
mod sessions;
mod text;

/// What a node of a cluster without any members, and a server with a cold tier, tell besides: for the list of all metrics.
#[doc(hidden)]
pub fn told_besides() -> String {
    let mut out = String::new();
    cluster::cluster(&mut out, &cluster::nothing());
    cold::cold(&mut out, &cold::nothing());
    out
}
