//! Sessions: conversations whose blocks a server holds for as long as their client says so.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_client::session::{Session as Remote, SessionTerms, SessionTold};
use kvarts_contract::error::Error;
use kvarts_planner::tails::{Keep, Tail};
use kvarts_wire::{plans, proto, sessions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::error::{OrRaise, invalid};
use crate::guarded::Guarded;
use crate::handle::{Client, Core};
use crate::pages::Pages;
use crate::planning::Times;
use crate::{keys, waiting};

/// Why a store in this process has none.
const NO_SERVER: &str = "a store in this process has no sessions: connect to a server";

/// What is said of a turn.
#[derive(Default)]
pub(crate) struct Turn<'py> {
    pub(crate) prompt_tokens: u64,
    pub(crate) engine_blocks: Option<u32>,
    pub(crate) times: Option<PyRef<'py, Times>>,
}

impl Turn<'_> {
    fn wire(&self) -> Option<proto::SessionTurn> {
        Some(proto::SessionTurn {
            prompt_tokens: self.prompt_tokens,
            engine_blocks: self.engine_blocks,
            times: self.times.as_ref().map(|times| plans::wire_times(&times.0)),
        })
    }
}

/// What a session is opened with.
pub(crate) struct Asked<'py> {
    pub(crate) columns: Option<Vec<(u32, Option<u16>)>>,
    pub(crate) shared_blocks: u32,
    pub(crate) lease: f64,
    pub(crate) turn: Turn<'py>,
}

/// A session and what its server said last.
struct Live {
    session: Remote,
    told: SessionTold,
}

#[doc = stub!("Session")]
#[pyclass(frozen, weakref, module = "kvarts")]
pub(crate) struct Session {
    core: Guarded<Mutex<Arc<Core>>>,
    live: Guarded<Mutex<Live>>,
}

fn remote<'a>(py: Python<'_>, core: &'a Core) -> PyResult<&'a kvarts_client::Client> {
    core.alive(py)?;
    core.remote.as_ref().ok_or_else(|| invalid(py, "session", NO_SERVER))
}

/// Opens a session.
pub(crate) fn open(
    py: Python<'_>,
    core: &Arc<Core>,
    pages: &Pages,
    keys: &Bound<'_, PyAny>,
    asked: &Asked<'_>,
) -> PyResult<Session> {
    let (remote, handle) = (remote(py, core)?, pages.handle.get()?);
    let columns = match &asked.columns {
        Some(columns) => columns.clone(),
        None => {
            let mut groups: Vec<u32> = handle.shapes.iter().map(|(group, ..)| group.0).collect();
            groups.sort_unstable();
            groups.dedup();
            groups.into_iter().map(|group| (group, None)).collect()
        }
    };
    let column = |(group, rank)| handle.cut.column(group, rank).map(|(group, place, _)| (group, place));
    let terms = SessionTerms {
        namespace: handle.namespace,
        columns: columns.into_iter().map(column).collect::<Result<_, _>>().or_raise(py)?,
        shared_blocks: asked.shared_blocks,
        lease: waiting::duration(py, "lease", asked.lease)?,
    };
    let (keys, turn) = (keys::keys(keys)?, asked.turn.wire());
    let opened = py.detach(|| Remote::open(remote, terms, &keys, turn)).or_raise(py)?;
    Ok(Session::new(core, opened))
}

impl Session {
    fn new(core: &Arc<Core>, (session, told): (Remote, SessionTold)) -> Self {
        let live = Live { session, told };
        Self { core: Guarded::new(Mutex::new(Arc::clone(core))), live: Guarded::new(Mutex::new(live)) }
    }

    fn core(&self) -> PyResult<Arc<Core>> {
        Ok(Arc::clone(&self.core.get()?.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Does something with it, which may wait for the server, without the interpreter's lock. One call of a session at a time.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        what: impl FnOnce(&mut Live) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let live = self.live.get()?;
        let lock = |live: &Mutex<Live>| -> Result<T, Error> {
            let mut live: MutexGuard<'_, Live> = live.lock().unwrap_or_else(PoisonError::into_inner);
            what(&mut live)
        };
        py.detach(|| lock(live)).or_raise(py)
    }

    /// The same with a call of the server's, whose client must not be closed.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        what: impl FnOnce(&mut Live) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.core()?.alive(py)?;
        self.with(py, what)
    }

    fn say<'py>(
        &self,
        py: Python<'py>,
        what: impl FnOnce(&mut Remote) -> Result<SessionTold, Error> + Send,
    ) -> PyResult<Bound<'py, PyDict>> {
        let told = self.call(py, |live| {
            live.told = what(&mut live.session)?;
            Ok(live.told.clone())
        })?;
        dict(py, &told)
    }
}

#[pymethods]
impl Session {
    #[doc = stub!("Session.id")]
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |live| Ok(live.session.id()))
    }

    #[doc = stub!("Session.keys")]
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let keys = self.with(py, |live| Ok(live.session.keys().to_vec()))?;
        Ok(keys.iter().map(|key| PyBytes::new(py, key.as_bytes())).collect())
    }

    #[doc = stub!("Session.told")]
    #[getter]
    fn told<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict(py, &self.with(py, |live| Ok(live.told.clone()))?)
    }

    #[doc = stub!("Session.fork")]
    #[pyo3(signature = (blocks=None, *, prompt_tokens=0, engine_blocks=None, times=None))]
    fn fork(
        &self,
        py: Python<'_>,
        blocks: Option<u32>,
        prompt_tokens: u64,
        engine_blocks: Option<u32>,
        times: Option<PyRef<'_, Times>>,
    ) -> PyResult<Self> {
        let turn = Turn { prompt_tokens, engine_blocks, times }.wire();
        let forked = self.call(py, |live| {
            let all = u32::try_from(live.session.keys().len()).unwrap_or(u32::MAX);
            live.session.fork(blocks.unwrap_or(all), turn)
        })?;
        Ok(Self::new(&self.core()?, forked))
    }

    #[doc = stub!("Session.extend")]
    #[pyo3(signature = (keys, *, prompt_tokens=0, engine_blocks=None, times=None))]
    fn extend<'py>(
        &self,
        keys: &Bound<'py, PyAny>,
        prompt_tokens: u64,
        engine_blocks: Option<u32>,
        times: Option<PyRef<'py, Times>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let turn = Turn { prompt_tokens, engine_blocks, times }.wire();
        let (py, keys) = (keys.py(), keys::keys(keys)?);
        self.say(py, |session| session.extend(&keys, turn))
    }

    #[doc = stub!("Session.hold")]
    #[pyo3(signature = (first=0))]
    fn hold<'py>(&self, py: Python<'py>, first: u32) -> PyResult<Bound<'py, PyDict>> {
        self.say(py, |session| session.hold(first))
    }

    #[doc = stub!("Session.renew")]
    fn renew(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |live| live.session.renew())
    }

    #[doc = stub!("Session.hand_over")]
    fn hand_over<'py>(&self, py: Python<'py>, to: &Client) -> PyResult<Bound<'py, PyDict>> {
        let core = to.core.get()?;
        let remote = remote(py, core)?;
        let told = self.say(py, |session| session.hand_over(remote))?;
        *self.core.get()?.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(core);
        Ok(told)
    }

    #[doc = stub!("Session.close")]
    fn close(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |live| live.session.close())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py).map(drop)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (id, blocks) = self.with(py, |live| Ok((live.session.id(), live.session.keys().len())))?;
        Ok(format!("<kvarts.Session {id}, {blocks} blocks>"))
    }
}

fn dict<'py>(py: Python<'py>, told: &SessionTold) -> PyResult<Bound<'py, PyDict>> {
    let found = PyDict::new(py);
    found.set_item("held", told.held)?;
    found.set_item("class", sessions::wire_class(told.class).as_str_name().to_lowercase())?;
    found.set_item("tail", told.tail.as_ref().map(|tail| advice(py, tail)).transpose()?)?;
    found.set_item("owner", told.owner.as_ref().map(|owner| PyBytes::new(py, &owner.node)))?;
    found.set_item("is_owner", told.is_owner)?;
    Ok(found)
}

fn advice<'py>(py: Python<'py>, tail: &Tail) -> PyResult<Bound<'py, PyDict>> {
    let (keep, every_blocks) = match tail.keep {
        Keep::Nothing => ("nothing", 0),
        Keep::EveryBlock => ("every_block", 1),
        Keep::EveryBlocks(blocks) => ("every_blocks", blocks.get()),
        Keep::Replay => ("replay", 0),
    };
    let found = PyDict::new(py);
    found.set_item("keep", keep)?;
    found.set_item("every_blocks", every_blocks)?;
    found.set_item("tip", tail.tip)?;
    found.set_item("replay_tokens", tail.replay_tokens)?;
    found.set_item("replay_ms", tail.replay_ms)?;
    found.set_item("write_ms", tail.write_ms)?;
    Ok(found)
}
