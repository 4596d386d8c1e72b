//! Lending: says where blocks lie in segment files, and holds the segments while a caller reads the files itself.
//!
//! Blocks are looked up and planned on the caller's thread as a read's are. Executors take hold of the segments, then
//! prove the headers, which give the digests; no payload is read. It is all or nothing. Whatever is wrong with a header
//! is only told: the ordinary read that follows will meet it, and takes out of service what must go.
//!
//! After its answer an executor's part does nothing but hold. A stop does not wait for it: it goes with the executor.

use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::plan::{Address, DEFAULT_MAX_REGION, MemoryId, Placement, ReadPlan, Step};

use super::header_cache::Header;
use super::job::make_plan;
use super::prove;
use super::request::{check_count, check_in_time, check_unequal, count_use};
use super::wanted::{Wanted, by_shard, find};
use crate::driver::{ExtentDone, ReadBatch};
use crate::engine::read::Reads;
use crate::engine::shared::Shared;
use crate::engine::shared::grace::Arrival;
use crate::engine::tasks::notify::with_deadline;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::Hold;
use crate::index::{BlockFingerprint, Lookup};
use crate::lend::{FileRange, LendRequest, NotLent, PinnedChunk, PinnedExtents, PinnedFile, PinnedLayer};
use crate::rt::LocalTask;
use kvarts_contract::api::{Order, Origins, wanted_layers};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Reason;
use kvarts_contract::ticket::{Reply, Ticket, ticket};
use kvarts_contract::{class::Class, clock::Nanos};

/// Bytes of headers that one part has under way.
const HEADER_BYTES: usize = 1 << 20;

/// What the executors of one loan share.
pub(crate) struct LendJob {
    shared: Arc<Shared>,
    request: LendRequest,
    prints: Vec<BlockFingerprint>,
    wanted: Vec<Wanted>,
    plan: ReadPlan,
    /// Chunks of a block.
    parts: u32,
    origins: Arc<Origins>,
}

/// One shard's share: indices of `wanted`.
pub(crate) struct LendPart {
    job: Arc<LendJob>,
    records: Vec<u32>,
    /// Until the segments are held.
    arrival: Arrival,
    reply: Reply<Result<Proven, NotLent>>,
}

/// What one shard lends.
#[derive(Debug)]
pub(crate) struct Proven {
    runs: Vec<ProvenRun>,
    /// The shard holds its segments until this is given or dropped.
    held: Reply<()>,
}

/// A run of blocks whose header has been proved.
#[derive(Debug)]
struct ProvenRun {
    /// Index in `wanted`.
    index: u32,
    file: PinnedFile,
    /// Of each block of the run, those of all its chunks.
    digests: Vec<u32>,
}

/// The answer of one shard, to come.
pub(crate) type Answer = Ticket<Result<Proven, NotLent>>;

/// A loan that was looked up: what each shard has to prove.
pub(crate) struct Begun {
    pub(crate) job: Arc<LendJob>,
    pub(crate) parts: Vec<(u32, LendPart)>,
    pub(crate) answers: Vec<Answer>,
}

/// Segments that are held for a caller, until it gives them back.
#[derive(Debug)]
pub(crate) struct HeldExtents {
    /// Until this is dropped.
    _holds: Vec<Hold>,
    given_back: Ticket<()>,
}

impl HeldExtents {
    /// Completes when they have been given back, and lets go.
    pub(crate) async fn until_given_back(self) {
        // Given or dropped is the same.
        let _ = self.given_back.await;
    }
}

/// A run whose segment is held.
struct Opened {
    index: u32,
    hold: Hold,
}

impl LendPart {
    /// What it is for.
    pub(crate) fn class(&self) -> Class {
        self.job.request.class
    }

    /// When the caller stops waiting.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.job.request.deadline
    }

    /// Ends a part that no executor took.
    pub(crate) fn refuse(self, reason: Reason) {
        // A caller that is gone needs no answer, here and below.
        let _ = self.reply.send(Err(reason.into()));
    }
}

/// Checks the request, looks its blocks up and makes the plan: a part for each shard that has some of them.
pub(crate) fn begin(shared: &Arc<Shared>, request: LendRequest) -> Result<Begun, NotLent> {
    check_count(&request.keys)?;
    check_in_time(shared, request.deadline)?;
    check_unequal(&request.keys)?;
    let namespace = shared.names.get(request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
    let shape = namespace.shape(request.group, request.coordinate)?;
    let layers = wanted_layers(request.layers.as_ref(), &shape)?;
    let prints = shared.prints_of(&namespace, &request.keys, (request.group, request.coordinate));
    let arrival = shared.arrivals.begin();
    let mut missing = BTreeMap::new();
    let wanted = find(shared, &request.keys, &prints, &mut missing)?;
    if let Some((_, reason)) = missing.pop_first() {
        return Err(reason.into());
    }
    if wanted.iter().any(|one| one.class.encoding != ENCODING_RAW) {
        return Err(NotLent::Encoded);
    }
    let start = |layer| Address { memory: MemoryId(layer), offset: 0 };
    let places = Placement::layer_buffers(&shape, request.keys.len() as u32, start).map_err(Reason::from)?;
    let plan = make_plan(Order::Layers, &Arc::new(places), layers, &wanted)?;
    let by_shard = by_shard(&wanted);
    let (shared, parts, origins) =
        (Arc::clone(shared), shape.chunk_count(), Origins::any(request.keys.len()));
    let job = Arc::new(LendJob { shared, request, prints, wanted, plan, parts, origins });
    let (mut parts, mut answers) = (Vec::new(), Vec::new());
    for (shard, records) in by_shard {
        let (reply, answer) = ticket();
        answers.push(answer);
        let (job, arrival) = (Arc::clone(&job), arrival.clone());
        parts.push((shard, LendPart { job, records, arrival, reply }));
    }
    Ok(Begun { job, parts, answers })
}

/// Does one shard's part of a loan, and answers. What it gives is to be kept until it is given back; nothing if
/// nothing is lent. `deadline` completes when the caller stops waiting.
pub(crate) async fn prove(
    reads: &Rc<Reads>,
    part: LendPart,
    deadline: Option<LocalTask>,
) -> Option<HeldExtents> {
    let LendPart { job, records, arrival, reply } = part;
    let opened = job.open(&reads.volume, &records);
    drop(arrival);
    let proven = match opened {
        Ok(opened) => {
            let proving = with_deadline(pin!(job.prove(reads, &opened)), deadline).await;
            proving.unwrap_or(Err(Reason::DeadlinePassed.into())).map(|runs| (runs, opened))
        }
        Err(why) => Err(why),
    };
    match proven {
        Ok((runs, opened)) => {
            let (held, given_back) = ticket();
            // An answer that no caller waits for is dropped, and with it what was held.
            let _ = reply.send(Ok(Proven { runs, held }));
            Some(HeldExtents { _holds: opened.into_iter().map(|one| one.hold).collect(), given_back })
        }
        Err(why) => {
            let _ = reply.send(Err(why));
            None
        }
    }
}

impl LendJob {
    fn gone(&self, ordinal: u32) -> NotLent {
        let key = self.request.keys.get(ordinal as usize);
        key.map_or(Reason::Bug("a block was pinned that was not requested"), |key| Reason::NotHere(*key))
            .into()
    }

    fn wanted(&self, index: u32) -> Result<&Wanted, NotLent> {
        let wanted = self.wanted.get(index as usize);
        wanted.ok_or(NotLent::Reason(Reason::Bug("a run of blocks was pinned that was not requested")))
    }

    /// Takes hold of the segments of these runs.
    fn open(&self, volume: &Volume, indices: &[u32]) -> Result<Vec<Opened>, NotLent> {
        let segments = volume.segments.borrow();
        let mut opened = Vec::with_capacity(indices.len());
        for &index in indices {
            let wanted = self.wanted(index)?;
            // Evicted since it was looked up, and the file with it.
            let segment = segments.get(&wanted.segment).ok_or_else(|| self.gone(wanted.run.start))?;
            opened.push(Opened { index, hold: Hold::new(segment) });
            if segment.is_holed() {
                self.are_in_place(wanted)?;
            }
        }
        Ok(opened)
    }

    /// Refuses a run of which a block has left since it was looked up: where it was may be a hole by now. What is still
    /// here stays so while the segment is held.
    fn are_in_place(&self, wanted: &Wanted) -> Result<(), NotLent> {
        for ordinal in wanted.run.clone() {
            let print = self.prints.get(ordinal as usize);
            match print.map(|print| self.shared.index.lookup(*print)) {
                Some(Lookup::Live(at)) if at == wanted.place_of(ordinal) => {}
                Some(Lookup::Live(_)) => return Err(Reason::Busy("a block is being moved").into()),
                _ => return Err(self.gone(ordinal)),
            }
        }
        Ok(())
    }

    /// Proves the headers of these runs: those that are known, and the others as they come from the device.
    async fn prove(&self, reads: &Rc<Reads>, opened: &[Opened]) -> Result<Vec<ProvenRun>, NotLent> {
        let mut batch = reads.volume.driver.batch(self.request.class);
        let mut reading: BTreeMap<u64, SharedBuf> = BTreeMap::new();
        let (mut next, mut runs) = (0u64, Vec::with_capacity(opened.len()));
        loop {
            while let Some(one) = opened.get(next as usize) {
                if let Some(run) = self.prove_known(reads, one)? {
                    runs.push(run);
                } else {
                    let under_way = reading.values().map(SharedBuf::len).sum();
                    let Some(buf) = self.submit(&reads.volume, &mut batch, (next, one), under_way).await?
                    else {
                        break;
                    };
                    reading.insert(next, buf);
                }
                next += 1;
            }
            let Some(ExtentDone { extent, result }) = batch.next().await else { break };
            result.map_err(Reason::from)?;
            let one = opened.get(extent as usize);
            let (Some(one), Some(buf)) = (one, reading.remove(&extent)) else { continue };
            runs.push(self.prove_read(reads, one, &buf)?);
        }
        match runs.len() == opened.len() {
            true => Ok(runs),
            false => Err(Reason::Bug("the header of a record was not read").into()),
        }
    }

    fn prove_known(&self, reads: &Reads, one: &Opened) -> Result<Option<ProvenRun>, NotLent> {
        let (wanted, segment) = (self.wanted(one.index)?, one.hold.segment());
        let known = prove::known(reads, segment, wanted);
        known.map(|header| self.prove_run(&reads.volume, one, &header)).transpose()
    }

    /// Asks the device for a header; `None` if there is enough under way, or memory only when some of that has come in.
    /// Only a loan with nothing under way waits for memory, so that none holds what another waits for.
    async fn submit(
        &self,
        volume: &Volume,
        batch: &mut ReadBatch,
        (name, one): (u64, &Opened),
        under_way: usize,
    ) -> Result<Option<SharedBuf>, NotLent> {
        let wanted = self.wanted(one.index)?;
        let bytes = wanted.header_bytes as usize;
        let buf = match under_way {
            0 => volume.stage(bytes).await.map_err(Reason::from)?,
            1..HEADER_BYTES => match volume.arena.try_take(bytes) {
                Some(buf) => buf,
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        let buf = buf.share();
        batch.push(name, one.hold.segment().file, wanted.offset, buf.clone());
        Ok(Some(buf))
    }

    fn prove_read(&self, reads: &Reads, one: &Opened, buf: &SharedBuf) -> Result<ProvenRun, NotLent> {
        let (wanted, segment) = (self.wanted(one.index)?, one.hold.segment());
        let header = prove::open(reads, segment, wanted, buf)?;
        self.prove_run(&reads.volume, one, &header)
    }

    /// What a header proves of the blocks of its run: all of it, or nothing is lent.
    fn prove_run(&self, volume: &Volume, one: &Opened, header: &Header) -> Result<ProvenRun, NotLent> {
        let wanted = self.wanted(one.index)?;
        // Each block is asked for once: this is the first production of it that is met.
        let admits = |ordinal, origin: Option<_>, _| {
            origin.is_some_and(|origin| self.origins.admit(ordinal as usize, origin))
        };
        let mut left = None;
        let gone = |ordinal| left = left.or(Some(ordinal));
        prove::run(header, wanted, &self.request.keys, admits, gone);
        if let Some(ordinal) = left {
            return Err(self.gone(ordinal));
        }
        let mut digests = Vec::with_capacity(wanted.run.len() * self.parts as usize);
        for ordinal in wanted.run.clone() {
            let block = wanted.block_of(ordinal);
            for part in 0..self.parts {
                let digest = header.digest(block, part);
                digests.push(digest.ok_or(Reason::Bug("a chunk has no digest"))?);
            }
        }
        let file = volume.driver.keep_file(one.hold.segment().file).ok_or(NotLent::NotAFile)?;
        Ok(ProvenRun { index: one.index, file: PinnedFile::new(file), digests })
    }

    /// Puts together what all shards lend.
    pub(crate) fn lend(&self, proven: Vec<Proven>) -> Result<PinnedExtents, NotLent> {
        let mut files = Files::default();
        let mut runs: Vec<Option<(u32, Vec<u32>)>> = self.wanted.iter().map(|_| None).collect();
        let mut held = Vec::with_capacity(proven.len());
        for part in proven {
            for run in part.runs {
                if let Some(place) = runs.get_mut(run.index as usize) {
                    *place = Some((files.place(run.file), run.digests));
                }
            }
            held.push(part.held);
        }
        let runs: Option<Vec<_>> = runs.into_iter().collect();
        let runs = runs.ok_or(Reason::Bug("no shard has the run of blocks"))?;
        let mut step = Step::default();
        let layers = (0..self.plan.steps()).map(|number| self.lay_out(number, &runs, &mut step));
        let layers = layers.collect::<Result<_, NotLent>>()?;
        count_use(&self.shared, self.request.class, &self.prints);
        Ok(PinnedExtents::new(files.files, layers, Arc::clone(&self.origins), held))
    }

    /// The ranges and chunks of one layer.
    fn lay_out(
        &self,
        number: u32,
        runs: &[(u32, Vec<u32>)],
        step: &mut Step,
    ) -> Result<PinnedLayer, NotLent> {
        let wrong = || NotLent::Reason(Reason::Bug("a layer is not in the plan of the read"));
        let layer = self.plan.layer_of(number).filter(|_| self.plan.plan_step(number, step));
        let layer = layer.ok_or_else(wrong)?;
        let (mut ranges, mut chunks) = (Vec::with_capacity(step.regions().len()), Vec::new());
        for (range, region) in (0u32..).zip(step.regions()) {
            if region.bytes > u64::from(DEFAULT_MAX_REGION) {
                return Err(Reason::TooMany("bytes of a chunk").into());
            }
            let (file, digests) = runs.get(region.record as usize).ok_or_else(wrong)?;
            let first = u32::from(self.wanted(region.record)?.location.block);
            ranges.push(FileRange { file: *file, offset: region.file_offset, bytes: region.bytes });
            for piece in self.plan.pieces(step, range) {
                let block = piece.block.checked_sub(first).ok_or_else(wrong)?;
                let digest = digests.get(block as usize * self.parts as usize + piece.chunk as usize);
                chunks.push(PinnedChunk {
                    range,
                    ordinal: piece.ordinal,
                    at: piece.source,
                    bytes: piece.len,
                    to: piece.destination.offset,
                    digest: *digest.ok_or_else(wrong)?,
                });
            }
        }
        Ok(PinnedLayer { layer, ranges, chunks })
    }
}

/// Files, each once.
#[derive(Default)]
struct Files {
    files: Vec<PinnedFile>,
    places: BTreeMap<u64, u32>,
}

impl Files {
    fn place(&mut self, file: PinnedFile) -> u32 {
        let next = self.files.len() as u32;
        let place = *self.places.entry(file.id()).or_insert(next);
        if place == next {
            self.files.push(file);
        }
        place
    }
}

#[cfg(test)]
mod tests;
