//! Writes artifacts of a store into a portable file: what counts, verified on the way. docs/EXPORT.md has the format.
//!
//! What cannot be read, or is not what was put, is left out and named; nothing unverified gets into the file. Memory: one
//! frame, which is 32 MiB or a single block, beside what [`crate::contents`] takes.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Write};

use kvarts_layout::export::{ExportError, ExportedBlock, Run as ExportedRun, Totals, Writing};
use kvarts_layout::format::body::Parent;
use kvarts_layout::format::names::{segment_name, shard_name};
use kvarts_layout::{BlockKey, Fingerprint, NamespaceId};
use kvarts_layout::{ContentId, Coordinate, Group, OriginId};

use crate::artifact::{Artifact, Unreadable};
use crate::contents::{Contents, Fate, Run};
use crate::store::Store;
use crate::window::{Tally, Window};

/// Records that were left out and are named; the others are only counted.
const NAMED_MAX: usize = 100;

/// What is exported.
#[derive(Clone, Debug)]
pub enum Selection {
    /// Everything.
    All,
    /// One namespace.
    Namespace(NamespaceId),
    /// These blocks, in every group and coordinate.
    Blocks(BTreeSet<(NamespaceId, BlockKey)>),
}

impl Selection {
    fn has(&self, namespace: NamespaceId, key: &[u8; 32]) -> bool {
        match self {
            Self::All => true,
            Self::Namespace(one) => *one == namespace,
            Self::Blocks(blocks) => blocks.contains(&(namespace, BlockKey(*key))),
        }
    }
}

/// Why an export could not be written.
#[derive(Debug)]
pub enum Failed {
    /// The file.
    Write(io::Error),
    /// A value that the format has no room for.
    Format(ExportError),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write(error) => write!(f, "the export cannot be written: {error}"),
            Self::Format(error) => write!(f, "the export has no room for this store: {error}"),
        }
    }
}

impl std::error::Error for Failed {}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<ExportError> for Failed {
    fn from(error: ExportError) -> Self {
        Self::Format(error)
    }
}

/// A record that is not in the export though blocks of it count.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct LeftOut {
    /// Its shard.
    pub shard: u32,
    /// Its segment.
    pub segment: u32,
    /// Where its header begins.
    pub offset: u64,
    /// Its blocks that were wanted.
    pub blocks: u64,
    /// Why.
    pub why: String,
}

/// What an export came to.
#[derive(Clone, Debug, Default)]
pub struct Exported {
    /// What is in the file.
    pub totals: Totals,
    /// The first records that are not.
    pub left_out: Vec<LeftOut>,
    /// Blocks that were wanted and are not in the file.
    pub blocks_left_out: u64,
    /// Extensions of records (session ids, user metadata): the format has none.
    pub extensions_left_out: u64,
}

/// Writes what counts and is wanted.
pub fn export(
    store: &Store,
    contents: &Contents,
    wanted: &Selection,
    (created_ms, tally): (u64, &Tally),
    out: &mut dyn Write,
) -> Result<Exported, Failed> {
    let mut writing = Writing::new();
    let mut exported = Exported::default();
    out.write_all(&writing.begin(created_ms)?)?;
    let mut runs: Vec<(&Run, Vec<(u32, u32)>)> =
        contents.runs.iter().map(|run| (run, pieces(run, wanted))).collect();
    runs.retain(|(_, pieces)| !pieces.is_empty());
    // In the order in which they lie, so that a file is read front to back.
    runs.sort_by_key(|(run, _)| (run.shard, run.segment, run.offset));
    let mut definitions = (BTreeSet::<Fingerprint>::new(), BTreeSet::<NamespaceId>::new());
    for (run, pieces) in &runs {
        define(&mut writing, &mut definitions, run, out)?;
        let wanted_blocks = pieces.iter().map(|(from, to)| u64::from(to.saturating_sub(*from))).sum();
        match record(store, run, pieces, (&mut writing, tally), out) {
            Ok(()) => {
                let extensions = run.blocks.extensions.len() as u64;
                exported.extensions_left_out = exported.extensions_left_out.saturating_add(extensions);
            }
            Err(Stopped::Failed(failed)) => return Err(failed),
            Err(Stopped::Unreadable(why, left)) => {
                leave_out(&mut exported, store, run, left.min(wanted_blocks), why)
            }
        }
    }
    out.write_all(&writing.end()?)?;
    exported.totals = writing.totals();
    Ok(exported)
}

/// Bytes that an export of this will read, about: for progress.
pub fn planned_bytes(contents: &Contents, wanted: &Selection) -> u64 {
    let runs = contents.runs.iter().filter(|run| !pieces(run, wanted).is_empty());
    runs.map(Run::bytes).fold(0, u64::saturating_add)
}

fn leave_out(exported: &mut Exported, store: &Store, run: &Run, blocks: u64, why: Unreadable) {
    exported.blocks_left_out = exported.blocks_left_out.saturating_add(blocks);
    if exported.left_out.len() < NAMED_MAX {
        exported.left_out.push(LeftOut {
            shard: store.shards.get(run.shard).map_or(0, |shard| shard.number),
            segment: run.segment,
            offset: run.offset,
            blocks,
            why: why.to_string(),
        });
    }
}

/// The definitions that a run needs and that are not in the file yet.
fn define(
    writing: &mut Writing,
    (specs, namespaces): &mut (BTreeSet<Fingerprint>, BTreeSet<NamespaceId>),
    run: &Run,
    out: &mut dyn Write,
) -> Result<(), Failed> {
    let namespace = &run.namespace;
    if specs.insert(namespace.identity.spec_fingerprint) {
        out.write_all(&writing.spec(&namespace.geometry)?)?;
    }
    if namespaces.insert(namespace.id) {
        out.write_all(&writing.identity(&namespace.identity)?)?;
    }
    Ok(())
}

/// The stretches of neighbouring blocks of a record that count and are wanted.
fn pieces(run: &Run, wanted: &Selection) -> Vec<(u32, u32)> {
    let mut pieces: Vec<(u32, u32)> = Vec::new();
    for (at, (name, fate)) in (0u32..).zip(run.blocks.blocks.iter().zip(&run.fates)) {
        if *fate != Fate::Live || !wanted.has(run.namespace.id, &name.key) {
            continue;
        }
        match pieces.last_mut() {
            Some((_, to)) if *to == at => *to = at.saturating_add(1),
            _ => pieces.push((at, at.saturating_add(1))),
        }
    }
    pieces
}

enum Stopped {
    Failed(Failed),
    /// Why, and how many blocks are not in the file.
    Unreadable(Unreadable, u64),
}

impl<T: Into<Failed>> From<T> for Stopped {
    fn from(failed: T) -> Self {
        Self::Failed(failed.into())
    }
}

/// Writes the pieces of one record. One that is damaged is condemned whole: what was already written of it before the
/// damage was met is verified, and stays.
fn record(
    store: &Store,
    run: &Run,
    pieces: &[(u32, u32)],
    (writing, tally): (&mut Writing, &Tally),
    out: &mut dyn Write,
) -> Result<(), Stopped> {
    let mut left: u64 = pieces.iter().map(|(from, to)| u64::from(to.saturating_sub(*from))).sum();
    let gone = |why| Stopped::Unreadable(why, left);
    let shard = store.shards.get(run.shard).ok_or_else(|| gone(Unreadable::Header))?;
    let directory = store.directories.get(shard.directory).ok_or_else(|| gone(Unreadable::Header))?;
    let path = format!("{}/{}", shard_name(shard.number), segment_name(run.segment));
    let file = directory.disk.open(&path).map_err(|_| gone(Unreadable::Header))?;
    let mut window = Window::new(&*file, store.keyring.segment_bytes, tally);
    let artifact = Artifact::open(&mut window, (&store.keyring, shard.number), run).map_err(gone)?;
    let most = ExportedRun::most_blocks(artifact.shape.block_bytes(), artifact.chunk_count());
    for &(from, to) in pieces {
        let mut at = from;
        while at < to {
            let end = at.saturating_add(most).min(to);
            let bytes =
                artifact.blocks(&mut window, at, end).map_err(|why| Stopped::Unreadable(why, left))?;
            let head = writing.run(&exported_run(run, &artifact, (at, end), &bytes))?;
            out.write_all(&head)?;
            out.write_all(&bytes)?;
            left = left.saturating_sub(u64::from(end.saturating_sub(at)));
            at = end;
        }
    }
    Ok(())
}

fn exported_run(run: &Run, artifact: &Artifact, (from, to): (u32, u32), bytes: &[u8]) -> ExportedRun {
    let blocks = &run.blocks;
    let names = blocks.blocks.get(from as usize..to as usize).unwrap_or_default();
    let block_bytes = artifact.shape.block_bytes();
    let each = usize::try_from(block_bytes).unwrap_or(usize::MAX).max(1);
    let exported =
        (from..to).zip(names.iter().zip(bytes.chunks(each))).map(|(at, (name, bytes))| ExportedBlock {
            key: BlockKey(name.key),
            origin: OriginId(name.origin),
            content: ContentId(*blake3::hash(bytes).as_bytes()),
            digests: artifact.digests(at).to_vec(),
        });
    let before = (from as usize).checked_sub(1).and_then(|before| blocks.blocks.get(before));
    let parent = match (&blocks.parent, before) {
        (Parent::Unknown, _) => Parent::Unknown,
        (_, Some(before)) => Parent::Key(before.key),
        (parent, None) => *parent,
    };
    ExportedRun {
        namespace: run.namespace.id,
        coordinate: Coordinate::from_u64(blocks.coordinate).unwrap_or(Coordinate::Replicated),
        group: Group(blocks.group),
        created_ms: blocks.created_ms,
        expires_ms: run.expires_ms,
        first_block: blocks.first_block.and_then(|first| first.checked_add(from)),
        parent,
        block_bytes,
        blocks: exported.collect(),
    }
}
