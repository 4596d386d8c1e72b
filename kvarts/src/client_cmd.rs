//! `kvarts put`, `get`, `match`, `ls`, `stat`, `cluster`, `resume`, `delete`, `pin`, `session`, `watch`, and what administrators do: a running server from the command line.
//!
//! A server is named by `--server`, by `$KVARTS_SERVER`, or is the one that `kvarts serve` runs here. Blocks are named by
//! the model that they are of and either the tokens of a prompt or keys; their bytes stand in files one block after the
//! other, each in canonical form: `[layer][part]`.
//!
//! Exit code 1 means that the server answered and something that was asked for is not there, or was not done.
#![allow(clippy::disallowed_methods, reason = "commands run by a user: the files belong to that user")]

mod admin;
mod beyond;
mod cluster;
mod compact;
mod get;
mod missing;
mod pins;
mod planned;
mod put;
mod sessions;
mod stat;
mod strangers;
pub(crate) mod subject;
mod sure;
mod tenant;

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use clap::Args;
use kvarts_contract::api::{
    DeleteOutcome, DeleteRequest, KvStore, MatchReply, MatchRequest, Missing, Order, Placed, ReadEnd,
    ReadRequest, Target, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_layout::{BlockKey, NamespaceId};
use serde_json::json;

pub(crate) use admin::{BudgetArgs, DrainArgs, budget, checkpoint, drain, reload, scrub};
pub(crate) use cluster::{ClusterArgs, cluster};
pub(crate) use compact::compact;
pub(crate) use get::{GetArgs, get};
use kvarts_client::{Beyond, Client, Via};
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_wire::proto;
use kvarts_wire::proto::match_reply::InCluster;
pub(crate) use pins::{PinArgs, pin};
pub(crate) use put::{PutArgs, put};
pub(crate) use sessions::{SessionArgs, session};
pub(crate) use stat::{AdminArgs, resume, stat};
use strangers::Standing;
use subject::Subject;
pub(crate) use subject::{KeyArgs, ModelArgs, ServerArgs};
use sure::Sure;
pub(crate) use tenant::{TenantArgs, tenant};

/// Bytes of blocks that are put or read at once.
const BATCH_BYTES: u64 = 64 << 20;

/// The arguments of `match`.
#[derive(Args, Debug)]
pub(crate) struct MatchArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    keys: KeyArgs,
    #[command(flatten)]
    plan: planned::PlanArgs,
    #[command(flatten)]
    server: ServerArgs,
}

/// The arguments of `delete`.
#[derive(Args, Debug)]
pub(crate) struct DeleteArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// All blocks of the model
    #[arg(long, conflicts_with_all = ["tokens", "keys"])]
    all: bool,
    /// Fail if a node of the cluster is unreachable and has not received the delete
    #[arg(long)]
    everywhere: bool,
    #[command(flatten)]
    sure: Sure,
    #[command(flatten)]
    server: ServerArgs,
}

/// The arguments of `watch`.
#[derive(Args, Debug)]
pub(crate) struct WatchArgs {
    /// Stop after this number of events [default: never]
    #[arg(long)]
    count: Option<u64>,
    /// First list the stored blocks, then print events; after a gap list the blocks again
    #[arg(long)]
    snapshot: bool,
    #[command(flatten)]
    server: ServerArgs,
}

fn print(out: &mut dyn Write, value: &serde_json::Value) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(std::io::Error::from)?;
    Ok(writeln!(out)?)
}

/// Memory for a batch of blocks, and how many go into it.
fn memory(client: &Client, subject: &Subject) -> Result<(SharedBuf, usize), Failure> {
    let each = subject.shape.block_bytes();
    let blocks = (BATCH_BYTES / each).clamp(1, subject.keys.len().max(1) as u64);
    let len = usize::try_from(blocks * each).map_err(Failure::user)?;
    let region = client.pool(len).map_err(Failure::user)?;
    let buf = SharedBuf::new(&region, 0, len)
        .ok_or_else(|| Failure::user("the memory for the blocks could not be allocated"))?;
    Ok((buf, blocks as usize))
}

fn placed(subject: &Subject, memory: &SharedBuf, blocks: usize) -> Result<Placed, Failure> {
    let pages = memory.slice(0, subject.shape.block_bytes() as usize * blocks);
    let pages = pages.ok_or_else(|| Failure::user("the memory for the blocks could not be allocated"))?;
    Placed::blocks(&subject.shape, pages, blocks as u32).map_err(Failure::user)
}

/// Reads blocks into memory.
fn read(
    client: &Client,
    subject: &Subject,
    keys: &[BlockKey],
    memory: &SharedBuf,
) -> Result<ReadEnd, Failure> {
    let request = ReadRequest {
        namespace: subject.namespace,
        group: subject.group,
        coordinate: subject.coordinate,
        keys: keys.to_vec(),
        layers: None,
        order: Order::Blocks,
        into: placed(subject, memory, keys.len())?,
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    };
    block_on(client.get_into(request)).map_err(Failure::user)
}

/// Runs `match`. Exit code 1 where fewer blocks than were asked for can be restored, from wherever they are: as of a `get` of them.
pub(crate) fn matching(arguments: &MatchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    // What is wrong with the arguments is told also where no server is.
    let subject = Subject::described(&arguments.model, &arguments.keys)?;
    let client = arguments.server.connect(Via::Best)?;
    let times = arguments.plan.times(&arguments.model)?;
    if times.is_none()
        && let Standing::Unknown(meant) = strangers::standing(&client, &subject.identity)?
    {
        count_stranger(&client, &subject);
        return nothing_of_it(&subject, meant.as_deref(), arguments.server.json, out);
    }
    let subject = subject.registered(&client)?;
    let asked = subject.keys.len();
    let request = MatchRequest {
        namespace: subject.namespace,
        keys: &subject.keys,
        requirements: &subject.requirements,
        recompute_tokens_max: u64::MAX,
        lease: None,
        plan: times.as_ref().map(|times| arguments.plan.terms(&subject, times)),
    };
    let Beyond { own: found, in_cluster, in_cold } = client.match_beyond(&request).map_err(Failure::user)?;
    let (longest, cheapest) = (&found.usable.longest, &found.usable.cheapest);
    let restorable = beyond::restorable(&found, in_cluster.as_ref(), in_cold.as_ref());
    let verdict = move || if restorable as usize >= asked { Ok(()) } else { Err(Failure::Problems) };
    // An identity with a typo is known as soon as an engine has registered it.
    let meant = || if longest.blocks == 0 { strangers::meant(&client, &subject.identity) } else { None };
    if arguments.server.json {
        let boundary = |one: &kvarts_layout::prefix::Boundary| json!({"blocks": one.blocks, "tokens": one.tokens, "recompute_tokens": one.recompute_tokens});
        let mut report = json!({
            "namespace": subject.namespace.to_string(), "asked_blocks": asked,
            "longest": boundary(longest), "cheapest": boundary(cheapest), "pending": found.pending,
            "missing": missing::report(&found.missing),
        });
        if let (Some(planned), Some(report)) = (&found.plan, report.as_object_mut()) {
            report.insert("plan".to_owned(), planned::report(planned));
        }
        if let (Some(cluster), Some(report)) = (&in_cluster, report.as_object_mut()) {
            report.insert("cluster".to_owned(), beyond::cluster_report(cluster));
        }
        if let (Some(cold), Some(report)) = (&in_cold, report.as_object_mut()) {
            report.insert("cold".to_owned(), beyond::cold_report(cold));
        }
        if let (Some(meant), Some(report)) = (meant(), report.as_object_mut()) {
            report.insert("why".to_owned(), meant.into());
        }
        print(out, &report)?;
        return verdict();
    }
    show_found(&found, in_cluster.as_ref(), (asked, meant()), out)?;
    if let Some(cold) = &in_cold {
        beyond::show_cold(cold, out)?;
    }
    match &found.plan {
        Some(planned) => planned::show(planned, out)?,
        None if times.is_some() => {
            return Err(Failure::user(
                "this server is older than this program and cannot make plans: update the server",
            ));
        }
        None => {}
    }
    verdict()
}

/// How much of a prefix of `asked` blocks can be restored, from where, and why the rest cannot. `meant`: which other identity probably was.
fn show_found(
    found: &MatchReply,
    cluster: Option<&InCluster>,
    (asked, meant): (usize, Option<String>),
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let longest = &found.usable.longest;
    let pending = if found.pending > 0 {
        format!(", {} more blocks are being put", found.pending)
    } else {
        String::new()
    };
    let here = longest.blocks;
    let together = beyond::together(cluster, longest);
    let elsewhere = together.blocks - here;
    let parts = if elsewhere > 0 {
        format!(": {here} on this server, {elsewhere} on other nodes")
    } else {
        String::new()
    };
    writeln!(
        out,
        "{} of {asked} blocks ({} tokens) can be restored{parts}{pending}",
        together.blocks,
        grouped(together.tokens)
    )?;
    if together.recompute_tokens > 0 {
        writeln!(out, "  {} of these tokens must be computed again", grouped(together.recompute_tokens))?;
    }
    if let Some(cluster) = cluster {
        beyond::show_cluster(cluster, out)?;
    }
    // What other nodes have is not missing.
    if elsewhere == 0 {
        missing::show(&found.missing, out)?;
    }
    if let Some(meant) = meant.filter(|_| elsewhere == 0) {
        writeln!(out, "  {meant}")?;
    }
    Ok(())
}

/// Asks for a prefix of an identity that nothing is stored of: the server then counts the miss, and registers nothing.
fn count_stranger(client: &Client, subject: &Subject) {
    let Ok(namespace) = subject.identity.namespace_id() else { return };
    let request = MatchRequest {
        namespace,
        keys: &subject.keys,
        requirements: &subject.requirements,
        recompute_tokens_max: u64::MAX,
        lease: None,
        plan: None,
    };
    // It is known what it answers: no such model.
    let _ = client.match_prefix(&request);
}

/// The answer of a match whose identity nothing is stored of: a miss.
fn nothing_of_it(
    subject: &Subject,
    meant: Option<&str>,
    as_json: bool,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let asked = subject.keys.len();
    if as_json {
        let none = json!({"blocks": 0, "tokens": 0, "recompute_tokens": 0});
        let report = json!({
            "namespace": null, "asked_blocks": asked, "longest": none, "cheapest": none, "pending": 0, "why": meant,
            "missing": missing::report(&Missing { never_stored: asked as u64, ..Missing::default() }),
        });
        print(out, &report)?;
        return Err(Failure::Problems);
    }
    writeln!(
        out,
        "0 of {asked} blocks (0 tokens) can be restored: this server has no blocks of this identity"
    )?;
    if let Some(meant) = meant {
        writeln!(out, "  {meant}")?;
    }
    Err(Failure::Problems)
}

/// Runs `ls` of a server.
pub(crate) fn list(server: &ServerArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = server.connect(Via::Grpc)?;
    let reply = client.models().map_err(Failure::user)?;
    if server.json {
        let models: Vec<_> = reply.models.iter().map(|model| listed(model, reply.of_store)).collect();
        return print(out, &json!({"models": models, "more": reply.more}));
    }
    if reply.models.is_empty() {
        writeln!(out, "No model is stored, and none was registered since the server started.")?;
    }
    for model in &reply.models {
        let identity = model.identity.clone().unwrap_or_default();
        let stored = match reply.of_store {
            true => {
                let blocks =
                    model.live_blocks.map_or(String::new(), |blocks| format!("{} blocks, ", grouped(blocks)));
                format!(": {blocks}{}, {}", bytes(model.live_bytes), used(model.last_used_ms))
            }
            false => String::new(),
        };
        writeln!(
            out,
            "{} {}, {} layers, blocks of {} tokens{stored}",
            identity.model, identity.revision, model.layers, identity.block_tokens
        )?;
        writeln!(out, "  namespace {}", namespace_of(model))?;
        writeln!(out, "  {}", said_of(&identity))?;
    }
    if reply.more {
        writeln!(out, "More models exist; the list shows the models with the most bytes.")?;
    }
    Ok(())
}

fn namespace_of(model: &proto::list_models_reply::Model) -> String {
    <[u8; 32]>::try_from(&model.namespace[..]).map(|id| NamespaceId(id).to_string()).unwrap_or_default()
}

fn listed(model: &proto::list_models_reply::Model, of_store: bool) -> serde_json::Value {
    let identity = model.identity.clone().unwrap_or_default();
    json!({
        "namespace": namespace_of(model), "model": identity.model, "revision": identity.revision,
        "kv_dtype": identity.kv_dtype, "block_tokens": identity.block_tokens, "layers": model.layers,
        "tokenizer": identity.tokenizer, "adapter": identity.adapter, "rope": identity.rope,
        "window": identity.window, "quantisation": [identity.quantisation_recipe, identity.quantisation_scales],
        "arrangement": [identity.arrangement_engine, identity.arrangement_layout, identity.arrangement_version],
        "extras": identity.extras, "registered": model.registered,
        "live_bytes": of_store.then_some(model.live_bytes), "live_blocks": model.live_blocks,
        "last_used_ms": (model.last_used_ms > 0).then_some(model.last_used_ms),
    })
}

/// How long ago a model was used.
fn used(at_ms: u64) -> String {
    if at_ms == 0 {
        return "not used since the server started".to_owned();
    }
    let now = crate::offline::now_ms();
    let seconds = now.saturating_sub(at_ms) / 1000;
    match seconds {
        0..120 => format!("used {seconds} s ago"),
        120..7200 => format!("used {} min ago", seconds / 60),
        _ => format!("used {} h ago", seconds / 3600),
    }
}

/// What tells models of one name apart: every field that says something.
fn said_of(identity: &proto::Identity) -> String {
    let arrangement =
        [&identity.arrangement_engine, &identity.arrangement_layout, &identity.arrangement_version];
    let mut said = vec![identity.kv_dtype.clone(), arrangement.map(String::as_str).join(" ")];
    let named = [
        ("tokenizer", &identity.tokenizer),
        ("adapter", &identity.adapter),
        ("quantisation", &identity.quantisation_recipe),
        ("scales", &identity.quantisation_scales),
        ("rope", &identity.rope),
        ("window", &identity.window),
    ];
    let extras = identity.extras.iter().map(|(name, value)| (name.as_str(), value));
    let all = named.into_iter().filter(|(_, value)| value.as_str() != "none").chain(extras);
    said.extend(all.map(|(name, value)| format!("{name} {value}")));
    said.join(", ")
}

/// Runs `delete`.
pub(crate) fn delete(arguments: &DeleteArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let subject = match arguments.all {
        true => Subject::without_keys(&client, &arguments.model)?,
        false => Subject::new(&client, &arguments.model, &arguments.keys)?,
    };
    let target = match arguments.all {
        true => {
            arguments.sure.ask(
                "all blocks of this identity will be deleted, also pinned blocks; the delete cannot be \
                undone",
            )?;
            Target::Namespace
        }
        false => {
            let column = Some((subject.group, subject.coordinate));
            Target::Keys { column, keys: subject.keys.clone() }
        }
    };
    let request = DeleteRequest { namespace: subject.namespace, target, deadline: None };
    let deleting = client.delete_everywhere(request, arguments.everywhere);
    let (reply, away) = block_on(deleting).map_err(Failure::user)?.map_err(Failure::user)?;
    let refused = reply.outcomes.iter().filter(|one| matches!(one, DeleteOutcome::Refused(_))).count();
    if arguments.server.json {
        let report = json!({
            "namespace": subject.namespace.to_string(), "deleted_blocks": reply.blocks, "refused": refused,
            "away": away.iter().map(|one| json!({ "address": one.address, "trouble": one.trouble })).collect::<Vec<_>>(),
        });
        print(out, &report)?;
    } else {
        writeln!(out, "{} blocks deleted", grouped(reply.blocks))?;
        for one in &away {
            writeln!(out, "not yet deleted on the node at {}: {}", one.address, one.trouble)?;
        }
    }
    if refused == 0 { Ok(()) } else { Err(Failure::Problems) }
}

/// Runs `watch`.
pub(crate) fn watch(arguments: &WatchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let request = proto::WatchRequest { snapshot: arguments.snapshot, ..proto::WatchRequest::default() };
    let mut events = client.watch(request).map_err(Failure::user)?;
    if !arguments.server.json {
        writeln!(out, "TIME UTC  EVENT        REASON     MODEL                 KEY")?;
        out.flush()?;
    }
    let mut names = BTreeMap::new();
    let mut left = arguments.count.unwrap_or(u64::MAX);
    while left > 0 {
        let Some(event) = block_on(events.message()).map_err(Failure::user)? else { break };
        left -= 1;
        let line = told(&event);
        if arguments.server.json {
            writeln!(out, "{line}")?;
        } else {
            let word = |name: &str| line.get(name).and_then(serde_json::Value::as_str).unwrap_or_default();
            let model = name_of(&client, &mut names, word("namespace"));
            let of_day = Duration::from_millis(event.unix_ms % (24 * 3600 * 1000)).as_secs();
            let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
            let (what, key) = (word("event"), word("key").get(..16).unwrap_or("all blocks"));
            let time = format!("{hour:02}:{minute:02}:{second:02}");
            writeln!(out, "{time}  {what:<11}  {:<9}  {model:<20.20}  {key}", word("reason"))?;
        }
        out.flush()?;
    }
    Ok(())
}

/// The name of the model of a namespace; the beginning of the namespace where the server knows none.
fn name_of<'a>(client: &Client, names: &'a mut BTreeMap<String, String>, namespace: &str) -> &'a str {
    if !names.contains_key(namespace) {
        // Events go on whatever this says.
        let models = client.models().map(|reply| reply.models).unwrap_or_default();
        let named = |model: &proto::list_models_reply::Model| {
            let name = model.identity.as_ref().map(|identity| identity.model.escape_debug().to_string());
            Some((namespace_of(model), name?))
        };
        names.extend(models.iter().filter_map(named));
    }
    let begin = || namespace.get(..8).unwrap_or_default().to_owned();
    names.entry(namespace.to_owned()).or_insert_with(begin)
}

/// An event in the words of recorded events (docs/EVENTS.md): what does not apply is left out.
fn told(event: &proto::Event) -> serde_json::Value {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    let mut line = serde_json::Map::new();
    line.insert("event".to_owned(), event.what().as_str_name().to_lowercase().into());
    let texts =
        [("reason", event.cause.clone()), ("namespace", hex(&event.namespace)), ("key", hex(&event.key))];
    for (name, text) in texts {
        if !text.is_empty() {
            line.insert(name.to_owned(), text.into());
        }
    }
    if event.unix_ms > 0 {
        line.insert("at_ms".to_owned(), event.unix_ms.into());
    }
    if let (false, Some(column)) = (event.key.is_empty(), &event.column) {
        line.insert("group".to_owned(), column.group.into());
        if let Ok((_, coordinate)) = kvarts_wire::convert::column(Some(column)) {
            line.insert("coordinate".to_owned(), coordinate.to_string().into());
        }
    }
    line.into()
}

/// Keys as text, one a line, for `--keys`.
pub(crate) fn keys_of(text: &str) -> Result<Vec<BlockKey>, String> {
    let line = |(at, line): (usize, &str)| {
        line.trim().parse::<BlockKey>().map_err(|error| format!("line {}: {error}", at + 1))
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line).collect()
}
