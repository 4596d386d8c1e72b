//! Blocks of four layers for a bucket, and tiers that push and read them.

pub(crate) mod world;

use std::sync::Arc;

use bytes::Bytes;
use kvarts_layout::export::{ExportedBlock, ExportedNamespace, Run};
use kvarts_layout::format::body::Parent;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{
    BlockKey, BlockShape, ContentId, Coordinate, Geometry, Group, Identity, NamespaceId, OriginId,
};

const TOKENS: u32 = 16;
pub(crate) const GROUP: Group = Group(0);
pub(crate) const WHOLE: Coordinate = Coordinate::Replicated;

/// A model of four layers, by the bytes that a block has of each.
pub(crate) struct Model {
    pub(crate) identity: Identity,
    pub(crate) geometry: Geometry,
    pub(crate) namespace: NamespaceId,
    pub(crate) shape: Arc<BlockShape>,
}

impl Model {
    pub(crate) fn new(layer_bytes: u64) -> Self {
        let part = PartGeometry {
            kind: Kind::new("kv").unwrap(),
            role: Role::Stream { bytes: layer_bytes / u64::from(TOKENS), tokens: 1 },
            heads: 0,
            align: 1,
            group: GROUP,
        };
        let geometry = Geometry::new(&[part], &vec![vec![0]; 4]).unwrap();
        let arrangement = Arrangement::new("test", "canonical", "1");
        let identity = Identity::new("cold", "1", "bf16", arrangement, &geometry, TOKENS);
        let shape = Arc::new(geometry.shape(GROUP, WHOLE, TOKENS).unwrap());
        assert_eq!(shape.block_bytes(), 4 * layer_bytes);
        Self { namespace: identity.namespace_id().unwrap(), identity, geometry, shape }
    }

    pub(crate) fn exported(&self) -> Arc<ExportedNamespace> {
        Arc::new(ExportedNamespace {
            identity: self.identity.clone(),
            geometry: Arc::new(self.geometry.clone()),
        })
    }

    /// Some blocks as a run of their own, and their bytes.
    pub(crate) fn run(&self, blocks: std::ops::Range<u64>) -> (Run, Bytes) {
        let (mut payload, mut exported) = (Vec::new(), Vec::new());
        for block in blocks.clone() {
            let bytes = content(block, self.shape.block_bytes());
            let (mut rest, mut digests) = (bytes.as_slice(), Vec::new());
            for chunk in self.shape.layers().iter().flat_map(|layer| &layer.chunks) {
                let (own, behind) = rest.split_at(chunk.bytes as usize);
                digests.push(crc32fast::hash(own));
                rest = behind;
            }
            let content = ContentId(*blake3::hash(&bytes).as_bytes());
            exported.push(ExportedBlock { key: key(block), origin: OriginId([9; 16]), content, digests });
            payload.extend_from_slice(&bytes);
        }
        let run = Run {
            namespace: self.namespace,
            coordinate: WHOLE,
            group: GROUP,
            created_ms: 1_700_000_000_000,
            expires_ms: 0,
            first_block: Some(blocks.start as u32),
            parent: blocks.start.checked_sub(1).map_or(Parent::Root, |before| Parent::Key(key(before).0)),
            block_bytes: self.shape.block_bytes(),
            blocks: exported,
        };
        (run, Bytes::from(payload))
    }
}

pub(crate) fn key(block: u64) -> BlockKey {
    BlockKey(*blake3::hash(&block.to_le_bytes()).as_bytes())
}

/// The bytes of a block: no two chunks of any blocks are the same.
pub(crate) fn content(block: u64, bytes: u64) -> Vec<u8> {
    let mut content = vec![0; bytes as usize];
    let mut state = block + 1;
    for word in content.chunks_exact_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word.copy_from_slice(&state.to_le_bytes());
    }
    content
}
