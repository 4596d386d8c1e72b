//! What is stored of tenants that no token is of: it can be found by no client, and takes room until it is evicted. After tokens
//! were switched on that is what was stored without.

use std::collections::BTreeMap;

use crate::human::{bytes, grouped};
use crate::state::ServerState;

/// What there is of it and what can be done about it, in a sentence; nothing if there is none.
pub(super) fn note(state: &ServerState) -> Option<String> {
    let all = state.ownerless();
    let sums = all.iter().fold(BTreeMap::<bool, (u64, u64)>::new(), |mut sums, one| {
        let sum = sums.entry(one.salt.is_empty()).or_default();
        *sum = (sum.0 + one.live_blocks, sum.1 + one.live_bytes);
        sums
    });
    let told = |what: &str, (blocks, size): (u64, u64), advice: &str| {
        format!(
            "{} blocks with {} {what}: no client can find these blocks; {advice}",
            grouped(blocks),
            bytes(size)
        )
    };
    let unsalted = sums.get(&true).map(|&sum| {
        let advice = "`unsalted = true` in the [[tenants]] of one tenant assigns the blocks to that tenant, \
            `kvarts tenant purge --unsalted` deletes the blocks";
        told("were stored while no tokens were required", sum, advice)
    });
    let others = sums.get(&false).map(|&sum| {
        let what = match state.gate.is_open() {
            true => "belong to tenants, but this server requires no tokens",
            false => "belong to tenants without a token in this configuration",
        };
        told(what, sum, "configure the tenants again, or delete the blocks with `kvarts tenant purge NAME`")
    });
    let said: Vec<String> = unsalted.into_iter().chain(others).collect();
    (!said.is_empty()).then(|| said.join("; "))
}
