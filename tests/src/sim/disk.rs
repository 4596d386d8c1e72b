//! The simulated disk: operations under way, the order in which they complete, and what goes wrong with them.
//!
//! An operation takes effect at the moment it completes, which is a seeded time after its submission; so
//! completions come out of order, and what is under way at a power cut may be there afterwards, or not, or torn.
//! Any number of [`SimIo`] share one disk, as executors share a machine. Time passes only when the
//! [world](super::world), or a [`SimIo`] that parks, moves the clock.
//!
//! Stricter than a kernel where a program could get away with a mistake: direct I/O that is not aligned to 4 KiB
//! is `EINVAL`, and a name is durable only after its directory was synced.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::{
    buffers::{Region, SharedBuf, region},
    io_error::{DirId, FileId},
};
use kvarts_store::io::{Completion, Computation, Io, IoFacts, MetaOp, Op, OpenMode, Reply, Token, Unpark};

use super::clock::SimClock;
use super::crash::CrashState;
use super::faults::{Effect, OpKind, Rule, When};
use super::log::{Event, EventLog};
use super::media::errno::{EBADF, EINVAL, EIO};
use super::media::{FileChange, Ino, Media, SECTOR};
use super::rng::{Rng, Seed};

/// How long operations take: from the least to the most, in microseconds, evenly spread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Latency {
    /// Reads.
    pub read: (u64, u64),
    /// Writes.
    pub write: (u64, u64),
    /// Flushes, and what a write with `sync` takes on top.
    pub flush: (u64, u64),
    /// Everything else.
    pub meta: (u64, u64),
}

impl Default for Latency {
    /// About a good NVMe drive.
    fn default() -> Self {
        Self { read: (60, 200), write: (15, 100), flush: (100, 900), meta: (20, 400) }
    }
}

impl Latency {
    fn draw(&self, op: &Op, rng: &mut Rng) -> Duration {
        let mut between =
            |(low, high): (u64, u64)| Duration::from_nanos(rng.between(low * 1000, high * 1000));
        match op {
            Op::Read { .. } => between(self.read),
            Op::Write { sync: true, .. } | Op::WriteV { sync: true, .. } => {
                between(self.write) + between(self.flush)
            }
            Op::Write { .. } | Op::WriteV { .. } => between(self.write),
            Op::Flush { .. } => between(self.flush),
            Op::Meta(_) => between(self.meta),
        }
    }
}

/// What a disk is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskConfig {
    /// How many directories the store is opened with.
    pub dirs: u16,
    /// Bytes of the file system that holds them all.
    pub capacity: u64,
    /// How long operations take.
    pub latency: Latency,
}

impl Default for DiskConfig {
    fn default() -> Self {
        Self { dirs: 1, capacity: 64 << 20, latency: Latency::default() }
    }
}

/// An operation that was submitted and has not completed.
#[derive(Debug)]
struct Pending {
    seq: u64,
    io: usize,
    token: Token,
    op: Op,
    kind: OpKind,
    target: Result<Option<OpenFile>, i32>,
    name: Arc<str>,
    effect: Option<Effect>,
    /// Changes up to this one had completed when it was submitted.
    bound: u64,
}

#[derive(Clone, Debug)]
struct OpenFile {
    ino: Ino,
    dir: DirId,
    mode: OpenMode,
    name: Arc<str>,
}

#[derive(Default, Debug)]
struct IoState {
    files: BTreeMap<u64, OpenFile>,
    next_file: u64,
    ready: Vec<Completion>,
    unparked: bool,
    dead: bool,
}

struct Machine {
    media: Media,
    latency: Latency,
    clock: Arc<SimClock>,
    latencies: Rng,
    decisions: Rng,
    log: EventLog,
    /// Each with how many operations it has counted, and how many it has struck.
    rules: Vec<(Rule, u64, u64)>,
    struck: u64,
    /// Files whose bytes are other than a program believes.
    belied: BTreeSet<Ino>,
    ios: Vec<IoState>,
    under_way: BTreeMap<(Nanos, u64), Pending>,
    stuck: Vec<Pending>,
    submitted: u64,
    completed: u64,
    /// What is to be computed once nothing of this is locked: it is the engine's own code.
    computed: Vec<Computation>,
}

/// A disk, and the kernel in front of it. Clones are the same disk.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<Machine>>);

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = self.lock();
        f.debug_struct("SimDisk")
            .field("submitted", &machine.submitted)
            .field("completed", &machine.completed)
            .finish_non_exhaustive()
    }
}

impl SimDisk {
    /// An empty disk.
    pub fn new(config: &DiskConfig, clock: Arc<SimClock>, seed: Seed) -> Self {
        Self::with_media(Media::new(config.dirs, config.capacity), config.latency, clock, seed)
    }

    /// A disk that has something on it already.
    pub fn with_media(media: Media, latency: Latency, clock: Arc<SimClock>, seed: Seed) -> Self {
        Self(Arc::new(Mutex::new(Machine {
            media,
            latency,
            clock,
            latencies: seed.child("latencies").rng(),
            decisions: seed.child("decisions").rng(),
            log: EventLog::default(),
            rules: Vec::new(),
            struck: 0,
            belied: BTreeSet::new(),
            ios: Vec::new(),
            under_way: BTreeMap::new(),
            stuck: Vec::new(),
            submitted: 0,
            completed: 0,
            computed: Vec::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Machine> {
        // A panic of a failed test must not hide behind a poisoned lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more executor's way to this disk.
    pub fn io(&self) -> SimIo {
        let mut machine = self.lock();
        machine.ios.push(IoState::default());
        SimIo { disk: self.clone(), id: machine.ios.len() - 1 }
    }

    /// Lets something go wrong from now on. Of several rules that strike one operation, the first injected wins.
    pub fn inject(&self, rule: Rule) {
        self.lock().rules.push((rule, 0, 0));
    }

    /// Forgets all rules: the disk is well again. What is stuck stays stuck.
    pub fn heal(&self) {
        self.lock().rules.clear();
    }

    /// Forgets the rules of one device: it is well again. What is stuck stays stuck.
    pub fn heal_one(&self, dir: DirId) {
        self.lock().rules.retain(|(rule, ..)| rule.dir != Some(dir));
    }

    /// How often rules have struck.
    pub fn struck(&self) -> u64 {
        self.lock().struck
    }

    /// How often those rules have struck that were injected in these places since the last [`SimDisk::heal`].
    pub fn struck_by(&self, which: std::ops::Range<usize>) -> u64 {
        self.lock().rules.get(which).unwrap_or_default().iter().map(|(.., struck)| struck).sum()
    }

    /// The files in which rules changed, lost or misdirected writes, by the names that they have now, each after the
    /// number of its directory and a slash.
    pub fn struck_files(&self) -> BTreeSet<String> {
        let machine = self.lock();
        machine.media.names(&machine.belied)
    }

    /// Changes how long operations take, from now on.
    pub fn set_latency(&self, latency: Latency) {
        self.lock().latency = latency;
    }

    /// Changes how many bytes the file system has.
    pub fn set_capacity(&self, capacity: u64) {
        self.lock().media.set_capacity(capacity);
    }

    /// How many operations were submitted, and how many of them have completed.
    pub fn operations(&self) -> (u64, u64) {
        let machine = self.lock();
        (machine.submitted, machine.completed)
    }

    /// How many operations are under way, those that never end included.
    pub fn under_way(&self) -> usize {
        let machine = self.lock();
        machine.under_way.len() + machine.stuck.len()
    }

    /// When the next operation completes.
    pub fn next_completion(&self) -> Option<Nanos> {
        self.lock().under_way.first_key_value().map(|((due, _), _)| *due)
    }

    /// Completes one operation whose time has come; says whether there was one.
    pub fn complete_one(&self) -> bool {
        let (completed, computed) = {
            let mut machine = self.lock();
            (machine.complete_one(), std::mem::take(&mut machine.computed))
        };
        computed.iter().for_each(Computation::run);
        completed
    }

    /// The disk's content as programs see it now, volatile changes included.
    pub fn media(&self) -> Media {
        self.lock().media.clone()
    }

    /// Changes the content behind everybody's back.
    pub fn tamper<T>(&self, with: impl FnOnce(&mut Media) -> T) -> T {
        with(&mut self.lock().media)
    }

    /// What a power cut at this moment can leave behind. Operations that are under way may have happened.
    pub fn crash_state(&self) -> CrashState {
        let machine = self.lock();
        let mut media = machine.media.clone();
        for pending in machine.in_order() {
            pending.perhaps(&mut media);
        }
        CrashState::new(media)
    }

    /// What is left when the process is killed at this moment and the machine runs on: everything that completed,
    /// as volatile as before, and of what is under way each with the odds of a coin.
    pub fn after_kill(&self) -> Media {
        let mut machine = self.lock();
        let mut media = machine.media.clone();
        let mut coins = Seed(machine.decisions.next_u64()).rng();
        for pending in machine.in_order() {
            if coins.coin() {
                pending.perhaps(&mut media);
            }
        }
        media.close_all();
        media
    }

    /// Nothing that runs now reaches the disk any more: its process is gone.
    pub fn disconnect(&self) {
        let mut machine = self.lock();
        for io in &mut machine.ios {
            io.dead = true;
            io.ready.clear();
        }
    }

    /// Adds a line of the harness's own to the event log.
    pub fn remark(&self, what: &'static str, name: &str, number: i64) {
        let mut machine = self.lock();
        let time = machine.clock.now();
        let (offset, len, decision) = (0, 0, "");
        machine.log.push(Event {
            step: 0,
            time,
            op: what,
            name: name.into(),
            offset,
            len,
            decision,
            result: number,
        });
    }

    /// A copy of the event log.
    pub fn log(&self) -> EventLog {
        self.lock().log.clone()
    }
}

impl Pending {
    fn range(&self) -> (u64, u64) {
        let sum = |bufs: &[SharedBuf]| bufs.iter().map(|buf| buf.len() as u64).sum();
        match &self.op {
            Op::Read { offset, into, .. } => (*offset, into.len() as u64),
            Op::Write { offset, from, .. } => (*offset, from.len() as u64),
            Op::WriteV { offset, from, .. } => (*offset, sum(from)),
            Op::Flush { .. } => (0, 0),
            Op::Meta(op) => match op {
                MetaOp::Allocate { offset, len, .. } | MetaOp::PunchHole { offset, len, .. } => {
                    (*offset, *len)
                }
                MetaOp::Truncate { len, .. } => (0, *len),
                _ => (0, 0),
            },
        }
    }

    fn buffers(&self) -> &[SharedBuf] {
        match &self.op {
            Op::Read { into: one, .. } | Op::Write { from: one, .. } => std::slice::from_ref(one),
            Op::WriteV { from: all, .. } => all,
            Op::Flush { .. } | Op::Meta(_) => &[],
        }
    }

    fn sync(&self) -> bool {
        matches!(self.op, Op::Write { sync: true, .. } | Op::WriteV { sync: true, .. })
    }

    /// The first `len` bytes of what is to be written.
    fn bytes(&self, len: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.buffers().iter().for_each(|buf| bytes.extend_from_slice(&buf.to_vec()));
        bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
        bytes
    }

    /// Lets its change happen without telling the caller, volatile even if it was to be durable. A change that cannot
    /// happen (no space, no such name) does not.
    fn perhaps(&self, media: &mut Media) {
        let Ok(target) = &self.target else { return };
        if matches!(self.effect, Some(Effect::Errno(_) | Effect::Lost | Effect::Misdirect))
            || self.flaw().is_some()
        {
            return;
        }
        let (offset, len) = self.range();
        let _ = match (self.kind, target) {
            (OpKind::Write, Some(file)) if file.mode.write => {
                media.write(file.ino, offset, &self.bytes(len), false)
            }
            (OpKind::Write | OpKind::Flush | OpKind::SyncDir, _) => Ok(()),
            _ => shape_or_name(self, media).map(drop),
        };
    }

    /// What the kernel would refuse before it starts.
    fn flaw(&self) -> Option<i32> {
        let target = match &self.target {
            Ok(target) => target.as_ref(),
            Err(errno) => return Some(*errno),
        };
        let (offset, len) = self.range();
        if offset.checked_add(len).is_none_or(|end| end > i64::MAX.cast_unsigned()) {
            return Some(EINVAL);
        }
        let file = target?;
        let aligned = |buf: &SharedBuf| buf.is_aligned();
        let writes = matches!(self.kind, OpKind::Write | OpKind::Allocate | OpKind::Punch | OpKind::Truncate);
        if writes && !file.mode.write {
            return Some(EBADF);
        }
        let page_aligned = offset.is_multiple_of(region::PAGE as u64) && self.buffers().iter().all(aligned);
        let data = matches!(self.kind, OpKind::Read | OpKind::Write);
        (data && file.mode.direct && !page_aligned).then_some(EINVAL)
    }
}

/// Carries out a change of names or of a file's shape; says what the file opened is, if one was.
fn shape_or_name(pending: &Pending, media: &mut Media) -> Result<Option<(Ino, OpenMode)>, i32> {
    let Op::Meta(op) = &pending.op else { return Ok(None) };
    let ino = pending.target.as_ref().ok().and_then(Option::as_ref).map_or(Ino::MAX, |file| file.ino);
    match op {
        MetaOp::Open { name, mode } => {
            return media.open(name.dir, &name.path, mode.create).map(|ino| Some((ino, *mode)));
        }
        MetaOp::Allocate { offset, len, .. } => media.allocate(ino, *offset, *len)?,
        MetaOp::PunchHole { offset, len, .. } => {
            media.punch(ino, *offset, *len)?;
        }
        MetaOp::Truncate { len, .. } => media.change_file(ino, FileChange::Truncate { len: *len })?,
        MetaOp::Rename { from, to } => media.rename(from.dir, &from.path, (to.dir, &to.path))?,
        MetaOp::Remove { name } => media.remove(name.dir, &name.path)?,
        MetaOp::MakeDir { name } => media.make_dir(name.dir, &name.path)?,
        MetaOp::Close { .. } | MetaOp::SyncDir { .. } | MetaOp::List { .. } | MetaOp::Reopen { .. } => {}
        MetaOp::Stat { .. } | MetaOp::Space { .. } | MetaOp::Holes { .. } | MetaOp::Compute { .. } => {}
    }
    Ok(None)
}

/// What an operation is about: its open file, or its directory and name.
fn subject(op: &Op, io: &IoState) -> (Result<Option<OpenFile>, i32>, Option<DirId>, Arc<str>) {
    let file = |file: &FileId| match io.files.get(&file.0) {
        Some(open) => (Ok(Some(open.clone())), Some(open.dir), Arc::clone(&open.name)),
        None => (Err(EBADF), None, "?".into()),
    };
    match op {
        Op::Read { file: at, .. } | Op::Flush { file: at } => file(at),
        Op::Write { file: at, .. } | Op::WriteV { file: at, .. } => file(at),
        Op::Meta(op) => match op {
            MetaOp::Close { file: at } | MetaOp::Allocate { file: at, .. } => file(at),
            MetaOp::PunchHole { file: at, .. } | MetaOp::Truncate { file: at, .. } => file(at),
            MetaOp::Stat { file: at } | MetaOp::Holes { file: at, .. } => file(at),
            MetaOp::Open { name, .. } | MetaOp::Remove { name } | MetaOp::MakeDir { name } => named(name),
            MetaOp::SyncDir { name } | MetaOp::List { name } => named(name),
            MetaOp::Rename { from, to } => {
                let text = format!("{}/{} to {}", from.dir.0, from.path, to.path);
                (Ok(None), Some(from.dir), text.into())
            }
            MetaOp::Space { dir } | MetaOp::Reopen { dir } | MetaOp::Compute { dir, .. } => {
                (Ok(None), Some(*dir), dir.0.to_string().into())
            }
        },
    }
}

fn named(name: &kvarts_contract::io_error::Name) -> (Result<Option<OpenFile>, i32>, Option<DirId>, Arc<str>) {
    (Ok(None), Some(name.dir), format!("{}/{}", name.dir.0, name.path).into())
}

impl Machine {
    /// Lets time pass until there is something to reap for this way to the disk, or it is woken, or this time is over.
    fn park(&mut self, id: usize, timeout: Option<Duration>) {
        let end = timeout.map(|timeout| self.clock.now().plus(timeout));
        loop {
            let io = &mut self.ios[id];
            if std::mem::take(&mut io.unparked) || !io.ready.is_empty() || self.complete_one() {
                return;
            }
            let next = self.under_way.first_key_value().map(|((due, _), _)| *due);
            match (next, end) {
                (Some(next), None) => self.clock.advance_to(next),
                (Some(next), Some(end)) if next <= end => self.clock.advance_to(next),
                (_, Some(end)) => return self.clock.advance_to(end),
                (None, None) => panic!("asleep for ever: no operation is under way and no timer is set"),
            }
        }
    }

    /// What is under way, in the order in which it was submitted.
    fn in_order(&self) -> Vec<&Pending> {
        let mut all: Vec<_> = self.under_way.values().chain(&self.stuck).collect();
        all.sort_unstable_by_key(|pending| pending.seq);
        all
    }

    fn submit(&mut self, io: usize, token: Token, op: Op) {
        if self.ios[io].dead {
            return;
        }
        self.submitted += 1;
        let kind = OpKind::of(&op);
        let (target, dir, name) = subject(&op, &self.ios[io]);
        if kind == OpKind::Close
            && let Op::Meta(MetaOp::Close { file }) = &op
        {
            // The number is free at once; what was submitted before still has the file.
            self.ios[io].files.remove(&file.0);
        }
        let (seq, bound) = (self.submitted, self.media.seq);
        let mut pending = Pending { seq, io, token, op, kind, target, name, effect: None, bound };
        let (offset, len) = pending.range();
        let allocating = matches!(kind, OpKind::Write | OpKind::Allocate)
            && pending.flaw().is_none()
            && matches!(&pending.target, Ok(Some(file))
                if self.media.file(file.ino).is_ok_and(|file| file.current.missing(offset, len) > 0));
        let mut due = self.clock.now().plus(self.latency.draw(&pending.op, &mut self.latencies));
        pending.effect = self.strike(kind, (dir, &pending.name), allocating);
        match pending.effect {
            Some(Effect::Stuck) => {
                self.note(&pending, "stuck", 0);
                self.stuck.push(pending);
                return;
            }
            Some(Effect::Delay(by)) => due = due.plus(by),
            _ => {}
        }
        self.under_way.insert((due, seq), pending);
    }

    /// Lets every rule count the operation; the first that strikes decides.
    fn strike(&mut self, kind: OpKind, place: (Option<DirId>, &str), allocating: bool) -> Option<Effect> {
        let mut struck = None;
        for (rule, seen, hits) in &mut self.rules {
            if !rule.applies(kind, place, allocating) {
                continue;
            }
            *seen += 1;
            let strikes = match rule.when {
                When::Nth(n) => *seen == n,
                When::From(n) => *seen >= n,
                When::Odds(per_million) => self.decisions.odds(per_million),
            };
            if strikes && struck.is_none() {
                struck = Some(rule.effect);
                *hits += 1;
                self.struck += 1;
            }
        }
        struck
    }

    fn note(&mut self, pending: &Pending, decision: &'static str, result: i64) {
        let (offset, len) = pending.range();
        let (op, name, time) = (pending.kind.name(), Arc::clone(&pending.name), self.clock.now());
        self.log.push(Event { step: 0, time, op, name, offset, len, decision, result });
    }

    fn complete_one(&mut self) -> bool {
        let now = self.clock.now();
        let Some(first) = self.under_way.first_entry().filter(|first| first.key().0 <= now) else {
            return false;
        };
        let pending = first.remove();
        let (result, reply) = match self.perform(&pending) {
            Ok((moved, reply)) => (i32::try_from(moved).unwrap_or(i32::MAX), reply),
            Err(errno) => (-errno, None),
        };
        self.completed += 1;
        self.note(&pending, pending.effect.map_or("ok", Effect::name), result.into());
        let io = &mut self.ios[pending.io];
        if !io.dead {
            let token = pending.token;
            if pending.effect == Some(Effect::Twice) {
                io.ready.push(Completion { token, result, reply: reply.clone() });
            }
            io.ready.push(Completion { token, result, reply });
        }
        true
    }

    fn perform(&mut self, pending: &Pending) -> Result<(u64, Option<Reply>), i32> {
        match pending.effect {
            Some(Effect::Errno(errno)) => return Err(errno),
            Some(Effect::DropDirty) => {
                if let Ok(Some(file)) = &pending.target {
                    self.media.flush(file.ino, pending.bound, true)?;
                }
                return Err(EIO);
            }
            _ => {}
        }
        if let Some(errno) = pending.flaw() {
            return Err(errno);
        }
        let lost = pending.effect == Some(Effect::Lost);
        match (&pending.target, pending.kind) {
            (Ok(Some(file)), OpKind::Read) => self.read(pending, file.ino).map(|moved| (moved, None)),
            (Ok(Some(file)), OpKind::Write) => self.write(pending, file.ino).map(|moved| (moved, None)),
            (Ok(Some(file)), OpKind::Flush) if !lost => {
                self.media.flush(file.ino, pending.bound, false).map(|()| (0, None))
            }
            (_, OpKind::Flush) => Ok((0, None)),
            (_, kind) if lost && kind != OpKind::Open && kind != OpKind::Close => Ok((0, None)),
            _ => self.meta(pending).map(|reply| (0, reply)),
        }
    }

    /// How many of `len` bytes a read or write is to move.
    fn share(&mut self, effect: Option<Effect>, len: u64) -> u64 {
        match effect {
            Some(Effect::Zero) => 0,
            Some(Effect::Short) if len > SECTOR => SECTOR * self.decisions.between(1, (len - 1) / SECTOR),
            Some(Effect::Short) => len / 2,
            _ => len,
        }
    }

    fn read(&mut self, pending: &Pending, ino: Ino) -> Result<u64, i32> {
        if let Some(Effect::Torn(errno)) = pending.effect {
            return Err(errno);
        }
        let (offset, len) = pending.range();
        let len = self.share(pending.effect, len);
        let mut bytes = vec![0; usize::try_from(len).map_err(|_| EINVAL)?];
        let read = self.media.read(ino, offset, &mut bytes)?;
        let bytes = &mut bytes[..read];
        if pending.effect == Some(Effect::FlipBit) {
            self.flip_bit(bytes);
        }
        let mut rest = &*bytes;
        for buf in pending.buffers() {
            let (part, after) = rest.split_at(rest.len().min(buf.len()));
            buf.copy_in(0, part);
            rest = after;
        }
        Ok(read as u64)
    }

    fn flip_bit(&mut self, bytes: &mut [u8]) {
        let at = self.decisions.index(bytes.len());
        let bit = 1 << self.decisions.below(8);
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= bit;
        }
    }

    fn write(&mut self, pending: &Pending, ino: Ino) -> Result<u64, i32> {
        let (offset, len) = pending.range();
        let len = self.share(pending.effect, len);
        let mut bytes = pending.bytes(len);
        if matches!(pending.effect, Some(Effect::Lost | Effect::Misdirect | Effect::FlipBit)) {
            self.belied.insert(ino);
        }
        match pending.effect {
            Some(Effect::Lost) => return Ok(len),
            Some(Effect::Torn(errno)) => {
                let mut coins = Seed(self.decisions.next_u64()).rng();
                self.media.write_some(ino, offset, &bytes, || coins.coin())?;
                return Err(errno);
            }
            Some(Effect::Misdirect) => {
                let (ino, offset) = self.elsewhere(ino, offset);
                self.belied.insert(ino);
                // Where there is no space it is merely lost.
                let _ = self.media.write(ino, offset, &bytes, pending.sync());
                return Ok(len);
            }
            Some(Effect::FlipBit) => self.flip_bit(&mut bytes),
            _ => {}
        }
        if len > 0 {
            self.media.write(ino, offset, &bytes, pending.sync())?;
        }
        Ok(len)
    }

    /// Another place on the device: a sector of this file or of another.
    fn elsewhere(&mut self, ino: Ino, offset: u64) -> (Ino, u64) {
        let files: Vec<Ino> =
            self.media.nodes.keys().copied().filter(|ino| self.media.file(*ino).is_ok()).collect();
        let target = if self.decisions.coin() { ino } else { *self.decisions.pick(&files).unwrap_or(&ino) };
        let sectors = self.media.file(target).map_or(0, |file| file.current.len / SECTOR).max(1);
        let mut sector = self.decisions.below(sectors);
        if target == ino && sector == offset / SECTOR {
            sector += 1;
        }
        (target, sector * SECTOR + offset % SECTOR)
    }

    fn meta(&mut self, pending: &Pending) -> Result<Option<Reply>, i32> {
        let Op::Meta(op) = &pending.op else { return Err(EINVAL) };
        if let Some(Effect::Torn(errno)) = pending.effect {
            if self.decisions.coin() {
                let _ = shape_or_name(pending, &mut self.media);
            }
            return Err(errno);
        }
        let opened = shape_or_name(pending, &mut self.media)?;
        if let (Some((ino, mode)), MetaOp::Open { name, .. }) = (opened, op) {
            return Ok(Some(Reply::Opened(self.opened(pending, ino, name.dir, mode)?)));
        }
        let target = pending.target.as_ref().ok().and_then(Option::as_ref);
        match (op, target) {
            (MetaOp::SyncDir { name }, _) => {
                self.media.sync_dir(name.dir, &name.path, pending.bound).map(|()| None)
            }
            (MetaOp::List { name }, _) => self.media.list(name.dir, &name.path).map(Reply::Listing).map(Some),
            (MetaOp::Compute { work, .. }, _) => {
                self.computed.push(work.clone());
                Ok(None)
            }
            (MetaOp::Reopen { dir }, _) => self.media.look_up(*dir, "").map(|_| None),
            (MetaOp::Space { dir }, _) => {
                self.media.look_up(*dir, "")?;
                let (free, total) = self.media.space();
                Ok(Some(Reply::Space { free, total, device: 0 }))
            }
            (MetaOp::Stat { .. }, Some(file)) => {
                let content = &self.media.file(file.ino)?.current;
                Ok(Some(Reply::Stat { len: content.len, allocated: content.allocated() }))
            }
            (MetaOp::Holes { upto, .. }, Some(file)) => {
                let mut holes = self.media.file(file.ino)?.current.holes();
                holes.retain(|(at, _)| at < upto);
                Ok(Some(Reply::Holes(holes)))
            }
            (MetaOp::Close { .. }, Some(file)) => {
                let file = self.media.file_mut(file.ino)?;
                file.handles = file.handles.saturating_sub(1);
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    fn opened(&mut self, pending: &Pending, ino: Ino, dir: DirId, mode: OpenMode) -> Result<FileId, i32> {
        self.media.file_mut(ino)?.handles += 1;
        let io = &mut self.ios[pending.io];
        let id = io.next_file;
        io.next_file += 1;
        io.files.insert(id, OpenFile { ino, dir, mode, name: Arc::clone(&pending.name) });
        Ok(FileId(id))
    }
}

/// One executor's way to a [`SimDisk`].
#[derive(Debug)]
pub struct SimIo {
    disk: SimDisk,
    id: usize,
}

impl Drop for SimIo {
    /// Its files are closed; what is under way goes on without it.
    fn drop(&mut self) {
        let mut machine = self.disk.lock();
        let io = &mut machine.ios[self.id];
        io.dead = true;
        io.ready.clear();
        for file in std::mem::take(&mut io.files).into_values() {
            if let Ok(file) = machine.media.file_mut(file.ino) {
                file.handles = file.handles.saturating_sub(1);
            }
        }
    }
}

struct SimUnpark(SimDisk, usize);

impl Unpark for SimUnpark {
    fn unpark(&self) {
        self.0.lock().ios[self.1].unparked = true;
    }
}

impl Io for SimIo {
    fn submit(&mut self, token: Token, op: Op) {
        self.disk.lock().submit(self.id, token, op);
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.disk.lock().ios[self.id].ready);
    }

    /// Lets time pass until there is something to reap: for an executor that is alone with its disk.
    fn park(&mut self, timeout: Option<Duration>) {
        let computed = {
            let mut machine = self.disk.lock();
            machine.park(self.id, timeout);
            std::mem::take(&mut machine.computed)
        };
        computed.iter().for_each(Computation::run);
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::new(SimUnpark(self.disk.clone(), self.id))
    }

    fn register(&mut self, _: &Arc<Region>) -> Result<(), String> {
        Ok(())
    }

    fn unregister(&mut self, _: &Arc<Region>) {}

    fn facts(&self) -> IoFacts {
        IoFacts { backend: "sim", features: Vec::new(), warnings: Vec::new() }
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
