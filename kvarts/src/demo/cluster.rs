//! `kvarts demo --cluster`: three nodes on one machine. A prefix is stored on one and read on another; copies add their disks
//! up; a node is killed in the middle of a read; a chain gets another owner.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvarts_client::Client;
use kvarts_server::human::bytes;
use kvarts_terminal::Failure;
use kvarts_wire::{convert, proto};
use proto::chain_reply::What;
use proto::chain_request::Ask;
use serde::Serialize;

use super::ground::{Ground, Prefix, Server};
use super::{DemoArgs, Read, read_back, store};

/// The nodes of the demonstration.
const NAMES: [&str; 3] = ["A", "B", "C"];
/// Where nodes serve each other.
const PORT: u16 = 7400;
/// How long the directory may take to hear of a block.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often it is looked from where a read's bytes come.
const LOOK_EVERY: Duration = Duration::from_millis(3);
/// How long the first owner's lease is.
const LEASE_MS: u64 = 3000;
/// Characters of the timeline.
const WIDTH: usize = 56;

/// One read, and from where its bytes came.
#[derive(Serialize, Debug)]
struct Leg {
    what: &'static str,
    seconds: f64,
    first_layer_seconds: f64,
    bytes_differing: u64,
    /// Bytes that came from each node.
    from: [u64; 3],
    /// At which second how many bytes of the read had come from each node.
    timeline: Vec<(f64, [u64; 3])>,
}

/// What happened.
#[derive(Serialize, Debug)]
struct Story {
    model: String,
    prefix_bytes: u64,
    prefix_blocks: usize,
    copied_to_b: u32,
    copied_to_c: u32,
    reads: Vec<Leg>,
    first_owner_token: (u64, u64),
    while_it_is_leased: &'static str,
    next_owner_token: (u64, u64),
    owner_seconds: f64,
    seconds: f64,
}

impl Story {
    fn holds(&self) -> bool {
        let right = self.reads.iter().all(|read| read.bytes_differing == 0);
        right && self.reads.len() == 3 && self.next_owner_token > self.first_owner_token
    }
}

/// Runs the demonstration.
pub(super) fn run(arguments: &DemoArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let start = Instant::now();
    let ground = Ground::new(arguments.dir.as_deref(), &arguments.model, arguments.tokens)?;
    let [a, b, c] = cluster(&ground)?;
    let [on_a, on_b, on_c] = [&a, &b, &c].map(|server| Prefix::new(&ground, server));
    let (on_a, on_b, on_c) = (on_a?, on_b?, on_c?);
    let mut reads = Vec::new();
    store(&on_a)?;
    until_known(&on_b, 1)?;
    reads.push(read("everything from A", &on_b)?);
    let (chain, first) = claim_one(&on_a)?;
    let keys = &ground.keys;
    let half = keys.get(..keys.len() / 2).unwrap_or_default();
    let copied_to_b = copy(&on_b, half)?;
    let copied_to_c = copy(&on_c, keys)?;
    until_known(&on_b, 2)?;
    reads.push(read("from A, C and B's own disk", &on_b)?);
    drop(on_a);
    // As soon as the next read has something from A.
    let order = ground.order(&on_b.client.cluster_status().map_err(Failure::user)?)?;
    let before = from_nodes(&on_b.client, &order)?;
    let (watcher, begun) = (b.client()?, Instant::now());
    let killing = std::thread::Builder::new().name("kvarts-demo".to_owned()).spawn(move || {
        while from_nodes(&watcher, &order).is_ok_and(|now| now[0] == before[0]) && begun.elapsed() < PATIENCE
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        a.kill()
    });
    let killing = killing.map_err(Failure::user)?;
    reads.push(read("A is killed in the middle", &on_b)?);
    killing.join().map_err(|_| Failure::user("the node could not be killed"))?;
    let waited = Instant::now();
    let mut while_it_is_leased = "granted";
    let next = loop {
        let reply = ask(&on_b, chain, Ask::ClaimMs(LEASE_MS))?;
        match reply.what() {
            What::Granted => break token(&reply)?,
            What::Owned => while_it_is_leased = "refused, because A owned the chain",
            _ => {}
        }
        if waited.elapsed() > PATIENCE {
            return Err(Failure::user("no other node became the owner"));
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let story = Story {
        model: arguments.model.clone(),
        prefix_bytes: ground.bytes(),
        prefix_blocks: keys.len(),
        copied_to_b,
        copied_to_c,
        reads,
        first_owner_token: first,
        while_it_is_leased,
        next_owner_token: next,
        owner_seconds: waited.elapsed().as_secs_f64(),
        seconds: start.elapsed().as_secs_f64(),
    };
    drop((on_b, on_c));
    b.stop()?;
    c.stop()?;
    match arguments.json {
        true => {
            serde_json::to_writer_pretty(&mut *out, &story).map_err(std::io::Error::from)?;
            writeln!(out)?;
        }
        false => show(&story, out)?,
    }
    if story.holds() { Ok(()) } else { Err(Failure::Problems) }
}

/// Three servers that are members of one cluster. Their stores are made first: a node is named by its store.
fn cluster(ground: &Ground) -> Result<[Server; 3], Failure> {
    let mut members = "epoch = 1\n".to_owned();
    for (number, name) in (1u8..).zip(NAMES) {
        let alone = Server::start_at(ground, name, &[])?;
        let stats = alone.client()?.stats().map_err(Failure::user)?;
        let id: String = stats.store.iter().map(|byte| format!("{byte:02x}")).collect();
        // An address of this process alone, with a port that no connection takes for itself.
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = format!("127.{number}.{high}.{low}:{PORT}");
        members += &format!("[[node]]\nid = \"{id}\"\naddress = \"{address}\"\n");
        alone.stop()?;
    }
    let file = ground.write("members.toml", &members)?;
    let more = ["--cluster".to_owned(), file.display().to_string()];
    let [a, b, c] = NAMES.map(|name| Server::start_at(ground, name, &more));
    let all = [a?, b?, c?];
    let begun = Instant::now();
    for server in &all {
        let client = server.client()?;
        while !client.cluster_status().map_err(Failure::user)?.nodes.iter().all(|node| node.is_reachable) {
            if begun.elapsed() > PATIENCE {
                return Err(Failure::user("the nodes cannot connect to each other"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(all)
}

fn column(ground: &Ground) -> Option<proto::Column> {
    Some(convert::wire_column(ground.group, ground.coordinate))
}

/// Waits until the directory knows of `copies` copies of each block of the prefix.
fn until_known(prefix: &Prefix<'_>, copies: u8) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let asked = proto::LookupRequest {
            namespace: prefix.namespace.as_bytes().to_vec().into(),
            column: column(prefix.ground),
            keys: convert::key_bytes(&prefix.ground.keys),
        };
        let reply = prefix.client.locate(asked).map_err(Failure::user)?;
        let (mut left, mut known) = (&reply.copies[..], true);
        while let Some((count, rest)) = left.split_first() {
            known &= *count >= copies;
            left = rest.get(usize::from(*count) * 2..).unwrap_or_default();
        }
        if known && !reply.copies.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            return Err(Failure::user("the directory lists no copy of the prefix"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes that came from each node so far, in the order of their names.
fn from_nodes(client: &Client, order: &[Vec<u8>]) -> Result<[u64; 3], Failure> {
    let status = client.cluster_status().map_err(Failure::user)?;
    let mut found = [0; 3];
    for node in &status.nodes {
        if let Some(place) = order.iter().position(|id| **id == *node.node)
            && let Some(of) = found.get_mut(place)
        {
            *of = node.read_bytes;
        }
    }
    Ok(found)
}

/// Reads the prefix on B and looks meanwhile from where it comes.
fn read(what: &'static str, on_b: &Prefix<'_>) -> Result<Leg, Failure> {
    let status = on_b.client.cluster_status().map_err(Failure::user)?;
    let order = on_b.ground.order(&status)?;
    let before = from_nodes(&on_b.client, &order)?;
    let since = |now: [u64; 3]| {
        let mut more = [0; 3];
        more.iter_mut()
            .zip(now.iter().zip(before))
            .for_each(|(more, (now, old))| *more = now.saturating_sub(old));
        more
    };
    let done = Arc::new(AtomicBool::new(false));
    let (begun, mut timeline) = (Instant::now(), Vec::new());
    let read: Read = std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut seen = Vec::new();
            while !done.load(Ordering::Relaxed) {
                if let Ok(now) = from_nodes(&on_b.client, &order) {
                    seen.push((begun.elapsed().as_secs_f64(), since(now)));
                }
                std::thread::sleep(LOOK_EVERY);
            }
            seen
        });
        let read = read_back(on_b);
        done.store(true, Ordering::Relaxed);
        timeline = looking.join().unwrap_or_default();
        read
    })?;
    Ok(Leg {
        what,
        seconds: read.arrived(),
        first_layer_seconds: read.layers.first().map_or(0.0, |layer| layer.arrived),
        bytes_differing: read.differing,
        from: since(from_nodes(&on_b.client, &order)?),
        timeline,
    })
}

fn copy(prefix: &Prefix<'_>, keys: &[kvarts_layout::BlockKey]) -> Result<u32, Failure> {
    let asked = proto::ReplicateRequest {
        namespace: prefix.namespace.as_bytes().to_vec().into(),
        column: column(prefix.ground),
        keys: convert::key_bytes(keys),
        expires_after_ms: 600_000,
    };
    Ok(prefix.client.replicate(asked).map_err(Failure::user)?.stored)
}

fn ask(prefix: &Prefix<'_>, chain: u64, ask: Ask) -> Result<proto::ChainReply, Failure> {
    let keys = prefix.ground.session_keys(chain, 1);
    let asked = proto::ChainRequest {
        namespace: prefix.namespace.as_bytes().to_vec().into(),
        column: column(prefix.ground),
        key: convert::key_bytes(&keys),
        ask: Some(ask),
        ..proto::ChainRequest::default()
    };
    prefix.client.chain(asked).map_err(Failure::user)
}

fn token(reply: &proto::ChainReply) -> Result<(u64, u64), Failure> {
    let lease =
        reply.lease.as_ref().ok_or_else(|| Failure::user("the lease of a granted chain is missing"))?;
    Ok((lease.token_epoch, lease.token_number))
}

/// Claims a chain on A whose owner another node decides, so that it can be claimed when A is gone.
fn claim_one(on_a: &Prefix<'_>) -> Result<(u64, (u64, u64)), Failure> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        for chain in 0..24 {
            let before = on_a.client.cluster_status().map_err(Failure::user)?.chains;
            let reply = ask(on_a, chain, Ask::ClaimMs(LEASE_MS * 2))?;
            let after = on_a.client.cluster_status().map_err(Failure::user)?.chains;
            if reply.what() == What::Granted && before == after {
                return Ok((chain, token(&reply)?));
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(Failure::user("no chain was granted"))
}

fn show(story: &Story, out: &mut dyn Write) -> Result<(), Failure> {
    let (prefix, blocks) = (bytes(story.prefix_bytes), story.prefix_blocks);
    writeln!(
        out,
        "1. Three nodes were started, and a prefix of {} was stored on A: {prefix} in {blocks} blocks.",
        story.model
    )?;
    for (number, read) in (2..).zip(&story.reads) {
        let [a, b, c] = read.from.map(bytes);
        let rate = bytes((story.prefix_bytes as f64 / read.seconds.max(1e-9)) as u64);
        writeln!(
            out,
            "{number}. The prefix was read on B, {}: {:.0} ms ({rate}/s), the first layer after {:.0} ms, {} \
            bytes differ.\n   {a} were read from A, {b} from B's own disk, {c} from C.",
            read.what,
            read.seconds * 1e3,
            read.first_layer_seconds * 1e3,
            read.bytes_differing
        )?;
        timeline(story.prefix_bytes, read, out)?;
        if number == 2 {
            let (to_b, to_c) = (story.copied_to_b, story.copied_to_c);
            writeln!(out, "   Then {to_b} blocks were copied to B and {to_c} to C, with unchanged origins.")?;
        }
    }
    let ((epoch, number), (next_epoch, next)) = (story.first_owner_token, story.next_owner_token);
    writeln!(
        out,
        "5. A owned a chain under token {epoch}.{number}. B's claim was {}; {:.1} s later the claim was \
        granted,\n   under token {next_epoch}.{next}.",
        story.while_it_is_leased, story.owner_seconds
    )?;
    writeln!(out, "\n{:.1} s in total.", story.seconds)?;
    Ok(())
}

/// A line for each node: how much of the prefix had come from it, over the time of the read.
fn timeline(all: u64, read: &Leg, out: &mut dyn Write) -> Result<(), Failure> {
    const STEPS: [char; 9] = [' ', '.', ':', '-', '=', '+', '*', '%', '#'];
    let end = read.seconds.max(1e-9);
    for (place, name) in NAMES.into_iter().enumerate() {
        let of = |from: &[u64; 3]| from.get(place).copied().unwrap_or(0);
        let at = |column: usize| {
            let until = end * (column + 1) as f64 / WIDTH as f64;
            let seen = read.timeline.iter().take_while(|(at, _)| *at <= until).last();
            seen.map_or(0, |(_, from)| of(from))
        };
        let step = |column: usize| {
            let part = (at(column) as f64 / all.max(1) as f64 * 8.0).round() as usize;
            STEPS.get(part.min(8)).copied().unwrap_or(' ')
        };
        let line: String = (0..WIDTH).map(step).collect();
        writeln!(out, "   {name} |{line}| {}", bytes(of(&read.from)))?;
    }
    Ok(())
}
