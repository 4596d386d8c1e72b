//! Which clusters a search may try: what varies, in which steps, and within which bounds.
//!
//! What may be bought lies on a grid: nodes, devices of a node, host memory and drives, each in steps of a third to a half more.
//! A point of it that breaks a bound is no choice and is never run. Drives are bought whole: room, both rates, price and endurance come
//! together. Memory of devices is bought with devices.

use kvarts_planner::cost;

use super::spec::{Cluster, DRIVES_MAX, NODES_MAX, Prefetch, memory_gb};

/// What a search may change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// The engine's limits: tokens of a step, sequences at once.
    Limits,
    /// The router.
    Router,
    /// When a request whose state is loaded begins.
    Prefetch,
    /// How many nodes.
    Nodes,
    /// Devices of a node, and with them the memory for state.
    Hbm,
    /// Host memory.
    Dram,
    /// Drives.
    Disk,
}

impl What {
    /// All of them by name.
    pub const NAMES: [(&str, Self); 7] = [
        ("limits", Self::Limits),
        ("router", Self::Router),
        ("prefetch", Self::Prefetch),
        ("nodes", Self::Nodes),
        ("hbm", Self::Hbm),
        ("dram", Self::Dram),
        ("disk", Self::Disk),
    ];

    /// What varies unless something else is asked for: all but devices of a node, because messages between them take no time
    /// here, so that more of them always look better than more nodes.
    pub const USUAL: [Self; 6] =
        [Self::Limits, Self::Router, Self::Prefetch, Self::Nodes, Self::Dram, Self::Disk];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, what)| *what)
    }
}

/// What a search must stay within.
#[derive(Clone, PartialEq, Debug)]
pub struct Bounds {
    /// Nodes of all kinds, at most; without it twice those in the file.
    pub nodes_max: Option<u32>,
    /// Drives of a node, at most; without it twice those in the file, or four.
    pub drives_max: Option<u32>,
    /// What all nodes may cost an hour.
    pub cost_max: Option<f64>,
    /// What may vary.
    pub vary: Vec<What>,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { nodes_max: None, drives_max: None, cost_max: None, vary: What::USUAL.to_vec() }
    }
}

/// A point of the grid: the place in each axis.
pub(super) type Point = [usize; AXES];

/// Nodes, devices, memory, drives.
const AXES: usize = 4;
/// Parts of what the file has of host memory.
const DRAM_PARTS: [f64; 5] = [0.0, 0.25, 0.5, 1.0, 2.0];

/// The grid. See the module.
#[derive(Clone, PartialEq, Debug)]
pub struct Choices {
    from: Cluster,
    cost_max: f64,
    vary: Vec<What>,
    /// Nodes that do both, prefill, decode.
    nodes: Vec<[u32; 3]>,
    /// Devices of a node, and its memory for state.
    devices: Vec<(u32, f64)>,
    dram: Vec<f64>,
    drives: Vec<u32>,
    start: Point,
}

impl Choices {
    /// What may be tried from a cluster on; bounds that leave nothing are told in one sentence.
    pub fn new(from: &Cluster, bounds: &Bounds) -> Result<Self, String> {
        let may = |what: What| bounds.vary.contains(&what);
        let mut choices = Self {
            from: from.clone(),
            cost_max: bounds.cost_max.unwrap_or(f64::INFINITY),
            vary: bounds.vary.clone(),
            nodes: nodes(from, may(What::Nodes), bounds.nodes_max)?,
            devices: devices(from, may(What::Hbm))?,
            dram: match from.dram {
                Some(_) if may(What::Dram) => DRAM_PARTS.to_vec(),
                _ => vec![1.0],
            },
            drives: drives(from, may(What::Disk), bounds.drives_max)?,
            start: [0; AXES],
        };
        let near = choices.points().filter(|point| choices.at(from, *point).is_some());
        let file = choices.file();
        let steps = |point: &Point| point.iter().zip(file).map(|(one, of)| one.abs_diff(of)).sum::<usize>();
        match near.min_by_key(steps) {
            Some(start) => choices.start = start,
            None => {
                let all = choices.points().map(|point| choices.cluster(from, point).cost_per_hour());
                return Err(format!(
                    "cost_max: the cheapest allowed cluster costs {:.2} an hour, but the limit is {}: raise \
                    cost_max",
                    all.fold(f64::INFINITY, f64::min),
                    choices.cost_max
                ));
            }
        }
        Ok(choices)
    }

    /// The choice that is nearest to the file.
    pub fn start(&self) -> Cluster {
        self.cluster(&self.from, self.start)
    }

    pub(super) fn start_point(&self) -> Point {
        self.start
    }

    /// Whether this may vary.
    pub(super) fn may(&self, what: What) -> bool {
        self.vary.contains(&what)
    }

    /// Prefetch policies that an engine of the file's kind may have: it reads ahead, or loads with the step that lets a request in.
    pub(super) fn prefetches(&self) -> &'static [Prefetch] {
        let peers = self.from.network.is_some() && self.from.node_count() > 1;
        let far = self.from.dram.is_some() || self.from.disk.is_some() || self.from.cold.is_some() || peers;
        match (far && self.may(What::Prefetch), self.from.engine.prefetch.is_in_step()) {
            (false, _) => &[],
            (true, true) => &[Prefetch::Blocking, Prefetch::Layerwise],
            (true, false) => {
                &[Prefetch::Overlap, Prefetch::WaitComplete, Prefetch::BestEffort, Prefetch::Timeout]
            }
        }
    }

    fn lengths(&self) -> Point {
        [self.nodes.len(), self.devices.len(), self.dram.len(), self.drives.len()]
    }

    fn points(&self) -> impl Iterator<Item = Point> {
        let [nodes, devices, dram, drives] = self.lengths();
        (0..nodes * devices * dram * drives).map(move |at| {
            let (at, drive) = (at / drives, at % drives);
            let (at, memory) = (at / dram, at % dram);
            [at / devices, at % devices, memory, drive]
        })
    }

    /// The place of what the file has, or of what is nearest to it.
    fn file(&self) -> Point {
        let total = |nodes: &[u32; 3]| nodes.iter().sum::<u32>().abs_diff(self.from.node_count());
        let nearest = |off: Vec<f64>| {
            let least = |best: (usize, f64), one: (usize, f64)| if one.1 < best.1 { one } else { best };
            off.into_iter().enumerate().fold((0, f64::INFINITY), least).0
        };
        let drives = self.from.disk.map_or(0, |disk| disk.drives);
        [
            nearest(self.nodes.iter().map(|nodes| f64::from(total(nodes))).collect()),
            nearest(
                self.devices.iter().map(|one| f64::from(one.0.abs_diff(self.from.nodes.devices))).collect(),
            ),
            nearest(self.dram.iter().map(|part| (part - 1.0).abs()).collect()),
            nearest(self.drives.iter().map(|count| f64::from(count.abs_diff(drives))).collect()),
        ]
    }

    /// A point's cluster with another one's engine and router, if it is within the bounds.
    pub(super) fn at(&self, engine: &Cluster, point: Point) -> Option<Cluster> {
        Some(self.cluster(engine, point)).filter(|cluster| cluster.cost_per_hour() <= self.cost_max)
    }

    fn cluster(&self, engine: &Cluster, point: Point) -> Cluster {
        let [nodes, devices, dram, drives] = point;
        let mut cluster = Cluster { engine: engine.engine, router: engine.router, ..self.from.clone() };
        let [mixed, prefill, decode] = self.nodes[nodes];
        (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (mixed, prefill, decode);
        (cluster.nodes.devices, cluster.hbm.gb) = self.devices[devices];
        cluster.dram.iter_mut().for_each(|tier| tier.gb *= self.dram[dram]);
        cluster.dram = cluster.dram.filter(|tier| tier.gb > 0.0);
        cluster.disk = cluster.disk.and_then(|disk| disk.of_drives(self.drives[drives]));
        cluster
    }

    /// The points one step away.
    pub(super) fn beside(&self, point: Point) -> impl Iterator<Item = Point> {
        let lengths = self.lengths();
        let steps = (0..AXES).flat_map(|axis| [(axis, false), (axis, true)]);
        steps.filter_map(move |(axis, up)| {
            let mut other = point;
            other[axis] = if up { point[axis] + 1 } else { point[axis].checked_sub(1)? };
            (other[axis] < lengths[axis]).then_some(other)
        })
    }
}

/// 1, 1.5, 2, 3, 4, 6 ... and their inverses.
fn parts() -> impl Iterator<Item = f64> {
    (-14..=14).flat_map(|power| [1.0, 1.5].map(|one| one * 2f64.powi(power)))
}

fn nodes(from: &Cluster, vary: bool, most: Option<u32>) -> Result<Vec<[u32; 3]>, String> {
    let of = &from.nodes;
    let (file, kinds) = (from.node_count(), [of.mixed, of.prefill, of.decode]);
    let most = most.unwrap_or(file.saturating_mul(2)).min(NODES_MAX);
    if !vary {
        return match file <= most {
            true => Ok(vec![kinds]),
            false => Err(format!(
                "nodes_max: the file has {file} nodes, but the limit is {most}: raise nodes_max, or let \
                nodes vary"
            )),
        };
    }
    let least = f64::from(file.min(most)) / 2.0;
    let scaled = |part: f64| kinds.map(|count| ((f64::from(count) * part).round() as u32).max(count.min(1)));
    let total = |nodes: &[u32; 3]| nodes.iter().sum::<u32>();
    let mut all: Vec<[u32; 3]> = parts().chain([f64::from(most) / f64::from(file)]).map(scaled).collect();
    all.retain(|nodes| total(nodes) <= most && f64::from(total(nodes)) >= least);
    all.sort_by_key(|nodes| (total(nodes), *nodes));
    all.dedup();
    if all.is_empty() {
        let needed = total(&kinds.map(|count| count.min(1)));
        return Err(format!(
            "nodes_max: the limit is {most}, but the kinds of nodes in the file need at least {needed}"
        ));
    }
    Ok(all)
}

fn devices(from: &Cluster, vary: bool) -> Result<Vec<(u32, f64)>, String> {
    let (count, gb) = (from.nodes.devices, from.hbm.gb);
    if !vary {
        return Ok(vec![(count, gb)]);
    }
    let known = cost::model(&from.model).zip(cost::device(&from.nodes.device));
    let Some((model, device)) = known.filter(|_| from.measured.is_none()) else {
        return Err(
            "vary: hbm varies with the number of devices, but the times in [measured] are valid for only one \
            number of devices: remove hbm from vary, or remove [measured]"
                .into(),
        );
    };
    // The same part of what weights leave.
    let free = |count: u32| {
        let (weights, all) = memory_gb(&model, &device, count);
        all - weights
    };
    let mut all: Vec<u32> = vec![(count / 2).max(1), count, count.saturating_mul(2).min(1024)];
    all.dedup();
    all.retain(|count| free(*count) > 0.0);
    Ok(all
        .into_iter()
        .map(|other| (other, if other == count { gb } else { gb * free(other) / free(count) }))
        .collect())
}

fn drives(from: &Cluster, vary: bool, most: Option<u32>) -> Result<Vec<u32>, String> {
    let Some(file) = from.disk.map(|disk| disk.drives) else {
        return match most {
            Some(_) => Err("drives_max: the file has no [disk]: add a [disk], or remove drives_max".into()),
            None => Ok(vec![0]),
        };
    };
    let most = most.unwrap_or(file.saturating_mul(2).max(4)).min(DRIVES_MAX);
    if !vary {
        return match file <= most {
            true => Ok(vec![file]),
            false => Err(format!(
                "drives_max: the file has {file} drives for each node, but the limit is {most}: raise \
                drives_max, or let disk vary"
            )),
        };
    }
    let mut all: Vec<u32> = parts().map(|part| part as u32).chain([0, file, most]).collect();
    all.retain(|count| *count <= most);
    all.sort_unstable();
    all.dedup();
    Ok(all)
}
