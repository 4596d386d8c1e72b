//! Decoding of stored chunks on an executor, with memory of its own that is used again.
//!
//! Chunks are decoded one at a time into scratch memory, never into a caller's: what is verified there is what is
//! copied out. How long a chunk is says the model's shape, so a stored chunk that would decode to more is refused.

use std::cell::RefCell;
use std::fmt;

use kvarts_layout::arrange::RunLayout;
use kvarts_layout::codec::{Codec, CodecError, Encoding, StoredPlaces};
use kvarts_layout::format::body::{Blocks, ENCODING_RAW};

use kvarts_contract::buffers::SharedBuf;

/// Scratch memory that is kept between chunks: a longer chunk's is given back.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// How the chunks of an encoded record are stored, and where.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) encoding: Encoding,
    pub(crate) places: StoredPlaces,
}

impl Stored {
    /// What a record says of its stored chunks, `Ok(None)` if they are raw; an error if this version cannot read
    /// them, or if they cannot be what the model's shape says.
    pub(crate) fn of(blocks: &Blocks, layout: &RunLayout) -> Result<Option<Self>, &'static str> {
        if blocks.encoding == ENCODING_RAW {
            return Ok(None);
        }
        let encoding = Encoding::from_code(blocks.encoding).ok_or("an unknown encoding")?;
        let places = StoredPlaces::new(layout, &blocks.stored_lengths);
        Ok(Some(Self { encoding, places: places.ok_or("the lengths of the stored chunks are impossible")? }))
    }
}

/// Bytes of the payload that a record must have, without padding; `None` if this version cannot read it.
pub(crate) fn payload_bytes(blocks: &Blocks, layout: &RunLayout) -> Option<u64> {
    let stored = Stored::of(blocks, layout).ok()?;
    Some(stored.map_or(layout.payload_bytes(), |stored| stored.places.payload_bytes()))
}

struct Scratch {
    codec: Codec,
    stored: Vec<u8>,
    chunk: Vec<u8>,
}

/// The decoder of one shard. It is made when the first encoded record is read.
#[derive(Default)]
pub(crate) struct Decoder(RefCell<Option<Scratch>>);

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Decoder")
    }
}

impl Decoder {
    /// Decodes the chunk of `len` bytes that is stored in `stored` bytes at `at` of a buffer, and shows it. The caller
    /// has checked that the range lies in the buffer.
    pub(crate) fn show<T>(
        &self,
        encoding: Encoding,
        (from, at, stored): (&SharedBuf, usize, usize),
        len: usize,
        look: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, CodecError> {
        self.with(|scratch| {
            scratch.stored.resize(stored, 0);
            from.copy_out(at, &mut scratch.stored);
            scratch.chunk.resize(len, 0);
            scratch.codec.decode(encoding, &scratch.stored, &mut scratch.chunk)?;
            Ok(look(&scratch.chunk))
        })
    }

    /// The digest of the chunk of `len` bytes that these stored bytes are of.
    pub(crate) fn digest(&self, encoding: Encoding, stored: &[u8], len: usize) -> Result<u32, CodecError> {
        self.with(|scratch| {
            scratch.chunk.resize(len, 0);
            scratch.codec.decode(encoding, stored, &mut scratch.chunk)?;
            Ok(crc32fast::hash(&scratch.chunk))
        })
    }

    /// Appends a chunk as it is stored.
    pub(crate) fn encode(
        &self,
        encoding: Encoding,
        chunk: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<usize, CodecError> {
        self.with(|scratch| scratch.codec.encode(encoding, chunk, out))
    }

    /// The encoding that pays for these chunks, if any.
    pub(crate) fn choose<'a>(&self, samples: impl Iterator<Item = &'a [u8]>) -> Option<Encoding> {
        self.with(|scratch| Ok(scratch.codec.choose(samples))).ok().flatten()
    }

    fn with<T>(&self, work: impl FnOnce(&mut Scratch) -> Result<T, CodecError>) -> Result<T, CodecError> {
        let mut slot = self.0.borrow_mut();
        let mut scratch = match slot.take() {
            Some(scratch) => scratch,
            None => Scratch { codec: Codec::new()?, stored: Vec::new(), chunk: Vec::new() },
        };
        let done = work(&mut scratch);
        // Dropped with the codec's planes, which are as long.
        if scratch.chunk.capacity().max(scratch.stored.capacity()) <= KEPT_BYTES_MAX {
            *slot = Some(scratch);
        }
        done
    }
}
