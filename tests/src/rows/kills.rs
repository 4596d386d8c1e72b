//! kill -9: the real program on the real file system, killed at random moments, while it starts too; and the client's
//! own record of what was acknowledged, which is on disk before the client believes it.
//!
//! A killed process loses nothing that the kernel has: this row finds wrong orders inside the process, never a missing
//! flush. Power is cut elsewhere.
#![allow(clippy::disallowed_methods, reason = "starts processes and writes a record, outside any simulation")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{
    BlockOutcome, DeleteOutcome, DeleteRequest, Durability, KvStore, Order, Parent, PutRequest, ReadRequest,
    Target, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::class::Class;
use kvarts_layout::NamespaceId;

use super::pool::{States, until};
use super::{Ask, Row, Tally};
use crate::fixture::{self, Style};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed};
use crate::stage::Scratch;

/// Kills of one store.
const ROUNDS: u64 = 12;
/// Keys of each writer; each has a column of its own.
const KEYS: u64 = 24;
/// How long the program may take to start or stop.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn kills() -> Row {
    Row {
        id: "R5",
        what: "kill -9 of the real program under puts and deletes, and while it starts, on one directory or two",
        counts: "kills",
        targets: [40, 480, 20_000],
        run,
    }
}

fn run(ask: &Ask, target: u64) -> Tally {
    match program() {
        Ok(program) => until(ask, target, |seed, states| life(&program, seed, states)),
        Err(why) => Tally { skipped: Some(why), ..Tally::default() },
    }
}

/// The program, built beside this one.
pub(super) fn program() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("KVARTS_PROGRAM") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    // Tests lie one folder deeper.
    let beside = own.ancestors().skip(1).take(2).map(|folder| folder.join("kvarts"));
    let found = beside.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| {
        "the program is not built beside the campaign: cargo build -p kvarts, with --release if it is"
            .to_owned()
    })
}

/// A server in a process of its own; killed when dropped.
struct Server {
    child: Child,
    grpc: String,
}

fn command(program: &Path, place: &Path, seed: Seed) -> Command {
    let mut rng = seed.child("command").rng();
    let all = directories(place, seed).map(|path| path.display().to_string()).collect::<Vec<_>>().join(",");
    let mut command = Command::new(program);
    command.args(["serve", "--dir", &all, "--listen-grpc", "127.0.0.1:0", "--listen-metrics", "none"]);
    command.args([
        "--listen-socket",
        "none",
        "--budget",
        "32 MiB",
        "--segment",
        "256 KiB",
        "--memory",
        "64 MiB",
    ]);
    command.args(["--executors", ["1", "2"][rng.index(2)], "--io", ["auto", "pool"][rng.index(2)]]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn directories(place: &Path, seed: Seed) -> impl Iterator<Item = PathBuf> {
    let count = 1 + seed.0 % 2;
    let place = place.to_owned();
    (0..count).map(move |n| place.join(format!("disk-{n}")))
}

impl Server {
    /// Starts the program and waits until it says where it is.
    fn start(mut command: Command) -> Result<Self, String> {
        let child = command.spawn().map_err(|error| format!("the program does not start: {error}"))?;
        let mut server = Self { child, grpc: String::new() };
        let out = server.child.stdout.take().ok_or("no output")?;
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(out).read_line(&mut line);
            let _ = tell.send(line);
        });
        let line = told.recv_timeout(TIMEOUT).map_err(|_| "it does not say where it serves".to_owned())?;
        let grpc = line.split_whitespace().find_map(|word| word.strip_prefix("grpc="));
        match grpc {
            Some(grpc) => server.grpc = grpc.to_owned(),
            None => return Err(format!("it does not serve: {}", server.last_words())),
        }
        Ok(server)
    }

    /// What it wrote for its operator before it ended.
    fn last_words(&mut self) -> String {
        let _ = self.child.kill();
        let mut all = String::new();
        if let Some(mut from) = self.child.stderr.take() {
            let _ = std::io::Read::read_to_string(&mut from, &mut all);
        }
        // A panic says where it was before it shows how it came there.
        let lines: Vec<&str> = all.lines().collect();
        let from = lines.iter().position(|line| line.contains(" panicked at "));
        lines[from.unwrap_or(lines.len().saturating_sub(1))..].join("\n")
    }

    fn client(&self) -> Result<Client, String> {
        let options =
            ConnectOptions { call_timeout: TIMEOUT, ..ConnectOptions::to(format!("http://{}", self.grpc)) };
        Client::connect(&options).map_err(|error| format!("no connection: {error}"))
    }

    fn kill(mut self) -> Result<(), String> {
        self.child.kill().and_then(|()| self.child.wait()).map(drop).map_err(|error| error.to_string())
    }

    /// A clean stop.
    fn stop(mut self, client: &Client) -> Result<(), String> {
        client.drain().map_err(|error| format!("it does not drain: {error}"))?;
        let ended = self.child.wait().map_err(|error| error.to_string())?;
        if ended.success() { Ok(()) } else { Err(format!("it ends with {ended}: {}", self.last_words())) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a writer has on disk about one of its blocks.
#[derive(Clone, Debug, Default)]
struct Known {
    producers: BTreeSet<u64>,
    durable: bool,
}

/// A writer's record: a line for each thing, on disk before the next one is done.
struct Record {
    path: PathBuf,
    file: File,
}

impl Record {
    fn open(path: &Path) -> Result<Self, String> {
        let file = File::options().create(true).append(true).open(path).map_err(|error| error.to_string())?;
        Ok(Self { path: path.to_owned(), file })
    }

    fn write(&mut self, what: &str, key: u64, producer: u64) -> Result<(), String> {
        let line = format!("{what} {key} {producer}\n");
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|error| format!("the client's own record: {error}"))
    }

    /// What the record says, read back from its file.
    fn known(&self) -> Result<BTreeMap<u64, Known>, String> {
        let text = std::fs::read_to_string(&self.path).map_err(|error| error.to_string())?;
        let mut all: BTreeMap<u64, Known> = (0..KEYS).map(|key| (key, Known::default())).collect();
        for line in text.lines() {
            let mut words = line.split(' ');
            let (what, key, producer) = (words.next(), words.next(), words.next());
            let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
            let (Some(key), Some(producer)) = (number(key), number(producer)) else {
                return Err(format!("the client's own record has {line:?}"));
            };
            let known = all.entry(key).or_default();
            match what {
                Some("try") => drop(known.producers.insert(producer)),
                Some("durable") => known.durable = true,
                Some("delete") => known.durable = false,
                Some("deleted") => known.producers.clear(),
                _ => return Err(format!("the client's own record has {line:?}")),
            }
        }
        Ok(all)
    }
}

fn column(writer: usize) -> (kvarts_layout::Group, kvarts_layout::Coordinate) {
    fixture::columns()[writer]
}

fn register(client: &Client) -> Result<NamespaceId, String> {
    let registered = client.register(&fixture::identity("killed"), &fixture::geometry());
    registered.map_err(|error| format!("the namespace is refused: {error}"))
}

/// Puts and deletes until the server is gone. Only what the record cannot do is an error.
fn write(client: &Client, writer: usize, record: &mut Record, mut rng: Rng) -> Result<u64, String> {
    let Ok(namespace) = register(client) else { return Ok(0) };
    let (group, coordinate) = column(writer);
    let shape = fixture::shape(group, coordinate);
    let mut acknowledged = 0;
    loop {
        let n = rng.below(KEYS);
        let key = fixture::key(11, n);
        if rng.below(4) == 0 {
            record.write("delete", n, 0)?;
            let target = Target::Keys { column: Some((group, coordinate)), keys: vec![key] };
            let asked = client.delete(DeleteRequest { namespace, target, deadline: None });
            match block_on(asked) {
                Ok(Ok(reply))
                    if !matches!(reply.outcomes.first(), Some(DeleteOutcome::Refused(_)) | None) =>
                {
                    record.write("deleted", n, 0)?;
                    acknowledged += 1;
                }
                Ok(Ok(_)) => {}
                _ => return Ok(acknowledged),
            }
            continue;
        }
        let (producer, durable) = (rng.next_u64(), rng.below(4) > 0);
        record.write("try", n, producer)?;
        let from = fixture::place(&shape, 1, Style::Blocks, 0).map_err(|reason| reason.to_string())?;
        fixture::write_block(&from, 0, &fixture::content(&key, group, coordinate, producer, &shape));
        let asked = client.put(PutRequest {
            namespace,
            group,
            coordinate,
            parent: if n == 0 { Parent::Root } else { Parent::Key(fixture::key(11, n - 1)) },
            first_block: None,
            keys: vec![key],
            from,
            layout: None,
            durability: if durable { Durability::Durable } else { Durability::Relaxed },
            expires_after: None,
            origins: None,
            deadline: None,
        });
        match block_on(asked) {
            Ok(Ok(reply)) => match reply.outcomes.first() {
                Some(BlockOutcome::Stored | BlockOutcome::AlreadyThere) if durable => {
                    record.write("durable", n, producer)?;
                    acknowledged += 1;
                }
                _ => {}
            },
            _ => return Ok(acknowledged),
        }
    }
}

/// Every block is what its writer's record allows.
fn check(client: &Client, writer: usize, record: &Record) -> Result<(), String> {
    let namespace = register(client)?;
    let (group, coordinate) = column(writer);
    let shape = fixture::shape(group, coordinate);
    let into = fixture::place(&shape, KEYS as u32, Style::Blocks, 0).map_err(|reason| reason.to_string())?;
    let keys = fixture::keys(11, 0..KEYS);
    let read = client.read(ReadRequest {
        namespace,
        group,
        coordinate,
        keys: keys.clone(),
        layers: None,
        order: Order::Blocks,
        into: into.clone(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    });
    let end = read.map_err(|error| format!("a read is refused: {error}"))?.wait_blocking();
    for (n, known) in record.known()? {
        let at = n as u32;
        let key = &keys[n as usize];
        let failed = end.failures.iter().find(|(block, _)| *block == at).map(|(_, reason)| reason);
        let wrong = match failed {
            Some(kvarts_contract::error::Reason::NotHere(_)) if !known.durable => continue,
            Some(reason) => format!("{reason}"),
            None => {
                let found = fixture::read_block(&into, at, &shape);
                let whose = |one: &u64| fixture::content(key, group, coordinate, *one, &shape) == found;
                if known.producers.iter().any(whose) {
                    continue;
                }
                "bytes that were never put, or that were deleted".to_owned()
            }
        };
        return Err(format!("writer {writer}, key {n}: {wrong}; {known:?}"));
    }
    Ok(())
}

/// The checker of the program itself, on a store that no process has open.
fn fsck(program: &Path, place: &Path, seed: Seed) -> Result<(), String> {
    let checked = Command::new(program).arg("fsck").args(directories(place, seed)).output();
    let checked = checked.map_err(|error| format!("fsck does not start: {error}"))?;
    if checked.status.success() {
        return Ok(());
    }
    Err(format!(
        "fsck: {}{}",
        String::from_utf8_lossy(&checked.stdout),
        String::from_utf8_lossy(&checked.stderr)
    ))
}

/// One store: started, written to and killed again and again.
fn life(program: &Path, seed: Seed, states: &States) -> Result<(), String> {
    let scratch = Scratch::new("kills");
    let place = scratch.path();
    std::fs::create_dir_all(place).map_err(|error| error.to_string())?;
    let mut records = Vec::new();
    for writer in 0..fixture::columns().len() {
        records.push(Record::open(&place.join(format!("record-{writer}")))?);
    }
    let mut rng = seed.child("kills").rng();
    for round in 0..ROUNDS {
        let at = |why: String| format!("round {round}: {why}");
        // Killed while it starts, now and then.
        if round > 0 && rng.below(3) == 0 {
            let mut child = command(program, place, seed).spawn().map_err(|error| error.to_string())?;
            std::thread::sleep(Duration::from_micros(rng.between(0, 60_000)));
            child.kill().and_then(|()| child.wait()).map_err(|error| error.to_string())?;
            note(states, seed, round, u64::MAX);
        }
        let server = Server::start(command(program, place, seed)).map_err(at)?;
        let client = server.client().map_err(at)?;
        for (writer, record) in records.iter().enumerate() {
            check(&client, writer, record).map_err(at)?;
        }
        let delay = Duration::from_millis(rng.between(5, 250));
        let wrote = std::thread::scope(|scope| {
            let writers = (0..).zip(&mut records).map(|(writer, record)| {
                let (client, rng) = (&client, seed.nth(round).nth(writer as u64).rng());
                scope.spawn(move || write(client, writer, record, rng))
            });
            let writers: Vec<_> = writers.collect();
            std::thread::sleep(delay);
            server.kill()?;
            let ended =
                writers.into_iter().map(|writer| writer.join().map_err(|_| "a writer panicked".to_owned()));
            ended.map(|ended| ended.flatten()).sum::<Result<u64, String>>()
        });
        note(states, seed, round, wrote.map_err(at)?);
        fsck(program, place, seed).map_err(at)?;
    }
    let server = Server::start(command(program, place, seed))?;
    let client = server.client()?;
    for (writer, record) in records.iter().enumerate() {
        check(&client, writer, record)?;
    }
    server.stop(&client)?;
    fsck(program, place, seed)
}

/// A kill is a state of its own: what had been acknowledged is part of it.
fn note(states: &States, seed: Seed, round: u64, acknowledged: u64) {
    let mut mixer = Mixer::new(5);
    [seed.0, round, acknowledged].into_iter().for_each(|word| mixer.word(word));
    states.reach(mixer.value());
}
