//! Pages of a file, as bits.

/// Bytes of a page.
pub(super) const PAGE_BYTES: u64 = 4096;

/// Which pages of a file are something: set aside, or written.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages(Vec<u64>);

impl Pages {
    fn set(&mut self, pages: std::ops::Range<u64>, on: bool) {
        if on && self.0.len() < (pages.end as usize).div_ceil(64) {
            self.0.resize((pages.end as usize).div_ceil(64), 0);
        }
        for page in pages {
            if let Some(word) = self.0.get_mut((page / 64) as usize) {
                let bit = 1 << (page % 64);
                *word = if on { *word | bit } else { *word & !bit };
            }
        }
    }

    /// Every page that a range touches.
    pub(super) fn add(&mut self, offset: u64, len: u64) {
        self.set(offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES), true);
    }

    /// Pages that lie in a range as a whole are none any more.
    pub(super) fn punch(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len) / PAGE_BYTES;
        self.set(offset.div_ceil(PAGE_BYTES)..end.min(self.0.len() as u64 * 64), false);
    }

    /// Pages behind the end of a file of this length are none any more.
    pub(super) fn cut(&mut self, len: u64) {
        let end = self.0.len() as u64 * 64;
        self.set(len.div_ceil(PAGE_BYTES).min(end)..end, false);
    }

    pub(super) fn has(&self, page: u64) -> bool {
        self.0.get((page / 64) as usize).is_some_and(|word| word & (1 << (page % 64)) != 0)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum::<u64>() * PAGE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_add_what_they_touch_and_punch_what_they_hold() {
        let mut pages = Pages::default();
        pages.add(100, 2 * PAGE_BYTES);
        assert_eq!(pages.bytes(), 3 * PAGE_BYTES);
        pages.punch(100, 2 * PAGE_BYTES);
        assert_eq!((pages.has(0), pages.has(1), pages.has(2)), (true, false, true));
        pages.punch(0, u64::MAX);
        assert_eq!(pages.bytes(), 0);
        pages.add(0, 100 * PAGE_BYTES);
        pages.cut(70 * PAGE_BYTES + 1);
        assert_eq!(pages.bytes(), 71 * PAGE_BYTES);
    }
}
