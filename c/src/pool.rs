//! Pools, stages and drafts.

use std::ffi::{CString, c_char};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use kvarts_client::PoolName;
use kvarts_client::pool::{self, DraftTerms, StageRequest};
use kvarts_contract::api::{BlockOutcome, Durability, Parent};
use kvarts_contract::class::Class;
use kvarts_contract::clock::Clock;
use kvarts_contract::error::Error;

use crate::blocks::{Client, Column, keys};
use crate::memory::Memory;
use crate::said::{
    Status, call, free, given, hand_over, leave_if_wanted, leave_several, milliseconds, perhaps, several,
    text, wrong,
};

/// `kvarts_pool`.
pub(crate) struct Pool {
    pool: pool::Pool,
    clock: Arc<dyn Clock>,
    name: CString,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_pool_take(client: *const Client, nbytes: usize, pool: *mut *mut Pool) -> Status {
    call(|| {
        let Client { remote } = given(client, "client")?;
        let (region, name) = remote.shared_pool(nbytes)?;
        let name =
            CString::new(name.to_string()).map_err(|_| wrong("the name of the pool contains a zero byte"))?;
        let clock = Arc::clone(remote.clock());
        let taken = pool::Pool::new(remote.store(), &clock, &region);
        hand_over(pool, Pool { pool: taken, clock, name }, "pool")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_pool_free(pool: *mut Pool) {
    free(pool);
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_pool_name(pool: *const Pool) -> *const c_char {
    perhaps(pool).map_or(std::ptr::null(), |pool| pool.name.as_ptr())
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_pool_memory(pool: *const Pool, memory: *mut *mut Memory) -> Status {
    call(|| {
        let region = Arc::clone(given(pool, "pool")?.pool.region());
        hand_over(memory, Memory::pool(region), "memory")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_attach(client: *const Client, name: *const c_char, memory: *mut *mut Memory) -> Status {
    call(|| {
        let Client { remote } = given(client, "client")?;
        let name = text(name, "name")?
            .ok_or_else(|| wrong("name is null: the call requires the name of a pool"))?
            .parse::<PoolName>()?;
        hand_over(memory, Memory::pool(remote.attach(name)?), "memory")
    })
}

/// `kvarts_stretch`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Stretch {
    at: u64,
    blocks: u32,
    first: u32,
    count: u32,
}

impl From<pool::Stretch> for Stretch {
    fn from(pool::Stretch { at, blocks, first, count }: pool::Stretch) -> Self {
        Self { at, blocks, first, count }
    }
}

impl From<Stretch> for pool::Stretch {
    fn from(Stretch { at, blocks, first, count }: Stretch) -> Self {
        Self { at, blocks, first, count }
    }
}

fn leave_stretches(
    all: Vec<pool::Stretch>,
    place: (*mut Stretch, usize),
    count: *mut usize,
) -> Result<(), Error> {
    let all: Vec<Stretch> = all.into_iter().map(Stretch::from).collect();
    leave_several(&all, place, count)
}

/// `kvarts_stage`.
pub(crate) struct Stage {
    pub(crate) stage: Arc<pool::Stage>,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_stage_begin(
    pool: *const Pool,
    columns: *const Column,
    column_count: usize,
    chain: *const u8,
    count: usize,
    first_block: u32,
    silence_ms: u64,
    stage: *mut *mut Stage,
) -> Status {
    call(|| {
        let columns = several(columns, column_count, "columns")?;
        let columns = columns.iter().map(Column::find).collect::<Result<Vec<_>, _>>()?;
        let (keys, silence) = (keys(chain, count)?, milliseconds(silence_ms));
        let request = StageRequest { columns, keys, first_block, silence, class: Class::Foreground };
        let begun = given(pool, "pool")?.pool.stage(request)?;
        hand_over(stage, Stage { stage: Arc::new(begun) }, "stage")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_stage_free(stage: *mut Stage) {
    free(stage);
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_stage_wait(
    stage: *const Stage,
    timeout_ms: u64,
    staged: *mut u32,
    is_over: *mut bool,
) -> Status {
    call(|| {
        let Stage { stage } = given(stage, "stage")?;
        let progress = match timeout_ms {
            0 => stage.look(),
            some => stage.wait(milliseconds(some)),
        };
        leave_if_wanted(staged, progress.staged);
        leave_if_wanted(is_over, progress.is_over);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_stage_outcome(stage: *const Stage) -> Status {
    call(|| given(stage, "stage")?.stage.why().map_or(Ok(()), |reason| Err(reason.into())))
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_stage_stretches(
    stage: *const Stage,
    column: usize,
    stretches: *mut Stretch,
    room: usize,
    count: *mut usize,
) -> Status {
    call(|| {
        let Stage { stage } = given(stage, "stage")?;
        if column >= stage.columns() {
            return Err(wrong(format!(
                "column {column} does not exist: the stage has {} columns, and the first one has the index 0",
                stage.columns()
            )));
        }
        leave_stretches(stage.stretches(column), (stretches, room), count)
    })
}

/// `kvarts_draft`. A save holds it, too: the room is given back behind both.
pub(crate) struct Draft {
    pub(crate) draft: Arc<Mutex<Option<pool::Draft>>>,
    clock: Arc<dyn Clock>,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_draft_begin(
    pool: *const Pool,
    column: *const Column,
    chain: *const u8,
    count: usize,
    first_block: u32,
    draft: *mut *mut Draft,
) -> Status {
    call(|| {
        let (column, shape) = given(column, "column")?.find()?;
        let Pool { pool, clock, .. } = given(pool, "pool")?;
        let begun = pool.draft((column, &shape), &keys(chain, count)?, first_block)?;
        let made = Draft { draft: Arc::new(Mutex::new(Some(begun))), clock: Arc::clone(clock) };
        hand_over(draft, made, "draft")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_draft_free(draft: *mut Draft) {
    free(draft);
}

fn was_put() -> Error {
    wrong("the draft has already been put: begin a new draft with kvarts_draft_begin")
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_draft_stretches(
    draft: *const Draft,
    stretches: *mut Stretch,
    room: usize,
    count: *mut usize,
) -> Status {
    call(|| {
        let held = given(draft, "draft")?.draft.lock().unwrap_or_else(PoisonError::into_inner);
        leave_stretches(held.as_ref().ok_or_else(was_put)?.stretches(), (stretches, room), count)
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_draft_put(
    draft: *const Draft,
    parent: *const u8,
    ttl_ms: u64,
    timeout_ms: u64,
    outcomes: *mut u8,
    count: usize,
) -> Status {
    call(|| {
        let Draft { draft, clock } = given(draft, "draft")?;
        let parent = match perhaps(parent) {
            None => Parent::Root,
            Some(_) => keys(parent, 1)?.pop().map_or(Parent::Root, Parent::Key),
        };
        let terms = DraftTerms {
            parent,
            durability: Durability::Durable,
            expires_after: (ttl_ms > 0).then(|| milliseconds(ttl_ms)),
            deadline: Some(clock.now().plus(milliseconds(timeout_ms))),
        };
        if Arc::strong_count(draft) > 1 {
            return Err(wrong("a save still writes to the draft: put the draft after the save has ended"));
        }
        let taken = draft.lock().unwrap_or_else(PoisonError::into_inner).take();
        let told = run(taken.ok_or_else(was_put)?.put(&terms));
        if !outcomes.is_null() {
            let codes: Vec<u8> = told.iter().map(code).collect();
            leave_several(&codes, (outcomes, count), &mut 0)?;
        }
        let failed = told.into_iter().find_map(|outcome| match outcome {
            BlockOutcome::Refused(reason) => Some(reason),
            BlockOutcome::InFlight => Some(kvarts_contract::error::Reason::InFlight),
            _ => None,
        });
        failed.map_or(Ok(()), |reason| Err(reason.into()))
    })
}

/// `kvarts_outcome`.
fn code(outcome: &BlockOutcome) -> u8 {
    match outcome {
        BlockOutcome::Stored => 0,
        BlockOutcome::AlreadyThere => 1,
        BlockOutcome::InFlight => 2,
        BlockOutcome::HeldElsewhere => 3,
        BlockOutcome::Refused(_) => 4,
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Blocks the thread until the future's end, which comes by its deadline.
fn run<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}
