//! Where a request goes: the cost of every action on every node, and the least of them.
//!
//! `C(a) = T_queue + T_compute + T_network + T_restore + lambda M_HBM + mu I_decode`: how long the request waits, computes,
//! has its state brought over the network and restored beyond what computing hides, what device memory its state takes
//! beside copies that are there already, and how long those who decode beside it are held up. What a node prefills that
//! does not decode is sent on, whatever it was prefilled from.
//!
//! The same question has the same answer: of equal costs the first action of the first node is taken.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cost::Prefill;

/// What a request is, for those who look at a route: what it asks of a cluster differs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Much to compute behind little that is there.
    NewLongPrefix,
    /// A turn that adds little.
    SmallTurn,
    /// A turn that adds much, as tools do.
    LongToolOutput,
    /// Nearly all of it is in memory: the session goes on.
    Continuation,
    /// A branch of a prompt that others go on from at the same time.
    ForkedRollout,
    /// All that is there is on disks or in the cold tier.
    ColdResume,
}

/// New tokens from which a prompt is long.
const LONG_TOKENS: u64 = 4096;
/// New tokens up to which a session simply goes on.
const SMALL_TOKENS: u64 = 512;

impl Class {
    /// The class of a request, from its numbers of tokens: in memory somewhere, on disks, and new.
    pub fn of(in_memory: u64, on_disk: u64, new: u64, forked: bool) -> Self {
        match () {
            () if forked => Self::ForkedRollout,
            () if in_memory == 0 && on_disk > new => Self::ColdResume,
            () if in_memory + on_disk > new && new >= LONG_TOKENS => Self::LongToolOutput,
            () if new >= LONG_TOKENS => Self::NewLongPrefix,
            () if new <= SMALL_TOKENS && in_memory > 8 * new => Self::Continuation,
            () => Self::SmallTurn,
        }
    }
}

/// What is done with a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Prefill where it is decoded, from what that node has in memory.
    Colocated,
    /// Prefill on a node that does not decode, from what that node has in memory.
    RemotePrefill,
    /// Prefill elsewhere with the owner's state, which stays where it is too.
    FetchFromOwner,
    /// Prefill with what is on the node's disks.
    FromDisk,
    /// The owner's state moves, and with it all that follows.
    Migrate,
    /// Nothing is restored.
    Recompute,
}

impl Action {
    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Colocated => "colocated",
            Self::RemotePrefill => "remote prefill",
            Self::FetchFromOwner => "fetch from owner",
            Self::FromDisk => "from disk",
            Self::Migrate => "migrate",
            Self::Recompute => "recompute",
        }
    }
}

/// A node, as it is now.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeView {
    /// Its number.
    pub node: u32,
    /// Whether it decodes as well. From one that does not the state of the prompt is sent to one that does.
    pub decodes: bool,
    /// How long what came before keeps it busy.
    pub queue_ms: f64,
    /// Sequences that decode on it.
    pub decoding: u64,
    /// Leading tokens of the prompt in its memory.
    pub memory_tokens: u64,
    /// Those of them that are in device memory, and what its host's memory brings a device in a millisecond; 0 if all are
    /// in device memory.
    #[serde(default)]
    pub device_tokens: u64,
    /// See above.
    #[serde(default)]
    pub memory_bytes_per_ms: f64,
    /// Leading tokens of the prompt in its memory or on its disks.
    pub disk_tokens: u64,
    /// What its disks bring in a millisecond, and how long their queue is.
    pub disk_bytes_per_ms: f64,
    /// See above.
    pub disk_queue_ms: f64,
    /// What the network brings it in a millisecond, and how long its queue is; 0 for none.
    pub network_bytes_per_ms: f64,
    /// See above.
    pub network_queue_ms: f64,
}

/// What the terms that are no times are worth.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Weights {
    /// Milliseconds for 1e9 bytes of device memory that hold a further copy.
    pub lambda_ms_per_gb: f64,
    /// Milliseconds for each millisecond by which a decoding sequence is held up.
    pub mu: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { lambda_ms_per_gb: 2.0, mu: 0.05 }
    }
}

/// What is to be routed.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Bytes of state of a token.
    pub token_bytes: f64,
    /// Layers of the model.
    pub layers: u32,
    /// Leading tokens that the owner has, and who it is.
    pub owner: Option<(u32, u64)>,
    /// Leading tokens that other sessions go on from as well: they do not leave the owner.
    pub shared_tokens: u64,
    /// Whether others go on from the same prompt at the same time: all of it is shared.
    pub forked: bool,
    /// The nodes that can take it.
    pub nodes: &'a [NodeView],
    /// See [`Weights`].
    pub weights: Weights,
}

/// One action on one node, term by term.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Candidate {
    /// The node.
    pub node: u32,
    /// What is done there.
    pub action: Action,
    /// Tokens of the prompt that need not be computed.
    pub cached_tokens: u64,
    /// The wait.
    pub queue_ms: f64,
    /// The prefill.
    pub compute_ms: f64,
    /// State over the network.
    pub network_ms: f64,
    /// State from memory and disks, beyond what computing hides.
    pub restore_ms: f64,
    /// `lambda M_HBM`.
    pub hbm_ms: f64,
    /// `mu I_decode`.
    pub decode_ms: f64,
    /// The sum.
    pub cost_ms: f64,
}

/// The answer.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Route {
    /// What the request is.
    pub class: Class,
    /// All candidates, the least cost first: the first is taken.
    pub candidates: Vec<Candidate>,
}

impl Route {
    /// What is to be done; `None` if there is no node.
    pub fn best(&self) -> Option<&Candidate> {
        self.candidates.first()
    }
}

impl fmt::Display for Route {
    /// Every candidate's terms, a line each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>6}  {:<16} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "NODE", "ACTION", "CACHED", "QUEUE", "COMPUTE", "NETWORK", "RESTORE", "HBM", "DECODE", "COST"
        )?;
        for one in &self.candidates {
            writeln!(
                f,
                "{:>6}  {:<16} {:>9} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
                one.node,
                one.action.name(),
                one.cached_tokens,
                one.queue_ms,
                one.compute_ms,
                one.network_ms,
                one.restore_ms,
                one.hbm_ms,
                one.decode_ms,
                one.cost_ms
            )?;
        }
        Ok(())
    }
}

/// The most nodes of one question.
pub const MAX_NODES: usize = 4096;
/// The most tokens of a prompt, and of what a node has of it.
pub const MAX_TOKENS: u64 = 1 << 40;

/// Why a question cannot be answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouteError {
    /// More than [`MAX_NODES`] nodes.
    TooManyNodes,
    /// A prompt of no tokens, or of more than [`MAX_TOKENS`].
    Prompt,
    /// A figure of the request that is negative or no number.
    Request,
    /// A figure of this node that is negative or no number.
    Node(u32),
    /// Two nodes have this number.
    Twice(u32),
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyNodes => write!(f, "the request has more than {MAX_NODES} nodes"),
            Self::Prompt => write!(f, "the prompt has no tokens, or more than {MAX_TOKENS}"),
            Self::Request => {
                write!(f, "`token_bytes` or a weight is not valid: both must be numbers of at least 0")
            }
            Self::Node(node) => write!(
                f,
                "a number of node {node} is not valid: times, rates and token counts must be at least 0"
            ),
            Self::Twice(node) => write!(f, "node {node} is listed twice"),
        }
    }
}

impl std::error::Error for RouteError {}

impl Question<'_> {
    /// Whether it has an answer: what comes from elsewhere is checked first.
    pub fn check(&self) -> Result<(), RouteError> {
        if self.nodes.len() > MAX_NODES {
            return Err(RouteError::TooManyNodes);
        }
        if self.prompt_tokens == 0 || self.prompt_tokens > MAX_TOKENS {
            return Err(RouteError::Prompt);
        }
        let sound = |figures: &[f64]| figures.iter().all(|figure| figure.is_finite() && *figure >= 0.0);
        if !sound(&[self.token_bytes, self.weights.lambda_ms_per_gb, self.weights.mu]) {
            return Err(RouteError::Request);
        }
        let mut seen = std::collections::BTreeSet::new();
        for node in self.nodes {
            let rates = [node.disk_bytes_per_ms, node.disk_queue_ms];
            let network = [node.network_bytes_per_ms, node.network_queue_ms];
            let few = node.memory_tokens.max(node.disk_tokens).max(node.device_tokens) <= MAX_TOKENS;
            let sound_here = sound(&[node.queue_ms, node.memory_bytes_per_ms]);
            if !(few && sound_here && sound(&rates) && sound(&network)) {
                return Err(RouteError::Node(node.node));
            }
            if !seen.insert(node.node) {
                return Err(RouteError::Twice(node.node));
            }
        }
        Ok(())
    }

    /// Counts every action of every node.
    pub fn route(&self, prefill: &dyn Prefill) -> Route {
        let mut candidates: Vec<Candidate> = self
            .nodes
            .iter()
            .flat_map(|node| self.actions(node).map(|action| self.count(node, action, prefill)))
            .collect();
        candidates.sort_by(|one, other| {
            one.cost_ms
                .total_cmp(&other.cost_ms)
                .then((one.node, one.action).cmp(&(other.node, other.action)))
        });
        let most = |of: fn(&NodeView) -> u64| self.nodes.iter().map(of).max().unwrap_or(0);
        let (in_memory, there) = (most(|node| node.memory_tokens), most(|node| node.disk_tokens));
        let owned = self.owner.map_or(0, |(_, tokens)| tokens.min(MAX_TOKENS));
        let new = self.prompt_tokens.saturating_sub(there.max(in_memory).max(owned));
        let class = Class::of(in_memory.max(owned), there.saturating_sub(in_memory), new, self.forked);
        Route { class, candidates }
    }

    fn actions<'a>(&'a self, node: &'a NodeView) -> impl Iterator<Item = Action> + 'a {
        let connected = node.network_bytes_per_ms > 0.0;
        let elsewhere = connected
            && self.owner.is_some_and(|(owner, tokens)| owner != node.node && tokens > node.memory_tokens);
        let all = [
            (Action::Colocated, node.decodes && node.memory_tokens > 0),
            (Action::RemotePrefill, !node.decodes),
            (Action::FetchFromOwner, elsewhere),
            (Action::FromDisk, node.disk_tokens > node.memory_tokens),
            (Action::Migrate, elsewhere && node.decodes),
            // From nothing is what a remote prefill is where there is nothing.
            (Action::Recompute, node.decodes || node.memory_tokens > 0),
        ];
        // What cannot be sent on is not decoded.
        let all = all.into_iter().filter(move |_| node.decodes || connected);
        all.filter(|(_, possible)| *possible).map(|(action, _)| action)
    }

    fn count(&self, node: &NodeView, action: Action, prefill: &dyn Prefill) -> Candidate {
        let most = self.prompt_tokens.saturating_sub(1);
        let owned = self.owner.map_or(0, |(_, tokens)| tokens.min(MAX_TOKENS));
        let cached_tokens = match action {
            Action::Colocated | Action::RemotePrefill => node.memory_tokens,
            Action::FromDisk => node.disk_tokens,
            Action::FetchFromOwner | Action::Migrate => owned,
            Action::Recompute => 0,
        }
        .min(most);
        let compute_ms = prefill.prefill_ms(cached_tokens, self.prompt_tokens - cached_tokens);
        let layers = f64::from(self.layers.max(1));
        let bytes = |tokens: u64| tokens as f64 * self.token_bytes;
        // What layers in the pipeline hide costs nothing.
        let beyond = |load_ms: f64| (load_ms + compute_ms / layers - compute_ms).max(0.0);
        let near = cached_tokens.min(node.memory_tokens);
        let resident = match node.memory_bytes_per_ms {
            rate if rate > 0.0 => near.min(node.device_tokens),
            _ => near,
        };
        let mut restored_ms = bytes(near - resident) / node.memory_bytes_per_ms.max(1e-9);
        let far = bytes(cached_tokens - near);
        if action == Action::FromDisk && far > 0.0 {
            restored_ms = restored_ms.max(node.disk_queue_ms + far / node.disk_bytes_per_ms.max(1e-9));
        }
        let restore_ms = beyond(restored_ms);
        let over = |bytes: f64| bytes / node.network_bytes_per_ms.max(1e-9);
        let fetched_ms = match action {
            Action::FetchFromOwner | Action::Migrate => beyond(node.network_queue_ms + over(far)),
            _ => 0.0,
        };
        // Layers go as they are computed: what the line has not taken by then is left, and the last layer's share always.
        let sent_ms = match over(bytes(self.prompt_tokens)) {
            _ if node.decodes => 0.0,
            all => (node.network_queue_ms + all - compute_ms * (layers - 1.0) / layers).max(all / layers),
        };
        let network_ms = fetched_ms + sent_ms;
        let shared = if self.forked { owned } else { self.shared_tokens.min(owned) };
        // What leaves the owner makes room there.
        let left = if action == Action::Migrate { (owned - shared).min(self.prompt_tokens) } else { 0 };
        let taken = (self.prompt_tokens - resident).saturating_sub(left);
        let hbm_ms = self.weights.lambda_ms_per_gb * bytes(taken) / 1e9;
        let held_up = if node.decodes { compute_ms * node.decoding as f64 } else { 0.0 };
        let decode_ms = self.weights.mu * held_up;
        let cost_ms = node.queue_ms + compute_ms + network_ms + restore_ms + hbm_ms + decode_ms;
        let (node, queue_ms) = (node.node, node.queue_ms);
        Candidate {
            node,
            action,
            cached_tokens,
            queue_ms,
            compute_ms,
            network_ms,
            restore_ms,
            hbm_ms,
            decode_ms,
            cost_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Roofline, device, model};

    fn node(node: u32) -> NodeView {
        NodeView {
            node,
            decodes: true,
            queue_ms: 0.0,
            decoding: 0,
            memory_tokens: 0,
            device_tokens: 0,
            memory_bytes_per_ms: 0.0,
            disk_tokens: 0,
            disk_bytes_per_ms: 12e6,
            disk_queue_ms: 0.0,
            network_bytes_per_ms: 50e6,
            network_queue_ms: 0.0,
        }
    }

    fn route(nodes: &[NodeView], owner: Option<(u32, u64)>) -> Route {
        let prefill = Roofline::new(model("llama-3.1-8b").unwrap(), device("h100").unwrap(), 1);
        let question = Question {
            prompt_tokens: 16_384,
            token_bytes: 131_072.0,
            layers: 32,
            owner,
            shared_tokens: 0,
            forked: false,
            nodes,
            weights: Weights::default(),
        };
        question.route(&prefill)
    }

    fn taken(nodes: &[NodeView], owner: Option<(u32, u64)>) -> (u32, Action) {
        let best = *route(nodes, owner).best().unwrap();
        (best.node, best.action)
    }

    #[test]
    fn a_request_goes_to_its_owner_unless_others_are_sooner_with_the_owner_s_state_or_without() {
        let owner = NodeView { memory_tokens: 16_000, disk_tokens: 16_000, ..node(3) };
        let other = node(1);
        let held = Some((3, 16_000));
        assert_eq!(taken(&[other, owner], held), (3, Action::Colocated));
        let late = NodeView { queue_ms: 60.0, ..owner };
        assert_eq!(taken(&[other, late], held), (1, Action::Migrate));
        let cut_off = NodeView { network_bytes_per_ms: 0.0, ..other };
        assert_eq!(taken(&[cut_off, late], held), (3, Action::Colocated));
        let very_late = NodeView { queue_ms: 60_000.0, ..owner };
        assert_eq!(taken(&[cut_off, very_late], held), (1, Action::Recompute));
        let on_disk = NodeView { disk_tokens: 12_000, network_bytes_per_ms: 0.0, ..other };
        assert_eq!(taken(&[on_disk, very_late], held), (1, Action::FromDisk));
        assert_eq!(route(&[], None).best(), None);
    }

    #[test]
    fn what_is_not_decoded_where_it_was_prefilled_is_sent_on_whatever_it_was_made_from() {
        let prefiller = NodeView { decodes: false, ..node(0) };
        assert_eq!(taken(&[prefiller], None), (0, Action::RemotePrefill));
        // Of equal nodes the one is taken from which nothing has to be sent.
        assert_eq!(taken(&[prefiller, node(1)], None), (1, Action::Recompute));
        let full = NodeView { memory_tokens: 8000, disk_tokens: 12_000, ..prefiller };
        let all = route(&[full], Some((3, 16_000)));
        let actions: Vec<Action> = all.candidates.iter().map(|one| one.action).collect();
        for action in [Action::RemotePrefill, Action::FetchFromOwner, Action::FromDisk, Action::Recompute] {
            assert!(actions.contains(&action), "{action:?} of {actions:?}");
        }
        // 16,384 tokens of 131,072 bytes at 50e6 bytes in a millisecond, of 32 layers.
        let all_ms = 16_384.0 * 131_072.0 / 50e6;
        assert!(all.candidates.iter().all(|one| one.network_ms >= all_ms / 32.0));
        // A slow line is waited for: all of it, less what it took while layers were computed.
        let slow = NodeView { network_bytes_per_ms: 1e6, network_queue_ms: 500.0, ..prefiller };
        let found = route(&[slow], None);
        let one = found.best().unwrap();
        let left = 500.0 + 16_384.0 * 131_072.0 / 1e6 - one.compute_ms * 31.0 / 32.0;
        assert!((one.network_ms - left).abs() < 1e-6, "{one:?}");
        let cut_off = NodeView { network_bytes_per_ms: 0.0, ..prefiller };
        assert_eq!(route(&[cut_off], None).best(), None);
    }

    #[test]
    fn what_is_in_the_host_s_memory_has_to_reach_the_device() {
        let near = NodeView { memory_tokens: 16_000, device_tokens: 16_000, ..node(1) };
        let host = NodeView { device_tokens: 0, memory_bytes_per_ms: 20e6, ..near };
        let cost = |node: NodeView| *route(&[node], None).best().unwrap();
        let (device, host) = (cost(near), cost(host));
        assert_eq!((device.restore_ms, device.action), (0.0, Action::Colocated));
        let load = 16_000.0 * 131_072.0 / 20e6;
        assert!((host.restore_ms - (load + host.compute_ms / 32.0 - host.compute_ms)).abs() < 1e-6);
        assert!(host.hbm_ms > device.hbm_ms);
    }

    #[test]
    fn state_that_others_go_on_from_stays_with_its_owner() {
        let (owner, other) = (NodeView { queue_ms: 60.0, memory_tokens: 16_000, ..node(3) }, node(1));
        let prefill = Roofline::new(model("llama-3.1-8b").unwrap(), device("h100").unwrap(), 1);
        let best = |shared_tokens, forked| {
            let nodes = [other, owner];
            let question = Question {
                prompt_tokens: 16_384,
                token_bytes: 131_072.0,
                layers: 32,
                owner: Some((3, 16_000)),
                shared_tokens,
                forked,
                nodes: &nodes,
                weights: Weights::default(),
            };
            question.route(&prefill).best().map(|best| (best.node, best.action))
        };
        assert_eq!(best(0, false), Some((1, Action::Migrate)));
        assert_eq!(best(16_000, false), Some((1, Action::FetchFromOwner)));
        assert_eq!(best(0, true), Some((1, Action::FetchFromOwner)));
    }

    #[test]
    fn the_terms_add_up_and_every_candidate_is_explained() {
        let nodes = [
            NodeView { memory_tokens: 100, disk_tokens: 9000, decoding: 7, queue_ms: 3.0, ..node(3) },
            node(1),
        ];
        let route = route(&nodes, Some((3, 9000)));
        for one in &route.candidates {
            let sum =
                one.queue_ms + one.compute_ms + one.network_ms + one.restore_ms + one.hbm_ms + one.decode_ms;
            assert!((one.cost_ms - sum).abs() < 1e-9);
        }
        assert!(route.candidates.is_sorted_by(|one, other| one.cost_ms <= other.cost_ms));
        let explained = route.to_string();
        assert_eq!(explained.lines().count(), 1 + route.candidates.len());
        assert!(explained.contains("from disk") && explained.contains("migrate"), "{explained}");
        assert_eq!(route, super::tests::route(&nodes, Some((3, 9000))));
    }

    #[test]
    fn questions_without_sense_are_refused() {
        let ask = |nodes: &[NodeView], prompt_tokens, token_bytes| {
            let (weights, owner) = (Weights::default(), Some((1, u64::MAX)));
            Question {
                prompt_tokens,
                token_bytes,
                layers: 0,
                owner,
                shared_tokens: 0,
                forked: false,
                nodes,
                weights,
            }
            .check()
        };
        assert_eq!(ask(&[node(1), node(2)], 100, 1.0), Ok(()));
        assert_eq!(ask(&[node(1), node(1)], 100, 1.0), Err(RouteError::Twice(1)));
        for prompt in [0, u64::MAX] {
            assert_eq!(ask(&[], prompt, 1.0), Err(RouteError::Prompt));
        }
        assert_eq!(ask(&[], 1, f64::NAN), Err(RouteError::Request));
        for bad in [
            NodeView { queue_ms: -1.0, ..node(7) },
            NodeView { disk_bytes_per_ms: f64::INFINITY, ..node(7) },
            NodeView { disk_tokens: u64::MAX, ..node(7) },
        ] {
            assert_eq!(ask(&[bad], 1, 1.0), Err(RouteError::Node(7)));
        }
        assert_eq!(ask(&vec![node(1); MAX_NODES + 1], 1, 1.0), Err(RouteError::TooManyNodes));
    }

    #[test]
    fn requests_are_of_a_class_by_what_is_there_and_what_is_new() {
        assert_eq!(Class::of(0, 0, 9000, false), Class::NewLongPrefix);
        assert_eq!(Class::of(1000, 0, 900, false), Class::SmallTurn);
        assert_eq!(Class::of(30_000, 0, 9000, false), Class::LongToolOutput);
        assert_eq!(Class::of(30_000, 0, 200, false), Class::Continuation);
        assert_eq!(Class::of(30_000, 0, 200, true), Class::ForkedRollout);
        assert_eq!(Class::of(0, 30_000, 200, false), Class::ColdResume);
    }
}
