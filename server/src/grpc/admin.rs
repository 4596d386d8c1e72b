//! Watching and running a server.

use kvarts_cold::Spent;
use kvarts_contract::blocking::block_on;
use kvarts_contract::error::Reason;
use kvarts_layout::StoreId;
use kvarts_store::engine::{SEGMENTS_MIN, Stats};

use super::fault::{Fault, Outcome};
use crate::calls::call::Call;
use crate::cold::{ColdTier, Copied};
use crate::human;
use crate::returned;
use crate::sizes;
use crate::state::ServerState;
use kvarts_wire::limits::SHORT_OF_DISK;
use kvarts_wire::{convert, proto};

/// What the server is and has done.
pub(super) async fn stats(call: &Call) -> proto::StatsReply {
    let state = &call.state;
    let notes = notes(state).await;
    let stats = state.engine.stats();
    let recovery = |report: &kvarts_store::engine::RecoveryReport| proto::stats_reply::Recovery {
        records: report.records,
        blocks: report.blocks,
        problems: report.problems,
        scanned_bytes: report.scanned_bytes,
    };
    let StoreId(store) = stats.store;
    let (cut_off_blocks, cut_off_bytes) = state.engine.cut_off();
    let client = |facts: crate::state::locals::ClientFacts| proto::stats_reply::LocalClient {
        tenant: facts.tenant,
        pid: facts.peer.pid,
        uid: facts.peer.uid,
        modes: facts.modes.iter().map(|mode| mode.name().to_owned()).collect(),
        shared_bytes: facts.shared_bytes,
        requests_under_way: facts.under_way,
        leases: facts.leases,
    };
    let looked_up = state.metrics.lock().usages.lookups();
    let absent = looked_up.asked() - looked_up.here - looked_up.pending;
    let lookups = [("lookup_blocks_here", looked_up.here), ("lookup_blocks_absent", absent)];
    let counts = stats.counts.named().into_iter().chain(lookups);
    proto::StatsReply {
        store: store.to_vec().into(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        budget_bytes: stats.budget_bytes,
        allocated_bytes: stats.allocated_bytes,
        index_bytes: stats.index.bytes as u64,
        counts: counts.map(|(name, count)| (name.to_owned(), count)).collect(),
        notes,
        recovery: state.engine.recovery().iter().map(recovery).collect(),
        space: Some(proto::stats_reply::Space {
            live_bytes: stats.space.total.live,
            dead_bytes: stats.space.total.dead,
            free_bytes: stats.space.total.free,
            overhead_bytes: stats.space.total.overhead,
            cut_off_blocks,
            cut_off_bytes,
        }),
        local_clients: state.locals.clients().into_iter().map(client).collect(),
        limits: limits(state, &stats),
        latched: state.engine.health().latched,
        cold: state.decided.cold.as_deref().map(cold),
        ownerless: ownerless(state),
    }
}

/// What is stored of whom no token is: of none at all, and of tenants that are gone.
fn ownerless(state: &ServerState) -> Vec<proto::stats_reply::Ownerless> {
    let all = state.ownerless();
    let sum = |unsalted: bool| {
        let nothing = proto::stats_reply::Ownerless { unsalted, ..proto::stats_reply::Ownerless::default() };
        all.iter().filter(|one| one.salt.is_empty() == unsalted).fold(nothing, |mut sum, one| {
            sum.tenants += 1;
            sum.blocks += one.live_blocks;
            sum.bytes += one.live_bytes;
            sum
        })
    };
    [true, false].map(sum).into_iter().filter(|one| one.tenants > 0).collect()
}

/// What was decided at the start, which directories are out or do not answer, and what the disks lack, if they do.
async fn notes(state: &ServerState) -> Vec<String> {
    let lost = state.lost_directories().into_iter().chain(state.silent_directories().await);
    let short = state.engine.health().short_of_disk.map(|what| format!("{SHORT_OF_DISK}{what}"));
    state.decided.notes.iter().cloned().chain(lost).chain(short).collect()
}

/// What the cold tier is and has done.
fn cold(tier: &ColdTier) -> proto::stats_reply::Cold {
    let counted = tier.counted();
    let mut counts: std::collections::BTreeMap<String, u64> =
        counted.counts.iter().map(|(name, _, value)| ((*name).to_owned(), *value)).collect();
    let Spent { requests, retries, hedges, failures, written_bytes, read_bytes } = counted.total;
    for (name, value) in [
        ("requests", requests),
        ("retries", retries),
        ("hedges", hedges),
        ("failures", failures),
        ("written_bytes", written_bytes),
        ("read_bytes", read_bytes),
    ] {
        counts.insert(name.to_owned(), value);
    }
    proto::stats_reply::Cold {
        bucket: tier.bucket().to_owned(),
        paused: counted.is_paused,
        counts,
        read_only: tier.read_only(),
    }
}

/// What the operator has set, and how much of it is used.
fn limits(state: &ServerState, stats: &Stats) -> Vec<proto::stats_reply::Limit> {
    let limit = |name: &str, used: Option<u64>, most: Option<u64>, bytes: bool| proto::stats_reply::Limit {
        name: name.to_owned(),
        used,
        most,
        bytes,
    };
    let memory = state.memory.usage();
    let used: u64 = memory.iter().map(|part| part.used as u64).sum();
    let connections = state.connections.all() as u64;
    let taken = connections.saturating_sub(state.connections.free() as u64);
    let mut limits = vec![
        limit("store.budget", Some(stats.allocated_bytes), Some(stats.budget_bytes), true),
        limit("limits.index", Some(stats.index.bytes as u64), stats.index_bytes_max, true),
        limit("limits.memory", Some(used), Some(memory.iter().map(|part| part.total as u64).sum()), true),
        limit("limits.shared", Some(state.locals.mapped()), Some(state.locals.mapped_max()), true),
        limit("limits.connections", Some(taken), Some(connections), false),
    ];
    if let Some(cold) = &state.decided.cold {
        let counted = cold.counted();
        let (today, most) = (counted.today, counted.limits);
        limits.push(limit("cold.requests", Some(today.requests), Some(most.requests_a_day), false));
        limits.push(limit("cold.written", Some(today.written_bytes), Some(most.written_bytes_a_day), true));
        limits.push(limit("cold.read", Some(today.read_bytes), Some(most.read_bytes_a_day), true));
    }
    limits.extend(state.decided.limits.iter().map(|one| limit(one.name, None, one.most, one.bytes)));
    limits
}

/// Writes a checkpoint.
pub(super) async fn checkpoint(call: &Call) -> Outcome<proto::CheckpointReply> {
    call.state.engine.checkpoint().await?;
    Ok(proto::CheckpointReply {})
}

/// Has a store that latched read-only take writes again, if it can.
pub(super) async fn resume(call: &Call) -> Outcome<proto::ResumeReply> {
    let before = call.state.engine.health().latched;
    let engine = call.state.engine.clone();
    // On a thread of its own: it looks at file systems that may hang.
    // ends: each look at a directory has a limit of 30 s, and each of the engine's steps one of its own
    let resumed = tokio::task::spawn_blocking(move || block_on(engine.resume())).await;
    let tried = resumed.map_err(|_| Reason::Busy("the attempt to resume was stopped"))??;
    tracing::info!(target: "audit", tenant = call.caller.tenant.name, after = before, "the store accepts writes again");
    let directories = tried.into_iter().map(|(at, outcome)| {
        let directory = call.state.directory(at);
        returned::tell(&directory, &outcome);
        let (blocks, refused) = match outcome {
            Ok(blocks) => (blocks, String::new()),
            Err(why) => (0, why.to_string()),
        };
        proto::ReturnedDirectory { directory, blocks, refused }
    });
    Ok(proto::ResumeReply { reason: before.unwrap_or_default(), directories: directories.collect() })
}

/// Moves live blocks together and merges small records, with the engine's usual bounds.
pub(super) async fn compact(call: &Call) -> Outcome<proto::CompactReply> {
    let report = call.state.engine.compact(kvarts_store::engine::CompactOptions::default()).await?;
    let facts = [
        ("segments emptied", report.segments_emptied),
        ("records merged", report.records_merged),
        ("blocks moved", report.blocks_moved),
        ("blocks found damaged", report.blocks_damaged),
        ("bytes read", report.bytes_read),
        ("bytes written", report.bytes_written),
    ];
    Ok(proto::CompactReply {
        facts: facts.iter().map(|(name, value)| format!("{name}: {value}")).collect(),
        segments_emptied: report.segments_emptied,
        records_merged: report.records_merged,
        blocks_moved: report.blocks_moved,
        blocks_damaged: report.blocks_damaged,
        bytes_read: report.bytes_read,
        bytes_written: report.bytes_written,
    })
}

/// Copies what the store has into the bucket behind it.
pub(super) async fn cold_push(call: &Call, wire: &proto::ColdPushRequest) -> Outcome<proto::ColdPushReply> {
    let none = || Reason::Config("this server has no cold tier: set cold.bucket".to_owned());
    let cold = call.state.decided.cold.as_ref().ok_or_else(none)?;
    let only = if wire.namespace.is_empty() { None } else { Some(convert::namespace(&wire.namespace)?) };
    tracing::info!(target: "audit", tenant = call.caller.tenant.name, "a push into the cold tier was requested");
    let copied = cold.push(only).await.map_err(|error| Reason::Away(format!("the cold tier: {error}")))?;
    let Copied { pushed, already_there, unread, problems, .. } = copied;
    Ok(proto::ColdPushReply {
        packs: pushed.packs,
        blocks: pushed.blocks,
        payload_bytes: pushed.payload_bytes,
        already_there: already_there + pushed.already_there,
        expired: pushed.expired,
        too_large: pushed.too_large,
        deleted: pushed.deleted,
        unread,
        problems,
    })
}

/// Changes the budget. A lower one is kept from now on by whatever would grow, and reached when segments have been
/// given back: the answer says how much is allocated now. One that the disks cannot keep is refused, as at a start.
pub(super) async fn set_budget(
    call: &Call,
    wire: &proto::SetBudgetRequest,
) -> Outcome<proto::SetBudgetReply> {
    let bytes = match (wire.budget_bytes, wire.budget_percent) {
        (bytes, 0) => bytes,
        (0, part @ 1..=100) => {
            let directories = call.state.decided.directories.clone();
            // Looks at every file of the store.
            // ends: the call's deadline; the thread, when the disks answer
            let budget = tokio::task::spawn_blocking(move || sizes::budget(&directories, Some(part))).await;
            let budget = budget.map_err(|_| Fault::busy("the server is closing"))?;
            budget.map_err(|why| Reason::Config(format!("store.budget: {why}")))?
        }
        (0, _) => return Err(Fault::malformed("budget_percent: the value must be 1 to 100")),
        _ => return Err(Fault::malformed("budget: give either bytes or a part of the disks, not both")),
    };
    let least = call.state.engine.segment_bytes().saturating_mul(SEGMENTS_MIN);
    if bytes < least {
        let (bytes, least) = (human::bytes(bytes), human::bytes(least));
        let what = format!(
            "the budget of {bytes} is too small: the next start needs at least {least}, the space of four \
            segments"
        );
        return Err(Reason::Config(what).into());
    }
    call.state.engine.set_budget_within_disks(bytes).await?;
    call.state.share_pins();
    let stats = call.state.engine.stats();
    tracing::info!(target: "audit", tenant = call.caller.tenant.name, budget = stats.budget_bytes, "budget changed");
    Ok(proto::SetBudgetReply { budget_bytes: stats.budget_bytes, allocated_bytes: stats.allocated_bytes })
}

/// Has the program that started the server read its configuration again.
pub(super) async fn reload(call: &Call) -> Outcome<proto::ReloadReply> {
    tracing::info!(target: "audit", tenant = call.caller.tenant.name, "a reload was requested");
    match call.state.reloads.ask().await {
        Some(Ok(notes)) => Ok(proto::ReloadReply { notes }),
        Some(Err(why)) => Err(Reason::Config(format!("nothing was changed: {why}")).into()),
        None => Err(Reason::Config("this server was started without a configuration file".to_owned()).into()),
    }
}

/// Begins the end of the server.
pub(super) fn drain(call: &Call) -> proto::DrainReply {
    tracing::info!(target: "audit", tenant = call.caller.tenant.name, "a drain was requested");
    match call.state.decided.lame_duck.is_zero() {
        true => call.state.start_drain(),
        // What runs the server ends it when that is over.
        false => call.state.start_leaving(),
    }
    proto::DrainReply {}
}

/// Reads everything in the lowest class and compares it with its digests.
pub(super) async fn scrub(call: &Call) -> Outcome<proto::ScrubReply> {
    let found = call.state.scrub.run(&call.state.engine, None).await?;
    Ok(proto::ScrubReply {
        blocks_checked: found.blocks_checked,
        blocks_damaged: found.blocks_damaged,
        bytes_checked: found.bytes_checked,
        blocks_gone: found.blocks_gone,
        blocks_passed_over: found.blocks_passed_over,
    })
}
