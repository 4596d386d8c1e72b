//! A cluster as it is written down: nodes, tiers, engine, router. Figures that no hardware has are refused by name.

use std::fmt;

use kvarts_layout::spec::shipped;
use kvarts_planner::cost::{self, Compute, Device, Roofline};
use kvarts_planner::plan::Overlap;
use kvarts_store::engine::EvictionPolicy;
use serde::{Deserialize, Serialize};

use super::times::{EngineTimes, Measured};

/// A cluster file is no longer.
pub const FILE_BYTES_MAX: usize = 1 << 20;
/// The most drives of a node.
pub const DRIVES_MAX: u32 = 1024;
/// The most nodes.
pub const NODES_MAX: u32 = 1 << 14;

/// The file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// A shipped model: its geometry, and what it computes.
    pub model: String,
    /// Tokens of a block, as the trace has them.
    pub block_tokens: u32,
    /// The nodes.
    pub nodes: Nodes,
    /// Device memory of a node for state, beside the weights.
    pub hbm: Memory,
    /// Host memory for state.
    pub dram: Option<Memory>,
    /// Disks of a node, together.
    pub disk: Option<Disk>,
    /// Between nodes: each node's share.
    pub network: Option<Way>,
    /// The cold tier, shared by all: each node's way to it.
    pub cold: Option<Cold>,
    /// What engines do.
    #[serde(default)]
    pub engine: Engine,
    /// Who decides where requests go.
    #[serde(default)]
    pub router: RouterKind,
    /// Reads of the cold tier may go by another node's way.
    #[serde(default)]
    pub dual_path: bool,
    /// By which of two, where the nodes that prefill and decode a request are not the same.
    #[serde(default)]
    pub dual_path_side: Side,
    /// What it costs.
    #[serde(default)]
    pub price: Price,
    /// Times of an engine's own, in place of a shipped model's and a device's: `model` and `device` are then names only.
    pub measured: Option<Measured>,
}

/// How many nodes of which kind.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nodes {
    /// Nodes that do both.
    #[serde(default)]
    pub mixed: u32,
    /// Nodes that prefill only.
    #[serde(default)]
    pub prefill: u32,
    /// Nodes that decode only.
    #[serde(default)]
    pub decode: u32,
    /// A device by its name.
    pub device: String,
    /// Devices of an engine, which share its work.
    pub devices: u32,
}

/// A tier in memory.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// 1e9 bytes for state.
    pub gb: f64,
    /// To the devices. Of device memory it is of no use.
    #[serde(default = "fast")]
    pub gb_per_s: f64,
    /// To the first byte.
    #[serde(default)]
    pub latency_ms: f64,
}

fn fast() -> f64 {
    50.0
}

/// The disks of a node.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// 1e9 bytes.
    pub gb: f64,
    /// Reads.
    pub gb_per_s: f64,
    /// Writes.
    pub write_gb_per_s: f64,
    /// How many drives that are, all alike.
    #[serde(default = "one_drive")]
    pub drives: u32,
    /// To the first byte.
    #[serde(default)]
    pub latency_ms: f64,
    /// What leaves first: `weighted` or `lru`.
    #[serde(default)]
    pub policy: Policy,
    /// Whole writes a day that the drives are made for.
    #[serde(default = "one")]
    pub dwpd: f64,
    /// What another node's disk has is not written: there is one copy of a block, which peers read.
    #[serde(default)]
    pub single_owner: bool,
}

fn one() -> f64 {
    1.0
}

fn one_drive() -> u32 {
    1
}

impl Disk {
    /// As many of the same drives: room, both rates, and with the room price and endurance. `None` of none.
    pub fn of_drives(self, drives: u32) -> Option<Self> {
        if drives == self.drives {
            return Some(self);
        }
        let part = f64::from(drives) / f64::from(self.drives.max(1));
        let (gb, gb_per_s, write_gb_per_s) =
            (self.gb * part, self.gb_per_s * part, self.write_gb_per_s * part);
        (drives > 0).then_some(Self { gb, gb_per_s, write_gb_per_s, drives, ..self })
    }
}

/// The engine's policies by their names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// See [`EvictionPolicy::Weighted`].
    #[default]
    Weighted,
    /// See [`EvictionPolicy::Lru`].
    Lru,
}

impl Policy {
    /// The engine's.
    pub fn engine(self) -> EvictionPolicy {
        match self {
            Self::Weighted => EvictionPolicy::Weighted,
            Self::Lru => EvictionPolicy::Lru,
        }
    }
}

/// A way between nodes.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Way {
    /// 1e9 bytes a second.
    pub gb_per_s: f64,
    /// To the first byte.
    #[serde(default)]
    pub latency_ms: f64,
}

/// The cold tier.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cold {
    /// 1e9 bytes in all.
    pub gb: f64,
    /// Of each node's way to it.
    pub gb_per_s: f64,
    /// To the first byte.
    #[serde(default)]
    pub latency_ms: f64,
}

/// When a request whose state is loaded begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prefetch {
    /// When its layers will arrive no later than they are computed.
    #[default]
    Overlap,
    /// When all of it is there.
    WaitComplete,
    /// At its turn, with what is there; the rest is computed.
    BestEffort,
    /// When all is there or its time is over, with what is there.
    Timeout,
    /// In the step that lets it in: nothing of that step is computed before all of it is there.
    Blocking,
    /// In the step that lets it in, layer by layer: the step computes each layer when it is there.
    Layerwise,
}

impl Prefetch {
    /// What an engine that begins so computes of a request while its state is loaded.
    pub(super) fn overlap(self) -> Overlap {
        match self {
            Self::Overlap | Self::Layerwise => Overlap::Layers,
            Self::WaitComplete | Self::BestEffort | Self::Timeout | Self::Blocking => Overlap::None,
        }
    }

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overlap => "overlap",
            Self::WaitComplete => "wait_complete",
            Self::BestEffort => "best_effort",
            Self::Timeout => "timeout",
            Self::Blocking => "blocking",
            Self::Layerwise => "layerwise",
        }
    }

    /// Whether loads begin with the step that lets their request in, and not when the request comes.
    pub(super) fn is_in_step(self) -> bool {
        matches!(self, Self::Blocking | Self::Layerwise)
    }
}

/// Which of two ways to the cold tier a request's state is read by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The one with the shorter queue.
    #[default]
    Shorter,
    /// One and the other in turn, as without a scheduler.
    Turns,
}

/// What an engine does.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Engine {
    /// Sequences that run at once.
    pub batch_max: u32,
    /// New tokens of a step.
    pub chunk_tokens: u32,
    /// See [`Prefetch`].
    pub prefetch: Prefetch,
    /// The time of `timeout`.
    pub timeout_ms: f64,
    /// Whether a plan says how much of what is found is loaded. Engines without plans load all of it.
    pub plans: bool,
    /// Whether device memory keeps the blocks of requests that have ended, for others to find.
    pub prefix_caching: bool,
    /// 1e9 bytes of host memory, beside `dram`, for the state of requests that are stopped for want of device memory. What finds no
    /// room there is computed again.
    pub swap_gb: f64,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            batch_max: 256,
            chunk_tokens: 8192,
            prefetch: Prefetch::Overlap,
            timeout_ms: 100.0,
            plans: true,
            prefix_caching: true,
            swap_gb: 0.0,
        }
    }
}

/// Who decides where a request goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterKind {
    /// Anywhere.
    Random,
    /// In turn.
    RoundRobin,
    /// Where most of the prompt is, unless that node is far behind the others.
    #[default]
    CacheAware,
    /// The less busy of two that are drawn.
    PowerOfTwo,
    /// Short prompts to some nodes, long ones to the others.
    Bucket,
    /// By the cost of every action (`kvarts_planner::route`).
    OwnerServe,
    /// The fewest tokens among those with short read queues.
    DualPath,
    /// The least time to the first token of a request and of those that come next: it knows them, and how long every answer
    /// will be. No bound, but more than a real router can know.
    Oracle,
}

impl RouterKind {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Random,
        Self::RoundRobin,
        Self::CacheAware,
        Self::PowerOfTwo,
        Self::Bucket,
        Self::OwnerServe,
        Self::DualPath,
        Self::Oracle,
    ];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::CacheAware => "cache_aware",
            Self::PowerOfTwo => "power_of_two",
            Self::Bucket => "bucket",
            Self::OwnerServe => "owner_serve",
            Self::DualPath => "dual_path",
            Self::Oracle => "oracle",
        }
    }

    /// The router of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|router| router.name() == name)
    }
}

/// What a cluster costs, in units of the user's own.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Price {
    /// A device for an hour.
    pub device_hour: f64,
    /// 1e9 bytes of host memory for an hour.
    pub dram_gb_hour: f64,
    /// 1e9 bytes of disk for an hour.
    pub disk_gb_hour: f64,
}

impl Default for Price {
    fn default() -> Self {
        Self { device_hour: 2.5, dram_gb_hour: 0.003, disk_gb_hour: 0.000_02 }
    }
}

/// What is wrong with a cluster file, with the place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpecError(pub String);

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SpecError {}

/// A model's state and a device's times.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Facts {
    /// Bytes of a block of all layers.
    pub block_bytes: u64,
    /// Layers.
    pub layers: u32,
    /// How long an engine takes.
    pub times: EngineTimes,
}

impl Cluster {
    /// Reads a file, and checks what is in it.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        Self::parse_with(text, &[])
    }

    /// The same with some values in place of the file's: each `table.name=value`.
    pub fn parse_with(text: &str, sets: &[String]) -> Result<Self, SpecError> {
        if text.len() > FILE_BYTES_MAX {
            return Err(SpecError(format!("the file is longer than {FILE_BYTES_MAX} bytes")));
        }
        let mut cluster = Self::unchecked(text)?;
        if !sets.is_empty() {
            cluster = cluster.with(sets)?;
        }
        cluster.check()?;
        Ok(cluster)
    }

    fn with(&self, sets: &[String]) -> Result<Self, SpecError> {
        let fault = |what: &str| SpecError(format!("`{}`: {}", sets.join("`, `"), what.replace('\n', " ")));
        let mut all = toml::Table::try_from(self).map_err(|error| fault(&error.to_string()))?;
        for set in sets {
            put(&mut all, set).map_err(|what| SpecError(format!("`{set}`: {what}")))?;
        }
        all.try_into().map_err(|error: toml::de::Error| fault(error.message()))
    }

    pub(crate) fn unchecked(text: &str) -> Result<Self, SpecError> {
        toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            SpecError(format!("line {line}: {}", error.message().replace('\n', " ")))
        })
    }

    /// Nodes of all kinds.
    pub fn node_count(&self) -> u32 {
        self.nodes.mixed.saturating_add(self.nodes.prefill).saturating_add(self.nodes.decode)
    }

    /// What all nodes cost an hour.
    pub fn cost_per_hour(&self) -> f64 {
        let each = self.price.device_hour * f64::from(self.nodes.devices)
            + self.price.dram_gb_hour * self.dram.map_or(0.0, |dram| dram.gb)
            + self.price.disk_gb_hour * self.disk.map_or(0.0, |disk| disk.gb);
        each * f64::from(self.node_count())
    }

    fn check(&self) -> Result<(), SpecError> {
        let refuse = |what: String| Err(SpecError(what));
        let nodes = &self.nodes;
        if self.node_count() == 0 || self.node_count() > NODES_MAX {
            return refuse(format!(
                "nodes: the total is {}, but it must be 1 to {NODES_MAX}",
                self.node_count()
            ));
        }
        if (nodes.prefill == 0) != (nodes.decode == 0) && nodes.mixed == 0 {
            return refuse(
                "nodes: prefill and decode are needed together: add the missing kind, or mixed nodes".into(),
            );
        }
        if nodes.mixed > 0 && nodes.prefill + nodes.decode > 0 && nodes.prefill == 0 {
            return refuse(
                "nodes: a cluster with mixed nodes and decode nodes also needs prefill nodes".into(),
            );
        }
        if nodes.devices == 0 || nodes.devices > 1024 {
            return refuse(format!(
                "nodes.devices: the value is {}, but it must be 1 to 1024",
                nodes.devices
            ));
        }
        if self.block_tokens == 0 || self.block_tokens > 1 << 16 {
            return refuse(format!(
                "block_tokens: the value is {}, but it must be 1 to 65536",
                self.block_tokens
            ));
        }
        self.check_tiers()?;
        self.check_ways()?;
        if self.engine.batch_max == 0 || self.engine.chunk_tokens == 0 {
            return refuse("engine: batch_max and chunk_tokens must be at least 1".into());
        }
        positive("engine.timeout_ms", self.engine.timeout_ms, 0.0, 1e9)?;
        positive("engine.swap_gb", self.engine.swap_gb, 0.0, 1e7)?;
        if self.engine.swap_gb > 0.0 && self.dram.is_none() {
            return refuse("engine.swap_gb: the speed of copies is missing: add [dram] with gb_per_s".into());
        }
        for (name, price) in [
            ("price.device_hour", self.price.device_hour),
            ("price.dram_gb_hour", self.price.dram_gb_hour),
            ("price.disk_gb_hour", self.price.disk_gb_hour),
        ] {
            positive(name, price, 0.0, 1e9)?;
        }
        self.facts().map(drop)
    }

    /// What goes between nodes needs a way.
    fn check_ways(&self) -> Result<(), SpecError> {
        if self.network.is_some() || self.node_count() < 2 {
            return Ok(());
        }
        let nodes = &self.nodes;
        let what = if nodes.prefill > 0 || nodes.decode > 0 {
            "nodes: state is sent from prefill nodes to decode nodes"
        } else if self.disk.is_some_and(|disk| disk.single_owner) {
            "disk.single_owner: nodes read each other's blocks"
        } else if self.dual_path {
            "dual_path: nodes read through each other's paths"
        } else {
            return Ok(());
        };
        Err(SpecError(format!("{what}, but the network is missing: add [network] with gb_per_s")))
    }

    fn check_tiers(&self) -> Result<(), SpecError> {
        positive("hbm.gb", self.hbm.gb, 1e-6, 1e6)?;
        if let Some(dram) = self.dram {
            positive("dram.gb", dram.gb, 0.0, 1e7)?;
            positive("dram.gb_per_s", dram.gb_per_s, 1e-6, 1e5)?;
            positive("dram.latency_ms", dram.latency_ms, 0.0, 1e6)?;
        }
        if let Some(disk) = self.disk {
            positive("disk.gb", disk.gb, 0.0, 1e9)?;
            positive("disk.gb_per_s", disk.gb_per_s, 1e-6, 1e4)?;
            positive("disk.write_gb_per_s", disk.write_gb_per_s, 1e-6, 1e4)?;
            positive("disk.latency_ms", disk.latency_ms, 0.0, 1e6)?;
            positive("disk.dwpd", disk.dwpd, 1e-6, 1e3)?;
            positive("disk.drives", f64::from(disk.drives), 1.0, f64::from(DRIVES_MAX))?;
        }
        if let Some(way) = self.network {
            positive("network.gb_per_s", way.gb_per_s, 1e-6, 1e5)?;
            positive("network.latency_ms", way.latency_ms, 0.0, 1e6)?;
        }
        if let Some(cold) = self.cold {
            positive("cold.gb", cold.gb, 0.0, 1e12)?;
            positive("cold.gb_per_s", cold.gb_per_s, 1e-6, 1e5)?;
            positive("cold.latency_ms", cold.latency_ms, 0.0, 1e7)?;
        }
        Ok(())
    }

    /// The model's geometry and the device's times.
    pub fn facts(&self) -> Result<Facts, SpecError> {
        if let Some(measured) = self.measured {
            return Self::measured_facts(measured);
        }
        let unknown = |what: &str, name: &str, known: Vec<&str>| {
            SpecError(format!(
                "{what}: no {what} is named `{name}`; the possible names are {}",
                known.join(", ")
            ))
        };
        let spec = shipped::load(&self.model).ok_or_else(|| {
            unknown("model", &self.model, cost::MODELS.iter().map(|(name, _)| *name).collect())
        })?;
        let compute: Compute = cost::model(&self.model).ok_or_else(|| {
            unknown("model", &self.model, cost::MODELS.iter().map(|(name, _)| *name).collect())
        })?;
        let device: Device = cost::device(&self.nodes.device).ok_or_else(|| {
            unknown("device", &self.nodes.device, cost::DEVICES.iter().map(|(name, _)| *name).collect())
        })?;
        let geometry = spec.geometry();
        geometry
            .check_block_tokens(self.block_tokens)
            .map_err(|error| SpecError(format!("block_tokens: {error}")))?;
        let prefix = geometry.bytes_for_tokens(u64::from(self.block_tokens), self.block_tokens);
        let prefix = prefix.map_err(|error| SpecError(format!("block_tokens: {error}")))?;
        if prefix.boundary_bytes > 0 {
            return Err(self.hybrid(prefix.stream_bytes, prefix.boundary_bytes));
        }
        let block_bytes = prefix.stream_bytes;
        let times = Roofline::new(compute, device, self.nodes.devices);
        let layers = u32::try_from(geometry.layers().len()).unwrap_or(u32::MAX);
        let (weights_gb, all_gb) = memory_gb(&compute, &device, self.nodes.devices);
        if weights_gb + self.hbm.gb > all_gb {
            return Err(SpecError(format!(
                "hbm.gb: {} GB for state and {weights_gb:.1} GB of weights of {} do not fit into the {all_gb} GB of {} x {}",
                self.hbm.gb, self.model, self.nodes.devices, self.nodes.device
            )));
        }
        Ok(Facts { block_bytes, layers, times: EngineTimes::Sheet(times) })
    }

    /// A run has blocks that every later one needs, and no others. Of a model with windows, states or tails each boundary would be a hit
    /// for nothing, and memory and disks would hold a part of what they hold.
    fn hybrid(&self, streams: u64, boundary: u64) -> SpecError {
        let has_streams_alone = |name: &&str| {
            let bytes = shipped::load(name)
                .and_then(|spec| spec.geometry().boundary_bytes(spec.default_block_tokens()).ok());
            bytes == Some(0)
        };
        let taken: Vec<&str> = shipped::names().filter(has_streams_alone).collect();
        SpecError(format!(
            "model: {} has windows, states or tails ({boundary} bytes at each boundary, {streams} bytes in \
            each block), which runs of a cluster do not support yet; the supported models are {}. `kvarts \
            plan restore` plans boundaries of this model",
            self.model,
            taken.join(", ")
        ))
    }

    fn measured_facts(measured: Measured) -> Result<Facts, SpecError> {
        let Measured { block_bytes, layers, step_ms, token_us, sequence_us, pair_ns, prefill_ms } = measured;
        positive("measured.block_bytes", block_bytes as f64, 1.0, 1e12)?;
        positive("measured.layers", f64::from(layers), 1.0, 1e4)?;
        positive("measured.step_ms", step_ms, 1e-6, 1e6)?;
        for (name, value) in [
            ("token_us", token_us),
            ("sequence_us", sequence_us),
            ("pair_ns", pair_ns),
            ("prefill_ms", prefill_ms),
        ] {
            positive(&format!("measured.{name}"), value, 0.0, 1e9)?;
        }
        Ok(Facts { block_bytes, layers, times: EngineTimes::Measured(measured) })
    }
}

/// 1e9 bytes of a model's weights, and of the memory of this number of devices.
pub(super) fn memory_gb(model: &Compute, device: &Device, devices: u32) -> (f64, f64) {
    (model.params * model.weight_bytes / 1e9, device.hbm_gb * f64::from(devices))
}

/// Puts `table.name=value` into a table.
fn put(all: &mut toml::Table, set: &str) -> Result<(), String> {
    let (name, value) = set.split_once('=').ok_or("the setting has no value: write `table.name=value`")?;
    // What is no number, no truth and not quoted is text.
    let value = toml::from_str::<toml::Table>(&format!("value = {value}"))
        .ok()
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| toml::Value::String(value.trim().to_owned()));
    let (mut table, mut left) = (all, name.trim());
    while let Some((outer, inner)) = left.split_once('.') {
        let found = table.entry(outer).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        (table, left) = (found.as_table_mut().ok_or_else(|| format!("`{outer}` is not a table"))?, inner);
    }
    table.insert(left.to_owned(), value);
    Ok(())
}

fn positive(name: &str, value: f64, least: f64, most: f64) -> Result<(), SpecError> {
    if value.is_finite() && (least..=most).contains(&value) {
        return Ok(());
    }
    Err(SpecError(format!("{name}: the value is {value}, but it must be {least} to {most}")))
}
