//! Artifacts as a portable file: a chain of frames that carries specs, identities and blocks between stores.
//!
//! docs/EXPORT.md is the normative description. Invariants:
//! - Nothing of a store but its artifacts is in it: no secret, no position, no short id.
//! - Each frame's chain value covers the frame before it, its own head and its body; a body of blocks carries the hash of
//!   each block's bytes. So the last frame proves all of them, and each frame proves itself when it is reached.
//! - A reader keeps the definitions and one frame in memory, whatever the length of the file.
//! - An encoder refuses what its decoder would refuse, and there is one encoding of each value.

mod body;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

pub use body::{BadBlock, ExportedBlock, RUN_BYTES_MAX, Run};
use body::{Taker, fill};

use crate::identity::namespace_of;
use crate::{Fingerprint, Geometry, Identity, NamespaceId};

/// The first eight bytes of every frame.
pub const MAGIC: [u8; 8] = *b"KvartsEX";
/// The version that this crate writes, and the only one that it reads.
pub const VERSION: u16 = 1;
/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 64;
/// The most bytes of a frame's body.
pub const MAX_BODY_BYTES: usize = 16 << 20;
/// The most specs, and the most identities, of one file: a reader keeps them.
pub const MAX_DEFINITIONS: usize = 1 << 16;
/// Hashed before everything else of a frame.
const DOMAIN: [u8; 16] = *b"kvarts.export.v1";
/// Bytes of a head that its chain value covers.
const COVERED: usize = 32;

/// What a frame holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    /// The first frame.
    Begin,
    /// A spec.
    Spec,
    /// An identity.
    Identity,
    /// Blocks.
    Run,
    /// The last frame.
    End,
}

impl FrameKind {
    const fn code(self) -> u16 {
        match self {
            Self::Begin => 1,
            Self::Spec => 2,
            Self::Identity => 3,
            Self::Run => 4,
            Self::End => 5,
        }
    }

    const fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            1 => Self::Begin,
            2 => Self::Spec,
            3 => Self::Identity,
            4 => Self::Run,
            5 => Self::End,
            _ => return None,
        })
    }
}

/// Why bytes are not the next frame of an export, or a value cannot be one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExportError {
    /// The bytes are no frame at all.
    NotAnExport,
    /// A newer program wrote the file.
    Newer(u16),
    /// The frame is not what was written, or follows another one than this.
    Damaged,
    /// The frame is whole and breaks a rule of the format.
    Field(&'static str),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAnExport => f.write_str("the file is not an export of Kvarts"),
            Self::Newer(version) => {
                write!(f, "the file has export version {version}: import the file with a newer kvarts")
            }
            Self::Damaged => f.write_str(
                "the file is damaged, because its bytes do not match their digest: copy the file again",
            ),
            Self::Field(field) => write!(
                f,
                "the export violates a rule of the format ({field}): export the blocks again with a \
                newer kvarts"
            ),
        }
    }
}

impl std::error::Error for ExportError {}

/// What a file holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Specs.
    pub specs: u64,
    /// Identities.
    pub identities: u64,
    /// Frames of blocks.
    pub runs: u64,
    /// Blocks.
    pub blocks: u64,
    /// Their bytes.
    pub payload_bytes: u64,
}

impl Totals {
    fn fields(&self) -> [u64; 5] {
        [self.specs, self.identities, self.runs, self.blocks, self.payload_bytes]
    }

    fn take_run(&mut self, run: &Run) {
        self.runs = self.runs.saturating_add(1);
        self.blocks = self.blocks.saturating_add(run.blocks.len() as u64);
        self.payload_bytes = self.payload_bytes.saturating_add(run.payload_bytes().unwrap_or(0));
    }
}

/// The head of a frame: enough to read the rest of it. Nothing of it is proven before the body is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    kind: FrameKind,
    number: u64,
    body_bytes: u32,
    payload_bytes: u64,
    chain: [u8; 32],
}

impl Head {
    /// Reads a head. Its lengths are within their limits, whatever the bytes are.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Self, ExportError> {
        let mut taker = Taker::new(bytes);
        if taker.array::<8>()? != MAGIC {
            return Err(ExportError::NotAnExport);
        }
        let version = taker.u16()?;
        if version > VERSION {
            return Err(ExportError::Newer(version));
        }
        if version != VERSION {
            return Err(ExportError::Field("version"));
        }
        let kind = FrameKind::from_code(taker.u16()?).ok_or(ExportError::Field("kind"))?;
        let body_bytes = taker.u32()?;
        if body_bytes as usize > MAX_BODY_BYTES {
            return Err(ExportError::Field("body_bytes"));
        }
        let payload_bytes = taker.u64()?;
        let most = if kind == FrameKind::Run { crate::shape::MAX_BLOCK_BYTES } else { 0 };
        if payload_bytes > most {
            return Err(ExportError::Field("payload_bytes"));
        }
        let number = taker.u64()?;
        Ok(Self { kind, number, body_bytes, payload_bytes, chain: taker.array()? })
    }

    fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0u8; HEAD_BYTES];
        fill(
            &mut bytes,
            &[
                &MAGIC,
                &VERSION.to_le_bytes(),
                &self.kind.code().to_le_bytes(),
                &self.body_bytes.to_le_bytes(),
                &self.payload_bytes.to_le_bytes(),
                &self.number.to_le_bytes(),
                &self.chain,
            ],
        );
        bytes
    }

    /// What the frame holds.
    pub fn kind(&self) -> FrameKind {
        self.kind
    }

    /// Bytes of the body behind the head.
    pub fn body_bytes(&self) -> usize {
        self.body_bytes as usize
    }

    /// Bytes of the payload behind the body.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }
}

fn chained(before: &[u8; 32], head: &[u8; HEAD_BYTES], body: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let covered = head.get(..COVERED).unwrap_or_default();
    hasher.update(&DOMAIN).update(before).update(covered).update(body);
    *hasher.finalize().as_bytes()
}

/// A frame that was proven.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// The first: when the file was made, in milliseconds since 1970.
    Begin(u64),
    /// A spec.
    Spec(Fingerprint),
    /// An identity.
    Identity(NamespaceId),
    /// Blocks, whose payload follows.
    Run(Box<Run>),
    /// The last: nothing follows.
    End(Totals),
}

/// A namespace of an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportedNamespace {
    /// The identity.
    pub identity: Identity,
    /// The geometry of its spec.
    pub geometry: Arc<Geometry>,
}

/// Reads an export frame by frame.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    chain: [u8; 32],
    number: u64,
    specs: BTreeMap<Fingerprint, Arc<Geometry>>,
    namespaces: BTreeMap<NamespaceId, Arc<ExportedNamespace>>,
    totals: Totals,
    ended: bool,
}

impl Reading {
    /// A reader that expects the first frame.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the last frame was read.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The chain value so far: after the last frame it names the whole file.
    pub fn chain(&self) -> [u8; 32] {
        self.chain
    }

    /// A namespace that was read.
    pub fn namespace(&self, id: NamespaceId) -> Option<&Arc<ExportedNamespace>> {
        self.namespaces.get(&id)
    }

    /// Every namespace that was read.
    pub fn namespaces(&self) -> impl Iterator<Item = (NamespaceId, &Arc<ExportedNamespace>)> {
        self.namespaces.iter().map(|(id, namespace)| (*id, namespace))
    }

    /// Proves the next frame. The payload of a run is proven by [`Run::verify`].
    pub fn frame(&mut self, head: &Head, body: &[u8]) -> Result<Frame, ExportError> {
        if self.ended {
            return Err(ExportError::Field("a frame follows the last frame"));
        }
        let chain = chained(&self.chain, &head.encode(), body);
        if body.len() != head.body_bytes() || chain != head.chain || head.number != self.number {
            return Err(ExportError::Damaged);
        }
        if (self.number == 0) != (head.kind == FrameKind::Begin) {
            return Err(ExportError::Field("kind"));
        }
        let frame = match head.kind {
            FrameKind::Begin => {
                let mut taker = Taker::new(body);
                let created_ms = taker.u64()?;
                taker.end()?;
                Frame::Begin(created_ms)
            }
            FrameKind::Spec => Frame::Spec(self.spec(body)?),
            FrameKind::Identity => Frame::Identity(self.identity(body)?),
            FrameKind::Run => Frame::Run(Box::new(self.run(head, body)?)),
            FrameKind::End => Frame::End(self.end(body)?),
        };
        self.chain = chain;
        self.number = self.number.saturating_add(1);
        Ok(frame)
    }

    fn spec(&mut self, body: &[u8]) -> Result<Fingerprint, ExportError> {
        let geometry = Geometry::decode_canonical(body).map_err(|_| ExportError::Field("spec"))?;
        let id = geometry.fingerprint();
        if self.specs.len() >= MAX_DEFINITIONS || self.specs.insert(id, Arc::new(geometry)).is_some() {
            return Err(ExportError::Field("specs"));
        }
        self.totals.specs = self.totals.specs.saturating_add(1);
        Ok(id)
    }

    fn identity(&mut self, body: &[u8]) -> Result<NamespaceId, ExportError> {
        let identity = Identity::decode(body).map_err(|_| ExportError::Field("identity"))?;
        let geometry = self.specs.get(&identity.spec_fingerprint).ok_or(ExportError::Field("spec"))?;
        geometry.check_block_tokens(identity.block_tokens).map_err(|_| ExportError::Field("block_tokens"))?;
        let id = namespace_of(body);
        let namespace = Arc::new(ExportedNamespace { identity, geometry: Arc::clone(geometry) });
        if self.namespaces.len() >= MAX_DEFINITIONS || self.namespaces.insert(id, namespace).is_some() {
            return Err(ExportError::Field("identities"));
        }
        self.totals.identities = self.totals.identities.saturating_add(1);
        Ok(id)
    }

    fn run(&mut self, head: &Head, body: &[u8]) -> Result<Run, ExportError> {
        let run = Run::decode(body)?;
        if run.payload_bytes() != Some(head.payload_bytes) {
            return Err(ExportError::Field("payload_bytes"));
        }
        let namespace = self.namespaces.get(&run.namespace).ok_or(ExportError::Field("namespace"))?;
        run.check_shape(namespace)?;
        self.totals.take_run(&run);
        Ok(run)
    }

    fn end(&mut self, body: &[u8]) -> Result<Totals, ExportError> {
        let mut taker = Taker::new(body);
        for expected in self.totals.fields() {
            if taker.u64()? != expected {
                return Err(ExportError::Field("totals"));
            }
        }
        taker.end()?;
        self.ended = true;
        Ok(self.totals)
    }
}

/// Makes an export frame by frame: each call gives the bytes that come next in the file.
#[derive(Clone, Debug, Default)]
pub struct Writing {
    reading: Reading,
}

impl Writing {
    /// A writer whose first frame must be [`Writing::begin`].
    pub fn new() -> Self {
        Self::default()
    }

    /// The first frame.
    pub fn begin(&mut self, created_ms: u64) -> Result<Vec<u8>, ExportError> {
        self.frame(FrameKind::Begin, &created_ms.to_le_bytes(), 0)
    }

    /// A spec, before the first identity of it.
    pub fn spec(&mut self, geometry: &Geometry) -> Result<Vec<u8>, ExportError> {
        self.frame(FrameKind::Spec, &geometry.canonical_bytes(), 0)
    }

    /// An identity, behind its spec and before the first blocks of it.
    pub fn identity(&mut self, identity: &Identity) -> Result<Vec<u8>, ExportError> {
        let body = identity.encode().map_err(|_| ExportError::Field("identity"))?;
        self.frame(FrameKind::Identity, &body, 0)
    }

    /// Head and body of a run. The caller writes its payload behind them: every block's chunks in canonical order.
    pub fn run(&mut self, run: &Run) -> Result<Vec<u8>, ExportError> {
        let body = run.encode()?;
        let payload_bytes = run.payload_bytes().ok_or(ExportError::Field("block_bytes"))?;
        self.frame(FrameKind::Run, &body, payload_bytes)
    }

    /// The last frame.
    pub fn end(&mut self) -> Result<Vec<u8>, ExportError> {
        let totals: Vec<u8> = self.reading.totals.fields().into_iter().flat_map(u64::to_le_bytes).collect();
        self.frame(FrameKind::End, &totals, 0)
    }

    /// What has been written.
    pub fn totals(&self) -> Totals {
        self.reading.totals
    }

    /// Seals a frame and holds it to what a reader will say.
    fn frame(&mut self, kind: FrameKind, body: &[u8], payload_bytes: u64) -> Result<Vec<u8>, ExportError> {
        let body_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let number = self.reading.number;
        let mut head = Head { kind, number, body_bytes, payload_bytes, chain: [0; 32] };
        head.chain = chained(&self.reading.chain, &head.encode(), body);
        let image = head.encode();
        self.reading.frame(&Head::decode(&image)?, body)?;
        Ok([image.as_slice(), body].concat())
    }
}

/// For fuzzers: reads bytes as an export from the start, and again as one frame behind sound definitions with its lengths
/// and chain value made right.
#[doc(hidden)]
pub fn fuzz_export(data: &[u8]) {
    let mut reading = Reading::new();
    let mut rest = data;
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let Ok(head) = Head::decode(head) else { break };
        let Some((body, behind)) = behind.split_at_checked(head.body_bytes()) else { break };
        let payload = usize::try_from(head.payload_bytes()).unwrap_or(usize::MAX);
        let Ok(_) = reading.frame(&head, body) else { break };
        let Some((_, behind)) = behind.split_at_checked(payload) else { break };
        rest = behind;
    }
    let mut writing = Writing::new();
    let Some((code, body)) = data.split_first() else { return };
    let Ok(geometry) = Geometry::opaque(64) else { return };
    let _ = writing.begin(0).and_then(|_| writing.spec(&geometry));
    let kind = FrameKind::from_code(u16::from(code % 6)).unwrap_or(FrameKind::Run);
    if let Ok(run) = Run::decode(body) {
        // What is accepted is the one encoding of what it says.
        let again = run.encode().unwrap_or_default();
        debug_assert!(again == body, "a run has two encodings");
        let _ = writing.frame(kind, body, run.payload_bytes().unwrap_or(0));
    } else {
        let _ = writing.frame(kind, body, 0);
    }
}

#[cfg(test)]
mod tests;
