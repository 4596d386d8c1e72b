//! `kvarts demo`: what the store is for, shown on a real server in a temporary directory, in under a minute.
//!
//! A server is started as another process; the prefix of a prompt is stored in it and shared by several sessions; the
//! server is killed and started again; the prefix is read back layer by layer into memory that both processes share,
//! while what has arrived is already being used; a byte is flipped on disk, and found by the reader and by the checker.
#![allow(
    clippy::disallowed_methods,
    reason = "a demonstration, which measures times, starts processes and damages a file that it created"
)]

mod cluster;
mod ground;
mod show;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_contract::api::{
    BlockOutcome, KvStore, MatchRequest, Order, Parent, PutRequest, ReadEnd, ReadEvent, ReadRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockKey;
use serde::Serialize;

use ground::{Ground, Prefix, Server};
use kvarts_terminal::{Failure, undo};
use show::Layer;

/// Sessions that go on from the shared prefix, and the blocks that each adds.
const SESSIONS: u64 = 4;
/// See [`SESSIONS`].
const SESSION_BLOCKS: u64 = 2;

/// The arguments of `demo`.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// A shipped model with one group of blocks
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Tokens of the shared prefix
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(256..=1 << 20))]
    tokens: u32,
    /// Parent of the server's directory [default: the system's directory for temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Demonstrate three nodes that read from each other
    #[arg(long)]
    cluster: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What happened, step by step.
#[derive(Serialize, Debug)]
pub(super) struct Story {
    model: String,
    layers: u32,
    tokens: u64,
    prefix_bytes: u64,
    prefix_blocks: u64,
    store_seconds: f64,
    sessions: u64,
    session_blocks_matched: u64,
    session_blocks_stored: u64,
    bytes_without_sharing: u64,
    killed_with: &'static str,
    restart_seconds: f64,
    blocks_recovered: u64,
    blocks_matched: u32,
    path: &'static str,
    read_seconds: f64,
    compute_seconds: f64,
    total_seconds: f64,
    first_layer_seconds: f64,
    bytes_differing: u64,
    timeline: Vec<Layer>,
    damage: Damage,
    fsck_exit: i32,
    fsck_findings: Vec<String>,
    fsck_names_it: bool,
    seconds: f64,
}

impl Story {
    /// Whether all of it went as it must.
    fn holds(&self) -> bool {
        self.bytes_differing == 0
            && u64::from(self.blocks_matched) == self.prefix_blocks
            && self.damage.usable_blocks == self.damage.block
            && self.damage.blocks_matched_afterwards == self.damage.block
            && self.fsck_exit == 1
            && self.fsck_names_it
    }
}

/// The flipped byte and what came of it.
#[derive(Serialize, Debug)]
struct Damage {
    file: String,
    offset: u64,
    block: u32,
    usable_blocks: u32,
    reason: String,
    blocks_matched_afterwards: u32,
}

/// Runs the demonstration.
pub(crate) fn run(arguments: &DemoArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let done = match arguments.cluster {
        true => cluster::run(arguments, out),
        false => one_server(arguments, out),
    };
    undo::last_word();
    done
}

fn one_server(arguments: &DemoArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let start = Instant::now();
    let tell = |step: &str| {
        if !arguments.json && std::io::stderr().is_terminal() {
            // A terminal that is gone misses nothing.
            let _ = write!(std::io::stderr(), "\r\x1b[K{step}");
        }
    };
    tell("starting a server");
    let ground = Ground::new(arguments.dir.as_deref(), &arguments.model, arguments.tokens)?;
    let server = Server::start(&ground)?;
    let prefix = Prefix::new(&ground, &server)?;
    tell("storing a prefix");
    let stored = store(&prefix)?;
    let (matched, added) = fork(&prefix)?;
    tell("killing the server");
    server.kill();
    let restarted = Instant::now();
    let server = Server::start(&ground)?;
    let restart_seconds = restarted.elapsed().as_secs_f64();
    let prefix = Prefix::new(&ground, &server)?;
    let recovered = prefix.recovered()?;
    tell("reading it back");
    let blocks_matched = found(&prefix)?;
    let read = read_back(&prefix)?;
    tell("flipping a byte");
    let damage = damage(&ground, &prefix)?;
    let path = prefix.client.path().name();
    drop(prefix);
    server.stop()?;
    tell("checking the disk");
    let (fsck_exit, fsck_findings) = ground.fsck()?;
    tell("");
    let key = ground.keys.get(damage.block as usize).map(BlockKey::to_string).unwrap_or_default();
    let named = |line: &String| line.contains(&key);
    let story = Story {
        model: arguments.model.clone(),
        layers: ground.shape.layers().len() as u32,
        tokens: u64::from(ground.block_tokens) * ground.keys.len() as u64,
        prefix_bytes: ground.bytes(),
        prefix_blocks: ground.keys.len() as u64,
        store_seconds: stored,
        sessions: SESSIONS,
        session_blocks_matched: matched,
        session_blocks_stored: added,
        bytes_without_sharing: (ground.keys.len() as u64 + SESSION_BLOCKS)
            * ground.shape.block_bytes()
            * SESSIONS,
        killed_with: "SIGKILL",
        restart_seconds,
        blocks_recovered: recovered,
        blocks_matched,
        path,
        read_seconds: read.arrived(),
        compute_seconds: read.computed(),
        total_seconds: read.total,
        first_layer_seconds: read.layers.first().map_or(0.0, |layer| layer.arrived),
        bytes_differing: read.differing,
        timeline: read.layers,
        damage,
        fsck_names_it: fsck_findings.iter().any(named),
        fsck_exit,
        fsck_findings,
        seconds: start.elapsed().as_secs_f64(),
    };
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, &story).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        show::write(&story, out)?;
    }
    if story.holds() { Ok(()) } else { Err(Failure::Problems) }
}

/// Stores the prefix, durably; gives the seconds that it took.
fn store(prefix: &Prefix<'_>) -> Result<f64, Failure> {
    let ground = prefix.ground;
    prefix.fill(&ground.keys)?;
    let start = Instant::now();
    let outcomes = prefix.put(&ground.keys, Parent::Root, 0)?;
    if let Some(other) = outcomes.iter().find(|outcome| **outcome != BlockOutcome::Stored) {
        return Err(Failure::User(format!("a block of the prefix was not stored: {other:?}")));
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Lets sessions find the prefix and go on from it; gives the blocks that they found and those that they added.
fn fork(prefix: &Prefix<'_>) -> Result<(u64, u64), Failure> {
    let ground = prefix.ground;
    let (mut matched, mut added) = (0, 0);
    for session in 0..SESSIONS {
        let own: Vec<BlockKey> = ground.session_keys(session, SESSION_BLOCKS);
        let asked: Vec<BlockKey> = ground.keys.iter().chain(&own).copied().collect();
        let there = prefix.matched(&asked)?;
        matched += u64::from(there);
        let last = ground.keys.last().map_or(Parent::Root, |key| Parent::Key(*key));
        prefix.fill(&own)?;
        let outcomes = prefix.put(&own, last, ground.keys.len() as u32)?;
        added += outcomes.iter().filter(|outcome| **outcome == BlockOutcome::Stored).count() as u64;
    }
    Ok((matched, added))
}

/// How much of the prefix is there after the restart.
fn found(prefix: &Prefix<'_>) -> Result<u32, Failure> {
    prefix.matched(&prefix.ground.keys)
}

/// What a read was like.
struct Read {
    layers: Vec<Layer>,
    total: f64,
    differing: u64,
}

impl Read {
    fn arrived(&self) -> f64 {
        self.layers.last().map_or(0.0, |layer| layer.arrived)
    }

    fn computed(&self) -> f64 {
        self.layers.iter().map(|layer| layer.ended - layer.began).sum()
    }
}

/// Reads the prefix layer by layer, and uses each layer while later ones arrive: every byte is compared with what was
/// put, which stands for an engine's work.
fn read_back(prefix: &Prefix<'_>) -> Result<Read, Failure> {
    let ground = prefix.ground;
    prefix.pool().fill(0);
    let start = Instant::now();
    let stream = prefix.client.layers(prefix.request(&ground.keys)?).map_err(Failure::user)?;
    let since = || start.elapsed().as_secs_f64();
    let (to, arrived) = std::sync::mpsc::channel();
    let waiting = std::thread::Builder::new().name("kvarts-demo".to_owned()).spawn(move || {
        loop {
            let event = stream.next_blocking();
            let ended = matches!(event, ReadEvent::End(_));
            if to.send((event, start.elapsed().as_secs_f64())).is_err() || ended {
                return;
            }
        }
    });
    let waiting = waiting.map_err(Failure::user)?;
    let (mut layers, mut differing) = (Vec::new(), 0);
    let end = loop {
        let (event, at) = arrived.recv().map_err(|_| Failure::user("the read ended without a result"))?;
        match event {
            ReadEvent::Layer { layer, .. } => {
                let began = since();
                differing += prefix.differing(layer)?;
                layers.push(Layer { layer, arrived: at, began, ended: since() });
            }
            ReadEvent::End(end) => break end,
            ReadEvent::Block(_) | ReadEvent::Released => {}
        }
    };
    // It has sent the end.
    let _ = waiting.join();
    if end.usable_blocks as usize != ground.keys.len() {
        return Err(Failure::User(format!("the prefix was read back incomplete: {end:?}")));
    }
    Ok(Read { layers, total: since(), differing })
}

/// Flips a byte of a block in the middle of the prefix, on disk, and reads the prefix again.
fn damage(ground: &Ground, prefix: &Prefix<'_>) -> Result<Damage, Failure> {
    let block = ground.keys.len() as u32 * 5 / 8;
    let (file, offset) = ground.flip(block)?;
    let end = ended(prefix)?;
    let reason = end.failures.iter().find(|(at, _)| *at == block);
    let reason = reason.map_or("none".to_owned(), |(_, reason)| match reason {
        Reason::Digest { expected, found, .. } => format!("digest {found:08x} instead of {expected:08x}"),
        other => other.to_string(),
    });
    // The server looks at the disk once more before it takes a block out of service.
    let begun = Instant::now();
    let mut afterwards = prefix.matched(&ground.keys)?;
    while afterwards != block && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
        afterwards = prefix.matched(&ground.keys)?;
    }
    Ok(Damage {
        file,
        offset,
        block,
        usable_blocks: end.usable_blocks,
        reason,
        blocks_matched_afterwards: afterwards,
    })
}

fn ended(prefix: &Prefix<'_>) -> Result<ReadEnd, Failure> {
    let request = prefix.request(&prefix.ground.keys)?;
    block_on(prefix.client.get_into(request)).map_err(Failure::user)
}

impl Prefix<'_> {
    /// A put of these blocks from the pool.
    fn put(&self, keys: &[BlockKey], parent: Parent, first: u32) -> Result<Vec<BlockOutcome>, Failure> {
        let request = PutRequest {
            namespace: self.namespace,
            group: self.ground.group,
            coordinate: self.ground.coordinate,
            parent,
            first_block: Some(first),
            keys: keys.to_vec(),
            from: self.placed(keys.len())?,
            layout: None,
            durability: kvarts_contract::api::Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        let answer = block_on(self.client.put(request)).map_err(Failure::user)?;
        Ok(answer.map_err(Failure::user)?.outcomes)
    }

    /// A read of these blocks into the pool.
    fn request(&self, keys: &[BlockKey]) -> Result<ReadRequest, Failure> {
        Ok(ReadRequest {
            namespace: self.namespace,
            group: self.ground.group,
            coordinate: self.ground.coordinate,
            keys: keys.to_vec(),
            layers: None,
            order: Order::Layers,
            into: self.placed(keys.len())?,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        })
    }

    /// Leading blocks that can be restored.
    fn matched(&self, keys: &[BlockKey]) -> Result<u32, Failure> {
        let request = MatchRequest {
            namespace: self.namespace,
            keys,
            requirements: &self.ground.requirements,
            recompute_tokens_max: u64::MAX,
            lease: None,
            plan: None,
        };
        Ok(self.client.match_prefix(&request).map_err(Failure::user)?.usable.longest.blocks)
    }

    fn pool(&self) -> &SharedBuf {
        &self.pool
    }
}
