//! Record headers that reads have proved, kept for the next read of the same record.
//!
//! A header is found under the generation of its segment, so that one of an earlier generation is never used.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use kvarts_layout::format::body::{Blocks, layout_code};
use kvarts_layout::{BlockKey, OriginId};

use super::decode::Stored;
use crate::engine::shared::record_class::RecordClass;
use crate::engine::volume::segment::RecordPlace;

/// Bytes of headers that one shard keeps.
const CACHE_BYTES_MAX: usize = 4 << 20;

/// What a read needs of a header whose tag has been verified.
#[derive(Debug)]
pub(crate) struct Header {
    blocks: Blocks,
    digests: Vec<u32>,
    chunks: usize,
    /// Where chunks lie, if they are not where the layout has them.
    stored: Option<Stored>,
}

impl Header {
    pub(crate) fn new(blocks: Blocks, digests: Vec<u32>, stored: Option<Stored>) -> Self {
        let chunks = digests.len() / blocks.blocks.len().max(1);
        Self { blocks, digests, chunks, stored }
    }

    /// Where chunks lie, if they are not where the layout has them.
    pub(crate) fn stored(&self) -> Option<&Stored> {
        self.stored.as_ref()
    }

    /// Whether the record's bytes lie as those of a record of this class and number of blocks do. A moved copy may stand
    /// where another arrangement of the same blocks stood.
    pub(crate) fn is_arranged_as(&self, class: &RecordClass, blocks: u16) -> bool {
        self.blocks.encoding == class.encoding
            && self.blocks.layout == layout_code(class.layout)
            && self.blocks.layout_version == class.layout_version
            && self.blocks.blocks.len() == usize::from(blocks)
    }

    /// Whether block `block` of the record is the one under this key, of this class.
    pub(crate) fn is_block(&self, block: u32, key: &BlockKey, class: &RecordClass) -> bool {
        self.blocks.namespace == class.namespace.local
            && self.blocks.group == class.group.0
            && self.blocks.coordinate == class.coordinate.to_u64()
            && self.blocks.blocks.get(block as usize).is_some_and(|name| name.key == key.0)
    }

    /// Which production of its bytes a block of the record is.
    pub(crate) fn origin(&self, block: u32) -> Option<OriginId> {
        self.blocks.blocks.get(block as usize).map(|name| OriginId(name.origin))
    }

    /// When its blocks were produced, in milliseconds since 1970.
    pub(crate) fn created_ms(&self) -> u64 {
        self.blocks.created_ms
    }

    /// The digest of a chunk of a block.
    pub(crate) fn digest(&self, block: u32, chunk: u32) -> Option<u32> {
        let chunk = chunk as usize;
        let within = chunk < self.chunks;
        within.then(|| self.digests.get(block as usize * self.chunks + chunk).copied()).flatten()
    }

    fn bytes(&self) -> usize {
        let places = self.stored.as_ref().map_or(0, |stored| stored.places.memory_bytes());
        let lengths = self.blocks.stored_lengths.len() * 4;
        size_of::<Self>() + self.digests.len() * 4 + self.blocks.blocks.len() * 48 + places + lengths
    }
}

#[derive(Debug, Default)]
struct Kept {
    headers: BTreeMap<RecordPlace, Rc<Header>>,
    /// Oldest first.
    order: VecDeque<RecordPlace>,
    bytes: usize,
}

/// The headers that one shard keeps; the oldest leave first.
#[derive(Debug, Default)]
pub(crate) struct HeaderCache(RefCell<Kept>);

impl HeaderCache {
    pub(crate) fn get(&self, key: RecordPlace) -> Option<Rc<Header>> {
        self.0.borrow().headers.get(&key).map(Rc::clone)
    }

    /// Forgets those of a segment that is recycled: no read will ask for them again, and until others have
    /// pushed them out they would only take memory.
    pub(crate) fn forget_segment(&self, number: u32) {
        let kept = &mut *self.0.borrow_mut();
        let place = |generation, offset| RecordPlace { segment: number, generation, offset };
        let gone = kept.headers.extract_if(place(0, 0)..=place(u64::MAX, u64::MAX), |_, _| true);
        let bytes: usize = gone.map(|(_, header)| header.bytes()).sum();
        if bytes > 0 {
            kept.bytes -= bytes;
            kept.order.retain(|one| one.segment != number);
        }
    }

    /// Forgets those of a segment's generation that lie in these ranges: they were given back.
    pub(crate) fn forget_punched(&self, number: u32, generation: u64, ranges: &[(u64, u64)]) {
        let kept = &mut *self.0.borrow_mut();
        let mut gone = 0;
        for (offset, len) in ranges {
            let place = |offset| RecordPlace { segment: number, generation, offset };
            let (from, end) = (place(*offset), place(offset + len));
            gone +=
                kept.headers.extract_if(from..end, |_, _| true).map(|(_, one)| one.bytes()).sum::<usize>();
        }
        if gone > 0 {
            kept.bytes -= gone;
            let Kept { headers, order, .. } = kept;
            order.retain(|key| headers.contains_key(key));
        }
    }

    /// Headers, or places for them where there are more.
    pub(crate) fn places(&self) -> usize {
        let kept = self.0.borrow();
        kept.headers.len().max(kept.order.len())
    }

    /// Forgets all of them.
    pub(crate) fn forget(&self) {
        *self.0.borrow_mut() = Kept::default();
    }

    pub(crate) fn insert(&self, key: RecordPlace, header: &Rc<Header>) {
        let mut kept = self.0.borrow_mut();
        if kept.headers.insert(key, Rc::clone(header)).is_some() {
            return;
        }
        kept.bytes += header.bytes();
        kept.order.push_back(key);
        while kept.bytes > CACHE_BYTES_MAX
            && let Some(oldest) = kept.order.pop_front()
        {
            if let Some(header) = kept.headers.remove(&oldest) {
                kept.bytes -= header.bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvarts_layout::format::body::Parent;

    use super::*;

    fn header() -> Rc<Header> {
        let blocks = Blocks {
            coordinate: 0,
            created_ms: 0,
            expires_ms: 0,
            namespace: 1,
            spec: 1,
            group: 0,
            blocks: Vec::new(),
            stored_lengths: Vec::new(),
            extensions: Vec::new(),
            first_block: None,
            layout_version: 1,
            layout: 0,
            encoding: 0,
            parent: Parent::Root,
        };
        Rc::new(Header::new(blocks, vec![1, 2, 3], None))
    }

    #[test]
    fn headers_that_were_given_back_take_no_memory() {
        let headers = HeaderCache::default();
        let place = |(segment, generation, offset)| RecordPlace { segment, generation, offset };
        for key in [(1, 1, 4096), (1, 1, 8192), (1, 1, 16384), (1, 2, 8192), (2, 1, 8192)] {
            headers.insert(place(key), &header());
        }
        let before = headers.0.borrow().bytes;
        headers.forget_punched(1, 1, &[(8192, 4096), (16384, 65536)]);
        let left: Vec<RecordPlace> = headers.0.borrow().headers.keys().copied().collect();
        assert_eq!(left, [(1, 1, 4096), (1, 2, 8192), (2, 1, 8192)].map(place));
        assert_eq!((headers.places(), headers.0.borrow().bytes), (3, before / 5 * 3));
        headers.forget_segment(1);
        assert_eq!(headers.places(), 1);
    }
}
