//! A put whose layers come one after the other: each is written as soon as it is there.
//!
//! It has a segment to itself until it ends, so that it may stand still without holding up others. Its records have
//! their places from the beginning; of the segment's books they are no part before the put is sealed. Then, in this
//! order: everything written is flushed; the headers, with the digests of all layers and with sequences of now, are
//! written and flushed; the blocks become visible. A put that ends earlier has changed nothing but bytes behind the
//! end of its segment's log, and the next to use the segment writes over them.
//!
//! With its headers the segment becomes the one that the shard appends to, and the one before it is sealed: recovery
//! takes segments newest first and relies on it that the sequences of two never interleave. So the segment holds
//! nothing before, and what is left of it afterwards is the ordinary log's.
//!
//! What a crash leaves before the headers were written is bytes behind the end of a log, which recovery knows
//! (`end-of-log-over-old-bytes`). No page of them passes for a record, whatever a caller wrote: headers carry a keyed
//! tag over store, segment, generation and offset, and for these offsets none was made under this generation.
//!
//! Blocks are claimed when the put begins, so that no other put writes them meanwhile. A delete that meets it takes the
//! claim away and does not wait for it; from the moment at which it is sealed, it does.

mod image;

use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use kvarts_layout::Layout;
use kvarts_layout::arrange::RunLayout;
use kvarts_layout::format::record::Body;
use kvarts_layout::format::{PAGE_BYTES, page_align};

use self::image::Image;
use super::write::{Piece, publish};
use super::{PutJob, check, record_blocks, reserve, with_deadline};
use crate::engine::shared::Shared;
use crate::engine::shared::quota::Share;
use crate::engine::space::Space;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, SegmentState, fault};
use crate::engine::write::draft::{Draft, Payload, Written};
use crate::engine::write::image::Image as RecordImage;
use crate::engine::write::log::Log;
use crate::index::Reservation;
use crate::io::policy::{Action, Stage, decide};
use crate::ledger::Promise;
use crate::rt::LocalTask;
use kvarts_contract::api::by_layers::Progress;
use kvarts_contract::api::{BlockOutcome, Durability, LayeredPut, PutRequest, StepGate};
use kvarts_contract::error::{Error, Reason, ShapeCause};
use kvarts_contract::ticket::{Reply, ticket};
use kvarts_contract::{buffers::BufMut, io_error::IoError};
use kvarts_contract::{class::Class, clock::Nanos};

/// Puts by layers under way in one shard.
const UNDER_WAY_MAX: usize = 4;
/// Of a shard's segments, one in this many may be held by puts by layers.
const SEGMENTS_EACH: u64 = 8;
/// Such a put closes a segment early: fewer bytes than this part of one are put whole.
const SEGMENT_PARTS: u64 = 16;

/// What one executor does for a put by layers.
pub(crate) struct LayersPart {
    job: Arc<PutJob>,
    /// The blocks of each record.
    runs: Vec<Range<u32>>,
    shares: Vec<Share>,
    /// What was paid of them.
    promises: Vec<Promise>,
    progress: Arc<Progress>,
    /// Until it is known whether there is room for it.
    begun: Option<(Reply<Result<LayeredPut, Error>>, LayeredPut)>,
}

impl Drop for LayersPart {
    fn drop(&mut self) {
        self.progress.end();
    }
}

impl LayersPart {
    /// When the caller stops caring.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.job.request.deadline
    }

    /// Says that the put was not begun.
    pub(crate) fn refuse(mut self, reason: Reason) {
        if let Some((reply, _)) = self.begun.take() {
            // A caller that is gone needs no answer.
            let _ = reply.send(Err(reason.into()));
        }
    }

    fn gate(&self) -> &StepGate {
        &self.progress.offered
    }

    /// Chunks of one block.
    fn chunks(&self) -> usize {
        self.job.class.shape.layers().iter().map(|layer| layer.chunks.len()).sum()
    }
}

/// Checks the request and claims its blocks. `None` if it was refused: that has been answered.
pub(crate) fn begin(
    shared: &Arc<Shared>,
    request: PutRequest,
    begun: Reply<Result<LayeredPut, Error>>,
) -> Option<(u32, LayersPart)> {
    match try_begin(shared, request) {
        Ok((shard, mut part, stream)) => {
            part.begun = Some((begun, stream));
            Some((shard, part))
        }
        Err(reason) => {
            // A caller that is gone needs no answer.
            let _ = begun.send(Err(reason.into()));
            None
        }
    }
}

fn try_begin(shared: &Arc<Shared>, mut request: PutRequest) -> Result<(u32, LayersPart, LayeredPut), Reason> {
    let gate = request.from.gate().cloned();
    let gate = gate.filter(|gate| gate.opened() == 0 && request.layout != Some(Layout::FullBlock));
    let wrong = ShapeCause::Rule(
        "a layered put needs memory with a StepGate on which no step was opened yet; \
        its layout must not be full-block",
    );
    let gate = gate.ok_or(Reason::Shape(wrong))?;
    request.layout = Some(Layout::LayerBlock);
    let class = check(shared, &request, true)?;
    let shard = request.keys.first().map_or(0, |key| shared.shard_for(key));
    let (blocks, from, shape) = (request.keys.len() as u32, request.from.clone(), Arc::clone(&class.shape));
    let limit = record_blocks(shared, shape.block_bytes())?;
    let bytes = shape.block_bytes().saturating_mul(u64::from(blocks));
    // Its pages, and those of its header and of what that needs.
    if page_align(bytes).unwrap_or(bytes).saturating_add(3 * PAGE_BYTES)
        < shared.segment_bytes / SEGMENT_PARTS
    {
        return Err(Reason::Shape(ShapeCause::Rule(
            "the put is too small for a layered put: put more blocks at once, or use an ordinary put",
        )));
    }
    let (reply, answer) = ticket();
    let (job, reservations) = reserve(shared, (request, None), class, reply);
    if reservations.iter().any(|one| *one != Reservation::Reserved) {
        return Err(Reason::Busy(
            "some blocks of the put are stored already, or another put of them is under \
            way",
        ));
    }
    if let Some(reason) = job.hangs_on_refused() {
        return Err(reason);
    }
    let (mut runs, mut shares) = (Vec::new(), Vec::new());
    for start in (0..blocks).step_by(limit.max(1) as usize) {
        let run = start..start.saturating_add(limit).min(blocks);
        shares.push(job.share(&run)?);
        job.hold_before(run.start);
        runs.push(run);
    }
    job.lock().parts_left = 1;
    let (stream, progress) = LayeredPut::new(from, shape, gate, answer);
    let part = LayersPart { job, runs, shares, promises: Vec::new(), progress, begun: None };
    Ok((shard, part, stream))
}

/// A record that is written layer by layer.
struct Place {
    run: Range<u32>,
    layout: Arc<RunLayout>,
    /// Where its payload begins in the segment.
    at: u64,
    /// Bytes of its header, and of what is defined before it.
    header_bytes: usize,
}

/// Does the put on its shard's executor. `deadline` completes when the caller stops caring.
pub(crate) async fn run(log: &Rc<Log>, part: LayersPart, mut deadline: Option<LocalTask>) {
    let under_way = log.layered.borrow().len();
    let enough = under_way >= UNDER_WAY_MAX
        || (under_way as u64 + 1) * SEGMENTS_EACH > log.volume.shared.segments_of_a_shard();
    if enough || log.closing.get() {
        return part.refuse(Reason::Busy("the limit of layered puts is reached"));
    }
    log.layered.borrow_mut().push(part.gate().clone());
    let left = part.gate().clone();
    let ended = || {
        log.layered.borrow_mut().retain(|gate| !gate.is(&left));
        log.volume.changed.wake_all();
    };
    let Some(part) = pay(&log.volume, part, deadline.as_mut()).await else {
        return ended();
    };
    let Some((mut part, segment, places)) = find(log, part, deadline.as_mut()).await else {
        return ended();
    };
    if let Some((reply, stream)) = part.begun.take() {
        // If no caller waits for it, it is dropped, and the put stops.
        let _ = reply.send(Ok(stream));
    }
    let promises = std::mem::take(&mut part.promises);
    {
        let mut writing = pin!(write(log, &part, &segment, &places));
        let ended = with_deadline(writing.as_mut(), deadline).await;
        let late = ended.is_none();
        let blocks = part.job.request.keys.len() as u32;
        let outcomes: Vec<_> = match ended.unwrap_or(Err(Reason::DeadlinePassed)) {
            Ok(deleted) => {
                let of = |place| match deleted.contains(&place) {
                    true => (place, BlockOutcome::Refused(Reason::Deleted)),
                    false => (place, BlockOutcome::Stored),
                };
                (0..blocks).map(of).collect()
            }
            Err(reason) => {
                let refused = part.job.give_up(&(0..blocks), reason);
                (0..blocks).map(|place| (place, refused.clone())).collect()
            }
        };
        // What is live by now is counted as live.
        drop(promises);
        part.job.finish(outcomes);
        if late {
            // The task that waits for a layer is told now. A write that is under way may read its memory for longer, for a
            // record that will not be.
            part.progress.end();
            // What is under way ends first: the segment is not used for anything else before.
            let _ = writing.await;
        }
    }
    put_away(&log.space, segment).await;
    ended();
}

/// Takes what the records will take of their namespace's quota; `None` if it cannot be had, or not in time: that has been
/// answered.
async fn pay(volume: &Volume, mut part: LayersPart, deadline: Option<&mut LocalTask>) -> Option<LayersPart> {
    let shares = std::mem::take(&mut part.shares);
    let paying = pin!(async {
        let mut promises = Vec::with_capacity(shares.len());
        for share in shares {
            promises.push(share.paid(&volume.shared).await?);
        }
        Ok(promises)
    });
    let paid = with_deadline(paying, deadline).await;
    match paid.unwrap_or(Err(Reason::DeadlinePassed)) {
        Ok(promises) => {
            part.promises = promises;
            Some(part)
        }
        Err(reason) => {
            part.refuse(reason);
            None
        }
    }
}

/// Finds a segment with room for all records, and says where they go. `None` if there is none, or none in time: that has
/// been answered, and the put holds nothing any more.
async fn find(
    log: &Rc<Log>,
    part: LayersPart,
    deadline: Option<&mut LocalTask>,
) -> Option<(LayersPart, Rc<Segment>, Vec<Place>)> {
    let mut taking = pin!(take_segment(log));
    let segment = match with_deadline(taking.as_mut(), deadline).await {
        Some(Ok(segment)) => segment,
        Some(Err(reason)) => {
            part.refuse(reason);
            return None;
        }
        None => {
            part.refuse(Reason::DeadlinePassed);
            // What was begun for it is ended: half a segment would have no owner, and the next put takes this one.
            if let Ok(segment) = taking.await {
                put_away(&log.space, segment).await;
            }
            return None;
        }
    };
    let reason = match lay_out(log, &part, &segment) {
        Ok(Some(places)) => return Some((part, segment, places)),
        Ok(None) => Reason::TooMany("bytes for one segment"),
        Err(reason) => reason,
    };
    part.refuse(reason);
    put_away(&log.space, segment).await;
    None
}

/// A segment that holds nothing and that no other task appends to.
async fn take_segment(log: &Rc<Log>) -> Result<Rc<Segment>, Reason> {
    let parked = log.space.parked.borrow_mut().pop();
    if let Some(segment) = parked {
        return Ok(segment);
    }
    let _turn = log.space.roll_turn().await;
    log.begin_segment().await
}

/// Where the records would lie in the segment, or `None` if they do not fit.
fn lay_out(log: &Log, part: &LayersPart, segment: &Segment) -> Result<Option<Vec<Place>>, Reason> {
    let start = segment.tail.borrow().next;
    let (mut at, mut footer_bytes, mut places) = (start, 0, Vec::new());
    for run in &part.runs {
        // A header is as long whatever its digests are.
        let digests = vec![0; part.chunks() * run.len()];
        let (draft, _) = draft(&part.job, run, &digests)?;
        let sheet = log.sheet(segment, &draft, at, at == start)?;
        let layout = part.job.class.layout_of(run.len() as u32)?;
        footer_bytes += sheet.footer_bytes;
        let header_bytes = sheet.headers.len();
        places.push(Place { run: run.clone(), layout, at: at + header_bytes as u64, header_bytes });
        at += sheet.len;
    }
    Ok(log.fits(segment, at - start, footer_bytes).then_some(places))
}

/// The record of a run whose payload is on disk, and when it expires.
fn draft<'a>(job: &'a PutJob, run: &Range<u32>, digests: &'a [u32]) -> Result<(Draft<'a>, u32), Reason> {
    let (blocks, expires) = job.body(run);
    let payload = Some(Payload::There(job.class.layout_of(run.len() as u32)?));
    let namespace = Some(&*job.class.namespace);
    Ok((Draft { namespace, body: Body::Blocks(blocks), digests, payload }, expires))
}

/// Writes what is offered until all of it is there, and seals it. Gives the places of blocks that a delete has met.
async fn write(
    log: &Rc<Log>,
    part: &LayersPart,
    segment: &Rc<Segment>,
    places: &[Place],
) -> Result<Vec<u32>, Reason> {
    let mut images = Vec::new();
    for place in places {
        images.push(Image::new(place, &part.job.request.from)?);
    }
    let layers = part.job.class.shape.layers().len() as u32;
    let mut written = 0;
    while written < layers {
        let offered = turn(log, part, segment, written).await?.min(layers);
        let mut writes = Vec::new();
        let mut outcome = Ok(());
        'offered: for layer in written..offered {
            for image in &mut images {
                outcome = image.issue(&log.volume, segment, layer, &mut writes).await;
                if outcome.is_err() {
                    break 'offered;
                }
            }
        }
        // All must have ended before anything is said of the segment.
        for write in writes {
            outcome = outcome.and(write.await);
        }
        outcome.map_err(|error| failed(log, segment, &error))?;
        written = offered;
        part.progress.written.open(written);
    }
    turn(log, part, segment, layers).await?;
    seal(log, part, segment, places).await
}

/// Completes when the step may be done, with how many may.
async fn turn(log: &Log, part: &LayersPart, segment: &Segment, step: u32) -> Result<u32, Reason> {
    std::future::poll_fn(|context| {
        // The waker is left first: a caller that leaves after the look wakes.
        let open = part.gate().is_open_or_wake(step, context.waker());
        let closing = log.closing.get().then_some(Reason::Busy("the store is closing"));
        let broken = || segment.broken().or_else(|| log.volume.refuses_writes());
        match closing.or_else(|| part.job.stopped()).or_else(broken) {
            Some(reason) => Poll::Ready(Err(reason)),
            None if open => Poll::Ready(Ok(part.gate().opened())),
            None => Poll::Pending,
        }
    })
    .await
}

/// A write or flush failed: the segment takes nothing any more.
fn failed(log: &Log, segment: &Rc<Segment>, error: &IoError) -> Reason {
    log.give_up(segment, error);
    match decide(error, Stage::PutData) {
        Action::LatchReadOnly => log.volume.latch(error),
        _ => fault(error),
    }
}

/// Makes the records of what has been written.
async fn seal(
    log: &Rc<Log>,
    part: &LayersPart,
    segment: &Rc<Segment>,
    places: &[Place],
) -> Result<Vec<u32>, Reason> {
    let durable = part.job.request.durability == Durability::Durable;
    if durable {
        // No header is durable before what it describes.
        log.volume.driver.flush(segment.file).await.map_err(|error| failed(log, segment, &error))?;
    }
    // A delete waits from here on, and what it has met by now is not written.
    let _write = log.writes.begin();
    // While a task looks for the next segment, the one before it is not settled.
    let turn = log.space.roll_turn().await;
    // Memory before places: what has one and waits for the other would hold back everything behind it.
    let staging = log.volume.stage(places.iter().map(|place| place.header_bytes).sum()).await;
    let staging = staging.map_err(|_| Reason::Busy("the executor has no free memory for the write"))?;
    let headers = place_headers(log, part, segment, places)?;
    drop(turn);
    let records = write_headers(log, segment, headers, staging).await?;
    if durable && let Some((last, _)) = records.last() {
        log.make_durable(last).await?;
    }
    let mut lost = Vec::new();
    for (place, (written, expires)) in places.iter().zip(&records) {
        let piece = Piece::new(place.run.clone(), written.clone(), *expires);
        match publish(&log.volume, &part.job, &place.run, &[piece]) {
            Ok(some) => lost.extend(some.into_iter().map(|block| place.run.start + u32::from(block))),
            Err(Reason::Deleted) => lost.extend(place.run.clone()),
            Err(reason) => return Err(reason),
        }
    }
    Ok(lost)
}

/// Headers that have their places, and when each record expires.
struct Headers {
    images: Vec<(RecordImage, u32)>,
    outcome: Result<(), Reason>,
}

/// Gives the records their sequences, and the shard the segment to append to.
fn place_headers(
    log: &Rc<Log>,
    part: &LayersPart,
    segment: &Rc<Segment>,
    places: &[Place],
) -> Result<Headers, Reason> {
    if let Some(reason) = part.job.stopped() {
        return Err(reason);
    }
    if log.closing.get() {
        return Err(Reason::Busy("the store is closing"));
    }
    if places.iter().any(|place| !part.job.is_claimed(&place.run)) {
        return Err(Reason::Deleted);
    }
    let (digests, chunks) = (part.progress.digests(), part.chunks());
    let mut drafts = Vec::new();
    for place in places {
        let of = place.run.start as usize * chunks..place.run.end as usize * chunks;
        let digests = digests.get(of).ok_or(Reason::Bug("a chunk lies outside the memory of its put"))?;
        drafts.push(draft(&part.job, &place.run, digests)?);
    }
    segment.first_sequence.set(log.volume.sequence.get());
    log.append_to(segment);
    let (mut images, mut outcome) = (Vec::new(), Ok(()));
    for (place, (draft, expires)) in places.iter().zip(&drafts) {
        match log.try_place(segment, draft) {
            Ok(Some(image)) => {
                let end = image.offset + image.headers.len() as u64;
                images.push((image, *expires));
                if end == place.at {
                    continue;
                }
                outcome = Err(Reason::Bug("a record and its payload were written at different positions"));
            }
            Ok(None) => {
                // The header of a new segment may have failed meanwhile.
                let fits = || Reason::Bug("a record is larger than the space reserved for it");
                outcome = Err(segment.broken().unwrap_or_else(fits));
            }
            Err(reason) => outcome = Err(reason),
        }
        break;
    }
    Ok(Headers { images, outcome })
}

/// Writes the headers. Of each record, where it is and when it expires.
async fn write_headers(
    log: &Rc<Log>,
    segment: &Rc<Segment>,
    headers: Headers,
    mut staging: BufMut,
) -> Result<Vec<(Written, u32)>, Reason> {
    let Headers { images, mut outcome } = headers;
    let mut writes = Vec::new();
    for (image, _) in images.iter().filter(|_| outcome.is_ok()) {
        let Some(mut part) = staging.split_to(image.headers.len()) else { break };
        part.copy_in(0, &image.headers);
        writes.push(log.volume.driver.write(Class::Put, segment.file, image.offset, part, false));
    }
    if outcome.is_ok() && writes.len() < images.len() {
        outcome = Err(Reason::Bug("a header is longer than the space reserved for it"));
    }
    for write in writes {
        if let Err(error) = write.await {
            outcome = Err(failed(log, segment, &error));
        }
    }
    if let Err(reason) = &outcome {
        // A place without a record: nothing may follow it.
        segment.break_off(reason.clone());
        log.abandon(segment);
    }
    images.iter().for_each(|(image, _)| segment.wrote(image.offset));
    outcome?;
    Ok(images.into_iter().map(|(image, expires)| (image.written, expires)).collect())
}

/// Leaves the segment to the log that appends to it now; or, if it holds nothing, to the next that needs one. The header of a new file may not be durable
/// yet: known to be free, it would look as if it had been lost.
async fn put_away(space: &Space, segment: Rc<Segment>) {
    segment.quiet().await;
    if segment.broken().is_some() || segment.state.get() != SegmentState::Open {
        return;
    }
    if !segment.tail.borrow().entries.is_empty() {
        return;
    }
    if segment.generation.get() > 1 {
        segment.state.set(SegmentState::Free);
    } else {
        space.parked.borrow_mut().push(segment);
    }
}
