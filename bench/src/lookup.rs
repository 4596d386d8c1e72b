//! `bench match`: the keys of a prompt looked up among a million blocks, beside probing a plain hash map in memory
//! that has the same keys.

use std::collections::HashMap;
use std::io::Write;
use std::time::Instant;

use clap::Args;
use kvarts_contract::api::{KvStore, MatchRequest, PlanTerms};
use kvarts_layout::prefix::{Absence, Need, Requirement, Requirements};
use kvarts_layout::{BlockKey, ModelSpec};
use kvarts_planner::cost::{Roofline, Times, device, model};
use kvarts_store::engine::{Options, Store};

use super::pairs::{Contestant, Sample, cpu_seconds, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key};
use kvarts_terminal::Failure;

/// Blocks of one put: sixteen records of 4,096.
pub(super) const BATCH: usize = 1 << 16;
/// Bytes of a block: what is measured has nothing to do with them.
pub(super) const BLOCK_BYTES: u64 = 64;

/// The arguments of `bench match`.
#[derive(Args, Debug)]
pub(super) struct MatchArgs {
    #[command(flatten)]
    common: Common,
    /// Blocks in the store
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u64).range(4096..=1 << 26))]
    blocks: u64,
    /// Number of keys in one lookup
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=65536))]
    keys: u64,
    /// Lookups in one round, each with another prompt
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
    lookups: u64,
}

/// Bytes that a store of `blocks` small blocks takes.
pub(super) fn room(blocks: u64) -> u64 {
    blocks * (BLOCK_BYTES + 64) * 2 + (1 << 30)
}

/// Fills a store with small blocks, as one long chain.
pub(super) fn fill(store: &Store, blocks: u64) -> Result<(Subject, Vec<BlockKey>), Failure> {
    let spec = ModelSpec::opaque("bench-pages", BLOCK_BYTES).map_err(Failure::user)?;
    let subject = Subject::new(store, &spec, None)?;
    let keys: Vec<BlockKey> = (0..blocks).map(|number| key(7, number)).collect();
    subject.fill(store, &keys, BATCH, None)?;
    Ok((subject, keys))
}

/// Runs the benchmark.
pub(super) fn run(arguments: &MatchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let scratch = Scratch::new(common, room(arguments.blocks))?;
    let options = Options { budget_bytes: room(arguments.blocks), ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let begin = Instant::now();
    let (subject, keys) = fill(home.store(), arguments.blocks)?;
    let fill_seconds = begin.elapsed().as_secs_f64();
    let requirement = Requirement {
        group: subject.group,
        coordinates: vec![subject.coordinate],
        need: Need::All,
        absence: Absence::Required,
    };
    let requirements = Requirements::new(subject.block_tokens, vec![requirement]).map_err(Failure::user)?;
    let mut map: HashMap<[u8; 32], u64> = HashMap::with_capacity(keys.len());
    map.extend(keys.iter().zip(0..).map(|(key, place)| (key.0, place)));
    let prompts = prompts(&keys, arguments);
    let times: Times =
        model("llama-3.1-8b").zip(device("h100")).map(|(m, d)| Roofline::new(m, d, 1).into()).ok_or_else(
            || Failure::user("the planner has no compute times of the model llama-3.1-8b on the device h100"),
        )?;
    let found = |keys: &[BlockKey], is_planned: bool| {
        let prompt_tokens = keys.len() as u64 * u64::from(subject.block_tokens) + 1;
        let terms = PlanTerms::new(prompt_tokens, &times);
        let request = MatchRequest {
            namespace: subject.namespace,
            keys,
            requirements: &requirements,
            recompute_tokens_max: 0,
            lease: None,
            plan: is_planned.then_some(terms),
        };
        let reply = home.store().match_prefix(&request).map_err(Failure::user)?;
        Ok(reply.usable.longest.blocks as usize)
    };
    let engine = || timed(&prompts, |keys| found(keys, false));
    let planned = || timed(&prompts, |keys| found(keys, true));
    let plain = || timed(&prompts, |keys| Ok(keys.iter().filter(|key| map.contains_key(&key.0)).count()));
    let contestants: Vec<Contestant<'_>> = vec![
        ("engine", Box::new(engine)),
        ("planned", Box::new(planned)),
        ("map", Box::new(plain)),
        ("again", Box::new(plain)),
    ];
    let rounds = take_turns(common.pairs, contestants)?;
    let mut report = Report::new("match");
    setup::describe(&mut report, common, &home)?;
    report.fact("blocks", arguments.blocks);
    report.fact("keys", arguments.keys);
    report.fact("lookups_per_round", arguments.lookups);
    let each = 1e6 / arguments.lookups as f64;
    report.median("match_us", rounds.figure("engine", |sample| sample.seconds * each));
    report.median(
        "plan_us",
        rounds.paired("planned", "engine", |planned, engine| (planned.seconds - engine.seconds) * each),
    );
    report.median("map_us", rounds.figure("map", |sample| sample.seconds * each));
    report.median("ratio", rounds.paired("engine", "map", |engine, map| engine.seconds / map.seconds));
    report.control("control", rounds.paired("again", "map", |again, map| again.seconds / map.seconds));
    let index = home.store().stats().index;
    report.number("index_bytes_per_block", index.bytes_per_block);
    report.number("fill_seconds", fill_seconds);
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

/// Runs of consecutive keys, begun at random places.
fn prompts<'a>(keys: &'a [BlockKey], arguments: &MatchArgs) -> Vec<&'a [BlockKey]> {
    let len = (arguments.keys as usize).min(keys.len());
    let mut state = 11;
    let places = keys.len() - len + 1;
    (0..arguments.lookups)
        .map(|_| {
            let at = (setup::mix(&mut state) % places as u64) as usize;
            &keys[at..at + len]
        })
        .collect()
}

fn timed(
    prompts: &[&[BlockKey]],
    mut look: impl FnMut(&[BlockKey]) -> Result<usize, Failure>,
) -> Result<Sample, Failure> {
    let (cpu, begin) = (cpu_seconds(), Instant::now());
    for keys in prompts {
        let found = look(keys)?;
        if found != keys.len() {
            return Err(Failure::User(format!("only {found} of {} keys were found", keys.len())));
        }
    }
    Ok(Sample { seconds: begin.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first: 0.0 })
}
