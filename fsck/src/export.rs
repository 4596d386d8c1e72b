//! Writes artifacts of a store into a portable file: what counts, verified on the way. docs/EXPORT.md has the format.
//!
//! What cannot be read, or is not what was put, is left out and named; nothing unverified gets into the file. Memory: one
//! frame, which is 32 MiB or a single block, beside what [`crate::contents`] takes, or [`crate::contents::counted`].

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Write};

use kvarts_layout::export::{ExportError, ExportedBlock, Run as ExportedRun, Totals, Writing};
use kvarts_layout::format::names::{segment_name, shard_name};
use kvarts_layout::{BlockKey, Fingerprint, NamespaceId};
use kvarts_layout::{ContentId, Coordinate, Group, OriginId};

use crate::artifact::{Artifact, Unreadable};
use crate::check::Options;
use crate::contents::counted::Counted;
use crate::contents::{Contents, Fate, Run};
use crate::disk::DiskFile;
use crate::segment::Ends;
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
            Self::Write(error) => write!(f, "the export could not be written: {error}"),
            Self::Format(error) => write!(
                f,
                "the export could not be written, because the export format cannot hold a value of this \
                store: {error}"
            ),
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

/// A record of which blocks that count are not in the export.
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
    /// Blocks of a store in use that have left it since they were listed.
    pub blocks_gone: u64,
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
    let mut exporting = Exporting::new(store, contents.live, tally);
    exporting.begin(created_ms, out)?;
    let mut runs: Vec<(&Run, Vec<(u32, u32)>)> =
        contents.runs.iter().map(|run| (run, pieces(run, wanted))).collect();
    runs.retain(|(_, pieces)| !pieces.is_empty());
    // In the order in which they lie, so that a file is read front to back.
    runs.sort_by_key(|(run, _)| (run.shard, run.segment, run.offset));
    for (run, pieces) in &runs {
        exporting.run(run, pieces, out)?;
    }
    exporting.end(out)
}

/// The same of a store of any size: what it has is not held.
pub fn export_counted(
    (store, options): (&Store, &Options),
    counted: &Counted,
    wanted: &Selection,
    (created_ms, tally): (u64, &Tally),
    out: &mut (dyn Write + Send),
) -> Result<Exported, Failed> {
    let mut exporting = Exporting::new(store, counted.live, tally);
    exporting.begin(created_ms, out)?;
    let gone = counted.each_run(store, options, tally, &mut |run| {
        let pieces = pieces(run, wanted);
        if pieces.is_empty() { Ok(()) } else { exporting.run(run, &pieces, &mut *out) }
    })?;
    exporting.exported.blocks_gone = exporting.exported.blocks_gone.saturating_add(gone);
    exporting.end(out)
}

/// An export under way.
struct Exporting<'a> {
    store: &'a Store,
    live: bool,
    tally: &'a Tally,
    writing: Writing,
    exported: Exported,
    definitions: (BTreeSet<Fingerprint>, BTreeSet<NamespaceId>),
}

impl<'a> Exporting<'a> {
    fn new(store: &'a Store, live: bool, tally: &'a Tally) -> Self {
        let (writing, exported) = (Writing::new(), Exported::default());
        Self { store, live, tally, writing, exported, definitions: Default::default() }
    }

    fn begin(&mut self, created_ms: u64, out: &mut dyn Write) -> Result<(), Failed> {
        Ok(out.write_all(&self.writing.begin(created_ms)?)?)
    }

    /// Writes these pieces of a record.
    fn run(&mut self, run: &Run, pieces: &[(u32, u32)], out: &mut dyn Write) -> Result<(), Failed> {
        let (store, tally) = (self.store, self.tally);
        define(&mut self.writing, &mut self.definitions, run, out)?;
        let mut missing = Missing { why: None, blocks: blocks(pieces) };
        record(store, run, pieces, (&mut self.writing, tally), (&mut missing, out))?;
        let exported = &mut self.exported;
        if self.live && !missing.blocks.is_empty() {
            let before = missing.blocks.len();
            let gone = gone_by_now(store, run, tally);
            missing.blocks.retain(|block| gone.get(*block as usize) == Some(&false));
            let left = before.saturating_sub(missing.blocks.len()) as u64;
            exported.blocks_gone = exported.blocks_gone.saturating_add(left);
        }
        match missing.why.filter(|_| !missing.blocks.is_empty()) {
            Some(why) => leave_out(exported, store, run, missing.blocks.len() as u64, &why),
            None => {
                let extensions = run.blocks.extensions.len() as u64;
                exported.extensions_left_out = exported.extensions_left_out.saturating_add(extensions);
            }
        }
        Ok(())
    }

    fn end(mut self, out: &mut dyn Write) -> Result<Exported, Failed> {
        out.write_all(&self.writing.end()?)?;
        self.exported.totals = self.writing.totals();
        Ok(self.exported)
    }
}

/// Bytes that an export of this will read, about: for progress.
pub fn planned_bytes(contents: &Contents, wanted: &Selection) -> u64 {
    let runs = contents.runs.iter().filter(|run| !pieces(run, wanted).is_empty());
    runs.map(Run::bytes).fold(0, u64::saturating_add)
}

fn leave_out(exported: &mut Exported, store: &Store, run: &Run, blocks: u64, why: &Unreadable) {
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

/// The blocks of pieces, one by one.
fn blocks(pieces: &[(u32, u32)]) -> Vec<u32> {
    pieces.iter().flat_map(|(from, to)| *from..*to).collect()
}

/// Blocks of a record that are not in the file, and why the first of them is not.
struct Missing {
    why: Option<Unreadable>,
    blocks: Vec<u32>,
}

/// Writes the pieces of one record, but for blocks of it that are damaged: what is left in `missing`.
fn record(
    store: &Store,
    run: &Run,
    pieces: &[(u32, u32)],
    (writing, tally): (&mut Writing, &Tally),
    (missing, out): (&mut Missing, &mut dyn Write),
) -> Result<(), Failed> {
    let opened = open(store, run).and_then(|(file, shard)| {
        let mut window = Window::new(&*file, store.keyring.segment_bytes, tally);
        let artifact = Artifact::open(&mut window, (&store.keyring, shard), run)?;
        drop(window);
        Ok((file, artifact))
    });
    let (file, artifact) = match opened {
        Ok(opened) => opened,
        Err(why) => {
            missing.why = Some(why);
            return Ok(());
        }
    };
    let mut window = Window::new(&*file, store.keyring.segment_bytes, tally);
    let most = ExportedRun::most_blocks(artifact.shape.block_bytes(), artifact.chunk_count());
    let mut written = BTreeSet::new();
    'pieces: for &(from, to) in pieces {
        let (mut at, mut most) = (from, most);
        while at < to {
            let end = at.saturating_add(most).min(to);
            match artifact.blocks(&mut window, at, end) {
                Ok(bytes) => {
                    let head = writing.run(&exported_run(run, &artifact, (at, end), &bytes))?;
                    out.write_all(&head)?;
                    out.write_all(&bytes)?;
                    written.extend(at..end);
                }
                // One of them: the others may be whole.
                Err(Unreadable::Damaged(..)) if end.saturating_sub(at) > 1 => {
                    most = 1;
                    continue;
                }
                Err(why) => {
                    let each_its_own = matches!(why, Unreadable::Damaged(..));
                    missing.why.get_or_insert(why);
                    if !each_its_own {
                        break 'pieces;
                    }
                }
            }
            at = end;
        }
    }
    missing.blocks.retain(|block| !written.contains(block));
    Ok(())
}

/// The file of a record's segment, and the number of its shard.
fn open(store: &Store, run: &Run) -> Result<(Box<dyn DiskFile>, u32), Unreadable> {
    let shard = store.shards.get(run.shard).ok_or(Unreadable::Header)?;
    let directory = store.directories.get(shard.directory).ok_or(Unreadable::Header)?;
    let path = format!("{}/{}", shard_name(shard.number), segment_name(run.segment));
    Ok((directory.disk.open(&path).map_err(|_| Unreadable::Header)?, shard.number))
}

/// Which blocks of a record are not there any more: the segment was given back or holds something else by now, or they
/// were evicted.
fn gone_by_now(store: &Store, run: &Run, tally: &Tally) -> Vec<bool> {
    let all = vec![true; run.fates.len()];
    let Ok((file, shard)) = open(store, run) else { return all };
    let mut window = Window::new(&*file, store.keyring.segment_bytes, tally);
    let ends = Ends::read(&mut window, &store.keyring, shard, run.segment);
    if ends.generation() != Some(run.generation) {
        return all;
    }
    let place = (run.offset, run.header_bytes, run.payload_bytes);
    let model = (&*run.namespace.geometry, run.namespace.block_tokens);
    let gone = crate::holes::gone(place, &run.blocks, model, &file.holes());
    if gone.is_empty() { vec![false; run.fates.len()] } else { gone }
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
    let parent = blocks.parent.behind(before);
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
