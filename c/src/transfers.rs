//! Transfers: many keys at once, posted without waiting, and their answers.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvarts_client::pool;
use kvarts_contract::api::MAX_REQUEST_BLOCKS;
use kvarts_contract::batch::{BatchId, BatchKind, Block, Lane, Memory as Places, Pages, PagesOptions, Terms};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::clock::Clock;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockShape, Coordinate, Group};

use crate::blocks::{Client, Column, keys};
use crate::memory::Memory;
use crate::said::{
    Status, call, free, given, hand_over, leave, leave_several, milliseconds, null, perhaps, remember,
    several,
};

// `KVARTS_TRANSFER_KEYS`.
const _: () = assert!(MAX_REQUEST_BLOCKS == 65536);

/// `kvarts_queue`.
pub(crate) struct Queue {
    pages: Pages,
    shapes: [(Group, Coordinate, BlockShape); 1],
    clock: Arc<dyn Clock>,
}

/// `kvarts_descriptor`.
#[repr(C)]
struct Descriptor {
    memory: *const Memory,
    at: u64,
    nbytes: u64,
}

impl Descriptor {
    fn find(&self) -> Result<SharedBuf, Error> {
        given(self.memory, "a descriptor's memory")?.part(self.at, self.nbytes)
    }
}

/// `kvarts_completion`.
#[repr(C)]
struct Completion {
    transfer: u64,
    kind: i32,
    count: u32,
    good: u32,
    prefix: u32,
    written: u32,
    first: Status,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_queue_open(
    client: *const Client,
    column: *const Column,
    depth: u32,
    ttl_ms: u64,
    queue: *mut *mut Queue,
) -> Status {
    call(|| {
        let Client { remote } = given(client, "client")?;
        let (pool::Column { namespace, group, coordinate }, shape) = given(column, "column")?.find()?;
        let plain = PagesOptions::new(namespace);
        let options = PagesOptions {
            group,
            coordinate,
            expires_after: (ttl_ms > 0).then(|| milliseconds(ttl_ms)),
            batches_max: if depth == 0 { plain.batches_max } else { depth as usize },
            // An answer is what tells a caller that its memory is its own again.
            until_free: true,
            ..plain
        };
        let pages = Pages::new(remote.store(), options)?;
        let shapes = [(group, coordinate, BlockShape::clone(&shape))];
        hand_over(queue, Queue { pages, shapes, clock: Arc::clone(remote.clock()) }, "queue")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_queue_free(queue: *mut Queue) {
    free(queue);
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_queue_eventfd(queue: *const Queue) -> c_int {
    perhaps(queue).map_or(-1, |queue| queue.pages.event_fd(Lane::Store).as_raw_fd())
}

/// The blocks of a transfer.
#[derive(Clone, Copy)]
struct Asked {
    keys: *const u8,
    count: usize,
    /// None of those that are without memory.
    places: Option<*const Descriptor>,
    timeout_ms: u64,
}

impl Asked {
    fn moved(keys: *const u8, places: *const Descriptor, count: usize, timeout_ms: u64) -> Self {
        Self { keys, count, places: Some(places), timeout_ms }
    }
}

fn post(queue: *const Queue, kind: BatchKind, asked: Asked, transfer: *mut u64) -> Status {
    call(|| {
        let Queue { pages, shapes, clock } = given(queue, "queue")?;
        if transfer.is_null() {
            return Err(null("transfer"));
        }
        let keys = keys(asked.keys, asked.count)?;
        let deadline = (asked.timeout_ms > 0).then(|| clock.now().plus(milliseconds(asked.timeout_ms)));
        let terms = Terms { deadline, ..Terms::default() };
        let (group, coordinate, _) = shapes[0];
        let BatchId(number) = match asked.places {
            None => pages.submit_keys(kind, (group, coordinate), keys, &terms)?,
            Some(places) => {
                let places = several(places, asked.count, "descriptors")?;
                let places = places.iter().map(Descriptor::find).collect::<Result<Vec<_>, _>>()?;
                let blocks: Vec<Block> =
                    keys.into_iter().map(|key| Block { group, coordinate, key }).collect();
                pages.submit(kind, &blocks, &Places::Anywhere(&places, shapes), &terms)?
            }
        };
        leave(transfer, number, "transfer")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_put(
    queue: *const Queue,
    keys: *const u8,
    from: *const Descriptor,
    count: usize,
    timeout_ms: u64,
    transfer: *mut u64,
) -> Status {
    post(queue, BatchKind::Put, Asked::moved(keys, from, count, timeout_ms), transfer)
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_get(
    queue: *const Queue,
    keys: *const u8,
    into: *const Descriptor,
    count: usize,
    timeout_ms: u64,
    transfer: *mut u64,
) -> Status {
    post(queue, BatchKind::Get, Asked::moved(keys, into, count, timeout_ms), transfer)
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_exists(
    queue: *const Queue,
    keys: *const u8,
    count: usize,
    timeout_ms: u64,
    transfer: *mut u64,
) -> Status {
    post(queue, BatchKind::Exists, Asked { keys, count, places: None, timeout_ms }, transfer)
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_delete(
    queue: *const Queue,
    keys: *const u8,
    count: usize,
    timeout_ms: u64,
    transfer: *mut u64,
) -> Status {
    post(queue, BatchKind::Delete, Asked { keys, count, places: None, timeout_ms }, transfer)
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_cancel(queue: *const Queue, transfer: u64) -> Status {
    call(|| {
        // One that has ended needs no ending.
        given(queue, "queue")?.pages.cancel(BatchId(transfer));
        Ok(())
    })
}

fn status(result: &Result<(), Reason>) -> Status {
    result.as_ref().err().map_or(Status::Ok, |reason| reason.kind().into())
}

fn code(kind: BatchKind) -> i32 {
    match kind {
        BatchKind::Put => 0,
        BatchKind::Get => 1,
        // This interface has no locks.
        BatchKind::Exists | BatchKind::Lock => 2,
        BatchKind::Delete => 3,
    }
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_queue_poll(
    queue: *const Queue,
    completion: *mut Completion,
    results: *mut u8,
    room: usize,
    is_there: *mut bool,
) -> Status {
    call(|| {
        // Before anything is taken that could not be given.
        let Queue { pages, .. } = given(queue, "queue")?;
        for (is_null, name) in [
            (completion.is_null(), "completion"),
            (is_there.is_null(), "is_there"),
            (results.is_null() && room > 0, "results"),
        ] {
            if is_null {
                return Err(null(name));
            }
        }
        let Some(done) = pages.drain_one() else { return leave(is_there, false, "is_there") };
        let codes: Vec<u8> = done.results.iter().map(|result| status(result) as u8).collect();
        let first = done.results.iter().find(|result| result.is_err());
        if let Some(Err(reason)) = first {
            remember(&Error(reason.clone()));
        }
        let told = Completion {
            transfer: done.id.0,
            kind: code(done.kind),
            count: codes.len() as u32,
            good: done.results.iter().filter(|result| result.is_ok()).count() as u32,
            prefix: done.usable_prefix(),
            written: done.written,
            first: first.map_or(Status::Ok, status),
        };
        leave_several(&codes, (results, room), &mut 0)?;
        leave(completion, told, "completion")?;
        leave(is_there, true, "is_there")
    })
}
