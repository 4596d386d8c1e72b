//! Where an engine has the blocks of a column: in pages of its own, as it laid them out.
//!
//! A block has as many pages as its tokens fill, each in a slot of any number. What a page has of a part of the block (the keys of a layer, for
//! example) are rows that lie apart by strides ([`SlotShape`]): so halves of keys and values, ranges of heads, and any order of dimensions that
//! strides can say are described without a copy.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use kvarts_layout::BlockShape;

use crate::device::Memory;
use crate::device::slots::SlotShape;
use crate::error::LandError;

/// Rows that are compared, at most, to see that no two share a byte.
const ROWS_MAX: u64 = 1 << 20;

/// Where the pages of one part lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagePart {
    /// In which of the memories.
    pub memory: u32,
    /// The rows of a page; `ring_stride` and `ring_first` say where they lie in a chunk of the block, of which each page has an equal part.
    pub rows: SlotShape,
}

/// Blocks and their pages. Cheap to clone. Checked when it is made: every row of every page is inside its memory, and no two share a byte.
#[derive(Clone, Debug)]
pub struct Pages {
    shape: Arc<BlockShape>,
    memories: Arc<[Memory]>,
    parts: Arc<[PagePart]>,
    per_block: u32,
    slots: Arc<[u32]>,
    largest: u32,
    is_whole: bool,
}

fn wrong(what: impl Into<String>) -> LandError {
    LandError::Request(format!("pages: {}", what.into()))
}

impl Pages {
    /// Of each part of a block, counted through all layers, where its pages lie; and the slots of all pages, `per_block` for each block, in the
    /// order of its tokens.
    pub fn new(
        shape: &Arc<BlockShape>,
        memories: Vec<Memory>,
        parts: Vec<PagePart>,
        per_block: u32,
        slots: Vec<u32>,
    ) -> Result<Self, LandError> {
        let chunks: Vec<u64> =
            shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
        if chunks.len() != parts.len() {
            return Err(wrong(format!(
                "{} parts were given, but a block has {} parts",
                parts.len(),
                chunks.len()
            )));
        }
        let largest = slots.iter().copied().max().ok_or_else(|| wrong("none"))?;
        if per_block == 0 || !slots.len().is_multiple_of(per_block as usize) {
            return Err(wrong(format!(
                "{} slots were given, which is not a multiple of the {per_block} pages \
                of a block",
                slots.len()
            )));
        }
        if slots.iter().collect::<BTreeSet<_>>().len() != slots.len() {
            return Err(wrong("a slot was given twice"));
        }
        for (part, bytes) in parts.iter().zip(&chunks) {
            let rows = &part.rows;
            let (ring, pool) =
                rows.reach().filter(|_| rows.bytes() > 0).ok_or_else(|| wrong("a page has no rows"))?;
            if !bytes.is_multiple_of(u64::from(per_block)) || rows.ring_stride != bytes / u64::from(per_block)
            {
                return Err(wrong(format!(
                    "a chunk has {bytes} bytes, which is not {per_block} pages of {} bytes",
                    rows.ring_stride
                )));
            }
            if ring > rows.ring_stride {
                return Err(wrong("the rows lie outside their page of the chunk"));
            }
            if rows.pool_stride == 0 && largest > 0 {
                return Err(wrong("the distance between slots is 0 bytes"));
            }
            let memory = memories
                .get(part.memory as usize)
                .ok_or_else(|| wrong("the memory of a part was not given"))?;
            let last = u64::from(largest)
                .checked_mul(rows.pool_stride)
                .and_then(|at| at.checked_add(rows.pool_base));
            if last.and_then(|at| at.checked_add(pool)).is_none_or(|end| end > memory.len()) {
                return Err(wrong(format!(
                    "slot {largest} lies outside its memory of {} bytes",
                    memory.len()
                )));
            }
        }
        let rows = parts.iter().fold(0u64, |rows, part| rows.saturating_add(part.rows.row_count()));
        if rows > ROWS_MAX {
            return Err(wrong(format!("a slot has {rows} rows, but the limit is {ROWS_MAX}")));
        }
        apart(&memories, &parts, largest)?;
        let is_whole = parts.iter().all(|part| is_whole(&part.rows));
        Ok(Self {
            is_whole,
            shape: Arc::clone(shape),
            memories: memories.into(),
            parts: parts.into(),
            per_block,
            slots: slots.into(),
            largest,
        })
    }

    /// The shape of a block.
    pub fn shape(&self) -> &Arc<BlockShape> {
        &self.shape
    }

    /// Blocks that have pages.
    pub fn blocks(&self) -> u32 {
        self.slots.len() as u32 / self.per_block
    }

    /// Whether rows have every byte of a block: then blocks can be saved from here.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// The memories that they lie in.
    pub(crate) fn memories(&self) -> &[Memory] {
        &self.memories
    }

    pub(crate) fn per_block(&self) -> u32 {
        self.per_block
    }

    pub(crate) fn slots(&self) -> &[u32] {
        &self.slots
    }

    pub(crate) fn largest(&self) -> u32 {
        self.largest
    }

    /// Where the pages of a part lie, and in which memory.
    pub(crate) fn part(&self, part: u32) -> Option<(&Memory, SlotShape)> {
        let part = self.parts.get(part as usize)?;
        Some((self.memories.get(part.memory as usize)?, part.rows))
    }

    /// The parts of a layer, with the bytes of a chunk of each.
    pub(crate) fn parts_of(&self, layer: u32) -> impl Iterator<Item = (u32, u64)> + '_ {
        let layers = self.shape.layers();
        let before: usize = layers.iter().take(layer as usize).map(|layer| layer.chunks.len()).sum();
        let chunks = layers.get(layer as usize).into_iter().flat_map(|layer| &layer.chunks);
        (before as u32..).zip(chunks.map(|chunk| chunk.bytes))
    }
}

/// Whether rows have every byte of their page of a chunk, each once.
fn is_whole(rows: &SlotShape) -> bool {
    let row = |outer: u64, inner: u64| outer * rows.outer.ring + inner * rows.inner.ring;
    let inner = |outer| (0..u64::from(rows.inner.count)).map(move |inner| row(outer, inner));
    let starts: BTreeSet<u64> = (0..u64::from(rows.outer.count)).flat_map(inner).collect();
    // As many bytes as there are, from the first on, and no two rows nearer to each other than one is long.
    let apart = starts.iter().zip(starts.iter().skip(1)).all(|(one, next)| next - one >= rows.row_bytes);
    rows.ring_first == 0
        && rows.bytes() == rows.ring_stride
        && starts.len() as u64 == rows.row_count()
        && apart
}

/// Refuses pages of which two rows share a byte. Memories are compared by their addresses: an engine may give one of them twice.
///
/// Each row stands once for every slot, a stride apart. Rows of one stride are compared slot by slot, also where the rows of a page lie further
/// apart than slots do (heads that have a pool of their own each); those of different strides by all that they cover.
fn apart(memories: &[Memory], parts: &[PagePart], largest: u32) -> Result<(), LandError> {
    let shared = || wrong("two rows overlap in memory");
    let mut by_stride: BTreeMap<u64, Vec<Range<u64>>> = BTreeMap::new();
    for part in parts {
        let base = memories.get(part.memory as usize).map_or(0, |memory| memory.base());
        let (rows, start) = (&part.rows, base.saturating_add(part.rows.pool_base));
        let own = by_stride.entry(if largest == 0 { 0 } else { rows.pool_stride }).or_default();
        for outer in 0..u64::from(rows.outer.count) {
            for inner in 0..u64::from(rows.inner.count) {
                let at = start + outer * rows.outer.pool + inner * rows.inner.pool;
                own.push(at..at + rows.row_bytes);
            }
        }
    }
    let is_apart = by_stride.iter().all(|(&stride, rows)| are_apart(rows, stride, largest.into()));
    let mut covered: Vec<(Range<u64>, u64)> = Vec::new();
    for (&stride, rows) in &by_stride {
        let reach = u64::from(largest).saturating_mul(stride);
        covered.extend(rows.iter().map(|row| (row.start..row.end.saturating_add(reach), stride)));
    }
    covered.sort_by_key(|(span, _)| span.start);
    let mut ends: BTreeMap<u64, u64> = BTreeMap::new();
    let is_clear = covered.iter().all(|(span, stride)| {
        let is_clear = ends.iter().all(|(other, end)| other == stride || *end <= span.start);
        let end = ends.entry(*stride).or_default();
        *end = span.end.max(*end);
        is_clear
    });
    if is_apart && is_clear { Ok(()) } else { Err(shared()) }
}

/// Whether no two of these rows share a byte, each of which stands at `0..=largest` strides behind where it begins.
fn are_apart(rows: &[Range<u64>], stride: u64, largest: u64) -> bool {
    if stride == 0 {
        let mut sorted: Vec<_> = rows.iter().collect();
        sorted.sort_by_key(|row| row.start);
        return sorted
            .windows(2)
            .all(|two| two.first().zip(two.get(1)).is_none_or(|(one, next)| one.end <= next.start));
    }
    // Where in a stride each begins and ends, and in which stride; one that goes over the end of a stride is two.
    let mut pieces: Vec<(Range<u64>, u64)> = Vec::with_capacity(rows.len());
    for row in rows {
        let (from, turn, len) = (row.start % stride, row.start / stride, row.end - row.start);
        if len > stride {
            return false;
        }
        pieces.push((from..stride.min(from + len), turn));
        if from + len > stride {
            pieces.push((0..from + len - stride, turn + 1));
        }
    }
    pieces.sort_by_key(|(piece, _)| piece.start);
    // Those that go on where the next begins: where they end, and how many of them are in each stride.
    let mut open: BTreeSet<(u64, u64, usize)> = BTreeSet::new();
    let mut turns: BTreeMap<u64, usize> = BTreeMap::new();
    for (at, (piece, turn)) in pieces.iter().enumerate() {
        while let Some(&(end, over, _)) = open.first()
            && end <= piece.start
        {
            open.pop_first();
            if let Some(count) = turns.get_mut(&over) {
                *count -= 1;
                if *count == 0 {
                    turns.remove(&over);
                }
            }
        }
        if turns.range(turn.saturating_sub(largest)..=turn.saturating_add(largest)).next().is_some() {
            return false;
        }
        open.insert((piece.end, *turn, at));
        *turns.entry(*turn).or_default() += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::emulated::{Emulated, Model};
    use crate::device::slots::Rows;
    use kvarts_layout::{ChunkShape, LayerShape};
    use proptest::prelude::*;

    fn shape() -> Arc<BlockShape> {
        let chunk = ChunkShape { bytes: 256, align: 1 };
        Arc::new(BlockShape::new(vec![LayerShape { layer: 0, chunks: vec![chunk; 2] }]).unwrap())
    }

    fn part(rows: SlotShape) -> PagePart {
        PagePart { memory: 0, rows }
    }

    /// Pages of four tokens with two heads of eight bytes, four pages a block.
    fn pages(bytes: u64, parts: [SlotShape; 2], slots: &[u32]) -> Result<Pages, LandError> {
        let memory = Emulated::new(Model::default()).allocate(bytes).unwrap();
        Pages::new(&shape(), vec![memory], parts.map(part).to_vec(), 4, slots.to_vec())
    }

    #[test]
    fn layouts_of_engines_are_taken_and_rows_that_share_bytes_are_not() {
        let slots = [4, 0, 2, 1];
        let whole = |base, stride| SlotShape::whole(64, base, stride);
        // Keys and values in halves of the memory, one behind the other in each slot, and between each other token by token.
        assert!(pages(640, [whole(0, 64), whole(320, 64)], &slots).is_ok());
        assert!(pages(640, [whole(0, 128), whole(64, 128)], &slots).is_ok());
        let between = |base| SlotShape {
            outer: Rows { count: 4, ring: 16, pool: 32 },
            row_bytes: 16,
            ..SlotShape::whole(64, base, 128)
        };
        assert!(pages(640, [between(0), between(16)], &slots).is_ok());
        // One head of two, into pages that have heads before tokens.
        let head = |base| SlotShape {
            ring_first: 8,
            outer: Rows { count: 4, ring: 16, pool: 8 },
            row_bytes: 8,
            ..SlotShape::whole(64, base, 64)
        };
        assert!(pages(320, [head(0), head(32)], &slots).is_ok());
        // Each head in a pool of its own: the rows of a page lie further apart than slots.
        let apart = |base, stride| SlotShape {
            outer: Rows { count: 2, ring: 32, pool: 5 * 32 },
            row_bytes: 32,
            ..SlotShape::whole(64, base, stride)
        };
        assert!(pages(640, [apart(0, 32), apart(320, 32)], &slots).unwrap().is_whole());
        // What has every byte of a block, and what has not.
        let is_whole = |parts| pages(640, parts, &slots).unwrap().is_whole();
        assert!(is_whole([whole(0, 128), whole(64, 128)]) && is_whole([between(0), between(16)]));
        assert!(!pages(320, [head(0), head(32)], &slots).unwrap().is_whole());
        let twice = SlotShape { outer: Rows { count: 2, ring: 0, pool: 32 }, row_bytes: 32, ..whole(0, 128) };
        assert!(!is_whole([twice, whole(64, 128)]), "the first half twice, the second never");
        let refused = |bytes, parts, slots: &[u32], why: &str| {
            let refused = pages(bytes, parts, slots).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        };
        refused(639, [whole(0, 128), whole(64, 128)], &slots, "lies outside its memory");
        refused(640, [whole(0, 128), whole(63, 128)], &slots, "overlap in memory");
        refused(640, [whole(0, 64), whole(319, 64)], &slots, "overlap in memory");
        refused(640, [whole(0, 64), whole(64, 96)], &slots, "overlap in memory");
        refused(640, [between(0), between(8)], &slots, "overlap in memory");
        refused(640, [whole(0, 63), whole(320, 64)], &slots, "overlap in memory");
        refused(640, [apart(0, 32), apart(32, 32)], &slots, "overlap in memory");
        refused(640, [whole(0, 128), whole(64, 128)], &[1, 2, 3, 1], "twice");
        refused(640, [whole(0, 128), whole(64, 128)], &[1, 2, 3], "slots were given");
        refused(
            640,
            [SlotShape { ring_first: 1, ..whole(0, 128) }, whole(64, 128)],
            &slots,
            "outside their page",
        );
        refused(640, [SlotShape::whole(32, 0, 128), whole(64, 128)], &slots, "not 4 pages");
        refused(
            640,
            [SlotShape { pool_stride: 0, ..whole(0, 128) }, whole(64, 128)],
            &slots,
            "distance between slots",
        );
        let many = Rows { count: u32::MAX, ring: 0, pool: 0 };
        let endless = SlotShape { outer: many, inner: many, row_bytes: 1, ..whole(0, 128) };
        refused(640, [endless, endless], &slots, "rows, but the limit");
        refused(
            640,
            [SlotShape { outer: Rows { count: 0, ..Rows::ONE }, ..whole(0, 128) }, whole(64, 128)],
            &slots,
            "rows",
        );
    }

    proptest! {
        /// Against every byte of every row.
        #[test]
        fn rows_of_one_stride_are_apart_where_no_byte_is_in_two(
            rows in prop::collection::vec((0u64..60, 1u64..7), 1..6), stride in 1u64..9, largest in 1u64..4,
        ) {
            let rows: Vec<Range<u64>> = rows.into_iter().map(|(at, len)| at..at + len).collect();
            let mut seen = BTreeSet::new();
            let mut all = rows.iter().flat_map(|row| (0..=largest).flat_map(move |slot| {
                (row.start..row.end).map(move |byte| byte + slot * stride)
            }));
            prop_assert_eq!(are_apart(&rows, stride, largest), all.all(|byte| seen.insert(byte)));
        }
    }
}
