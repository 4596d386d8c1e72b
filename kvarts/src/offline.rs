//! Commands that read a store's files without its engine: `inspect`, `ls`, `export`; and `import`, which opens it.
#![allow(clippy::disallowed_methods, reason = "offline commands on real files and the real clock")]

pub(crate) mod export_cmd;
pub(crate) mod frames;
pub(crate) mod import_cmd;
pub(crate) mod inspect_cmd;
pub(crate) mod ls_cmd;
mod map;

use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use kvarts_fsck::check::Options;
use kvarts_fsck::contents::{self, Contents};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::needs::Task;
use kvarts_fsck::remedy::missing_directories;
use kvarts_fsck::store::{Store, survey};
use kvarts_fsck::window::Tally;

use crate::fsck_cmd;
use crate::needs;
use kvarts_terminal::Failure;

/// Which store, and whether it may be in use.
#[derive(Args, Debug)]
pub(crate) struct Place {
    /// A directory of the store
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Further directories of the store
    #[arg(long = "dir", value_name = "DIR")]
    more: Vec<PathBuf>,
    /// Read a store in use; blocks written during the command may be missing
    #[arg(long)]
    live: bool,
}

impl Place {
    /// A store in these directories. With `live` it is read while it is in use.
    pub(crate) fn of(directories: &[PathBuf], live: bool) -> Option<Self> {
        let (directory, more) = directories.split_first()?;
        Some(Self { directory: directory.clone(), more: more.to_vec(), live })
    }

    fn directories(&self) -> Vec<PathBuf> {
        let mut all = vec![self.directory.clone()];
        all.extend(self.more.iter().cloned());
        all
    }

    /// Finds out what the store has, from its metadata. `command` is told what that takes.
    pub(crate) fn read(&self, command: &str, tally: &Tally) -> Result<(Store, Contents), Failure> {
        let (store, options, found) = self.open()?;
        needs::tell((command, Task::List), &store, &options)?;
        let contents = contents::read(&store, &options, now_ms(), tally, found);
        Ok((store, contents))
    }

    /// The store, how it is read, and what is wrong with it already.
    fn open(&self) -> Result<(Store, Options, Findings), Failure> {
        let disks = fsck_cmd::open(&self.directories(), self.live)?;
        let mut found = Findings::default();
        let shown = self.directory.display();
        let Some(store) = survey(&disks, &mut found).map_err(fsck_cmd::cannot_run)? else {
            return Err(Failure::User(format!("the store in {shown} is unfinished and empty")));
        };
        let options =
            Options { threads: kvarts_fsck::check::default_threads(), live: self.live, ..Options::default() };
        Ok((store, options, found))
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

pub(crate) fn write_json(value: &impl serde::Serialize, out: &mut dyn Write) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(std::io::Error::from)?;
    Ok(writeln!(out)?)
}

/// What a reader of metadata says where it met problems: it shows what is sound, and a check says the rest.
fn warn_of_problems(contents: &Contents, out: &mut dyn Write) -> Result<(), Failure> {
    let problems = contents.findings.problem_count;
    if problems > 0 {
        writeln!(out, "{problems} problems found; the affected blocks are not shown. Run kvarts fsck.")?;
    }
    if let Some(what) = missing_directories(&contents.findings) {
        writeln!(out, "The store is incomplete: {what} (--dir).")?;
    }
    if contents.may_have_forgotten_deletes() {
        writeln!(out, "A checkpoint cannot be read: deleted blocks may be shown. Run kvarts fsck.")?;
    }
    if contents.undefined > 0 {
        writeln!(
            out,
            "{} records have a namespace without a definition. Run kvarts fsck.",
            contents.undefined
        )?;
    }
    Ok(())
}

/// Text from disk without what would move a terminal's cursor.
pub(crate) fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
