//! `kvarts ls`: the artifacts of a store as trees of prefixes, by namespace.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use kvarts_fsck::tree::{Branch, Stem, Tree, trees};
use kvarts_fsck::window::Tally;
use kvarts_layout::NamespaceId;
use serde::Serialize;

use super::{Place, shown, warn_of_problems, write_json};
use crate::client_cmd::{self, ServerArgs};
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;

/// The arguments of `ls`.
#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    /// A directory of a store to read offline; without a directory, the command calls a running server
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Further directories of the store
    #[arg(long = "dir", value_name = "DIR", requires = "directory")]
    more: Vec<PathBuf>,
    /// Read a store in use; blocks written during the command may be missing
    #[arg(long, requires = "directory")]
    live: bool,
    /// List only the blocks of this namespace
    #[arg(long, value_name = "ID")]
    namespace: Option<NamespaceId>,
    /// Largest number of branches to show for each namespace
    #[arg(long, default_value_t = 40)]
    limit: usize,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Serialize)]
struct Listing {
    store: String,
    problems: u64,
    namespaces: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    namespace: String,
    model: String,
    block_tokens: u32,
    artifacts: u64,
    blocks: u64,
    bytes: u64,
    branches: Vec<Branch>,
    branches_left_out: u64,
}

/// Runs the command.
pub(crate) fn run(arguments: &LsArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let Some(directory) = arguments.directory.clone() else {
        return client_cmd::list(&arguments.server, out);
    };
    if arguments.server.server.is_some() {
        return Err(Failure::user(
            "DIR and the options for a server cannot be combined. With DIR, this program reads the files \
            itself; without DIR, it sends the request to a server",
        ));
    }
    let place = Place { directory, more: arguments.more.clone(), live: arguments.live };
    let (store, contents) = place.read("ls", &Tally::default())?;
    let trees = trees(&contents, arguments.namespace, arguments.limit);
    if let (Some(namespace), true) = (arguments.namespace, trees.is_empty()) {
        return Err(Failure::User(format!("the store contains no block of namespace {namespace}")));
    }
    if arguments.server.json {
        let listing = Listing {
            store: store.keyring.store.to_string(),
            problems: contents.findings.problem_count,
            namespaces: trees.into_iter().map(listed).collect(),
        };
        return write_json(&listing, out);
    }
    if trees.is_empty() {
        writeln!(out, "No block is stored here.")?;
    }
    for tree in &trees {
        write_tree(tree, out)?;
    }
    warn_of_problems(&contents, out)
}

fn listed(tree: Tree) -> Listed {
    Listed {
        namespace: tree.namespace.id.to_string(),
        model: tree.namespace.model.clone(),
        block_tokens: tree.namespace.block_tokens,
        artifacts: tree.artifacts,
        blocks: tree.blocks,
        bytes: tree.bytes,
        branches: tree.branches,
        branches_left_out: tree.left_out,
    }
}

fn write_tree(tree: &Tree, out: &mut dyn Write) -> Result<(), Failure> {
    let namespace = &tree.namespace;
    writeln!(
        out,
        "{}  namespace {}  {} blocks of {} tokens in {} artifacts, {}",
        shown(&namespace.model),
        namespace.id,
        grouped(tree.blocks),
        namespace.block_tokens,
        grouped(tree.artifacts),
        bytes(tree.bytes)
    )?;
    for branch in &tree.branches {
        writeln!(out, "{}", line(branch, namespace.block_tokens))?;
    }
    if tree.left_out > 0 {
        writeln!(out, "  ... and {} more branches: raise --limit to print them", grouped(tree.left_out))?;
    }
    Ok(())
}

/// One branch: where it begins, how far it goes, what it costs.
fn line(branch: &Branch, block_tokens: u32) -> String {
    let indent = "  ".repeat((branch.depth as usize).min(20).saturating_add(1));
    let first = branch.first.to_string();
    let first = first.get(..16).unwrap_or_default();
    let from = match (branch.stem, branch.first_block) {
        (Stem::Unknown, _) => format!("pages without parents, the first {first}"),
        (Stem::Absent, _) => format!("{first} (its parent is not in this store)"),
        (_, Some(at)) => format!("{first} from token {}", u64::from(at).saturating_mul(block_tokens.into())),
        (_, None) => first.to_owned(),
    };
    let copies = if branch.blocks == branch.keys {
        String::new()
    } else {
        format!(" in {} blocks", grouped(branch.blocks))
    };
    let tokens = branch.keys.saturating_mul(block_tokens.into());
    let forks = if branch.forks > 0 { format!(", forks into {}", branch.forks) } else { String::new() };
    format!("{indent}{from}: {} tokens{copies}, {}{forks}", grouped(tokens), bytes(branch.bytes))
}
