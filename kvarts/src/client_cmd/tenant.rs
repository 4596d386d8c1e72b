//! `kvarts tenant`: what tenants of a running server have stored goes with them. Needs the right to administer.

use std::io::Write;

use clap::{Args, Subcommand};
use serde_json::json;

use super::sure::Sure;
use super::{ServerArgs, print};
use kvarts_client::Via;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_wire::proto;

/// The arguments of `tenant`.
#[derive(Args, Debug)]
pub(crate) struct TenantArgs {
    #[command(subcommand)]
    command: TenantCommand,
}

#[derive(Subcommand, Debug)]
enum TenantCommand {
    /// Delete all blocks of a tenant, even if the tenant was removed from the configuration
    Purge(PurgeArgs),
}

/// The arguments of `tenant purge`.
#[derive(Args, Debug)]
struct PurgeArgs {
    /// The name of the tenant in the present or a former configuration
    #[arg(required_unless_present_any = ["salt", "unsalted"])]
    name: Option<String>,
    /// Instead of a name: the salt of a tenant that was removed from the configuration
    #[arg(long, conflicts_with_all = ["name", "unsalted"])]
    salt: Option<String>,
    /// Instead of a name: the blocks that were stored without tokens
    #[arg(long, conflicts_with = "name")]
    unsalted: bool,
    /// Only print what would be deleted
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    sure: Sure,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `tenant`.
pub(crate) fn tenant(arguments: &TenantArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.command {
        TenantCommand::Purge(arguments) => purge(arguments, out),
    }
}

/// Exit code 1 where nothing of it was there: a name may be misspelt.
fn purge(arguments: &PurgeArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let request = proto::PurgeTenantRequest {
        name: arguments.name.clone().unwrap_or_default(),
        salt: arguments.salt.clone().unwrap_or_default().into_bytes().into(),
        unsalted: arguments.unsalted,
        dry_run: true,
    };
    let whose = match (&arguments.name, arguments.unsalted) {
        (Some(name), _) => format!("tenant {}", name.escape_debug()),
        (None, true) => "no tenant (stored while no tokens were required)".to_owned(),
        (None, false) => "the tenant with the given salt".to_owned(),
    };
    let there = client.purge_tenant(request.clone()).map_err(Failure::user)?;
    let (blocks, size) = (grouped(there.blocks), bytes(there.bytes));
    let is_done = there.namespaces > 0 && !arguments.dry_run;
    let gone = if is_done {
        arguments.sure.ask(&format!(
            "all {blocks} blocks ({size}) of {whose} will be deleted, also pinned blocks; the delete \
            cannot be undone"
        ))?;
        client.purge_tenant(proto::PurgeTenantRequest { dry_run: false, ..request }).map_err(Failure::user)?
    } else {
        there
    };
    if arguments.server.json {
        let report = json!({
            "namespaces": gone.namespaces, "blocks": gone.blocks, "bytes": gone.bytes, "deleted": is_done,
            "away": gone.away,
        });
        print(out, &report)?;
    } else if gone.namespaces == 0 {
        writeln!(out, "the store has no blocks of {whose}")?;
    } else {
        let (models, blocks, size) = (grouped(gone.namespaces), grouped(gone.blocks), bytes(gone.bytes));
        let what = if is_done { "deleted" } else { "would be deleted" };
        writeln!(out, "{blocks} blocks ({size}) in {models} namespaces {what}")?;
        for one in &gone.away {
            writeln!(out, "not yet deleted on the node at {one}")?;
        }
    }
    if gone.namespaces > 0 { Ok(()) } else { Err(Failure::Problems) }
}
