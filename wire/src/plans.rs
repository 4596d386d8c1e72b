//! Plans and routes as messages of the contract, and back.

use kvarts_contract::api::{Beyond, DiskLink, PlanTerms, Planned};
use kvarts_contract::error::Reason;
use kvarts_layout::Group;
use kvarts_planner::cost::{Compute, Device, Kind, Roofline, Sample, Sparse, Times, Told};
use kvarts_planner::plan::{Action, Does, Link, Overlap, Plan, Reason as Why, Source};
use kvarts_planner::route::{self, Candidate, Class, NodeView, Route, Weights};

use super::fault::{Fault, Outcome};
use super::limits::{HELD_BOUNDARIES_MAX, PLAN_SAMPLES_MAX};
use crate::proto;

/// What an answer of a server says that is none of the contract's.
const NO_PLAN: Reason = Reason::Bug("the answer has an invalid plan");

/// The two ways between a struct and its message, where all fields have the same names.
macro_rules! same_fields {
    ($to_wire:ident, $of_wire:ident, $here:ident, $($wire:ident)::+, $($field:ident),+) => {
        fn $to_wire(&$here { $($field),+ }: &$here) -> $($wire)::+ {
            $($wire)::+ { $($field),+ }
        }

        fn $of_wire(&$($wire)::+ { $($field),+ }: &$($wire)::+) -> $here {
            $here { $($field),+ }
        }
    };
}

/// The two ways between an enum and that of a message, where all names are the same.
macro_rules! same_names {
    ($to_wire:ident, $of_wire:ident, $($here:ident)::+, $($wire:ident)::+, $($name:ident),+) => {
        fn $to_wire(one: $($here)::+) -> $($wire)::+ {
            use {$($here)::+ as Here, $($wire)::+ as Wire};
            match one { $(Here::$name => Wire::$name),+ }
        }

        fn $of_wire(one: $($wire)::+) -> $($here)::+ {
            use {$($here)::+ as Here, $($wire)::+ as Wire};
            match one { $(Wire::$name => Here::$name),+ }
        }
    };
}

same_fields!(wire_sample, sample, Sample, proto::prefill_times::Sample, cached, new, ms);
same_fields!(wire_sparse, sparse, Sparse, proto::prefill_times::Sparse, tokens, flops, index_bytes);
same_fields!(wire_link, link, Link, proto::Link, latency_ms, bytes_per_ms, outstanding_bytes);
same_fields!(wire_weights, weights, Weights, proto::route_request::Weights, lambda_ms_per_gb, mu);
same_names!(wire_overlap, overlap_of, Overlap, proto::Overlap, Layers, None);
same_names!(wire_kind, kind, Kind, proto::times_told::Kind, Interpolated, Roofline, ScaledRoofline);
same_names! {
    wire_class, class, Class, proto::route_reply::Class, NewLongPrefix, SmallTurn, LongToolOutput, Continuation,
    ForkedRollout, ColdResume
}
same_names! {
    wire_way, way, route::Action, proto::route_reply::candidate::Action, Colocated, RemotePrefill,
    FetchFromOwner, FromDisk, Migrate, Recompute
}

/// An engine's times.
pub fn times(wire: Option<&proto::PrefillTimes>) -> Outcome<Times> {
    let wire = wire.ok_or_else(|| Fault::malformed("times: samples, a roofline or both are required"))?;
    if wire.samples.len() > PLAN_SAMPLES_MAX {
        let count = wire.samples.len();
        return Err(Fault::malformed(format!(
            "times: {count} samples were given, but the limit is \
            {PLAN_SAMPLES_MAX}"
        )));
    }
    let roofline = wire.roofline.as_ref().map(roofline);
    if roofline.is_some_and(|roofline| !roofline.is_sound()) {
        return Err(Fault::malformed("times.roofline: the figures must be numbers above 0"));
    }
    Times::new(wire.samples.iter().map(sample).collect(), roofline)
        .map_err(|error| Fault::malformed(format!("times: {error}")))
}

fn roofline(wire: &proto::prefill_times::Roofline) -> Roofline {
    let compute = Compute {
        params: wire.params,
        active_params: wire.active_params,
        weight_bytes: wire.weight_bytes,
        attention_flops: wire.attention_flops,
        kv_bytes: wire.kv_bytes,
        sparse: wire.sparse.as_ref().map(sparse),
    };
    let device = Device {
        tflops: wire.tflops,
        hbm_gb_per_s: wire.hbm_gb_per_s,
        hbm_gb: 0.0,
        prefill_part: wire.prefill_part,
        memory_part: wire.memory_part,
        step_ms: wire.step_ms,
    };
    Roofline::new(compute, device, wire.devices)
}

/// An engine's times on the wire. If there are more samples than a message may have, every n-th sample is sent.
pub fn wire_times(times: &Times) -> proto::PrefillTimes {
    let every = times.samples().len().div_ceil(PLAN_SAMPLES_MAX).max(1);
    let roofline = |roofline: &Roofline| {
        let (compute, device) = (roofline.compute(), roofline.device());
        proto::prefill_times::Roofline {
            params: compute.params,
            active_params: compute.active_params,
            weight_bytes: compute.weight_bytes,
            attention_flops: compute.attention_flops,
            kv_bytes: compute.kv_bytes,
            tflops: device.tflops,
            hbm_gb_per_s: device.hbm_gb_per_s,
            prefill_part: device.prefill_part,
            memory_part: device.memory_part,
            step_ms: device.step_ms,
            devices: roofline.devices(),
            sparse: compute.sparse.as_ref().map(wire_sparse),
        }
    };
    proto::PrefillTimes {
        samples: times.samples().iter().step_by(every).map(wire_sample).collect(),
        roofline: times.roofline().map(roofline),
    }
}

/// What a plan follows from; the times of the message were made before.
pub fn terms<'a>(
    wire: &'a proto::PlanRequest,
    times: &'a Times,
    beyond: Option<&'a Beyond>,
) -> Outcome<PlanTerms<'a>> {
    let dram = wire.dram.as_ref().map(|way| (wire.dram_blocks, link(way)));
    if wire.hbm_boundaries.len() > HELD_BOUNDARIES_MAX {
        let count = wire.hbm_boundaries.len();
        return Err(Fault::malformed(format!(
            "hbm_boundaries: {count} were given, but the limit is \
            {HELD_BOUNDARIES_MAX}"
        )));
    }
    let overlap = proto::Overlap::try_from(wire.overlap).map_err(|_| {
        Fault::malformed(format!("overlap: this server does not support the value {}", wire.overlap))
    })?;
    Ok(PlanTerms {
        hbm_blocks: wire.hbm_blocks,
        hbm_boundaries: &wire.hbm_boundaries,
        dram,
        beyond,
        overlap: overlap_of(overlap),
        ..PlanTerms::new(wire.prompt_tokens, times)
    })
}

/// The same on the wire.
pub fn wire_terms(terms: &PlanTerms<'_>) -> proto::PlanRequest {
    proto::PlanRequest {
        prompt_tokens: terms.prompt_tokens,
        times: Some(wire_times(terms.times)),
        hbm_blocks: terms.hbm_blocks,
        dram_blocks: terms.dram.map_or(0, |(blocks, _)| blocks),
        dram: terms.dram.map(|(_, link)| wire_link(&link)),
        overlap: wire_overlap(terms.overlap).into(),
        hbm_boundaries: terms.hbm_boundaries.to_vec(),
    }
}

/// A plan on the wire.
pub fn wire_planned(planned: &Planned) -> proto::PlanReply {
    proto::PlanReply {
        plan: Some(wire_plan(&planned.plan)),
        disk: Some(wire_link(&planned.disk.link)),
        disk_measured: planned.disk.measured,
        times: Some(wire_told(&planned.times)),
    }
}

/// A plan that a server answered with.
pub fn planned(wire: &proto::PlanReply) -> Result<Planned, Reason> {
    let plan = wire.plan.as_ref().ok_or(NO_PLAN)?;
    let disk = wire.disk.as_ref().ok_or(NO_PLAN)?;
    let told = wire.times.as_ref().ok_or(NO_PLAN)?;
    Ok(Planned {
        plan: plan_of(plan)?,
        disk: DiskLink { link: link(disk), measured: wire.disk_measured },
        times: told_of(told),
    })
}

fn wire_told(told: &Told) -> proto::TimesTold {
    let (samples, error, error_max) = (told.samples as u64, told.error, told.error_max);
    proto::TimesTold { kind: wire_kind(told.kind).into(), samples, error, error_max }
}

fn told_of(wire: &proto::TimesTold) -> Told {
    let samples = usize::try_from(wire.samples).unwrap_or(usize::MAX);
    Told { kind: kind(wire.kind()), samples, error: wire.error, error_max: wire.error_max }
}

fn wire_source(source: Source) -> proto::Source {
    match source {
        Source::Hbm => proto::Source::Hbm,
        Source::Dram => proto::Source::Dram,
        Source::Disk => proto::Source::Disk,
        Source::Peer => proto::Source::Peer,
        Source::Cold => proto::Source::Cold,
    }
}

fn source(wire: proto::Source) -> Result<Source, Reason> {
    Ok(match wire {
        proto::Source::Hbm => Source::Hbm,
        proto::Source::Dram => Source::Dram,
        proto::Source::Disk => Source::Disk,
        proto::Source::Peer => Source::Peer,
        proto::Source::Cold => Source::Cold,
        proto::Source::Unspecified => return Err(NO_PLAN),
    })
}

fn wire_action(action: &Action) -> proto::plan::Action {
    use proto::plan::action::Does as Wire;
    let (does, source) = match action.does {
        Does::Use => (Wire::Use, proto::Source::Hbm),
        Does::Load(from) => (Wire::Load, wire_source(from)),
        Does::Recompute => (Wire::Recompute, proto::Source::Unspecified),
        Does::LeaveOut => (Wire::LeaveOut, proto::Source::Unspecified),
    };
    let &Action { group, from, to, bytes, .. } = action;
    proto::plan::Action { group: group.0, from, to, does: does.into(), source: source.into(), bytes }
}

fn action(wire: &proto::plan::Action) -> Result<Action, Reason> {
    use proto::plan::action::Does as Wire;
    let does = match wire.does() {
        Wire::Use => Does::Use,
        Wire::Load => Does::Load(source(wire.source())?),
        Wire::Recompute => Does::Recompute,
        Wire::LeaveOut => Does::LeaveOut,
    };
    let &proto::plan::Action { group, from, to, bytes, .. } = wire;
    Ok(Action { group: Group(group), from, to, does, bytes })
}

fn wire_reason(why: &Why) -> proto::plan::Reason {
    use proto::plan::reason::What;
    let told = proto::plan::Reason { words: why.to_string(), ..proto::plan::Reason::default() };
    let of = |what: What| proto::plan::Reason { what: what.into(), ..told.clone() };
    match *why {
        Why::Nothing => of(What::Nothing),
        Why::All => of(What::All),
        Why::Unusable(group, block) => proto::plan::Reason { group: group.0, block, ..of(What::Unusable) },
        Why::Missing(group, block) => proto::plan::Reason { group: group.0, block, ..of(What::Missing) },
        Why::Shorter { longest_tokens, longest_ms, ms } => {
            proto::plan::Reason { longest_tokens, longest_ms, ms, ..of(What::Shorter) }
        }
        Why::Slower { longest_tokens, longest_ms, ms } => {
            proto::plan::Reason { longest_tokens, longest_ms, ms, ..of(What::Slower) }
        }
    }
}

fn reason(wire: &proto::plan::Reason) -> Why {
    use proto::plan::reason::What;
    let &proto::plan::Reason { group, block, longest_tokens, longest_ms, ms, .. } = wire;
    match wire.what() {
        What::Nothing => Why::Nothing,
        What::All => Why::All,
        What::Unusable => Why::Unusable(Group(group), block),
        What::Missing => Why::Missing(Group(group), block),
        What::Shorter => Why::Shorter { longest_tokens, longest_ms, ms },
        What::Slower => Why::Slower { longest_tokens, longest_ms, ms },
    }
}

fn wire_plan(plan: &Plan) -> proto::Plan {
    proto::Plan {
        boundary_blocks: plan.boundary_blocks,
        boundary_tokens: plan.boundary_tokens,
        actions: plan.actions.iter().map(wire_action).collect(),
        recompute_tokens: plan.recompute_tokens,
        new_tokens: plan.new_tokens,
        load_ms: plan.load_ms,
        recompute_ms: plan.recompute_ms,
        stall_ms: plan.stall_ms,
        compute_ms: plan.compute_ms,
        transfer_ms: plan.transfer_ms,
        ttft_ms: plan.ttft_ms,
        from_nothing_ms: plan.from_nothing_ms,
        held_ms: Some(plan.held_ms),
        benefit_ms: plan.benefit_ms,
        reason: Some(wire_reason(&plan.reason)),
        exact: plan.exact,
        looked_at: plan.looked_at,
    }
}

fn plan_of(wire: &proto::Plan) -> Result<Plan, Reason> {
    Ok(Plan {
        boundary_blocks: wire.boundary_blocks,
        boundary_tokens: wire.boundary_tokens,
        actions: wire.actions.iter().map(action).collect::<Result<_, Reason>>()?,
        recompute_tokens: wire.recompute_tokens,
        new_tokens: wire.new_tokens,
        load_ms: wire.load_ms,
        recompute_ms: wire.recompute_ms,
        stall_ms: wire.stall_ms,
        compute_ms: wire.compute_ms,
        transfer_ms: wire.transfer_ms,
        ttft_ms: wire.ttft_ms,
        from_nothing_ms: wire.from_nothing_ms,
        // A server that says nothing of it counted nothing in device memory as the caller's.
        held_ms: wire.held_ms.unwrap_or(wire.from_nothing_ms),
        benefit_ms: wire.benefit_ms,
        reason: reason(wire.reason.as_ref().ok_or(NO_PLAN)?),
        exact: wire.exact,
        looked_at: wire.looked_at,
    })
}

/// All of a node is given: nothing is left to the server.
fn wire_node(of: &NodeView) -> proto::route_request::Node {
    proto::route_request::Node {
        node: of.node,
        decodes: of.decodes,
        queue_ms: of.queue_ms,
        decoding: of.decoding,
        memory_tokens: of.memory_tokens,
        device_tokens: of.device_tokens,
        memory_bytes_per_ms: of.memory_bytes_per_ms,
        disk_tokens: Some(of.disk_tokens),
        disk_bytes_per_ms: Some(of.disk_bytes_per_ms),
        disk_queue_ms: Some(of.disk_queue_ms),
        network_bytes_per_ms: Some(of.network_bytes_per_ms),
        network_queue_ms: Some(of.network_queue_ms),
        store: bytes::Bytes::new(),
    }
}

fn node(wire: &proto::route_request::Node) -> NodeView {
    NodeView {
        node: wire.node,
        decodes: wire.decodes,
        queue_ms: wire.queue_ms,
        decoding: wire.decoding,
        memory_tokens: wire.memory_tokens,
        device_tokens: wire.device_tokens,
        memory_bytes_per_ms: wire.memory_bytes_per_ms,
        disk_tokens: wire.disk_tokens(),
        disk_bytes_per_ms: wire.disk_bytes_per_ms(),
        disk_queue_ms: wire.disk_queue_ms(),
        network_bytes_per_ms: wire.network_bytes_per_ms(),
        network_queue_ms: wire.network_queue_ms(),
    }
}

/// The nodes of a route.
pub fn nodes(wire: &[proto::route_request::Node]) -> Vec<NodeView> {
    wire.iter().map(node).collect()
}

/// What is to be routed; its nodes were made before.
pub fn question<'a>(wire: &proto::RouteRequest, nodes: &'a [NodeView]) -> Outcome<route::Question<'a>> {
    let question = route::Question {
        prompt_tokens: wire.prompt_tokens,
        token_bytes: wire.token_bytes,
        layers: wire.layers,
        owner: wire.owner.as_ref().map(|owner| (owner.node, owner.tokens)),
        shared_tokens: wire.shared_tokens,
        forked: wire.forked,
        nodes,
        weights: wire.weights.as_ref().map_or(Weights::default(), weights),
    };
    question.check().map_err(|error| Fault::malformed(error.to_string()))?;
    Ok(question)
}

/// What is to be routed, on the wire: all candidates are asked for.
pub fn wire_question(
    question: &route::Question<'_>,
    times: &Times,
    this_node: Option<u32>,
) -> proto::RouteRequest {
    proto::RouteRequest {
        prompt_tokens: question.prompt_tokens,
        token_bytes: question.token_bytes,
        layers: question.layers,
        times: Some(wire_times(times)),
        owner: question.owner.map(|(node, tokens)| proto::route_request::Owner { node, tokens }),
        shared_tokens: question.shared_tokens,
        forked: question.forked,
        nodes: question.nodes.iter().map(wire_node).collect(),
        weights: Some(wire_weights(&question.weights)),
        this_node,
        explain: true,
        prompt: None,
    }
}

/// A route on the wire: its first `most` candidates.
pub fn wire_route(route: &Route, most: usize) -> proto::RouteReply {
    let candidate = |one: &Candidate| proto::route_reply::Candidate {
        node: one.node,
        action: wire_way(one.action).into(),
        cached_tokens: one.cached_tokens,
        queue_ms: one.queue_ms,
        compute_ms: one.compute_ms,
        network_ms: one.network_ms,
        restore_ms: one.restore_ms,
        hbm_ms: one.hbm_ms,
        decode_ms: one.decode_ms,
        cost_ms: one.cost_ms,
    };
    proto::RouteReply {
        class: wire_class(route.class).into(),
        candidates: route.candidates.iter().take(most).map(candidate).collect(),
        filled: None,
    }
}

/// A route that a server answered with.
pub fn route(wire: &proto::RouteReply) -> Route {
    let candidate = |one: &proto::route_reply::Candidate| Candidate {
        node: one.node,
        action: way(one.action()),
        cached_tokens: one.cached_tokens,
        queue_ms: one.queue_ms,
        compute_ms: one.compute_ms,
        network_ms: one.network_ms,
        restore_ms: one.restore_ms,
        hbm_ms: one.hbm_ms,
        decode_ms: one.decode_ms,
        cost_ms: one.cost_ms,
    };
    Route { class: class(wire.class()), candidates: wire.candidates.iter().map(candidate).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_planner::cost::{Prefill, device, model};

    #[test]
    fn times_come_back_as_they_were_and_unsound_ones_are_refused() {
        let sheet = Roofline::new(model("deepseek-v3.2").unwrap(), device("h100").unwrap(), 4);
        let sample = |new: u64| Sample { cached: 0, new, ms: new as f64 };
        let both = Times::new((1..9).map(|n| sample(n * 64)).collect(), Some(sheet)).unwrap();
        for there in [both, sheet.into()] {
            let back = times(Some(&wire_times(&there))).unwrap();
            assert_eq!(back.told(), there.told());
            assert_eq!(back.prefill_ms(100, 2000), there.prefill_ms(100, 2000));
        }
        let many = Times::new((1..1001).map(sample).collect(), None).unwrap();
        assert!(wire_times(&many).samples.len() <= PLAN_SAMPLES_MAX);
        let mut wire = wire_times(&sheet.into());
        wire.roofline.as_mut().unwrap().tflops = 0.0;
        let refused = |wire: Option<&proto::PrefillTimes>| times(wire).unwrap_err().detail.message;
        assert!(refused(Some(&wire)).starts_with("times.roofline: "));
        assert!(refused(None).starts_with("times: "));
        assert_eq!(refused(Some(&proto::PrefillTimes::default())), "times: the list of samples is empty");
    }

    #[test]
    fn what_a_plan_follows_from_comes_as_it_was_sent_and_of_older_clients_as_it_always_was() {
        let engine = Times::new(vec![Sample { cached: 0, new: 64, ms: 1.0 }], None).unwrap();
        for overlap in [Overlap::Layers, Overlap::None] {
            let sent =
                PlanTerms { hbm_blocks: 3, hbm_boundaries: &[3, 9], overlap, ..PlanTerms::new(70, &engine) };
            let wire = wire_terms(&sent);
            let got = terms(&wire, &engine, None).unwrap();
            assert_eq!((got.prompt_tokens, got.hbm_blocks, got.overlap), (70, 3, overlap));
            assert_eq!(got.hbm_boundaries, [3, 9]);
        }
        // One that knows of no overlap says nothing of it.
        let older = proto::PlanRequest { prompt_tokens: 70, ..proto::PlanRequest::default() };
        assert_eq!(terms(&older, &engine, None).unwrap().overlap, Overlap::Layers);
        let refused = |wire| terms(&wire, &engine, None).unwrap_err().detail.message;
        let newer = proto::PlanRequest { overlap: 9, ..older.clone() };
        assert_eq!(refused(newer), "overlap: this server does not support the value 9");
        let many = proto::PlanRequest { hbm_boundaries: vec![1; 1025], ..older };
        assert_eq!(refused(many), "hbm_boundaries: 1025 were given, but the limit is 1024");
    }

    #[test]
    fn every_action_and_reason_of_a_plan_comes_back_as_it_was() {
        let action = |does| Action { group: Group(3), from: 1, to: 9, does, bytes: 77 };
        let loads = Source::ALL.into_iter().map(Does::Load);
        let does = loads.chain([Does::Use, Does::Recompute, Does::LeaveOut]);
        let actions: Vec<Action> = does.map(action).collect();
        let times = (5000u64, 3.5, 2.5);
        let (longest_tokens, longest_ms, ms) = times;
        for reason in [
            Why::Nothing,
            Why::Unusable(Group(1), 2),
            Why::All,
            Why::Missing(Group(3), 4),
            Why::Shorter { longest_tokens, longest_ms, ms },
            Why::Slower { longest_tokens, longest_ms, ms },
        ] {
            let plan = Plan {
                boundary_blocks: 1,
                boundary_tokens: 2,
                actions: actions.clone(),
                recompute_tokens: 3,
                new_tokens: 4,
                load_ms: 5.0,
                recompute_ms: 6.0,
                stall_ms: 7.0,
                compute_ms: 8.0,
                transfer_ms: 9.0,
                ttft_ms: 10.0,
                from_nothing_ms: 11.0,
                held_ms: 10.5,
                benefit_ms: 12.0,
                reason,
                exact: true,
                looked_at: 13,
            };
            let link = Link { latency_ms: 1.0, bytes_per_ms: 2.0, outstanding_bytes: 3 };
            let (error, error_max) = (Some(0.25), None);
            let times = Told { kind: Kind::ScaledRoofline, samples: 9, error, error_max };
            let there = Planned { plan, disk: DiskLink { link, measured: 4 }, times };
            assert_eq!(planned(&wire_planned(&there)).unwrap(), there);
        }
        assert!(planned(&proto::PlanReply::default()).is_err());
    }
}
