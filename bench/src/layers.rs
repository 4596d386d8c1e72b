//! `bench layers`: a long prefix read layer by layer, cold, every digest checked, beside a bare loop over the very
//! same extents that checks nothing.

use std::io::Write;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use kvarts_contract::api::{KvStore, Order, Placed, ReadEvent, ReadRequest, Verify};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::Region;
use kvarts_contract::class::Class;
use kvarts_layout::{BlockKey, Layout};
use kvarts_store::driver::Limits;
use kvarts_store::engine::{CompactOptions, CompactReport, Options, Store};

use super::bare::{Bare, Plan};
use super::fio::Fio;
use super::pairs::{Contestant, Rounds, Sample, cpu_seconds, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key};
use kvarts_terminal::Failure;

/// Gibibyte and mebibyte, as numbers to divide by.
const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;

/// The arguments of `bench layers`.
#[derive(Args, Debug)]
pub(super) struct LayersArgs {
    #[command(flatten)]
    common: Common,
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Tokens of a block [default: the model's default]
    #[arg(long)]
    block_tokens: Option<u32>,
    /// Size of the prefix in MiB
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    mib: u64,
    /// Maximum size of a record in MiB
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=64))]
    record_mib: u64,
    /// Layout on disk: full-block, layer-block or auto
    #[arg(long, default_value = "auto")]
    layout: LayoutChoice,
    /// Verification of digests: always, never, or sample:N for N of 1000 chunks
    #[arg(long, default_value = "always")]
    verify: VerifyChoice,
    /// Number of directories of the store, all inside the directory of the run
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    directories: u16,
    /// Store one block in each record, as agent sessions do
    #[arg(long)]
    fragmented: bool,
    /// Compact the fragmented store before the reads
    #[arg(long, requires = "fragmented")]
    compacted: bool,
}

/// `--layout`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayoutChoice(pub(super) Option<Layout>);

impl FromStr for LayoutChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self(None)),
            "full-block" => Ok(Self(Some(Layout::FullBlock))),
            "layer-block" => Ok(Self(Some(Layout::LayerBlock))),
            _ => Err(format!("the layout {name:?} does not exist: use auto, full-block or layer-block")),
        }
    }
}

/// A layout's name, as it is asked for.
pub(super) fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::FullBlock => "full-block",
        Layout::LayerBlock => "layer-block",
    }
}

#[derive(Clone, Copy, Debug)]
struct VerifyChoice(Verify);

impl FromStr for VerifyChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let sample = |text: &str| text.parse().ok().filter(|thousandths| *thousandths <= 1000);
        match (name, name.strip_prefix("sample:").and_then(sample)) {
            ("always", _) => Ok(Self(Verify::Always)),
            ("never", _) => Ok(Self(Verify::Never)),
            (_, Some(thousandths)) => Ok(Self(Verify::Sample(thousandths))),
            _ => Err(format!("the verification {name:?} does not exist: use always, never or sample:N")),
        }
    }
}

/// A prefix in a store, memory to read it into, and the same extents for the bare loop.
pub(super) struct Race {
    pub(super) request: ReadRequest,
    pub(super) whole: Plan,
    pub(super) first: Plan,
    pub(super) blocks: u32,
    /// Whether the memory is registered with the engine and with the bare loop.
    pub(super) registered: (bool, bool),
    arena: Arc<Region>,
}

impl Race {
    /// Stands both contestants at the start: one buffer for each layer, all in one registered region.
    pub(super) fn new(
        store: &Store,
        subject: &Subject,
        keys: &[BlockKey],
        (verify, directories): (Verify, u16),
        (bare, lanes): (&Bare, usize),
    ) -> Result<Self, Failure> {
        let blocks = keys.len() as u32;
        let page = |bytes: u64| bytes.next_multiple_of(4096);
        let lens: Vec<u64> =
            subject.shape.layers().iter().map(|layer| layer.bytes() * u64::from(blocks)).collect();
        let arena = setup::memory(lens.iter().map(|&len| page(len) as usize).sum())?;
        // Touched once, or the first pass would pay for the pages.
        arena.fill(0);
        let mut at = 0;
        let mut buffers = Vec::new();
        for len in lens {
            buffers.extend(arena.slice(at as usize, len as usize));
            at += page(len);
        }
        let scratch = setup::memory(64 << 20)?;
        scratch.fill(0);
        let engine = block_on(store.register_memory(arena.region())).is_ok();
        let both = bare.register(arena.region())? & bare.register(scratch.region())?;
        let request = ReadRequest {
            namespace: subject.namespace,
            group: subject.group,
            coordinate: subject.coordinate,
            keys: keys.to_vec(),
            layers: None,
            order: Order::Layers,
            into: Placed::layers(&subject.shape, buffers, blocks).map_err(Failure::user)?,
            verify,
            class: Class::Foreground,
            deadline: None,
        };
        let mut planned = store.planned_extents(&request).map_err(Failure::user)?;
        if directories > 1 {
            planned.iter_mut().for_each(|one| one.path = format!("{}/{}", one.directory, one.path));
        }
        let whole = Plan::new(&planned, lanes, u32::MAX, &scratch)?;
        let first = Plan::new(&planned, lanes, 1, &scratch)?;
        bare.open_all(whole.paths())?;
        Ok(Self {
            request,
            whole,
            first,
            blocks,
            registered: (engine, both),
            arena: Arc::clone(arena.region()),
        })
    }

    /// One pass of the engine.
    pub(super) fn engine(&self, store: &Store) -> Result<Sample, Failure> {
        block_on(store.forget_headers()).map_err(Failure::user)?;
        let request = self.request.clone();
        let (cpu, begin) = (cpu_seconds(), Instant::now());
        let stream = store.read(request).map_err(Failure::user)?;
        let mut first = 0.0;
        let end = loop {
            match stream.next_blocking() {
                ReadEvent::Layer { layer: 0, .. } => first = begin.elapsed().as_secs_f64(),
                ReadEvent::End(end) => break end,
                _ => {}
            }
        };
        let seconds = begin.elapsed().as_secs_f64();
        let cpu = cpu_seconds() - cpu;
        if end.usable_blocks != self.blocks {
            let why = end.failures.first().map(|(_, reason)| reason.to_string());
            return Err(Failure::User(format!(
                "only {} of {} blocks were read: {why:?}",
                end.usable_blocks, self.blocks
            )));
        }
        Ok(Sample { seconds, cpu, first })
    }

    /// One pass of the bare loop over everything.
    pub(super) fn bare(&self, bare: &Bare, digest: bool) -> Result<Sample, Failure> {
        let cpu = cpu_seconds();
        let seconds = bare.read(&self.whole, Limits::default().max_bytes_in_flight, digest)?;
        Ok(Sample { seconds, cpu: cpu_seconds() - cpu, first: 0.0 })
    }

    /// Gives back what the engine has registered.
    pub(super) fn leave(&self, store: &Store) {
        store.unregister_memory(&self.arena);
    }

    /// One pass of the bare loop over the first layer.
    pub(super) fn bare_first(&self, bare: &Bare) -> Result<Sample, Failure> {
        let seconds = bare.read(&self.first, Limits::default().max_bytes_in_flight, false)?;
        Ok(Sample { seconds, ..Sample::default() })
    }
}

/// Runs the benchmark.
pub(super) fn run(arguments: &LayersArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let spec = setup::model(&arguments.model)?;
    // A segment for each shard of each directory is what a store needs at least.
    let budget_bytes = (arguments.mib << 20) * 3 + (u64::from(arguments.directories) << 30);
    let scratch = Scratch::new(common, budget_bytes + (1 << 30))?;
    let options =
        Options { budget_bytes, record_bytes_max: arguments.record_mib << 20, ..Options::default() };
    let directories = match arguments.directories {
        1 => vec![scratch.path().to_owned()],
        several => (0..several).map(|one| scratch.path().join(one.to_string())).collect(),
    };
    let home = setup::open_all(common, directories, options)?;
    let subject = Subject::new(home.store(), &spec, arguments.block_tokens)?;
    let block_bytes = subject.shape.block_bytes();
    let blocks = ((arguments.mib << 20) / block_bytes).max(1);
    let keys: Vec<BlockKey> = (0..blocks).map(|number| key(1, number)).collect();
    let in_record = ((arguments.record_mib << 20) / block_bytes).max(1);
    let batch = if arguments.fragmented { 1 } else { in_record * 4 };
    subject.fill(home.store(), &keys, batch as usize, arguments.layout.0)?;
    let compacted = match arguments.compacted {
        true => block_on(home.store().compact(CompactOptions::default())).map_err(Failure::user)?,
        false => CompactReport::default(),
    };
    let lanes = usize::from(common.executors);
    let bare = Bare::start(common, scratch.path(), lanes)?;
    let verify = (arguments.verify.0, arguments.directories);
    let race = Race::new(home.store(), &subject, &keys, verify, (&bare, lanes))?;
    drop_caches(scratch.path());
    let fio = Fio::prepare(scratch.path(), &race.whole, Limits::default().max_bytes_in_flight)?;
    let mut contestants = contestants(home.store(), &race, &bare);
    if let Some(fio) = &fio {
        contestants.push(("fio", Box::new(|| fio.replay())));
    }
    let rounds = take_turns(common.pairs, contestants)?;
    let mut report = Report::new("layers");
    setup::describe(&mut report, common, &home)?;
    report.fact("model", subject.name.clone());
    report.fact("block_tokens", subject.block_tokens);
    report.fact("blocks", blocks);
    report.fact("block_bytes", block_bytes);
    report.fact("record_blocks", if arguments.fragmented { 1 } else { in_record.min(blocks) });
    report.fact(
        "layout",
        layout_name(arguments.layout.0.unwrap_or(Layout::auto(&subject.shape, in_record as u32))),
    );
    report.fact("directories", arguments.directories);
    report.fact("fragmented", arguments.fragmented);
    report.fact("records_merged", compacted.records_merged);
    report.fact("verify", format!("{:?}", arguments.verify.0).to_lowercase());
    fill_in(&mut report, &race, &rounds);
    match fio {
        Some(_) => report.median("bare_over_fio", rounds.speed("bare", "fio")),
        None => report.fact("bare_over_fio", serde_json::Value::Null),
    }
    drop(bare);
    drop(race);
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

fn contestants<'a>(store: &'a Store, race: &'a Race, bare: &'a Bare) -> Vec<Contestant<'a>> {
    vec![
        ("engine", Box::new(move || race.engine(store))),
        ("bare", Box::new(move || race.bare(bare, false))),
        ("again", Box::new(move || race.bare(bare, false))),
        ("checking", Box::new(move || race.bare(bare, true))),
        ("first", Box::new(move || race.bare_first(bare))),
    ]
}

fn fill_in(report: &mut Report, race: &Race, rounds: &Rounds) {
    let wanted: u64 = race.request.into.places().spans().iter().map(|span| span.end - span.start).sum();
    let (bytes, device) = (wanted as f64, race.whole.bytes as f64);
    let extents: usize = race.whole.lanes.iter().map(|lane| lane.len()).sum();
    report.fact("bytes", wanted);
    report.fact("extents", extents);
    report.fact("registered_engine", race.registered.0);
    report.fact("registered_bare", race.registered.1);
    report.median("engine_mib_s", rounds.figure("engine", |sample| bytes / MIB / sample.seconds));
    report.median("bare_mib_s", rounds.figure("bare", |sample| device / MIB / sample.seconds));
    report.median("ratio", rounds.speed("engine", "bare"));
    report.control("control", rounds.speed("again", "bare"));
    let gib = bytes / GIB;
    report.median("cpu_over_checking", rounds.paired("engine", "checking", |a, b| a.cpu / b.cpu));
    report.median("cpu_control", rounds.paired("again", "bare", |a, b| a.cpu / b.cpu));
    report.median("cpu_s_per_gib_engine", rounds.figure("engine", |sample| sample.cpu / gib));
    report.median("cpu_s_per_gib_bare", rounds.figure("bare", |sample| sample.cpu / gib));
    report.median("cpu_s_per_gib_checking", rounds.figure("checking", |sample| sample.cpu / gib));
    report.median("first_layer_ratio", rounds.paired("engine", "first", |a, b| a.first / b.seconds));
    report.median("first_layer_ms", rounds.figure("engine", |sample| sample.first * 1e3));
    report.median("bare_first_layer_ms", rounds.figure("first", |sample| sample.seconds * 1e3));
}

/// Lets the kernel drop what it has of the files. Direct reads pass the cache by anyway; this is for file systems
/// that have none.
fn drop_caches(below: &Path) {
    let Ok(entries) = std::fs::read_dir(below) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            drop_caches(&path);
        } else if let Ok(file) = std::fs::File::open(&path) {
            // Only a hint; the figures say what it was worth.
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }
}
