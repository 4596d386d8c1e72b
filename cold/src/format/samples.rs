//! Small models, packs and manifests for tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use kvarts_layout::export::{ExportedBlock, ExportedNamespace, Run};
use kvarts_layout::format::body::Parent;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{BlockKey, ContentId, Coordinate, Geometry, Group, Identity, NamespaceId, OriginId};

use super::{Manifest, Pack, PackBuilder, PackId};

/// Tokens of a block.
pub(crate) const TOKENS: u32 = 16;

/// Two parts in each of three layers: 48 and 16 bytes a block.
pub(crate) fn geometry() -> Geometry {
    let part = |kind: &str, bytes| PartGeometry {
        kind: Kind::new(kind).unwrap(),
        role: Role::Stream { bytes, tokens: 1 },
        heads: 0,
        align: 1,
        group: Group(0),
    };
    Geometry::new(&[part("k", 3), part("v", 1)], &vec![vec![0, 1]; 3]).unwrap()
}

/// An identity; another revision is another namespace.
pub(crate) fn identity(revision: &str) -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("small"),
        revision: text(revision),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: TOKENS,
        spec_fingerprint: geometry().fingerprint(),
        tenant_salt: TenantSalt(vec![]),
        extras: BTreeMap::new(),
    }
}

/// A namespace of that revision.
pub fn namespace(revision: &str) -> Arc<ExportedNamespace> {
    Arc::new(ExportedNamespace { identity: identity(revision), geometry: Arc::new(geometry()) })
}

/// Its id.
pub fn namespace_id(revision: &str) -> NamespaceId {
    identity(revision).namespace_id().unwrap()
}

/// Bytes of a block: three layers of 48 and 16.
pub const BLOCK: usize = 192;

/// The key of a block of a prefix.
pub fn key(prefix: u8, block: u32) -> BlockKey {
    let mut key = [prefix; 32];
    key[..4].copy_from_slice(&block.to_le_bytes());
    BlockKey(key)
}

/// The bytes of a block.
pub fn bytes_of(prefix: u8, block: u32) -> Vec<u8> {
    (0..BLOCK as u32).map(|at| (at * 7 + block * 31 + u32::from(prefix) * 101) as u8).collect()
}

/// The blocks `from..to` of a prefix, and their bytes.
pub fn run(revision: &str, prefix: u8, from: u32, to: u32) -> (Run, Bytes) {
    let shape = geometry().shape(Group(0), Coordinate::Replicated, TOKENS).unwrap();
    assert_eq!(shape.block_bytes(), BLOCK as u64);
    let mut payload = Vec::new();
    let blocks = (from..to).map(|block| {
        let bytes = bytes_of(prefix, block);
        let mut digests = Vec::new();
        let mut rest = bytes.as_slice();
        for chunk in shape.layers().iter().flat_map(|layer| &layer.chunks) {
            let (own, behind) = rest.split_at(chunk.bytes as usize);
            digests.push(crc32fast::hash(own));
            rest = behind;
        }
        let content = ContentId(*blake3::hash(&bytes).as_bytes());
        payload.extend_from_slice(&bytes);
        ExportedBlock { key: key(prefix, block), origin: OriginId([prefix | 0x80; 16]), content, digests }
    });
    let blocks: Vec<_> = blocks.collect();
    let run = Run {
        namespace: namespace_id(revision),
        coordinate: Coordinate::Replicated,
        group: Group(0),
        created_ms: 1_700_000_000_000,
        expires_ms: 0,
        first_block: Some(from),
        parent: if from == 0 { Parent::Root } else { Parent::Key(key(prefix, from - 1).0) },
        block_bytes: BLOCK as u64,
        blocks,
    };
    (run, Bytes::from(payload))
}

/// Two runs of two prefixes.
pub(crate) fn pack() -> Pack {
    let mut builder = PackBuilder::new(&namespace("r1"), 1_700_000_005_000).unwrap();
    for (prefix, from, to) in [(1, 0, 3), (2, 4, 5)] {
        let (run, payload) = run("r1", prefix, from, to);
        builder.add(&run, payload).unwrap();
    }
    builder.finish(1_700_000_006_000).unwrap()
}

pub(crate) fn whole(pack: &Pack) -> Vec<u8> {
    pack.body.concat()
}

pub(crate) fn manifest() -> Manifest {
    let pack = pack();
    let mut manifest = Manifest::empty(namespace_id("r1"));
    manifest.generation = 7;
    manifest.written_ms = 1_700_000_007_000;
    let other = super::PackEntry {
        expires_ms: 1_800_000_000_000,
        filter: vec![3, 9],
        blocks: 2,
        ..pack.entry.clone()
    };
    manifest.packs.insert(pack.id, pack.entry);
    manifest.packs.insert(PackId([0x21; 32]), other);
    manifest.condemned.insert(PackId([0x42; 32]), 1_700_000_006_500);
    manifest.begun_ms = 1_700_000_000_100;
    let deletions = &mut manifest.deletions;
    deletions.add_all(super::Delete { generation: 2, at_ms: 1_700_000_000_200 });
    deletions.add_unknown(super::Delete { generation: 3, at_ms: 1_700_000_000_300 });
    deletions.add_keys([7, 1 << 40], super::Delete { generation: 4, at_ms: 1_700_000_000_400 });
    deletions.add_keys([9, 7], super::Delete { generation: 6, at_ms: 0 });
    manifest
}
