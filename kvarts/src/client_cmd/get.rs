//! `kvarts get`: blocks of a running server into a file.
//!
//! A file that is there is not touched before the blocks that replace it are whole: they are written beside it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::beyond;
use super::missing;
use super::strangers;
use super::subject::Subject;
use super::{KeyArgs, ModelArgs, ServerArgs, memory, print, read};
use crate::files::{Partial, refuse_existing};
use kvarts_client::Via;
use kvarts_server::human::bytes;
use kvarts_terminal::Failure;

/// The arguments of `get`.
#[derive(Args, Debug)]
pub(crate) struct GetArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// Write the leading blocks that are stored to this file, or to standard output with `-`
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Replace an existing FILE, once at least one block is complete
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Where blocks go.
enum Sink<'a> {
    Standard(&'a mut dyn Write),
    /// A pipe or a device, which has no name to keep.
    Special(File),
    File(Partial),
}

impl<'a> Sink<'a> {
    fn open(to: &Path, force: bool, out: &'a mut dyn Write) -> Result<Self, Failure> {
        if to.as_os_str() == "-" {
            return Ok(Self::Standard(out));
        }
        if to.metadata().is_ok_and(|facts| !facts.is_file() && !facts.is_dir()) {
            let file = OpenOptions::new().write(true).open(to);
            return Ok(Self::Special(
                file.map_err(|error| Failure::User(format!("{}: {error}", to.display())))?,
            ));
        }
        if !force {
            refuse_existing(to, true)?;
        }
        Ok(Self::File(Partial::new(to)?))
    }

    fn write(&mut self, block: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Standard(out) => out.write_all(block),
            Self::Special(file) => file.write_all(block),
            Self::File(partial) => partial.file().write_all(block),
        }
    }
}

/// Runs `get`.
pub(crate) fn get(arguments: &GetArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let subject = Subject::described(&arguments.model, &arguments.keys)?;
    let client = arguments.server.connect(Via::Best)?;
    let subject = subject.registered(&client)?;
    let standard = arguments.to.as_os_str() == "-";
    let mut sink = Sink::open(&arguments.to, arguments.force, out)?;
    let (memory, batch) = memory(&client, &subject)?;
    let each = subject.shape.block_bytes() as usize;
    let (mut usable, mut why, mut block) = (0usize, None, vec![0; each]);
    for keys in subject.keys.chunks(batch) {
        let end = read(&client, &subject, keys, &memory)?;
        for at in 0..end.usable_blocks as usize {
            memory.copy_out(at * each, &mut block);
            let shown = arguments.to.display();
            sink.write(&block).map_err(|error| Failure::User(format!("{shown}: {error}")))?;
        }
        usable += end.usable_blocks as usize;
        if (end.usable_blocks as usize) < keys.len() {
            why = end.failures.first().map(|(_, reason)| reason.to_string());
            break;
        }
    }
    if let Sink::File(partial) = sink
        && usable > 0
    {
        partial.finish(arguments.force)?;
    }
    let all = subject.keys.len();
    if usable == 0 {
        why = strangers::meant(&client, &subject.identity).or(why);
    }
    let absent = missing::of(&client, &subject, subject.keys.get(usable..).unwrap_or_default());
    let elsewhere = if usable < all { beyond::of_cluster(&client, &subject) } else { None };
    let report = json!({
        "namespace": subject.namespace.to_string(), "blocks": all, "usable_blocks": usable,
        "bytes": usable * each, "why": why, "missing": missing::report(&absent), "path": client.path().name(),
    });
    let said: &mut dyn Write = if standard { &mut std::io::stderr() } else { out };
    if arguments.server.json {
        print(said, &report)?;
    } else {
        let because = why.map(|why| format!(": {why}")).unwrap_or_default();
        writeln!(said, "{usable} of {all} blocks, {}{because}", bytes((usable * each) as u64))?;
        // What this node says of blocks that others have would contradict them.
        match elsewhere.filter(|cluster| !cluster.holders.is_empty()) {
            Some(cluster) => beyond::show_cluster(&cluster, said)?,
            None => missing::show(&absent, said)?,
        }
    }
    if usable == all { Ok(()) } else { Err(Failure::Problems) }
}
