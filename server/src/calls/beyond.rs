//! What a plan may count besides the store's own disks: blocks that reads bring from other nodes and from the bucket, and
//! the ways there.

use std::collections::BTreeMap;
use std::time::Duration;

use kvarts_cluster::members::NodeId;
use kvarts_contract::api::{Beyond, BeyondColumn, MatchRequest};
use kvarts_layout::{Coordinate, Group};
use kvarts_peer::node::{ClusterNode, Column, Together as Found};
use kvarts_planner::plan::{Link, Source};
use kvarts_wire::proto;
use tokio::time::Instant;

use super::call::Call;
use super::convert;
use super::entries::check_entries;
use super::fault::Outcome;

/// How long other nodes may take to say who has blocks.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(50);
/// What a way to another node is taken for before anything came over it: a network of 10 Gbit/s, and a read of a disk.
pub(super) const UNMEASURED: Link = Link { latency_ms: 1.0, bytes_per_ms: 1.25e6, outstanding_bytes: 0 };

/// Blocks of a prompt, each of which counts once, in however many columns it was found.
#[derive(Debug, Default)]
pub(crate) struct Blocks(Vec<bool>);

impl Blocks {
    fn add(&mut self, places: &[u32]) {
        for place in places.iter().map(|place| *place as usize) {
            self.0.resize(self.0.len().max(place + 1), false);
            if let Some(is_one) = self.0.get_mut(place) {
                *is_one = true;
            }
        }
    }

    pub(crate) fn count(&self) -> u32 {
        self.0.iter().filter(|is_one| **is_one).count() as u32
    }
}

/// Which blocks of a prompt this node and others have together.
#[derive(Debug, Default)]
pub(crate) struct Together {
    pub(crate) columns: BTreeMap<(Group, Coordinate), Vec<bool>>,
    /// Blocks of which it is not known whether other nodes have them.
    pub(crate) unasked: Blocks,
    /// Of other nodes, blocks that are not here: those that can be read from them now, and those that can be read nowhere.
    pub(crate) with: BTreeMap<NodeId, (Blocks, Blocks)>,
}

impl Together {
    fn add(&mut self, column: (Group, Coordinate), found: Found) {
        self.columns.insert(column, found.blocks);
        self.unasked.add(&found.unasked);
        for (node, blocks) in found.with {
            self.with.entry(node).or_default().0.add(&blocks);
        }
        for (node, blocks) in found.unreadable {
            self.with.entry(node).or_default().1.add(&blocks);
        }
    }
}

/// Asks other nodes for the blocks of a match.
pub(crate) async fn together(
    call: &Call,
    node: &ClusterNode,
    wire: &proto::MatchRequest,
) -> Outcome<Together> {
    let keys = convert::keys(&wire.keys)?;
    // Of a model that is another tenant's nothing is told.
    let namespace = convert::namespace(&wire.namespace)?;
    call.state.models.get(&call.caller, namespace)?;
    let requirements = convert::requirements(wire.block_tokens, &wire.requirements)?;
    check_entries(keys.len(), &requirements)?;
    let mut together = Together::default();
    for requirement in requirements.groups() {
        for &coordinate in &requirement.coordinates {
            let group = requirement.group;
            let column = Column { namespace, group, coordinate, keys: &keys };
            let left = call.deadline.saturating_duration_since(Instant::now());
            together.add((group, coordinate), node.presence(column, LOOKUP_TIMEOUT.min(left)).await);
        }
    }
    Ok(together)
}

/// What the plan of a match may count, if there is anything: the model is the caller's. Whatever is here as well is read here.
pub(crate) fn of_plan(
    call: &Call,
    request: &MatchRequest<'_>,
    together: Option<&Together>,
) -> Option<Beyond> {
    let mut beyond = Beyond::default();
    if let (Some(node), Some(together)) = (&call.state.decided.cluster, together) {
        let way = to_others(node);
        beyond.assumed.push((Source::Peer, Link { outstanding_bytes: way.outstanding_bytes, ..UNMEASURED }));
        beyond.ways.push((Source::Peer, way));
        for (column, there) in &together.columns {
            beyond.columns.insert(*column, BeyondColumn { peers: there.clone(), cold: Vec::new() });
        }
    }
    let cold = call.state.decided.cold.as_ref().filter(|cold| cold.is_asked());
    if let Some((cold, known)) = cold.and_then(|cold| Some((cold, cold.known(request.namespace)?))) {
        let may_have: Vec<bool> = request.keys.iter().map(|key| known.may_have(key)).collect();
        for requirement in request.requirements.groups() {
            for &coordinate in &requirement.coordinates {
                beyond.columns.entry((requirement.group, coordinate)).or_default().cold = may_have.clone();
            }
        }
        beyond.assumed.push((Source::Cold, cold.assumed_link()));
        beyond.ways.push((Source::Cold, cold.link()));
    }
    (!beyond.ways.is_empty()).then_some(beyond)
}

/// The way to other nodes: as that to one of them is on average, of those that can be reached.
fn to_others(node: &ClusterNode) -> Link {
    let status = node.status();
    let others = status.nodes.iter().filter(|other| !other.is_me && other.is_reachable);
    let paths: Vec<_> = others.filter_map(|other| other.path.as_ref()).collect();
    let rates: Vec<f64> =
        paths.iter().filter_map(|path| path.rate).filter(|rate| rate.is_finite() && *rate > 0.0).collect();
    let outstanding = paths.iter().fold(0u64, |all, path| all.saturating_add(path.outstanding));
    Link {
        bytes_per_ms: match rates.len() {
            0 => UNMEASURED.bytes_per_ms,
            count => rates.iter().sum::<f64>() / count as f64 / 1e3,
        },
        outstanding_bytes: outstanding / (paths.len() as u64).max(1),
        ..UNMEASURED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::StoreId;

    #[test]
    fn a_block_counts_once_in_however_many_columns_it_was_found() {
        let (one, other) = (StoreId([1; 16]), StoreId([2; 16]));
        let mut together = Together::default();
        for rank in 0..3u16 {
            let found = Found {
                blocks: vec![false; 4],
                unasked: (0..4).collect(),
                with: [(one, vec![1, 3])].into(),
                unreadable: [(other, vec![2 - u32::from(rank)])].into(),
            };
            together.add((Group(rank.into()), Coordinate::default()), found);
        }
        let counts = |node| together.with.get(&node).map(|(has, lost)| (has.count(), lost.count()));
        assert_eq!((together.unasked.count(), together.columns.len()), (4, 3));
        assert_eq!([counts(one), counts(other)], [Some((2, 0)), Some((0, 3))]);
    }
}
