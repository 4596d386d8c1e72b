//! Blocks from the tier into a store, by its ordinary put: budget, durability and the first put of a key are the engine's.
//!
//! What comes is told before it is stored: a read that waits for it does not wait for the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use kvarts_layout::export::Run;
use kvarts_layout::format::body;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_store::api::{
    BlockOutcome, ContainsRequest, Durability, KvStore, Parent, Placed, Presence, PutReply, PutRequest,
};
use kvarts_store::error::Error;
use kvarts_store::io::{Region, SharedBuf};
use kvarts_store::rt::mailbox::Ticket;

use crate::error::ColdError;
use crate::format::PackIndex;
use crate::push::part;
use crate::restore::{Arrived, FetchOptions, Fetched, Lost, Part, arriving, plan_all};
use crate::tier::{Found, Tier};

/// The most bytes of one put of more than one block.
const PUT_BYTES: u64 = 16 << 20;

/// Which blocks are wanted.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Their namespace.
    pub namespace: NamespaceId,
    /// Their group.
    pub group: Group,
    /// Their coordinate.
    pub coordinate: Coordinate,
    /// Their keys, in the order of the prompt.
    pub keys: Vec<BlockKey>,
    /// When a put is acknowledged.
    pub durability: Durability,
}

/// What became of the blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Restored {
    /// Brought into the store.
    pub stored: u64,
    /// In the store before.
    pub already_there: u64,
    /// Not in the tier.
    pub missing: u64,
    /// In the tier, but not to be read, or not what was put.
    pub lost: u64,
    /// Refused by the store.
    pub refused: u64,
    /// What it cost.
    pub fetched: Fetched,
    /// Why a block was lost or refused: of the first one.
    pub why: Option<String>,
}

/// Something about a block, by its place among the keys.
#[derive(Clone, Copy, Debug)]
pub enum News<'a> {
    /// The tier does not have it.
    NotThere(usize),
    /// The store has it already.
    InStore(usize),
    /// Some of its layers came and are what was put, or will not come.
    Came(&'a Arrived),
}

impl Restored {
    fn tell(&mut self, why: impl std::fmt::Debug) {
        self.why.get_or_insert_with(|| format!("{why:?}"));
    }
}

/// Brings what the tier has of these blocks, and the store has not, into the store.
pub async fn restore_into(
    tier: &Tier,
    store: &dyn KvStore,
    wanted: &Wanted,
    options: &FetchOptions,
) -> Result<Restored, ColdError> {
    restore_and_tell(tier, store, wanted, options, |_| ()).await
}

/// The same; what becomes of each block is told at once.
pub async fn restore_and_tell(
    tier: &Tier,
    store: &dyn KvStore,
    wanted: &Wanted,
    options: &FetchOptions,
    mut tell: impl FnMut(News<'_>) + Send,
) -> Result<Restored, ColdError> {
    let mut restored = Restored::default();
    let found = tier.locate(wanted.namespace, (wanted.group, wanted.coordinate), &wanted.keys).await?;
    for (ordinal, _) in found.iter().enumerate().filter(|(_, found)| found.is_none()) {
        restored.missing += 1;
        tell(News::NotThere(ordinal));
    }
    let Some(first) = found.iter().flatten().next() else { return Ok(restored) };
    let known = first.index.namespace();
    let refused = |error: Error| ColdError::Store(error.to_string());
    store.register(&known.identity, &known.geometry).map_err(refused)?;
    let presence = store.contains(&ContainsRequest {
        namespace: wanted.namespace,
        group: wanted.group,
        coordinate: wanted.coordinate,
        keys: &wanted.keys,
        lease: None,
    });
    let presence = presence.map_err(refused)?.presence;
    let mut ordered: Vec<(usize, Found)> = Vec::new();
    for (ordinal, (found, presence)) in found.into_iter().zip(presence).enumerate() {
        match (found, presence) {
            (Some(_), Presence::Here) => {
                restored.already_there += 1;
                tell(News::InStore(ordinal));
            }
            // A put of another client may end without it, and who waits for it here does not wait for that.
            (Some(found), Presence::Absent | Presence::Pending) => ordered.push((ordinal, found)),
            (None, _) => {}
        }
    }
    let fetches = plan_all(&ordered, options);
    restored.fetched = Fetched::planned(&fetches);
    let mut arriving = std::pin::pin!(arriving(tier, fetches, options));
    let (durability, batch, gathered) = (wanted.durability, Vec::new(), Gathered::default());
    let mut putting = Putting { tier, store, durability, gathered, batch, put: None };
    while let Some(parts) = arriving.next().await {
        for arrived in parts {
            restored.fetched.count(&arrived);
            tell(News::Came(&arrived));
            putting.take(arrived, now(tier), &mut restored).await;
        }
    }
    putting.flush(now(tier), &mut restored).await;
    putting.settle(&mut restored).await;
    Ok(restored)
}

fn now(tier: &Tier) -> u64 {
    tier.access().time().wall_ms()
}

/// A block of which everything came: its layers in order, in one piece or several.
#[derive(Debug)]
struct Whole {
    index: std::sync::Arc<PackIndex>,
    run: u32,
    block: u32,
    bytes: Vec<Bytes>,
}

impl Whole {
    fn len(&self) -> u64 {
        self.bytes.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// Whether pieces that were proven by their digests are together what was put.
    fn is_what_was_put(&self) -> bool {
        let indexed = self.index.run(self.run);
        let Some(block) = indexed.and_then(|indexed| indexed.block(self.block)) else { return false };
        let mut hasher = blake3::Hasher::new();
        for bytes in &self.bytes {
            hasher.update(bytes);
        }
        hasher.finalize().as_bytes() == &block.content.0
    }
}

/// Blocks of which some layers have come.
#[derive(Debug, Default)]
struct Gathered {
    parts: BTreeMap<usize, Vec<(Part, Bytes)>>,
    lost: BTreeSet<usize>,
}

/// What a part made of its block.
enum Became {
    Incomplete,
    Whole(Whole),
    /// It is lost; false if that is known already.
    Lost(bool),
}

impl Gathered {
    fn take(&mut self, tier: &Tier, arrived: Arrived) -> Became {
        let Arrived { part, index, bytes } = arrived;
        let (ordinal, run, block) = (part.ordinal, part.run, part.block);
        let Ok(bytes) = bytes else {
            self.parts.remove(&ordinal);
            return Became::Lost(self.lost.insert(ordinal));
        };
        if self.lost.contains(&ordinal) {
            return Became::Lost(false);
        }
        let layers = index.run(run).map_or(0, |indexed| indexed.shape.layers().len() as u32);
        if part.layers == (0..layers) {
            // It was proven as a whole.
            return Became::Whole(Whole { index, run, block, bytes: vec![bytes] });
        }
        let parts = self.parts.entry(ordinal).or_default();
        parts.push((part, bytes));
        if parts.iter().map(|(part, _)| part.layers.len() as u32).sum::<u32>() < layers {
            return Became::Incomplete;
        }
        let mut parts = self.parts.remove(&ordinal).unwrap_or_default();
        parts.sort_unstable_by_key(|(part, _)| part.layers.start);
        let bytes = parts.into_iter().map(|(_, bytes)| bytes).collect();
        let whole = Whole { index, run, block, bytes };
        if whole.is_what_was_put() {
            return Became::Whole(whole);
        }
        tier.strike(whole.index.id());
        Became::Lost(self.lost.insert(ordinal))
    }
}

/// Puts runs of neighbouring blocks; one is under way while the next is gathered.
struct Putting<'a> {
    tier: &'a Tier,
    store: &'a dyn KvStore,
    durability: Durability,
    gathered: Gathered,
    batch: Vec<Whole>,
    put: Option<(Ticket<Result<PutReply, Error>>, u64)>,
}

impl Putting<'_> {
    async fn take(&mut self, arrived: Arrived, now_ms: u64, restored: &mut Restored) {
        let why = arrived.bytes.as_ref().err().cloned();
        let whole = match self.gathered.take(self.tier, arrived) {
            Became::Incomplete | Became::Lost(false) => return,
            Became::Lost(true) => {
                restored.lost += 1;
                restored.tell(why.unwrap_or(Lost::Damaged));
                return;
            }
            Became::Whole(whole) => whole,
        };
        let waiting: u64 = self.batch.iter().map(Whole::len).sum();
        let follows = self.batch.last().is_none_or(|last| {
            last.index.id() == whole.index.id()
                && last.run == whole.run
                && last.block.checked_add(1) == Some(whole.block)
        });
        if !follows || waiting.saturating_add(whole.len()) > PUT_BYTES {
            self.flush(now_ms, restored).await;
        }
        self.batch.push(whole);
    }

    /// Begins the put of what was gathered.
    async fn flush(&mut self, now_ms: u64, restored: &mut Restored) {
        self.settle(restored).await;
        let batch = std::mem::take(&mut self.batch);
        let count = batch.len() as u64;
        if count == 0 {
            return;
        }
        match request(&batch, self.durability, now_ms) {
            Some(request) => self.put = Some((self.store.put(request), count)),
            None => {
                restored.refused += count;
                restored.tell("a run that cannot be placed in memory");
            }
        }
    }

    /// Waits for the put that is under way.
    async fn settle(&mut self, restored: &mut Restored) {
        let Some((ticket, count)) = self.put.take() else { return };
        let outcomes = match ticket.await {
            Ok(Ok(reply)) => reply.outcomes,
            Ok(Err(error)) => {
                restored.tell(error);
                Vec::new()
            }
            Err(_) => {
                restored.tell("the store stopped");
                Vec::new()
            }
        };
        let unanswered = count.saturating_sub(outcomes.len() as u64);
        restored.refused += unanswered;
        for outcome in outcomes {
            match outcome {
                BlockOutcome::Stored => restored.stored += 1,
                BlockOutcome::AlreadyThere | BlockOutcome::InFlight | BlockOutcome::HeldElsewhere => {
                    restored.already_there += 1;
                }
                BlockOutcome::Refused(reason) => {
                    restored.refused += 1;
                    restored.tell(reason);
                }
            }
        }
    }
}

/// The put of neighbouring blocks of one run.
fn request(batch: &[Whole], durability: Durability, now_ms: u64) -> Option<PutRequest> {
    let first = batch.first()?;
    let indexed = first.index.run(first.run)?;
    let from = first.block as usize;
    let run: Run = part(&indexed.run, from, from.checked_add(batch.len())?)?;
    let whole = usize::try_from(run.payload_bytes()?).ok()?;
    let memory = Region::anonymous(whole.max(1)).ok().and_then(|region| SharedBuf::new(&region, 0, whole))?;
    let mut at = 0;
    for bytes in batch.iter().flat_map(|block| &block.bytes) {
        // Every block is whole and verified, so together they are as long as the run.
        memory.copy_in(at, bytes);
        at += bytes.len();
    }
    let placed = Placed::blocks(&indexed.shape, memory, batch.len() as u32).ok()?;
    let keys = run.blocks.iter().map(|block| block.key).collect();
    let mut request = PutRequest::new(run.namespace, run.group, run.coordinate, keys, placed);
    request.parent = match run.parent {
        body::Parent::Root => Parent::Root,
        body::Parent::Key(key) => Parent::Key(BlockKey(key)),
        body::Parent::Unknown => Parent::Unknown,
    };
    request.first_block = run.first_block;
    request.durability = durability;
    let left = Duration::from_millis(run.expires_ms.saturating_sub(now_ms));
    request.expires_after = (run.expires_ms != 0).then_some(left);
    request.origins = Some(run.blocks.iter().map(|block| block.origin).collect());
    Some(request)
}
