//! `bench gpu`: layers from disk through the arena to a device under an engine that computes, beside what each of the
//! three would take alone, and beside the serial way.
//!
//! `pipeline_ratio` is, within each round, the time of a pipeline that hides everything but its longest part, over the
//! time measured. The longest of reads (by the bare loop), copies and compute cannot be hidden; neither can what one
//! layer needs in the parts before it, at the beginning, and in the parts behind it, at the end ([`least`]).

mod bytes;

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_contract::api::Verify;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_gpudirect::cufile::{self, Decision, Found, Mode, Wish};
use kvarts_gpudirect::device::{Batch, Direction, Memory, Method, Piece, Stream, cuda, drain};
use kvarts_gpudirect::gather::{Curve, copy_split};
use kvarts_gpudirect::lander::{Lander, RING_BYTES};
use kvarts_gpudirect::pace::RealPace;
use kvarts_gpudirect::pipeline::Next;
use kvarts_gpudirect::{Arena, Destination, LandRequest, Pipeline};
use kvarts_layout::plan::{MemoryId, PartTarget};
use kvarts_layout::{BlockKey, BlockShape, Layout};
use kvarts_store::engine::Options;
use serde_json::json;

use super::bare::Bare;
use super::digits::digits;
use super::layers::Race;
use super::pairs::{Contestant, Rounds, Sample, Summary, cpu_seconds, summary, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key};
use kvarts_gpudirect::device::name::{DeviceName, Opened};
use kvarts_terminal::Failure;

/// The arguments of `bench gpu`.
#[derive(Args, Debug)]
pub(super) struct GpuArgs {
    /// Parent of the store's directory [default: the current directory]
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Device: emulated or cuda:N
    #[arg(long, default_value = "emulated")]
    device: DeviceName,
    /// A shipped model [default: llama-3.1-8b, then deepseek-v4-pro]
    #[arg(long)]
    model: Option<String>,
    /// Tensor-parallel ranks that share the model; the benchmark moves the part of the first rank
    #[arg(long, default_value_t = 1)]
    tp: u16,
    /// Tokens of the prefix [default: tokens for about 384 MiB]
    #[arg(long)]
    tokens: Option<u64>,
    /// Computing time of a layer in microseconds [default: the time in which the bare loop reads a layer]
    #[arg(long)]
    compute_us_per_layer: Option<u64>,
    /// Path from files to the device: auto, direct, compatibility or staging; the emulated device supports direct
    #[arg(long, default_value = "auto")]
    cufile: Wish,
    /// Maximum size of the arena in MiB
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=65536))]
    arena_mib: u64,
    /// Rounds in which the contestants take turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(3..=1000))]
    pairs: u32,
}

/// What a round of one model needs.
struct Stage<'a> {
    opened: &'a Opened,
    pipeline: Pipeline,
    race: Race,
    bare: &'a Bare,
    store: &'a kvarts_store::engine::Store,
    curve: Curve,
    pool: EnginePool,
    into: Destination,
    /// Each layer in the host memory of the serial way.
    hosts: Vec<SharedBuf>,
    compute: Duration,
    keys: Vec<BlockKey>,
    arena_bytes: u64,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &GpuArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let opened = arguments.device.open().map_err(Failure::user)?;
    let common = Common {
        dir: arguments.dir.clone(),
        keep: false,
        json: arguments.json,
        pairs: arguments.pairs,
        runtime: Default::default(),
        io: Default::default(),
        io_disable: None,
        executors: 1,
        cores: Vec::new(),
    };
    let models = match &arguments.model {
        Some(model) => vec![model.clone()],
        None => vec!["llama-3.1-8b".to_owned(), "deepseek-v4-pro".to_owned()],
    };
    let mut report = Report::new("gpu");
    let about = opened.device().describe();
    report.fact("device", about.kind);
    report.fact("device_name", about.name);
    about.notes.into_iter().for_each(|note| report.note(note));
    let files = decide(arguments)?;
    report.fact("files", files.mode.name());
    report.note(files.to_string());
    report.fact("pairs", arguments.pairs);
    let mut rows = Vec::new();
    let mut worst: Option<(Summary, Summary)> = None;
    for model in &models {
        let found = one_model(arguments, &common, &opened, model, &mut report, &mut rows)?;
        if worst.is_none_or(|(ratio, _)| found.0.median < ratio.median) {
            worst = Some(found);
        }
    }
    report.rows("models", rows);
    if let Some((ratio, serial)) = worst {
        report.median("pipeline_ratio", ratio);
        report.median("serial_ratio", serial);
        if models.len() > 1 {
            report.note(
                "pipeline_ratio and serial_ratio are the values of the model with the lower \
                    pipeline_ratio",
            );
        }
    }
    report.write(arguments.json, out)
}

/// How files reach the device that is measured.
fn decide(arguments: &GpuArgs) -> Result<Decision, Failure> {
    let machine = match arguments.device {
        // It reads files itself and has a kernel of its own; by default it stands for a machine without.
        DeviceName::Emulated => {
            let direct = arguments.cufile == Wish::Only(Mode::Direct);
            Found { device: Ok(()), library: true, module: direct }
        }
        DeviceName::Cuda(_) => cufile::look(cuda::count().map(drop).map_err(|error| error.to_string())),
    };
    cufile::decide(&machine, arguments.cufile).map_err(Failure::User)
}

fn one_model(
    arguments: &GpuArgs,
    common: &Common,
    opened: &Opened,
    model: &str,
    report: &mut Report,
    rows: &mut Vec<serde_json::Value>,
) -> Result<(Summary, Summary), Failure> {
    let spec = setup::model(model)?;
    let probe = |bytes: u64| (384u64 << 20).div_ceil(bytes.max(1));
    let scratch = Scratch::new(common, 3 << 30)?;
    // Far more than is stored: how much the disk has left does not matter.
    let options = Options { budget_bytes: 64 << 30, budget_beyond_disk: true, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let subject = Subject::of_rank(home.store(), &spec, None, arguments.tp)?;
    let block_tokens = u64::from(subject.block_tokens);
    let blocks = match arguments.tokens {
        Some(tokens) => tokens.div_ceil(block_tokens).max(1),
        None => probe(subject.shape.block_bytes()),
    };
    let keys: Vec<BlockKey> = (0..blocks).map(|number| key(3, number)).collect();
    let batch = ((32u64 << 20) / subject.shape.block_bytes()).max(1);
    subject.fill(home.store(), &keys, batch as usize, Some(Layout::LayerBlock))?;
    let bare = Bare::start(common, scratch.path(), 1)?;
    let mut stage = Stage::new(arguments, opened, home.store(), &bare, &subject, keys)?;
    let bytes = arguments.arena_mib << 20;
    let ready = cufile::prepare(decide(arguments)?, arguments.cufile, &opened.device(), bytes);
    let (files, arena) = ready.map_err(Failure::user)?;
    if arguments.cufile == Wish::Auto && arena.is_none() {
        report.note(format!("{model}: {files}"));
    }
    if let Some(arena) = arena {
        stage.pipeline = stage.pipeline.with_files(home.store().clone(), arena);
    }
    if arguments.compute_us_per_layer.is_none() {
        stage.race.bare(&bare, false)?;
        let alone = stage.race.bare(&bare, false)?.seconds;
        stage.compute = Duration::from_secs_f64(alone / f64::from(stage.layers()));
    }
    let rounds = take_turns(arguments.pairs, stage.contestants())?;
    let found = stage.tell(model, blocks * block_tokens, &rounds, report, rows);
    let bytes = stage.bytes()?;
    if let Some(row) = rows.last_mut() {
        row["tp"] = json!(arguments.tp);
        bytes.as_object().into_iter().flatten().for_each(|(name, value)| row[name] = value.clone());
    }
    report.note(format!(
        "{model} with {} ranks: result of the comparison of bytes and of copies back from the device: \
        {bytes}",
        arguments.tp
    ));
    if let Some(used) = stage.pipeline.direct_use() {
        let why = used
            .last_reason
            .map(|why| format!(" (reason for the last staged request: {why})"))
            .unwrap_or_default();
        let bytes = used.bytes;
        report.note(format!(
            "{model}: {bytes} bytes were read directly, and {} requests were staged{why}",
            used.staged
        ));
    }
    stage.race.leave(home.store());
    stage.hosts.first().inspect(|host| opened.device().unpin(host.region()));
    drop(stage);
    drop(bare);
    home.close().map_err(Failure::user)?;
    Ok(found)
}

impl<'a> Stage<'a> {
    fn new(
        arguments: &GpuArgs,
        opened: &'a Opened,
        store: &'a kvarts_store::engine::Store,
        bare: &'a Bare,
        subject: &Subject,
        keys: Vec<BlockKey>,
    ) -> Result<Self, Failure> {
        let device = opened.device();
        let race = Race::new(store, subject, &keys, (Verify::Always, 1), (bare, 1))?;
        let arena = Arena::new(arguments.arena_mib << 20).map_err(Failure::user)?;
        if let Some(all) = arena.take(1, u64::MAX) {
            // Touched once, or the first pass would pay for the pages.
            all.fill(0);
        }
        // Both work without, only slower: a machine that forbids it is measured as it is.
        let _ = (arena.register(store), arena.pin(&device));
        let (region, host) = Curve::scratch(8 << 20).map_err(Failure::user)?;
        // Pinned like what is copied later: of memory that is not, every way is one copy each.
        let pinned = device.pin(&region).is_ok();
        let curve = Curve::measure(&*device, &*RealPace::new(), &host, 8 << 20, 2);
        if pinned {
            device.unpin(&region);
        }
        let curve = curve.map_err(Failure::user)?;
        let pool = EnginePool::new(opened, subject, keys.len() as u32)?;
        let into = pool.of(0..keys.len())?;
        let hosts = layer_buffers(&race, subject);
        // What copies alone take is measured from pinned memory, as in the pipeline.
        let _ = hosts.first().map(|host| device.pin(host.region()));
        let lander = Lander::new(&device, RING_BYTES).map_err(Failure::user)?;
        let pipeline = Pipeline::new(Arc::new(store.clone()), Arc::clone(&device), arena, curve.clone());
        let pipeline = pipeline.with_lander(lander);
        let compute = Duration::from_micros(arguments.compute_us_per_layer.unwrap_or_default());
        let arena_bytes = arguments.arena_mib << 20;
        Ok(Self { opened, pipeline, race, bare, store, curve, pool, into, hosts, compute, keys, arena_bytes })
    }

    fn layers(&self) -> u32 {
        self.hosts.len() as u32
    }

    fn contestants(&self) -> Vec<Contestant<'_>> {
        vec![
            ("pipeline", Box::new(|| self.pipelined())),
            ("known", Box::new(|| self.lands(&self.keys))),
            ("bare", Box::new(|| self.race.bare(self.bare, false))),
            ("first", Box::new(|| self.race.bare_first(self.bare))),
            ("copy", Box::new(|| self.timed(|stream| self.copy_all(stream)))),
            ("compute", Box::new(|| self.timed(|stream| self.compute_all(stream)))),
            ("serial", Box::new(|| self.serial())),
            ("again", Box::new(|| self.race.bare(self.bare, false))),
        ]
    }

    /// With headers to read, as of blocks that were not asked for since the store was opened.
    fn pipelined(&self) -> Result<Sample, Failure> {
        kvarts_contract::blocking::block_on(self.store.forget_headers()).map_err(Failure::user)?;
        self.lands(&self.keys)
    }

    /// Lands blocks in the pool, under an engine that computes.
    fn lands(&self, keys: &[BlockKey]) -> Result<Sample, Failure> {
        let stream = self.opened.device().stream().map_err(Failure::user)?;
        let read = &self.race.request;
        let request = LandRequest {
            namespace: read.namespace,
            group: read.group,
            coordinate: read.coordinate,
            keys: keys.to_vec(),
            layers: None,
            into: self.into.clone(),
            after: None,
            depth_bytes: self.arena_bytes,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let (cpu, begin) = (cpu_seconds(), Instant::now());
        let mut layers = self.pipeline.land(request).map_err(Failure::user)?;
        let mut first = 0.0;
        let end = loop {
            match layers.next_layer(&stream) {
                Next::Layer(layer) => {
                    if layer.layer == 0 {
                        // It is there, not only on its way: what follows is enqueued by others meanwhile.
                        drain(&*self.opened.device(), &stream).map_err(Failure::user)?;
                        first = begin.elapsed().as_secs_f64();
                    }
                    self.opened.compute(&stream, self.compute).map_err(Failure::user)?;
                }
                Next::Refused(error) => return Err(Failure::user(error)),
                Next::End(end) => break end,
            }
        };
        drain(&*self.opened.device(), &stream).map_err(Failure::user)?;
        let sample = Sample { seconds: begin.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first };
        match end.reason {
            None => Ok(sample),
            Some(reason) => {
                Err(Failure::User(format!("only {} layers arrived: {reason}", end.usable_layers)))
            }
        }
    }

    /// All of it read, then all of it copied, then all of it computed.
    fn serial(&self) -> Result<Sample, Failure> {
        let begin = Instant::now();
        self.race.engine(self.store)?;
        self.timed(|stream| self.copy_all(stream))?;
        self.timed(|stream| self.compute_all(stream))?;
        Ok(Sample { seconds: begin.elapsed().as_secs_f64(), ..Sample::default() })
    }

    fn timed(&self, work: impl Fn(&Stream) -> Result<(), Failure>) -> Result<Sample, Failure> {
        let device = self.opened.device();
        let stream = device.stream().map_err(Failure::user)?;
        let begin = Instant::now();
        work(&stream)?;
        drain(&*device, &stream).map_err(Failure::user)?;
        Ok(Sample { seconds: begin.elapsed().as_secs_f64(), ..Sample::default() })
    }

    fn copy_all(&self, stream: &Stream) -> Result<(), Failure> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (layer, host) in (0u32..).zip(&self.hosts) {
            self.into.pieces(layer, self.into.blocks(), &mut pieces);
            let (direction, memories) = (Direction::ToDevice, self.into.memories());
            let batch = Batch { direction, method: Method::Each, host, memories, pieces: &[] };
            copy_split(&*self.opened.device(), stream, &self.curve, &batch, &mut pieces)
                .map_err(Failure::user)?;
        }
        Ok(())
    }

    fn compute_all(&self, stream: &Stream) -> Result<(), Failure> {
        (0..self.layers()).try_for_each(|_| self.opened.compute(stream, self.compute).map_err(Failure::user))
    }

    /// Says what was found; gives pipeline_ratio and serial_ratio.
    fn tell(
        &self,
        model: &str,
        tokens: u64,
        rounds: &Rounds,
        report: &mut Report,
        rows: &mut Vec<serde_json::Value>,
    ) -> (Summary, Summary) {
        let per_round =
            |figure: &dyn Fn(usize) -> f64| summary((0..rounds.of("pipeline").len()).map(figure).collect());
        let seconds = |name: &'static str, round: usize| rounds.of(name)[round].seconds;
        let bound = |round: usize| {
            let parts = ["bare", "copy", "compute"].map(|name| seconds(name, round));
            // No more of a fill than this pipeline needed itself.
            let own = rounds.of("pipeline")[round].first;
            least(parts, seconds("first", round).min(own), self.layers())
        };
        let ratio = per_round(&|round| bound(round) / seconds("pipeline", round));
        let serial = rounds.speed("pipeline", "serial");
        let control = rounds.speed("again", "bare");
        let millis = |name: &'static str| rounds.figure(name, |sample| sample.seconds * 1e3);
        let mut pieces = Vec::new();
        self.into.pieces(0, self.into.blocks(), &mut pieces);
        let bytes: u64 = self.hosts.iter().map(|host| host.len() as u64).sum();
        let mut row = json!({
            "model": model,
            "tokens": tokens,
            "layers": self.layers(),
            "bytes": bytes,
            "pieces_of_first_layer": pieces.len(),
            "compute_us_per_layer": self.compute.as_micros() as u64,
            "pipeline_ratio": ratio.median,
            "pipeline_ratio_interval": [ratio.low, ratio.high],
            "serial_ratio": serial.median,
            "serial_ratio_interval": [serial.low, serial.high],
            "control": control.median,
            "first_layer_ms": rounds.figure("pipeline", |sample| sample.first * 1e3).median,
            "first_layer_known_ms": rounds.figure("known", |sample| sample.first * 1e3).median,
        });
        for name in ["pipeline", "bare", "first", "copy", "compute", "serial"] {
            row[format!("{name}_ms")] = json!(millis(name).median);
        }
        report.note(format!(
            "{model}: {tokens} tokens, {} layers: pipeline_ratio {}, serial_ratio {}; ms: read {}, copy {}, \
             compute {}, pipeline {}, serial {}",
            self.layers(),
            digits(ratio.median),
            digits(serial.median),
            digits(millis("bare").median),
            digits(millis("copy").median),
            digits(millis("compute").median),
            digits(millis("pipeline").median),
            digits(millis("serial").median),
        ));
        report.control(&format!("control_{model}"), control);
        rows.push(row);
        (ratio, serial)
    }
}

/// The least time of a pipeline of reads, copies and compute of `layers` layers, whose first is read in `first`: for each
/// part, what comes before its first layer, all of it, and what comes behind its last.
fn least([read, copy, compute]: [f64; 3], first: f64, layers: u32) -> f64 {
    let one = |all: f64| all / f64::from(layers.max(1));
    let first = first.min(read);
    let by_read = read + one(copy) + one(compute);
    let by_copy = first + copy + one(compute);
    let by_compute = first + one(copy) + compute;
    by_read.max(by_copy).max(by_compute)
}

/// An engine's paged pool: each part of each layer in a stretch of its own, and no two blocks in slots
/// that are neighbours.
struct EnginePool {
    shape: Arc<BlockShape>,
    memory: Memory,
    targets: Vec<PartTarget>,
    /// The slot of each block.
    slots: Vec<u32>,
}

impl EnginePool {
    fn new(opened: &Opened, subject: &Subject, blocks: u32) -> Result<Self, Failure> {
        let slots = u64::from(blocks) * 2;
        let (mut targets, mut next) = (Vec::new(), 0u64);
        for chunk in subject.shape.layers().iter().flat_map(|layer| &layer.chunks) {
            targets.push(PartTarget { memory: MemoryId(0), base: next, stride: chunk.bytes });
            next = (next + chunk.bytes * slots).next_multiple_of(256);
        }
        let memory = opened.device().allocate(next).map_err(Failure::user)?;
        // Every second slot, from the last to the first.
        let slots = (0..blocks).rev().map(|block| block * 2).collect();
        Ok(Self { shape: Arc::clone(&subject.shape), memory, targets, slots })
    }

    /// Where some of the blocks lie.
    fn of(&self, blocks: Range<usize>) -> Result<Destination, Failure> {
        let slots = self.slots.get(blocks).unwrap_or_default().to_vec();
        Destination::paged(&self.shape, vec![self.memory.clone()], &self.targets, slots)
            .map_err(Failure::user)
    }
}

/// Each layer's buffer of the engine's own pass.
fn layer_buffers(race: &Race, subject: &Subject) -> Vec<SharedBuf> {
    let (into, mut part) = (&race.request.into, 0u32);
    let mut buffers = Vec::new();
    for layer in subject.shape.layers() {
        let start = into.places().address(part, 0);
        buffers.extend(start.and_then(|at| into.slice(at, layer.bytes() * u64::from(into.block_count()))));
        part += layer.chunks.len() as u32;
    }
    buffers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_time_has_each_part_whole_and_one_layer_of_what_stands_around_it() {
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
        near(least([10.0, 1.0, 2.0], 0.5, 10), 10.3);
        near(least([1.0, 10.0, 2.0], 0.5, 10), 10.7);
        near(least([1.0, 2.0, 10.0], 0.5, 10), 10.7);
        // A first layer cannot take longer than all of them.
        near(least([1.0, 0.0, 5.0], 9.0, 10), 6.0);
        near(least([3.0, 2.0, 1.0], 3.0, 1), 6.0);
    }
}
