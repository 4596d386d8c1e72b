//! A client as its handles know it, and a handle as the calls on it know it.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use kvarts_client::Client as Remote;
use kvarts_contract::api::{Durability, KvStore};
use kvarts_contract::batch::{
    BatchKind, CLOSED, Completion as Told, EventFds, Lane, Memory, Pages as Batches, PagesOptions, Terms,
};
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::cut::Cut;
use kvarts_layout::{BlockShape, Coordinate, Group, NamespaceId};
use kvarts_store::home::Home;
use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::blocks::Asked;
use crate::error::OrRaise;
use crate::guarded::Guarded;
use crate::places::Laid;
use crate::registry::Registry;
use crate::waiting;

/// How often a thread that waits looks for signals.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// What a client and its handles share.
pub(crate) struct Core {
    pub(crate) store: Arc<dyn KvStore>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) registry: Registry,
    pub(crate) call_timeout: Duration,
    pub(crate) path: &'static str,
    pub(crate) remote: Option<Remote>,
    pub(crate) home: Mutex<Option<Home>>,
    pub(crate) handles: Mutex<Vec<Weak<Handle>>>,
    pub(crate) closed: AtomicBool,
}

#[doc = stub!("Client")]
#[pyclass(frozen, weakref, module = "kvarts")]
pub(crate) struct Client {
    pub(crate) core: Guarded<Arc<Core>>,
}

impl Core {
    pub(crate) fn of_server(remote: Remote, call_timeout: Duration) -> Arc<Self> {
        let path = remote.path().name();
        Arc::new(Self {
            store: Arc::new(remote.clone()),
            clock: Arc::clone(remote.clock()),
            registry: Registry::default(),
            call_timeout,
            path,
            remote: Some(remote),
            home: Mutex::new(None),
            handles: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    pub(crate) fn of_home(home: Home, call_timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::new(home.store().clone()),
            clock: Arc::clone(home.store().clock()),
            registry: Registry::default(),
            call_timeout,
            path: "embedded",
            remote: None,
            home: Mutex::new(Some(home)),
            handles: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// When a call must have ended that may take `timeout` seconds. Without a timeout of its own it has the client's.
    pub(crate) fn deadline(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Nanos>> {
        let left = match timeout {
            Some(seconds) => waiting::duration(py, "timeout", seconds)?,
            None => self.call_timeout,
        };
        Ok(Some(self.clock.now().plus(left)))
    }

    /// Refuses what is asked of a client that was closed.
    pub(crate) fn alive(&self, py: Python<'_>) -> PyResult<()> {
        let closed = self.closed.load(Ordering::SeqCst);
        if closed { Err(CLOSED).or_raise(py) } else { Ok(()) }
    }

    pub(crate) fn keep(&self, handle: &Arc<Handle>) {
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.retain(|handle| handle.strong_count() > 0);
        handles.push(Arc::downgrade(handle));
    }

    pub(crate) fn handles(&self) -> Vec<Arc<Handle>> {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.iter().filter_map(Weak::upgrade).collect()
    }
}

/// What is said of a handle beside the identity.
pub(crate) struct HandleOptions {
    pub(crate) durable: bool,
    pub(crate) ttl: Option<Duration>,
    pub(crate) lanes: bool,
    pub(crate) batches_max: usize,
    pub(crate) timeout: Duration,
}

/// What a handle is, for the calls on it and for what they give.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
    pub(crate) cut: Cut,
    pub(crate) namespace: NamespaceId,
    pub(crate) pages: Batches,
    options: PagesOptions,
    timeout: Duration,
    pub(crate) shapes: Vec<(Group, Coordinate, BlockShape)>,
    /// Reads and calls that wait: how many have memory now.
    pub(crate) calls: Arc<AtomicU64>,
}

impl Handle {
    pub(crate) fn new(core: &Arc<Core>, cut: Cut, options: &HandleOptions) -> Result<Arc<Self>, Error> {
        let namespace = core.store.register(&cut.identity, &cut.geometry)?;
        let batches = PagesOptions {
            durability: if options.durable { Durability::Durable } else { Durability::Relaxed },
            expires_after: options.ttl,
            batches_max: options.batches_max,
            until_free: true,
            event_fds: if options.lanes { EventFds::PerLane } else { EventFds::One },
            ..PagesOptions::new(namespace)
        };
        let pages = Batches::new(Arc::clone(&core.store), batches.clone())?;
        let mut shapes: Vec<(Group, Coordinate, BlockShape)> = Vec::new();
        for (group, _, coordinate, shape) in &cut.columns {
            if !shapes.iter().any(|(known, other, _)| (known, other) == (group, coordinate)) {
                shapes.push((*group, *coordinate, shape.clone()));
            }
        }
        let (core, timeout) = (Arc::clone(core), options.timeout);
        Ok(Arc::new(Self {
            core,
            cut,
            namespace,
            pages,
            options: batches,
            timeout,
            shapes,
            calls: Arc::default(),
        }))
    }

    /// Whether no batch and no call has memory any more.
    pub(crate) fn is_free(&self) -> bool {
        self.pages.is_free() && self.calls.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn terms(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Terms> {
        let left = match timeout {
            Some(seconds) => waiting::duration(py, "timeout", seconds)?,
            None => self.timeout,
        };
        Ok(Terms { deadline: Some(self.core.clock.now().plus(left)), ..Terms::default() })
    }

    /// Asks and waits for the answer.
    pub(crate) fn call(
        &self,
        py: Python<'_>,
        kind: BatchKind,
        asked: Asked<'_>,
        laid: Option<&Laid>,
        terms: &Terms,
    ) -> PyResult<Told> {
        let options = PagesOptions { event_fds: EventFds::One, batches_max: 1, ..self.options.clone() };
        let batches = Batches::new(Arc::clone(&self.core.store), options).or_raise(py)?;
        let memory = laid.map_or(Memory::Nowhere, |laid| laid.memory(&self.shapes));
        py.detach(|| asked.submit(&batches, kind, &memory, terms)).or_raise(py)?;
        let told = wait(py, &batches, None);
        if told.is_err() {
            // Ctrl-C: the exception does not leave before the batch has let go of the memory.
            batches.close();
            waiting::until_free(py, || batches.is_free());
        }
        told?.into_iter().next().ok_or(Reason::Bug("a batch returned no result")).or_raise(py)
    }
}

/// Waits for completions, at most as long as is said; none if nothing is under way.
pub(crate) fn wait(py: Python<'_>, batches: &Batches, seconds: Option<Duration>) -> PyResult<Vec<Told>> {
    let mut left = seconds;
    loop {
        let mut told = Vec::new();
        py.detach(|| batches.drain(&mut told));
        if !told.is_empty() || batches.under_way() == 0 {
            return Ok(told);
        }
        let look = Duration::new(LOOK.tv_sec.unsigned_abs(), LOOK.tv_nsec as u32);
        let some = left.map_or(look, |left| left.min(look));
        if some.is_zero() {
            return Ok(told);
        }
        let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(some.subsec_nanos()) };
        let rung = py.detach(|| {
            let mut readable: Vec<PollFd<'_>> = Vec::new();
            for lane in Lane::ALL {
                let bell = batches.event_fd(lane);
                if !readable.iter().any(|known| known.as_fd().as_raw_fd() == bell.as_raw_fd()) {
                    readable.push(PollFd::from_borrowed_fd(bell, PollFlags::IN));
                }
            }
            // Interrupted by a signal: that is looked at right below.
            // ends: `pause`, and the caller's time
            poll(&mut readable, Some(&pause)).unwrap_or(0)
        });
        if rung == 0 {
            left = left.map(|left| left.saturating_sub(some));
        }
        py.check_signals()?;
    }
}
