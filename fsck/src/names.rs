//! What the short ids of one segment mean, and where the chunks of its records lie.
//!
//! Invariants:
//! - A short id means what the nearest definition before it in the segment says.
//! - An identity counts only behind its spec in the same segment, and only if both are what their ids are hashes of.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_layout::codec::{Encoding, StoredPlaces};
use kvarts_layout::format::body::{Blocks, Definition, ENCODING_RAW, EXTENSION_ENCRYPTION, layout_from_code};
use kvarts_layout::format::record::{Body, DIGEST_CRC32, Kind, Prefix};
use kvarts_layout::format::recovery::{Found, Observed};
use kvarts_layout::identity::namespace_of;
use kvarts_layout::spec::Geometry;
use kvarts_layout::{Coordinate, Fingerprint, Group, Identity, NamespaceId, RunLayout};

use crate::findings::{self, Label};

/// A namespace as a segment defines it.
#[derive(Debug)]
pub struct Namespace {
    /// Its id.
    pub id: NamespaceId,
    /// The model, and its revision, for people.
    pub model: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The identity.
    pub identity: Identity,
    /// What moves the bytes.
    pub geometry: Arc<Geometry>,
}

/// Where the chunks of a record lie.
#[derive(Clone, Debug)]
pub struct Chunks {
    /// What the layout says: the places of raw chunks, the order of stored ones.
    pub run: Arc<RunLayout>,
    /// How chunks are compressed, and where they are stored, if the record is encoded.
    pub stored: Option<(Encoding, StoredPlaces)>,
}

/// How the blocks of a record lie in its payload.
type LayoutKey = ([u8; 32], u32, u64, u8, u16, u32);

/// The definitions of one segment.
#[derive(Debug, Default)]
pub struct Names {
    specs: BTreeMap<Fingerprint, Arc<Geometry>>,
    namespaces: BTreeMap<u32, Arc<Namespace>>,
    layouts: BTreeMap<LayoutKey, Arc<RunLayout>>,
    /// A newer program wrote a definition that this one does not understand.
    newer: bool,
}

/// Layouts that are remembered: more different ones in one segment are computed again.
const LAYOUTS_MAX: usize = 256;

impl Names {
    /// Notes a record that only a newer program understands: what it defines is not undefined.
    pub fn note(&mut self, seen: &Observed) {
        let is_newer = matches!(seen.found, Found::Newer | Found::UnknownExtension | Found::UnknownKind);
        let may_define =
            |prefix: &Prefix| matches!(prefix.kind, Kind::Identity | Kind::Spec | Kind::Unknown(_));
        self.newer |= is_newer && seen.prefix.as_ref().is_some_and(may_define);
    }

    /// Takes a definition in; false if it contradicts itself. Other bodies define nothing.
    pub fn define(&mut self, body: &Body) -> bool {
        match body {
            Body::Spec(definition) => self.spec(definition).is_some(),
            Body::Identity(definition) => {
                let named = self.identity(definition);
                let known = named.is_some();
                match named {
                    Some(Some(namespace)) => {
                        drop(self.namespaces.insert(definition.local, Arc::new(namespace)))
                    }
                    _ => drop(self.namespaces.remove(&definition.local)),
                }
                known
            }
            _ => true,
        }
    }

    fn spec(&mut self, definition: &Definition) -> Option<()> {
        let geometry = Geometry::decode_canonical(&definition.canonical).ok()?;
        let id = geometry.fingerprint();
        (id.0 == definition.id).then(|| drop(self.specs.insert(id, Arc::new(geometry))))
    }

    /// `None` if the definition contradicts itself, an inner `None` if it lacks its spec.
    fn identity(&self, definition: &Definition) -> Option<Option<Namespace>> {
        let id = namespace_of(&definition.canonical);
        let identity = Identity::decode(&definition.canonical).ok()?;
        if id.0 != definition.id {
            return None;
        }
        let Some(geometry) = self.specs.get(&identity.spec_fingerprint) else { return Some(None) };
        let block_tokens = identity.block_tokens;
        geometry.check_block_tokens(block_tokens).ok()?;
        let model = format!("{} {}", identity.model, identity.revision);
        let geometry = Arc::clone(geometry);
        Some(Some(Namespace { id, model, block_tokens, identity, geometry }))
    }

    /// The namespace under a short id.
    pub fn get(&self, local: u32) -> Option<&Arc<Namespace>> {
        self.namespaces.get(&local)
    }

    /// Where the chunks of a record lie, or which label says why that cannot be told.
    pub fn layout(&mut self, blocks: &Blocks, prefix: &Prefix) -> Result<Chunks, Label> {
        let namespace = self.namespaces.get(&blocks.namespace).ok_or(match self.newer {
            true => findings::DEPENDS_ON_NEWER,
            false => findings::RECORD_UNDEFINED,
        })?;
        let encoding = Encoding::from_code(blocks.encoding);
        if encoding.is_none() && blocks.encoding != ENCODING_RAW {
            return Err(findings::UNKNOWN_ENCODING);
        }
        let layout = layout_from_code(blocks.layout).ok_or(findings::UNKNOWN_ENCODING)?;
        if blocks.extensions.iter().any(|extension| extension.id == EXTENSION_ENCRYPTION) {
            return Err(findings::ENCRYPTED_PAYLOAD);
        }
        let count = u32::try_from(blocks.blocks.len()).unwrap_or(u32::MAX);
        let (code, version) = (blocks.layout, blocks.layout_version);
        let key = (namespace.id.0, blocks.group, blocks.coordinate, code, version, count);
        let run = match self.layouts.get(&key) {
            Some(run) => Arc::clone(run),
            None => {
                let coordinate = Coordinate::from_u64(blocks.coordinate).ok_or(findings::PAYLOAD_LENGTH)?;
                let shape = namespace.geometry.shape(Group(blocks.group), coordinate, namespace.block_tokens);
                let shape = shape.map_err(|_| findings::PAYLOAD_LENGTH)?;
                let run = RunLayout::new(layout, version, &shape, count);
                let run = Arc::new(run.map_err(|_| findings::UNKNOWN_ENCODING)?);
                if self.layouts.len() >= LAYOUTS_MAX {
                    self.layouts.clear();
                }
                self.layouts.insert(key, Arc::clone(&run));
                run
            }
        };
        let stored = match encoding {
            Some(encoding) => {
                let places = StoredPlaces::new(&run, &blocks.stored_lengths);
                Some((encoding, places.ok_or(findings::PAYLOAD_LENGTH)?))
            }
            None => None,
        };
        let expected = stored.as_ref().map_or(run.payload_bytes(), |(_, places)| places.payload_bytes());
        if expected != prefix.payload_bytes {
            return Err(findings::PAYLOAD_LENGTH);
        }
        if prefix.digest_algorithm != DIGEST_CRC32 {
            return Err(findings::UNKNOWN_DIGEST);
        }
        Ok(Chunks { run, stored })
    }
}
