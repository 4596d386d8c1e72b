//! What a part of a read takes in: headers are proven, regions verified, and what was staged is copied.

use std::rc::Rc;

use kvarts_layout::plan::Pieces;

use super::compared::{Compared, RegionIn, damaged};
use super::submit::{ExtentName, Named};
use super::{HeaderState, OUTSIDE, PartRead, Record, RegionState, encoded};
use crate::driver::ExtentDone;
use crate::engine::read::header_cache::Header;
use crate::engine::read::job::ReadJob;
use crate::engine::read::prove;
use crate::engine::tasks::notify::Section;
use kvarts_contract::api::Verify;
use kvarts_contract::error::{Reason, broken_invariant};
use kvarts_contract::{buffers::SharedBuf, io_error::IoError};

/// Decoding costs this many times as much as copying.
const DECODE_COST: u64 = 16;

impl PartRead<'_> {
    /// Takes in one extent that ended.
    pub(super) fn take_in(&mut self, done: ExtentDone) {
        let ExtentDone { extent, result } = done;
        let (slot, region) = match ExtentName(extent).named() {
            Named::Header(at) => return self.take_header(at, result),
            Named::Region { slot, region, .. } => (slot, region),
        };
        let Some(Some(slice)) = self.slices.get_mut(slot) else {
            return broken_invariant("an extent belongs to a slice that is not being read");
        };
        let Some(bytes) = slice.plan.regions().get(region as usize).map(|region| region.bytes) else {
            return broken_invariant("an extent belongs to a region that its slice does not have");
        };
        if let Err(error) = result {
            slice.failed = Some(error.into());
        }
        let Some(RegionState { extents_left, .. }) = slice.regions.get_mut(region as usize) else {
            return broken_invariant("an extent belongs to a region that its slice does not have");
        };
        *extents_left -= 1;
        if *extents_left > 0 {
            return;
        }
        self.tally.bytes += bytes;
        let record = slice.record;
        match self.records.get_mut(record) {
            Some(Record { header: HeaderState::Good(_) | HeaderState::Bad, .. }) => {
                self.finish_region(slot, region)
            }
            Some(record) => record.early.push((slot, region)),
            None => {}
        }
    }

    fn take_header(&mut self, at: usize, result: Result<(), IoError>) {
        let Some(record) = self.records.get_mut(at) else { return };
        let HeaderState::Reading(buf) = std::mem::replace(&mut record.header, HeaderState::Bad) else {
            return;
        };
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return };
        let opened = result.map_err(Reason::from);
        match opened.and_then(|()| prove::open(&record.reads, &record.segment, wanted, &buf)) {
            Ok(header) => self.header_found(at, header),
            Err(reason) => {
                for ordinal in wanted.run.clone() {
                    self.job.fail_there(wanted, ordinal, &reason);
                    if matches!(reason, Reason::Header { .. }) {
                        self.job.quarantine(wanted, ordinal);
                    }
                }
            }
        }
        let early = self.records.get_mut(at).map(|record| std::mem::take(&mut record.early));
        for (slot, region) in early.unwrap_or_default() {
            self.finish_region(slot, region);
        }
    }

    /// Takes a header in that was opened, and what it proves of the blocks of its run.
    pub(super) fn header_found(&mut self, at: usize, header: Rc<Header>) {
        let Some(record) = self.records.get_mut(at) else { return };
        let Some(wanted) = self.job.wanted.get(record.index as usize) else { return };
        let job = self.job;
        // What this read is a part of may have begun with another production, which has left.
        let admits = |ordinal, origin, created_ms| job.admits(ordinal, origin, (created_ms, wanted));
        let proved =
            prove::run(&header, wanted, &job.request.keys, admits, |ordinal| job.fail_as_gone(ordinal));
        record.header = if proved { HeaderState::Good(header) } else { HeaderState::Bad };
    }

    /// Verifies a region that is in and copies what was staged.
    fn finish_region(&mut self, slot: usize, region: u32) {
        let Some(Some(slice)) = self.slices.get_mut(slot) else {
            return broken_invariant("a region belongs to a slice that is not being read");
        };
        let staging = slice.regions.get_mut(region as usize).and_then(|region| region.staging.take());
        let (record, step, failed) = (slice.record, slice.step, slice.failed.clone());
        slice.regions_left -= 1;
        let last = slice.regions_left == 0;
        self.deliver(slot, region, staging.as_ref(), failed, record);
        if last && let Some(Some(mut slice)) = self.slices.get_mut(slot).map(Option::take) {
            slice.regions.clear();
            self.spare.push(slice.plan);
            self.spare_regions.push(slice.regions);
            self.free.push(slot);
            if let Some(Record { flight: Some(flight), header: HeaderState::Good(header), .. }) =
                self.records.get(record)
            {
                flight.arrived(step, header);
            }
            self.job.slice_done(step);
        }
    }

    /// Hands a region that is in to what compares its chunks with their digests: [`copy_out`], or [`encoded`] for records
    /// that are.
    fn deliver(
        &mut self,
        slot: usize,
        region: u32,
        staging: Option<&SharedBuf>,
        failed: Option<Reason>,
        record: usize,
    ) {
        let slice = self.slices.get(slot).and_then(Option::as_ref);
        let record = self.records.get(record);
        let wanted = record.and_then(|record| self.job.wanted.get(record.index as usize));
        let (Some(slice), Some(record), Some(wanted)) = (slice, record, wanted) else {
            // The blocks that these bytes belong to are not known: none may be announced.
            let all = 0..self.job.request.keys.len() as u32;
            return self.job.fail_run(
                all,
                &Reason::Bug("bytes arrived for a slice that is not in the plan of the read"),
            );
        };
        let HeaderState::Good(header) = &record.header else {
            // A bad one has failed its run already.
            let reason = failed.unwrap_or(Reason::Bug("the bytes of a record arrived without its header"));
            return self.job.fail_run(wanted.run.clone(), &reason);
        };
        let verify = if record.doubted { Verify::Always } else { self.job.request.verify };
        let bytes = slice.plan.regions().get(region as usize).map_or(0, |region| region.bytes);
        let arrived = RegionIn { wanted, header, staging, failed, verify };
        if let Some(pieces) = &slice.stored {
            let decoded = encoded::decode_region(
                &record.reads,
                self.job,
                &arrived,
                pieces.of(region),
                &mut self.sample,
            );
            self.delivered += Section::of_bytes(decoded * DECODE_COST);
        } else {
            copy_out(self.job, &arrived, self.job.plan.pieces(&slice.plan, region), &mut self.sample);
            self.delivered += Section::of_bytes(bytes);
        }
    }
}

/// Verifies the chunks of a region and copies what was staged.
fn copy_out(job: &ReadJob, region: &RegionIn<'_>, mut pieces: Pieces<'_>, sample: &mut u64) {
    let RegionIn { wanted, header, staging, failed, verify } = region;
    let into = &job.request.into;
    for piece in pieces.by_ref() {
        if let Some(reason) = failed {
            job.fail(piece.ordinal, reason);
            continue;
        }
        let len = piece.len as usize;
        // What cannot be shown cannot be verified: it is not announced.
        let Some((place, to)) = into.find(piece.destination, piece.len) else {
            job.fail(piece.ordinal, &OUTSIDE);
            continue;
        };
        let (source, at) = match staging {
            Some(buf) => (*buf, piece.source as usize),
            None => (place, to),
        };
        if at.checked_add(len).is_none_or(|end| end > source.len()) {
            job.fail(piece.ordinal, &OUTSIDE);
            continue;
        }
        let expected = header.digest(piece.block, piece.chunk);
        if verify.picks(sample) {
            let found = source.crc32(at, len);
            if expected != Some(found) && !kvarts_layout::planted!("digest-not-compared") {
                // What another process may write to proves nothing about the disk.
                let certain = staging.is_some() || !source.region().is_shared();
                damaged(job, wanted, piece.ordinal, Compared { expected, found }, certain);
                continue;
            }
        }
        if let Some((digests, digest)) = into.digests().zip(expected) {
            digests.set(piece.chunk, piece.ordinal, digest);
        }
        if staging.is_some() {
            place.copy_from(to, source, at, len);
        }
    }
    if !pieces.is_done() {
        // What was passed over was neither compared nor copied.
        job.fail_run(wanted.run.clone(), &OUTSIDE);
    }
}
