//! Plans against bytes: payloads are built by write plans, read back through read plans, and compared with what
//! every block was made of; and plans against the promises of their types.

use super::*;
use crate::arrange::tests::{layouts, run, shape_of, shapes};
use crate::arrange::{PAGE_BYTES, RunLayout};
use crate::shape::{BlockShape, Layout};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// What untouched memory holds.
const UNTOUCHED: u8 = 0xee;

/// The bytes of a chunk of the block with this ordinal in the prefix: like no other chunk's.
fn content(ordinal: u32, chunk: u32, len: u64) -> Vec<u8> {
    let mut state = (u64::from(ordinal) << 32 | u64::from(chunk)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// The memories of a placement, as bytes.
type Memories = BTreeMap<MemoryId, Vec<u8>>;

fn memories(placement: &Placement) -> Memories {
    placement.spans().iter().map(|span| (span.memory, vec![UNTOUCHED; span.end as usize + 64])).collect()
}

fn bytes_at(memories: &mut Memories, at: Address, len: u64) -> &mut [u8] {
    &mut memories.get_mut(&at.memory).unwrap()[at.offset as usize..(at.offset + len) as usize]
}

/// How a placement is made, apart from the shape.
#[derive(Clone, Debug)]
enum Form {
    Layers { base: u64 },
    Blocks { base: u64 },
    Paged { slack: u64, unit: u64, seed: u64, one_memory: bool },
}

fn forms() -> impl Strategy<Value = Form> {
    let base = prop_oneof![2 => Just(0u64), 1 => Just(4096), 1 => Just(512), 1 => 1u64..100];
    let unit = prop_oneof![3 => Just(4096u64), 1 => Just(512), 2 => Just(1)];
    prop_oneof![
        base.clone().prop_map(|base| Form::Layers { base }),
        base.prop_map(|base| Form::Blocks { base }),
        (0u64..3, unit, any::<u64>(), any::<bool>())
            .prop_map(|(slack, unit, seed, one_memory)| Form::Paged { slack, unit, seed, one_memory }),
    ]
}

fn place(form: &Form, shape: &BlockShape, blocks: u32) -> Placement {
    match *form {
        Form::Layers { base } => {
            Placement::layer_buffers(shape, blocks, |layer| Address { memory: MemoryId(layer), offset: base })
        }
        Form::Blocks { base } => {
            Placement::canonical_blocks(shape, blocks, Address { memory: MemoryId(9), offset: base })
        }
        Form::Paged { slack, unit, seed, one_memory } => {
            let (mut targets, mut base) = (Vec::new(), 0);
            for (index, chunk) in (0u32..).zip(shape.layers().iter().flat_map(|layer| &layer.chunks)) {
                let stride = chunk.bytes.div_ceil(unit) * unit + slack * unit;
                let memory = MemoryId(if one_memory { 0 } else { index });
                targets.push(PartTarget { memory, base, stride });
                if one_memory {
                    base += stride * u64::from(blocks) * 2;
                }
            }
            // Slots of a pool twice as large: some consecutive, some not, in no order.
            let mut slots: Vec<u32> = (0..blocks * 2).collect();
            if seed % 3 != 0 {
                slots.sort_by_key(|&slot| u64::from(slot / 2 + 1).wrapping_mul(seed | 1) >> 7);
            }
            slots.truncate(blocks as usize);
            Placement::paged(shape, &targets, slots)
        }
    }
    .unwrap()
}

fn options() -> impl Strategy<Value = ReadOptions> {
    let align = prop_oneof![3 => Just(4096u32), 2 => Just(512), 1 => Just(1), 1 => Just(64)];
    let gap = prop_oneof![2 => Just(0u32), 1 => 1u32..3000, 1 => Just(16 << 10)];
    (align, 1u32..6, 1u32..20, gap).prop_map(|(align, extent, region, max_gap)| {
        let unit = align.max(512);
        ReadOptions { align, max_extent: extent * unit, max_region: region * unit, max_gap }
    })
}

/// A prefix cut into records, what is read of it, and how.
#[derive(Clone, Debug)]
struct Case {
    shape: BlockShape,
    /// Layout, number of blocks and wanted blocks of every record.
    records: Vec<(Layout, u32, Range<u32>)>,
    /// Places of the destination that stay free before each record's first block.
    gap: u32,
    layers: Range<u32>,
    order: Order,
    source: Form,
    destination: Form,
    options: ReadOptions,
}

fn ranges(available: u32) -> impl Strategy<Value = Range<u32>> {
    let range = (0..available, 1..=available)
        .prop_map(move |(first, count)| first..first + count.min(available - first));
    prop_oneof![Just(0..available), range]
}

fn cases() -> impl Strategy<Value = Case> {
    let record = (layouts(), 1u32..7)
        .prop_flat_map(|(layout, blocks)| ranges(blocks).prop_map(move |pick| (layout, blocks, pick)));
    let records = prop::collection::vec(record, 1..4);
    let order = prop_oneof![Just(Order::Layers), Just(Order::Blocks)];
    (shapes(), (records, 0u32..3), order, forms(), forms(), options()).prop_flat_map(
        |(shape, (records, gap), order, source, destination, options)| {
            ranges(shape.layers().len() as u32).prop_map(move |layers| Case {
                shape: shape.clone(),
                records: records.clone(),
                gap,
                layers,
                order,
                source: source.clone(),
                destination: destination.clone(),
                options,
            })
        },
    )
}

impl Case {
    fn plan(&self) -> ReadPlan {
        let mut ordinal = 0;
        let mut records = Vec::new();
        for ((layout, blocks, pick), offset) in self.records.iter().zip(self.payload_offsets()) {
            let layout = Arc::new(run(*layout, &self.shape, *blocks));
            ordinal += self.gap;
            records.push(RecordRead { layout, payload_offset: offset, blocks: pick.clone(), ordinal });
            ordinal += pick.len() as u32;
        }
        let placement = Arc::new(place(&self.destination, &self.shape, ordinal));
        ReadPlan::new(records, self.layers.clone(), self.order, placement, self.options).unwrap()
    }

    fn payload_offsets(&self) -> impl Iterator<Item = u64> {
        (1u64..).map(|index| index * 3 * PAGE_BYTES)
    }

    /// Ordinal in the whole prefix of a record's first block.
    fn first_in_prefix(&self, record: u32) -> u32 {
        self.records.iter().take(record as usize).map(|(_, blocks, _)| blocks).sum()
    }

    /// The content of a chunk of a block of a record.
    fn chunk_content(&self, record: u32, block: u32, chunk: u32) -> Vec<u8> {
        let bytes =
            self.shape.layers().iter().flat_map(|layer| &layer.chunks).nth(chunk as usize).unwrap().bytes;
        content(self.first_in_prefix(record) + block, chunk, bytes)
    }

    /// All wanted chunks: record, block, ordinal, layer, canonical part index.
    fn wanted(&self) -> BTreeSet<(u32, u32, u32, u32, u32)> {
        let mut wanted = BTreeSet::new();
        let mut ordinal = 0;
        for (record, (layout, blocks, pick)) in (0u32..).zip(&self.records) {
            let run = run(*layout, &self.shape, *blocks);
            ordinal += self.gap;
            for block in pick.clone() {
                for layer in self.layers.clone() {
                    let (first, parts) = run.layer_parts(layer).unwrap();
                    for chunk in first..first + parts.len() as u32 {
                        wanted.insert((record, block, ordinal, layer, chunk));
                    }
                }
                ordinal += 1;
            }
        }
        wanted
    }

    /// The file of a record: its payload as the write plan composes it, in the midst of other bytes.
    fn file(&self, record: u32, payload_offset: u64) -> Vec<u8> {
        let (layout, blocks, _) = self.records[record as usize];
        let run = run(layout, &self.shape, blocks);
        let mut file = vec![0xa5u8; payload_offset as usize];
        file.extend(compose(&run, &self.source, &self.shape, |block, chunk| {
            self.chunk_content(record, block, chunk)
        }));
        file.extend([0x5au8; 8192]);
        file
    }
}

/// Puts blocks into memory, and the memory into a payload image by a write plan.
fn compose(
    run: &RunLayout,
    form: &Form,
    shape: &BlockShape,
    content: impl Fn(u32, u32) -> Vec<u8>,
) -> Vec<u8> {
    let skipped = 1;
    let sources = place(form, shape, run.blocks() + skipped);
    let mut memories = memories(&sources);
    for block in 0..run.blocks() {
        for chunk in 0..run.chunk_count() {
            let bytes = content(block, chunk);
            let at = sources.address(chunk, block + skipped).unwrap();
            bytes_at(&mut memories, at, bytes.len() as u64).copy_from_slice(&bytes);
        }
    }
    let mut image = Vec::new();
    for piece in WritePlan::new(run, &sources, skipped).unwrap() {
        assert_eq!(piece.payload_offset, image.len() as u64, "pieces follow each other without gap");
        assert!(piece.len > 0);
        match piece.source {
            WriteSource::Zeros => image.resize(image.len() + piece.len as usize, 0),
            WriteSource::Memory(at) => image.extend_from_slice(bytes_at(&mut memories, at, piece.len)),
        }
    }
    image
}

fn cases_config(cases: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(cases), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases_config(512))]

    #[test]
    fn a_written_payload_holds_every_chunk_at_its_offset_and_zeros_elsewhere(
        shape in shapes(), layout in layouts(), blocks in 1u32..7, form in forms(),
    ) {
        let run = run(layout, &shape, blocks);
        let sizes: Vec<_> = run.parts().iter().map(|part| part.bytes).collect();
        let image = compose(&run, &form, &shape, |block, chunk| content(block, chunk, sizes[chunk as usize]));
        prop_assert_eq!(image.len() as u64, run.image_bytes());
        let mut expected = vec![0u8; image.len()];
        for layer in 0..run.layer_count() {
            let (first, parts) = run.layer_parts(layer).unwrap();
            for part in 0..parts.len() as u32 {
                for block in 0..blocks {
                    let span = run.chunk(block, layer, part).unwrap();
                    expected[span.offset as usize..span.end() as usize]
                        .copy_from_slice(&content(block, first + part, span.len));
                }
            }
        }
        prop_assert!(image == expected);
    }

    #[test]
    fn a_read_delivers_exactly_the_wanted_chunks_and_touches_nothing_else(case in cases()) {
        let plan = case.plan();
        let files: Vec<_> = (0u32..)
            .zip(plan.records())
            .map(|(index, record)| case.file(index, record.payload_offset))
            .collect();
        let mut memories = memories(plan.placement());
        let mut expected = memories.clone();
        let mut delivered = BTreeSet::new();
        let mut step = Step::new();
        for index in 0..plan.steps() {
            prop_assert!(plan.plan_step(index, &mut step));
            let mut staging: Vec<_> = step.regions().iter().map(|region| match region.landing {
                Landing::Staged { .. } => vec![UNTOUCHED; region.bytes as usize],
                Landing::Direct { .. } => Vec::new(),
            }).collect();
            for extent in step.extents() {
                let start = extent.file_offset as usize;
                let read = &files[extent.record as usize][start..start + extent.len as usize];
                match extent.landing {
                    Landing::Direct { memory, offset } => {
                        bytes_at(&mut memories, Address { memory, offset }, read.len() as u64).copy_from_slice(read);
                    }
                    Landing::Staged { offset } => {
                        staging[extent.region as usize][offset as usize..][..read.len()].copy_from_slice(read);
                    }
                }
            }
            for ((number, region), staged) in (0u32..).zip(step.regions()).zip(&staging) {
                let layout = &plan.records()[region.record as usize].layout;
                for piece in plan.pieces(&step, number) {
                    let layer = layout.layer_of_part(piece.chunk).unwrap();
                    let content = case.chunk_content(region.record, piece.block, piece.chunk);
                    prop_assert_eq!(piece.len, content.len() as u64);
                    match region.landing {
                        Landing::Staged { .. } => {
                            let chunk = &staged[piece.source as usize..(piece.source + piece.len) as usize];
                            prop_assert!(chunk == content, "staged {piece:?}");
                            bytes_at(&mut memories, piece.destination, piece.len).copy_from_slice(chunk);
                        }
                        Landing::Direct { memory, offset } => {
                            let at = Address { memory, offset: offset + piece.source };
                            prop_assert_eq!(at, piece.destination);
                        }
                    }
                    let name = (region.record, piece.block, piece.ordinal, layer, piece.chunk);
                    prop_assert!(delivered.insert(name), "twice: {piece:?}");
                    match case.order {
                        Order::Layers => prop_assert_eq!(plan.layer_of(index), Some(layer)),
                        Order::Blocks => {
                            prop_assert_eq!(plan.block_of(index), Some((region.record, piece.block)));
                            prop_assert_eq!(piece.ordinal, index + case.gap * (region.record + 1));
                        }
                    }
                }
            }
        }
        let wanted = case.wanted();
        prop_assert_eq!(&delivered, &wanted);
        for (record, block, ordinal, _, chunk) in wanted {
            let content = case.chunk_content(record, block, chunk);
            let at = plan.placement().address(chunk, ordinal).unwrap();
            bytes_at(&mut expected, at, content.len() as u64).copy_from_slice(&content);
        }
        prop_assert!(memories == expected, "the destination holds the wanted chunks and nothing else");
        prop_assert!(!plan.plan_step(plan.steps(), &mut step) && step.regions().is_empty());
    }

    #[test]
    fn extents_are_aligned_sorted_disjoint_and_inside_the_payload(case in cases()) {
        let plan = case.plan();
        let align = u64::from(case.options.align);
        let mut step = Step::new();
        for index in 0..plan.steps() {
            plan.plan_step(index, &mut step);
            let (mut previous, mut read, mut pieces) = (None::<(Extent, Region)>, 0, 0);
            for extent in step.extents() {
                let region = step.regions()[extent.region as usize];
                let end = extent.file_offset + u64::from(extent.len);
                prop_assert!(extent.len > 0 && extent.len <= case.options.max_extent);
                prop_assert_eq!(extent.record, region.record);
                prop_assert_eq!((extent.file_offset | u64::from(extent.len)) % align, 0);
                let (Landing::Direct { offset: lands, .. } | Landing::Staged { offset: lands }) = extent.landing;
                prop_assert_eq!(lands % align, 0);
                let record = &plan.records()[extent.record as usize];
                prop_assert!(extent.file_offset >= record.payload_offset);
                prop_assert!(end <= record.payload_offset + record.layout.image_bytes());
                if let Some((before, before_region)) = previous.filter(|(before, _)| before.record == extent.record) {
                    let overlap = (before.file_offset + u64::from(before.len)).saturating_sub(extent.file_offset);
                    let full = region.file_offset + align + u64::from(case.options.max_region)
                        >= before_region.file_offset + before_region.bytes;
                    prop_assert!(overlap == 0 || (overlap == align && full && before.region != extent.region));
                    prop_assert!(before.file_offset < extent.file_offset || before.region != extent.region);
                }
                read += u64::from(extent.len);
                previous = Some((extent, region));
            }
            for (number, region) in (0u32..).zip(step.regions()) {
                let chunks: Vec<_> = plan.pieces(&step, number).collect();
                prop_assert!(!chunks.is_empty());
                prop_assert!(region.bytes <= u64::from(case.options.max_region) || chunks.len() == 1);
                prop_assert!(chunks.is_sorted_by(|a, b| a.source + a.len <= b.source));
                let page_gap = |pair: &[Piece]| {
                    let end = region.file_offset + pair[0].source + pair[0].len;
                    (region.file_offset + pair[1].source) / align * align
                        <= end.next_multiple_of(align) + u64::from(case.options.max_gap)
                };
                prop_assert!(chunks.windows(2).all(page_gap), "a gap that is too wide is bridged");
                let inside = chunks.last().unwrap();
                prop_assert!(inside.source + inside.len <= region.bytes);
                pieces += chunks.len() as u64;
                if region.landing.is_direct() {
                    prop_assert_eq!(chunks.iter().map(|chunk| chunk.len).sum::<u64>(), region.bytes);
                }
            }
            prop_assert_eq!(step.read_bytes(), read);
            prop_assert!(step.over_read_bytes() <= case.options.over_read_bound(pieces));
            let staged: u64 = step.regions().iter().filter(|r| !r.landing.is_direct()).map(|r| r.bytes).sum();
            prop_assert_eq!(step.staged_bytes(), staged);
        }
    }

    #[test]
    fn no_two_regions_are_left_apart_that_could_be_one(case in cases()) {
        let plan = case.plan();
        let mut step = Step::new();
        for index in 0..plan.steps() {
            plan.plan_step(index, &mut step);
            for (number, pair) in (1u32..).zip(step.regions().windows(2)) {
                let (first, second) = (pair[0], pair[1]);
                if first.record != second.record || first.landing.is_direct() != second.landing.is_direct() {
                    continue;
                }
                let end = first.file_offset + first.bytes;
                let near = second.file_offset <= end + u64::from(case.options.max_gap);
                let head = plan.pieces(&step, number).next().unwrap();
                let joint = second.file_offset + head.source + head.len - first.file_offset;
                let fits = joint <= u64::from(case.options.max_region);
                let follows = match (first.landing, second.landing) {
                    (Landing::Direct { memory: a, offset: from }, Landing::Direct { memory: b, offset: to }) => {
                        second.file_offset == end && a == b && from + first.bytes == to
                    }
                    _ => near,
                };
                prop_assert!(!(follows && fits), "{first:?} {second:?}");
            }
        }
    }

    #[test]
    fn a_part_whose_places_are_aligned_on_both_sides_is_never_staged(case in cases()) {
        let plan = case.plan();
        let align = u64::from(case.options.align);
        let mut step = Step::new();
        for index in 0..plan.steps() {
            plan.plan_step(index, &mut step);
            for (number, region) in (0u32..).zip(step.regions()).filter(|(_, region)| !region.landing.is_direct()) {
                let record = &plan.records()[region.record as usize];
                for piece in plan.pieces(&step, number) {
                    let place = record.layout.parts()[piece.chunk as usize];
                    let all_aligned = (0..record.layout.blocks()).all(|block| place.start(block) % align == 0)
                        && place.bytes % align == 0
                        && (0..plan.placement().blocks()).all(|ordinal| {
                            plan.placement().address(piece.chunk, ordinal).unwrap().offset % align == 0
                        });
                    // Slots that happen to be even are no promise: the stride decides.
                    let paged = matches!(case.destination, Form::Paged { .. });
                    prop_assert!(!all_aligned || paged, "{piece:?}");
                }
            }
        }
    }

    #[test]
    fn a_step_is_its_slices_and_needs_no_other_step(case in cases()) {
        let plan = case.plan();
        let expand = |step: &Step| -> Vec<_> {
            (0u32..).zip(step.regions()).map(|(number, region)| {
                let pieces: Vec<_> = plan.pieces(step, number).collect();
                (region.record, region.file_offset, region.bytes, region.landing, pieces)
            }).collect()
        };
        let mut reused = Step::new();
        for index in (0..plan.steps()).rev() {
            let mut slices = Vec::new();
            let (mut wanted, mut read) = (0, 0);
            for slice in 0..plan.slices() {
                let mut fresh = Step::new();
                prop_assert!(plan.plan_slice(index, slice, &mut fresh));
                slices.extend(expand(&fresh));
                wanted += fresh.wanted_bytes();
                read += fresh.read_bytes();
            }
            prop_assert!(plan.plan_step(index, &mut reused));
            prop_assert_eq!(expand(&reused), slices);
            prop_assert_eq!((reused.wanted_bytes(), reused.read_bytes()), (wanted, read));
            prop_assert!(!plan.plan_slice(index, plan.slices(), &mut reused));
        }
    }

    #[test]
    fn both_layouts_of_the_same_blocks_carry_the_same_bytes(
        shape in shapes(), blocks in 1u32..6, forms in (forms(), forms()), options in options(), seed: u32,
    ) {
        let deliver = |layout, form: &Form| {
            let run = Arc::new(run(layout, &shape, blocks));
            let sizes: Vec<_> = run.parts().iter().map(|part| part.bytes).collect();
            let image = compose(&run, form, &shape, |block, chunk| content(block ^ seed, chunk, sizes[chunk as usize]));
            let at = Address { memory: MemoryId(0), offset: 0 };
            let placement = Arc::new(Placement::canonical_blocks(&shape, blocks, at).unwrap());
            let read = RecordRead { layout: run, payload_offset: 0, blocks: 0..blocks, ordinal: 0 };
            let layers = 0..shape.layers().len() as u32;
            let plan = ReadPlan::new(vec![read], layers, Order::Layers, placement, options).unwrap();
            let mut memories = memories(plan.placement());
            let mut step = Step::new();
            for index in 0..plan.steps() {
                plan.plan_step(index, &mut step);
                for (number, region) in (0u32..).zip(step.regions()) {
                    for piece in plan.pieces(&step, number) {
                        let start = (region.file_offset + piece.source) as usize;
                        bytes_at(&mut memories, piece.destination, piece.len)
                            .copy_from_slice(&image[start..start + piece.len as usize]);
                    }
                }
            }
            memories
        };
        let full = deliver(Layout::FullBlock, &forms.0);
        prop_assert!(full == deliver(Layout::LayerBlock, &forms.1));
        let canonical: Vec<u8> = (0..blocks).flat_map(|block| {
            let sizes = shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes);
            (0u32..).zip(sizes).flat_map(move |(chunk, len)| content(block ^ seed, chunk, len))
        }).collect();
        prop_assert!(full[&MemoryId(0)].starts_with(&canonical));
    }

    #[test]
    fn a_write_is_vectored_exactly_when_every_piece_is_aligned(
        shape in shapes(), layout in layouts(), blocks in 1u32..6, form in forms(),
    ) {
        let run = run(layout, &shape, blocks);
        let sources = place(&form, &shape, blocks);
        let plan = WritePlan::new(&run, &sources, 0).unwrap();
        let pieces: Vec<_> = plan.clone().collect();
        let aligned = |piece: &WritePiece| piece.len.is_multiple_of(512) && match piece.source {
            WriteSource::Memory(at) => at.offset % 512 == 0,
            WriteSource::Zeros => true,
        };
        let summary = plan.summary(512);
        prop_assert_eq!(summary.vectored, pieces.iter().all(aligned));
        prop_assert_eq!(summary.pieces, pieces.len() as u64);
        prop_assert_eq!(summary.zero_bytes, run.image_bytes() - run.content_bytes());
        for pair in pieces.windows(2) {
            prop_assert!(!matches!((pair[0].source, pair[1].source), (WriteSource::Zeros, WriteSource::Zeros)));
            if let (WriteSource::Memory(a), WriteSource::Memory(b)) = (pair[0].source, pair[1].source) {
                prop_assert!(a.memory != b.memory || a.offset + pair[0].len != b.offset, "could be one piece");
            }
        }
    }
}

fn llama(layers: usize) -> BlockShape {
    shape_of(&vec![&[1u64 << 20] as &[u64]; layers])
}

fn one_record(layout: &Arc<RunLayout>, blocks: Range<u32>) -> RecordRead {
    RecordRead { layout: Arc::clone(layout), payload_offset: 8192, blocks, ordinal: 0 }
}

#[test]
fn whole_pages_into_layer_buffers_are_one_direct_region_cut_into_extents() {
    let shape = llama(3);
    let layout = Arc::new(run(Layout::LayerBlock, &shape, 4));
    let buffer = |layer| Address { memory: MemoryId(layer), offset: 4096 };
    let placement = Arc::new(Placement::layer_buffers(&shape, 3, buffer).unwrap());
    let options = ReadOptions { max_extent: 2 << 20, ..ReadOptions::default() };
    let read = vec![one_record(&layout, 0..3)];
    let plan = ReadPlan::new(read, 1..3, Order::Layers, placement, options).unwrap();
    assert_eq!((plan.steps(), plan.layer_of(0), plan.layer_of(2)), (2, Some(1), None));
    let mut step = Step::new();
    assert!(plan.plan_step(0, &mut step));
    let extents: Vec<_> = step.extents().collect();
    let direct = |offset| Landing::Direct { memory: MemoryId(1), offset };
    let extent = |file_offset, len, landing| Extent { region: 0, record: 0, file_offset, len, landing };
    let start = 8192 + (4 << 20);
    assert_eq!(
        extents,
        [extent(start, 2 << 20, direct(4096)), extent(start + (2 << 20), 1 << 20, direct(4096 + (2 << 20)))]
    );
    assert_eq!((step.over_read_bytes(), step.staged_bytes()), (0, 0));
}

#[test]
fn packed_small_pieces_are_staged_and_their_neighbours_page_is_over_read() {
    let shape = shape_of(&[&[37_376, 8_448], &[1_168]]);
    let layout = Arc::new(run(Layout::LayerBlock, &shape, 16));
    let at = Address { memory: MemoryId(0), offset: 0 };
    let placement = Arc::new(Placement::canonical_blocks(&shape, 16, at).unwrap());
    let read = vec![one_record(&layout, 2..4)];
    let options = ReadOptions { max_gap: 0, ..ReadOptions::default() };
    let plan = ReadPlan::new(read, 1..2, Order::Layers, placement, options).unwrap();
    let mut step = Step::new();
    assert!(plan.plan_step(0, &mut step));
    // Blocks 2 and 3 lie in the layer's first page and the one after.
    let region = step.regions()[0];
    assert_eq!((step.regions().len(), region.file_offset, region.bytes), (1, 8192 + 733_184, 8192));
    let mut all = plan.pieces(&step, 0);
    let pieces: Vec<_> = all.by_ref().take(1).map(|piece| (piece.block, piece.source)).collect();
    assert!(pieces == [(2, 2336)] && !all.is_done());
    let rest: Vec<_> = all.by_ref().map(|piece| (piece.block, piece.source)).collect();
    assert!(rest == [(3, 3504)] && all.is_done());
    assert_eq!(step.over_read_bytes(), 8192 - 2 * 1_168);
}

#[test]
fn a_request_that_makes_no_sense_is_refused_with_its_reason() {
    let shape = llama(2);
    let layout = Arc::new(run(Layout::LayerBlock, &shape, 4));
    let at = Address { memory: MemoryId(0), offset: 0 };
    let placement = Arc::new(Placement::canonical_blocks(&shape, 4, at).unwrap());
    let plan = |records: Vec<RecordRead>, layers: Range<u32>, options: ReadOptions| {
        ReadPlan::new(records, layers, Order::Layers, Arc::clone(&placement), options).map(|_| ())
    };
    let good = || one_record(&layout, 0..2);
    let (two, default) = (0..2, ReadOptions::default());
    assert_eq!(plan(vec![good()], two.clone(), default), Ok(()));
    assert_eq!(plan(vec![], two.clone(), default), Err(PlanError::Nothing));
    assert_eq!(plan(vec![good()], 0..0, default), Err(PlanError::Nothing));
    let third_layer = PlanError::OutOfRange { wanted: 2, available: 2 };
    assert_eq!(plan(vec![good()], 0..3, default), Err(third_layer));
    let fifth_block = RecordRead { blocks: 1..5, ..good() };
    assert_eq!(
        plan(vec![fifth_block], two.clone(), default),
        Err(PlanError::OutOfRange { wanted: 4, available: 4 })
    );
    let none = RecordRead { blocks: 1..1, ..good() };
    assert_eq!(plan(vec![none], two.clone(), default), Err(PlanError::Nothing));
    assert_eq!(plan(vec![good(), good()], two.clone(), default), Err(PlanError::Order), "same ordinals");
    let start = |layer| (layer == 1).then_some(at);
    let second_only = Arc::new(Placement::layer_buffers(&shape, 4, start).unwrap());
    let of = |layers| ReadPlan::new(vec![good()], layers, Order::Blocks, Arc::clone(&second_only), default);
    assert_eq!(of(1..2).map(|_| ()), Ok(()));
    assert_eq!(of(two.clone()).map(|_| ()), Err(PlanError::Unplaced { part: 0 }));
    let written = WritePlan::new(&layout, &second_only, 0).map(|_| ());
    assert_eq!(written, Err(PlanError::Unplaced { part: 0 }), "a put needs all");
    let far = RecordRead { ordinal: 3, ..good() };
    assert_eq!(plan(vec![far], two.clone(), default), Err(PlanError::Placement { needed: 5, available: 4 }));
    let odd = RecordRead { payload_offset: 512, ..good() };
    assert_eq!(plan(vec![odd], two.clone(), default), Err(PlanError::PayloadOffset { offset: 512 }));
    let past_the_end = RecordRead { payload_offset: (i64::MAX as u64 - 4096) & !4095, ..good() };
    assert_eq!(plan(vec![past_the_end], two.clone(), default), Err(PlanError::TooLarge));
    for align in [0, 3, 8192] {
        let options = ReadOptions { align, ..default };
        assert_eq!(plan(vec![good()], two.clone(), options), Err(PlanError::Align { align }));
    }
    for limit in [0, 100, (1 << 30) + 4096] {
        let extent = ReadOptions { max_extent: limit, ..default };
        let region = ReadOptions { max_region: limit, ..default };
        assert_eq!(plan(vec![good()], two.clone(), extent), Err(PlanError::Limit { limit }));
        assert_eq!(plan(vec![good()], two.clone(), region), Err(PlanError::Limit { limit }));
    }
    let other = Arc::new(run(Layout::LayerBlock, &llama(3), 4));
    assert_eq!(plan(vec![one_record(&other, 0..1)], two.clone(), default), Err(PlanError::Shape));
    let later = RecordRead { ordinal: 2, ..one_record(&other, 0..1) };
    assert_eq!(plan(vec![good(), later], two, default), Err(PlanError::Shape));
    let other_source = WritePlan::new(&other, &placement, 0).map(|_| ());
    assert_eq!(other_source, Err(PlanError::Shape));
    let short = WritePlan::new(&layout, &placement, 1).map(|_| ());
    assert_eq!(short, Err(PlanError::Placement { needed: 5, available: 4 }));
}

#[test]
fn a_layer_of_more_pieces_than_a_step_holds_is_refused() {
    let shape = shape_of(&[&[1u64; 2048] as &[u64]]);
    let layout = Arc::new(run(Layout::LayerBlock, &shape, 1 << 16));
    let at = Address { memory: MemoryId(0), offset: 0 };
    let placement = Arc::new(Placement::canonical_blocks(&shape, 1 << 16, at).unwrap());
    let plan = |order| {
        let read = vec![one_record(&layout, 0..1 << 16)];
        ReadPlan::new(read, 0..1, order, Arc::clone(&placement), ReadOptions::default()).map(|_| ())
    };
    assert_eq!(plan(Order::Layers), Err(PlanError::TooLarge));
    assert_eq!(plan(Order::Blocks), Ok(()));
}

#[test]
fn a_block_with_wide_padding_inside_is_not_read_as_a_whole() {
    let chunk = |align| crate::shape::ChunkShape { bytes: 100, align };
    let layer = crate::shape::LayerShape { layer: 0, chunks: vec![chunk(1), chunk(4096)] };
    let shape = BlockShape::new(vec![layer]).unwrap();
    let layout = Arc::new(run(Layout::FullBlock, &shape, 2));
    let at = Address { memory: MemoryId(0), offset: 0 };
    let placement = Arc::new(Placement::canonical_blocks(&shape, 2, at).unwrap());
    let regions = |align, max_gap| {
        let options = ReadOptions { align, max_gap, ..ReadOptions::default() };
        let read = vec![one_record(&layout, 0..2)];
        let plan = ReadPlan::new(read, 0..1, Order::Blocks, Arc::clone(&placement), options).unwrap();
        let mut step = Step::new();
        assert!(plan.plan_step(1, &mut step));
        step.regions().iter().map(|region| (region.file_offset - 8192, region.bytes)).collect::<Vec<_>>()
    };
    assert_eq!(regions(512, 0), [(8192, 512), (12_288, 512)]);
    assert_eq!(regions(512, 4096), [(8192, 4608)]);
    assert_eq!(regions(4096, 0), [(8192, 8192)], "pages touch");
}
