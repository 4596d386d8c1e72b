//! A store: a server's, or one in this process.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use kvarts_client::{Client as Remote, ConnectOptions, PoolName, Via};
use kvarts_contract::buffers::shared;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::NamespaceId;
use kvarts_layout::cut::{Cut, Wanted};
use kvarts_layout::identity::meant_dtype;
use kvarts_wire::local::limits::PINNED_BYTES_MAX;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::buffer;
use crate::error::{OrRaise, invalid, late};
use crate::guarded::Guarded;
use crate::handle::{Client, Core, Handle, HandleOptions};
use crate::left;
use crate::memory::{Adopted, Memory};
use crate::pages::Pages;
use crate::planning::Times;
use crate::pool::{self, Pool};
use crate::routing;
use crate::session::{self, Session};
use crate::waiting;
use crate::watching::{self, Events, Watched};

#[doc = stub!("connect")]
#[pyfunction]
#[pyo3(signature = (
    endpoint, token=None, *, via="best", timeout=60.0, authority=None, certificate=None, private_key=None, server_name=None,
    server_uid=None, threads=2, of_cluster=false,
))]
#[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
pub(crate) fn connect(
    py: Python<'_>,
    endpoint: String,
    token: Option<String>,
    via: &str,
    timeout: f64,
    authority: Option<Vec<u8>>,
    certificate: Option<Vec<u8>>,
    private_key: Option<Vec<u8>>,
    server_name: Option<String>,
    server_uid: Option<u32>,
    threads: usize,
    of_cluster: bool,
) -> PyResult<Client> {
    let via = match via {
        "best" => Via::Best,
        "local" => Via::Local,
        "grpc" => Via::Grpc,
        _ => return Err(invalid(py, "via", "the value must be best, local or grpc")),
    };
    let identity = match (certificate, private_key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(invalid(py, "certificate", "set both certificate and private_key")),
    };
    let call_timeout = waiting::duration(py, "timeout", timeout)?;
    let options = ConnectOptions {
        token,
        authority,
        identity,
        server_name,
        call_timeout,
        via,
        server_uid,
        threads,
        of_cluster,
        ..ConnectOptions::to(endpoint)
    };
    let remote = py.detach(|| Remote::connect(&options)).or_raise(py)?;
    Ok(Client { core: Guarded::new(Core::of_server(remote, call_timeout)) })
}

#[pymethods]
impl Client {
    #[doc = stub!("Client.path")]
    #[getter]
    fn path(&self) -> PyResult<&'static str> {
        Ok(self.core.get()?.path)
    }

    #[doc = stub!("Client.held_bytes")]
    #[getter]
    fn held_bytes(&self) -> PyResult<u64> {
        Ok(self.core.get()?.remote.as_ref().map_or(0, Remote::held_bytes))
    }

    #[pyo3(signature = (
        page_bytes=None, *, model, revision, dtype, engine, layout, layout_version="1", block_tokens=1,
        tokenizer="none", adapter="none", quantisation="none", scales="none",
        rope="none", window="none", extras=None, spec=None, tp_size=1, tp_rank=0, windows=None, durable=false,
        ttl=None, lanes=false, batches_max=1024, timeout=None,
    ))]
    #[doc = stub!("Client.pages")]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn pages(
        &self,
        py: Python<'_>,
        page_bytes: Option<&Bound<'_, PyAny>>,
        model: String,
        revision: String,
        dtype: String,
        engine: String,
        layout: String,
        layout_version: &str,
        block_tokens: u32,
        tokenizer: &str,
        adapter: &str,
        quantisation: &str,
        scales: &str,
        rope: &str,
        window: &str,
        extras: Option<BTreeMap<String, String>>,
        spec: Option<&str>,
        tp_size: u16,
        tp_rank: u16,
        windows: Option<BTreeMap<u32, u32>>,
        durable: bool,
        ttl: Option<f64>,
        lanes: bool,
        batches_max: usize,
        timeout: Option<f64>,
    ) -> PyResult<Pages> {
        let core = self.core.get()?;
        core.alive(py)?;
        let extras = extras.unwrap_or_default();
        let wanted = Wanted {
            model,
            revision,
            dtype,
            engine,
            layout,
            layout_version: layout_version.to_owned(),
            block_tokens,
            tokenizer: tokenizer.to_owned(),
            adapter: adapter.to_owned(),
            quantisation: quantisation.to_owned(),
            scales: scales.to_owned(),
            rope: rope.to_owned(),
            window: window.to_owned(),
            extras,
            tp_size,
            tp_rank,
            windows: windows.unwrap_or_default(),
        };
        if let Some(meant) = meant_dtype(&wanted.dtype) {
            let text = format!(
                "dtype {:?} is a number format that no engine is known to use: did you mean {meant:?}? \
                Blocks are found only with the dtype with which they were stored",
                wanted.dtype
            );
            let text = std::ffi::CString::new(text).unwrap_or_default();
            PyErr::warn(py, &py.get_type::<pyo3::exceptions::PyUserWarning>(), &text, 1)?;
        }
        let cut = Cut::new(page_bytes.map(sizes).transpose()?, spec, wanted).or_raise(py)?;
        let ttl = ttl.map(|seconds| waiting::duration(py, "ttl", seconds)).transpose()?;
        let timeout = timeout.map(|seconds| waiting::duration(py, "timeout", seconds)).transpose()?;
        if batches_max == 0 {
            return Err(invalid(py, "batches_max", "the value must be at least 1"));
        }
        let options =
            HandleOptions { durable, ttl, lanes, batches_max, timeout: timeout.unwrap_or(core.call_timeout) };
        let handle = py.detach(|| Handle::new(core, cut, &options)).or_raise(py)?;
        core.keep(&handle);
        Ok(Pages { handle: Guarded::new(handle) })
    }

    #[doc = stub!("Client.memory")]
    fn memory(&self, py: Python<'_>, nbytes: usize) -> PyResult<Memory> {
        let core = self.core.get()?;
        core.alive(py)?;
        left::settle(py);
        if nbytes == 0 {
            return Err(invalid(py, "nbytes", "the value must be at least 1"));
        }
        let mmap = py.import("mmap")?;
        let shared = match &core.remote {
            Some(remote) if core.path == "local" => Some(py.detach(|| made(remote, nbytes)).or_raise(py)?),
            _ => None,
        };
        let owner = match &shared {
            Some((region, file)) => mmap.getattr("mmap")?.call1((file.as_raw_fd(), region.len()))?,
            None => mmap.getattr("mmap")?.call1((-1, nbytes))?,
        };
        let given = buffer::given("nbytes", &owner, true)?;
        let mode = match (&shared, core.path) {
            (Some(_), _) => "adopted",
            (None, "embedded") => "embedded",
            (None, _) => "copied",
        };
        let adopted = Adopted {
            address: given.address,
            nbytes: given.len,
            held: Some(given.held),
            owner: Some(owner.unbind()),
            mode,
            region: shared.map(|(region, _)| (region, 0)),
        };
        Memory::new(core, adopted).ok_or_else(|| invalid(py, "nbytes", "this memory is already registered"))
    }

    #[doc = stub!("Client.shared_pool")]
    fn shared_pool(&self, py: Python<'_>, nbytes: usize) -> PyResult<Pool> {
        let core = self.core.get()?;
        core.alive(py)?;
        left::settle(py);
        Pool::take(py, core, nbytes)
    }

    #[doc = stub!("Client.attach")]
    fn attach(&self, py: Python<'_>, name: &str) -> PyResult<Memory> {
        let core = self.core.get()?;
        core.alive(py)?;
        left::settle(py);
        let name = name.parse::<PoolName>().or_raise(py)?;
        let embedded =
            || Error(Reason::Config("a store in this process has no pools: connect to a server".to_owned()));
        let remote = core.remote.as_ref().ok_or_else(embedded).or_raise(py)?;
        let region = py.detach(|| remote.attach(name)).or_raise(py)?;
        pool::memory(py, core, &region)
    }

    #[doc = stub!("Client.adopt")]
    #[pyo3(signature = (buffer, *, fd=None, offset=0, nbytes=None))]
    fn adopt(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        fd: Option<i32>,
        offset: u64,
        nbytes: Option<usize>,
    ) -> PyResult<Memory> {
        let core = self.core.get()?;
        core.alive(py)?;
        left::settle(py);
        let (address, len, held, owner) = match (buffer.extract::<usize>(), nbytes) {
            (Ok(address), Some(len)) => (address, len, None, None),
            (Ok(_), None) => {
                return Err(invalid(py, "nbytes", "the value is required if buffer is an address"));
            }
            (Err(_), _) => {
                let given = buffer::given("buffer", buffer, true)?;
                let len = nbytes.unwrap_or(given.len);
                if len > given.len {
                    return Err(invalid(
                        py,
                        "nbytes",
                        format!("nbytes is {len}, but the buffer has only {} bytes", given.len),
                    ));
                }
                (given.address, len, Some(given.held), Some(buffer.clone().unbind()))
            }
        };
        if len == 0 || address == 0 || address.checked_add(len).is_none() {
            return Err(invalid(py, "buffer", "the buffer is empty"));
        }
        let shared = match (&core.remote, fd) {
            (Some(remote), Some(fd)) if core.path == "local" => {
                Some(engines_file(py, remote, fd, offset, len)?)
            }
            _ => None,
        };
        let mode = match (&shared, core.path) {
            (Some(_), _) => "adopted",
            (None, "embedded") => "embedded",
            (None, _) => "copied",
        };
        let adopted = Adopted { address, nbytes: len, held, owner, mode, region: shared };
        let known = Memory::new(core, adopted);
        known.ok_or_else(|| {
            invalid(
                py,
                "buffer",
                "a part of the buffer is already registered: close the Memory of that part first",
            )
        })
    }

    #[doc = stub!("Client.stats")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let core = self.core.get()?;
        core.alive(py)?;
        let found = PyDict::new(py);
        found.set_item("path", core.path)?;
        if let Some(remote) = &core.remote {
            let stats = py.detach(|| remote.stats()).or_raise(py)?;
            found.set_item("version", stats.version)?;
            found.set_item("budget_bytes", stats.budget_bytes)?;
            found.set_item("allocated_bytes", stats.allocated_bytes)?;
            found.set_item("index_bytes", stats.index_bytes)?;
            found.set_item("notes", stats.notes)?;
            let counts: BTreeMap<String, u64> = stats.counts.into_iter().collect();
            found.set_item("counts", counts)?;
        }
        if let Some(home) = &*core.home.lock().unwrap_or_else(PoisonError::into_inner) {
            let stats = home.store().stats();
            found.set_item("version", env!("CARGO_PKG_VERSION"))?;
            found.set_item("budget_bytes", stats.budget_bytes)?;
            found.set_item("allocated_bytes", stats.allocated_bytes)?;
            found.set_item("index_bytes", stats.index.bytes)?;
            found.set_item("notes", home.notes())?;
            let counts: BTreeMap<&str, u64> = stats.counts.named().into_iter().collect();
            found.set_item("counts", counts)?;
        }
        Ok(found)
    }

    #[doc = stub!("Client.models")]
    fn models<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let core = self.core.get()?;
        core.alive(py)?;
        routing::models(py, core)
    }

    #[pyo3(signature = (
        nodes, *, times, prompt_tokens, namespace=None, keys=None, owner=None, shared_tokens=0, forked=false,
        token_bytes=0.0, layers=0,
    ))]
    #[doc = stub!("Client.route")]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn route<'py>(
        &self,
        py: Python<'py>,
        nodes: Vec<Bound<'py, PyDict>>,
        times: &Times,
        prompt_tokens: u64,
        namespace: Option<Vec<u8>>,
        keys: Option<Bound<'py, PyAny>>,
        owner: Option<(u32, u64)>,
        shared_tokens: u64,
        forked: bool,
        token_bytes: f64,
        layers: u32,
    ) -> PyResult<Bound<'py, PyDict>> {
        let core = self.core.get()?;
        core.alive(py)?;
        let asked = routing::Asked {
            prompt_tokens,
            namespace,
            keys,
            owner,
            shared_tokens,
            forked,
            token_bytes,
            layers,
        };
        routing::route(py, core, &nodes, times, asked)
    }

    #[pyo3(signature = (
        pages, keys, *, columns=None, shared_blocks=0, lease=60.0, prompt_tokens=0, engine_blocks=None, times=None,
    ))]
    #[doc = stub!("Client.session")]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn session(
        &self,
        pages: &Pages,
        keys: &Bound<'_, PyAny>,
        columns: Option<Vec<(u32, Option<u16>)>>,
        shared_blocks: u32,
        lease: f64,
        prompt_tokens: u64,
        engine_blocks: Option<u32>,
        times: Option<PyRef<'_, Times>>,
    ) -> PyResult<Session> {
        let turn = session::Turn { prompt_tokens, engine_blocks, times };
        let asked = session::Asked { columns, shared_blocks, lease, turn };
        session::open(keys.py(), self.core.get()?, pages, keys, &asked)
    }

    #[doc = stub!("Client.watch")]
    #[pyo3(signature = (*, after=None, namespace=None, snapshot=false, runs=false))]
    fn watch(
        &self,
        py: Python<'_>,
        after: Option<(u64, u64)>,
        namespace: Option<&[u8]>,
        snapshot: bool,
        runs: bool,
    ) -> PyResult<Events> {
        let core = self.core.get()?;
        core.alive(py)?;
        let named = |bytes| {
            <[u8; 32]>::try_from(bytes).map_err(|_| invalid(py, "namespace", "32 bytes are required"))
        };
        let namespace = namespace.map(named).transpose()?.map(NamespaceId);
        watching::watch(py, core, &Watched { after, namespace, snapshot, runs })
    }

    #[doc = stub!("Client.close")]
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let core = self.core.get()?;
        core.closed.store(true, Ordering::SeqCst);
        let deadline = core.deadline(py, timeout)?;
        let handles = core.handles();
        py.detach(|| handles.iter().for_each(|handle| handle.pages.close()));
        let is_free = || handles.iter().all(|handle| handle.is_free());
        let free = waiting::until(py, &*core.clock, deadline, is_free)?;
        left::settle(py);
        if !free {
            return Err(late(py, "a disk or a thread still uses buffers of a batch"));
        }
        let home = core.home.lock().unwrap_or_else(PoisonError::into_inner).take();
        match home {
            Some(home) => py.detach(|| home.close()).or_raise(py),
            None => Ok(()),
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, None)
    }

    fn __repr__(&self) -> String {
        format!("<kvarts.Client {}>", self.core.get().map_or("of another process", |core| core.path))
    }
}

/// Page sizes: one, or one for each group.
fn sizes(given: &Bound<'_, PyAny>) -> PyResult<BTreeMap<u32, u64>> {
    if let Ok(one) = given.extract::<u64>() {
        return Ok(BTreeMap::from([(0, one)]));
    }
    let several = given.extract::<BTreeMap<u32, u64>>();
    several.map_err(|_| {
        invalid(
            given.py(),
            "page_bytes",
            "the value must be a number of bytes, or a dict with a number of bytes for each group",
        )
    })
}

/// A file in memory for pages, shared as an engine's would be: this process verifies what disks write into it, where it lies. A
/// server that verifies memory of a client's copies all of it for that, because it never touches what it does not own.
fn made(remote: &Remote, bytes: usize) -> Result<(Arc<kvarts_contract::buffers::Region>, OwnedFd), Error> {
    let fault = |error: std::io::Error| {
        Error(Reason::Config(format!("the shared memory could not be prepared: {error}")))
    };
    let page = kvarts_contract::buffers::region::PAGE;
    let whole = bytes.checked_next_multiple_of(page).ok_or(Error(Reason::TooMany("bytes")))? as u64;
    let file = shared::sealed(whole).map_err(fault)?;
    let region = remote.adopt(file.try_clone().map_err(fault)?, whole)?;
    // A device is told of long stretches instead of single pages: before the first read, because pages that a device writes to
    // stay where they are.
    region.populate().map_err(fault)?;
    if whole <= PINNED_BYTES_MAX {
        region.collapse();
    }
    Ok((region, file))
}

/// Shares an engine's file in memory, whole pages of it; where its bytes begin in the region.
fn engines_file(
    py: Python<'_>,
    remote: &Remote,
    fd: i32,
    offset: u64,
    len: usize,
) -> PyResult<(Arc<kvarts_contract::buffers::Region>, usize)> {
    let page = kvarts_contract::buffers::region::PAGE as u64;
    let all = offset.checked_add(len as u64).filter(|_| offset.is_multiple_of(page));
    let all = all.and_then(|all| all.checked_next_multiple_of(page));
    let all = all.ok_or_else(|| invalid(py, "offset", "the offset must be a multiple of 4096 bytes"))?;
    if fd < 0 {
        return Err(invalid(py, "fd", "the number is not an open file descriptor"));
    }
    // By the interpreter: a number that is no descriptor is an error there.
    let own: i32 = py.import("os")?.call_method1("dup", (fd,))?.extract()?;
    let file = owned(own);
    let region = py.detach(|| remote.adopt(file, all)).or_raise(py)?;
    Ok((region, usize::try_from(offset).unwrap_or(usize::MAX)))
}

/// A descriptor that was just made for us.
fn owned(fd: i32) -> OwnedFd {
    // SAFETY: it was duplicated right above, and no other code knows its number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
