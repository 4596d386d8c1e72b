//! Sessions as Prometheus reads them.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use super::lines::{head, one};
use crate::state::LiveSessions;

/// Tells of sessions.
pub(super) fn sessions(out: &mut String, sessions: &LiveSessions) {
    let (open, rests, leases) = sessions.table().count();
    one(out, "kvarts_sessions", "gauge", "Sessions that are open, or were handed over and not closed.", open);
    let help = "Ended sessions whose blocks are still used by sessions that were forked from them.";
    one(out, "kvarts_sessions_rests", "gauge", help, rests);
    one(out, "kvarts_sessions_leases", "gauge", "Leases that sessions hold on blocks of the store.", leases);
    let help = "Chains that this node owns for sessions.";
    one(out, "kvarts_sessions_chains", "gauge", help, sessions.claimed_chains());
    let counts = &sessions.counts;
    let total = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let help = "Sessions that began: opened (including sessions handed over from other nodes), or forked.";
    head(out, "kvarts_sessions_begun_total", "counter", help);
    for (how, count) in [("opened", &counts.opened), ("forked", &counts.forked)] {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "kvarts_sessions_begun_total{{how=\"{how}\"}} {}", total(count));
    }
    let help = "Number of calls that added blocks to a session.";
    one(out, "kvarts_sessions_extended_total", "counter", help, total(&counts.extended));
    let help = "Sessions that were handed over to another node.";
    one(out, "kvarts_sessions_handed_over_total", "counter", help, total(&counts.handed_over));
    let help = "Sessions that ended: closed by their clients, or expired with their lease.";
    head(out, "kvarts_sessions_ended_total", "counter", help);
    for (how, count) in [("closed", &counts.closed), ("expired", &counts.expired)] {
        let _ = writeln!(out, "kvarts_sessions_ended_total{{how=\"{how}\"}} {}", total(count));
    }
}
