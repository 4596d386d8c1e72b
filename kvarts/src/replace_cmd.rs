//! `kvarts replace`: empty directories take the place of those of a store that are lost for good. Offline.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions};
use serde_json::json;

use crate::serve_cmd::ServeArgs;
use kvarts_server::human::grouped;
use kvarts_terminal::Failure;

/// Nothing has to go while the store is open.
const BUDGET: u64 = 1 << 50;

/// The arguments of `replace`.
#[derive(Args, Debug)]
pub(crate) struct ReplaceArgs {
    /// The empty directories, one for each lost directory; --dir or the configuration must name all of them
    #[arg(required = true, value_name = "DIR")]
    empty: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    serve: Box<ServeArgs>,
}

/// Makes the directories parts of the store.
pub(crate) fn run(arguments: &ReplaceArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let config = arguments.serve.resolve()?;
    for directory in &arguments.empty {
        kvarts_store::home::make(directory)
            .map_err(|error| Failure::User(format!("{}: {error}", directory.display())))?;
    }
    let home = Home::open(&HomeOptions {
        directories: config.directories.clone(),
        io: config.io,
        features: config.io_disable.clone(),
        runtime: config.runtime,
        replace: arguments.empty.clone(),
        store: Options {
            budget_bytes: BUDGET,
            budget_beyond_disk: true,
            executors: config.executors,
            ..Options::default()
        },
        ..HomeOptions::default()
    });
    let home = home.map_err(Failure::user)?;
    let blocks: u64 = home.store().recovery().iter().map(|report| report.blocks).sum();
    home.close().map_err(Failure::user)?;
    if arguments.json {
        let replaced: Vec<String> = arguments.empty.iter().map(|path| path.display().to_string()).collect();
        writeln!(out, "{}", json!({ "replaced": replaced, "blocks": blocks }))?;
        return Ok(());
    }
    for directory in &arguments.empty {
        writeln!(out, "{} is now part of the store and contains no blocks", directory.display())?;
    }
    writeln!(out, "{} blocks of the other directories remain", grouped(blocks))?;
    Ok(())
}
