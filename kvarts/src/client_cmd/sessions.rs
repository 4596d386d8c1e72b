//! `kvarts session list`: the sessions that a tenant has on a running server.

use std::collections::BTreeMap;
use std::io::Write;

use clap::{Args, Subcommand};
use kvarts_layout::NamespaceId;
use serde_json::{Value, json};

use super::pins::span;
use super::{ServerArgs, name_of, print};
use kvarts_client::{Client, Via};
use kvarts_server::human::grouped;
use kvarts_terminal::{Align, Failure, Table};
use kvarts_wire::proto::ListSessionsRequest;
use kvarts_wire::proto::list_sessions_reply::Session;

/// The arguments of `session`.
#[derive(Args, Debug)]
pub(crate) struct SessionArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// List the sessions of the token's tenant, each with its blocks, the session it was forked from, and the end of its lease
    List(ListArgs),
}

#[derive(Args, Debug)]
struct ListArgs {
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `session`.
pub(crate) fn session(arguments: &SessionArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let What::List(ListArgs { server }) = &arguments.what;
    let client = server.connect(Via::Grpc)?;
    let sessions = all(&client)?;
    let mut names = BTreeMap::new();
    let mut model = |one: &Session| name_of(&client, &mut names, &namespace(one)).to_owned();
    if server.json {
        let sessions: Vec<Value> = sessions.iter().map(|one| listed(one, &model(one))).collect();
        return print(out, &json!({ "sessions": sessions }));
    }
    if sessions.is_empty() {
        return Ok(writeln!(out, "no sessions exist")?);
    }
    let columns = [
        ("SESSION", Align::Left),
        ("BLOCKS", Align::Right),
        ("LEASES", Align::Right),
        ("FORKS", Align::Right),
        ("ENDS IN", Align::Right),
        ("FORKED FROM", Align::Left),
        ("MODEL", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for one in &sessions {
        let left = span(one.left_ms);
        let left = if one.is_handed_over { format!("{left}, handed over") } else { left };
        let parent = match one.parent {
            0 => "-".to_owned(),
            parent => format!("{} blocks of {parent}", grouped(one.parent_blocks.into())),
        };
        let [blocks, leases, forks] = [one.blocks, one.leases, one.forks].map(|count| grouped(count.into()));
        table.row([one.session.to_string(), blocks, leases, forks, left, parent, model(one)]);
    }
    Ok(write!(out, "{table}")?)
}

/// All sessions, by number, as the server gives them piece by piece.
fn all(client: &Client) -> Result<Vec<Session>, Failure> {
    let mut found: Vec<Session> = Vec::new();
    loop {
        let after = found.last().map_or(0, |one| one.session);
        let reply = client.sessions(ListSessionsRequest { session: 0, after }).map_err(Failure::user)?;
        let more = reply.more && reply.sessions.last().is_some_and(|one| one.session > after);
        found.extend(reply.sessions);
        if !more {
            return Ok(found);
        }
    }
}

fn namespace(one: &Session) -> String {
    <[u8; 32]>::try_from(&one.namespace[..]).map(|id| NamespaceId(id).to_string()).unwrap_or_default()
}

fn listed(one: &Session, model: &str) -> Value {
    let tip: String = one.tip.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "session": one.session, "namespace": namespace(one), "model": model, "blocks": one.blocks, "tip": tip,
        "parent": (one.parent != 0).then_some(one.parent),
        "parent_blocks": (one.parent != 0).then_some(one.parent_blocks),
        "forks": one.forks, "leases": one.leases, "ends_in_ms": one.left_ms, "is_handed_over": one.is_handed_over,
    })
}
