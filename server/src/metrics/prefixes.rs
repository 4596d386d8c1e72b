//! The prefixes of a model as a tree, and when the layers of the last reads came: for the status page. Both name keys of blocks, so
//! both are for those alone who may administer, each for its own tenant.

use std::collections::BTreeSet;

use kvarts_layout::{BlockKey, NamespaceId};
use serde_json::{Value, json};

use crate::state::{Caller, LayeredRead, ServerState};

/// Models in a list.
const MODELS_MAX: usize = 64;
/// Links that are looked at.
const LINKS_MAX: usize = 1 << 17;
/// Branches in a tree.
const BRANCHES_MAX: usize = 200;

/// Blocks that follow each other without a fork.
#[derive(PartialEq, Eq, Debug)]
struct Branch {
    depth: u32,
    first: BlockKey,
    blocks: u64,
    forks: u64,
}

/// The models of a tenant and, of one of them, its prefixes. Blocks that follow no other and that none follows are in no tree.
pub(super) async fn told(
    state: &ServerState,
    caller: &Caller,
    namespace: Option<NamespaceId>,
) -> Result<Value, String> {
    let known = state.engine.namespaces(&caller.tenant.salt, MODELS_MAX);
    let model = |one: &kvarts_store::engine::KnownNamespace| {
        json!({
            "namespace": one.namespace.to_string(), "model": one.identity.model, "revision": one.identity.revision,
            "live_bytes": one.live_bytes, "block_tokens": one.identity.block_tokens,
        })
    };
    let models: Vec<Value> = known.iter().map(model).collect();
    // Another tenant's is answered as one that is not there.
    let wanted = namespace.or(known.first().map(|one| one.namespace));
    let Some(wanted) = wanted.filter(|wanted| known.iter().any(|one| one.namespace == *wanted)) else {
        return Ok(
            json!({"models": models, "namespace": null, "branches": [], "branches_left_out": 0, "is_cut": false}),
        );
    };
    let links = state.engine.links(wanted, LINKS_MAX).await.map_err(|error| error.to_string())?;
    let is_cut = links.len() >= LINKS_MAX;
    let (branches, left_out) = tree(&links);
    let branch = |one: &Branch| json!({"depth": one.depth, "first": one.first.to_string(), "blocks": one.blocks, "forks": one.forks});
    Ok(json!({
        "models": models, "namespace": wanted.to_string(), "branches": branches.iter().map(branch).collect::<Vec<_>>(),
        "branches_left_out": left_out, "is_cut": is_cut,
    }))
}

/// The branches of the trees that links from parents to children make, a parent before its children, and how many there are
/// beyond those that are shown.
fn tree(links: &BTreeSet<(BlockKey, BlockKey)>) -> (Vec<Branch>, u64) {
    let children =
        |parent: BlockKey| links.range((parent, BlockKey([0; 32]))..=(parent, BlockKey([0xff; 32])));
    let parents: BTreeSet<BlockKey> = links.iter().map(|(parent, _)| *parent).collect();
    let followers: BTreeSet<BlockKey> = links.iter().map(|(_, child)| *child).collect();
    let (mut branches, mut left_out) = (Vec::new(), 0);
    let mut waiting: Vec<(u32, BlockKey)> = parents.difference(&followers).map(|root| (0, *root)).collect();
    waiting.reverse();
    // A key has one parent, or its links are not what honest keys make: no block is gone through twice.
    let mut seen = BTreeSet::new();
    while let Some((depth, first)) = waiting.pop() {
        let (mut blocks, mut last) = (0, first);
        let forks = loop {
            if !seen.insert(last) {
                break 0;
            }
            blocks += 1;
            let mut next = children(last).map(|(_, child)| *child);
            match (next.next(), next.next()) {
                (Some(only), None) => last = only,
                (None, _) => break 0,
                (Some(_), Some(_)) => {
                    let forks: Vec<_> = children(last).map(|(_, child)| (depth + 1, *child)).collect();
                    let count = forks.len() as u64;
                    waiting.extend(forks.into_iter().rev());
                    break count;
                }
            }
        };
        if blocks == 0 {
            continue;
        }
        if branches.len() < BRANCHES_MAX {
            branches.push(Branch { depth, first, blocks, forks });
        } else {
            left_out += 1;
        }
    }
    (branches, left_out)
}

/// The last reads by layers of a tenant: when each layer had come, in milliseconds; null of one that did not.
pub(super) fn reads(state: &ServerState, caller: &Caller) -> Value {
    let ms = |read: &LayeredRead| -> Vec<Option<f64>> {
        read.layers.iter().map(|at| at.map(|at| (at.as_secs_f64() * 1e6).round() / 1e3)).collect()
    };
    let one = |read: &LayeredRead| {
        json!({
            "began_ms": read.began_ms, "path": read.path, "model": read.model.identity.model,
            "namespace": read.model.namespace.to_string(), "first": read.first.to_string(), "blocks": read.blocks,
            "code": read.code, "layers_ms": ms(read),
        })
    };
    let reads = state.recent_reads.of(&caller.tenant.name, &caller.tenant.salt);
    json!({"reads": reads.iter().map(one).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u16) -> BlockKey {
        let mut key = [0; 32];
        key[..2].copy_from_slice(&n.to_be_bytes());
        BlockKey(key)
    }

    fn links(pairs: &[(u16, u16)]) -> BTreeSet<(BlockKey, BlockKey)> {
        pairs.iter().map(|&(parent, child)| (key(parent), key(child))).collect()
    }

    #[test]
    fn chains_are_one_branch_and_forks_are_deeper_ones() {
        // 1-2-3, then 4-5 and 6; and 10-11 alone.
        let (branches, left_out) = tree(&links(&[(1, 2), (2, 3), (3, 4), (4, 5), (3, 6), (10, 11)]));
        let branch = |depth, first, blocks, forks| Branch { depth, first: key(first), blocks, forks };
        assert_eq!(
            branches,
            [branch(0, 1, 3, 2), branch(1, 4, 2, 0), branch(1, 6, 1, 0), branch(0, 10, 2, 0)]
        );
        assert_eq!(left_out, 0);
    }

    #[test]
    fn many_branches_are_counted_and_a_circle_ends() {
        let wide: Vec<(u16, u16)> = (2..1002).map(|n| (1, n)).collect();
        let (branches, left_out) = tree(&links(&wide));
        assert_eq!((branches.len(), left_out), (BRANCHES_MAX, 1001 - BRANCHES_MAX as u64));
        assert_eq!(tree(&links(&[(1, 2), (2, 1)])), (vec![], 0));
        // A circle behind a root.
        let (branches, _) = tree(&links(&[(1, 2), (2, 3), (3, 2)]));
        assert_eq!(branches.iter().map(|one| one.blocks).sum::<u64>(), 3);
    }
}
