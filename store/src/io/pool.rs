//! The portable way to the disks: threads that block in the kernel, one operation each.
//!
//! Invariant: a job holds its buffers and its descriptor until its system call has returned. Results are those of
//! the ring, bytes or a negative errno, so nothing above this module knows which of the two it uses.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::fdatasync;
use rustix::io::{Errno, ReadWriteFlags, preadv, pwritev, pwritev2};

use super::features::{Feature, Features, Outcomes};
use super::files::{Files, KeptFile, OpenFile};
use super::meta::{Meta, MetaThreads, punch};
use super::ring::RANGES_MAX;
use super::wake::Wake;
use super::workers::{Done, Workers};
use super::{Completion, Io, IoFacts, MetaOp, Op, Token, Unpark};
use kvarts_contract::buffers::buf::SharedBuf;
use kvarts_contract::buffers::region::Region;
use kvarts_contract::buffers::vectors::IoVec;
use kvarts_contract::io_error::FileId;

/// Operations that are at the disks at once: enough for what one executor reads ahead in pieces of 1 MiB.
pub(super) const THREADS: usize = 4;
/// Those that each directory has at least.
const THREADS_MIN: usize = 2;

/// One operation with the file it is for.
#[derive(Debug)]
struct Job {
    token: Token,
    op: Op,
    file: Arc<OpenFile>,
}

/// Whether a durable write is asked of the kernel as one operation; off from the first refusal on.
type DurableWrite = Arc<AtomicBool>;

/// The pool of one executor.
#[derive(Debug)]
pub(super) struct Pool {
    /// Of each directory, so that a device that hangs holds up its own.
    workers: Vec<Workers<Job>>,
    meta: MetaThreads,
    files: Arc<Files>,
    done: Arc<Done>,
    wake: Arc<Wake>,
    /// Completions that did not come from a worker, until they are reaped.
    ready: Vec<Completion>,
    outcomes: Outcomes,
    durable: DurableWrite,
    /// Why this is not the ring that was wanted.
    warning: Option<String>,
}

impl Pool {
    /// Starts the threads. An error says what is wrong with the directories, or why there are no threads.
    pub(super) fn new(
        dirs: &[PathBuf],
        features: &Features,
        warning: Option<String>,
    ) -> Result<Self, String> {
        let files = Files::new();
        let meta = Meta::new(dirs, &files, features.allows(Feature::DirectIo))?;
        let wake = Wake::new().map_err(|error| format!("an eventfd could not be created: {error}"))?;
        let done = Done::new(Arc::clone(&wake));
        let no_threads = |error| format!("a thread could not be started: {error}");
        let meta = MetaThreads::start(&meta, &done).map_err(no_threads)?;
        let durable: DurableWrite = Arc::new(AtomicBool::new(features.allows(Feature::DurableWrite)));
        let for_threads = Arc::clone(&durable);
        let threads = (THREADS / dirs.len().max(1)).max(THREADS_MIN);
        let workers = (0..dirs.len().max(1)).map(|dir| {
            let durable = Arc::clone(&for_threads);
            Workers::start(&format!("kvarts-io-{dir}"), threads, &done, move |job| run(&job, &durable))
        });
        let workers = workers.collect::<std::io::Result<_>>().map_err(no_threads)?;
        let mut outcomes = Outcomes::new(features);
        for feature in Feature::ALL {
            match feature {
                Feature::DurableWrite => outcomes.note(feature, Ok(())),
                // Noted when the first file is opened.
                Feature::DirectIo => {}
                _ => outcomes.note(feature, Err("needs io_uring".to_owned())),
            }
        }
        Ok(Self { workers, meta, files, done, wake, ready: Vec::new(), outcomes, durable, warning })
    }

    fn something_to_reap(&self) -> bool {
        !self.ready.is_empty() || !self.done.is_empty()
    }
}

impl Io for Pool {
    fn submit(&mut self, token: Token, op: Op) {
        let file = match op {
            // Many at once: one waits for the file system, and they come in batches.
            Op::Meta(MetaOp::PunchHole { file, .. }) => file,
            Op::Meta(op) => return self.meta.push(token, op),
            Op::Read { file, .. } | Op::Write { file, .. } | Op::WriteV { file, .. } | Op::Flush { file } => {
                file
            }
        };
        match self.files.get(file) {
            Some(file) => {
                let workers = self.workers.get(usize::from(file.dir().0)).or(self.workers.first());
                if let Some(workers) = workers {
                    workers.push(Job { token, op, file });
                }
            }
            None => {
                let result = -Errno::BADF.raw_os_error();
                self.ready.push(Completion { token, result, reply: None });
            }
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.ready);
        self.done.take(out);
    }

    fn park(&mut self, timeout: Option<Duration>) {
        loop {
            if self.wake.take_unparked() || self.something_to_reap() {
                return;
            }
            if !self.wake.wait(timeout) {
                return;
            }
            self.wake.drain();
        }
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.wake) as Arc<dyn Unpark>
    }

    fn register(&mut self, _: &Arc<Region>) -> Result<(), String> {
        Err("the thread pool does not support registered buffers (the feature fixed-buffers needs io_uring)"
            .to_owned())
    }

    fn unregister(&mut self, _: &Arc<Region>) {}

    fn keep_file(&self, file: FileId) -> Option<KeptFile> {
        self.files.keep(file)
    }

    fn facts(&self) -> IoFacts {
        let mut outcomes = self.outcomes.clone();
        if outcomes.uses(Feature::DurableWrite) && !self.durable.load(Ordering::Relaxed) {
            outcomes.revoke(Feature::DurableWrite, "the file system refused this feature");
        }
        let (mut features, mut warnings) = (outcomes.list(), Vec::from_iter(self.warning.clone()));
        super::files::note_direct(&self.files, &mut features, &mut warnings);
        IoFacts { backend: "pool", features, warnings }
    }
}

fn run(job: &Job, durable: &AtomicBool) -> Completion {
    let fd = job.file.as_fd();
    let moved = match &job.op {
        Op::Read { offset, into, .. } => read(fd, *offset, std::slice::from_ref(into)),
        Op::Write { offset, from, sync, .. } => {
            write(fd, *offset, std::slice::from_ref(from), *sync, durable)
        }
        Op::WriteV { offset, from, sync, .. } => write(fd, *offset, from, *sync, durable),
        Op::Flush { .. } => fdatasync(fd).map(|()| 0),
        Op::Meta(MetaOp::PunchHole { offset, len, .. }) => punch(fd, *offset, *len).map(|()| 0),
        Op::Meta(_) => Err(Errno::INVAL),
    };
    let result = match moved {
        Ok(moved) => i32::try_from(moved).unwrap_or(i32::MAX),
        Err(errno) => -errno.raw_os_error(),
    };
    Completion { token: job.token, result, reply: None }
}

fn ranges(bufs: &[SharedBuf]) -> Vec<IoVec> {
    bufs.iter().take(RANGES_MAX).map(IoVec::of).collect()
}

fn read(fd: BorrowedFd<'_>, offset: u64, into: &[SharedBuf]) -> Result<usize, Errno> {
    let mut ranges = ranges(into);
    // SAFETY: `IoSliceMut` and `IoVec` both have the layout of the kernel's `iovec`. No slice is ever made of the
    // memory on this side: the vector goes to the kernel as it is, and the job's buffers hold the memory.
    let slices =
        unsafe { std::slice::from_raw_parts_mut(ranges.as_mut_ptr().cast::<IoSliceMut<'_>>(), ranges.len()) };
    preadv(fd, slices, offset)
}

fn write(
    fd: BorrowedFd<'_>,
    offset: u64,
    from: &[SharedBuf],
    sync: bool,
    durable: &AtomicBool,
) -> Result<usize, Errno> {
    let ranges = ranges(from);
    // SAFETY: as in `read`.
    let slices = unsafe { std::slice::from_raw_parts(ranges.as_ptr().cast::<IoSlice<'_>>(), ranges.len()) };
    if sync && durable.load(Ordering::Relaxed) {
        match pwritev2(fd, slices, offset, ReadWriteFlags::DSYNC) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => durable.store(false, Ordering::Relaxed),
            written => return written,
        }
    }
    let written = pwritev(fd, slices, offset)?;
    if sync {
        fdatasync(fd)?;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::conformance;
    use crate::io::scratch::Scratch;

    fn make(scratch: &Scratch, features: &Features) -> Box<dyn Io> {
        Box::new(Pool::new(&[scratch.path().to_owned()], features, None).unwrap())
    }

    #[test]
    fn the_pool_conforms() {
        let scratch = Scratch::on_disk();
        conformance::all(&mut || make(&scratch, &Features::default()));
    }

    #[test]
    fn the_pool_conforms_without_any_feature() {
        let scratch = Scratch::on_disk();
        conformance::all(&mut || make(&scratch, &Features::only(&[])));
    }

    #[test]
    fn a_durable_write_that_the_kernel_does_not_know_is_a_write_and_a_flush() {
        let scratch = Scratch::on_disk();
        let path = scratch.path().join("file");
        let file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
        let buf = SharedBuf::new(&Region::anonymous(16).unwrap(), 0, 16).unwrap();
        let durable = AtomicBool::new(false);
        assert_eq!(write(file.as_fd(), 0, std::slice::from_ref(&buf), true, &durable), Ok(16));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 16);
        // What cannot be flushed cannot be written durably, but it can be written.
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        let no_flush = |sync| write(null.as_fd(), 0, std::slice::from_ref(&buf), sync, &durable);
        assert_eq!(no_flush(false), Ok(16));
        assert_eq!(no_flush(true), Err(Errno::INVAL));
    }
}
