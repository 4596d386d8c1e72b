//! How large every table is that an open store keeps in memory: so that a test can tell that use does not make them
//! grow, by the byte and from a seed, where resident memory only hints at it.
//!
//! Whoever adds a table that lives as long as the store counts it here.

use crate::engine::shared::Shared;
use crate::engine::write::log::Log;
use crate::io::Driver;

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

impl Log {
    /// The tables of a shard.
    pub(crate) fn tables(&self) -> Vec<Table> {
        let segments = self.segments.borrow();
        let of_segments = |size: fn(&crate::engine::volume::segment::Segment) -> usize| {
            segments.values().map(|one| size(one)).sum()
        };
        vec![
            table("segments", segments.len()),
            table("entries of open segments", of_segments(|one| one.tail.borrow().entries.capacity())),
            table("definitions of open segments", of_segments(|one| one.tail.borrow().defined.len())),
            table("renamed namespaces", of_segments(crate::engine::volume::segment::Segment::renamed)),
            table("readers of segments", of_segments(|one| one.readers.get() as usize)),
            table("retired segments", self.retired.borrow().len()),
            table("lost segments", self.lost.borrow().len()),
            table("headers", self.headers.places()),
            table("records that do not pay", self.unpaying.borrow().len()),
            table("segments looked at", self.looked_at.borrow().len()),
            table("graves", self.graves.borrow().len()),
            table("shared loads", self.flights.len()),
            table("writes under way", self.writes.len()),
        ]
    }

    /// A segment is written anew: forgets what is known of what it held.
    pub(crate) fn forget_segment(&self, number: u32) {
        self.headers.forget_segment(number);
        self.unpaying.borrow_mut().retain(|(segment, ..)| *segment != number);
        self.looked_at.borrow_mut().remove(&number);
    }
}

impl Shared {
    /// The tables that all shards share.
    pub(crate) fn tables(&self) -> Vec<Table> {
        let index = self.index.memory();
        let (classes, layouts) = self.classes.sizes();
        let (namespaces, shapes) = self.names.sizes();
        vec![
            table("bytes of the index", index.bytes),
            table("records", index.records),
            table("leases", self.index.leases()),
            table("bytes of events", self.events.bytes()),
            table("record classes", classes),
            table("layouts of record classes", layouts),
            table("segments noted for their times", self.due.len()),
            table("namespaces", namespaces),
            table("shapes of namespaces", shapes),
            table("books", self.index.records().ledger().segment_count()),
            table("accounts", self.index.records().ledger().namespaces().len()),
        ]
    }
}

impl Driver {
    /// The tables of an executor's way to the disks.
    pub(crate) fn tables(&self) -> Vec<Table> {
        let (operations, batches) = self.places();
        vec![table("operations under way", operations), table("batches of reads", batches)]
    }
}
