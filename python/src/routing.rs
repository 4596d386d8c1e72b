//! Where a request should go, as a server says it; and the models that it knows.

use std::sync::Arc;

use kvarts_wire::{convert, plans, proto};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{OrRaise, invalid};
use crate::handle::Core;
use crate::keys;
use crate::planning::Times;

/// Why a store in this process answers none of it.
const NO_SERVER: &str = "a store in this process has no routes: connect to a server";

fn remote<'a>(py: Python<'_>, core: &'a Core) -> PyResult<&'a kvarts_client::Client> {
    core.remote.as_ref().ok_or_else(|| invalid(py, "route", NO_SERVER))
}

/// What the caller says of a node; the server fills in the rest.
fn node(py: Python<'_>, given: &Bound<'_, PyDict>) -> PyResult<proto::route_request::Node> {
    let mut node = proto::route_request::Node { decodes: true, ..proto::route_request::Node::default() };
    for (name, value) in given {
        let name: String = name.extract()?;
        match name.as_str() {
            "node" => node.node = value.extract()?,
            "decodes" => node.decodes = value.extract()?,
            "queue_ms" => node.queue_ms = value.extract()?,
            "decoding" => node.decoding = value.extract()?,
            "memory_tokens" => node.memory_tokens = value.extract()?,
            "device_tokens" => node.device_tokens = value.extract()?,
            "memory_bytes_per_ms" => node.memory_bytes_per_ms = value.extract()?,
            "disk_tokens" => node.disk_tokens = value.extract()?,
            "disk_bytes_per_ms" => node.disk_bytes_per_ms = value.extract()?,
            "disk_queue_ms" => node.disk_queue_ms = value.extract()?,
            "network_bytes_per_ms" => node.network_bytes_per_ms = value.extract()?,
            "network_queue_ms" => node.network_queue_ms = value.extract()?,
            "store" => node.store = value.extract::<Option<Vec<u8>>>()?.unwrap_or_default().into(),
            _ => return Err(invalid(py, "nodes", format!("`{name}` is not a field of a node"))),
        }
    }
    Ok(node)
}

/// What is asked besides the nodes.
pub(crate) struct Asked<'py> {
    pub(crate) prompt_tokens: u64,
    pub(crate) namespace: Option<Vec<u8>>,
    pub(crate) keys: Option<Bound<'py, PyAny>>,
    pub(crate) owner: Option<(u32, u64)>,
    pub(crate) shared_tokens: u64,
    pub(crate) forked: bool,
    pub(crate) token_bytes: f64,
    pub(crate) layers: u32,
}

/// Asks the server.
pub(crate) fn route<'py>(
    py: Python<'py>,
    core: &Arc<Core>,
    nodes: &[Bound<'py, PyDict>],
    times: &Times,
    asked: Asked<'py>,
) -> PyResult<Bound<'py, PyDict>> {
    let prompt = match (asked.namespace, &asked.keys) {
        (Some(namespace), Some(keys)) => Some(proto::route_request::Prompt {
            namespace: namespace.into(),
            keys: convert::key_bytes(&keys::keys(keys)?),
            requirements: Vec::new(),
        }),
        (None, None) => None,
        _ => return Err(invalid(py, "keys", "set both namespace and keys")),
    };
    let request = proto::RouteRequest {
        prompt_tokens: asked.prompt_tokens,
        token_bytes: asked.token_bytes,
        layers: asked.layers,
        times: Some(plans::wire_times(&times.0)),
        owner: asked.owner.map(|(node, tokens)| proto::route_request::Owner { node, tokens }),
        forked: asked.forked,
        nodes: nodes.iter().map(|one| node(py, one)).collect::<PyResult<_>>()?,
        explain: true,
        shared_tokens: asked.shared_tokens,
        prompt,
        ..proto::RouteRequest::default()
    };
    let remote = remote(py, core)?;
    let reply = py.detach(|| remote.route_filled(request)).or_raise(py)?;
    told(py, &reply)
}

fn told<'py>(py: Python<'py>, reply: &proto::RouteReply) -> PyResult<Bound<'py, PyDict>> {
    let found = PyDict::new(py);
    found.set_item("class", reply.class().as_str_name().to_lowercase())?;
    let candidates = reply.candidates.iter().map(|one| {
        let told = PyDict::new(py);
        told.set_item("node", one.node)?;
        told.set_item("action", one.action().as_str_name().to_lowercase())?;
        told.set_item("cached_tokens", one.cached_tokens)?;
        told.set_item("queue_ms", one.queue_ms)?;
        told.set_item("compute_ms", one.compute_ms)?;
        told.set_item("network_ms", one.network_ms)?;
        told.set_item("restore_ms", one.restore_ms)?;
        told.set_item("hbm_ms", one.hbm_ms)?;
        told.set_item("decode_ms", one.decode_ms)?;
        told.set_item("cost_ms", one.cost_ms)?;
        Ok(told)
    });
    found.set_item("candidates", candidates.collect::<PyResult<Vec<_>>>()?)?;
    let filled = reply.filled.clone().unwrap_or_default();
    let nodes = filled.nodes.iter().map(|one| {
        let told = PyDict::new(py);
        told.set_item("node", one.node)?;
        told.set_item("blocks", one.blocks)?;
        told.set_item("disk_is_assumed", one.disk_is_assumed)?;
        told.set_item("network_is_assumed", one.network_is_assumed)?;
        told.set_item("trouble", &one.trouble)?;
        Ok(told)
    });
    found.set_item("nodes", nodes.collect::<PyResult<Vec<_>>>()?)?;
    let name = |id: &[u8]| (!id.is_empty()).then(|| PyBytes::new(py, id));
    found.set_item("here", name(&filled.here))?;
    found.set_item("owner", filled.owner.map(|owner| (owner.node, owner.tokens)))?;
    found.set_item("owner_has_lease", filled.owner_has_lease)?;
    found.set_item("leased_by", name(&filled.leased_by))?;
    found.set_item("bucket_blocks", filled.bucket_blocks)?;
    found.set_item("unasked", filled.unasked)?;
    Ok(found)
}

/// The models of the caller's tenant.
pub(crate) fn models<'py>(py: Python<'py>, core: &Arc<Core>) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let remote = remote(py, core)?;
    let reply = py.detach(|| remote.models()).or_raise(py)?;
    let one = |model: &proto::list_models_reply::Model| {
        let (told, identity) = (PyDict::new(py), model.identity.clone().unwrap_or_default());
        told.set_item("namespace", PyBytes::new(py, &model.namespace))?;
        told.set_item("model", identity.model)?;
        told.set_item("revision", identity.revision)?;
        told.set_item("dtype", identity.kv_dtype)?;
        told.set_item("engine", identity.arrangement_engine)?;
        told.set_item("layout", identity.arrangement_layout)?;
        told.set_item("block_tokens", identity.block_tokens)?;
        told.set_item("layers", model.layers)?;
        told.set_item("registered", model.registered)?;
        told.set_item("last_used_ms", model.last_used_ms)?;
        Ok(told)
    };
    reply.models.iter().map(one).collect()
}
