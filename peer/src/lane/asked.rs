//! What a peer asks for, as this node understands it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::api::{Life, TiledRequest, Verify};
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::plan::Order;
use kvarts_layout::{BlockKey, BlockShape, Identity, NamespaceId, OriginId};
use kvarts_wire::{convert, proto};

use super::delivery::chunk_count;
use super::frame::message;
use super::limits::{CHUNKS_MAX, KEYS_MAX, NAMESPACES_MAX, PIECE_BYTES_MAX, TIMEOUT_MAX};
use super::serving::Served;
use super::wire::Broken;

/// The namespaces that a peer has shown to know.
#[derive(Debug, Default)]
pub(super) struct Namespaces(BTreeMap<u32, NamespaceId>);

impl Namespaces {
    /// One more. A peer that knows an identity may name its namespace; nothing of it is made or kept by the store.
    pub(super) fn open(&mut self, body: Bytes) -> Result<(), Broken> {
        let proto::LaneOpen { namespace, identity } = message(body)?;
        let identity =
            Identity::decode(&identity).map_err(|_| Broken::Protocol("the identity is not valid"))?;
        let id = identity.namespace_id().map_err(|_| Broken::Protocol("the identity is not valid"))?;
        if self.0.len() >= NAMESPACES_MAX || self.0.insert(namespace, id).is_some() {
            return Err(Broken::Protocol("the request has too many namespaces, or the same namespace twice"));
        }
        Ok(())
    }
}

/// A piece that a peer wants.
#[derive(Debug)]
pub(super) struct Asked {
    /// Bytes are compared where they are used.
    pub(super) request: TiledRequest,
    /// Which productions are wanted.
    pub(super) origins: Vec<Option<OriginId>>,
    /// None: why it cannot be served.
    pub(super) shape: Result<Arc<BlockShape>, Reason>,
}

impl Asked {
    /// A request of a peer.
    pub(super) fn parse(
        body: Bytes,
        namespaces: &Namespaces,
        served: &dyn Served,
        now: Nanos,
    ) -> Result<Self, Broken> {
        let wire: proto::LaneRead = message(body)?;
        let namespace =
            namespaces.0.get(&wire.namespace).ok_or(Broken::Protocol("the namespace was not announced"))?;
        let column = convert::column(wire.column.as_ref());
        let (group, coordinate) = column.map_err(|_| Broken::Protocol("the coordinate is not valid"))?;
        let (keys, rest) = wire.keys.as_chunks::<32>();
        if !rest.is_empty() || keys.is_empty() || keys.len() > KEYS_MAX {
            return Err(Broken::Protocol("the request has too many keys, or none"));
        }
        let end = wire
            .first_layer
            .checked_add(wire.layers)
            .ok_or(Broken::Protocol("the range of layers is not valid"))?;
        let layers = wire.first_layer..end;
        let shape = served.shape(*namespace, group, coordinate);
        if let Ok(shape) = &shape {
            let (all, count) = (shape.layers().len(), keys.len() as u64);
            let bytes = shape.layers_bytes(&layers).saturating_mul(count);
            let chunks = chunk_count(shape, &layers).saturating_mul(count);
            let is_some = !layers.is_empty() && end as usize <= all;
            if !is_some || bytes > PIECE_BYTES_MAX || chunks > CHUNKS_MAX {
                return Err(Broken::Protocol("the request is empty, or larger than the limit of a piece"));
            }
        }
        let class = match wire.class() {
            proto::ReadClass::ReadBackground => Class::Background,
            // Reads of peers are never before this node's own.
            _ => Class::Prefetch,
        };
        let timeout = Duration::from_micros(wire.timeout_us).min(TIMEOUT_MAX);
        let request = TiledRequest {
            namespace: *namespace,
            group,
            coordinate,
            keys: keys.iter().copied().map(BlockKey).collect(),
            layers,
            order: if wire.by_blocks { Order::Blocks } else { Order::Layers },
            verify: Verify::Never,
            class,
            deadline: Some(now.plus(timeout)),
        };
        Ok(Self {
            request,
            origins: origins(&wire.origins, keys.len())?,
            // What is not known here is not here.
            shape: shape.map_err(|reason| match reason {
                Reason::UnknownNamespace(_) => Reason::NotHere(BlockKey::default()),
                other => other,
            }),
        })
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.as_ref().map_or(0, |shape| self.request.whole().bytes(shape))
    }
}

/// Which productions are wanted.
fn origins(wire: &[u8], blocks: usize) -> Result<Vec<Option<OriginId>>, Broken> {
    let (each, rest) = wire.as_chunks::<17>();
    if wire.is_empty() {
        return Ok(vec![None; blocks]);
    }
    if !rest.is_empty() || each.len() != blocks {
        return Err(Broken::Protocol("the origins belong to other blocks"));
    }
    let one = |[known, id @ ..]: &[u8; 17]| (*known != 0).then_some(OriginId(*id));
    Ok(each.iter().map(one).collect())
}

/// The productions that are wanted, as a request says them.
pub(super) fn wire_origins(wanted: &[Option<OriginId>]) -> Bytes {
    if wanted.iter().all(Option::is_none) {
        return Bytes::new();
    }
    let mut wire = Vec::with_capacity(wanted.len() * 17);
    for one in wanted {
        wire.push(u8::from(one.is_some()));
        wire.extend_from_slice(&one.unwrap_or_default().0);
    }
    wire.into()
}

/// What a life without an end is said with.
const ENDLESS: u64 = u64::MAX;

/// How long a production lives, as a peer is told it. One of which nothing is known is over, and copied by none.
pub(super) fn wire_life(life: Option<Life>, now: Nanos) -> [u8; 16] {
    let left = |ends: Nanos| u64::try_from(ends.since(now).as_millis()).unwrap_or(ENDLESS);
    let (produced, left) = life.map_or((0, 0), |life| (life.produced_ms, life.ends.map_or(ENDLESS, left)));
    let mut wire = [0; 16];
    let (first, second) = wire.split_at_mut(8);
    first.copy_from_slice(&produced.to_le_bytes());
    second.copy_from_slice(&left.to_le_bytes());
    wire
}

/// What a peer says of how long a production lives, which was asked for at this time: no answer is older.
pub(super) fn life(wire: &[u8; 16], asked: Nanos) -> Life {
    let [produced_ms, left] = [0, 8].map(|at| {
        let bytes = wire.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    });
    Life { produced_ms, ends: (left != ENDLESS).then(|| asked.plus(Duration::from_millis(left))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_come_back_no_longer_than_they_were() {
        let at = |ms: u64| Nanos(0).plus(Duration::from_millis(ms));
        for ends in [None, Some(at(0)), Some(at(500)), Some(at(1000)), Some(Nanos(u64::MAX))] {
            let given = Life { produced_ms: 7, ends };
            // Asked for at 300, answered at 400.
            let back = life(&wire_life(Some(given), at(400)), at(300));
            assert_eq!(back.produced_ms, 7);
            assert_eq!(back.ends.is_none(), ends.is_none());
            let latest = |ends: Nanos| ends.max(at(300));
            assert!(
                back.ends.zip(ends).is_none_or(|(back, ends)| back <= latest(ends)),
                "{back:?} of {given:?}"
            );
        }
        assert_eq!(life(&wire_life(None, at(400)), at(300)), Life { produced_ms: 0, ends: Some(at(300)) });
        assert!(life(&[0xff; 16], Nanos(u64::MAX)).ends.is_none());
        assert!(life(&[0xfe; 16], Nanos(u64::MAX)).ends.is_some());
    }

    #[test]
    fn wanted_productions_come_back() {
        let one = Some(OriginId([7; 16]));
        for wanted in [vec![None, None], vec![None, one], vec![one, Some(OriginId([0; 16]))]] {
            assert_eq!(origins(&wire_origins(&wanted), 2), Ok(wanted));
        }
        assert!(origins(&[1; 17], 2).is_err() && origins(&[1; 35], 2).is_err());
    }
}
