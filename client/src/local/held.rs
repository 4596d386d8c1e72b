//! Memory of reads that were under way when their connection ended.
//!
//! A disk that was told to write into memory does so, late or not, whatever became of the connection or of the server. So
//! time alone never gives such memory back. First the server's side of the connection has to be closed: from then on only
//! disks write that had begun. Then their pages are taken out of the files that the memory lies in (disks write whole pages,
//! and what was announced is left as it is), and late writes go to unreachable memory. Where pages must stay what they
//! are, because a driver knows them or they are the engine's own, and where the kernel cannot take them out, the server is
//! asked whether a device may still write. A restarted server does not know: then the memory is kept.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::buffers::shared;

use super::reading::Reading;
use kvarts_wire::local::Mode;

/// How soon it is tried again, first and later.
const AGAIN: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// The memory of one read.
struct Held {
    reading: Reading,
    /// Pages that are to be taken out of files.
    pages: Vec<(Arc<OwnedFd>, Range<u64>)>,
    /// Some of its pages must stay what they are.
    stays: bool,
}

/// The ranges together where they touch, and of each the whole pages.
fn whole_pages(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut().filter(|last| last.end >= range.start) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    let page = PAGE as u64;
    let whole = |range: Range<u64>| range.start.next_multiple_of(page)..range.end / page * page;
    joined.into_iter().map(whole).filter(|range| range.start < range.end).collect()
}

impl Held {
    fn new(reading: Reading) -> Self {
        let (mut ranges, mut stays) = (BTreeMap::<u64, Vec<Range<u64>>>::new(), false);
        for chunk in reading.unannounced() {
            let region = chunk.region();
            // Memory of windows is not used any more.
            let mode = reading.files.iter().find(|(id, ..)| *id == region.id()).map(|(_, mode, _)| *mode);
            match mode {
                Some(Mode::Copied) => {}
                Some(_) if region.keeps_pages() => stays = true,
                Some(_) => {
                    let start = chunk.offset() as u64;
                    ranges.entry(region.id()).or_default().push(start..start + chunk.len() as u64);
                }
                None => {}
            }
        }
        let mut pages = Vec::new();
        for (id, ranges) in ranges {
            let file = reading.files.iter().find(|(other, ..)| *other == id).map(|(_, _, file)| file);
            pages.extend(file.into_iter().flat_map(|file| {
                whole_pages(ranges.clone()).into_iter().map(|range| (Arc::clone(file), range))
            }));
        }
        Self { reading, pages, stays }
    }

    /// Takes out what can be. True if what is left is not written to any more.
    fn is_free(&mut self) -> bool {
        self.pages.retain(|(file, range)| !shared::replace(file, range.clone()).unwrap_or_default());
        self.pages.is_empty() && !self.stays
    }
}

/// Keeps the memory of reads until it cannot be written to. `promised` if the server's side ended every other way to it;
/// `count` is told how many bytes are kept; `settled` asks a server that knows, or says that none will ever know (none).
pub(super) fn keep(
    readings: Vec<Reading>,
    promised: bool,
    count: impl Fn(u64),
    settled: impl Fn() -> Option<bool>,
) {
    let mut held: Vec<Held> = readings.into_iter().map(Held::new).collect();
    let mut wait = AGAIN.0;
    loop {
        for mut one in std::mem::take(&mut held) {
            if promised && one.is_free() {
                one.reading.released();
            } else {
                held.push(one);
            }
        }
        let bytes =
            |held: &Held| held.reading.unannounced().iter().map(|chunk| chunk.len() as u64).sum::<u64>();
        count(held.iter().map(bytes).sum());
        if held.is_empty() {
            return;
        }
        match settled() {
            Some(true) => {
                count(0);
                return held.into_iter().for_each(|one| one.reading.released());
            }
            // No server will know: what cannot be taken out stays as it is for as long as this process lasts.
            None if held.iter().all(|one| one.stays || !promised) => {
                let _kept = ManuallyDrop::new(held);
                return;
            }
            _ => {}
        }
        std::thread::park_timeout(wait);
        wait = (wait * 2).min(AGAIN.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole_that_belong_to_one_read_or_to_two_that_touch() {
        let one = |ranges: Vec<Range<u64>>| {
            let pages = whole_pages(ranges);
            assert_eq!(pages.len(), 1, "{pages:?}");
            pages.into_iter().next()
        };
        assert_eq!(whole_pages(vec![8192..20480, 0..4096]), [0..4096, 8192..20480]);
        assert_eq!(one(vec![6000..9000, 100..6000]), Some(4096..8192));
        assert_eq!(one(vec![1..4096, 4096..8193]), Some(4096..8192));
        assert!(whole_pages(vec![100..4000, 4200..8100]).is_empty());
        assert!(whole_pages(Vec::new()).is_empty());
    }
}
