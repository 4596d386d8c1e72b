//! Blocks that are near their eviction and were used are copied into the bucket: by a sweep of the segments whose turn comes
//! next, in the lowest class, while the store is nearly full.
//!
//! The sweep is ahead of eviction rather than in it: eviction and puts never wait for it and know nothing of it. What is evicted before its
//! turn comes, and what the bucket does not take, is let go and counted. One run is in memory at a time, beside a pack that is not full.
//! What is deleted meanwhile is not named (`spilling`); a namespace that the bucket does not take rests (`resting`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_cold::{ColdError, Fault, PushOptions, Pushed, Pusher};
use kvarts_contract::api::{Digests, Leaving, Order, Origins, Placed, ReadRequest, Verify};
use kvarts_contract::buffers::BufMut;
use kvarts_contract::class::Class;
use kvarts_layout::export::{ExportedBlock, ExportedNamespace, Run};
use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, BlockShape, ContentId, NamespaceId};
use tokio::time::sleep;

use super::ColdTier;
use super::counts::add;
use super::resting::Name;
use super::spilling::Sweep;

/// How long after each other sweeps begin.
const EVERY: Duration = Duration::from_secs(5);
/// The same after one that the bucket ended.
const AFTER_FAILURE: Duration = Duration::from_secs(30);
/// Hundredths of the budget from which on blocks are about to be evicted.
const FULL: u64 = 80;
/// Bytes of blocks that one sweep copies at most.
pub(super) const SWEEP_BYTES: u64 = 256 << 20;
/// Less than this of a namespace is copied once in a while only.
const PACK_LEAST: u64 = 8 << 20;
/// Bytes of blocks that are gathered at once.
const RUN_BYTES: u64 = 16 << 20;
/// Bytes of them that are asked of the disks at once: a read of a client's waits behind no more.
const SLICE_BYTES: u64 = 1 << 20;
/// A longer block stays out.
pub(super) const BLOCK_MOST: u64 = 64 << 20;
/// How long a read of them may take.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Parts of runs, and the shapes of their blocks.
pub(super) type Parts = Vec<(Leaving, Arc<BlockShape>)>;

/// What is copied of a namespace.
pub(super) type OfOne = (Arc<ExportedNamespace>, Parts);

/// A namespace of a sweep.
pub(super) struct Of {
    pub(super) exported: Arc<ExportedNamespace>,
    block_tokens: u32,
}

impl ColdTier {
    /// Sweeps again and again.
    pub(super) async fn keep_spilling(self: Arc<Self>) {
        loop {
            sleep(EVERY).await;
            if self.is_nearly_full()
                && self.read_only().is_none()
                && let Err(error) = self.sweep().await
            {
                tracing::debug!(%error, "blocks could not be uploaded to the cold tier");
                sleep(AFTER_FAILURE).await;
            }
        }
    }

    fn is_nearly_full(&self) -> bool {
        let stats = self.store.stats();
        stats.allocated_bytes.saturating_mul(100) >= stats.budget_bytes.saturating_mul(FULL)
    }

    /// Copies what is worth it of what goes next. An error of the bucket ends it; what is wrong with one namespace does not concern the
    /// others.
    pub async fn sweep(&self) -> Result<(), ColdError> {
        // Before anything is looked at: what is deleted from now on is not copied.
        let sweep = self.spilling.begin().await;
        let listed = self.tier.points();
        let mut pusher = self.pusher();
        let mut taken = 0;
        for (namespace, leaving) in self.worth_it().await {
            let Some(of) = leaving else { continue };
            let now = self.tier.access().time().now();
            if let Some(let_go) = self.resting.let_go(namespace, now, names(&of.1)) {
                add(&self.counts.let_go_blocks, let_go);
                continue;
            }
            pusher.listed(namespace, listed.get(&namespace).copied().unwrap_or_default());
            let taken = (&mut taken, SWEEP_BYTES);
            let (left, swept) = self.sweep_one(&sweep, &mut pusher, (namespace, &of), taken).await;
            let now = self.tier.access().time().now();
            match swept {
                Ok(()) => self.resting.succeeded(namespace),
                Err(error) if is_of_one(&error) => {
                    add(&self.counts.let_go_blocks, left);
                    let seconds = self.resting.failed(namespace, now, names(&of.1)).as_secs();
                    tracing::warn!(%namespace, %error, seconds, "uploads of a namespace to the cold tier are paused");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What names blocks of a sweep: none that is deleted meanwhile.
    pub(super) fn pusher(&self) -> Pusher<'_> {
        let options = PushOptions { memory_bytes: 64 << 20, ..PushOptions::default() };
        Pusher::new(&self.tier, options).guarded(|of, keys| self.spilling.may_name(of, keys))
    }

    /// Copies what is chosen of a namespace, until the sweep has taken this number of bytes, and counts it. Gives how many blocks it did not come
    /// to besides.
    pub(super) async fn sweep_one(
        &self,
        sweep: &Sweep<'_>,
        pusher: &mut Pusher<'_>,
        (namespace, of): (NamespaceId, &OfOne),
        (taken, most): (&mut u64, u64),
    ) -> (u64, Result<(), ColdError>) {
        let before = pusher.pushed();
        let mut given = Given::default();
        sweep.open(namespace);
        let swept = self.push_parts(sweep, pusher, of, (taken, most, &mut given)).await;
        sweep.close(namespace);
        pusher.abandon();
        let now = pusher.pushed();
        add(&self.counts.spilled_blocks, now.blocks - before.blocks);
        add(&self.counts.spilled_bytes, now.payload_bytes - before.payload_bytes);
        let not_done = given.blocks.saturating_sub(done(now) - done(before));
        add(&self.counts.let_go_blocks, given.unread.saturating_add(not_done));
        if now.packs > before.packs {
            sweep.has_pushed(namespace, self.tier.access().time().now());
        }
        let all: u64 = of.1.iter().map(|(part, _)| part.keys.len() as u64).sum();
        (all.saturating_sub(given.looked_at), swept)
    }

    /// Reads what is worth it of a namespace, and pushes it.
    async fn push_parts(
        &self,
        sweep: &Sweep<'_>,
        pusher: &mut Pusher<'_>,
        (of, parts): &OfOne,
        (taken, most, given): (&mut u64, u64, &mut Given),
    ) -> Result<(), ColdError> {
        for (part, shape) in parts {
            given.looked_at += part.keys.len() as u64;
            for part in stretches(part, usize::MAX, |key| sweep.is_gone(part.namespace, key)) {
                let wanted = part.keys.len() as u64;
                let read = self.read_leaving(&part, shape).await;
                let got = read.iter().map(|(run, _)| run.blocks.len() as u64).sum::<u64>();
                given.unread += wanted.saturating_sub(got);
                for (run, payload) in read {
                    let bytes = payload.len() as u64;
                    *taken += bytes;
                    given.blocks += run.blocks.len() as u64;
                    unless_deleted(pusher.add(of, &run, &payload).await)?;
                    // No more than the rate: the packs follow the runs.
                    sleep(Duration::from_secs_f64(bytes as f64 / self.config.rate.max(1) as f64)).await;
                }
            }
            if *taken >= most {
                break;
            }
        }
        // ends: the time of each request (`patience`)
        unless_deleted(pusher.flush().await)
    }

    /// What is worth it of what goes next, by namespace; of a namespace nothing if it is too little for a pack and one was made
    /// lately: a manifest has room for a limited number of packs.
    async fn worth_it(&self) -> BTreeMap<NamespaceId, Option<OfOne>> {
        let mut all: BTreeMap<NamespaceId, Option<(Of, u64, Parts)>> = BTreeMap::new();
        for shard in 0..self.store.shards() {
            // A shard that cannot say is asked again by the next sweep.
            // ends: an executor answers from memory, or the store is closed
            let Ok(Ok(leaving)) = self.store.leaving(shard, self.config.uses).await else { continue };
            for one in leaving {
                let known = all
                    .entry(one.namespace)
                    .or_insert_with(|| self.namespace(one.namespace).map(|of| (of, 0, Vec::new())));
                let Some((of, bytes, parts)) = known else { continue };
                let Ok(shape) = self.store.shape(one.namespace, one.group, one.coordinate) else { continue };
                if !self.is_worth_it(&one, shape.block_bytes(), of.block_tokens) {
                    continue;
                }
                for part in self.parts(&one, shape.block_bytes()).await {
                    *bytes += shape.block_bytes().saturating_mul(part.keys.len() as u64);
                    parts.push((part, Arc::clone(&shape)));
                }
            }
        }
        let now = self.tier.access().time().now();
        let enough = |namespace: NamespaceId, of: Option<(Of, u64, Parts)>| {
            let (of, bytes, parts) = of.filter(|(_, bytes, _)| *bytes > 0)?;
            let is_enough = bytes >= PACK_LEAST || self.spilling.may_push_little(namespace, now);
            is_enough.then_some((of.exported, parts))
        };
        all.into_iter().map(|(namespace, of)| (namespace, enough(namespace, of))).collect()
    }

    pub(super) fn namespace(&self, namespace: NamespaceId) -> Option<Of> {
        let (identity, geometry) = self.store.identity_of(namespace)?;
        let block_tokens = identity.block_tokens;
        Some(Of {
            exported: Arc::new(ExportedNamespace { identity, geometry: Arc::new(geometry) }),
            block_tokens,
        })
    }

    fn is_worth_it(&self, one: &Leaving, block_bytes: u64, block_tokens: u32) -> bool {
        let now_ms = self.tier.access().time().wall_ms();
        let age_ms = u64::try_from(self.config.age.as_millis()).unwrap_or(u64::MAX);
        let is_old = one.created_ms.saturating_add(age_ms) <= now_ms;
        let lives = one.expires_ms == 0 || one.expires_ms > now_ms.saturating_add(age_ms);
        let token_bytes = block_bytes / u64::from(block_tokens.max(1));
        let is_cheap = self.config.token_bytes.is_none_or(|most| token_bytes <= most);
        is_old && lives && is_cheap && block_bytes <= BLOCK_MOST
    }

    /// The stretches of a run that the bucket does not seem to have, in parts that are read at once.
    async fn parts(&self, one: &Leaving, block_bytes: u64) -> Vec<Leaving> {
        let known = self.known_within(one.namespace, Duration::from_secs(2)).await;
        let is_there = |key: &BlockKey| known.as_ref().is_some_and(|known| known.may_have(key));
        parts_without(one, block_bytes, is_there)
    }

    /// Reads blocks as they were put; those that are gone meanwhile are left out.
    async fn read_leaving(&self, one: &Leaving, shape: &BlockShape) -> Vec<(Run, Bytes)> {
        let count = one.keys.len() as u32;
        let Ok(bytes) = usize::try_from(shape.block_bytes().saturating_mul(u64::from(count))) else {
            return Vec::new();
        };
        let Ok(memory) = BufMut::zeroed(bytes).map(BufMut::share) else { return Vec::new() };
        let Ok(into) = Placed::blocks(shape, memory.clone(), count) else { return Vec::new() };
        let digests = Digests::new(shape, count);
        let into = into.with_digests(digests);
        let origins = Origins::any(one.keys.len());
        let mut failed = BTreeSet::new();
        for layers in slices(shape, count) {
            let request = ReadRequest {
                order: Order::Blocks,
                class: Class::Background,
                verify: Verify::Always,
                deadline: Some(self.store.clock().now().plus(READ_TIMEOUT)),
                layers: Some(layers),
                ..ReadRequest::new(one.namespace, one.group, one.coordinate, one.keys.clone(), into.clone())
            };
            let Ok(stream) = self.store.read_part(request, &origins, 0) else { return Vec::new() };
            let end = std::future::poll_fn(|context| stream.poll_end(context)).await; // ends: `READ_TIMEOUT`, by the request
            let Ok(end) = end else { return Vec::new() };
            if end.held_bytes > 0 {
                // A device may still write there.
                return Vec::new();
            }
            failed.extend(end.failures.iter().map(|(failed, _)| *failed as usize));
        }
        let mut payload = vec![0; bytes];
        memory.copy_out(0, &mut payload);
        let payload = Bytes::from(payload);
        let met = origins.met();
        let each = bytes / one.keys.len().max(1);
        // It takes a processor for milliseconds, which the runtime's threads have no time for.
        let hashed = payload.clone();
        let hash =
            move || hashed.chunks(each.max(1)).map(|own| ContentId(*blake3::hash(own).as_bytes())).collect();
        let Ok(contents) = tokio::task::spawn_blocking::<_, Vec<ContentId>>(hash).await else {
            return Vec::new();
        };
        let mut runs: Vec<(Run, usize, usize)> = Vec::new();
        for (place, key) in one.keys.iter().enumerate() {
            let has_failed = failed.contains(&place);
            let Some(origin) = met.get(place).copied().flatten().filter(|_| !has_failed) else { continue };
            let Some(content) = contents.get(place).copied() else { continue };
            let digests: Option<Vec<u32>> = (0..shape.chunk_count())
                .map(|chunk| into.digests().and_then(|digests| digests.get(chunk, place as u32)))
                .collect();
            let Some(digests) = digests else { continue };
            let block = ExportedBlock { key: *key, origin, content, digests };
            match runs.last_mut().filter(|(_, _, end)| *end == place) {
                Some((run, _, end)) => {
                    run.blocks.push(block);
                    *end = place + 1;
                }
                None => {
                    let Leaving { parent, first_block, .. } = from(one, place);
                    let run = Run {
                        namespace: one.namespace,
                        coordinate: one.coordinate,
                        group: one.group,
                        created_ms: one.created_ms,
                        expires_ms: one.expires_ms,
                        first_block,
                        parent,
                        block_bytes: shape.block_bytes(),
                        blocks: vec![block],
                    };
                    runs.push((run, place, place + 1));
                }
            }
        }
        runs.into_iter().map(|(run, from, to)| (run, payload.slice(from * each..to * each))).collect()
    }
}

/// Blocks of which it is known what became of them.
pub(super) fn done(pushed: Pushed) -> u64 {
    pushed.blocks + pushed.already_there + pushed.expired + pushed.too_large + pushed.deleted
}

/// What a sweep has done with the blocks of a namespace.
#[derive(Default)]
struct Given {
    /// Came to them.
    looked_at: u64,
    /// They were gone, or could not be read.
    unread: u64,
    /// Given to the pusher.
    blocks: u64,
}

/// Whether this is wrong with one namespace alone.
pub(super) fn is_of_one(error: &ColdError) -> bool {
    use ColdError::{Anew, Condemned, Contended, Full, Object, Waiting};
    let is_forbidden = matches!(error, ColdError::Bucket(_, Fault::Forbidden(_)));
    is_forbidden || matches!(error, Full(_) | Waiting(_) | Object(..) | Contended(_) | Anew(_) | Condemned)
}

/// A pack with blocks that were deleted meanwhile is dropped, and others are not.
fn unless_deleted(outcome: Result<(), ColdError>) -> Result<(), ColdError> {
    if outcome == Err(ColdError::Withdrawn) { Ok(()) } else { outcome }
}

/// The blocks of parts.
fn names(parts: &Parts) -> impl Iterator<Item = Name> + '_ {
    let of = |part: &Leaving| (part.group.0, part.coordinate.to_u64());
    parts.iter().flat_map(move |(part, _)| {
        let (group, coordinate) = of(part);
        part.keys.iter().map(move |key| (group, coordinate, *key))
    })
}

/// The stretches of a run without some of its blocks, in parts that are read at once.
pub(super) fn parts_without(
    one: &Leaving,
    block_bytes: u64,
    is_left_out: impl Fn(&BlockKey) -> bool,
) -> Vec<Leaving> {
    let most = usize::try_from(RUN_BYTES / block_bytes.max(1)).unwrap_or(1).clamp(1, 1024);
    stretches(one, most, is_left_out)
}

/// The stretches of a run without some of its blocks, each of `most` blocks at most.
fn stretches(one: &Leaving, most: usize, is_left_out: impl Fn(&BlockKey) -> bool) -> Vec<Leaving> {
    let mut stretches: Vec<Leaving> = Vec::new();
    let mut end = None;
    for (place, key) in one.keys.iter().enumerate() {
        if is_left_out(key) {
            continue;
        }
        match stretches.last_mut().filter(|last| end == Some(place) && last.keys.len() < most) {
            Some(last) => last.keys.push(*key),
            None => stretches.push(from(one, place)),
        }
        end = Some(place + 1);
    }
    stretches
}

/// The layers of some blocks in ranges that are read one after the other.
fn slices(shape: &BlockShape, blocks: u32) -> Vec<Range<u32>> {
    let all = shape.layers().len() as u32;
    let bytes = |from, to| shape.layers_bytes(&(from..to)).saturating_mul(u64::from(blocks));
    let (mut slices, mut from) = (Vec::new(), 0);
    while from < all {
        let mut to = from + 1;
        while to < all && bytes(from, to + 1) <= SLICE_BYTES {
            to += 1;
        }
        slices.push(from..to);
        from = to;
    }
    slices
}

/// One block of a run, as the beginning of a part.
fn from(one: &Leaving, place: usize) -> Leaving {
    let before = place.checked_sub(1).and_then(|before| one.keys.get(before));
    let parent = match (one.parent, before) {
        (Parent::Unknown, _) => Parent::Unknown,
        (_, Some(before)) => Parent::Key(before.0),
        (parent, None) => parent,
    };
    Leaving {
        keys: one.keys.get(place).copied().into_iter().collect(),
        parent,
        first_block: one.first_block.and_then(|first| first.checked_add(place as u32)),
        ..one.clone()
    }
}
