//! The segment map of the status page: what the bytes of the segment files are, shard by shard. A large store's neighbours share a
//! cell, so that the map has a bounded size.

use std::collections::BTreeMap;

use kvarts_store::ledger::{Phase, SegmentView};
use serde_json::{Value, json};

/// Cells of a map.
const CELLS_MAX: usize = 1024;

/// Neighbouring segments of a shard, together.
#[derive(Default)]
struct Cell {
    first: u32,
    segments: u32,
    live: u64,
    dead: u64,
    free: u64,
    overhead: u64,
    open: u32,
    lost: u32,
}

/// The map. A cell is `[first segment, segments, live, dead, free, overhead bytes, open segments, lost segments]`.
pub(super) fn map(mut segments: Vec<SegmentView>, segment_bytes: u64) -> Value {
    segments.sort_unstable_by_key(|one| (one.shard, one.segment));
    let per_cell = segments.len().div_ceil(CELLS_MAX).max(1);
    let mut shards = BTreeMap::<u32, Vec<Cell>>::new();
    for one in &segments {
        let cells = shards.entry(one.shard).or_default();
        if cells.last().is_none_or(|cell| cell.segments as usize >= per_cell) {
            cells.push(Cell { first: one.segment, ..Cell::default() });
        }
        let Some(cell) = cells.last_mut() else { continue };
        cell.segments += 1;
        cell.live += one.space.live;
        cell.dead += one.space.dead;
        cell.free += one.space.free;
        cell.overhead += one.space.overhead;
        cell.open += u32::from(one.phase == Phase::Open);
        cell.lost += u32::from(one.phase == Phase::Lost);
    }
    let cell = |one: &Cell| {
        json!([one.first, one.segments, one.live, one.dead, one.free, one.overhead, one.open, one.lost])
    };
    let shard = |(shard, cells): (&u32, &Vec<Cell>)| json!({"shard": shard, "cells": cells.iter().map(cell).collect::<Vec<_>>()});
    json!({
        "segment_bytes": segment_bytes, "segments": segments.len(), "segments_per_cell": per_cell,
        "columns": ["first", "segments", "live", "dead", "free", "overhead", "open", "lost"],
        "shards": shards.iter().map(shard).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_store::ledger::Space;

    fn segment(shard: u32, segment: u32) -> SegmentView {
        let space = Space { allocated: 100, live: 60, dead: 10, free: 25, overhead: 5 };
        let phase = if segment == 0 { Phase::Open } else { Phase::Full };
        SegmentView { shard, segment, phase, log_end: 70, records: 70, punched: 0, space }
    }

    #[test]
    fn each_segment_is_counted_once_and_a_large_store_has_as_many_cells_as_are_shown() {
        for (count, per_cell) in [(3u32, 1), (1500, 3)] {
            let all = (0..2).flat_map(|shard| (0..count).rev().map(move |n| segment(shard, n))).collect();
            let told = map(all, 100);
            assert_eq!(told["segments_per_cell"], per_cell);
            let shards = told["shards"].as_array().unwrap();
            let cells: Vec<&Value> = shards.iter().flat_map(|one| one["cells"].as_array().unwrap()).collect();
            assert!(cells.len() <= CELLS_MAX + shards.len());
            let sum = |column: usize| cells.iter().map(|cell| cell[column].as_u64().unwrap()).sum::<u64>();
            let all = u64::from(2 * count);
            assert_eq!(
                (sum(1), sum(2), sum(3), sum(4), sum(6), sum(7)),
                (all, 60 * all, 10 * all, 25 * all, 2, 0)
            );
        }
        assert_eq!(map(Vec::new(), 100)["shards"], json!([]));
    }
}
