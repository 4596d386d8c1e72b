//! The manifest of a namespace: which packs count, which are to be deleted, which keys each of them may hold, and what was deleted
//! lately.
//!
//! It is one small object, replaced as a whole by compare-and-set. Whatever it does not name is not there.

use std::collections::BTreeMap;

use kvarts_layout::NamespaceId;

use super::deletions::{DELETE, DELETES_MAX, Deletions, KEY, KEYS_MAX, Point};
use super::taker::Taker;
use super::{BLOCK_MAX, FormatError, INDEX_BYTES_MAX, PACK_PAYLOAD_MAX, PackId};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"KvartsCM";
/// The version that this crate writes.
pub const VERSION: u16 = 2;
/// The version before, without deletes, which it reads.
const WITHOUT_DELETES: u16 = 1;
/// The most packs of a namespace.
pub const PACKS_MAX: usize = 4096;
/// The most packs that wait for their deletion.
pub const CONDEMNED_MAX: usize = 8192;
/// The most fingerprints of all packs together.
pub const FINGERPRINTS_MAX: usize = 1 << 20;
/// The most bytes of a manifest.
pub const MANIFEST_BYTES_MAX: usize = HEAD
    + PACKS_MAX * PACK
    + CONDEMNED_MAX * CONDEMNED
    + FINGERPRINTS_MAX * 4
    + DELETES_MAX * DELETE
    + KEYS_MAX * KEY
    + HASH;

/// What is said of a manifest with more packs, or more fingerprints, than it may have.
pub(crate) const NO_ROOM: &str = "the manifest is full: it cannot list more packs";
/// What is said of one with more packs that wait for their deletion.
pub(crate) const NO_ROOM_TO_WAIT: &str = "the manifest is full of packs that wait for deletion";

const HEAD: usize = 112;
/// The same in the version without deletes.
const SHORT_HEAD: usize = 80;
const PACK: usize = 72;
const CONDEMNED: usize = 40;
const HASH: usize = 32;
const DOMAIN: [u8; 16] = *b"kvarts.coldman.1";

/// What a manifest says of a pack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackEntry {
    /// Bytes of its blocks.
    pub payload_bytes: u64,
    /// Bytes of its index; the pack has these beside its payload.
    pub index_bytes: u32,
    /// Its runs.
    pub runs: u32,
    /// Its blocks.
    pub blocks: u32,
    /// When it was added, in milliseconds since 1970.
    pub added_ms: u64,
    /// When its last block expires, in milliseconds since 1970; zero for never.
    pub expires_ms: u64,
    /// The fingerprint of each of its keys, by size, each once.
    pub filter: Vec<u32>,
}

impl PackEntry {
    /// Bytes of the pack as an object.
    pub fn pack_bytes(&self) -> u64 {
        self.payload_bytes.saturating_add(u64::from(self.index_bytes))
    }

    /// Bytes of pack and index together: what is paid for.
    pub fn stored_bytes(&self) -> u64 {
        self.pack_bytes().saturating_add(u64::from(self.index_bytes))
    }

    /// Whether a key with this fingerprint may be in it.
    pub fn may_have(&self, fingerprint: u32) -> bool {
        self.filter.binary_search(&fingerprint).is_ok()
    }

    fn check(&self) -> Result<(), FormatError> {
        let most = if self.blocks == 1 { BLOCK_MAX } else { PACK_PAYLOAD_MAX };
        let holds = self.runs >= 1
            && self.runs <= self.blocks
            && self.index_bytes as usize <= INDEX_BYTES_MAX
            && (1..=most).contains(&self.payload_bytes);
        if !holds {
            return Err(FormatError::Rule("a number in the entry of a pack is outside its limits"));
        }
        let ascends = self.filter.is_sorted_by(|a, b| a < b);
        if ascends && !self.filter.is_empty() && self.filter.len() <= self.blocks as usize {
            Ok(())
        } else {
            Err(FormatError::Rule("the fingerprints of a pack must be sorted, one for each key"))
        }
    }
}

/// The manifest of a namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// The namespace.
    pub namespace: NamespaceId,
    /// Grows by one with each change.
    pub generation: u64,
    /// When it was written, in milliseconds since 1970, by the clock of who wrote it.
    pub written_ms: u64,
    /// The packs that count.
    pub packs: BTreeMap<PackId, PackEntry>,
    /// Packs that are to be deleted, and when that was decided. None of these names is used again.
    pub condemned: BTreeMap<PackId, u64>,
    /// When it was begun, where there was none, in milliseconds since 1970: another one has another time.
    pub begun_ms: u64,
    /// What was deleted.
    pub deletions: Deletions,
}

impl Manifest {
    /// The manifest of a namespace that has none.
    pub fn empty(namespace: NamespaceId) -> Self {
        Self {
            namespace,
            generation: 0,
            written_ms: 0,
            packs: BTreeMap::new(),
            condemned: BTreeMap::new(),
            begun_ms: 0,
            deletions: Deletions::default(),
        }
    }

    /// Its state: who lists blocks after it has read this has seen every delete that it names.
    pub fn point(&self) -> Point {
        Point { begun_ms: self.begun_ms, generation: self.generation }
    }

    /// The generation of this manifest that a point is. None where it is one of another manifest, or a later one: what was deleted
    /// since then is not known here.
    pub fn since(&self, point: Point) -> Option<u64> {
        let is_own = point.begun_ms == self.begun_ms && point.generation <= self.generation;
        (point.generation == 0 || is_own).then_some(point.generation)
    }

    /// The generation that the next change gives it.
    pub fn next_generation(&self) -> u64 {
        self.generation.saturating_add(1)
    }

    /// Fingerprints of all packs.
    pub fn fingerprints(&self) -> usize {
        self.packs.values().map(|pack| pack.filter.len()).fold(0, usize::saturating_add)
    }

    /// Whether there is room for another pack with this number of fingerprints.
    pub fn has_room(&self, fingerprints: usize) -> bool {
        self.packs.len() < PACKS_MAX && self.fingerprints().saturating_add(fingerprints) <= FINGERPRINTS_MAX
    }

    /// What all packs and indexes take.
    pub fn stored_bytes(&self) -> u64 {
        self.packs.values().map(PackEntry::stored_bytes).fold(0, u64::saturating_add)
    }

    /// Holds it to what a reader will say.
    pub fn check(&self) -> Result<(), FormatError> {
        if self.generation == 0 {
            return Err(FormatError::Rule("the generation of the manifest is 0"));
        }
        if self.packs.len() > PACKS_MAX || self.fingerprints() > FINGERPRINTS_MAX {
            return Err(FormatError::Rule(NO_ROOM));
        }
        if self.condemned.len() > CONDEMNED_MAX {
            return Err(FormatError::Rule(NO_ROOM_TO_WAIT));
        }
        if self.condemned.keys().any(|id| self.packs.contains_key(id)) {
            return Err(FormatError::Rule("a pack is listed both as in use and as waiting for deletion"));
        }
        self.deletions.check(self.generation)?;
        self.packs.values().try_for_each(PackEntry::check)
    }

    /// Its bytes.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let fingerprints = self.fingerprints();
        let mut bytes = Vec::with_capacity(
            HEAD + self.packs.len() * PACK
                + self.condemned.len() * CONDEMNED
                + fingerprints * 4
                + self.deletions.keys.len() * (DELETE + KEY)
                + HASH,
        );
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        for count in [self.packs.len(), self.condemned.len(), fingerprints] {
            bytes.extend_from_slice(&(count as u32).to_le_bytes());
        }
        bytes.extend_from_slice(&self.generation.to_le_bytes());
        bytes.extend_from_slice(&self.written_ms.to_le_bytes());
        bytes.extend_from_slice(&self.namespace.0);
        bytes.extend_from_slice(&self.begun_ms.to_le_bytes());
        self.deletions.encode_head(&mut bytes);
        for (id, pack) in &self.packs {
            bytes.extend_from_slice(&id.0);
            for field in [pack.payload_bytes, pack.added_ms, pack.expires_ms] {
                bytes.extend_from_slice(&field.to_le_bytes());
            }
            for field in [pack.index_bytes, pack.runs, pack.blocks, pack.filter.len() as u32] {
                bytes.extend_from_slice(&field.to_le_bytes());
            }
        }
        for (id, condemned_ms) in &self.condemned {
            bytes.extend_from_slice(&id.0);
            bytes.extend_from_slice(&condemned_ms.to_le_bytes());
        }
        for fingerprint in self.packs.values().flat_map(|pack| &pack.filter) {
            bytes.extend_from_slice(&fingerprint.to_le_bytes());
        }
        self.deletions.encode_lists(&mut bytes);
        let hash = hash_of(&bytes);
        bytes.extend_from_slice(&hash);
        Ok(bytes)
    }

    /// Reads a manifest.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut taker = Taker(bytes);
        if taker.array::<8>()? != MAGIC {
            return Err(FormatError::Damaged);
        }
        let version = u16::from_le_bytes(taker.array()?);
        if version > VERSION {
            return Err(FormatError::Newer(version));
        }
        let (covered, hash) = bytes.split_last_chunk::<HASH>().ok_or(FormatError::Damaged)?;
        if hash_of(covered) != *hash {
            return Err(FormatError::Damaged);
        }
        if !(WITHOUT_DELETES..=VERSION).contains(&version) || taker.array()? != [0; 2] {
            return Err(FormatError::Rule("version"));
        }
        let (packs, condemned, fingerprints) = (taker.count()?, taker.count()?, taker.count()?);
        if packs > PACKS_MAX || condemned > CONDEMNED_MAX || fingerprints > FINGERPRINTS_MAX {
            return Err(FormatError::Rule("the head of the manifest contains a count that is too large"));
        }
        let (generation, written_ms) = (taker.u64()?, taker.u64()?);
        let namespace = NamespaceId(taker.array()?);
        let begun_ms = taker.u64()?;
        let (head, (deletions, deleted)) = if version == WITHOUT_DELETES {
            if begun_ms != 0 {
                return Err(FormatError::Rule("reserved"));
            }
            (SHORT_HEAD, (Deletions::default(), (0, 0)))
        } else {
            (HEAD, Deletions::take_head(&mut taker)?)
        };
        // Bounded by what is there before anything is allocated.
        let lists = packs * PACK + condemned * CONDEMNED + fingerprints * 4;
        let expected = head + lists + deleted.0 * DELETE + deleted.1 * KEY + HASH;
        if expected != bytes.len() {
            return Err(FormatError::Rule("the numbers of entries do not match the length of the manifest"));
        }
        let mut manifest = Self { generation, written_ms, begun_ms, deletions, ..Self::empty(namespace) };
        manifest.take_packs(&mut taker, (packs, condemned, fingerprints))?;
        manifest.deletions.take_lists(&mut taker, deleted)?;
        manifest.check()?;
        Ok(manifest)
    }

    fn take_packs(
        &mut self,
        taker: &mut Taker<'_>,
        (packs, condemned, fingerprints): (usize, usize, usize),
    ) -> Result<(), FormatError> {
        let ascends = |holds| {
            if holds {
                Ok(())
            } else {
                Err(FormatError::Rule(
                    "the packs must be sorted by \
            name",
                ))
            }
        };
        let mut left = fingerprints;
        let mut filters = Vec::with_capacity(packs);
        for _ in 0..packs {
            let id = PackId(taker.array()?);
            let (payload_bytes, added_ms, expires_ms) = (taker.u64()?, taker.u64()?, taker.u64()?);
            let (index_bytes, runs, blocks) = (taker.u32()?, taker.u32()?, taker.u32()?);
            let count = taker.count()?;
            left = left.checked_sub(count).ok_or(FormatError::Rule(
                "the number of fingerprints differs \
                from the number given in the head of the manifest",
            ))?;
            ascends(self.packs.last_key_value().is_none_or(|(before, _)| *before < id))?;
            filters.push((id, count));
            let filter = Vec::new();
            let entry = PackEntry { payload_bytes, index_bytes, runs, blocks, added_ms, expires_ms, filter };
            self.packs.insert(id, entry);
        }
        if left != 0 {
            return Err(FormatError::Rule(
                "the number of fingerprints differs from the number given in the head of the manifest",
            ));
        }
        for _ in 0..condemned {
            let id = PackId(taker.array()?);
            ascends(self.condemned.last_key_value().is_none_or(|(before, _)| *before < id))?;
            self.condemned.insert(id, taker.u64()?);
        }
        for (id, count) in filters {
            let filter = (0..count).map(|_| taker.u32()).collect::<Result<_, _>>()?;
            if let Some(entry) = self.packs.get_mut(&id) {
                entry.filter = filter;
            }
        }
        Ok(())
    }
}

fn hash_of(bytes: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&DOMAIN).update(bytes);
    *hasher.finalize().as_bytes()
}

/// Bytes as a manifest whose hash is right.
pub(super) fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let hash = hash_of(&bytes);
    bytes.extend_from_slice(&hash);
    bytes
}
