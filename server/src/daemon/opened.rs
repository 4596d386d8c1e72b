//! What opening a store found: the line at each start that tells whether anything was lost.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use kvarts_layout::StoreId;
use kvarts_store::engine::{RecoveryReport, Store};

use crate::human::{bytes, grouped};

/// What opening a store found.
#[derive(Clone, Debug)]
pub struct Opened {
    store: StoreId,
    blocks: u64,
    live_bytes: u64,
    budget_bytes: u64,
    took: Duration,
    problems: u64,
    /// What they were, as the checker calls it, each once.
    labels: BTreeSet<&'static str>,
}

impl Opened {
    pub(super) fn of(store: &Store, took: Duration) -> Self {
        let stats = store.stats();
        let reports = store.recovery();
        let sum = |field: fn(&RecoveryReport) -> u64| reports.iter().map(field).sum::<u64>();
        Self {
            store: stats.store,
            blocks: sum(|report| report.blocks),
            live_bytes: stats.space.total.live,
            budget_bytes: stats.budget_bytes,
            took,
            problems: sum(|report| report.problems),
            labels: reports.iter().flat_map(|report| &report.places).map(|problem| problem.label).collect(),
        }
    }

    /// What was lost or damaged, and what to do about it; nothing if recovery met no problem.
    pub fn warning(&self, directories: &[PathBuf]) -> Option<String> {
        let labels: Vec<&str> = self.labels.iter().copied().collect();
        let places: Vec<String> = directories.iter().map(|path| path.display().to_string()).collect();
        (self.problems > 0).then(|| {
            format!(
                "recovery found {} problems ({}), so some blocks may be lost: `kvarts fsck --live {}` lists \
                them",
                grouped(self.problems),
                labels.join(", "),
                places.join(" ")
            )
        })
    }
}

impl fmt::Display for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (live, budget) = (bytes(self.live_bytes), bytes(self.budget_bytes));
        let (blocks, took) = (grouped(self.blocks), self.took.as_secs_f64());
        write!(
            f,
            "store {}: {blocks} blocks, {live} live, budget {budget}, opened in {took:.1} s",
            self.store
        )
    }
}
