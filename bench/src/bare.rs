//! The bare loop: what the device path gives when nothing stands around it.
//!
//! It goes through the same seam as the engine (`open_io`: the same ring flags, registered memory, direct files), a
//! lane being one thread with a way to the disks of its own, as one executor is. It submits while bytes in flight
//! allow, reaps, sleeps when there is nothing to reap, and does nothing else.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Instant;

use kvarts_contract::{
    buffers::{Region, SharedBuf},
    io_error::{DirId, FileId, Name},
};
use kvarts_store::engine::PlannedExtent;
use kvarts_store::io::{Completion, Io, MetaOp, Op, OpenMode, Reply, Token, open_io};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::setup::Common;
use kvarts_terminal::Failure;

/// One transfer.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) path: Arc<str>,
    pub(super) offset: u64,
    pub(super) memory: SharedBuf,
}

/// When a lane began and ended.
pub(super) type Span = (Instant, Instant);

type Job = Box<dyn FnOnce(&mut Lane) + Send>;

/// Threads with a way to the disks each.
#[derive(Debug)]
pub(super) struct Bare {
    lanes: Vec<(Option<Sender<Job>>, JoinHandle<()>)>,
}

/// What one thread has.
pub(super) struct Lane {
    io: Box<dyn Io>,
    files: BTreeMap<Arc<str>, FileId>,
    arrived: Vec<Completion>,
}

impl Bare {
    /// As many lanes as the store has executors, pinned as they are.
    pub(super) fn start(common: &Common, directory: &std::path::Path, lanes: usize) -> Result<Self, Failure> {
        let mut started = Vec::new();
        for index in 0..lanes {
            let (jobs, inbox) = channel::<Job>();
            let (ready, is_ready) = channel();
            let (choice, features) = (common.io, common.io_disable.clone().unwrap_or_default());
            let directories: Vec<PathBuf> = vec![directory.to_owned()];
            let core = common.cores.get(index.checked_rem(common.cores.len()).unwrap_or(0)).copied();
            let thread = std::thread::Builder::new().name(format!("bare-{index}")).spawn(move || {
                if let Some(core) = core {
                    let mut set = CpuSet::new();
                    set.set(core);
                    // A core that cannot be had has been refused when the store was opened.
                    let _ = sched_setaffinity(None, &set);
                }
                match open_io(choice, &directories, &features) {
                    Ok(io) => {
                        let _ = ready.send(Ok(()));
                        serve(Lane { io, files: BTreeMap::new(), arrived: Vec::new() }, &inbox);
                    }
                    Err(error) => drop(ready.send(Err(error.to_string()))),
                }
            });
            let thread = thread.map_err(|error| {
                Failure::User(format!("a thread of the bare loop could not be started: {error}"))
            })?;
            is_ready
                .recv()
                .unwrap_or_else(|_| Err("a thread of the bare loop ended before it was ready".to_owned()))
                .map_err(Failure::User)?;
            started.push((Some(jobs), thread));
        }
        Ok(Self { lanes: started })
    }

    /// Does something on every lane at once; the answers in the order of the lanes.
    pub(super) fn on_all<T: Send + 'static>(
        &self,
        work: impl Fn(usize, &mut Lane) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Vec<T>, Failure> {
        let (work, together) = (Arc::new(work), Arc::new(Barrier::new(self.lanes.len())));
        let mut answers = Vec::new();
        for (index, (jobs, _)) in self.lanes.iter().enumerate() {
            let (reply, answer) = channel();
            let (work, together) = (Arc::clone(&work), Arc::clone(&together));
            let job: Job = Box::new(move |lane| {
                together.wait();
                let _ = reply.send(work(index, lane));
            });
            if let Some(jobs) = jobs {
                let _ = jobs.send(job);
            }
            answers.push(answer);
        }
        let take = |answer: Receiver<Result<T, String>>| {
            answer
                .recv()
                .unwrap_or_else(|_| Err("a thread of the bare loop ended without a result".to_owned()))
                .map_err(Failure::User)
        };
        answers.into_iter().map(take).collect()
    }

    /// Registers memory with every lane, if its way to the disks can.
    pub(super) fn register(&self, region: &Arc<Region>) -> Result<bool, Failure> {
        let region = Arc::clone(region);
        let all = self.on_all(move |_, lane| Ok(lane.io.register(&region).is_ok()))?;
        Ok(all.into_iter().all(|registered| registered))
    }

    /// Opens the files of a plan on every lane, so that no pass has to.
    pub(super) fn open_all(&self, paths: Vec<Arc<str>>) -> Result<(), Failure> {
        self.on_all(move |_, lane| paths.iter().try_for_each(|path| lane.open(path, false).map(drop)))?;
        Ok(())
    }

    /// Reads each lane's extents with at most `window` bytes in flight; the seconds from the first lane's begin to
    /// the last lane's end.
    pub(super) fn read(&self, plan: &Plan, window: u64, digest: bool) -> Result<f64, Failure> {
        let lanes = plan.lanes.clone();
        let spans = self.on_all(move |index, lane| match lanes.get(index) {
            Some(extents) => lane.read(extents, window, digest),
            None => Ok((Instant::now(), Instant::now())),
        })?;
        Ok(seconds(&spans))
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        for (jobs, thread) in self.lanes.drain(..) {
            drop(jobs);
            // What made it panic has been said on standard error.
            let _ = thread.join();
        }
    }
}

/// Extents by lane, in the order in which they are submitted.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) lanes: Vec<Arc<[Extent]>>,
    pub(super) bytes: u64,
}

impl Plan {
    /// The extents that the engine would read, up to step `steps`. What the engine stages lands in `scratch`, which
    /// is walked through as the engine walks through its arena.
    pub(super) fn new(
        planned: &[PlannedExtent],
        lanes: usize,
        steps: u32,
        scratch: &SharedBuf,
    ) -> Result<Self, Failure> {
        let mut by_lane = vec![Vec::new(); lanes];
        let (mut at, mut bytes) = (0, 0);
        for extent in planned.iter().filter(|extent| extent.step < steps) {
            let len = extent.len as usize;
            let memory = match &extent.into {
                Some(memory) => memory.clone(),
                None => {
                    if at + len > scratch.len() {
                        at = 0;
                    }
                    at += len;
                    scratch
                        .slice(at - len, len)
                        .ok_or_else(|| Failure::user("an extent is larger than the arena"))?
                }
            };
            bytes += u64::from(extent.len);
            let path = Arc::from(extent.path.as_str());
            by_lane[extent.executor % lanes].push(Extent { path, offset: extent.offset, memory });
        }
        Ok(Self { lanes: by_lane.into_iter().map(Arc::from).collect(), bytes })
    }

    /// The files it reads.
    pub(super) fn paths(&self) -> Vec<Arc<str>> {
        let all = self.lanes.iter().flat_map(|lane| lane.iter());
        all.map(|extent| Arc::clone(&extent.path))
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect()
    }
}

/// From the first begin to the last end.
pub(super) fn seconds(spans: &[Span]) -> f64 {
    let begin = spans.iter().map(|span| span.0).min();
    let end = spans.iter().map(|span| span.1).max();
    begin.zip(end).map_or(0.0, |(begin, end)| end.duration_since(begin).as_secs_f64())
}

fn serve(mut lane: Lane, inbox: &Receiver<Job>) {
    while let Ok(job) = inbox.recv() {
        job(&mut lane);
    }
}

impl Lane {
    /// Opens a file, once.
    pub(super) fn open(&mut self, path: &Arc<str>, write: bool) -> Result<FileId, String> {
        if let Some(file) = self.files.get(path) {
            return Ok(*file);
        }
        let name = Name { dir: DirId(0), path: Box::from(&**path) };
        let mode = OpenMode { write, create: write, direct: true };
        match self.meta(MetaOp::Open { name, mode })? {
            Some(Reply::Opened(file)) => {
                self.files.insert(Arc::clone(path), file);
                Ok(file)
            }
            _ => Err(format!("cannot open {path}")),
        }
    }

    /// One operation on names or files.
    pub(super) fn meta(&mut self, op: MetaOp) -> Result<Option<Reply>, String> {
        let shown = format!("{op:?}");
        self.io.submit(Token(0), Op::Meta(op));
        let done = self.one()?;
        if done.result < 0 { Err(format!("{shown}: error {}", -done.result)) } else { Ok(done.reply) }
    }

    fn one(&mut self) -> Result<Completion, String> {
        loop {
            self.io.reap(&mut self.arrived);
            if let Some(done) = self.arrived.pop() {
                return Ok(done);
            }
            self.io.park(None);
        }
    }

    /// Reads extents with at most `window` bytes in flight, and computes the digest of each if asked.
    pub(super) fn read(&mut self, extents: &[Extent], window: u64, digest: bool) -> Result<Span, String> {
        let files: Vec<FileId> =
            extents.iter().map(|extent| self.open(&extent.path, false)).collect::<Result<_, _>>()?;
        let begin = Instant::now();
        self.transfer(
            extents,
            window,
            |at| Op::Read { file: files[at], offset: extents[at].offset, into: extents[at].memory.clone() },
            |at| {
                if digest {
                    let memory = &extents[at].memory;
                    std::hint::black_box(memory.digest(0, memory.len(), crc32fast::hash));
                }
            },
        )?;
        Ok((begin, Instant::now()))
    }

    /// Writes extents, all at once.
    pub(super) fn write(&mut self, extents: &[Extent]) -> Result<(), String> {
        let files: Vec<FileId> =
            extents.iter().map(|extent| self.open(&extent.path, true)).collect::<Result<_, _>>()?;
        self.transfer(
            extents,
            u64::MAX,
            |at| Op::Write {
                file: files[at],
                offset: extents[at].offset,
                from: extents[at].memory.clone(),
                sync: false,
            },
            |_| (),
        )
    }

    /// Makes what was written durable.
    pub(super) fn flush(&mut self, path: &Arc<str>) -> Result<(), String> {
        let file = self.open(path, true)?;
        self.io.submit(Token(0), Op::Flush { file });
        let done = self.one()?;
        if done.result < 0 { Err(format!("{path}: flush: error {}", -done.result)) } else { Ok(()) }
    }

    fn transfer(
        &mut self,
        extents: &[Extent],
        window: u64,
        op: impl Fn(usize) -> Op,
        arrived: impl Fn(usize),
    ) -> Result<(), String> {
        let (mut next, mut left, mut in_flight) = (0, extents.len(), 0u64);
        let len = |at: usize| extents[at].memory.len() as u64;
        let mut completions = std::mem::take(&mut self.arrived);
        while left > 0 {
            while next < extents.len() && (in_flight == 0 || in_flight.saturating_add(len(next)) <= window) {
                in_flight += len(next);
                self.io.submit(Token(next as u64), op(next));
                next += 1;
            }
            self.io.reap(&mut completions);
            if completions.is_empty() {
                self.io.park(None);
                continue;
            }
            for done in completions.drain(..) {
                let at = done.token.0 as usize;
                if u64::try_from(done.result).ok() != Some(len(at)) {
                    return Err(format!(
                        "{}: the read returned {} instead of {} bytes",
                        extents[at].path,
                        done.result,
                        len(at)
                    ));
                }
                in_flight -= len(at);
                left -= 1;
                arrived(at);
            }
        }
        self.arrived = completions;
        Ok(())
    }
}
