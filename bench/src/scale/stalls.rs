//! The second half of `bench scale`: how long a small read waits at most beside each piece of the engine's own work that could stop
//! an executor, in a store of a million records of one block each.
//!
//! A thread for each executor reads one block of 4 KiB there, again and again, while the work is done; what it waited at most says
//! how long that executor did nothing else. Beside nothing at all it is what the machine itself makes a thread wait.
//!
//! With more threads than processors, threads wait for a processor. So the report has two figures for each wait: the whole wait, and the wait
//! without the time in which the executor, or the reader, was ready to run and had no processor (the longer of the two times, because they may
//! overlap). The second figure is the engine's own. Another thread reads a page of a file of its own on the same file system now and then: what the disk makes a read wait, it
//! makes that one wait, too.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvarts_contract::api::{
    ContainsRequest, DeleteRequest, Durability, KvStore, MatchRequest, Order, Parent, Placed, Presence,
    PutRequest, ReadEvent, ReadRequest, Target, TtlRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{BlockKey, Geometry, Group, Requirements};
use kvarts_store::engine::{CompactOptions, Compaction, Limits, Options, Store};
use kvarts_store::home::Places;
use serde_json::{Value, json};

use super::bare_reader::BareReader;
use super::waiting::Waiting;
use crate::report::Report;
use crate::scratch::Scratch;
use crate::setup::{self, Common, Subject, key, progress};
use kvarts_terminal::Failure;

/// Bytes of a block; its record takes a page for its header and one for the block.
const BLOCK_BYTES: u64 = 4 << 10;
const RECORD_BYTES: u64 = 2 * BLOCK_BYTES;
/// Shards of a directory.
const SHARDS: u64 = 16;
/// Turns of a session, one record each.
const TURNS: u64 = 64;
/// Ranks of the model, each with a column of its own.
const COLUMNS: u16 = 24;
/// Keys of the largest delete.
const KEYS: u64 = 1 << 16;
/// Columns in which there are blocks under them.
const HELD: u16 = 2;
/// Keys of a look-up.
const LOOKED_UP: u64 = 4096;
const PUTS_MAX: usize = 256;
/// How long the control lasts.
const QUIET: Duration = Duration::from_secs(3);

/// What the store is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) records: u64,
    pub(super) directories: u16,
    pub(super) executors: u16,
}

/// What one read took, and how much of that was not a wait for a processor.
#[derive(Clone, Copy)]
struct Took {
    all: f64,
    own: f64,
}

/// What readers waited beside one piece of work.
struct Gap {
    beside: &'static str,
    seconds: f64,
    reads: usize,
    p50: f64,
    p999: f64,
    /// The longest on each executor.
    longest: Vec<f64>,
    /// The same less what was waited for a processor.
    own_p999: f64,
    own_longest: f64,
    /// What reads of a page of a file of their own waited meanwhile, without any store.
    bare_p999: f64,
    bare_longest: f64,
}

impl Gap {
    fn longest(&self) -> f64 {
        self.longest.iter().copied().fold(0.0, f64::max)
    }
}

/// Measures, and adds it to the report.
pub(super) fn measure(
    report: &mut Report,
    common: &Common,
    scratch: &Scratch,
    size: Size,
) -> Result<(), Failure> {
    let common = Common { executors: size.executors, ..common.clone() };
    let segment_bytes = 16 << 20;
    let budget = size.records * RECORD_BYTES * 3 / 2
        + (2 * KEYS * BLOCK_BYTES * 3 / 2)
        + 3 * u64::from(size.directories) * SHARDS * segment_bytes;
    let compaction = Compaction { every: None, ..Compaction::default() };
    let options = Options {
        budget_bytes: budget,
        budget_beyond_disk: true,
        segment_bytes,
        shards_per_directory: SHARDS as u32,
        record_bytes_max: 1 << 20,
        limits: Limits { compaction, ..Limits::default() },
        ..Options::default()
    };
    let part = scratch.part("stalls")?;
    let directories = (0..size.directories).map(|number| part.path().join(number.to_string())).collect();
    let last = part.path().join((size.directories - 1).to_string());
    let home = setup::open_all(&common, directories, options)?;
    let bench = Bench::new(home.store(), size, (home.places(), last))?;
    let (gaps, with_ttl) = bench.run()?;
    report.fact("stall_records", size.records);
    report.fact("stall_shards", u64::from(size.directories) * SHARDS);
    report.fact("stall_executors", size.executors);
    report.fact("stall_columns_with_blocks", HELD);
    let rows: Vec<Value> = gaps.iter().map(row).collect();
    for gap in &gaps {
        report.note(format!(
            "reads of 4 KiB (concurrent work: {}): longest {:.2} ms, p99.9 {:.2} ms; the same reads without \
            their waits for a CPU core: longest {:.2} ms, p99.9 {:.2} ms; bare reads: longest {:.2} ms ({} \
            reads in {:.1} s)",
            gap.beside,
            gap.longest() * 1e3,
            gap.p999 * 1e3,
            gap.own_longest * 1e3,
            gap.own_p999 * 1e3,
            gap.bare_longest * 1e3,
            gap.reads,
            gap.seconds
        ));
    }
    report.rows("stalls", rows);
    let worst = |of: fn(&Gap) -> f64| gaps.iter().skip(1).map(of).fold(0.0, f64::max);
    report.number("stall_p999_ms", worst(|gap| gap.p999) * 1e3);
    report.number("stall_longest_ms", worst(Gap::longest) * 1e3);
    report.number("stall_own_p999_ms", worst(|gap| gap.own_p999) * 1e3);
    report.number("stall_own_longest_ms", worst(|gap| gap.own_longest) * 1e3);
    report.number("stall_longest_ms_of_nothing", gaps.first().map_or(0.0, Gap::longest) * 1e3);
    report.number("ttl_look_up_ratio", with_ttl);
    home.close().map_err(Failure::user)
}

fn row(gap: &Gap) -> Value {
    json!({
        "beside": gap.beside, "seconds": gap.seconds, "reads": gap.reads, "p50_us": gap.p50 * 1e6,
        "bare_p999_ms": gap.bare_p999 * 1e3, "bare_longest_ms": gap.bare_longest * 1e3, "own_p999_ms": gap.own_p999 * 1e3, "own_longest_ms": gap.own_longest * 1e3, "p999_ms": gap.p999 * 1e3, "longest_ms": gap.longest.iter().map(|one| one * 1e3).collect::<Vec<_>>(),
    })
}

struct Bench<'a> {
    store: &'a Store,
    size: Size,
    /// The last directory of the store, and what notices that it is gone.
    last: (Places, PathBuf),
    bare: BareReader,
    /// One of each rank.
    ranks: Vec<Subject>,
    source: SharedBuf,
}

/// A model of one layer with a head for each rank, of which a block has 4 KiB.
fn geometry() -> Result<Geometry, Failure> {
    let kind = Kind::new("k").ok_or_else(|| Failure::user("the name of the kind is not valid"))?;
    let role = Role::Stream { bytes: BLOCK_BYTES / 16 * u64::from(COLUMNS), tokens: 1 };
    let part = PartGeometry { kind, role, heads: COLUMNS, align: 1, group: Group(0) };
    Geometry::new(&[part], &[vec![0]]).map_err(Failure::user)
}

impl<'a> Bench<'a> {
    fn new(store: &'a Store, size: Size, last: (Places, PathBuf)) -> Result<Self, Failure> {
        let geometry = geometry()?;
        let identity = setup::identity("stalls", 16, &geometry);
        let namespace = store.register(&identity, &geometry).map_err(Failure::user)?;
        let rank = |rank: u16| {
            let coordinate = geometry.coordinate(Group(0), COLUMNS, rank).map_err(Failure::user)?;
            let shape = Arc::new(geometry.shape(Group(0), coordinate, 16).map_err(Failure::user)?);
            let name = "stalls".to_owned();
            Ok(Subject { name, namespace, group: Group(0), coordinate, shape, block_tokens: 16 })
        };
        let ranks = (0..COLUMNS).map(rank).collect::<Result<_, Failure>>()?;
        let bare = BareReader::new(last.1.with_extension("bare"))?;
        Ok(Self { store, size, last, bare, ranks, source: setup::noise(64 * BLOCK_BYTES as usize)? })
    }

    fn run(&self) -> Result<(Vec<Gap>, f64), Failure> {
        self.fill()?;
        let targets = self.targets()?;
        let mut gaps = vec![self.beside("nothing", &targets, || {
            std::thread::sleep(QUIET);
            Ok(())
        })?];
        let sessions = self.sessions();
        gaps.push(self.beside(
            "a search for chains in all records, and the merges of the chains",
            &targets,
            || {
                let options = CompactOptions {
                    dead_thousandths: 1000,
                    merge_records_min: 8,
                    bytes_per_second: 64 << 20,
                    bytes_max: 256 << 20,
                    encode_cold_after: None,
                    encode_in_place: false,
                };
                block_on(self.store.compact(options)).map(drop).map_err(Failure::user)
            },
        )?);
        gaps.push(self.beside("a delete of one prefix", &targets, || {
            self.delete(Target::Prefix(session_key(0, 0))).map(drop)
        })?);
        gaps.push(self.beside("puts of one block each", &targets, || {
            (sessions..sessions + sessions.div_ceil(16))
                .try_for_each(|session| self.put_turns(session..session + 1))
        })?);
        let plain = self.look_up_seconds()?;
        gaps.push(self.beside("a delete of 65,536 keys in 24 columns", &targets, || {
            let keys = (0..KEYS).map(|number| key(9, number)).collect();
            self.delete(Target::Keys { column: None, keys }).map(drop)
        })?);
        let request = TtlRequest {
            namespace: self.ranks[0].namespace,
            group: Group(0),
            coordinate: self.ranks[0].coordinate,
            keys: &[session_key(1, 0)],
            ttl: Some(Duration::from_secs(86_400)),
        };
        self.store.set_ttl(&request).map_err(Failure::user)?;
        let mut with_ttl = 0.0;
        gaps.push(self.beside(
            "look-ups of 4,096 keys where one record has a time to live",
            &targets,
            || {
                with_ttl = self.look_up_seconds()? / plain;
                // Until there are enough reads for a percentile.
                let begun = Instant::now();
                while begun.elapsed() < QUIET {
                    self.look_up_seconds()?;
                }
                Ok(())
            },
        )?);
        // Else an executor would have no other one to read from.
        if self.size.directories > self.size.executors {
            self.take_away()?;
            gaps.push(self.beside("the return of a directory", &self.targets()?, || self.bring_back())?);
        }
        let used = self.store.stats().space.total.live;
        gaps.push(self.beside("a quota that is lowered to 15/16 of the stored bytes", &targets, || {
            let kept = block_on(self.store.set_quota(self.ranks[0].namespace, Some(used / 16 * 15)));
            kept.map(drop).map_err(Failure::user)
        })?);
        let begin = sessions + sessions.div_ceil(16);
        gaps.push(self.beside("puts of one block each by a tenant at its quota", &targets, || {
            (begin..begin + sessions.div_ceil(8)).try_for_each(|session| self.put_turns(session..session + 1))
        })?);
        progress("");
        Ok((gaps, with_ttl))
    }

    /// The last directory is out, as if its disk had been pulled, and the disk is there again.
    fn take_away(&self) -> Result<(), Failure> {
        let (places, directory) = &self.last;
        let away = directory.with_extension("away");
        std::fs::rename(directory, &away).map_err(Failure::user)?;
        let gone = places.look();
        std::fs::rename(&away, directory).map_err(Failure::user)?;
        match gone.is_empty() {
            true => Err(Failure::user("a renamed directory is still in use")),
            false => Ok(()),
        }
    }

    fn bring_back(&self) -> Result<(), Failure> {
        block_on(self.store.bring_back(self.size.directories - 1)).map(drop).map_err(Failure::user)
    }

    fn sessions(&self) -> u64 {
        self.size.records / TURNS
    }

    /// Sessions, all of which go on with one turn after the other: the turns of each lie in all shards, far from each other.
    fn fill(&self) -> Result<(), Failure> {
        for turn in 0..TURNS {
            progress(&format!("storing: turn {} of {TURNS} of {} sessions", turn + 1, self.sessions()));
            let turns = (0..self.sessions()).map(|session| (session, turn));
            self.put_all(turns)?;
        }
        for rank in &self.ranks[..usize::from(HELD)] {
            let keys: Vec<_> = (0..KEYS).map(|number| key(9, number)).collect();
            rank.fill(self.store, &keys, 64, None)?;
        }
        // Of the others there is one block each: their columns are known.
        self.ranks[usize::from(HELD)..]
            .iter()
            .try_for_each(|rank| rank.fill(self.store, &[key(9, 0)], 1, None))
    }

    fn put_turns(&self, sessions: std::ops::Range<u64>) -> Result<(), Failure> {
        self.put_all(sessions.flat_map(|session| (0..TURNS).map(move |turn| (session, turn))))
    }

    fn put_all(&self, turns: impl Iterator<Item = (u64, u64)>) -> Result<(), Failure> {
        let mut under_way = std::collections::VecDeque::new();
        let from = self.source.slice(0, BLOCK_BYTES as usize).ok_or_else(|| Failure::user("no memory"))?;
        for (session, turn) in turns {
            if under_way.len() >= PUTS_MAX
                && let Some(oldest) = under_way.pop_front()
            {
                setup::expect_stored(&block_on(oldest))?;
            }
            let before = turn.checked_sub(1);
            let parent = before.map_or(Parent::Root, |before| Parent::Key(session_key(session, before)));
            let request = self.ranks[0].put(vec![session_key(session, turn)], parent, from.clone(), None)?;
            under_way.push_back(self.store.put(PutRequest { durability: Durability::Relaxed, ..request }));
        }
        under_way.into_iter().try_for_each(|put| setup::expect_stored(&block_on(put)))
    }

    /// A key on each executor, of a block that stays: the first turns of sessions lie by their keys.
    fn targets(&self) -> Result<Vec<BlockKey>, Failure> {
        let (mut executors, mut targets) = (BTreeSet::new(), Vec::new());
        for session in 2..self.sessions() {
            let one = session_key(session, 0);
            if self.is_here(one)? && executors.insert(self.executor_of(&one)) {
                targets.push(one);
            }
        }
        match targets.len() == usize::from(self.size.executors) {
            true => Ok(targets),
            false => Err(Failure::user(
                "the number of records is too small: each executor needs at least \
                one record",
            )),
        }
    }

    fn executor_of(&self, key: &BlockKey) -> usize {
        self.store.executor_of(self.store.shard_of(key))
    }

    fn is_here(&self, key: BlockKey) -> Result<bool, Failure> {
        let Subject { namespace, group, coordinate, .. } = self.ranks[0];
        let request = ContainsRequest { namespace, group, coordinate, keys: &[key], lease: None };
        let reply = self.store.contains(&request).map_err(Failure::user)?;
        Ok(reply.presence.first() == Some(&Presence::Here))
    }

    fn delete(&self, target: Target) -> Result<u64, Failure> {
        let request = DeleteRequest { namespace: self.ranks[0].namespace, target, deadline: None };
        let answer = block_on(self.store.delete(request)).map_err(|_| {
            Failure::user(
                "the store has \
            stopped",
            )
        })?;
        answer.map(|reply| reply.blocks).map_err(Failure::user)
    }

    /// The time that look-ups of 4,096 keys take, the quickest of some.
    fn look_up_seconds(&self) -> Result<f64, Failure> {
        let rank = &self.ranks[0];
        let requirement = Requirement {
            group: Group(0),
            coordinates: vec![rank.coordinate],
            need: Need::All,
            absence: Absence::Required,
        };
        let requirements = Requirements::new(16, vec![requirement]).map_err(Failure::user)?;
        let sessions = 2..self.sessions().min(2 + LOOKED_UP / TURNS);
        let keys: Vec<_> =
            sessions.flat_map(|session| (0..TURNS).map(move |turn| session_key(session, turn))).collect();
        let mut quickest = f64::MAX;
        for _ in 0..200 {
            let request = MatchRequest {
                namespace: rank.namespace,
                keys: &keys,
                requirements: &requirements,
                recompute_tokens_max: 0,
                lease: None,
                plan: None,
            };
            let begin = Instant::now();
            let reply = self.store.match_prefix(&request).map_err(Failure::user)?;
            quickest = quickest.min(begin.elapsed().as_secs_f64());
            if reply.usable.longest.blocks == 0 {
                return Err(Failure::user("a stored prefix was not found"));
            }
        }
        Ok(quickest)
    }

    /// Does some work while a thread for each executor reads.
    fn beside(
        &self,
        beside: &'static str,
        targets: &[BlockKey],
        work: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Gap, Failure> {
        progress(&format!("reading beside {beside}"));
        let (done, begin) = (AtomicBool::new(false), Instant::now());
        let (read, mut bare) = std::thread::scope(|threads| {
            let done = &done;
            let readers: Vec<_> =
                targets.iter().map(|target| threads.spawn(move || self.read_until(done, *target))).collect();
            let bare = threads.spawn(move || self.bare.read_until(done));
            let worked = work();
            done.store(true, Ordering::Release);
            let read = readers.into_iter().map(|reader| match reader.join() {
                Ok(read) => read,
                Err(_) => Err(Failure::user("a reader failed")),
            });
            let read: Result<Vec<Vec<Took>>, Failure> = read.collect();
            let bare = bare.join().map_err(|_| Failure::user("the bare reader failed"));
            worked.and(read.and_then(|read| Ok((read, bare??))))
        })?;
        let seconds = begin.elapsed().as_secs_f64();
        let longest = read.iter().map(|one| one.iter().map(|took| took.all).fold(0.0, f64::max)).collect();
        let read: Vec<Took> = read.into_iter().flatten().collect();
        let sorted = |of: fn(&Took) -> f64| {
            let mut all: Vec<f64> = read.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let at = |all: &[f64], thousandths: usize| {
            all.get((all.len() * thousandths / 1000).min(all.len().saturating_sub(1))).copied().unwrap_or(0.0)
        };
        let (all, own) = (sorted(|took| took.all), sorted(|took| took.own));
        bare.sort_by(f64::total_cmp);
        Ok(Gap {
            beside,
            seconds,
            reads: all.len(),
            p50: at(&all, 500),
            p999: at(&all, 999),
            longest,
            own_p999: at(&own, 999),
            own_longest: at(&own, 1000),
            bare_p999: at(&bare, 999),
            bare_longest: at(&bare, 1000),
        })
    }

    fn read_until(&self, done: &AtomicBool, target: BlockKey) -> Result<Vec<Took>, Failure> {
        let executor = self.executor_of(&target);
        let waiting = [Waiting::of(&format!("kvarts-{executor}"))?, Waiting::own()?];
        let waited = || waiting.each_ref().map(Waiting::seconds);
        let (rank, into, mut took) = (&self.ranks[0], setup::memory(BLOCK_BYTES as usize)?, Vec::new());
        while !done.load(Ordering::Acquire) {
            let request = ReadRequest {
                namespace: rank.namespace,
                group: rank.group,
                coordinate: rank.coordinate,
                keys: vec![target],
                layers: None,
                order: Order::Blocks,
                into: Placed::blocks(&rank.shape, into.clone(), 1).map_err(Failure::user)?,
                verify: Verify::Always,
                class: Class::Foreground,
                deadline: None,
            };
            let (before, begin) = (waited(), Instant::now());
            let stream = self.store.read(request).map_err(Failure::user)?;
            let end = loop {
                if let ReadEvent::End(end) = stream.next_blocking() {
                    break end;
                }
            };
            let all = begin.elapsed().as_secs_f64();
            let longer =
                before.iter().zip(waited()).map(|(before, after)| after - before).fold(0.0, f64::max);
            took.push(Took { all, own: (all - longer).max(0.0) });
            if end.usable_blocks != 1 {
                return Err(Failure::user("a stored block was not read"));
            }
        }
        Ok(took)
    }
}

fn session_key(session: u64, turn: u64) -> BlockKey {
    key(1_000_000 + session, turn)
}
