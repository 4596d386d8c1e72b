//! One record decoded, with what every digest in it says: what lies at a place, for people.

use kvarts_layout::format::body::{Blocks, Parent};
use kvarts_layout::format::marks::Mark;
use kvarts_layout::format::names::{segment_name, shard_name};
use kvarts_layout::format::record::{Body, Prefix};
use kvarts_layout::format::recovery::Found;
use kvarts_layout::format::seal::{claimed_position, claimed_structure};
use kvarts_layout::format::{PAGE, PAGE_BYTES};
use kvarts_layout::{BlockKey, ContentId, Identity, OriginId};
use serde::Serialize;

use crate::artifact::Artifact;
use crate::contents::{Contents, Fate, Run};
use crate::segment::Ends;
use crate::store::Store;
use crate::walk::look;
use crate::window::{Tally, Window};

/// Chunks of a block that are listed one by one.
const CHUNKS_LISTED: u32 = 16;

/// A chunk and its digest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ChunkView {
    /// Its place in the block.
    pub chunk: u32,
    /// Where it begins in the file.
    pub offset: u64,
    /// Bytes that are stored of it.
    pub bytes: u64,
    /// The digest in the header, in hexadecimal.
    pub crc32: String,
}

/// A block of a record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BlockView {
    /// Its key.
    pub key: String,
    /// Which production of its bytes this is.
    pub origin: String,
    /// What became of it.
    pub fate: Option<Fate>,
    /// The hash of its bytes, if they are what was put.
    pub content: Option<String>,
    /// What is wrong with its bytes.
    pub damage: Option<String>,
    /// Its first chunks.
    pub chunks: Vec<ChunkView>,
    /// Chunks that are not listed.
    pub more_chunks: u32,
}

/// What stands at a place of a segment.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct PlaceView {
    /// What it is, in one word.
    pub found: String,
    /// The structure that its first bytes name, proven by nothing.
    pub claims: Option<String>,
    /// The place that it claims, proven by nothing.
    pub claimed_place: Option<String>,
    /// Version of the format.
    pub version: Option<u16>,
    /// The kind of record.
    pub kind: Option<String>,
    /// Bytes of its header.
    pub header_bytes: Option<u32>,
    /// Bytes of its payload without padding.
    pub payload_bytes: Option<u64>,
    /// Its sequence in its shard.
    pub sequence: Option<u64>,
    /// What had been flushed of the segment when it was written.
    pub durable_upto: Option<u64>,
    /// Everything that its body says beside blocks, a line each.
    pub says: Vec<(String, String)>,
    /// Its first blocks.
    pub blocks: Vec<BlockView>,
    /// Blocks that are not listed.
    pub more_blocks: u64,
}

/// Where something lies.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The number of the shard.
    pub shard: u32,
    /// The number of the segment.
    pub segment: u32,
    /// From the segment's beginning.
    pub offset: u64,
}

/// Looks at one place. `limit` bounds the blocks that are listed and read.
pub fn place(
    store: &Store,
    contents: &Contents,
    Place { shard, segment, offset }: Place,
    limit: usize,
    tally: &Tally,
) -> Result<PlaceView, String> {
    let no_shard = || format!("the store has no shard {shard}: `inspect DIR` prints a map of all shards");
    let at = store.shards.iter().position(|one| one.number == shard).ok_or_else(no_shard)?;
    let home = store.shards.get(at).ok_or_else(no_shard)?;
    let directory = store
        .directories
        .get(home.directory)
        .ok_or("the directory of this shard was not given: give all directories of the store")?;
    let path = format!("{}/{}", shard_name(shard), segment_name(segment));
    let file = directory.disk.open(&path).map_err(|error| format!("{path}: {error}"))?;
    if !offset.is_multiple_of(PAGE_BYTES) || offset >= store.keyring.segment_bytes {
        return Err(format!(
            "the offset {offset} is not valid: a structure begins at a multiple of {PAGE_BYTES} below \
            {}",
            store.keyring.segment_bytes
        ));
    }
    let same = |view: &&crate::contents::SegmentView| (view.shard, view.segment) == (shard, segment);
    let generation = contents.segments.iter().find(same).map_or(0, |view| view.generation);
    let mut window = Window::new(&*file, store.keyring.segment_bytes, tally);
    let position = store.keyring.position(shard, segment).under(generation).at(offset);
    let page = window.bytes(offset, PAGE);
    let structure = claimed_structure(page);
    let mut view = PlaceView {
        claims: structure.map(|structure| format!("{structure:?}")),
        claimed_place: structure.and_then(|_| claimed_position(page)).map(|claimed| claimed.to_string()),
        ..PlaceView::default()
    };
    if about_frame(&mut window, store, (shard, segment, offset), &mut view) {
        return Ok(view);
    }
    let seen = look(&mut window, &position, &store.keyring.secret);
    view.found = match crate::holes::touched(window.holes(), offset, PAGE_BYTES) {
        // Of an unsealed segment nothing was ever written here.
        true => "a hole: these pages were never written, or a record was evicted".to_owned(),
        false => in_words(seen.found).to_owned(),
    };
    if let Some(prefix) = &seen.prefix {
        about_prefix(prefix, &mut view);
    }
    match &seen.body {
        Some(Body::Blocks(blocks)) => {
            let here = |run: &&Run| (run.shard, run.segment, run.offset) == (at, segment, offset);
            let run = contents.runs.iter().find(here);
            about_blocks(blocks, run, &mut view);
            list(store, (shard, blocks, run), &mut window, limit, &mut view);
        }
        Some(body) => about_body(body, &mut view),
        None => {}
    }
    Ok(view)
}

/// What the two ends of a segment, and its footer, say; false if none of them stands here.
fn about_frame(
    window: &mut Window<'_>,
    store: &Store,
    (shard, segment, offset): (u32, u32, u64),
    view: &mut PlaceView,
) -> bool {
    let ends = Ends::read(window, &store.keyring, shard, segment);
    let mut say = |what: &str, value: u64| view.says.push((what.to_owned(), value.to_string()));
    if let (0, Ok(header)) = (offset, &ends.header) {
        view.found = "the header of a segment".to_owned();
        say("generation", header.position.generation);
        say("created_ms", header.created_ms);
        say("segment_bytes", header.segment_bytes);
        say("first_sequence", header.first_sequence);
        return true;
    }
    let Ok(trailer) = &ends.trailer else { return false };
    if offset == ends.trailer_position.offset {
        view.found = "the trailer of a segment".to_owned();
        say("footer_offset", trailer.footer_offset);
        say("footer_bytes", trailer.footer_bytes.into());
        say("record_count", trailer.record_count.into());
        say("first_sequence", trailer.first_sequence);
        say("last_sequence", trailer.last_sequence);
        say("log_end", trailer.log_end);
        view.says.push(("sealed".to_owned(), format!("{:?}", trailer.reason).to_lowercase()));
        return true;
    }
    if offset != trailer.footer_offset {
        return false;
    }
    let footer = ends.footer(window, trailer, &store.keyring.secret);
    let Ok(footer) = footer else { return false };
    view.found = "the footer of a segment".to_owned();
    say("bytes", trailer.footer_bytes.into());
    say("records", footer.records.len() as u64);
    true
}

fn in_words(found: Found) -> &'static str {
    match found {
        Found::RecordWhole | Found::RecordUnread => "a record",
        Found::RecordBroken => "a record whose payload is damaged",
        Found::OutOfOrder => "a record that is out of order",
        Found::Empty => "pages that were never written",
        Found::Torn => "a record that was written only in part",
        Found::Newer => "a record of a newer version",
        Found::UnknownKind => "a record of an unknown kind",
        Found::UnknownExtension => "a record with an unknown critical extension",
        Found::Malformed => "a record that violates the format",
        Found::Stale => "a remainder of an earlier generation",
        Found::Ahead => "a record of a later generation",
        Found::Misdirected => "a record that belongs to another position",
        Found::Foreign => "a structure of another store",
        _ => "not the start of a record: part of a payload, another structure, or damage",
    }
}

fn about_prefix(prefix: &Prefix, view: &mut PlaceView) {
    view.version = Some(prefix.version);
    view.kind = Some(format!("{:?}", prefix.kind).to_lowercase());
    view.header_bytes = Some(prefix.header_bytes);
    view.payload_bytes = Some(prefix.payload_bytes);
    view.sequence = Some(prefix.sequence);
    view.durable_upto = Some(prefix.durable_upto);
}

fn about_blocks(blocks: &Blocks, run: Option<&Run>, view: &mut PlaceView) {
    let mut say = |what: &str, value: String| view.says.push((what.to_owned(), value));
    if let Some(run) = run {
        say("namespace", run.namespace.id.to_string());
        say("model", run.namespace.model.clone());
        say("expires_ms", run.expires_ms.to_string());
    } else {
        say("namespace", format!("the definition of the short id {} is missing", blocks.namespace));
        say("expires_ms", blocks.expires_ms.to_string());
    }
    say("created_ms", blocks.created_ms.to_string());
    say("group", blocks.group.to_string());
    let coordinate = kvarts_layout::Coordinate::from_u64(blocks.coordinate);
    say("coordinate", coordinate.map_or("unknown".to_owned(), |coordinate| format!("{coordinate:?}")));
    say(
        "layout",
        ["full-block", "layer-block"].get(blocks.layout as usize).unwrap_or(&"unknown").to_string(),
    );
    say("layout_version", blocks.layout_version.to_string());
    let encodings = ["raw", "zstd over byte planes", "zstd"];
    say("encoding", encodings.get(blocks.encoding as usize).unwrap_or(&"unknown").to_string());
    let parent = match &blocks.parent {
        Parent::Root => "root".to_owned(),
        Parent::Key(key) => BlockKey(*key).to_string(),
        Parent::Unknown => "unknown".to_owned(),
    };
    say("parent", parent);
    if let Some(first) = blocks.first_block {
        say("first_block", first.to_string());
    }
    for extension in &blocks.extensions {
        say(&format!("extension {}", extension.id), format!("{} bytes", extension.bytes.len()));
    }
}

fn about_body(body: &Body, view: &mut PlaceView) {
    let mut say = |what: &str, value: String| view.says.push((what.to_owned(), value));
    match body {
        Body::Identity(definition) | Body::Spec(definition) => {
            say("short id", definition.local.to_string());
            say("id", ContentId(definition.id).to_string());
            if let Ok(identity) = Identity::decode(&definition.canonical) {
                say("model", format!("{} {}", identity.model, identity.revision));
                say("block_tokens", identity.block_tokens.to_string());
                say("spec", identity.spec_fingerprint.to_string());
            }
            say("canonical bytes", definition.canonical.len().to_string());
        }
        Body::Tombstones(tombstones) => {
            for one in tombstones.entries.iter().take(CHUNKS_LISTED as usize) {
                match Mark::of(one) {
                    Some(Mark::Begun) => {
                        say("mark", format!("the delete of namespace {} began", one.namespace))
                    }
                    Some(Mark::Ended) => {
                        say("mark", format!("the delete of namespace {} ended", one.namespace))
                    }
                    None => say(
                        "deletes",
                        format!(
                            "{} in records with a sequence number below {}",
                            BlockKey(one.key),
                            one.below
                        ),
                    ),
                }
            }
            say("deletes in all", tombstones.entries.len().to_string());
        }
        Body::Epoch(epoch) => {
            let namespace = ContentId(epoch.namespace);
            say(
                "deletes",
                format!("namespace {namespace} in records with a sequence number below {}", epoch.below),
            );
        }
        Body::Unknown(code) => say("kind", code.to_string()),
        Body::Blocks(_) => {}
    }
}

/// Lists blocks, reading and verifying those that are listed.
fn list(
    store: &Store,
    (shard, blocks, run): (u32, &Blocks, Option<&Run>),
    window: &mut Window<'_>,
    limit: usize,
    view: &mut PlaceView,
) {
    let artifact = run.map(|run| Artifact::open(window, (&store.keyring, shard), run));
    for (at, name) in (0u32..).zip(&blocks.blocks).take(limit) {
        let mut block = BlockView {
            key: BlockKey(name.key).to_string(),
            origin: OriginId(name.origin).to_string(),
            fate: run.and_then(|run| run.fates.get(at as usize).copied()),
            content: None,
            damage: None,
            chunks: Vec::new(),
            more_chunks: 0,
        };
        match &artifact {
            Some(Ok(artifact)) => {
                match artifact.blocks(window, at, at.saturating_add(1)) {
                    Ok(bytes) => {
                        block.content = Some(ContentId(*blake3::hash(&bytes).as_bytes()).to_string())
                    }
                    Err(why) => block.damage = Some(why.to_string()),
                }
                let chunks = (0u32..).zip(artifact.digests(at)).take(CHUNKS_LISTED as usize);
                block.chunks.extend(chunks.filter_map(|(chunk, digest)| {
                    let (offset, bytes) = artifact.place(at, chunk)?;
                    Some(ChunkView { chunk, offset, bytes, crc32: format!("{digest:08x}") })
                }));
                block.more_chunks = artifact.chunk_count().saturating_sub(CHUNKS_LISTED);
            }
            Some(Err(why)) => block.damage = Some(why.to_string()),
            None => block.damage = Some("the shape of the block's bytes is unknown".to_owned()),
        }
        view.blocks.push(block);
    }
    view.more_blocks = blocks.blocks.len().saturating_sub(limit) as u64;
}
