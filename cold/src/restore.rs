//! Packs into blocks: ranges that are near each other are read as one, several at a time, into the memory that the caller has for
//! them; every byte is proven by the digest of its chunk before it is handed on.
//!
//! Packs hold whole blocks. Blocks come in the order in which they are asked for; where only some layers are wanted, only
//! their part of each block is read.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::{Stream, StreamExt};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_layout::BlockShape;
use tokio::sync::watch;

use crate::error::ColdError;
use crate::format::{PackIndex, names};
use crate::places::Places;
use crate::tier::{Found, Tier};

/// How blocks are fetched.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Ranges that are read at once. With the bytes of a range this bounds memory.
    pub parallel: usize,
    /// The most bytes of a range of more than one block. One of some layers of a block has at most that many, and a layer.
    pub range_bytes: u64,
    /// Blocks that lie no further apart are read as one range...
    pub gap_bytes: u64,
    /// ...if what is read beside what is wanted stays below this part of it, in thousandths.
    pub over_read: u64,
    /// A range of which nothing comes for longer than this many times what the first byte takes usually is asked for once more.
    pub late: u32,
    /// But never sooner than this.
    pub late_least: Duration,
    /// Large blocks are read some layers at a time: the first layers of all blocks come before the last ones of any.
    pub by_layers: bool,
    /// Later layers ask for a turn once some first layers are here, not at once.
    pub later_wait: bool,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            parallel: 8,
            range_bytes: 8 << 20,
            gap_bytes: 256 << 10,
            over_read: 125,
            late: 3,
            late_least: Duration::from_millis(200),
            by_layers: false,
            later_wait: false,
        }
    }
}

/// A restore that is long enough has this number of ranges for each of those at once...
const TURNS: u64 = 6;
/// ...but none is cut shorter than this: a request has a price.
const RANGE_LEAST: u64 = 2 << 20;

impl FetchOptions {
    /// For a restore of this many bytes through a tier that reads `at_once` ranges at once. All that are under way end at about the same
    /// time where they share the rate of a link, and nothing is stored before. So the ranges of a short restore are short.
    pub fn for_restore(bytes: u64, at_once: usize) -> Self {
        let standard = Self::default();
        let at_once = at_once.max(1) as u64;
        let each = bytes / at_once.saturating_mul(TURNS);
        let range_bytes = each.clamp(RANGE_LEAST, standard.range_bytes);
        // Where there are turns for all of them, waiting would only cost the time to a first byte once more.
        let later_wait = bytes >= range_bytes.saturating_mul(at_once);
        Self { range_bytes, later_wait, ..standard }
    }
}

/// A block, or some layers of one, as a part of a range.
#[derive(Clone, Debug)]
pub struct Part {
    /// Which block of the request.
    pub ordinal: usize,
    /// Which run of the pack.
    pub run: u32,
    /// Which block of the run.
    pub block: u32,
    /// Which layers of the shape.
    pub layers: Range<u32>,
    /// Which bytes of the pack.
    pub range: Range<u64>,
}

/// One range of one pack.
#[derive(Clone, Debug)]
pub struct Fetch {
    /// The pack.
    pub index: Arc<PackIndex>,
    /// Its bytes.
    pub range: Range<u64>,
    /// What is wanted of them, from front to back.
    pub parts: Vec<Part>,
}

impl Fetch {
    /// Bytes that are read beside what is wanted.
    pub fn over_read(&self) -> u64 {
        let wanted: u64 = self.parts.iter().map(|part| part.range.end - part.range.start).sum();
        (self.range.end - self.range.start).saturating_sub(wanted)
    }

    fn is_of_first_layers(&self) -> bool {
        self.parts.iter().all(|part| part.layers.start == 0)
    }
}

/// Where some layers of a block lie in it.
fn of_layers(shape: &BlockShape, layers: &Range<u32>) -> Option<Range<u64>> {
    let bytes = |to: u32| -> Option<u64> {
        let layers = shape.layers().get(..to as usize)?;
        Some(layers.iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).sum())
    };
    (layers.start < layers.end).then_some(())?;
    Some(bytes(layers.start)?..bytes(layers.end)?)
}

/// Which ranges are read for these blocks, in their order. `layers` counts those of the shape; all if none are named.
pub fn plan(wanted: &[(usize, Found)], layers: Option<&Range<u32>>, options: &FetchOptions) -> Vec<Fetch> {
    let mut fetches: Vec<Fetch> = Vec::new();
    for (ordinal, found) in wanted {
        let Some(run) = found.run() else { continue };
        let all = 0..run.shape.layers().len() as u32;
        let layers = layers.cloned().unwrap_or(all);
        let Some(within) = of_layers(&run.shape, &layers) else { continue };
        let at = run.block_at(found.place.block);
        let range = at.saturating_add(within.start)..at.saturating_add(within.end);
        let (run, block) = (found.place.run, found.place.block);
        let part = Part { ordinal: *ordinal, run, block, layers, range };
        match fetches.last_mut() {
            Some(last) if joins(last, found, &part.range, options) => {
                last.range.end = part.range.end;
                last.parts.push(part);
            }
            _ => {
                let index = Arc::clone(&found.index);
                fetches.push(Fetch { index, range: part.range.clone(), parts: vec![part] });
            }
        }
    }
    fetches
}

/// Bytes of the first stretch of layers: a shorter one would be a request for little.
const FIRST_BAND: u64 = 1 << 20;
/// Each further stretch is as long as the one before, times this.
const BAND_GROWTH: u64 = 4;

/// The stretches of layers in which a block is read whose layers are wanted one after the other. The first is short, so that it
/// comes soon; there are few, because each is a request, but those of more bytes than `range_bytes` are cut.
pub fn bands(shape: &BlockShape, range_bytes: u64) -> Vec<Range<u32>> {
    let (mut found, mut most, mut bytes): (Vec<Range<u32>>, u64, u64) = (Vec::new(), FIRST_BAND, 0);
    let mut left = shape.block_bytes();
    let mut begin = 0;
    for (layer, shape) in (0u32..).zip(shape.layers()) {
        bytes = bytes.saturating_add(shape.bytes());
        // What is left after this one is not worth a request of its own unless it is as long.
        if bytes >= most && left.saturating_sub(bytes) >= bytes {
            found.push(begin..layer + 1);
            left = left.saturating_sub(bytes);
            (begin, bytes, most) = (layer + 1, 0, bytes.saturating_mul(BAND_GROWTH));
        }
    }
    let end = shape.layers().len() as u32;
    if begin < end {
        found.push(begin..end);
    }
    // A block of one band is read whole.
    match found.len() {
        0 | 1 => found,
        _ => found.iter().flat_map(|band| cut(shape, band, range_bytes)).collect(),
    }
}

/// A stretch of layers in as many pieces as it takes for each to have `most` bytes at most. Layers stay whole, so a piece may have
/// one more.
fn cut(shape: &BlockShape, band: &Range<u32>, most: u64) -> Vec<Range<u32>> {
    let bytes = of_layers(shape, band).map_or(0, |range| range.end - range.start);
    let pieces = bytes.div_ceil(most.max(1)).clamp(1, u64::from(band.end - band.start)) as u32;
    let layers = band.end - band.start;
    let edge = |piece: u32| band.start + (u64::from(layers) * u64::from(piece) / u64::from(pieces)) as u32;
    (0..pieces).map(|piece| edge(piece)..edge(piece + 1)).collect()
}

/// Which ranges are read for all layers of these blocks, in the order in which they are wanted.
pub fn plan_all(wanted: &[(usize, Found)], options: &FetchOptions) -> Vec<Fetch> {
    let shape = wanted.first().and_then(|(_, found)| found.run()).map(|run| &run.shape);
    let bands = shape
        .filter(|_| options.by_layers)
        .map(|shape| bands(shape, options.range_bytes))
        .unwrap_or_default();
    match bands.len() {
        0 | 1 => plan(wanted, None, options),
        _ => bands.iter().flat_map(|band| plan(wanted, Some(band), options)).collect(),
    }
}

fn joins(last: &Fetch, found: &Found, range: &Range<u64>, options: &FetchOptions) -> bool {
    let Some(gap) = range.start.checked_sub(last.range.end) else { return false };
    let whole = range.end.saturating_sub(last.range.start);
    let over_read = last.over_read().saturating_add(gap);
    let wanted = whole.saturating_sub(over_read);
    last.index.id() == found.index.id()
        && gap <= options.gap_bytes
        && whole <= options.range_bytes
        && over_read.saturating_mul(1000) <= wanted.saturating_mul(options.over_read)
}

/// Why the tier does not give a block. It is a miss, whatever it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Lost {
    /// It could not be read.
    Unread(ColdError),
    /// It was read twice, and was not what was put either time.
    Damaged,
    /// There is no memory for it.
    NoMemory,
}

/// Some layers of a block, or all, verified; or why not.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// What it is.
    pub part: Part,
    /// Its pack.
    pub index: Arc<PackIndex>,
    /// Its bytes, in canonical order: all of the memory that the caller gave for it.
    pub bytes: Result<SharedBuf, Lost>,
}

/// What a restore cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fetched {
    /// Ranges that were planned.
    pub ranges: u64,
    /// Bytes of blocks that were delivered.
    pub bytes: u64,
    /// Bytes that were read beside them.
    pub over_read_bytes: u64,
    /// Parts that did not arrive.
    pub lost: u64,
}

impl Fetched {
    /// What these ranges will cost, with nothing delivered yet.
    pub fn planned(fetches: &[Fetch]) -> Self {
        let mut planned = Self::default();
        planned.plan(fetches);
        planned
    }

    /// Adds what these ranges will cost.
    pub fn plan(&mut self, fetches: &[Fetch]) {
        self.ranges += fetches.len() as u64;
        self.over_read_bytes += fetches.iter().map(Fetch::over_read).sum::<u64>();
    }

    /// Counts what arrived.
    pub fn count(&mut self, arrived: &Arrived) {
        match &arrived.bytes {
            Ok(memory) => self.bytes += memory.len() as u64,
            Err(_) => self.lost += 1,
        }
    }
}

/// Reads ranges, several at a time, and hands on what each holds, in their order. `place` gives memory of the length of a part.
///
/// Where later layers wait ([`FetchOptions::later_wait`]), the first layers of other restores that began with this one come before
/// them, and behind those the blocks of one restore become whole before the next one's.
pub fn arriving<'a>(
    tier: &'a Tier,
    fetches: Vec<Fetch>,
    options: &'a FetchOptions,
    place: impl Fn(&Part) -> Option<SharedBuf> + 'a,
) -> impl Stream<Item = Vec<Arrived>> + 'a {
    let waits = options.later_wait && fetches.iter().any(Fetch::is_of_first_layers);
    let (here, _) = watch::channel(!waits);
    // Memory is asked for when the turn of a range has come.
    let reads = fetches.into_iter().map(move |fetch| {
        let places = fetch.parts.iter().map(&place).collect();
        let (is_first, here) = (fetch.is_of_first_layers(), here.clone());
        async move {
            if !is_first {
                // Its sender lives here.
                // ends: the first ranges are here, each in the time of its request (`patience`)
                let _ = here.subscribe().wait_for(|is_here| *is_here).await;
            }
            let arrived = one(tier, fetch, places, options).await;
            if is_first {
                here.send_replace(true);
            }
            arrived
        }
    });
    futures_util::stream::iter(reads).buffered(options.parallel.max(1))
}

/// The same to the end, one part after the other, each in memory of its own.
pub async fn fetch(
    tier: &Tier,
    fetches: Vec<Fetch>,
    options: &FetchOptions,
    mut each: impl FnMut(Arrived),
) -> Fetched {
    let mut fetched = Fetched::planned(&fetches);
    let place = |part: &Part| {
        let bytes = usize::try_from(part.range.end.checked_sub(part.range.start)?).ok()?;
        BufMut::zeroed(bytes).ok()?.share().slice(0, bytes)
    };
    let mut arriving = std::pin::pin!(arriving(tier, fetches, options, place));
    // ends: the time of each range's request (`patience`)
    while let Some(parts) = arriving.next().await {
        for arrived in parts {
            fetched.count(&arrived);
            each(arrived);
        }
    }
    fetched
}

/// Reads one range and verifies its parts. What is not right is read once more by itself.
async fn one(
    tier: &Tier,
    fetch: Fetch,
    places: Vec<Option<SharedBuf>>,
    options: &FetchOptions,
) -> Vec<Arrived> {
    let Fetch { index, range, parts } = fetch;
    let before = |part: &Part| part.range.start.saturating_sub(range.start);
    let known = parts.iter().zip(&places).filter_map(|(part, place)| Some((before(part), place.clone()?)));
    let into = Places::new(range.end.saturating_sub(range.start), known.collect());
    let turn = tier.access().turn().await;
    let read = ranged(tier, &index, range, &into, options).await;
    drop((turn, into));
    let mut arrived = Vec::with_capacity(parts.len());
    for (part, place) in parts.into_iter().zip(places) {
        let bytes = match (place, &read) {
            (None, _) => Err(Lost::NoMemory),
            (_, Err(error)) => Err(Lost::Unread(error.clone())),
            (Some(memory), Ok(())) if holds(&index, &part, &memory) => Ok(memory),
            (Some(memory), Ok(())) => again(tier, &index, &part, &memory, options).await.map(|()| memory),
        };
        arrived.push(Arrived { part, index: Arc::clone(&index), bytes });
    }
    arrived
}

async fn again(
    tier: &Tier,
    index: &PackIndex,
    part: &Part,
    memory: &SharedBuf,
    options: &FetchOptions,
) -> Result<(), Lost> {
    if tier.is_struck(index.id()) {
        return Err(Lost::Damaged);
    }
    let into = Places::whole(memory.clone());
    ranged(tier, index, part.range.clone(), &into, options).await.map_err(Lost::Unread)?;
    if holds(index, part, memory) {
        return Ok(());
    }
    tier.strike(index.id());
    Err(Lost::Damaged)
}

/// Whether the bytes of a part are those that its digests are of.
fn holds(index: &PackIndex, part: &Part, memory: &SharedBuf) -> bool {
    chunks_hold(index, part, memory).unwrap_or(false)
}

fn chunks_hold(index: &PackIndex, part: &Part, memory: &SharedBuf) -> Option<bool> {
    let run = index.run(part.run)?;
    let digests = &run.block(part.block)?.digests;
    let layers = run.shape.layers();
    let before = layers.get(..part.layers.start as usize)?.iter().map(|layer| layer.chunks.len()).sum();
    let wanted = layers.get(part.layers.start as usize..part.layers.end as usize)?;
    let chunks = wanted.iter().flat_map(|layer| &layer.chunks);
    let (mut at, mut digests) = (0usize, digests.iter().skip(before));
    for chunk in chunks {
        let bytes = usize::try_from(chunk.bytes).ok()?;
        let end = at.checked_add(bytes).filter(|end| *end <= memory.len())?;
        if memory.crc32(at, bytes) != *digests.next()? {
            return Some(false);
        }
        at = end;
    }
    Some(at == memory.len())
}

/// Reads a range; once nothing more of it comes, asks for it a second time and takes whichever is whole first.
async fn ranged(
    tier: &Tier,
    index: &PackIndex,
    range: Range<u64>,
    into: &Places,
    options: &FetchOptions,
) -> Result<(), ColdError> {
    let access = tier.access();
    let name = names::pack(index.namespace_id(), index.id());
    let (begun, first_byte) = (access.time().now(), OnceLock::new());
    let mut asked = Box::pin(access.get_range(&name, range.clone(), into));
    let mut first = Box::pin(poll_fn(|context| {
        let polled = asked.as_mut().poll(context);
        if into.came() > 0 {
            first_byte.get_or_init(|| access.time().now().saturating_sub(begun));
        }
        polled
    }));
    let mut came = 0;
    let outcome = loop {
        let usual = tier.first_byte_time().unwrap_or_default().saturating_mul(options.late);
        let late = access.time().sleep(usual.max(options.late_least));
        first = match select(first, late).await {
            Either::Left((outcome, _)) => break outcome,
            Either::Right(((), first)) => first,
        };
        // What comes slowly because the bucket's rate is shared by many requests would not come sooner by one more.
        if into.came() > std::mem::replace(&mut came, into.came()) {
            continue;
        }
        let other = if access.may_hedge() { Places::of_own(into.bytes()).ok() } else { None };
        // ends: the time of the request (`patience`)
        let Some((other, memory)) = other else { break first.await };
        let second = Box::pin(access.get_range(&name, range, &other));
        break match select(first, second).await {
            Either::Left((Ok(()), _)) => Ok(()),
            Either::Right((Ok(()), first)) => {
                // It writes to the same places.
                drop(first);
                into.take_all(&memory);
                Ok(())
            }
            // ends: the time of the request (`patience`)
            Either::Left((Err(_), second)) => second.await.map(|()| into.take_all(&memory)),
            // ends: the time of the request (`patience`)
            Either::Right((Err(_), first)) => first.await,
        };
    };
    match (&outcome, first_byte.get()) {
        (Ok(()), Some(time)) => tier.measured(time.as_secs_f64()),
        // Collected, or lost: its index is of no use.
        (Err(ColdError::Bucket(_, crate::fault::Fault::Missing)), _) => tier.forget(index.id()),
        _ => {}
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::samples::TOKENS;
    use kvarts_layout::spec::{Kind, PartGeometry, Role};
    use kvarts_layout::{Coordinate, Geometry, Group};

    const MIB: u64 = 1 << 20;

    /// `layers` layers of this length.
    fn shape(layers: usize, bytes: u64) -> BlockShape {
        let role = Role::Stream { bytes: bytes / u64::from(TOKENS), tokens: 1 };
        let kind = Kind::new("kv").unwrap();
        let part = PartGeometry { kind, role, heads: 0, align: 1, group: Group(0) };
        let geometry = Geometry::new(&[part], &vec![vec![0]; layers]).unwrap();
        geometry.shape(Group(0), Coordinate::Replicated, TOKENS).unwrap()
    }

    #[test]
    fn later_layers_wait_only_where_there_are_more_ranges_than_turns() {
        let wait = [1, 8, 31, 32, 256].map(|mib| FetchOptions::for_restore(mib * MIB, 16).later_wait);
        assert_eq!(wait, [false, false, false, true, true]);
        assert!(!FetchOptions::default().later_wait);
    }

    #[test]
    fn ranges_of_a_short_restore_are_short() {
        let each = |mib: u64| FetchOptions::for_restore(mib * MIB, 16).range_bytes;
        assert_eq!([0, 64, 192, 384].map(each), [2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB]);
        assert_eq!([768, 1 << 20].map(each), [8 * MIB, 8 * MIB]);
        assert_eq!(FetchOptions::for_restore(u64::MAX, usize::MAX).range_bytes, 2 * MIB);
        assert_eq!(FetchOptions::for_restore(u64::MAX, 0).range_bytes, 8 * MIB);
    }

    #[test]
    fn a_stretch_is_cut_into_pieces_that_follow_each_other() {
        let (layers, each) = (7, 64);
        let shape = shape(layers as usize, each);
        for from in 0..layers {
            for most in 0..=each * u64::from(layers) + 1 {
                let pieces = cut(&shape, &(from..layers), most);
                assert_eq!((pieces[0].start, pieces[pieces.len() - 1].end), (from, layers));
                assert!(pieces.windows(2).all(|two| two[0].end == two[1].start));
                for piece in &pieces {
                    let bytes = of_layers(&shape, piece).map_or(0, |range| range.end - range.start);
                    assert!(bytes > 0 && (bytes == each || bytes < most + each), "{most}: {pieces:?}");
                }
                // No more requests than are needed.
                let least = (u64::from(layers - from) * each).div_ceil(most.max(1));
                assert!(pieces.len() as u64 <= least, "{most}: {pieces:?}");
            }
        }
    }

    #[test]
    fn what_comes_behind_the_first_layers_is_cut() {
        let large = shape(8, MIB);
        assert_eq!(bands(&large, 8 * MIB), [0..1, 1..8]);
        assert_eq!(bands(&large, 2 * MIB), [0..1, 1..2, 2..4, 4..6, 6..8]);
        // One request brings all of it.
        let small = shape(8, MIB / 8);
        assert_eq!(bands(&small, MIB / 4).len(), 1);
    }
}
