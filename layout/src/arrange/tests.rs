//! The two layouts against a walk that moves a cursor from chunk to chunk, and the overhead they promise.

use super::*;
use crate::shape::{ChunkShape, LayerShape};
use proptest::prelude::*;

/// A shape with the given chunk sizes, layer by layer.
pub(crate) fn shape_of(layers: &[&[u64]]) -> BlockShape {
    let chunk = |&bytes: &u64| ChunkShape { bytes, align: 1 };
    let layer =
        |(layer, chunks): (u32, &&[u64])| LayerShape { layer, chunks: chunks.iter().map(chunk).collect() };
    BlockShape::new((0u32..).zip(layers).map(layer).collect()).unwrap()
}

/// Small shapes of every kind: odd bytes, around a page, whole pages; every alignment.
pub(crate) fn shapes() -> impl Strategy<Value = BlockShape> {
    let bytes = prop_oneof![
        3 => 1u64..80,
        2 => 500u64..5000,
        1 => 4090u64..4100,
        2 => (1u64..4).prop_map(|pages| pages * 4096),
    ];
    let align = prop_oneof![
        6 => Just(1u32),
        2 => prop_oneof![Just(2u32), Just(16), Just(64)],
        1 => prop_oneof![Just(512u32), Just(4096)],
    ];
    let chunk = (bytes, align).prop_map(|(bytes, align)| ChunkShape { bytes, align });
    let layer = (1u32..3, prop::collection::vec(chunk, 1..4));
    prop::collection::vec(layer, 1..5).prop_map(|layers| {
        let mut at = 0;
        let number = |(step, chunks)| {
            at += step;
            LayerShape { layer: at, chunks }
        };
        BlockShape::new(layers.into_iter().map(number).collect()).unwrap()
    })
}

pub(crate) fn layouts() -> impl Strategy<Value = Layout> {
    prop_oneof![Just(Layout::FullBlock), Just(Layout::LayerBlock)]
}

pub(crate) fn run(layout: Layout, shape: &BlockShape, blocks: u32) -> RunLayout {
    RunLayout::new(layout, LAYOUT_VERSION, shape, blocks).unwrap()
}

fn both() -> [Layout; 2] {
    [Layout::FullBlock, Layout::LayerBlock]
}

/// A cursor that places bytes by the rules of `docs/FORMAT.md`.
struct Walk {
    at: u64,
}

impl Walk {
    fn align(&mut self, align: u64) {
        self.at = self.at.div_ceil(align) * align;
    }

    fn chunk(&mut self, chunk: &ChunkShape) -> Span {
        self.align(u64::from(chunk.align));
        let span = Span { offset: self.at, len: chunk.bytes };
        self.at += chunk.bytes;
        span
    }

    /// Moves to a page if at most 1/256 of `bytes` is lost, else to `align`.
    fn page_or(&mut self, bytes: u64, align: u64) {
        let padding = self.at.div_ceil(4096) * 4096 - self.at;
        self.align(if padding * 256 <= bytes { 4096 } else { align });
    }
}

/// A chunk, by block, layer and part, and its place.
type Placed = ((u32, u32, u32), Span);

/// Every chunk (block, layer, part) of the run in file order, and the end of the payload.
fn walk(layout: Layout, shape: &BlockShape, blocks: u32) -> (Vec<Placed>, u64) {
    let mut walk = Walk { at: 0 };
    let mut chunks = Vec::new();
    let layers = || (0u32..).zip(shape.layers());
    let block_align = shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.align).max();
    let mut end = 0;
    if layout == Layout::FullBlock || blocks == 1 {
        // The first block decides the distance of all: it is walked, then moved to the next block's start.
        let mut first = Vec::new();
        for (layer, of) in layers() {
            for (part, chunk) in (0u32..).zip(&of.chunks) {
                first.push((layer, part, walk.chunk(chunk)));
            }
        }
        let block_bytes = walk.at;
        walk.page_or(block_bytes, u64::from(block_align.unwrap()));
        for block in 0..blocks {
            let moved = u64::from(block) * walk.at;
            end = moved + block_bytes;
            chunks.extend(first.iter().map(|&(layer, part, span)| {
                ((block, layer, part), Span { offset: span.offset + moved, ..span })
            }));
        }
    } else {
        for (layer, of) in layers() {
            walk.page_or(of.bytes() * u64::from(blocks), 1);
            for (part, chunk) in (0u32..).zip(&of.chunks) {
                for block in 0..blocks {
                    chunks.push(((block, layer, part), walk.chunk(chunk)));
                }
            }
        }
        end = walk.at;
    }
    (chunks, end)
}

proptest! {
    #[test]
    fn every_chunk_lies_where_a_walk_over_the_run_puts_it(shape in shapes(), layout in layouts(), blocks in 1u32..9) {
        let run = run(layout, &shape, blocks);
        let (chunks, end) = walk(layout, &shape, blocks);
        let mut previous_end = 0;
        for ((block, layer, part), span) in chunks {
            prop_assert_eq!(run.chunk(block, layer, part), Some(span), "{:?}", (block, layer, part));
            prop_assert!(span.offset >= previous_end);
            previous_end = span.end();
        }
        prop_assert_eq!(run.payload_bytes(), end);
        prop_assert_eq!(end, previous_end);
        prop_assert!(run.image_bytes().is_multiple_of(4096) && run.image_bytes() - end < 4096);
        prop_assert_eq!(run.content_bytes(), shape.block_bytes() * u64::from(blocks));
    }

    #[test]
    fn the_first_blocks_of_a_part_are_a_prefix_of_its_region_in_layer_block_layout(
        shape in shapes(), blocks in 2u32..9,
    ) {
        let run = run(Layout::LayerBlock, &shape, blocks);
        for layer in 0..run.layer_count() {
            let span = run.layer_span(layer).unwrap();
            let (_, parts) = run.layer_parts(layer).unwrap();
            let mut part_start = span.offset;
            for (part, place) in (0u32..).zip(parts) {
                // Nothing but chunks 0, 1, 2, ... of this part from the region's start on.
                prop_assert!(run.chunk(0, layer, part).unwrap().offset - part_start < 4096);
                for block in 1..blocks {
                    let before = run.chunk(block - 1, layer, part).unwrap();
                    let gap = run.chunk(block, layer, part).unwrap().offset - before.end();
                    prop_assert!(gap < 4096 && gap == place.step - place.bytes);
                }
                part_start = run.chunk(blocks - 1, layer, part).unwrap().end();
            }
            prop_assert_eq!(part_start, span.end());
        }
    }

    #[test]
    fn a_run_of_one_block_is_the_same_image_in_both_layouts(shape in shapes()) {
        let (by_block, by_layer) = (run(Layout::FullBlock, &shape, 1), run(Layout::LayerBlock, &shape, 1));
        prop_assert_eq!(by_block.parts(), by_layer.parts());
        prop_assert_eq!(by_block.payload_bytes(), by_layer.payload_bytes());
        prop_assert_eq!(by_layer.block_span(0).unwrap().len, by_layer.payload_bytes());
        prop_assert!(by_block.layer_span(0).is_some());
    }

    #[test]
    fn spans_hold_exactly_their_chunks(shape in shapes(), layout in layouts(), blocks in 1u32..6) {
        let run = run(layout, &shape, blocks);
        let chunk_layers = 0..run.layer_count();
        for block in 0..blocks {
            let Some(span) = run.block_span(block) else { continue };
            let inside = |layer, part| run.chunk(block, layer, part).unwrap();
            let last_layer = run.layer_count() - 1;
            let last_part = run.layer_parts(last_layer).unwrap().1.len() as u32 - 1;
            prop_assert_eq!((span.offset, span.end()), (inside(0, 0).offset, inside(last_layer, last_part).end()));
        }
        for layer in chunk_layers {
            let whole = blocks == 1 || layout == Layout::LayerBlock;
            prop_assert_eq!(run.layer_span(layer).is_some(), whole);
        }
        prop_assert_eq!(run.block_span(0).is_some(), blocks == 1 || layout == Layout::FullBlock);
    }

    #[test]
    fn without_own_alignment_padding_inside_a_payload_is_at_most_a_256th(
        sizes in prop::collection::vec(1u64..300_000, 1..6), layout in layouts(), blocks in 1u32..40,
    ) {
        let layers: Vec<_> = sizes.iter().map(std::slice::from_ref).collect();
        let run = run(layout, &shape_of(&layers), blocks);
        prop_assert!((run.payload_bytes() - run.content_bytes()) * 256 <= run.content_bytes());
    }

    #[test]
    fn large_blocks_and_layers_start_on_a_page(
        sizes in prop::collection::vec(1_100_000u64..2_000_000, 1..4), blocks in 2u32..5,
    ) {
        let layers: Vec<_> = sizes.iter().map(std::slice::from_ref).collect();
        let shape = shape_of(&layers);
        let (by_block, by_layer) = (run(Layout::FullBlock, &shape, blocks), run(Layout::LayerBlock, &shape, blocks));
        for block in 0..blocks {
            prop_assert_eq!(by_block.block_span(block).unwrap().offset % 4096, 0);
        }
        for layer in 0..by_layer.layer_count() {
            prop_assert_eq!(by_layer.layer_span(layer).unwrap().offset % 4096, 0);
        }
    }
}

#[test]
fn llama_70b_runs_are_whole_pages_in_both_layouts() {
    let shape = shape_of(&[&[1u64 << 20] as &[u64]; 80]);
    let by_layer = run(Layout::LayerBlock, &shape, 16);
    assert_eq!(by_layer.chunk(3, 2, 0), Some(Span { offset: (2 * 16 + 3) << 20, len: 1 << 20 }));
    assert_eq!(by_layer.layer_span(79), Some(Span { offset: (79 * 16) << 20, len: 16 << 20 }));
    let by_block = run(Layout::FullBlock, &shape, 16);
    assert_eq!(by_block.chunk(3, 2, 0), Some(Span { offset: (3 * 80 + 2) << 20, len: 1 << 20 }));
    assert_eq!(by_block.block_span(15), Some(Span { offset: (15 * 80) << 20, len: 80 << 20 }));
    for run in [by_block, by_layer] {
        assert_eq!(run.image_bytes(), run.content_bytes());
    }
}

/// The worked example of `docs/FORMAT.md`: a CSA layer with its indexer, an HCA layer, a CSA layer; 16 blocks.
#[test]
fn small_pieces_are_packed_and_the_next_layer_returns_to_a_page() {
    let shape = shape_of(&[&[37_376, 8_448], &[1_168], &[37_376, 8_448]]);
    let run = run(Layout::LayerBlock, &shape, 16);
    let span = |offset, len| Some(Span { offset, len });
    assert_eq!(run.chunk(0, 0, 0), span(0, 37_376));
    assert_eq!(run.chunk(15, 0, 0), span(560_640, 37_376));
    assert_eq!(run.chunk(0, 0, 1), span(598_016, 8_448));
    assert_eq!(run.layer_span(0), span(0, 733_184));
    assert_eq!(run.chunk(0, 1, 0), span(733_184, 1_168));
    assert_eq!(run.chunk(1, 1, 0), span(734_352, 1_168));
    assert_eq!(run.layer_span(1), span(733_184, 18_688));
    assert_eq!(run.layer_span(2), span(753_664, 733_184));
    assert_eq!(run.payload_bytes(), 1_486_848);
    assert_eq!(run.image_bytes(), 1_486_848);
    assert_eq!(run.overhead(8192).padding, 753_664 - 733_184 - 18_688);
    let by_block = super::tests::run(Layout::FullBlock, &shape, 16);
    // 92,816 bytes: a page boundary would cost 1,392, more than 1/256.
    assert_eq!(by_block.chunk(1, 0, 0), span(92_816, 37_376));
    assert_eq!(by_block.chunk(1, 1, 0), span(92_816 + 45_824, 1_168));
    assert_eq!(by_block.image_bytes(), 1_486_848);
}

/// Header estimate and layout together, for blocks of `bytes` cut into `layers` layers.
fn ratio(layout: Layout, bytes: u64, layers: u64, blocks: u32) -> f64 {
    let sizes: Vec<u64> =
        (0..layers).map(|layer| bytes / layers + u64::from(layer < bytes % layers)).collect();
    let sizes: Vec<_> = sizes.iter().map(std::slice::from_ref).collect();
    let shape = shape_of(&sizes);
    run(layout, &shape, blocks).overhead(record_header_bytes(blocks, shape.chunk_count())).ratio()
}

#[test]
fn a_one_block_record_of_256_kib_costs_its_header_page_and_nothing_else() {
    for layout in both() {
        for layers in [1, 2, 7, 61, 64, 128] {
            let ratio = ratio(layout, 256 << 10, layers, 1);
            assert_eq!(ratio, 4096.0 / 262_144.0, "{layout:?} {layers}");
        }
    }
}

#[test]
fn overhead_is_at_most_two_percent_from_256_kib_blocks_up() {
    let offsets = [0, 1, 511, 1168, 2048, 4095];
    let sizes = (64..=640).step_by(9).flat_map(|pages| offsets.map(|offset| pages * 4096 + offset));
    for bytes in sizes {
        for layout in both() {
            for (layers, blocks) in [(1, 2), (1, 3), (7, 2), (61, 2), (61, 16), (256, 2), (256, 4), (200, 64)]
            {
                let ratio = ratio(layout, bytes, layers, blocks);
                assert!(ratio <= 0.02, "{layout:?}, {blocks} blocks of {bytes} in {layers} layers: {ratio}");
            }
            if bytes >= 400 << 10 || bytes % 4096 == 0 {
                assert!(ratio(layout, bytes, 61, 1) <= 0.02, "{layout:?}, one block of {bytes}");
            }
        }
    }
}

#[test]
fn overhead_is_at_most_eight_percent_from_16_kib_blocks_up_when_eight_share_a_record() {
    for bytes in ((16 << 10)..(272 << 10)).step_by(97).chain([16 << 10, 20 << 10, 128 << 10]) {
        for layout in both() {
            for (layers, blocks) in [(1, 8), (7, 8), (16, 8), (16, 64), (32, 9)] {
                let ratio = ratio(layout, bytes, layers, blocks);
                assert!(ratio <= 0.08, "{layout:?}, {blocks} blocks of {bytes} in {layers} layers: {ratio}");
            }
        }
    }
}

#[test]
fn an_overhead_adds_up_to_the_record() {
    let shape = shape_of(&[&[5000, 100], &[77]]);
    for layout in both() {
        let run = run(layout, &shape, 5);
        let header = record_header_bytes(5, 3);
        let overhead = run.overhead(header);
        assert_eq!(overhead.digests, 5 * 3 * DIGEST_BYTES);
        assert_eq!(overhead.total() + overhead.content, header + run.image_bytes());
    }
    assert_eq!(record_header_bytes(1, 1), 4096);
    assert_eq!(record_header_bytes(64, 122), round_up(512 + 64 * (64 + 122 * 4), 4096));
}

#[test]
fn auto_takes_layer_block_for_small_layers_of_several_blocks() {
    let llama = shape_of(&[&[1u64 << 20] as &[u64]; 80]);
    let v4 = shape_of(&[&[37_376, 8_448], &[1_168]]);
    let edge = shape_of(&[&[AUTO_FULL_BLOCK_BYTES / 2, AUTO_FULL_BLOCK_BYTES / 2] as &[u64]; 3]);
    let below = shape_of(&[&[AUTO_FULL_BLOCK_BYTES - 1] as &[u64]; 3]);
    assert_eq!(Layout::auto(&llama, 16), Layout::FullBlock);
    assert_eq!(Layout::auto(&v4, 16), Layout::LayerBlock);
    assert_eq!(Layout::auto(&v4, 1), Layout::FullBlock);
    assert_eq!(Layout::auto(&edge, 2), Layout::FullBlock);
    assert_eq!(Layout::auto(&below, 2), Layout::LayerBlock);
    assert_eq!(Layout::auto(&BlockShape::opaque(1000).unwrap(), 16), Layout::FullBlock);
}

#[test]
fn what_no_run_has_is_refused_or_absent() {
    let shape = shape_of(&[&[10, 20], &[30]]);
    let new = |version, blocks| RunLayout::new(Layout::LayerBlock, version, &shape, blocks).map(|_| ());
    assert_eq!(new(0, 1), Err(RunLayoutError::Version { found: 0 }));
    assert_eq!(new(2, 1), Err(RunLayoutError::Version { found: 2 }));
    assert_eq!(new(1, 0), Err(RunLayoutError::Blocks { found: 0 }));
    assert_eq!(new(1, MAX_RUN_BLOCKS + 1), Err(RunLayoutError::Blocks { found: MAX_RUN_BLOCKS + 1 }));
    assert_eq!(new(1, MAX_RUN_BLOCKS), Ok(()));
    let run = run(Layout::LayerBlock, &shape, 4);
    for (block, layer, part) in [(4, 0, 0), (0, 2, 0), (0, 0, 2), (0, 1, 1), (u32::MAX, u32::MAX, u32::MAX)] {
        assert_eq!(run.chunk(block, layer, part), None);
    }
    assert_eq!([0, 1, 2, 3].map(|part| run.layer_of_part(part)), [Some(0), Some(0), Some(1), None]);
}

#[test]
fn the_largest_run_of_the_largest_block_has_exact_offsets() {
    let chunk = ChunkShape { bytes: crate::shape::MAX_CHUNK_BYTES, align: 4096 };
    let layers: Vec<_> = (0..16).map(|layer| LayerShape { layer, chunks: vec![chunk] }).collect();
    let shape = BlockShape::new(layers).unwrap();
    for layout in both() {
        let run = run(layout, &shape, MAX_RUN_BLOCKS);
        assert_eq!(run.payload_bytes(), 1 << 52);
        assert_eq!(run.chunk(MAX_RUN_BLOCKS - 1, 15, 0).unwrap().end(), 1 << 52);
    }
}
