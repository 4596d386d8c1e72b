//! `kvarts inspect`: what lies where. A store as a summary and a map, a segment as its records, a record decoded.

use std::io::Write;
use std::str::FromStr;

use clap::Args;
use kvarts_fsck::contents::{Contents, Fate, Run, SegmentView, State};
use kvarts_fsck::inspect::{PlaceView, place};
use kvarts_fsck::store::Store;
use kvarts_fsck::tree::trees;
use kvarts_fsck::window::Tally;
use serde::Serialize;

use super::{Place, map, shown, warn_of_problems, write_json};
use kvarts_server::human::{bytes, exact_bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// Rows of the map that are shown of each shard.
const MAP_ROWS: usize = 8;

/// A place in a store: `SHARD/SEGMENT` or `SHARD/SEGMENT/OFFSET`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct At {
    shard: u32,
    segment: u32,
    offset: Option<u64>,
}

impl FromStr for At {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a place in a store: write SHARD/SEGMENT or SHARD/SEGMENT/OFFSET, in \
                decimal"
            )
        };
        let mut parts = text.split('/');
        let mut next = || parts.next();
        let shard = next().and_then(|part| part.parse().ok()).ok_or_else(wrong)?;
        let segment = next().and_then(|part| part.parse().ok()).ok_or_else(wrong)?;
        let offset = next().map(|part| part.parse().map_err(|_| wrong())).transpose()?;
        if parts.next().is_some() { Err(wrong()) } else { Ok(Self { shard, segment, offset }) }
    }
}

/// The arguments of `inspect`.
#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    place: Place,
    /// A segment, or a record in it; offset 0 is the segment's header
    #[arg(value_name = "SHARD/SEGMENT[/OFFSET]")]
    at: Option<At>,
    /// Largest number of records of a segment, or blocks of a record, to show
    #[arg(long, default_value_t = 40)]
    limit: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &InspectArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let tally = Tally::default();
    let (store, contents) = arguments.place.read("inspect", &tally)?;
    let Some(at) = arguments.at else {
        return whole(&store, &contents, arguments.json, out);
    };
    if let Some(offset) = at.offset {
        let where_at = kvarts_fsck::inspect::Place { shard: at.shard, segment: at.segment, offset };
        let view = place(&store, &contents, where_at, arguments.limit, &tally).map_err(Failure::User)?;
        return if arguments.json { write_json(&view, out) } else { write_place(&view, out) };
    }
    segment(&store, &contents, at, arguments, out)
}

#[derive(Serialize)]
struct Summary<'a> {
    store: String,
    segment_bytes: u64,
    directories: usize,
    shards: usize,
    artifacts: u64,
    blocks: u64,
    dead_blocks: u64,
    deletes_remembered: u64,
    file_bytes: u64,
    live_bytes: u64,
    dead_bytes: u64,
    overhead_bytes: u64,
    free_bytes: u64,
    problems: u64,
    namespaces: Vec<NamespaceRow>,
    segments: &'a [SegmentView],
}

#[derive(Serialize)]
struct NamespaceRow {
    namespace: String,
    model: String,
    artifacts: u64,
    blocks: u64,
    bytes: u64,
}

fn summary<'a>(store: &Store, contents: &'a Contents) -> Summary<'a> {
    let sum = |what: fn(&SegmentView) -> u64| contents.segments.iter().map(what).fold(0, u64::saturating_add);
    let count = |live: bool| {
        let fates = contents.runs.iter().flat_map(|run| &run.fates);
        fates.filter(|fate| (**fate == Fate::Live) == live).count() as u64
    };
    let trees = trees(contents, None, 0);
    let artifacts = trees.iter().map(|tree| tree.artifacts).fold(0, u64::saturating_add);
    let namespaces = trees.into_iter().map(|tree| NamespaceRow {
        namespace: tree.namespace.id.to_string(),
        model: tree.namespace.model.clone(),
        artifacts: tree.artifacts,
        blocks: tree.blocks,
        bytes: tree.bytes,
    });
    Summary {
        store: store.keyring.store.to_string(),
        segment_bytes: store.keyring.segment_bytes,
        directories: store.directories.len(),
        shards: store.shards.len(),
        artifacts,
        blocks: count(true),
        dead_blocks: count(false),
        deletes_remembered: contents.graves,
        file_bytes: sum(|view| view.bytes),
        live_bytes: sum(|view| view.live_bytes),
        dead_bytes: sum(|view| view.dead_bytes),
        overhead_bytes: sum(|view| view.overhead_bytes),
        free_bytes: sum(|view| view.free_bytes),
        problems: contents.findings.problem_count,
        namespaces: namespaces.collect(),
        segments: &contents.segments,
    }
}

fn whole(store: &Store, contents: &Contents, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let all = summary(store, contents);
    if json {
        return write_json(&all, out);
    }
    writeln!(
        out,
        "store {}: {} directories, {} shards, {} segments of {}",
        all.store,
        all.directories,
        all.shards,
        contents.segments.len(),
        bytes(all.segment_bytes)
    )?;
    writeln!(
        out,
        "{} blocks in {} artifacts; {} dead blocks; {} remembered deletes",
        grouped(all.blocks),
        grouped(all.artifacts),
        grouped(all.dead_blocks),
        grouped(all.deletes_remembered)
    )?;
    let mut table =
        Table::new(&[("BYTES OF SEGMENTS", Align::Left), ("", Align::Right), ("SHARE", Align::Right)]);
    for (what, part) in [
        ("live", all.live_bytes),
        ("dead", all.dead_bytes),
        ("overhead", all.overhead_bytes),
        ("free", all.free_bytes),
        ("all", all.file_bytes),
    ] {
        let share = part.saturating_mul(1000).checked_div(all.file_bytes).unwrap_or(0);
        table.row([what.to_owned(), bytes(part), format!("{}.{}%", share / 10, share % 10)]);
    }
    write!(out, "\n{table}\n")?;
    let mut table = Table::new(&[
        ("MODEL", Align::Left),
        ("NAMESPACE", Align::Left),
        ("ARTIFACTS", Align::Right),
        ("BLOCKS", Align::Right),
        ("BYTES", Align::Right),
    ]);
    for row in &all.namespaces {
        let cells = [
            shown(&row.model),
            row.namespace.clone(),
            grouped(row.artifacts),
            grouped(row.blocks),
            bytes(row.bytes),
        ];
        table.row(cells);
    }
    write!(out, "{table}\n{}{}\n", map::store(&contents.segments, MAP_ROWS), map::STORE_KEY)?;
    warn_of_problems(contents, out)
}

#[derive(Serialize)]
struct RecordRow {
    offset: u64,
    sequence: u64,
    bytes: u64,
    blocks: usize,
    live_blocks: u64,
    model: String,
    first_key: String,
}

#[derive(Serialize)]
struct SegmentDetail {
    #[serde(flatten)]
    view: SegmentView,
    records_of_blocks: Vec<RecordRow>,
    left_out: usize,
    problems_met: Vec<String>,
}

fn segment(
    store: &Store,
    contents: &Contents,
    at: At,
    arguments: &InspectArgs,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let here = |view: &&SegmentView| (view.shard, view.segment) == (at.shard, at.segment);
    let view = contents.segments.iter().find(here);
    let view = view.ok_or_else(|| {
        Failure::User(format!("shard {} has no segment {}: `inspect DIR` prints a map", at.shard, at.segment))
    })?;
    let number = |run: &Run| store.shards.get(run.shard).map(|shard| shard.number);
    let mut runs: Vec<&Run> = contents.runs.iter().filter(|run| run.segment == at.segment).collect();
    runs.retain(|run| number(run) == Some(at.shard));
    runs.sort_by_key(|run| run.offset);
    let row = |run: &&Run| RecordRow {
        offset: run.offset,
        sequence: run.sequence,
        bytes: run.bytes(),
        blocks: run.fates.len(),
        live_blocks: run.live(),
        model: shown(&run.namespace.model),
        first_key: run
            .blocks
            .blocks
            .first()
            .map_or(String::new(), |block| kvarts_layout::BlockKey(block.key).to_string()),
    };
    let met =
        contents.findings.problems.iter().filter(|finding| {
            (finding.place.shard, finding.place.segment) == (Some(at.shard), Some(at.segment))
        });
    let detail = SegmentDetail {
        view: *view,
        records_of_blocks: runs.iter().take(arguments.limit).map(row).collect(),
        left_out: runs.len().saturating_sub(arguments.limit),
        problems_met: met.map(|finding| finding.label.name.to_owned()).collect(),
    };
    if arguments.json {
        return write_json(&detail, out);
    }
    write_segment(view, &runs, &detail, store.keyring.trailer_at(), out)
}

fn write_segment(
    view: &SegmentView,
    runs: &[&Run],
    detail: &SegmentDetail,
    trailer_at: u64,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let state = format!("{:?}", view.state).to_lowercase();
    writeln!(
        out,
        "shard {} segment {}: {state}, generation {}, {} records, {}",
        view.shard,
        view.segment,
        view.generation,
        grouped(view.records),
        bytes(view.bytes)
    )?;
    writeln!(
        out,
        "live {}, dead {}, overhead {}, free {}",
        exact_bytes(view.live_bytes),
        exact_bytes(view.dead_bytes),
        exact_bytes(view.overhead_bytes),
        exact_bytes(view.free_bytes)
    )?;
    let ends: &[(u64, u64)] = match view.state {
        State::Sealed | State::Suspect => &[(0, 4096), (trailer_at, view.bytes)],
        _ => &[(0, 4096)],
    };
    writeln!(out, "\n[{}]\n{}\n", map::segment(view, runs, ends), map::SEGMENT_KEY)?;
    let mut table = Table::new(&[
        ("OFFSET", Align::Right),
        ("SEQUENCE", Align::Right),
        ("BYTES", Align::Right),
        ("LIVE", Align::Right),
        ("OF", Align::Right),
        ("FIRST KEY", Align::Left),
        ("MODEL", Align::Left),
    ]);
    for row in &detail.records_of_blocks {
        table.row([
            row.offset.to_string(),
            row.sequence.to_string(),
            bytes(row.bytes),
            row.live_blocks.to_string(),
            row.blocks.to_string(),
            row.first_key.get(..16).unwrap_or_default().to_owned(),
            row.model.clone(),
        ]);
    }
    write!(out, "{table}")?;
    if detail.left_out > 0 {
        writeln!(out, "... and {} more records: raise --limit to print them", detail.left_out)?;
    }
    for label in &detail.problems_met {
        writeln!(out, "problem: {label}")?;
    }
    Ok(())
}

fn write_place(view: &PlaceView, out: &mut dyn Write) -> Result<(), Failure> {
    let mut table = Table::new(&[("", Align::Left), ("", Align::Left)]);
    let mut say = |what: &str, value: Option<String>| {
        if let Some(value) = value {
            table.row([what.to_owned(), shown(&value)]);
        }
    };
    say("found", Some(view.found.clone()));
    say("stated type", view.claims.clone());
    say("stated position", view.claimed_place.clone());
    say("version", view.version.map(|value| value.to_string()));
    say("kind", view.kind.clone());
    say("header", view.header_bytes.map(|value| exact_bytes(value.into())));
    say("payload", view.payload_bytes.map(exact_bytes));
    say("sequence", view.sequence.map(|value| value.to_string()));
    say("durable_upto", view.durable_upto.map(|value| value.to_string()));
    for (what, value) in &view.says {
        say(what, Some(value.clone()));
    }
    write!(out, "{}", table.to_string().trim_start_matches('\n'))?;
    for block in &view.blocks {
        let fate = block.fate.map_or("undefined".to_owned(), |fate| format!("{fate:?}").to_lowercase());
        writeln!(out, "\nblock {}  {fate}", block.key)?;
        writeln!(out, "  origin  {}", block.origin)?;
        match (&block.content, &block.damage) {
            (Some(content), _) => writeln!(out, "  content {content}, every digest matches")?,
            (None, damage) => writeln!(out, "  DAMAGED: {}", shown(damage.as_deref().unwrap_or("unknown")))?,
        }
        for chunk in &block.chunks {
            let (at, len) = (chunk.offset, chunk.bytes);
            writeln!(out, "  chunk {:>4}  at {at}, {len} bytes, crc32 {}", chunk.chunk, chunk.crc32)?;
        }
        if block.more_chunks > 0 {
            writeln!(out, "  ... and {} more chunks", block.more_chunks)?;
        }
    }
    if view.more_blocks > 0 {
        writeln!(out, "\n... and {} more blocks: raise --limit to print them", view.more_blocks)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_others_refused() {
        let at = |text: &str| text.parse::<At>();
        assert_eq!(at("3/12"), Ok(At { shard: 3, segment: 12, offset: None }));
        assert_eq!(at("3/12/4096"), Ok(At { shard: 3, segment: 12, offset: Some(4096) }));
        for wrong in ["", "3", "3/", "3/x", "3/1/0x10", "3/1/2/4", "-1/2"] {
            assert!(at(wrong).unwrap_err().contains("SHARD/SEGMENT"), "{wrong}");
        }
    }
}
