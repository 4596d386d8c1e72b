//! Who owns a chain: asked of the node that holds its partition, which grants as long as a majority of the members is of its own
//! epoch ([`kvarts_cluster::ownership`]).
//!
//! Members are named by files, which an operator changes node by node. A majority of one epoch and one of the next have a node in
//! common if one member is added or removed at a time, and that node is of one epoch only: so at most one of two holders is
//! confirmed.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use kvarts_cluster::members::NodeId;
use kvarts_cluster::ownership::{Lease, Refused, Token};
use kvarts_cluster::partition::Tag;
use kvarts_wire::proto;
use proto::chain_reply::What;
use proto::chain_request::Ask;
use tonic::Status;

use super::{ClusterNode, wire};

/// How often a holder has itself confirmed.
const CONFIRM_EVERY: Duration = Duration::from_secs(1);
/// How long a member may take to say which epoch it is of: less than a confirmation lasts.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);
/// Between nodes a question about a chain takes at most this long.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);

impl ClusterNode {
    /// Asks, as `asked.node`, about the chain of this name: here or at the node that holds its partition.
    pub async fn chain(&self, tag: Tag, asked: proto::ChainRequest) -> Result<proto::ChainReply, Status> {
        let holder = self.directory().holder_of(&tag).unwrap_or(self.me);
        let asked = proto::ChainRequest { tag: tag.0.to_vec().into(), ..asked };
        if holder == self.me {
            return self.decide(&asked);
        }
        let Some(link) = self.link(holder) else { return Ok(unreachable_holder()) };
        match link.chain(asked, TIMEOUT).await {
            Ok(reply) => Ok(reply),
            Err(status) if status.code() == tonic::Code::InvalidArgument => Err(status),
            Err(_) => Ok(unreachable_holder()),
        }
    }

    /// Who owns the chains that begin with these blocks, as far as this node decides it and may say so now: the place of each block
    /// that begins one, and the owner.
    pub(super) fn owners(&self, tags: impl Iterator<Item = Tag>) -> Vec<(usize, NodeId)> {
        let (now, chains) = (self.now(), self.chains());
        if chains.is_empty() {
            return Vec::new();
        }
        let owned = |(place, tag)| chains.look(&tag, now).ok().map(|lease| (place, lease.owner));
        tags.enumerate().filter_map(owned).collect()
    }

    /// Decides about a chain of a partition that this node holds.
    pub(super) fn decide(&self, asked: &proto::ChainRequest) -> Result<proto::ChainReply, Status> {
        let tag = wire::tag(&asked.tag)?;
        if self.directory().holder_of(&tag) != Some(self.me) {
            return Ok(proto::ChainReply { what: What::New.into(), ..proto::ChainReply::default() });
        }
        let node = wire::node(&asked.node)?;
        let token = Token { epoch: asked.token_epoch, number: asked.token_number };
        let ask =
            asked.ask.as_ref().ok_or_else(|| Status::invalid_argument("ask: the list of keys is empty"))?;
        let now = self.now();
        let mut chains = self.chains();
        let hold = |milliseconds: u64| Duration::from_millis(milliseconds);
        let granted = match *ask {
            Ask::ClaimMs(hold_ms) => chains.claim(tag, node, hold(hold_ms), now),
            Ask::RenewMs(hold_ms) => chains.renew(tag, node, token, hold(hold_ms), now),
            Ask::Release(_) => chains.release(&tag, node, token, now).and(Err(Refused::Stale)),
            Ask::ReplicateMs(hold_ms) => {
                let on = wire::node(&asked.replica)?;
                // A token is no secret: it is the owner that grants.
                let owner = chains
                    .look(&tag, now)
                    .and_then(|lease| if lease.owner == node { Ok(lease) } else { Err(Refused::Stale) });
                owner.and_then(|_| chains.replicate(&tag, token, on, hold(hold_ms), now)).and(owner)
            }
            Ask::Look(_) => chains.look(&tag, now),
        };
        let may_be_nobodys = matches!(ask, Ask::Release(_) | Ask::Look(_));
        let mut reply = proto::ChainReply::default();
        let what = match granted {
            Ok(lease) => {
                reply.lease = Some(wire_lease(&lease, now));
                What::Granted
            }
            Err(Refused::Owned(lease)) => {
                reply.lease = Some(wire_lease(&lease, now));
                What::Owned
            }
            Err(Refused::Stale) if may_be_nobodys && chains.owner(&tag, now).is_none() => What::Nobody,
            Err(Refused::Stale) => What::Stale,
            Err(Refused::New(until)) => {
                reply.wait_ms = until.saturating_sub(now).as_millis() as u64;
                What::New
            }
            Err(Refused::Unconfirmed) => {
                reply.wait_ms = CONFIRM_EVERY.as_millis() as u64;
                What::New
            }
            Err(Refused::Full) => What::Full,
        };
        reply.what = what.into();
        reply.replicas = chains.replicas(&tag, now).flat_map(|node| node.0).collect();
        Ok(reply)
    }
}

fn unreachable_holder() -> proto::ChainReply {
    let wait_ms = CONFIRM_EVERY.as_millis() as u64;
    proto::ChainReply { what: What::Unreachable.into(), wait_ms, ..proto::ChainReply::default() }
}

fn wire_lease(lease: &Lease, now: Duration) -> proto::OwnerLease {
    proto::OwnerLease {
        node: lease.owner.0.to_vec().into(),
        token_epoch: lease.token.epoch,
        token_number: lease.token.number,
        left_ms: lease.until.saturating_sub(now).as_millis() as u64,
    }
}

/// Has this node confirmed, for as long as it runs: a majority of its members, itself among them, is of its epoch.
pub(super) async fn confirm(node: Arc<ClusterNode>) {
    loop {
        let asked = node.now();
        let members = node.members();
        let epoch = members.epoch();
        let links = node.links();
        let same = links.iter().map(|link| async {
            let reply = link.join(node.join_request(&members), CONFIRM_TIMEOUT).await;
            reply.is_ok_and(|reply| reply.epoch == epoch)
        });
        if is_majority(same.collect(), members.list().len()).await {
            // With the lock: chains of another epoch come after its members.
            let mut chains = node.chains();
            if node.members().epoch() == epoch {
                chains.confirm(asked);
            }
        }
        node.sleep(CONFIRM_EVERY).await;
    }
}

/// Whether a majority of `members` members, one of which is this node, is of its epoch: known as soon as enough of the others have said
/// so. No member that says nothing is waited for then.
async fn is_majority(mut others: FuturesUnordered<impl Future<Output = bool>>, members: usize) -> bool {
    let mut same = 1;
    while same * 2 <= members {
        // ends: the calls to the others have a time each
        match others.next().await {
            Some(is_same) => same += usize::from(is_same),
            None => return false,
        }
    }
    true
}

/// Which lease an answer carries, for callers that go on with it.
pub fn lease_of(reply: &proto::ChainReply) -> Option<(NodeId, Token)> {
    let lease = reply.lease.as_ref()?;
    let token = Token { epoch: lease.token_epoch, number: lease.token_number };
    wire::node(&lease.node).ok().map(|node| (node, token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use futures_util::future::{BoxFuture, pending, ready};

    fn known(others: &[Option<bool>]) -> Option<bool> {
        let answer = |said: &Option<bool>| -> BoxFuture<'static, bool> {
            said.map_or_else(|| pending().boxed(), |is_same| ready(is_same).boxed())
        };
        is_majority(others.iter().map(answer).collect(), others.len() + 1).now_or_never()
    }

    #[test]
    fn a_majority_confirms_a_holder_while_a_member_that_is_stopped_says_nothing() {
        assert_eq!(known(&[]), Some(true));
        assert_eq!(known(&[None, Some(true)]), Some(true));
        assert_eq!(known(&[None, Some(true), Some(false), Some(true)]), Some(true));
        // Half of them is no majority.
        assert_eq!(known(&[Some(false)]), Some(false));
        assert_eq!(known(&[None, Some(true), Some(false)]), None);
    }
}
