//! A put that was checked, however its bytes come: what is done with each of its blocks, and the pieces that are on their way to disk.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use kvarts_contract::api::{BlockOutcome, Digests, Durability, Parent, Placed, PutReply, PutRequest};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::{Ticket, ticket};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, Layout, NamespaceId, OriginId};
use kvarts_peer::node::{Column, Fate, Placing};

use super::call::Call;
use super::fault::{Fault, Outcome};
use super::{convert, limits};
use kvarts_wire::proto;

/// A put that was checked: everything but the bytes.
pub(crate) struct Upload {
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    pub(crate) shape: Arc<BlockShape>,
    parent: Parent,
    first_block: Option<u32>,
    pub(crate) keys: Vec<BlockKey>,
    layout: Option<Layout>,
    durability: Durability,
    expires_after: Option<std::time::Duration>,
    origins: Option<Vec<OriginId>>,
    /// What is done with blocks that are not simply stored, as other nodes have them or own their chain.
    placing: Option<Placing>,
}

impl Upload {
    pub(crate) fn check(call: &Call, header: proto::PutHeader) -> Outcome<Self> {
        call.set_class(Class::Put);
        let keys = convert::keys(&header.keys)?;
        if keys.is_empty() {
            return Err(Reason::Empty.into());
        }
        let parent = parent(header.parent.as_ref())?;
        check_keys(&keys, parent)?;
        let origins = convert::origins(&header.origins)?;
        if let Some(origins) = origins.as_ref().filter(|origins| origins.len() != keys.len()) {
            let (expected, found) = (keys.len() as u64, origins.len() as u64);
            return Err(Reason::Length { expected, found }.into());
        }
        let namespace = convert::namespace(&header.namespace)?;
        call.state.models.get(&call.caller, namespace)?.used(call.state.clock().unix_millis());
        let (group, coordinate) = convert::column(header.column.as_ref())?;
        let shape = call.state.engine.shape(namespace, group, coordinate)?;
        let total = shape.block_bytes().saturating_mul(keys.len() as u64);
        if shape.block_bytes() > call.state.memory.piece_max() || total > limits::REQUEST_BYTES_MAX {
            return Err(Reason::TooMany("bytes").into());
        }
        Ok(Self {
            namespace,
            group,
            coordinate,
            parent,
            first_block: header.first_block,
            layout: layout(header.layout)?,
            durability: durability(header.durability)?,
            expires_after: (header.expires_after_ms > 0)
                .then(|| std::time::Duration::from_millis(header.expires_after_ms)),
            origins,
            keys,
            shape,
            placing: None,
        })
    }

    fn column(&self) -> Column<'_> {
        let (namespace, group, coordinate) = (self.namespace, self.group, self.coordinate);
        Column { namespace, group, coordinate, keys: &self.keys }
    }

    /// Asks what other nodes have and own, where puts depend on it. It waits a moment at most, and what is not known by
    /// then is stored.
    pub(crate) async fn place(&mut self, call: &Call) {
        let Some(node) = &call.state.decided.cluster else { return };
        let parent = match self.parent {
            Parent::Key(key) => Some(key),
            _ => None,
        };
        node.note_use(&self.column(), parent);
        self.placing = node.place(self.column(), parent).await;
    }

    /// The same again where a lease has ended by which blocks were to be stored.
    pub(crate) async fn place_again(&mut self, call: &Call) {
        let Some(node) = &call.state.decided.cluster else { return };
        if self.placing.as_ref().is_some_and(|placing| !node.stands(placing)) {
            self.place(call).await;
        }
    }

    /// Offers what was stored of chains that other nodes own to those.
    pub(crate) fn offer(&self, call: &Call, outcomes: &[BlockOutcome]) {
        if let Some((node, placing)) = call.state.decided.cluster.as_ref().zip(self.placing.as_ref()) {
            let is_stored = |place| outcomes.get(place) == Some(&BlockOutcome::Stored);
            let ttl = self.own_ttl(call);
            node.offer_to_owners(self.column(), placing, ttl, is_stored);
        }
    }

    /// How long the blocks live, wherever they are stored.
    fn own_ttl(&self, call: &Call) -> Option<std::time::Duration> {
        self.expires_after.or_else(|| call.state.engine.default_ttl(self.namespace))
    }

    /// What is done with a block.
    fn fate(&self, block: usize) -> Fate {
        self.placing.as_ref().map(|placing| placing.fate(block)).unwrap_or_default()
    }

    /// The blocks `from .. to` in runs of one fate each.
    pub(crate) fn runs(&self, from: usize, to: usize) -> Vec<Range<usize>> {
        let (mut runs, mut begin) = (Vec::new(), from);
        for at in from..to {
            let is_last = at + 1 == to || self.fate(at) != self.fate(at + 1);
            if is_last {
                runs.push(begin..at + 1);
                begin = at + 1;
            }
        }
        runs
    }

    /// Blocks of one piece.
    pub(crate) fn piece_blocks(&self, call: &Call) -> usize {
        let bytes = call.state.at_once(&call.caller.tenant, limits::PUT_PIECE_BYTES);
        usize::try_from(bytes / self.shape.block_bytes()).unwrap_or(1).max(1)
    }

    /// The engine's request for the blocks `first ..` whose bytes are in `pages`.
    pub(crate) fn request(
        &self,
        first: usize,
        keys: &[BlockKey],
        pages: SharedBuf,
        call: &Call,
    ) -> Outcome<PutRequest> {
        let before = first.checked_sub(1).and_then(|at| self.keys.get(at));
        let parent = self.parent.behind(before);
        let skipped = u32::try_from(first).ok();
        let origins = self.origins.as_ref().and_then(|all| all.get(first..first + keys.len()));
        let blocks = u32::try_from(keys.len()).map_err(|_| Reason::TooMany("blocks"))?;
        let mut expires_after = self.expires_after;
        if let Fate::Copied(hold) = self.fate(first) {
            let own = self.own_ttl(call);
            expires_after = Some(own.map_or(hold, |own| own.min(hold)));
        }
        Ok(PutRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            parent,
            first_block: self.first_block.and_then(|block| block.checked_add(skipped?)),
            keys: keys.to_vec(),
            from: Placed::blocks(&self.shape, pages, blocks)?,
            layout: self.layout,
            durability: self.durability,
            expires_after,
            origins: origins.map(<[OriginId]>::to_vec),
            deadline: Some(call.engine_deadline()),
        })
    }
}

fn parent(wire: Option<&proto::Parent>) -> Outcome<Parent> {
    use proto::parent::Parent as Wire;
    match wire.and_then(|parent| parent.parent.as_ref()) {
        None | Some(Wire::Root(false)) => Ok(Parent::Unknown),
        Some(Wire::Root(true)) => Ok(Parent::Root),
        Some(Wire::Key(key)) => {
            let key = <[u8; 32]>::try_from(&key[..])
                .map_err(|_| Fault::malformed("parent.key: 32 bytes are required"))?;
            Ok(Parent::Key(BlockKey(key)))
        }
    }
}

/// No key stands twice, and none is its own ancestor. The engine sees one piece at a time, so it is checked here.
fn check_keys(keys: &[BlockKey], parent: Parent) -> Result<(), Reason> {
    let mut sorted: Vec<&BlockKey> = keys.iter().collect();
    sorted.sort_unstable();
    if let Some([key, _]) = sorted.array_windows().find(|[a, b]| a == b) {
        return Err(Reason::Duplicate(**key));
    }
    match parent {
        Parent::Key(parent) if sorted.binary_search(&&parent).is_ok() => Err(Reason::OutOfOrder(parent)),
        _ => Ok(()),
    }
}

fn layout(wire: i32) -> Outcome<Option<Layout>> {
    match proto::Layout::try_from(wire) {
        Ok(proto::Layout::Auto) => Ok(None),
        Ok(proto::Layout::FullBlock) => Ok(Some(Layout::FullBlock)),
        Ok(proto::Layout::LayerBlock) => Ok(Some(Layout::LayerBlock)),
        Err(_) => Err(Fault::malformed(format!("layout: this server does not support the value {wire}"))),
    }
}

fn durability(wire: i32) -> Outcome<Durability> {
    match proto::Durability::try_from(wire) {
        Ok(proto::Durability::Durable) => Ok(Durability::Durable),
        Ok(proto::Durability::Relaxed) => Ok(Durability::Relaxed),
        Err(_) => Err(Fault::malformed(format!("durability: this server does not support the value {wire}"))),
    }
}

/// Puts that are on their way to disk, oldest first.
#[derive(Default)]
pub(crate) struct Pieces {
    pub(crate) tickets: VecDeque<(usize, Ticket<Result<PutReply, Error>>)>,
    pub(crate) outcomes: Vec<BlockOutcome>,
}

impl Pieces {
    /// Puts blocks `from ..` of an upload, a run of one fate, or says that they are held elsewhere.
    pub(crate) async fn put(
        &mut self,
        upload: &Upload,
        run: Range<usize>,
        pages: SharedBuf,
        digests: Option<Digests>,
        call: &Call,
    ) -> Outcome<()> {
        let (blocks, keys) = (run.len(), upload.keys.get(run.clone()).unwrap_or_default());
        let answer = if upload.fate(run.start) != Fate::Held {
            let mut request = upload.request(run.start, keys, pages, call)?;
            if let Some(digests) = digests {
                request.from = request.from.with_digests(digests);
            }
            call.state.store().put(request)
        } else {
            let (reply, answer) = ticket();
            let outcomes = vec![BlockOutcome::HeldElsewhere; blocks];
            // Its other half is here.
            let _ = reply.send(Ok(PutReply { outcomes }));
            answer
        };
        self.tickets.push_back((blocks, answer));
        self.take_until(limits::PUT_PIECES_UNDER_WAY).await
    }

    pub(crate) async fn take_until(&mut self, left: usize) -> Outcome<()> {
        while self.tickets.len() > left {
            let Some((blocks, ticket)) = self.tickets.pop_front() else { return Ok(()) };
            // ends: the call's deadline, around all of the put
            match ticket.await {
                Ok(Ok(reply)) => self.outcomes.extend(reply.outcomes),
                // What an earlier piece stored is stored: the answer is given block by block.
                Ok(Err(error)) if !self.outcomes.is_empty() => {
                    self.outcomes.extend(std::iter::repeat_n(BlockOutcome::Refused(error.0), blocks));
                }
                Ok(Err(error)) => return Err(error.into()),
                Err(_) => return Err(Fault::busy("the store is closing")),
            }
        }
        Ok(())
    }
}
