//! Restores in turns with bare requests for the same bytes, in ranges of 8 MiB; restores cut the end of theirs smaller.

use futures_util::{StreamExt, TryStreamExt};
use std::time::{Duration, Instant};

use kvarts_cold::Tier;
use kvarts_cold::format::names;
use kvarts_cold::promote::{PUT_BYTES, Wanted, restore_into};
use kvarts_cold::restore::{Fetch, FetchOptions, Fetched, fetch, plan_all};
use kvarts_contract::api::{
    BlockOutcome, DeleteRequest, Durability, KvStore, Origins, Placed, PutRequest, ReadEvent, ReadRequest,
    Target,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::BlockKey;
use kvarts_server::cold::{ColdTier, Wish};
use kvarts_terminal::Failure;
use object_store::ObjectStoreExt;

use super::ColdArgs;
use super::stage::{Stage, config};
use crate::pairs::{Contestant, LEAST_ROUNDS, Sample, summary, take_turns_within};
use crate::report::Report;
use crate::setup;

const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;
/// Where the packs are. A short name: a server may make file names of names.
pub(super) const BELOW: &str = "read";
/// Ranges at once of a tier.
const PARALLEL: usize = 16;
/// How long a read may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The blocks in the bucket, and which ranges bring them.
struct Ground<'a> {
    stage: &'a Stage,
    keys: Vec<BlockKey>,
    options: FetchOptions,
    ranges: Vec<(object_store::path::Path, std::ops::Range<u64>)>,
    into: SharedBuf,
}

/// What reads came to, beside their samples.
#[derive(Default)]
struct Told {
    /// Seconds until the first layer was there, of each read.
    first: Vec<f64>,
    /// Seconds until all of it was there.
    read: Vec<f64>,
    requests: u64,
    read_bytes: u64,
    /// Bytes that the read had from memory, not from the disk where they were stored meanwhile.
    given_bytes: u64,
}

pub(super) fn measure(stage: &Stage, arguments: &ColdArgs, report: &mut Report) -> Result<(), Failure> {
    let keys = stage.keys(arguments.mib);
    let bytes = keys.len() as u64 * stage.subject.shape.block_bytes();
    let tier = stage.tier(stage.bucket(BELOW)?);
    stage.push(&tier, &keys)?;
    // As a read by layers asks for it, not cut: the better for who only reads.
    let options = FetchOptions { parallel: PARALLEL, by_layers: true, ..FetchOptions::default() };
    let fetches = stage.wait(planned(stage, &tier, &keys, &options))?;
    let over_read = Fetched::planned(&fetches).over_read_bytes;
    let range = |fetch: &Fetch| {
        let name = names::pack(fetch.index.namespace_id(), fetch.index.id());
        (stage.path(BELOW, &name), fetch.range.clone())
    };
    let ranges = fetches.iter().map(range).collect();
    let into = setup::memory(bytes as usize)?;
    into.fill(0);
    let ground = Ground { stage, keys, options, ranges, into };
    report.fact("parallel", ground.options.parallel as u64);
    report.fact("ranges", ground.ranges.len() as u64);
    let bare = stage.bare()?;
    let mut told = Told::default();
    let contestants: Vec<Contestant<'_>> = vec![
        ("bare", Box::new(|| ground.bare(&bare))),
        ("restore", Box::new(|| ground.read(&mut told))),
        ("fetch", Box::new(|| ground.fetch())),
        ("put", Box::new(|| ground.put())),
        ("again", Box::new(|| ground.bare(&bare))),
    ];
    let rounds = take_turns_within(arguments.time(), LEAST_ROUNDS, arguments.common.pairs, contestants)?;
    report.fact("restore_pairs", rounds.count());
    report.median("restore_ratio", rounds.speed("restore", "bare"));
    // The first round does not count.
    let of = |seconds: &[f64]| seconds.iter().skip(1).copied().collect::<Vec<f64>>();
    let (read, first) = (of(&told.read), of(&told.first));
    let bare_seconds = rounds.of("bare").iter().map(|bare| bare.seconds);
    report.median("read_ratio", summary(bare_seconds.zip(&read).map(|(bare, read)| bare / read).collect()));
    report.median("fetch_ratio", rounds.speed("fetch", "bare"));
    report.control("control", rounds.speed("again", "bare"));
    report.median("first_layer_ms", summary(first.iter().map(|seconds| seconds * 1e3).collect()));
    report.number("over_read", (bytes + over_read) as f64 / bytes as f64);
    let gib = bytes as f64 / GIB;
    report.number("requests_per_gib", told.requests as f64 / gib);
    report.number("bare_requests_per_gib", ground.ranges.len() as f64 / gib);
    report.number("read_by_asked", told.read_bytes as f64 / bytes as f64);
    report.number("given_by_asked", told.given_bytes as f64 / bytes as f64);
    report.median("put_ratio", rounds.speed("put", "bare"));
    for name in ["bare", "restore", "fetch", "put"] {
        let rate = rounds.figure(name, |one| bytes as f64 / MIB / one.seconds);
        report.median(&format!("{name}_mib_s"), rate);
        report.median(&format!("{name}_cpu_s_per_gib"), rounds.figure(name, |one| one.cpu / gib));
    }
    report.median("restore_cpu_ratio", rounds.paired("restore", "bare", |a, b| a.cpu / b.cpu.max(1e-9)));
    report.median("fetch_cpu_ratio", rounds.paired("fetch", "bare", |a, b| a.cpu / b.cpu.max(1e-9)));
    stage.clean(BELOW)?;
    report.note(
        "each restore begins with empty caches and reads the manifest and the indexes; the CPU time excludes \
        the benchmark's own object storage",
    );
    Ok(())
}

/// Which ranges bring these blocks.
async fn planned(
    stage: &Stage,
    tier: &Tier,
    keys: &[BlockKey],
    options: &FetchOptions,
) -> Result<Vec<Fetch>, kvarts_cold::ColdError> {
    let column = (stage.subject.group, stage.subject.coordinate);
    let found = tier.locate(stage.subject.namespace, column, keys).await?;
    let there: Vec<_> =
        found.into_iter().enumerate().filter_map(|(ordinal, found)| Some((ordinal, found?))).collect();
    Ok(plan_all(&there, options))
}

/// Blocks that are wanted.
pub(super) fn wanted(stage: &Stage, keys: &[BlockKey]) -> Wanted {
    Wanted {
        namespace: stage.subject.namespace,
        group: stage.subject.group,
        coordinate: stage.subject.coordinate,
        keys: keys.to_vec(),
        durability: Durability::Relaxed,
    }
}

/// Restores blocks, every one of which has to be stored.
pub(super) fn restored(
    stage: &Stage,
    tier: &Tier,
    keys: &[BlockKey],
    options: &FetchOptions,
) -> Result<(), Failure> {
    let restored = stage.wait(restore_into(tier, stage.store(), &wanted(stage, keys), options))?;
    match restored.stored == keys.len() as u64 {
        true => Ok(()),
        false => Err(Failure::User(format!("{} of {} blocks were restored", restored.stored, keys.len()))),
    }
}

/// Takes blocks out of the store again.
pub(super) fn forget(stage: &Stage, keys: &[BlockKey]) -> Result<(), Failure> {
    let target = Target::Keys { column: None, keys: keys.to_vec() };
    let request = DeleteRequest { namespace: stage.subject.namespace, target, deadline: None };
    let gone = block_on(stage.store().delete(request)).map_err(Failure::user)?;
    gone.map(|_| ()).map_err(Failure::user)
}

impl Ground<'_> {
    /// The ranges alone, as many at once.
    fn bare(&self, client: &object_store::aws::AmazonS3) -> Result<Sample, Failure> {
        self.stage.timed(|| {
            let reads = self.ranges.iter().map(|(path, range)| client.get_range(path, range.clone()));
            let read = futures_util::stream::iter(reads).buffered(self.options.parallel);
            let read = read.try_fold(0, |sum, bytes| async move { Ok(sum + bytes.len() as u64) });
            let read = self.stage.runtime.block_on(read).map_err(Failure::user)?;
            let all: u64 = self.ranges.iter().map(|(_, range)| range.end - range.start).sum();
            if read == all {
                Ok(())
            } else {
                Err(Failure::User(format!("the bare requests returned {read} bytes instead of {all}")))
            }
        })
    }

    /// A read by layers through a server's tier that remembers nothing, until everything has come and is stored.
    fn read(&self, told: &mut Told) -> Result<Sample, Failure> {
        let (stage, subject, bucket) = (self.stage, &self.stage.subject, self.stage.bucket(BELOW)?);
        let over = async { ColdTier::over(bucket, &config(u64::MAX), stage.store(), None, 1) };
        let cold = stage.runtime.block_on(over).map_err(Failure::User)?;
        let blocks = self.keys.len();
        let (mut first, mut read) = (0.0, 0.0);
        let sample = stage.timed(|| {
            let begun = Instant::now();
            let into = Placed::blocks(&subject.shape, self.into.clone(), blocks as u32);
            let (namespace, group, coordinate) = (subject.namespace, subject.group, subject.coordinate);
            let into = into.map_err(Failure::user)?;
            let request = ReadRequest::new(namespace, group, coordinate, self.keys.clone(), into);
            let stream = stage.runtime.block_on(async {
                let (keys, block_bytes) = (&self.keys[..], subject.shape.block_bytes());
                let wish = Wish { namespace, group, coordinate, keys, block_bytes, by_layers: true };
                let coming = cold.bring(wish, PATIENCE, async |_: &[BlockKey]| Vec::new()).await;
                let coming = coming.unwrap_or_default();
                cold.read(request, &subject.shape, Origins::any(blocks), None, &coming).map_err(Failure::user)
            })?;
            let end = loop {
                match stream.next_blocking() {
                    ReadEvent::Layer { layer: 0, .. } => first = begun.elapsed().as_secs_f64(),
                    ReadEvent::End(end) => break end,
                    _ => {}
                }
            };
            read = begun.elapsed().as_secs_f64();
            if end.usable_blocks as usize != blocks {
                return Err(Failure::User(format!(
                    "the read did not return all blocks: {:?}",
                    cold.counted()
                )));
            }
            while cold.counted().under_way > 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
            Ok(())
        })?;
        told.first.push(first);
        told.read.push(read);
        let counted = cold.counted();
        (told.requests, told.read_bytes) = (counted.total.requests, counted.total.read_bytes);
        let given = counted.counts.iter().find(|(name, ..)| *name == "given_bytes");
        told.given_bytes = given.map_or(0, |(_, _, bytes)| *bytes);
        stage.runtime.block_on(cold.stop());
        forget(stage, &self.keys)?;
        Ok(sample)
    }

    /// The blocks into the store from memory, in puts of a restore's length, all asked for at once: no restore has them stored sooner.
    fn put(&self) -> Result<Sample, Failure> {
        let (stage, subject) = (self.stage, &self.stage.subject);
        let block_bytes = subject.shape.block_bytes() as usize;
        let sample = stage.timed(|| {
            let each = (PUT_BYTES / block_bytes).max(1);
            let mut puts = Vec::new();
            for (number, keys) in self.keys.chunks(each).enumerate() {
                let memory = self.into.slice(number * each * block_bytes, keys.len() * block_bytes);
                let memory = memory
                    .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a put"))?;
                let from =
                    Placed::blocks(&subject.shape, memory, keys.len() as u32).map_err(Failure::user)?;
                let (namespace, group, coordinate) = (subject.namespace, subject.group, subject.coordinate);
                let mut request = PutRequest::new(namespace, group, coordinate, keys.to_vec(), from);
                request.durability = Durability::Relaxed;
                puts.push(stage.store().put(request));
            }
            for put in puts {
                let reply = block_on(put).map_err(Failure::user)?.map_err(Failure::user)?;
                if reply.outcomes.iter().any(|outcome| *outcome != BlockOutcome::Stored) {
                    return Err(Failure::User(format!("not all blocks were stored: {:?}", reply.outcomes)));
                }
            }
            Ok(())
        })?;
        forget(stage, &self.keys)?;
        Ok(sample)
    }

    /// Verified and dropped.
    fn fetch(&self) -> Result<Sample, Failure> {
        let (stage, tier) = (self.stage, self.stage.tier(self.stage.bucket(BELOW)?));
        stage.timed(|| {
            let fetched = stage.wait(async {
                let fetches = planned(stage, &tier, &self.keys, &self.options).await?;
                Ok(fetch(&tier, fetches, &self.options, drop).await)
            })?;
            match fetched.bytes == self.keys.len() as u64 * stage.subject.shape.block_bytes() {
                true => Ok(()),
                false => Err(Failure::User(format!("the fetch did not return all blocks: {fetched:?}"))),
            }
        })
    }
}
