//! Pictures of segments in a terminal: one sign for each segment of a store, or for each stretch of one segment.

use kvarts_fsck::contents::{Run, SegmentView, State};

/// Signs in a row.
const ROW: usize = 64;

/// What the signs of [`store`] mean.
pub(super) const STORE_KEY: &str = "key: # live  + more than half live  - less than half  x dead  . free  w being written  ? damaged or set aside";
/// What the signs of [`segment`] mean.
pub(super) const SEGMENT_KEY: &str = "key: # live  + partly live  x dead  = overhead  . free";

fn sign(view: &SegmentView) -> char {
    match view.state {
        State::Free => '.',
        State::Damaged | State::Quarantined => '?',
        _ if view.problems > 0 => '?',
        State::Open => 'w',
        State::Sealed | State::Suspect => {
            let records = view.live_bytes.saturating_add(view.dead_bytes);
            let live = view.live_bytes.saturating_mul(100).checked_div(records).unwrap_or(0);
            match live {
                95.. => '#',
                50.. => '+',
                1.. => '-',
                _ if view.live_bytes > 0 => '-',
                _ => 'x',
            }
        }
    }
}

/// One sign for each segment, in rows by shard; at most `rows` rows of each shard. Numbers without a file are blank.
pub(super) fn store(segments: &[SegmentView], rows: usize) -> String {
    let mut text = String::new();
    let mut rest = segments;
    while let Some(first) = rest.first() {
        let len = rest.iter().take_while(|view| view.shard == first.shard).count();
        let (shard, behind) = rest.split_at(len);
        rest = behind;
        let last = shard.last().map_or(0, |view| view.segment);
        let mut signs = vec![' '; (last as usize).saturating_add(1).min(ROW.saturating_mul(rows))];
        for view in shard {
            if let Some(place) = signs.get_mut(view.segment as usize) {
                *place = sign(view);
            }
        }
        for (row, signs) in signs.chunks(ROW).enumerate() {
            let line: String = signs.iter().collect();
            text +=
                &format!("shard {:>4} {:>8}  {}\n", first.shard, row.saturating_mul(ROW), line.trim_end());
        }
        let shown = ROW.saturating_mul(rows);
        if (last as usize) >= shown {
            text += &format!("shard {:>4}           ... up to segment {last}\n", first.shard);
        }
    }
    text
}

/// A segment front to back in one row: of what most of each stretch is.
pub(super) fn segment(view: &SegmentView, runs: &[&Run], listed: &[(u64, u64)]) -> String {
    let width = ROW as u64;
    let bytes = view.bytes.max(1);
    let mut signs = vec!['.'; ROW];
    let mut paint = |from: u64, to: u64, sign: char| {
        let first = from.saturating_mul(width).checked_div(bytes).unwrap_or(0);
        let last = to.saturating_sub(1).saturating_mul(width).checked_div(bytes).unwrap_or(0);
        for at in first..=last.min(width.saturating_sub(1)) {
            if let Some(place) = signs.get_mut(usize::try_from(at).unwrap_or(ROW)) {
                *place = sign;
            }
        }
    };
    for &(from, to) in listed {
        paint(from, to, '=');
    }
    for run in runs {
        let sign = match run.live() {
            0 => 'x',
            live if live == run.fates.len() as u64 => '#',
            _ => '+',
        };
        paint(run.offset, run.offset.saturating_add(run.bytes()), sign);
    }
    signs.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(segment: u32, state: State, live_bytes: u64, dead_bytes: u64) -> SegmentView {
        SegmentView {
            shard: 3,
            segment,
            state,
            generation: 1,
            records: 1,
            live_blocks: 1,
            bytes: 1000,
            live_bytes,
            dead_bytes,
            overhead_bytes: 0,
            free_bytes: 0,
            problems: 0,
        }
    }

    #[test]
    fn each_segment_has_the_sign_of_what_it_is() {
        let mut damaged = view(8, State::Sealed, 1, 1);
        damaged.problems = 1;
        let all = [
            view(0, State::Sealed, 99, 1),
            view(1, State::Sealed, 60, 40),
            view(2, State::Sealed, 1, 999),
            view(3, State::Sealed, 0, 9),
            view(4, State::Free, 0, 0),
            view(6, State::Open, 5, 5),
            view(7, State::Quarantined, 0, 0),
            damaged,
        ];
        assert_eq!(store(&all, 2), "shard    3        0  #+-x. w??\n");
        let far = [view(0, State::Free, 0, 0), view(200, State::Free, 0, 0)];
        assert_eq!(store(&far, 1), "shard    3        0  .\nshard    3           ... up to segment 200\n");
    }

    #[test]
    fn a_segment_is_painted_where_its_bytes_are() {
        let text = segment(&view(0, State::Sealed, 0, 0), &[], &[(0, 100), (990, 1000)]);
        assert_eq!(text, format!("{}{}=", "=".repeat(7), ".".repeat(56)));
    }
}
