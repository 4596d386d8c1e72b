//! Which pages of a record may go, by layout, and what is counted of them.

use kvarts_layout::{BlockShape, Layout};

use super::*;

fn shape(parts: &[u64]) -> BlockShape {
    crate::engine::space::evict::tests::shape_of(parts)
}

fn layout(layout: Layout, parts: &[u64], blocks: u32) -> RunLayout {
    RunLayout::new(layout, kvarts_layout::arrange::LAYOUT_VERSION, &shape(parts), blocks).unwrap()
}

fn lying(layout: &RunLayout) -> Lying<'_> {
    Lying {
        offset: 3 * PAGE_BYTES,
        header_bytes: PAGE_BYTES,
        payload_bytes: layout.payload_bytes(),
        layout,
        stored: None,
    }
}

#[test]
fn of_whole_pages_the_dead_blocks_are_given_back_to_the_page() {
    let layout = layout(Layout::FullBlock, &[8192], 4);
    let record = lying(&layout);
    assert_eq!(record.unneeded(|_| true), []);
    assert_eq!(record.unneeded(|block| block < 2), [(8 * PAGE_BYTES, 4 * PAGE_BYTES)]);
    assert_eq!(record.unneeded(|block| block == 1), [(4 * PAGE_BYTES, 8192), (8 * PAGE_BYTES, 16_384)]);
    assert_eq!(record.unneeded(|_| false), [(3 * PAGE_BYTES, 9 * PAGE_BYTES)], "with its header");
}

#[test]
fn what_is_given_back_of_some_blocks_never_takes_another_and_leaves_it_its_share() {
    for (kind, parts) in [
        (Layout::FullBlock, &[5000u64][..]),
        (Layout::LayerBlock, &[5000, 100, 9000]),
        (Layout::FullBlock, &[700, 700]),
        (Layout::LayerBlock, &[4096, 40_000]),
    ] {
        let layout = layout(kind, parts, 9);
        let record = lying(&layout);
        let range = record.range();
        for bits in 0..512u16 {
            let live = |block: u16| bits >> block & 1 == 1;
            let holes = record.unneeded(live);
            assert!(
                holes.is_sorted()
                    && holes.iter().all(|(at, len)| range.start <= *at && at + len <= range.end)
            );
            for block in (0..9).filter(|block| live(*block)) {
                assert!(!record.is_gone(block, &holes), "{kind:?} {parts:?} {bits:b}: block {block}");
            }
            let left = range.end - range.start - inside(&holes, range.start, range.end - range.start);
            let share = (range.end - range.start) * u64::from(bits.count_ones()) / 9;
            assert!(
                bits == 0 && left == 0 || left >= share,
                "{kind:?} {parts:?} {bits:b}: {left} of {share}"
            );
            // Any page of them alone takes only blocks that are dead.
            for &(at, len) in &holes {
                for page in (at..at + len).step_by(PAGE_BYTES as usize) {
                    let one = [(page, PAGE_BYTES)];
                    assert!((0..9).filter(|block| live(*block)).all(|block| !record.is_gone(block, &one)));
                }
            }
        }
    }
}

#[test]
fn ranges_are_subtracted_and_measured() {
    let holes = [(10, 10), (30, 5)];
    assert_eq!(without(&[(0, 40)], &holes), [(0, 10), (20, 10), (35, 5)]);
    assert_eq!(without(&[(12, 4), (18, 14)], &holes), [(20, 10)]);
    assert_eq!(without(&[(50, 4)], &holes), [(50, 4)]);
    assert_eq!((inside(&holes, 0, 100), inside(&holes, 15, 17), inside(&holes, 20, 10)), (15, 7, 0));
    assert!(touched(&holes, 19, 1) && !touched(&holes, 20, 10) && touched(&holes, 20, 11));
    assert!(!touched(&holes, 12, 0) && !touched(&[], 0, 100));
}
