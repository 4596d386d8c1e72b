//! A read that was checked, wherever its bytes go, and how its end is counted.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_contract::api::{Order, ReadEnd, TiledRequest, Verify, wanted_layers};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, BlockShape};

use super::call::Call;
use super::fault::{self, Fault, Outcome};
use super::{convert, limits};
use crate::state::Model;
use kvarts_wire::proto;

/// A read that was checked.
#[derive(Debug)]
pub(crate) struct Download {
    pub(crate) request: TiledRequest,
    model: Arc<Model>,
    pub(crate) shape: Arc<BlockShape>,
}

impl Download {
    /// A read whose bytes go through the memory of requests.
    pub(crate) fn check(call: &Call, order: Order, wire: proto::ReadRequest) -> Outcome<Self> {
        let asked = Self::asked(call, order, wire)?;
        let largest = asked.shape.layers().iter().map(kvarts_layout::LayerShape::bytes).max().unwrap_or(0);
        if largest > call.state.memory.piece_max() || asked.bytes() > limits::REQUEST_BYTES_MAX {
            return Err(Reason::TooMany("bytes").into());
        }
        Ok(asked)
    }

    /// Bytes of all that is wanted.
    pub(crate) fn bytes(&self) -> u64 {
        self.request.whole().bytes(&self.shape)
    }

    /// A read, wherever its bytes go.
    pub(crate) fn asked(call: &Call, order: Order, wire: proto::ReadRequest) -> Outcome<Self> {
        let keys = convert::keys(&wire.keys)?;
        if keys.is_empty() {
            return Err(Reason::Empty.into());
        }
        let mut sorted: Vec<&BlockKey> = keys.iter().collect();
        sorted.sort_unstable();
        if let Some([key, _]) = sorted.array_windows().find(|[a, b]| a == b) {
            return Err(Reason::Duplicate(**key).into());
        }
        let namespace = convert::namespace(&wire.namespace)?;
        let model = call.state.models.get(&call.caller, namespace).inspect_err(|_| {
            call.state.metrics.read_unregistered(&call.caller.tenant.name, keys.len() as u64);
        })?;
        model.used(call.state.clock().unix_millis());
        let (group, coordinate) = convert::column(wire.column.as_ref())?;
        let shape = call.state.engine.shape(namespace, group, coordinate)?;
        let layers = wire.layers.map(|range| range.start..range.end);
        let layers = wanted_layers(layers.as_ref(), &shape)?;
        let class = match proto::ReadClass::try_from(wire.class) {
            Ok(proto::ReadClass::ReadForeground) => Class::Foreground,
            Ok(proto::ReadClass::ReadPrefetch) => Class::Prefetch,
            Ok(proto::ReadClass::ReadBackground) => Class::Background,
            Err(_) => {
                return Err(Fault::malformed(format!(
                    "class: this server does not support the value {}",
                    wire.class
                )));
            }
        };
        call.set_class(class);
        if let (Order::Layers, Some(first)) = (order, keys.first()) {
            call.note_layered_read(&model, *first, keys.len());
        }
        let (verify, deadline) = (Verify::Always, Some(call.engine_deadline()));
        let request =
            TiledRequest { namespace, group, coordinate, keys, layers, order, verify, class, deadline };
        Ok(Self { request, model, shape })
    }
}

/// Counts what a read delivered and what it did not. `early` is why it ended before all of it was read, if something other
/// than its deadline did that.
pub(crate) fn count(call: &Call, download: &Download, end: &ReadEnd, early: Option<&Reason>) {
    let Download { request: asked, model, .. } = download;
    let (delivered, missed) = tally(asked.order, asked.keys.len(), asked.layers.len(), end, early);
    let (tenant, model) = (&call.caller.tenant.name, &model.identity.model);
    call.state.metrics.read_ended(tenant, model, delivered, missed);
    let failures = end.failures.iter().map(|(_, reason)| reason);
    call.state.trouble.read_ended(&call.state.audit, asked.namespace, failures);
}

/// Blocks of which everything came, and the others by the reason of their failure. In layer order no block is whole before
/// the last layer, and blocks behind the first one that failed are not read: they are missed for the same reason.
fn tally(
    order: Order,
    blocks: usize,
    layers: usize,
    end: &ReadEnd,
    early: Option<&Reason>,
) -> (u64, BTreeMap<&'static str, u64>) {
    let mut missed = BTreeMap::new();
    for (_, reason) in &end.failures {
        *missed.entry(reason_name(reason)).or_default() += 1;
    }
    let left = (blocks as u64).saturating_sub(end.failures.len() as u64);
    if order == Order::Blocks {
        return (left, missed);
    }
    let all_came = end.usable_layers as usize == layers && early.is_none();
    let delivered = if all_came { left.min(u64::from(end.usable_blocks)) } else { 0 };
    let why = if all_came { end.failures.first().map(|(_, reason)| reason) } else { early };
    let others = left - delivered;
    if others > 0 {
        *missed.entry(reason_name(why.unwrap_or(&Reason::DeadlinePassed))).or_default() += others;
    }
    (delivered, missed)
}

/// The name of a reason in metrics.
fn reason_name(reason: &Reason) -> &'static str {
    proto::Reason::try_from(fault::detail(reason).reason).unwrap_or_default().as_str_name()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_come_is_counted_as_missed_in_either_order() {
        let end = |usable_blocks, usable_layers, failures| ReadEnd {
            usable_blocks,
            usable_layers,
            failures,
            held_bytes: 0,
        };
        let missed = |all: &[(&'static str, u64)]| all.iter().copied().collect::<BTreeMap<_, _>>();
        let (late, busy) = ("REASON_DEADLINE_PASSED", "REASON_BUSY");
        let by_layers = |end: &ReadEnd, early: Option<&Reason>| tally(Order::Layers, 10, 4, end, early);
        assert_eq!(by_layers(&end(10, 4, vec![]), None), (10, missed(&[])));
        // Late, without a word of any block.
        assert_eq!(by_layers(&end(10, 3, vec![]), None), (0, missed(&[(late, 10)])));
        assert_eq!(by_layers(&end(10, 0, vec![]), Some(&Reason::Busy("full"))), (0, missed(&[(busy, 10)])));
        // A block failed, and those behind it were not read.
        let failed = vec![(3, Reason::InFlight)];
        assert_eq!(by_layers(&end(3, 4, failed.clone()), None), (3, missed(&[("REASON_IN_FLIGHT", 7)])));
        // In block order each block came or is one of the failures.
        let by_blocks = tally(Order::Blocks, 10, 4, &end(3, 4, failed), None);
        assert_eq!(by_blocks, (9, missed(&[("REASON_IN_FLIGHT", 1)])));
    }
}
