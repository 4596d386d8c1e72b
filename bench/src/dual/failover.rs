//! A node in a process of its own that is killed in the middle of reads from it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kvarts_cluster::members::{Member, NodeId};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_layout::BlockKey;
use kvarts_terminal::Failure;
use kvarts_terminal::undo::Undo;

use super::stage::{CLUSTER, Model, SECRET, SEGMENT_MIB, Trio, chain_keys};
use super::{Bench, PAUSE};
use crate::report::Report;

/// How often it is killed.
const KILLS: usize = 3;

/// What of reads was seen in which the node was killed.
#[derive(Default)]
struct Seen {
    /// Seconds without a layer, at most.
    pause: f64,
    /// Blocks that did not come.
    errors: usize,
    /// The longest read that began after a kill.
    after: f64,
}

/// Three nodes: one that serves, one that serves until it is killed, and the one that reads.
pub(super) fn measure(bench: &Bench<'_>, directory: &Path, report: &mut Report) -> Result<(), Failure> {
    let (rate, model) = ((bench.arguments.rate << 20) / 2, Model::new()?);
    let (count, mortal) = (bench.blocks(&model), directory.join("c"));
    let keys = chain_keys(3, count);
    let (a, b, c) =
        (bench.home(&directory.join("a"))?, bench.home(&directory.join("b"))?, bench.home(&mortal)?);
    for home in [&a, &c] {
        model.put(&bench.runtime, home.store(), &keys)?;
    }
    let ids = [&a, &c, &b].map(|home| home.store().stats().store);
    c.close().map_err(Failure::user)?;
    let (mut places, mut members, mut file) = (Vec::new(), Vec::new(), "epoch = 1\n".to_owned());
    for (number, id) in ids.into_iter().enumerate() {
        let (listener, address) = bench.listen(number)?;
        file += &format!("[[node]]\nid = \"{}\"\naddress = \"{address}\"\n", name(id));
        members.push(Member { id, address, zone: String::new() });
        // The port of the other process is free when it begins.
        places.extend((number != 1).then_some((number, listener)));
    }
    std::fs::write(directory.join("members.toml"), file).map_err(Failure::user)?;
    std::fs::write(directory.join("secret"), SECRET).map_err(Failure::user)?;
    let serve_rate = bench.limits.served(Some(rate));
    let trio = bench.start(vec![a, b], places, members, &[Some(rate), Some(rate), None])?;
    let bytes = (count * model.shape.block_bytes()) as usize;
    let memory = BufMut::zeroed(bytes).map_err(Failure::user)?.share();
    let mut seen = Seen::default();
    for _ in 0..KILLS {
        let server = Server::start(directory, bench.budget_bytes(), serve_rate)?;
        trio.until_known(&bench.runtime, &keys, 2)?;
        // Over the connections that are made when they are first wanted.
        trio.read(&keys, &memory)?;
        seen.read(&trio, &keys, &memory, server)?;
    }
    report.fact("failover_kills", KILLS);
    report.number("failover_longest_pause_s", seen.pause);
    report.number("failover_errors", seen.errors as f64);
    report.number("after_failover_s", seen.after);
    Ok(())
}

fn name(id: NodeId) -> String {
    id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Seen {
    /// One read in the middle of which the node is killed, and one after that.
    fn read(
        &mut self,
        trio: &Trio,
        keys: &[BlockKey],
        memory: &SharedBuf,
        server: Server,
    ) -> Result<(), Failure> {
        let middle = trio.model.shape.layers().len() as u32 / 2;
        let (mut server, mut last) = (Some(server), None::<Instant>);
        std::thread::sleep(PAUSE);
        let (_, end) = trio.reads().try_read(keys, memory, |layer| {
            let now = Instant::now();
            if let Some(last) = last.replace(now).filter(|_| layer > middle) {
                self.pause = self.pause.max((now - last).as_secs_f64());
            }
            if layer == middle {
                drop(server.take());
            }
        })?;
        self.errors += keys.len() - end.usable_blocks as usize;
        let (after, end) = trio.reads().try_read(keys, memory, |_| {})?;
        self.errors += keys.len() - end.usable_blocks as usize;
        self.after = self.after.max(after.seconds);
        Ok(())
    }
}

/// A node in another process: killed when it is dropped.
struct Server {
    _undo: Undo,
}

impl Server {
    fn start(directory: &Path, budget_bytes: u64, serve_rate: Option<u64>) -> Result<Self, Failure> {
        // The one that serves is beside this one, and of the same build.
        let program = std::env::current_exe().map_err(Failure::user)?.with_file_name("kvarts");
        if !program.is_file() {
            let what = format!(
                "the program {} does not exist: build `kvarts` into the directory of `kvarts-lab`",
                program.display()
            );
            return Err(Failure::user(what));
        }
        let at = |name: &str| directory.join(name).display().to_string();
        let log = std::fs::File::create(directory.join("log")).map_err(Failure::user)?;
        let rate = serve_rate.map(|rate| ["--cluster-serve-rate".to_owned(), rate.to_string()]);
        let mut command = Command::new(program);
        command
            .args(["serve", "--dir", &at("c"), "--budget", &format!("{budget_bytes}")])
            .args(["--segment", &format!("{SEGMENT_MIB} MiB")])
            .args(["--listen-grpc", "none", "--listen-metrics", "none", "--log-level", "warn"])
            .args(["--listen-socket", &at("socket"), "--cluster", &at("members.toml")])
            .args(["--cluster-name", CLUSTER, "--cluster-secret", &at("secret")])
            .args(rate.into_iter().flatten())
            .env_remove("KVARTS_CONFIG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        let child = Arc::new(Mutex::new(None));
        let killed = Arc::clone(&child);
        let begin = || {
            let mut begun = command.spawn().map_err(|error| error.to_string())?;
            let pipe = begun.stdout.take();
            *child.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
            pipe.ok_or_else(|| "the output of the server cannot be read".to_owned())
        };
        let (undo, pipe) = Undo::of(begin, move || kill(&killed)).map_err(Failure::User)?;
        let server = Self { _undo: undo };
        let mut line = String::new();
        // One line, or none if it ended.
        BufReader::new(pipe).read_line(&mut line).map_err(Failure::user)?;
        if line.starts_with("serving ") {
            return Ok(server);
        }
        let log = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
        Err(Failure::User(format!("the server did not start: {}", log.trim())))
    }
}

fn kill(child: &Mutex<Option<Child>>) {
    if let Some(mut child) = child.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // It may have ended already.
        let _ = child.kill();
        let _ = child.wait();
    }
}
