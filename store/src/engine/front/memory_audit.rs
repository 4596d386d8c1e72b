//! How large every table is that an open store keeps in memory: so that a test can tell that use does not make them
//! grow, by the byte and from a seed, where resident memory only hints at it.
//!
//! Each table that lives as long as the store is counted here.

use crate::driver::Driver;
use crate::engine::shard::Shard;
use crate::engine::shared::Shared;
use crate::engine::shared::recently_gone::BYTES_MAX as RECENTLY_GONE_BYTES;

/// One table, of all shards together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Table {
    /// What it is.
    pub name: &'static str,
    /// Entries; of one that keeps the places of what has left it, places.
    pub size: u64,
}

fn table(name: &'static str, size: usize) -> Table {
    Table { name, size: size as u64 }
}

/// The tables of a shard.
pub(crate) fn of_shard(shard: &Shard) -> Vec<Table> {
    let segments = shard.volume.segments.borrow();
    let of_segments = |size: fn(&crate::engine::volume::segment::Segment) -> usize| {
        segments.values().map(|one| size(one)).sum()
    };
    vec![
        table("segments", segments.len()),
        table("entries of open segments", of_segments(|one| one.tail.borrow().entries.capacity())),
        table("definitions of open segments", of_segments(|one| one.tail.borrow().defined.len())),
        table("renamed namespaces", of_segments(crate::engine::volume::segment::Segment::renamed)),
        table("readers of segments", of_segments(|one| one.readers.get() as usize)),
        table("retired segments", shard.volume.retired.borrow().len()),
        table("lost segments", shard.volume.lost.borrow().len()),
        table("unreadable segments", shard.volume.unreadable.borrow().len()),
        table("headers", shard.reads.headers.places()),
        table("records that do not pay", shard.moves.unpaying.borrow().len()),
        table("segments looked at", shard.moves.looked_at.borrow().len()),
        table("small records noted", shard.volume.noted.len()),
        table("tombstones", shard.volume.tombstones.borrow().len()),
        table("shared loads", shard.reads.flights.len()),
        table("writes under way", shard.log.writes.len()),
    ]
}

/// The tables that all shards share.
pub(crate) fn of_all(shared: &Shared) -> Vec<Table> {
    let index = shared.index.memory();
    let (classes, layouts) = shared.classes.sizes();
    let (namespaces, shapes) = shared.names.sizes();
    vec![
        table("bytes of the index", index.bytes),
        table("records", index.records),
        table("leases", shared.index.leases()),
        table("bytes of events", shared.events.bytes()),
        // Of fixed size from the first departure on.
        table("bytes of reasons of departures", RECENTLY_GONE_BYTES),
        table("record classes", classes),
        table("layouts of record classes", layouts),
        table("segments noted for their times", shared.due.len()),
        table("namespaces", namespaces),
        table("shapes of namespaces", shapes),
        table("books", shared.index.records().ledger().segment_count()),
        table("accounts", shared.index.records().ledger().namespaces().len()),
    ]
}

/// The tables of an executor's way to the disks.
pub(crate) fn of_driver(driver: &Driver) -> Vec<Table> {
    let (operations, batches) = driver.places();
    vec![table("operations under way", operations), table("batches of reads", batches)]
}
