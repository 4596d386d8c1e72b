//! Points of the stream of events as a caller may know them: the engine's own numbers would tell what others do.

use kvarts_contract::events::Sequence;

use crate::calls::call::Call;
use kvarts_wire::proto;

/// A point as the caller may know it: the engine's number would tell what others do.
pub(super) fn point(call: &Call, sequence: Sequence) -> proto::Sequence {
    let Sequence { stream, number } = call.state.event_mask.hide(call.caller.tenant.number, sequence);
    proto::Sequence { stream, number }
}

/// The point that a caller means. Of another stream than this one it is none of this one's.
pub(super) fn known(call: &Call, after: proto::Sequence) -> Sequence {
    let (state, tenant) = (&call.state, call.caller.tenant.number);
    let now = state.store().subscribe(None).sequence().stream;
    let stream = if after.stream == state.event_mask.stream(tenant, now) { now } else { !now };
    Sequence { stream, number: state.event_mask.number(tenant, after.number) }
}
