//! Blocks from the tier into a store, by its ordinary put: budget, durability and the first put of a key are the engine's.

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
use crate::push::part;
use crate::restore::{Arrived, FetchOptions, Fetched, arriving, plan};
use crate::tier::{Found, Tier};

/// The most bytes of one put of more than one block.
const PUT_BYTES: u64 = 32 << 20;

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
    let mut restored = Restored::default();
    let found = tier.locate(wanted.namespace, (wanted.group, wanted.coordinate), &wanted.keys).await?;
    restored.missing = found.iter().filter(|found| found.is_none()).count() as u64;
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
            (Some(_), Presence::Here | Presence::Pending) => restored.already_there += 1,
            (Some(found), Presence::Absent) => ordered.push((ordinal, found)),
            (None, _) => {}
        }
    }
    let fetches = plan(&ordered, None, options);
    restored.fetched = Fetched::planned(&fetches);
    let mut arriving = std::pin::pin!(arriving(tier, fetches, options));
    let mut putting = Putting { store, durability: wanted.durability, batch: Vec::new(), put: None };
    while let Some(parts) = arriving.next().await {
        for arrived in parts {
            restored.fetched.count(&arrived);
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

/// Puts runs of neighbouring blocks; one is under way while the next is gathered.
struct Putting<'a> {
    store: &'a dyn KvStore,
    durability: Durability,
    batch: Vec<(Arrived, Bytes)>,
    put: Option<(Ticket<Result<PutReply, Error>>, u64)>,
}

impl Putting<'_> {
    async fn take(&mut self, arrived: Arrived, now_ms: u64, restored: &mut Restored) {
        let bytes = match &arrived.bytes {
            Ok(bytes) => bytes.clone(),
            Err(lost) => {
                restored.lost += 1;
                restored.tell(lost);
                return;
            }
        };
        let waiting: u64 = self.batch.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let follows = self.batch.last().is_none_or(|(last, _)| {
            last.index.id() == arrived.index.id()
                && last.part.run == arrived.part.run
                && last.part.block.checked_add(1) == Some(arrived.part.block)
        });
        if !follows || waiting.saturating_add(bytes.len() as u64) > PUT_BYTES {
            self.flush(now_ms, restored).await;
        }
        self.batch.push((arrived, bytes));
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
fn request(batch: &[(Arrived, Bytes)], durability: Durability, now_ms: u64) -> Option<PutRequest> {
    let (first, _) = batch.first()?;
    let indexed = first.index.run(first.part.run)?;
    let from = first.part.block as usize;
    let run: Run = part(&indexed.run, from, from.checked_add(batch.len())?)?;
    let whole = usize::try_from(run.payload_bytes()?).ok()?;
    let memory = Region::anonymous(whole.max(1)).ok().and_then(|region| SharedBuf::new(&region, 0, whole))?;
    let mut at = 0;
    for (_, bytes) in batch {
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
