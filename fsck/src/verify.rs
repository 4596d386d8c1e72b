//! Verifies a record's payload against its digests, in one pass over its bytes in the order in which they lie. Chunks
//! of an encoded record are decoded first, one at a time.

use std::collections::BTreeSet;

use kvarts_layout::codec::{Codec, Encoding};
use kvarts_layout::format::{PAGE_BYTES, is_zero, page_align};
use kvarts_layout::{Layout, RunLayout};

use crate::names::Chunks;
use crate::window::Window;

/// Stretches of dirty padding that one pass keeps.
const STRETCHES_MAX: usize = 1024;

/// A chunk that is not what its digest says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadChunk {
    /// The block within the record.
    pub block: u32,
    /// Where the chunk begins in the file.
    pub offset: u64,
    /// The digest in the record's header.
    pub expected: u32,
    /// The digest of the bytes, zero if there are none or they cannot be decoded.
    pub found: u32,
}

/// What a payload turned out to be.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    /// The first bad chunk.
    pub bad: Option<BadChunk>,
    /// Which blocks have a bad chunk; empty if none. The others are what was put.
    pub damaged: Vec<bool>,
    /// Of a record with bad chunks: stretches of whole pages that only damaged blocks have bytes on.
    pub apart: Vec<(u64, u64)>,
    /// Damaged blocks that share every page with sound ones: nothing takes them out alone.
    pub entwined: u64,
    /// Whether the digest table has another number of entries than the layout has chunks.
    pub miscounted: bool,
    /// Where padding that is not zero begins in the file.
    pub dirty: Option<u64>,
    /// The stretches of padding that are not zero: from, to.
    pub padding: Vec<(u64, u64)>,
    /// Of a sealed segment: which blocks were evicted; empty if none. Nothing is expected of them.
    pub gone: Vec<bool>,
    /// Content ids of the blocks, if they were asked for. Those of damaged and evicted blocks mean nothing.
    pub contents: Vec<[u8; 32]>,
}

impl Verified {
    /// Whether a block was evicted.
    pub fn is_gone(&self, block: u32) -> bool {
        self.gone.get(block as usize).copied().unwrap_or(false)
    }

    /// Whether every chunk is what was put.
    pub fn is_whole(&self) -> bool {
        self.bad.is_none() && !self.miscounted
    }

    /// How many blocks have a bad chunk.
    pub fn damaged_blocks(&self) -> u64 {
        self.damaged.iter().filter(|damaged| **damaged).count() as u64
    }

    /// The record without its damaged blocks, if any block of it is sound: they count as evicted.
    pub fn sound_part(&self) -> Option<Self> {
        let gone = |at: usize| {
            let block = u32::try_from(at).unwrap_or(u32::MAX);
            self.is_gone(block) || self.damaged.get(at).copied().unwrap_or(false)
        };
        let gone: Vec<bool> = (0..self.damaged.len()).map(gone).collect();
        let some = !self.miscounted && gone.iter().any(|gone| !gone);
        some.then(|| Self { bad: None, gone, ..self.clone() })
    }
}

/// Which part of which block comes next.
struct Order<'a> {
    layout: &'a RunLayout,
    next: u64,
}

impl Iterator for Order<'_> {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let (blocks, parts) = (u64::from(self.layout.blocks()), u64::from(self.layout.chunk_count()));
        let at = self.next;
        if parts == 0 || at >= blocks.saturating_mul(parts) {
            return None;
        }
        self.next = at.saturating_add(1);
        let by_block = self.layout.layout() == Layout::FullBlock || blocks == 1;
        let (block, part) = if by_block { (at / parts, at % parts) } else { (at % blocks, at / blocks) };
        Some((u32::try_from(block).ok()?, usize::try_from(part).ok()?))
    }
}

/// Reads the payload that begins at `start`. `digests` are in canonical order, over decoded bytes.
pub fn verify(
    window: &mut Window<'_>,
    start: u64,
    chunks: &Chunks,
    digests: &[u32],
    gone: Vec<bool>,
    content_ids: bool,
) -> Verified {
    let layout = &*chunks.run;
    let mut verified = Verified { gone, ..Verified::default() };
    let blocks = layout.blocks() as usize;
    let parts = layout.chunk_count() as usize;
    if digests.len() != blocks.saturating_mul(parts) {
        verified.miscounted = true;
        return verified;
    }
    let mut hashers: Vec<blake3::Hasher> =
        if content_ids { (0..blocks).map(|_| blake3::Hasher::new()).collect() } else { Vec::new() };
    let mut bad_blocks = vec![false; blocks];
    let mut decoder = Decoder::default();
    let mut at = start;
    for (block, part) in (Order { layout, next: 0 }) {
        let Some((from, to, len)) = place_of(chunks, start, (block, part)) else { break };
        if verified.is_gone(block) {
            at = to;
            continue;
        }
        check_zero(window, at, from, &mut verified);
        let hasher = hashers.get_mut(block as usize);
        let found = match &chunks.stored {
            None => digest(window, from, to, hasher),
            Some((encoding, _)) => decoder.digest(window, (from, to), (*encoding, len), hasher),
        };
        let number = (block as usize).saturating_mul(parts).saturating_add(part);
        let expected = digests.get(number).copied().unwrap_or_default();
        if found != Some(expected) && !kvarts_layout::planted!("fsck-skips-digests") {
            // What cannot be read or decoded has no digest: then what is shown is that of nothing.
            let found = found.unwrap_or_default();
            verified.bad.get_or_insert(BadChunk { block, offset: from, expected, found });
            if let Some(bad) = bad_blocks.get_mut(block as usize) {
                *bad = true;
            }
        }
        at = to;
    }
    let bytes = chunks.stored.as_ref().map_or(layout.payload_bytes(), |(_, places)| places.payload_bytes());
    let image = page_align(bytes).unwrap_or(bytes);
    check_zero(window, at, start.saturating_add(image), &mut verified);
    if verified.bad.is_some() {
        verified.damaged = bad_blocks;
        set_apart(chunks, start, &mut verified);
    }
    verified.contents = hashers.iter().map(|hasher| *hasher.finalize().as_bytes()).collect();
    verified
}

/// Finds the pages that damaged blocks have to themselves. Chunks do not overlap, so a sound one can share only its first
/// and its last page.
fn set_apart(chunks: &Chunks, start: u64, verified: &mut Verified) {
    let layout = &*chunks.run;
    let is_damaged = |block: u32| verified.damaged.get(block as usize).copied().unwrap_or(false);
    let spans = || {
        let of = |place: (u32, usize)| Some((place.0, place_of(chunks, start, place)?));
        Order { layout, next: 0 }.filter_map(of).filter(|(_, (from, to, _))| from < to)
    };
    let pages = |from: u64, to: u64| (from / PAGE_BYTES, to.saturating_sub(1) / PAGE_BYTES);
    let mut shared = BTreeSet::new();
    for (block, (from, to, _)) in spans() {
        if !is_damaged(block) && !verified.is_gone(block) {
            let (first, last) = pages(from, to);
            shared.extend([first, last]);
        }
    }
    let mut own = BTreeSet::new();
    let mut out = BTreeSet::new();
    for (block, (from, to, _)) in spans().filter(|(block, _)| is_damaged(*block)) {
        let (first, last) = pages(from, to);
        let all = kvarts_layout::planted!("repair-costs-neighbours");
        for page in (first..=last).filter(|page| all || !shared.contains(page)) {
            own.insert(page);
            out.insert(block);
        }
    }
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for page in own {
        let at = page.saturating_mul(PAGE_BYTES);
        match apart.last_mut() {
            Some((from, len)) if from.saturating_add(*len) == at => *len = len.saturating_add(PAGE_BYTES),
            _ => apart.push((at, PAGE_BYTES)),
        }
    }
    let taken_out = out.len() as u64;
    verified.entwined = verified.damaged_blocks().saturating_sub(taken_out);
    verified.apart = apart;
}

/// Where a chunk lies in the file, from and to, and how long it is.
fn place_of(chunks: &Chunks, start: u64, (block, part): (u32, usize)) -> Option<(u64, u64, u64)> {
    let place = chunks.run.parts().get(part)?;
    let (offset, len) = match &chunks.stored {
        None => (place.offset.saturating_add(place.step.saturating_mul(u64::from(block))), place.bytes),
        Some((_, places)) => {
            let span = places.chunk(block, u32::try_from(part).ok()?)?;
            (span.offset, span.len)
        }
    };
    let from = start.saturating_add(offset);
    Some((from, from.saturating_add(len), place.bytes))
}

/// Shows bytes of the file in order; false if it ends before.
fn each_piece(window: &mut Window<'_>, from: u64, to: u64, mut look: impl FnMut(&[u8])) -> bool {
    let mut at = from;
    while at < to {
        let bytes = window.some(at, to.saturating_sub(at));
        if bytes.is_empty() {
            return false;
        }
        look(bytes);
        at = at.saturating_add(bytes.len() as u64);
    }
    true
}

/// The digest of bytes of the file, which also go to the hasher; `None` if it ends before.
fn digest(
    window: &mut Window<'_>,
    from: u64,
    to: u64,
    mut hasher: Option<&mut blake3::Hasher>,
) -> Option<u32> {
    let mut crc = crc32fast::Hasher::new();
    let whole = each_piece(window, from, to, |bytes| {
        crc.update(bytes);
        if let Some(hasher) = &mut hasher {
            hasher.update(bytes);
        }
    });
    whole.then(|| crc.finalize())
}

/// Memory for decoding: two chunks, which the format bounds, and the codec's own.
#[derive(Default)]
struct Decoder {
    codec: Option<Codec>,
    stored: Vec<u8>,
    chunk: Vec<u8>,
}

impl Decoder {
    /// The digest of the chunk of `len` bytes that is stored from..to; `None` if it cannot be decoded.
    fn digest(
        &mut self,
        window: &mut Window<'_>,
        (from, to): (u64, u64),
        (encoding, len): (Encoding, u64),
        hasher: Option<&mut blake3::Hasher>,
    ) -> Option<u32> {
        let Self { codec, stored, chunk } = self;
        stored.clear();
        if !each_piece(window, from, to, |bytes| stored.extend_from_slice(bytes)) {
            return None;
        }
        chunk.resize(usize::try_from(len).ok()?, 0);
        let codec = match codec {
            Some(codec) => codec,
            None => codec.insert(Codec::new().ok()?),
        };
        codec.decode(encoding, stored, chunk).ok()?;
        if let Some(hasher) = hasher {
            hasher.update(chunk);
        }
        Some(crc32fast::hash(chunk))
    }
}

fn check_zero(window: &mut Window<'_>, from: u64, to: u64, verified: &mut Verified) {
    let mut at = if kvarts_layout::planted!("fsck-skips-padding") { to } else { from };
    let mut dirty = None;
    while at < to {
        let bytes = window.some(at, to.saturating_sub(at));
        if bytes.is_empty() {
            break;
        }
        if dirty.is_none() && !is_zero(bytes) {
            let within = bytes.iter().position(|byte| *byte != 0).unwrap_or(0);
            dirty = Some(at.saturating_add(within as u64));
        }
        at = at.saturating_add(bytes.len() as u64);
    }
    if let Some(place) = dirty {
        verified.dirty.get_or_insert(place);
        if verified.padding.len() < STRETCHES_MAX {
            verified.padding.push((from, to));
        }
    }
}
