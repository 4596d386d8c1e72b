//! A small model, and blocks whose every byte follows from a seed: what tests put and expect back.
//!
//! The model has a group with heads and chunks of a page, a group with chunks of odd lengths, and a group with one
//! state: between them they meet aligned and unaligned paths, several parts a layer, and layers without a part.

use std::cell::RefCell;
use std::collections::BTreeMap;

use kvarts_contract::api::Placed;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::error::Reason;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity};

use crate::sim::rng::Seed;

/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = 16;
/// The group with heads: chunks of a page.
pub const PAGES: Group = Group(0);
/// The group of odd lengths: chunks of 208 bytes.
pub const ODD: Group = Group(1);
/// The group with one state: one chunk of 1000 bytes.
pub const STATE: Group = Group(2);

/// The small model.
pub fn geometry() -> Geometry {
    let part = |kind: &str, role, heads, group| PartGeometry {
        kind: Kind::new(kind).expect("a valid name"),
        role,
        heads,
        align: 1,
        group,
    };
    let parts = [
        part("k", Role::Stream { bytes: 256, tokens: 1 }, 2, PAGES),
        part("v", Role::Stream { bytes: 256, tokens: 1 }, 2, PAGES),
        part("latent", Role::Stream { bytes: 52, tokens: 4 }, 0, ODD),
        part("state", Role::State { bytes: 1000, empty_at_multiple_of: None }, 0, STATE),
    ];
    Geometry::new(&parts, &[vec![0, 1], vec![0, 1, 2], vec![2, 3], vec![0, 1]]).expect("a valid geometry")
}

/// An identity of the small model. Different revisions are different namespaces.
pub fn identity(revision: &str) -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("small"),
        revision: text(revision),
        tokenizer: text("tok-1"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("theta=500000"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("canonical"), version: text("1") },
        block_tokens: BLOCK_TOKENS,
        spec_fingerprint: geometry().fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

/// All heads of the group with heads.
pub fn all_heads() -> Coordinate {
    Coordinate::heads(0, 2, 2).expect("two heads of two")
}

/// The group and coordinate of each of the three kinds of blocks.
pub fn columns() -> [(Group, Coordinate); 3] {
    [(PAGES, all_heads()), (ODD, Coordinate::Replicated), (STATE, Coordinate::Replicated)]
}

/// The shape of a block of the small model.
pub fn shape(group: Group, coordinate: Coordinate) -> BlockShape {
    geometry().shape(group, coordinate, BLOCK_TOKENS).expect("a group of the small model")
}

/// The `n`th key of a chain.
pub fn key(chain: u64, n: u64) -> BlockKey {
    let mut rng = Seed(chain).child("key").nth(n).rng();
    let mut bytes = [0; 32];
    for part in bytes.chunks_mut(8) {
        part.copy_from_slice(&rng.next_u64().to_le_bytes());
    }
    BlockKey(bytes)
}

/// Keys of a chain, in order.
pub fn keys(chain: u64, range: std::ops::Range<u64>) -> Vec<BlockKey> {
    range.map(|n| key(chain, n)).collect()
}

/// The chunks of a block as the producer `producer` makes them, in canonical order. Every chunk differs from
/// every other one of any block, group, coordinate or producer. Those of producers with odd numbers can be compressed:
/// every second byte is the same, as the high bytes of a model's state nearly are.
pub fn content(
    key: &BlockKey,
    group: Group,
    coordinate: Coordinate,
    producer: u64,
    shape: &BlockShape,
) -> Vec<Vec<u8>> {
    let name = u64::from_le_bytes(key.0[..8].try_into().expect("eight bytes"));
    let seed = Seed(name).nth(u64::from(group.0)).nth(coordinate.to_u64()).nth(producer);
    let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
    let fill = |(part, chunk): (u64, &kvarts_layout::ChunkShape)| {
        let mut rng = seed.nth(part).rng();
        let mut bytes = Vec::with_capacity(chunk.bytes as usize + 7);
        while (bytes.len() as u64) < chunk.bytes {
            bytes.extend_from_slice(&rng.next_u64().to_le_bytes());
        }
        bytes.truncate(chunk.bytes as usize);
        if producer % 2 == 1 {
            // By chunks: steps of an iterator are calls in the profile of the tests, and this is where campaigns spend their time.
            bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|pair| pair[1] = 0x3f);
        }
        bytes
    };
    (0..).zip(chunks).map(fill).collect()
}

type Maker = Box<dyn Fn(usize) -> SharedBuf>;

thread_local! {
    /// What makes the memory of this thread's placements, if not the usual.
    static MAKER: RefCell<Option<Maker>> = const { RefCell::new(None) };
}

/// Does `work`; what it places on this thread lies in memory that `make` gives, of a length that it is told.
pub fn with_memory<T>(make: impl Fn(usize) -> SharedBuf + 'static, work: impl FnOnce() -> T) -> T {
    MAKER.with_borrow_mut(|maker| *maker = Some(Box::new(make)));
    let done = work();
    MAKER.with_borrow_mut(Option::take);
    done
}

/// Zeroed memory that begins `skew` bytes after a page boundary.
pub fn memory(len: u64, skew: u64) -> SharedBuf {
    let made = MAKER.with_borrow(|maker| maker.as_ref().map(|make| make((len + skew).max(1) as usize)));
    if let Some(made) = made {
        made.fill(0);
        return made.slice(skew as usize, len as usize).expect("as long as was asked");
    }
    let region = Region::anonymous((len + skew).max(1) as usize).expect("memory");
    SharedBuf::new(&region, skew as usize, len as usize).expect("within the region")
}

/// How blocks are placed in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    /// Whole blocks, one after the other.
    Blocks,
    /// A buffer for each layer.
    Layers,
    /// A pool with a base for each part, slots in reverse and with gaps.
    Paged,
}

impl Style {
    /// All styles.
    pub const ALL: [Self; 3] = [Self::Blocks, Self::Layers, Self::Paged];
}

/// A placement of `blocks` blocks in new memory that begins `skew` bytes after a page boundary.
pub fn place(shape: &BlockShape, blocks: u32, style: Style, skew: u64) -> Result<Placed, Reason> {
    let count = u64::from(blocks);
    match style {
        Style::Blocks => Placed::blocks(shape, memory(shape.block_bytes() * count, skew), blocks),
        Style::Layers => {
            let buffers = shape.layers().iter().map(|layer| memory(layer.bytes() * count, skew)).collect();
            Placed::layers(shape, buffers, blocks)
        }
        Style::Paged => {
            let mut targets = Vec::new();
            let mut len = 0;
            let slots = count * 2 + 1;
            for chunk in shape.layers().iter().flat_map(|layer| &layer.chunks) {
                targets.push(PartTarget { memory: MemoryId(0), base: len, stride: chunk.bytes });
                len += chunk.bytes * slots;
            }
            let slots = (0..blocks).map(|block| (blocks - block) * 2).collect();
            Placed::paged(shape, vec![memory(len, skew)], &targets, slots)
        }
    }
}

/// Writes a block's chunks to where they are placed.
pub fn write_block(placed: &Placed, block: u32, chunks: &[Vec<u8>]) {
    for (part, bytes) in (0..).zip(chunks) {
        let to = placed.chunk(part, block, bytes.len() as u64).expect("the placement has this chunk");
        to.copy_in(0, bytes);
    }
}

/// A block's chunks from where they are placed.
pub fn read_block(placed: &Placed, block: u32, shape: &BlockShape) -> Vec<Vec<u8>> {
    let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
    let from = |(part, chunk): (u32, &kvarts_layout::ChunkShape)| {
        placed.chunk(part, block, chunk.bytes).expect("the placement has this chunk").to_vec()
    };
    (0..).zip(chunks).map(from).collect()
}

/// For each chunk of a block in canonical order, which layer of the shape it belongs to.
pub fn layer_of_chunks(shape: &BlockShape) -> Vec<u32> {
    let layers = (0..).zip(shape.layers());
    layers.flat_map(|(at, layer)| layer.chunks.iter().map(move |_| at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_model_has_the_shapes_that_its_tests_are_about() {
        let bytes = columns().map(|(group, coordinate)| shape(group, coordinate).block_bytes());
        assert_eq!(bytes, [3 * 2 * 4096, 2 * 208, 1000]);
        assert_eq!(shape(PAGES, Coordinate::heads(1, 1, 2).unwrap()).block_bytes(), 3 * 2 * 2048);
        assert_eq!(layer_of_chunks(&shape(PAGES, all_heads())), [0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn contents_repeat_and_differ_in_every_chunk() {
        let shape = shape(PAGES, all_heads());
        let make = |n, producer| content(&key(1, n), PAGES, all_heads(), producer, &shape);
        assert_eq!(make(0, 1), make(0, 1));
        let mut all: Vec<_> = [make(0, 1), make(1, 1), make(0, 2)].concat();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 18);
    }

    #[test]
    fn what_is_written_by_any_style_is_read_by_it() {
        for (group, coordinate) in columns() {
            let shape = shape(group, coordinate);
            for (style, skew) in Style::ALL.into_iter().zip([0, 1, 512]) {
                let placed = place(&shape, 3, style, skew).unwrap();
                let blocks: Vec<_> =
                    (0..3).map(|n| content(&key(1, n), group, coordinate, 1, &shape)).collect();
                for (at, chunks) in (0..).zip(&blocks) {
                    write_block(&placed, at, chunks);
                }
                for (at, chunks) in (0..).zip(&blocks) {
                    assert_eq!(&read_block(&placed, at, &shape), chunks, "{style:?}");
                }
            }
        }
    }
}
