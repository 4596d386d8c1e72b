//! What a benchmark needs of a store besides its promises: where the bytes of a read lie, and a cold start for it.
//!
//! Nothing here changes what is stored. It is public so that the program can put a bare loop over the very same
//! extents beside the engine; it is not part of [`KvStore`](kvarts_contract::api::KvStore), and clients have no use for it.

use std::num::NonZeroU16;
use std::ops::Range;

use kvarts_layout::BlockKey;
use kvarts_layout::format;
use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::plan::{Address, Landing, Step};

use super::{Store, lost, send};
use crate::engine::front::memory_audit::{self, Table};
use crate::engine::front::router::Message;
use crate::engine::read::job;
use crate::engine::tasks::steps::Done;
use crate::index::{BlockFingerprint, Heat, Location, RecordInfo, Recovered};
use kvarts_contract::api::ReadRequest;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::{Error, Reason, SpaceCause};
use kvarts_contract::ticket::ticket;

/// One device read of a read's plan, headers not counted.
#[derive(Clone, Debug)]
pub struct PlannedExtent {
    /// The step (layer, or block in block order) that waits for it.
    pub step: u32,
    /// The executor that would submit it.
    pub executor: usize,
    /// The shard.
    pub shard: u32,
    /// The directory in which the shard lies.
    pub directory: u32,
    /// The file, below the shard's directory of the store.
    pub path: String,
    /// Where it begins in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
    /// The caller's memory if it lands there directly, none if it is staged.
    pub into: Option<SharedBuf>,
}

impl Store {
    /// The device reads that a read would do now, in the order of its steps and within a step in the order of the
    /// prompt. Blocks that are not here have none, nor have those of encoded records: only a header says where they lie.
    pub fn planned_extents(&self, request: &ReadRequest) -> Result<Vec<PlannedExtent>, Error> {
        let (plan, wanted) = job::look_up(&self.0.shared, request)?;
        let mut extents = Vec::new();
        let mut step = Step::default();
        let records: Range<u32> = match request.order {
            kvarts_contract::api::Order::Layers => 0..wanted.len() as u32,
            kvarts_contract::api::Order::Blocks => 0..1,
        };
        for number in 0..plan.steps() {
            for slice in records.clone() {
                plan.plan_slice(number, slice, &mut step);
                let owner = plan.block_of(number).map_or(slice, |(record, _)| record);
                let Some(record) = wanted.get(owner as usize) else { continue };
                if record.class.encoding != ENCODING_RAW {
                    continue;
                }
                for extent in step.extents() {
                    let into = match extent.landing {
                        Landing::Direct { memory, offset } => {
                            request.into.slice(Address { memory, offset }, u64::from(extent.len))
                        }
                        Landing::Staged { .. } => None,
                    };
                    let shard = format::names::shard_name(record.shard);
                    let segment = format::names::segment_name(record.segment);
                    extents.push(PlannedExtent {
                        step: number,
                        executor: self.0.router.owner(record.shard),
                        shard: record.shard,
                        directory: self.0.shared.directories.of(record.shard),
                        path: format!("{shard}/{segment}"),
                        offset: extent.file_offset,
                        len: extent.len,
                        into,
                    });
                }
            }
        }
        Ok(extents)
    }

    /// The shard that a record goes to which begins with this key.
    pub fn shard_of(&self, first: &BlockKey) -> u32 {
        self.0.shared.shard_for(first)
    }

    /// The executor of a shard.
    pub fn executor_of(&self, shard: u32) -> usize {
        self.0.shared.directories.owner(shard)
    }

    /// How large each table is that the store keeps in memory, all shards and executors together.
    pub async fn tables(&self) -> Result<Vec<Table>, Error> {
        let mut all = memory_audit::of_all(&self.0.shared);
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            send(sender, Message::Tables(reply))?;
            for table in lost(answer.await)? {
                match all.iter_mut().find(|known| known.name == table.name) {
                    Some(known) => known.size += table.size,
                    None => all.push(table),
                }
            }
        }
        Ok(all)
    }

    /// What work has taken since the store was opened, by kind.
    pub fn work_done(&self) -> Done {
        self.0.shared.work.done()
    }

    /// Takes `blocks` blocks that lie nowhere into the index, in records of sixteen, as recovery does, as blocks of a shard
    /// that the store does not have. To measure what the store's own work costs among them: none of them can be found or
    /// read, and the store must not be kept.
    pub fn add_strangers(&self, from: u64, blocks: u64) -> Result<(), Error> {
        const EACH: u16 = 16;
        const AT_ONCE: u64 = 1 << 20;
        let index = &self.0.shared.index;
        let end = from.saturating_add(blocks);
        let (mut at, mut conflicts) = (from, Vec::new());
        while at < end {
            let until = end.min(at.saturating_add(AT_ONCE));
            let mut some = index.gathering((until - at) as usize);
            while at < until {
                let info = RecordInfo {
                    shard: u16::MAX,
                    segment: (at >> 11) as u32,
                    page: (at as u32 & 0x7ff) << 6,
                    header_pages: 1,
                    payload_pages: 512,
                    blocks: NonZeroU16::MIN.saturating_add(EACH - 1),
                    live: 0,
                    // Of no tenant.
                    class: u32::MAX,
                    expires: 0,
                    parent: 0,
                    hangs: false,
                };
                let record =
                    index.records().insert(info).map_err(|_| Reason::NoSpace(SpaceCause::Records))?;
                for block in 0..EACH {
                    let number = at + u64::from(block);
                    // Uniform, as fingerprints are.
                    let first = (number ^ number << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    let print = BlockFingerprint::from_parts(first ^ first >> 29, number as u32);
                    let location = Location { record, block };
                    some.push(Recovered { print, location, heat: Heat::default() });
                }
                at += u64::from(EACH);
            }
            index.insert_live(&mut some, &mut conflicts).map_err(|_| Reason::NoSpace(SpaceCause::Records))?;
        }
        Ok(())
    }

    /// Forgets what reads have kept of record headers, so that the next read is as cold as the first.
    pub async fn forget_headers(&self) -> Result<(), Error> {
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            send(sender, Message::ForgetHeaders(reply))?;
            lost(answer.await)?;
        }
        Ok(())
    }
}
