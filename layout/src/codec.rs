//! How the chunks of an encoded record are stored: each compressed on its own, so that any chunk can be read alone.
//!
//! Pure functions on bytes. Invariants:
//! - a chunk whose stored length equals its own length is stored as it is; a stored length is never zero and never
//!   greater than the chunk's own, so decoding writes into memory whose size the model's shape decides, and a stored
//!   chunk that would decode to more or fewer bytes is refused;
//! - digests are over canonical bytes: they are verified after decoding.
//!
//! 16-bit numbers are split into byte planes first: all low bytes, then all high bytes, then the last byte of an odd
//! length. The high bytes (sign and exponent) of neighbours are alike; level 1 is smaller and faster than level 3 on
//! them.

use std::fmt;

use crate::arrange::{RunLayout, Span};
use crate::format::body::{ENCODING_ZSTD, ENCODING_ZSTD_PLANES};
use crate::shape::Layout;

/// The level of zstd.
const LEVEL: i32 = 1;
/// An encoded record is kept only if it takes less than this many hundredths of what the raw one takes: below a gain
/// of a tenth, decoding costs more than it saves.
const KEPT_BELOW_HUNDREDTHS: u64 = 91;

/// The longest chunk that an encoded record may have: decoding one takes this much memory twice at most.
pub const MAX_ENCODED_CHUNK_BYTES: u64 = 64 << 20;

/// How chunks are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    /// zstd over byte planes: 16-bit numbers.
    Planes,
    /// zstd over the bytes as they are: everything else.
    Plain,
}

impl Encoding {
    /// The byte that names it in a record.
    pub const fn code(self) -> u8 {
        match self {
            Self::Planes => ENCODING_ZSTD_PLANES,
            Self::Plain => ENCODING_ZSTD,
        }
    }

    /// The encoding that a byte names; `None` for raw and for those of later versions.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            ENCODING_ZSTD_PLANES => Some(Self::Planes),
            ENCODING_ZSTD => Some(Self::Plain),
            _ => None,
        }
    }
}

/// Why stored bytes are not a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CodecError {
    /// The decoder refused them.
    Damaged,
    /// They are those of a chunk of another length.
    Length {
        /// Bytes of the chunk.
        expected: usize,
        /// Bytes that came out.
        found: usize,
    },
    /// There was no memory for a compressor.
    NoMemory,
}

impl fmt::Display for CodecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged => f.write_str("the stored chunk cannot be decoded"),
            Self::Length { expected, found } => {
                write!(
                    f,
                    "the stored chunk decodes to {found} bytes instead of the {expected} bytes of the \
                    model"
                )
            }
            Self::NoMemory => f.write_str("the memory for a compressor could not be allocated"),
        }
    }
}

impl std::error::Error for CodecError {}

/// Whether so much is gained that the encoded form is kept.
pub const fn pays(raw_bytes: u64, stored_bytes: u64) -> bool {
    stored_bytes.saturating_mul(100) < raw_bytes.saturating_mul(KEPT_BELOW_HUNDREDTHS)
}

/// Compresses and decompresses chunks, one after the other, with memory of its own that is used again.
pub struct Codec {
    compressor: zstd::bulk::Compressor<'static>,
    decompressor: zstd::bulk::Decompressor<'static>,
    planes: Vec<u8>,
}

impl fmt::Debug for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Codec({} bytes of planes)", self.planes.len())
    }
}

impl Codec {
    /// A codec, or why there is none.
    pub fn new() -> Result<Self, CodecError> {
        Ok(Self {
            compressor: zstd::bulk::Compressor::new(LEVEL).map_err(|_| CodecError::NoMemory)?,
            decompressor: zstd::bulk::Decompressor::new().map_err(|_| CodecError::NoMemory)?,
            planes: Vec::new(),
        })
    }

    /// Appends a chunk as it is stored and gives its stored length: the chunk itself where compression gains nothing.
    pub fn encode(
        &mut self,
        encoding: Encoding,
        chunk: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<usize, CodecError> {
        let packed = match encoding {
            Encoding::Plain => self.compressor.compress(chunk),
            Encoding::Planes => {
                split_planes(chunk, &mut self.planes);
                self.compressor.compress(&self.planes)
            }
        };
        let packed = packed.map_err(|_| CodecError::NoMemory)?;
        let stored = if packed.len() < chunk.len() { packed.as_slice() } else { chunk };
        out.extend_from_slice(stored);
        Ok(stored.len())
    }

    /// Fills `chunk` from what is stored of it. The memory written is `chunk` alone; on an error its content means
    /// nothing.
    pub fn decode(&mut self, encoding: Encoding, stored: &[u8], chunk: &mut [u8]) -> Result<(), CodecError> {
        if stored.len() == chunk.len() {
            chunk.copy_from_slice(stored);
            return Ok(());
        }
        let expected = chunk.len();
        let found = match encoding {
            Encoding::Plain => self.decompressor.decompress_to_buffer(stored, chunk),
            Encoding::Planes => {
                self.planes.clear();
                self.planes.resize(expected, 0);
                self.decompressor.decompress_to_buffer(stored, self.planes.as_mut_slice())
            }
        };
        let found = found.map_err(|_| CodecError::Damaged)?;
        if found != expected {
            return Err(CodecError::Length { expected, found });
        }
        if encoding == Encoding::Planes {
            join_planes(&self.planes, chunk);
        }
        Ok(())
    }

    /// The encoding that makes more of these chunks of a record, or `None` if neither pays. A few chunks tell:
    /// those of a record are of one kind.
    pub fn choose<'a>(&mut self, samples: impl Iterator<Item = &'a [u8]>) -> Option<Encoding> {
        let (mut raw, mut planes, mut plain) = (0usize, 0usize, 0usize);
        let mut scratch = Vec::new();
        for chunk in samples {
            scratch.clear();
            raw = raw.saturating_add(chunk.len());
            planes = planes.saturating_add(self.encode(Encoding::Planes, chunk, &mut scratch).ok()?);
            plain = plain.saturating_add(self.encode(Encoding::Plain, chunk, &mut scratch).ok()?);
        }
        let (encoding, stored) =
            if planes <= plain { (Encoding::Planes, planes) } else { (Encoding::Plain, plain) };
        let (raw, stored) = (u64::try_from(raw).ok()?, u64::try_from(stored).ok()?);
        pays(raw, stored).then_some(encoding)
    }
}

/// Low bytes, high bytes, and the byte that an odd length leaves.
fn split_planes(chunk: &[u8], planes: &mut Vec<u8>) {
    let (pairs, odd) = chunk.as_chunks::<2>();
    planes.clear();
    planes.extend(pairs.iter().map(|[low, _]| *low));
    planes.extend(pairs.iter().map(|[_, high]| *high));
    planes.extend_from_slice(odd);
}

fn join_planes(planes: &[u8], chunk: &mut [u8]) {
    let (pairs, odd) = chunk.as_chunks_mut::<2>();
    let (low, rest) = planes.split_at_checked(pairs.len()).unwrap_or_default();
    let (high, last) = rest.split_at_checked(pairs.len()).unwrap_or_default();
    for ((pair, low), high) in pairs.iter_mut().zip(low).zip(high) {
        *pair = [*low, *high];
    }
    odd.iter_mut().zip(last).for_each(|(odd, last)| *odd = *last);
}

/// Whether no chunk of a run is too long for encoded records.
pub fn may_be_encoded(layout: &RunLayout) -> bool {
    layout.parts().iter().all(|part| part.bytes <= MAX_ENCODED_CHUNK_BYTES)
}

/// Where the stored chunks of an encoded record lie in its payload: one after the other, without gaps, in the order
/// in which the layout has their raw chunks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredPlaces {
    /// By place in the digest table.
    spans: Vec<Span>,
    chunks: usize,
    payload_bytes: u64,
}

impl StoredPlaces {
    /// The places of chunks of these stored lengths, which stand in the order of the digest table; `None` if there are
    /// more or fewer than the run has chunks, one is empty or longer than its chunk, or the run has a chunk that is
    /// too long for encoded records.
    pub fn new(layout: &RunLayout, lengths: &[u32]) -> Option<Self> {
        let chunks = layout.parts().len();
        let blocks = usize::try_from(layout.blocks()).ok()?;
        if chunks.checked_mul(blocks)? != lengths.len() || !may_be_encoded(layout) {
            return None;
        }
        let mut spans = vec![Span { offset: 0, len: 0 }; lengths.len()];
        let mut end = 0u64;
        let mut place = |block: usize, part: usize| {
            let at = block.checked_mul(chunks)?.checked_add(part)?;
            let len = u64::from(*lengths.get(at)?);
            let raw = layout.parts().get(part)?.bytes;
            if len == 0 || len > raw {
                return None;
            }
            *spans.get_mut(at)? = Span { offset: end, len };
            end = end.checked_add(len)?;
            Some(())
        };
        match layout.layout() {
            Layout::FullBlock => {
                (0..blocks).try_for_each(|block| (0..chunks).try_for_each(|part| place(block, part)))?;
            }
            Layout::LayerBlock => {
                (0..chunks).try_for_each(|part| (0..blocks).try_for_each(|block| place(block, part)))?;
            }
        }
        Some(Self { spans, chunks, payload_bytes: end })
    }

    /// Where a chunk is stored in the payload: the chunk with this canonical index of a block.
    pub fn chunk(&self, block: u32, part: u32) -> Option<Span> {
        let (block, part) = (usize::try_from(block).ok()?, usize::try_from(part).ok()?);
        let at = block.checked_mul(self.chunks)?.checked_add(part)?;
        (part < self.chunks).then(|| self.spans.get(at).copied()).flatten()
    }

    /// Bytes of the payload: the record's `payload_bytes` must be this.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Bytes of memory that the places take.
    pub fn memory_bytes(&self) -> usize {
        self.spans.len().saturating_mul(size_of::<Span>())
    }
}

/// Entry point for fuzzers: any bytes as a stored chunk of any length up to 64 KiB. Decoding writes no more than the
/// chunk, and what decodes is what an encoder would have been given.
pub fn fuzz_chunk(data: &[u8]) {
    let Some((head, stored)) = data.split_first_chunk::<3>() else { return };
    let [kind, low, high] = *head;
    let encoding = if kind & 1 == 0 { Encoding::Planes } else { Encoding::Plain };
    let mut chunk = vec![0; usize::from(u16::from_le_bytes([low, high]))];
    let Ok(mut codec) = Codec::new() else { return };
    if codec.decode(encoding, stored, &mut chunk).is_ok() && !chunk.is_empty() {
        let (mut again, mut stored) = (vec![0; chunk.len()], Vec::new());
        let encoded = codec.encode(encoding, &chunk, &mut stored);
        assert!(encoded.is_ok() && stored.len() <= chunk.len(), "a chunk could not be encoded again");
        assert_eq!(codec.decode(encoding, &stored, &mut again), Ok(()));
        assert_eq!(again, chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrange::LAYOUT_VERSION;
    use crate::shape::{BlockShape, ChunkShape, LayerShape};
    use proptest::prelude::*;

    const BOTH: [Encoding; 2] = [Encoding::Planes, Encoding::Plain];

    /// Numbers of 16 bits whose high bytes are alike, as those of a model's state are.
    fn numbers(count: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            [(state >> 40) as u8, 0x3e + ((state >> 60) & 3) as u8]
        };
        (0..count).flat_map(next).collect()
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes_to_itself(chunk in prop::collection::vec(any::<u8>(), 1..5000), repeat in 1..4usize) {
            let chunk = chunk.repeat(repeat);
            let mut codec = Codec::new().unwrap();
            for encoding in BOTH {
                let (mut stored, mut back) = (Vec::new(), vec![0; chunk.len()]);
                let len = codec.encode(encoding, &chunk, &mut stored).unwrap();
                prop_assert_eq!(len, stored.len());
                prop_assert!(len <= chunk.len());
                prop_assert_eq!(codec.decode(encoding, &stored, &mut back), Ok(()));
                prop_assert_eq!(&back, &chunk);
            }
        }

        #[test]
        fn any_bytes_may_be_decoded(data in prop::collection::vec(any::<u8>(), 0..600)) {
            fuzz_chunk(&data);
        }
    }

    #[test]
    fn planes_are_chosen_for_sixteen_bit_numbers_and_nothing_for_noise() {
        let mut codec = Codec::new().unwrap();
        let state = numbers(16 << 10, 1);
        assert_eq!(codec.choose([state.as_slice()].into_iter()), Some(Encoding::Planes));
        let noise: Vec<u8> = numbers(16 << 10, 2).into_iter().step_by(2).collect();
        assert_eq!(codec.choose([noise.as_slice()].into_iter()), None);
        let text = b"all of this is alike, ".repeat(400);
        assert_eq!(codec.choose([text.as_slice()].into_iter()), Some(Encoding::Plain));
        assert!(pays(1100, 1000) && !pays(1095, 1000) && !pays(0, 0));
    }

    #[test]
    fn a_stored_chunk_of_another_length_is_refused_and_writes_no_further() {
        let mut codec = Codec::new().unwrap();
        let chunk = vec![7; 1 << 20];
        for encoding in BOTH {
            let mut stored = Vec::new();
            codec.encode(encoding, &chunk, &mut stored).unwrap();
            assert!(stored.len() < 1000);
            let mut short = vec![0; 4096];
            assert_eq!(codec.decode(encoding, &stored, &mut short), Err(CodecError::Damaged));
            let mut long = vec![0; 2 << 20];
            let wrong = CodecError::Length { expected: 2 << 20, found: 1 << 20 };
            assert_eq!(codec.decode(encoding, &stored, &mut long), Err(wrong));
            assert_eq!(
                codec.decode(encoding, &[], &mut short),
                Err(CodecError::Length { expected: 4096, found: 0 })
            );
        }
    }

    #[test]
    fn a_flipped_bit_of_a_stored_chunk_is_refused_or_seen_by_the_digest() {
        let mut codec = Codec::new().unwrap();
        let chunk = numbers(300, 3);
        let digest = crc32fast::hash(&chunk);
        for encoding in BOTH {
            let mut stored = Vec::new();
            codec.encode(encoding, &chunk, &mut stored).unwrap();
            for bit in 0..stored.len() * 8 {
                let mut flipped = stored.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                let mut back = vec![0; chunk.len()];
                let served =
                    codec.decode(encoding, &flipped, &mut back).is_ok() && crc32fast::hash(&back) == digest;
                assert!(!served || back == chunk, "bit {bit}");
            }
        }
    }

    fn shape() -> BlockShape {
        let chunk = |bytes| ChunkShape { bytes, align: 1 };
        let layer =
            |layer, sizes: &[u64]| LayerShape { layer, chunks: sizes.iter().map(|&n| chunk(n)).collect() };
        BlockShape::new(vec![layer(0, &[100, 50]), layer(1, &[80])]).unwrap()
    }

    #[test]
    fn stored_chunks_lie_one_after_the_other_in_the_order_of_the_layout() {
        let lengths = [10, 50, 30, 40, 20, 60];
        for (layout, order) in [
            (Layout::FullBlock, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
            (Layout::LayerBlock, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]),
        ] {
            let run = RunLayout::new(layout, LAYOUT_VERSION, &shape(), 2).unwrap();
            let places = StoredPlaces::new(&run, &lengths).unwrap();
            let mut end = 0;
            for (block, part) in order {
                let span = places.chunk(block, part).unwrap();
                assert_eq!((span.offset, span.len), (end, u64::from(lengths[(block * 3 + part) as usize])));
                end = span.end();
            }
            assert_eq!(places.payload_bytes(), end);
            assert_eq!((places.chunk(2, 0), places.chunk(0, 3)), (None, None));
        }
    }

    #[test]
    fn lengths_that_no_encoder_writes_are_refused() {
        let run = RunLayout::new(Layout::FullBlock, LAYOUT_VERSION, &shape(), 2).unwrap();
        for lengths in [&[10, 50, 30][..], &[10, 51, 30, 40, 20, 60], &[10, 0, 30, 40, 20, 60], &[]] {
            assert_eq!(StoredPlaces::new(&run, lengths), None, "{lengths:?}");
        }
    }

    #[test]
    fn codes_name_encodings() {
        for encoding in BOTH {
            assert_eq!(Encoding::from_code(encoding.code()), Some(encoding));
        }
        assert_eq!((Encoding::from_code(0), Encoding::from_code(3)), (None, None));
    }
}
