//! `kvarts cold ls` and `kvarts cold stat`: what is in a bucket, by its manifests.

use std::io::Write;

use clap::Args;
use kvarts_layout::NamespaceId;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::{Align, Failure, Table};
use serde::Serialize;

use super::{BucketArgs, Trouble, age, tell, verdict};
use crate::offline::{shown, write_json};

const NO_MANIFEST: &str = "has no manifest: its objects are unused, and kvarts cold gc deletes these objects";

/// The arguments of `cold ls`.
#[derive(Args, Debug)]
pub(super) struct LsArgs {
    #[command(flatten)]
    bucket: BucketArgs,
}

/// The arguments of `cold stat`.
#[derive(Args, Debug)]
pub(super) struct StatArgs {
    /// The namespace whose packs are shown
    #[arg(long, value_name = "ID")]
    namespace: NamespaceId,
    #[command(flatten)]
    bucket: BucketArgs,
}

#[derive(Serialize)]
struct Namespaces {
    namespaces: Vec<Namespace>,
    /// Namespaces whose manifest cannot be read, and why.
    problems: Vec<Trouble>,
}

#[derive(Serialize)]
struct Namespace {
    namespace: String,
    /// By the index of a pack; none where none can be read.
    model: Option<String>,
    /// Where it has none, its packs count as nothing and are to be collected.
    has_manifest: bool,
    packs: u64,
    blocks: u64,
    payload_bytes: u64,
    /// Of packs and indexes.
    stored_bytes: u64,
    /// Packs that wait for their deletion.
    condemned: u64,
    generation: u64,
    written_ms: u64,
}

#[derive(Serialize)]
struct Packs {
    namespace: String,
    packs: Vec<Pack>,
    condemned: Vec<Condemned>,
}

#[derive(Serialize)]
struct Pack {
    pack: String,
    artifacts: u32,
    blocks: u32,
    payload_bytes: u64,
    stored_bytes: u64,
    added_ms: u64,
    /// Zero for never.
    expires_ms: u64,
}

#[derive(Serialize)]
struct Condemned {
    pack: String,
    at_ms: u64,
}

/// Runs `cold ls`. Exit code 1 where a manifest cannot be read.
pub(super) fn list(arguments: &LsArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let bucket = arguments.bucket.open()?;
    let mut namespaces = Vec::new();
    let problems = bucket.each(&bucket.namespaces(None)?, |id| {
        let known = bucket.runtime.block_on(bucket.tier.read_manifest(id))?;
        let manifest = &known.manifest;
        let one = manifest.packs.keys().next();
        let index = one.and_then(|pack| bucket.runtime.block_on(bucket.tier.index(id, *pack)).ok());
        namespaces.push(Namespace {
            namespace: id.to_string(),
            model: index.map(|index| index.namespace().identity.model.clone()),
            has_manifest: known.tag.is_some(),
            packs: manifest.packs.len() as u64,
            blocks: manifest.packs.values().map(|pack| u64::from(pack.blocks)).sum(),
            payload_bytes: manifest.packs.values().map(|pack| pack.payload_bytes).sum(),
            stored_bytes: manifest.stored_bytes(),
            condemned: manifest.condemned.len() as u64,
            generation: manifest.generation,
            written_ms: manifest.written_ms,
        });
        Ok(())
    })?;
    let listed = Namespaces { namespaces, problems };
    if arguments.bucket.json {
        write_json(&listed, out)?
    } else {
        write_list(&listed, out)?
    }
    verdict(&listed.problems)
}

fn write_list(Namespaces { namespaces, problems }: &Namespaces, out: &mut dyn Write) -> Result<(), Failure> {
    if namespaces.is_empty() && problems.is_empty() {
        writeln!(out, "This bucket is empty.")?;
        return Ok(());
    }
    let columns = [
        ("model", Align::Left),
        ("namespace", Align::Left),
        ("packs", Align::Right),
        ("blocks", Align::Right),
        ("payload bytes", Align::Right),
        ("stored bytes", Align::Right),
        ("to be deleted", Align::Right),
        ("changed", Align::Right),
    ];
    let mut table = Table::new(&columns);
    for one in namespaces {
        table.row([
            one.model.as_ref().map_or("-".to_owned(), |model| shown(model)),
            one.namespace.clone(),
            grouped(one.packs),
            grouped(one.blocks),
            bytes(one.payload_bytes),
            bytes(one.stored_bytes),
            grouped(one.condemned),
            if one.has_manifest { age(one.written_ms) } else { "-".to_owned() },
        ]);
    }
    if !namespaces.is_empty() {
        write!(out, "{table}")?;
    }
    for one in namespaces.iter().filter(|one| !one.has_manifest) {
        writeln!(out, "namespace {} {NO_MANIFEST}", one.namespace)?;
    }
    tell(problems, out)
}

/// Runs `cold stat`.
pub(super) fn stat(arguments: &StatArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let bucket = arguments.bucket.open()?;
    let id = bucket.namespaces(Some(arguments.namespace))?.remove(0);
    let known = bucket.wait(bucket.tier.read_manifest(id))?;
    if known.tag.is_none() {
        return Err(Failure::User(format!("namespace {id} {NO_MANIFEST}")));
    }
    let pack = |(pack, entry): (&_, &kvarts_cold::format::PackEntry)| Pack {
        pack: kvarts_cold::format::PackId::to_string(pack),
        artifacts: entry.runs,
        blocks: entry.blocks,
        payload_bytes: entry.payload_bytes,
        stored_bytes: entry.stored_bytes(),
        added_ms: entry.added_ms,
        expires_ms: entry.expires_ms,
    };
    let mut packs: Vec<Pack> = known.manifest.packs.iter().map(pack).collect();
    packs.sort_by_key(|pack| pack.added_ms);
    let condemned = known.manifest.condemned.iter();
    let condemned =
        condemned.map(|(pack, at_ms)| Condemned { pack: pack.to_string(), at_ms: *at_ms }).collect();
    if arguments.bucket.json {
        return write_json(&Packs { namespace: id.to_string(), packs, condemned }, out);
    }
    let columns = [
        ("pack", Align::Left),
        ("artifacts", Align::Right),
        ("blocks", Align::Right),
        ("payload bytes", Align::Right),
        ("stored bytes", Align::Right),
        ("added", Align::Right),
    ];
    let mut table = Table::new(&columns);
    for pack in packs {
        table.row([
            pack.pack,
            grouped(pack.artifacts.into()),
            grouped(pack.blocks.into()),
            bytes(pack.payload_bytes),
            bytes(pack.stored_bytes),
            age(pack.added_ms),
        ]);
    }
    write!(out, "{table}")?;
    for one in condemned {
        writeln!(out, "{} waits for deletion since {}", one.pack, age(one.at_ms))?;
    }
    Ok(())
}
