//! The copies of one partition.

use crate::partition::Tag;

/// Entries of a chunk: it is split when it has as many.
const CHUNK_MAX: usize = 512;

/// Of a stamp the bit that says that the copy was asked for.
const ASKED: u16 = 1 << 15;

/// A copy, as it is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    tag: Tag,
    pub(super) node: u16,
    /// The snapshot of its node that named it last, or that was the last when an event did; and whether it was asked for since room
    /// was last looked for beside it.
    stamp: u16,
}

impl Entry {
    pub(super) fn new(tag: Tag, node: u16, snapshot: u16) -> Self {
        Self { tag, node, stamp: snapshot & !ASKED }
    }

    /// It was named in this snapshot, or since.
    pub(super) fn name(&mut self, snapshot: u16) {
        self.stamp = (self.stamp & ASKED) | (snapshot & !ASKED);
    }

    pub(super) fn is_of(&self, snapshot: u16) -> bool {
        self.stamp & !ASKED == snapshot & !ASKED
    }
}

/// Where a block's copies are on a shelf.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) chunk: usize,
    pub(super) places: std::ops::Range<usize>,
}

/// One partition: chunks in the order of tags, so that an insertion moves the entries of one chunk and not of all. The copies of
/// a block are in one chunk.
#[derive(Clone, Debug, Default)]
pub(super) struct Shelf {
    chunks: Vec<Vec<Entry>>,
    /// The departures that were applied to it.
    pub(super) swept: u64,
}

impl Shelf {
    pub(super) fn empty(swept: u64) -> Self {
        Self { chunks: Vec::new(), swept }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The places of a block's copies, or where they would be.
    pub(super) fn find(&self, tag: &Tag) -> Found {
        let ends_before = |chunk: &Vec<Entry>| chunk.last().is_none_or(|last| last.tag < *tag);
        let chunk = self.chunks.partition_point(ends_before).min(self.chunks.len().saturating_sub(1));
        let entries = self.chunks.get(chunk).map(Vec::as_slice).unwrap_or_default();
        let from = entries.partition_point(|entry| entry.tag < *tag);
        let copies = entries.iter().skip(from).take_while(|entry| entry.tag == *tag).count();
        Found { chunk, places: from..from + copies }
    }

    pub(super) fn copies(&self, found: &Found) -> &[Entry] {
        self.chunks.get(found.chunk).and_then(|chunk| chunk.get(found.places.clone())).unwrap_or_default()
    }

    /// These copies were asked for.
    pub(super) fn note_asked(&mut self, found: &Found) {
        let copies = self.chunks.get_mut(found.chunk).and_then(|chunk| chunk.get_mut(found.places.clone()));
        copies.unwrap_or_default().iter_mut().for_each(|entry| entry.stamp |= ASKED);
    }

    pub(super) fn entry(&mut self, chunk: usize, at: usize) -> Option<&mut Entry> {
        self.chunks.get_mut(chunk)?.get_mut(at)
    }

    /// Behind the copies that were found.
    pub(super) fn insert(&mut self, found: &Found, entry: Entry) {
        if self.chunks.is_empty() {
            self.chunks.push(Vec::new());
        }
        let Some(chunk) = self.chunks.get_mut(found.chunk) else { return };
        if chunk.len() == chunk.capacity() {
            chunk.reserve_exact(chunk.len() / 8 + 4);
        }
        chunk.insert(found.places.end, entry);
        if chunk.len() < CHUNK_MAX {
            return;
        }
        // Between two blocks: the copies of one stay together.
        let middle = chunk.get(chunk.len() / 2).map(|entry| entry.tag);
        let at = chunk.partition_point(|entry| Some(entry.tag) < middle);
        let second = chunk.split_off(at);
        chunk.shrink_to_fit();
        self.chunks.insert(found.chunk + 1, second);
    }

    pub(super) fn remove(&mut self, chunk: usize, at: usize) {
        if let Some(entries) = self.chunks.get_mut(chunk) {
            entries.remove(at);
            if entries.is_empty() {
                self.chunks.remove(chunk);
            }
        }
    }

    /// Drops a copy beside a place that nothing has asked for lately, of a node whose copies may be dropped, and gives its node. Copies that were
    /// asked for stay this time, and have to be asked for again until the next.
    pub(super) fn drop_beside(&mut self, found: &Found, may_drop: impl Fn(u16) -> bool) -> Option<u16> {
        let entries = self.chunks.get_mut(found.chunk)?;
        // Not always the first one of the chunk: those of low tags would have the shortest lives.
        let begin = found.places.start.min(entries.len());
        let mut drop = None;
        for at in (begin..entries.len()).chain(0..begin) {
            let Some(entry) = entries.get_mut(at).filter(|entry| may_drop(entry.node)) else { continue };
            if entry.stamp & ASKED == 0 {
                drop = Some((at, entry.node));
                break;
            }
            entry.stamp &= !ASKED;
        }
        let (at, node) = drop?;
        self.remove(found.chunk, at);
        Some(node)
    }

    /// Keeps some entries; the others are told by their nodes.
    pub(super) fn retain(&mut self, keep: impl Fn(&Entry) -> bool, mut gone: impl FnMut(u16)) {
        for chunk in &mut self.chunks {
            chunk.retain(|entry| {
                let stays = keep(entry);
                if !stays {
                    gone(entry.node);
                }
                stays
            });
        }
        self.chunks.retain(|chunk| !chunk.is_empty());
    }

    pub(super) fn len(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        let room: usize = self.chunks.iter().map(Vec::capacity).sum();
        room * size_of::<Entry>() + self.chunks.capacity() * size_of::<Vec<Entry>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_takes_as_little_and_an_insertion_moves_as_few_however_many_there_are() {
        let mut shelf = Shelf::default();
        for n in 0..100_000u32 {
            let tag = Tag(u128::from(n.reverse_bits()).to_be_bytes());
            // As many copies of a block as there may be, now and then.
            for node in 0..if n % 100 == 0 { 16 } else { 1 } {
                let found = shelf.find(&tag);
                shelf.insert(&found, Entry::new(tag, node, 0));
            }
        }
        let longest = shelf.chunks.iter().map(Vec::len).max().unwrap();
        assert!(longest < CHUNK_MAX, "{longest}");
        assert!(shelf.bytes() as f64 / shelf.len() as f64 <= 48.0);
        let tags: Vec<Tag> = shelf.chunks.iter().flatten().map(|entry| entry.tag).collect();
        assert!(tags.is_sorted());
        let together = shelf.chunks.windows(2).all(|pair| pair[0].last().unwrap().tag < pair[1][0].tag);
        assert!(together, "the copies of a block are in two chunks");
    }
}
