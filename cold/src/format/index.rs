//! The index of a pack: every frame of it without the payloads. Its last chain value is the pack's name, so an index proves
//! itself against the name that it was asked for under, and says of each block where its bytes lie and what they must be.

use std::sync::Arc;

use kvarts_layout::export::{
    ExportedBlock, ExportedNamespace, Frame, HEAD_BYTES, Head, Reading, Run, Totals,
};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId};

use super::{BLOCK_MAX, FormatError, INDEX_BYTES_MAX, PACK_PAYLOAD_MAX, PackId};

/// A run of a pack, and where its bytes lie.
#[derive(Clone, Debug)]
pub struct IndexedRun {
    /// The run.
    pub run: Run,
    /// The shape of its blocks.
    pub shape: BlockShape,
    /// Where its first block begins in the pack.
    pub payload_at: u64,
}

impl IndexedRun {
    /// Where a block begins in the pack.
    pub fn block_at(&self, block: u32) -> u64 {
        // No pack reaches 2^63 bytes.
        self.payload_at.saturating_add(self.run.block_bytes.saturating_mul(u64::from(block)))
    }

    /// What is known of a block.
    pub fn block(&self, block: u32) -> Option<&ExportedBlock> {
        self.run.blocks.get(block as usize)
    }
}

/// A block of a pack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Which run of the pack.
    pub run: u32,
    /// Which block of the run.
    pub block: u32,
}

/// An index that was proven.
#[derive(Clone, Debug)]
pub struct PackIndex {
    id: PackId,
    namespace_id: NamespaceId,
    namespace: Arc<ExportedNamespace>,
    runs: Vec<IndexedRun>,
    /// Every block, by its key, group and coordinate.
    order: Vec<Place>,
    totals: Totals,
    bytes: usize,
}

impl PackIndex {
    /// Reads an index. Which pack it is that of, [`PackIndex::id`] says.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        if bytes.len() > INDEX_BYTES_MAX {
            return Err(FormatError::Rule("the index is larger than its limit"));
        }
        walk(bytes, &mut Apart)
    }

    /// The name of its pack.
    pub fn id(&self) -> PackId {
        self.id
    }

    /// The namespace of all its blocks.
    pub fn namespace_id(&self) -> NamespaceId {
        self.namespace_id
    }

    /// Identity and geometry of that.
    pub fn namespace(&self) -> &Arc<ExportedNamespace> {
        &self.namespace
    }

    /// Its runs.
    pub fn runs(&self) -> &[IndexedRun] {
        &self.runs
    }

    /// What it holds.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Bytes of the index as an object.
    pub fn index_bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of the pack as an object.
    pub fn pack_bytes(&self) -> u64 {
        self.totals.payload_bytes.saturating_add(self.bytes as u64)
    }

    /// About how much memory it takes.
    pub fn memory_bytes(&self) -> usize {
        // A block is 104 bytes and its digests, beside an allocation; its place is 8.
        let shapes: usize = self.runs.iter().map(|run| run.shape.chunk_count() as usize * 16 + 256).sum();
        self.bytes.saturating_mul(2).saturating_add(shapes)
    }

    /// A run.
    pub fn run(&self, run: u32) -> Option<&IndexedRun> {
        self.runs.get(run as usize)
    }

    fn key_of(&self, place: &Place) -> (BlockKey, Group, u64) {
        let run = self.run(place.run);
        let key = run.and_then(|run| run.block(place.block)).map_or(BlockKey([0; 32]), |block| block.key);
        run.map_or((key, Group(0), 0), |run| (key, run.run.group, run.run.coordinate.to_u64()))
    }

    /// Where a block is, if it is in the pack.
    pub fn find(&self, key: &BlockKey, group: Group, coordinate: Coordinate) -> Option<Place> {
        let wanted = (*key, group, coordinate.to_u64());
        let at = self.order.binary_search_by(|place| self.key_of(place).cmp(&wanted)).ok()?;
        self.order.get(at).copied()
    }

    /// Every key of the pack, by size; one stands there once for each group and coordinate.
    pub fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.order.iter().map(|place| self.key_of(place).0)
    }

    /// When the last of its blocks expires; zero for never.
    pub fn expires_ms(&self) -> u64 {
        let never = self.runs.iter().any(|run| run.run.expires_ms == 0);
        let latest = self.runs.iter().map(|run| run.run.expires_ms).max().unwrap_or(0);
        if never { 0 } else { latest }
    }
}

/// What lies behind the body of a frame.
pub(super) trait Payloads {
    /// A frame was proven: takes its payload from the front of `rest`.
    fn take<'a>(
        &mut self,
        frame: (&[u8; HEAD_BYTES], &[u8]),
        run: Option<(&Run, &BlockShape)>,
        rest: &'a [u8],
    ) -> Result<&'a [u8], FormatError>;
}

/// Nothing: the bytes are an index.
struct Apart;

impl Payloads for Apart {
    fn take<'a>(
        &mut self,
        _: (&[u8; HEAD_BYTES], &[u8]),
        _: Option<(&Run, &BlockShape)>,
        rest: &'a [u8],
    ) -> Result<&'a [u8], FormatError> {
        Ok(rest)
    }
}

/// Reads frames from the first to the last, which must be all that there is.
pub(super) fn walk(bytes: &[u8], payloads: &mut impl Payloads) -> Result<PackIndex, FormatError> {
    let mut reading = Reading::new();
    let (mut runs, mut totals) = (Vec::new(), Totals::default());
    let (mut rest, mut frames, mut payload_before) = (bytes, 0u64, 0u64);
    while !reading.has_ended() {
        let (head_bytes, behind) = rest.split_first_chunk::<HEAD_BYTES>().ok_or(FormatError::Damaged)?;
        let head = Head::decode(head_bytes)?;
        let (body, behind) = behind.split_at_checked(head.body_bytes()).ok_or(FormatError::Damaged)?;
        frames = frames.saturating_add((HEAD_BYTES + body.len()) as u64);
        let frame = reading.frame(&head, body)?;
        rest = match frame {
            Frame::Run(run) => {
                let namespace = reading.namespace(run.namespace).ok_or(FormatError::Rule("namespace"))?;
                let shape = run.shape(namespace)?;
                let rest = payloads.take((head_bytes, body), Some((&run, &shape)), behind)?;
                let payload_at = frames.saturating_add(payload_before);
                payload_before = payload_before.saturating_add(head.payload_bytes());
                runs.push(IndexedRun { run: *run, shape, payload_at });
                rest
            }
            Frame::End(found) => {
                totals = found;
                payloads.take((head_bytes, body), None, behind)?
            }
            Frame::Begin(_) | Frame::Spec(_) | Frame::Identity(_) => {
                payloads.take((head_bytes, body), None, behind)?
            }
        };
    }
    if !rest.is_empty() {
        return Err(FormatError::Damaged);
    }
    index(&reading, runs, totals, usize::try_from(frames).unwrap_or(usize::MAX))
}

/// Holds what was read to the rules of a pack.
fn index(
    reading: &Reading,
    runs: Vec<IndexedRun>,
    totals: Totals,
    bytes: usize,
) -> Result<PackIndex, FormatError> {
    let mut namespaces = reading.namespaces();
    let (namespace_id, namespace) = namespaces.next().ok_or(FormatError::Rule(
        "the blocks of a pack must \
        have one namespace",
    ))?;
    if namespaces.next().is_some() || totals.specs != 1 {
        return Err(FormatError::Rule("the blocks of a pack must have one namespace"));
    }
    let most = if totals.blocks == 1 { BLOCK_MAX } else { PACK_PAYLOAD_MAX };
    if totals.blocks == 0 || totals.payload_bytes > most {
        return Err(FormatError::Rule("the number of blocks of a pack is outside its limits"));
    }
    if bytes > INDEX_BYTES_MAX {
        return Err(FormatError::Rule("the index is larger than its limit"));
    }
    let mut order = Vec::new();
    for (run, indexed) in (0u32..).zip(&runs) {
        order.extend((0..indexed.run.blocks.len() as u32).map(|block| Place { run, block }));
    }
    let namespace = Arc::clone(namespace);
    let id = PackId(reading.chain());
    let mut index = PackIndex { id, namespace_id, namespace, runs, order: Vec::new(), totals, bytes };
    order.sort_unstable_by_key(|place| index.key_of(place));
    let is_twice = |pair: &[Place]| match pair {
        [a, b] => index.key_of(a) == index.key_of(b),
        _ => false,
    };
    if order.windows(2).any(is_twice) {
        return Err(FormatError::Rule("a block is in the pack twice"));
    }
    index.order = order;
    Ok(index)
}
