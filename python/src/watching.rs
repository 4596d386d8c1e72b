//! What happens to blocks, as an iterator, or some at a time.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use kvarts_contract::api::{EventKind, Sequence, Subscription};
use kvarts_contract::blocking::block_on;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::Reason;
use kvarts_contract::events::{Event as Told, Subject};
use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey, NamespaceId};
use kvarts_wire::proto::{self, event::What};
use kvarts_wire::{convert, fault};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::OrRaise;
use crate::guarded::Guarded;
use crate::handle::Core;
use crate::waiting;

/// Events that are taken at once.
const SOME: usize = 256;
/// What an event of missing events is called.
const GAP: &str = "gap";

#[doc = stub!("Event")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Event {
    what: &'static str,
    namespace: Option<NamespaceId>,
    keys: Vec<BlockKey>,
    group: Group,
    coordinate: Coordinate,
    sequence: Option<Sequence>,
}

#[pymethods]
impl Event {
    #[getter]
    fn what(&self) -> &'static str {
        self.what
    }

    #[doc = stub!("Event.namespace")]
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.namespace.map(|namespace| PyBytes::new(py, namespace.as_bytes()))
    }

    #[doc = stub!("Event.key")]
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.keys.first().map(|key| PyBytes::new(py, key.as_bytes()))
    }

    #[doc = stub!("Event.keys")]
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.keys.iter().map(|key| PyBytes::new(py, key.as_bytes())).collect()
    }

    #[getter]
    fn group(&self) -> u32 {
        self.group.0
    }

    #[doc = stub!("Event.coordinate")]
    #[getter]
    fn coordinate(&self) -> Option<(u16, u16, u16)> {
        match self.coordinate {
            Coordinate::Replicated => None,
            Coordinate::Heads { start, count, of } => Some((start, count, of)),
        }
    }

    #[doc = stub!("Event.sequence")]
    #[getter]
    fn sequence(&self) -> Option<(u64, u64)> {
        self.sequence.map(|sequence| (sequence.stream, sequence.number))
    }

    fn __repr__(&self) -> String {
        let keys: Vec<_> = self.keys.iter().map(ToString::to_string).collect();
        let whose = if keys.is_empty() { "all".to_owned() } else { keys.join(" ") };
        format!("<kvarts.Event {} {whose}>", self.what)
    }
}

impl Event {
    fn bare(what: &'static str, sequence: Option<Sequence>) -> Self {
        let (group, coordinate) = (Group(0), Coordinate::Replicated);
        Self { what, namespace: None, keys: Vec::new(), group, coordinate, sequence }
    }

    fn present(block: &IndexKey) -> Self {
        let IndexKey { namespace, key, group, coordinate } = *block;
        Self {
            what: "present",
            namespace: Some(namespace),
            keys: vec![key],
            group,
            coordinate,
            sequence: None,
        }
    }
}

fn name(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Stored => "stored",
        EventKind::Evicted => "evicted",
        EventKind::Expired => "expired",
        EventKind::Deleted => "deleted",
        EventKind::Quarantined => "damaged",
    }
}

fn namespace_of(told: &Told) -> NamespaceId {
    match told.subject {
        Subject::Block(block) => block.namespace,
        Subject::Namespace(namespace) => namespace,
    }
}

impl From<Told> for Event {
    fn from(told: Told) -> Self {
        let (namespace, bare) = (namespace_of(&told), Self::bare(name(told.kind), Some(told.sequence)));
        match told.subject {
            Subject::Block(block) => {
                Self { what: bare.what, sequence: bare.sequence, ..Self::present(&block) }
            }
            Subject::Namespace(_) => Self { namespace: Some(namespace), ..bare },
        }
    }
}

/// An event of a server.
fn of_wire(wire: &proto::Event) -> Result<Event, Reason> {
    let sequence = wire.sequence.map(|at| Sequence { stream: at.stream, number: at.number });
    let what = match wire.what() {
        What::Stored => "stored",
        What::Evicted => "evicted",
        What::Expired => "expired",
        What::Deleted => "deleted",
        What::Quarantined => "damaged",
        What::Present => "present",
        What::Complete => return Ok(Event::bare("complete", sequence)),
        What::Gap | What::Unspecified => return Ok(Event::bare(GAP, sequence)),
    };
    let broken = |_| Reason::Bug("the server sent an invalid event");
    let namespace = convert::namespace(&wire.namespace).map_err(broken)?;
    let (group, coordinate) = convert::column(wire.column.as_ref()).map_err(broken)?;
    let (keys, []) = wire.key.as_chunks::<32>() else {
        return Err(Reason::Bug("the server sent an event with an incomplete key"));
    };
    let keys = keys.iter().copied().map(BlockKey).collect();
    Ok(Event { what, namespace: Some(namespace), keys, group, coordinate, sequence })
}

/// The store of this process.
struct Here {
    core: Arc<Core>,
    subscription: Subscription,
    events: VecDeque<Event>,
    namespace: Option<NamespaceId>,
    snapshot: bool,
}

impl Here {
    fn is_wanted(&self, namespace: NamespaceId) -> bool {
        self.namespace.is_none_or(|wanted| wanted == namespace)
    }

    async fn next(&mut self) -> Result<Option<Event>, Reason> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            // Until the caller's time is over or a signal comes, by `run_until`; or the store is closed.
            match self.subscription.next(SOME).await {
                None => return Ok(None),
                Some(Ok(events)) => {
                    let wanted = events.into_iter().filter(|event| self.is_wanted(namespace_of(event)));
                    let wanted: Vec<_> = wanted.map(Event::from).collect();
                    self.events.extend(wanted);
                }
                Some(Err(gap)) => {
                    self.subscription = self.core.store.subscribe(Some(gap.resume));
                    self.events.push_back(Event::bare(GAP, Some(gap.resume)));
                    if self.snapshot {
                        self.list()?;
                    }
                }
            }
        }
    }

    /// Takes a snapshot; events go on behind it.
    fn list(&mut self) -> Result<(), Reason> {
        let mut cursor = None;
        loop {
            // ends: an executor answers from memory, or the store is closed
            let page = block_on(self.core.store.snapshot(cursor));
            let page = page.map_err(|_| Reason::Busy("the store is closing"))?.map_err(|error| error.0)?;
            let wanted = page.blocks.iter().filter(|block| self.is_wanted(block.namespace));
            let wanted: Vec<_> = wanted.map(Event::present).collect();
            self.events.extend(wanted);
            cursor = page.next;
            if cursor.is_none() {
                self.events.push_back(Event::bare("complete", Some(page.sequence)));
                self.subscription = self.core.store.subscribe(Some(page.sequence));
                return Ok(());
            }
        }
    }
}

/// Where events come from.
enum Source {
    Server(Box<tonic::Streaming<proto::Event>>),
    Here(Box<Here>),
}

impl Source {
    async fn next(&mut self) -> Result<Option<Event>, Reason> {
        match self {
            Self::Server(stream) => {
                // ends: the caller's time or a signal, by `run_until`; or the connection, once the server is silent
                let event = stream.message().await.map_err(|status| fault::reason_of(&status))?;
                event.as_ref().map(of_wire).transpose()
            }
            // ends: the caller's time or a signal, by `run_until`; or the store, when it is closed
            Self::Here(here) => here.next().await,
        }
    }

    /// The next event, if it is there now.
    fn try_next(&mut self) -> Option<Result<Option<Event>, Reason>> {
        let next = pin!(self.next());
        match next.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(next) => Some(next),
            Poll::Pending => None,
        }
    }
}

#[doc = stub!("Events")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Events {
    source: Guarded<Mutex<Option<Source>>>,
    clock: Arc<dyn Clock>,
    /// Whether a gap is told of, and not raised.
    snapshot: bool,
}

impl Events {
    fn taken(&self) -> PyResult<Option<Source>> {
        Ok(self.source.get()?.lock().unwrap_or_else(PoisonError::into_inner).take())
    }

    fn put_back(&self, source: Source) -> PyResult<()> {
        *self.source.get()?.lock().unwrap_or_else(PoisonError::into_inner) = Some(source);
        Ok(())
    }
}

#[pymethods]
impl Events {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        let Some(mut source) = self.taken()? else { return Ok(None) };
        let next = waiting::run(py, source.next()).map(|next| match next {
            Ok(Some(event)) if event.what == GAP && !self.snapshot => Err(Reason::EventGap),
            next => next,
        });
        // Nothing is lost by a wait that was interrupted.
        if !matches!(next, Ok(Ok(None) | Err(_))) {
            self.put_back(source)?;
        }
        next?.or_raise(py)
    }

    #[doc = stub!("Events.take")]
    fn take(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<Event>> {
        let within = waiting::duration(py, "timeout", timeout)?;
        let until = Nanos(self.clock.now().0.saturating_add(within.as_nanos() as u64));
        let Some(mut source) = self.taken()? else {
            return Err(Reason::Busy("the stream of events has ended")).or_raise(py);
        };
        let first = waiting::run_until(py, &*self.clock, until, source.next());
        let mut events = Vec::new();
        let mut next = match first {
            Ok(next) => next,
            Err(interrupted) => {
                self.put_back(source)?;
                return Err(interrupted);
            }
        };
        while let Some(Ok(Some(event))) = next {
            events.push(event);
            next = if events.len() < SOME { source.try_next() } else { None };
        }
        match next {
            // What ended it is told by the next call.
            None => self.put_back(source)?,
            Some(_) if !events.is_empty() => {}
            Some(Err(reason)) => return Err(reason).or_raise(py),
            Some(Ok(_)) => return Err(Reason::Busy("the stream of events has ended")).or_raise(py),
        }
        Ok(events)
    }
}

/// What is watched.
pub(crate) struct Watched {
    pub(crate) after: Option<(u64, u64)>,
    pub(crate) namespace: Option<NamespaceId>,
    pub(crate) snapshot: bool,
    pub(crate) runs: bool,
}

/// Follows what happens from now on, or since an event.
pub(crate) fn watch(py: Python<'_>, core: &Arc<Core>, watched: &Watched) -> PyResult<Events> {
    let Watched { after, namespace, snapshot, runs } = *watched;
    let source = match &core.remote {
        Some(remote) => {
            let after = after.map(|(stream, number)| proto::Sequence { stream, number });
            let namespace = namespace.map(|id| id.as_bytes().to_vec().into()).unwrap_or_default();
            let request = proto::WatchRequest { after, namespace, snapshot, runs };
            Source::Server(Box::new(py.detach(|| remote.watch(request)).or_raise(py)?))
        }
        None => {
            let from = after.map(|(stream, number)| Sequence { stream, number });
            let subscription = core.store.subscribe(from);
            let (core, events) = (Arc::clone(core), VecDeque::new());
            let mut here = Here { core, subscription, events, namespace, snapshot };
            if snapshot && from.is_none() {
                py.detach(|| here.list()).or_raise(py)?;
            }
            Source::Here(Box::new(here))
        }
    };
    let (source, clock) = (Guarded::new(Mutex::new(Some(source))), Arc::clone(&core.clock));
    Ok(Events { source, clock, snapshot })
}
