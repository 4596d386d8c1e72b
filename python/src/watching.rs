//! What happens to blocks, as an iterator.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_contract::api::{EventKind, Sequence, Subscription};
use kvarts_contract::error::Reason;
use kvarts_contract::events::{Event as Told, Subject};
use kvarts_layout::{BlockKey, Group, NamespaceId};
use kvarts_wire::fault;
use kvarts_wire::proto::{self, event::What};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::OrRaise;
use crate::guarded::Guarded;
use crate::handle::Core;
use crate::waiting;

/// Events that are taken at once.
const SOME: usize = 256;

/// Something that happened: see the stub.
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Event {
    what: &'static str,
    namespace: NamespaceId,
    key: Option<BlockKey>,
    group: Group,
    sequence: Sequence,
}

#[pymethods]
impl Event {
    #[getter]
    fn what(&self) -> &'static str {
        self.what
    }

    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.namespace.as_bytes())
    }

    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.key.map(|key| PyBytes::new(py, key.as_bytes()))
    }

    #[getter]
    fn group(&self) -> u32 {
        self.group.0
    }

    #[getter]
    fn sequence(&self) -> (u64, u64) {
        (self.sequence.stream, self.sequence.number)
    }

    fn __repr__(&self) -> String {
        format!("<kvarts.Event {} {}>", self.what, self.key.map_or("all".to_owned(), |key| key.to_string()))
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

impl From<Told> for Event {
    fn from(told: Told) -> Self {
        let (namespace, key, group) = match told.subject {
            Subject::Block(block) => (block.namespace, Some(block.key), block.group),
            Subject::Namespace(namespace) => (namespace, None, Group(0)),
        };
        Self { what: name(told.kind), namespace, key, group, sequence: told.sequence }
    }
}

/// An event of a server. Where events are missing it says so itself.
fn of_wire(wire: &proto::Event) -> Result<Event, Reason> {
    let what = match wire.what() {
        What::Stored => "stored",
        What::Evicted => "evicted",
        What::Expired => "expired",
        What::Deleted => "deleted",
        What::Quarantined => "damaged",
        What::Gap | What::Unspecified => return Err(Reason::EventGap),
    };
    let namespace = <[u8; 32]>::try_from(&wire.namespace[..]).map(NamespaceId);
    let sequence = wire.sequence.unwrap_or_default();
    Ok(Event {
        what,
        namespace: namespace.map_err(|_| Reason::Bug("an event without a namespace"))?,
        key: <[u8; 32]>::try_from(&wire.key[..]).ok().map(BlockKey),
        group: Group(wire.column.as_ref().map_or(0, |column| column.group)),
        sequence: Sequence { stream: sequence.stream, number: sequence.number },
    })
}

/// Where events come from.
enum Source {
    Server(Box<tonic::Streaming<proto::Event>>),
    Here(Subscription, VecDeque<Told>),
}

impl Source {
    async fn next(&mut self) -> Result<Option<Event>, Reason> {
        match self {
            Self::Server(stream) => {
                // ends: the caller's time or a signal, by `run_until`; or the connection, once the server is silent
                let event = stream.message().await.map_err(|status| fault::reason_of(&status))?;
                event.as_ref().map(of_wire).transpose()
            }
            Self::Here(subscription, here) => {
                if here.is_empty() {
                    match subscription.next(SOME).await {
                        Some(events) => here.extend(events.map_err(|_| Reason::EventGap)?),
                        None => return Ok(None),
                    }
                }
                Ok(here.pop_front().map(Event::from))
            }
        }
    }
}

/// Events, one after the other.
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Events {
    source: Guarded<Mutex<Option<Source>>>,
}

#[pymethods]
impl Events {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        let place = self.source.get()?;
        let taken = place.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut source) = taken else { return Ok(None) };
        let next = waiting::run(py, source.next());
        // Nothing is lost by a wait that was interrupted.
        let over = matches!(next, Ok(Ok(None) | Err(_)));
        if !over {
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(source);
        }
        next?.or_raise(py)
    }
}

/// Follows what happens from now on, or since an event.
pub(crate) fn watch(py: Python<'_>, core: &Arc<Core>, after: Option<(u64, u64)>) -> PyResult<Events> {
    let after = after.map(|(stream, number)| Sequence { stream, number });
    let source = match &core.remote {
        Some(remote) => {
            let after = after.map(|Sequence { stream, number }| proto::Sequence { stream, number });
            Source::Server(Box::new(py.detach(|| remote.watch(after)).or_raise(py)?))
        }
        None => Source::Here(core.store.subscribe(after), VecDeque::new()),
    };
    Ok(Events { source: Guarded::new(Mutex::new(Some(source))) })
}
