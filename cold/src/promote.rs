//! Blocks from the tier into a store, by its ordinary put: budget, durability and the first put of a key are the engine's.
//!
//! Bytes come into memory where the put takes them from, and reads meanwhile: nothing copies them in between. What comes is told before
//! it is stored: a read that waits for it does not wait for the disk. What is stored is proven by its content id besides.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, Durability, KvStore, Parent, Placed, Presence, PutReply, PutRequest,
};
use kvarts_contract::buffers::{Arena, BufMut, Region, SharedBuf};
use kvarts_contract::error::Error;
use kvarts_layout::export::Run;
use kvarts_layout::format::body;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::error::ColdError;
use crate::format::PackIndex;
use crate::push::part;
use crate::restore::{Arrived, FetchOptions, Fetched, Lost, Part, arriving, plan_all};
use crate::tier::{Found, Tier};
use crate::time::BoxFuture;

/// The most bytes of one put of more than one block.
pub const PUT_BYTES: usize = 16 << 20;
/// Where nothing is being stored a put begins with these bytes already: shorter ones would leave records that are shorter than
/// those of an ordinary put, for good.
const PUT_LEAST: usize = 8 << 20;
/// The most bytes of more than one block that lie in memory together, until the last of them is stored.
const STRETCH_BYTES: u64 = 64 << 20;
/// Memory of a restore that is given none: for the largest block that a pack can have. What is not used of it costs nothing.
const OWN_MEMORY: usize = 1 << 30;
/// Bytes whose content id is computed before other tasks of the thread have their turn.
const SLICE_BYTES: usize = 1 << 20;

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
    /// Its bytes, or those of some of its layers, came and are what their digests are of, or will not come. Of a whole block the content id holds too.
    Came(&'a Arrived),
    /// All of its layers came, and together they are not what was put.
    Lost(usize),
}

/// Brings what the tier has of these blocks, and the store has not, into the store.
pub async fn restore_into(
    tier: &Tier,
    store: &dyn KvStore,
    wanted: &Wanted,
    options: &FetchOptions,
) -> Result<Restored, ColdError> {
    let region = Region::anonymous(OWN_MEMORY).map_err(|error| ColdError::Store(error.to_string()))?;
    restore_and_tell(tier, store, wanted, options, &Arena::new(region), |_| ()).await
}

/// Where the memory of restores comes from.
pub trait Memory: Sync {
    /// Memory of this length as soon as there is some; none if there never is.
    fn take(&self, bytes: usize) -> BoxFuture<'_, Option<SharedBuf>>;
}

impl Memory for Arena {
    fn take(&self, bytes: usize) -> BoxFuture<'_, Option<SharedBuf>> {
        Box::pin(async move { Self::take(self, bytes).await.map(BufMut::share) })
    }
}

/// The same; what becomes of each block is told at once. What is told keeps some of the memory.
pub async fn restore_and_tell(
    tier: &Tier,
    store: &dyn KvStore,
    wanted: &Wanted,
    options: &FetchOptions,
    memory: &dyn Memory,
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
    let ordered = not_in_store(store, wanted, found, &mut restored, &mut tell).map_err(refused)?;
    let (durability, puts) = (wanted.durability, FuturesUnordered::new());
    let mut putting =
        Putting { tier, store, durability, gathered: Gathered::default(), batch: Vec::new(), puts };
    for stretch in stretches(&ordered) {
        let layout = Layout::of(stretch);
        let Some(bytes) = memory.take(layout.bytes).await else {
            return Err(ColdError::Store(
                "a run of blocks is larger than the memory for restores".to_owned(),
            ));
        };
        let fetches = plan_all(stretch, options);
        restored.fetched.plan(&fetches);
        let place = |part: &Part| layout.place(part, &bytes);
        let mut arriving = std::pin::pin!(arriving(tier, fetches, options, place));
        loop {
            let next = poll_fn(|context| match putting.puts.poll_next_unpin(context) {
                Poll::Ready(Some(put)) => Poll::Ready(Some(Next::Put(put))),
                _ => arriving.as_mut().poll_next(context).map(|parts| Some(Next::Parts(parts?))),
            });
            // ends: a range has the time of its request (`patience`), a put ends with the store's transfers (`OVERDUE`)
            match next.await {
                Some(Next::Put(put)) => restored.count(put),
                Some(Next::Parts(parts)) => {
                    for arrived in parts {
                        restored.fetched.count(&arrived);
                        putting.take(&arrived, (&layout, &bytes), &mut restored, &mut tell).await;
                    }
                }
                None => break,
            }
            // More is gathered only while something is being stored: a disk that waits is time lost.
            if putting.puts.is_empty() && putting.waiting() >= PUT_LEAST {
                putting.flush(&mut restored);
            }
        }
        putting.flush(&mut restored);
    }
    // ends: the store's transfers are given up after `OVERDUE`
    while let Some(put) = putting.puts.next().await {
        restored.count(put);
    }
    Ok(restored)
}

/// Those that were found in the bucket and are not in the store; of the others it is told.
fn not_in_store(
    store: &dyn KvStore,
    wanted: &Wanted,
    found: Vec<Option<Found>>,
    restored: &mut Restored,
    tell: &mut impl FnMut(News<'_>),
) -> Result<Vec<(usize, Found)>, Error> {
    let presence = store.contains(&ContainsRequest {
        namespace: wanted.namespace,
        group: wanted.group,
        coordinate: wanted.coordinate,
        keys: &wanted.keys,
        lease: None,
    });
    let presence = presence?.presence;
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
    Ok(ordered)
}

/// What a restore waits for.
enum Next {
    Parts(Vec<Arrived>),
    Put(PutOutcome),
}

/// How a put of this number of blocks ended.
type PutOutcome = (Result<PutReply, String>, u64);

impl Restored {
    fn tell(&mut self, why: impl std::fmt::Debug) {
        self.why.get_or_insert_with(|| format!("{why:?}"));
    }

    fn count(&mut self, (outcome, count): PutOutcome) {
        let outcomes = match outcome {
            Ok(reply) => reply.outcomes,
            Err(why) => {
                self.why.get_or_insert(why);
                Vec::new()
            }
        };
        let unanswered = count.saturating_sub(outcomes.len() as u64);
        self.refused += unanswered;
        for outcome in outcomes {
            match outcome {
                BlockOutcome::Stored => self.stored += 1,
                BlockOutcome::AlreadyThere | BlockOutcome::InFlight | BlockOutcome::HeldElsewhere => {
                    self.already_there += 1;
                }
                BlockOutcome::Refused(reason) => {
                    self.refused += 1;
                    self.tell(reason);
                }
            }
        }
    }
}

fn block_bytes(found: &Found) -> u64 {
    found.run().map_or(0, |run| run.shape.block_bytes())
}

/// Blocks in order, as many together as have memory together.
fn stretches(blocks: &[(usize, Found)]) -> Vec<&[(usize, Found)]> {
    let (mut found, mut from, mut bytes) = (Vec::new(), 0, 0u64);
    for (at, (_, block)) in blocks.iter().enumerate() {
        let own = block_bytes(block);
        if at > from && bytes.saturating_add(own) > STRETCH_BYTES {
            found.extend(blocks.get(from..at));
            (from, bytes) = (at, 0);
        }
        bytes = bytes.saturating_add(own);
    }
    found.extend(blocks.get(from..).filter(|rest| !rest.is_empty()));
    found
}

/// Where the blocks of a stretch lie in its memory: one behind the other, in their order.
struct Layout {
    /// By ordinal: where a block begins in memory, and in its pack.
    at: BTreeMap<usize, (usize, u64)>,
    bytes: usize,
}

impl Layout {
    fn of(blocks: &[(usize, Found)]) -> Self {
        let (mut at, mut bytes) = (BTreeMap::new(), 0);
        for (ordinal, found) in blocks {
            let Some(run) = found.run() else { continue };
            at.insert(*ordinal, (bytes, run.block_at(found.place.block)));
            bytes += block_bytes(found) as usize;
        }
        Self { at, bytes }
    }

    /// The memory of a part.
    fn place(&self, part: &Part, memory: &SharedBuf) -> Option<SharedBuf> {
        let (at, in_pack) = self.at.get(&part.ordinal)?;
        let within = usize::try_from(part.range.start.checked_sub(*in_pack)?).ok()?;
        memory.slice(at.checked_add(within)?, usize::try_from(part.range.end - part.range.start).ok()?)
    }
}

/// A block of which everything came.
#[derive(Debug)]
struct Whole {
    index: Arc<PackIndex>,
    run: u32,
    block: u32,
    /// The memory of its stretch, and where it lies there.
    memory: SharedBuf,
    at: usize,
    bytes: usize,
}

impl Whole {
    /// Whether bytes that were proven by their digests are together what was put.
    async fn is_what_was_put(&self) -> bool {
        let indexed = self.index.run(self.run);
        let Some(block) = indexed.and_then(|indexed| indexed.block(self.block)) else { return false };
        let mut hasher = blake3::Hasher::new();
        for done in (0..self.bytes).step_by(SLICE_BYTES) {
            let some = SLICE_BYTES.min(self.bytes - done);
            self.memory.digest(self.at + done, some, |bytes| {
                hasher.update(bytes);
            });
            give_way().await;
        }
        hasher.finalize().as_bytes() == &block.content.0
    }
}

/// Lets other tasks of the thread have their turn.
async fn give_way() {
    let mut has_given = false;
    // ends: its second poll: it wakes itself
    poll_fn(|context| {
        if std::mem::replace(&mut has_given, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Blocks of which some layers have come.
#[derive(Debug, Default)]
struct Gathered {
    /// How many.
    layers: BTreeMap<usize, u32>,
    lost: BTreeSet<usize>,
}

impl Gathered {
    /// Whether this part is the last one of its block.
    fn is_whole(&mut self, part: &Part, of: u32) -> bool {
        let layers = self.layers.entry(part.ordinal).or_default();
        *layers += part.layers.len() as u32;
        let is_whole = *layers >= of;
        if is_whole {
            self.layers.remove(&part.ordinal);
        }
        is_whole
    }
}

/// Puts runs of neighbouring blocks, while more of them come.
struct Putting<'a> {
    tier: &'a Tier,
    store: &'a dyn KvStore,
    durability: Durability,
    gathered: Gathered,
    batch: Vec<Whole>,
    puts: FuturesUnordered<BoxFuture<'static, PutOutcome>>,
}

impl Putting<'_> {
    async fn take(
        &mut self,
        arrived: &Arrived,
        (layout, memory): (&Layout, &SharedBuf),
        restored: &mut Restored,
        tell: &mut (dyn FnMut(News<'_>) + Send),
    ) {
        let Arrived { part, index, bytes } = arrived;
        if self.gathered.lost.contains(&part.ordinal) {
            return;
        }
        if let Err(why) = bytes {
            tell(News::Came(arrived));
            return self.lose(part, why.clone(), restored);
        }
        // Layers are not held back for the rest of their block.
        let layers = index.run(part.run).map_or(0, |indexed| indexed.shape.layers().len() as u32);
        let is_alone = part.layers == (0..layers);
        if !is_alone {
            tell(News::Came(arrived));
        }
        let Some(whole) = self.whole(part, Arc::clone(index), layout, memory) else { return };
        if !whole.is_what_was_put().await {
            self.tier.strike(whole.index.id());
            tell(News::Lost(part.ordinal));
            return self.lose(part, Lost::Damaged, restored);
        }
        if is_alone {
            tell(News::Came(arrived));
        }
        let follows = self.batch.last().is_none_or(|last| {
            last.index.id() == whole.index.id()
                && last.run == whole.run
                && last.block.checked_add(1) == Some(whole.block)
                && last.at + last.bytes == whole.at
        });
        if !follows || self.waiting().saturating_add(whole.bytes) > PUT_BYTES {
            self.flush(restored);
        }
        self.batch.push(whole);
    }

    /// The block of a part, if everything of it came.
    fn whole(
        &mut self,
        part: &Part,
        index: Arc<PackIndex>,
        layout: &Layout,
        memory: &SharedBuf,
    ) -> Option<Whole> {
        let shape = &index.run(part.run)?.shape;
        let (layers, bytes) = (shape.layers().len() as u32, shape.block_bytes() as usize);
        let (at, _) = *layout.at.get(&part.ordinal)?;
        let (run, block, memory) = (part.run, part.block, memory.clone());
        self.gathered.is_whole(part, layers).then_some(Whole { index, run, block, memory, at, bytes })
    }

    fn lose(&mut self, part: &Part, why: Lost, restored: &mut Restored) {
        self.gathered.lost.insert(part.ordinal);
        restored.lost += 1;
        restored.tell(why);
    }

    /// Bytes that were gathered.
    fn waiting(&self) -> usize {
        self.batch.iter().map(|block| block.bytes).sum()
    }

    /// Begins the put of what was gathered.
    fn flush(&mut self, restored: &mut Restored) {
        let batch = std::mem::take(&mut self.batch);
        let count = batch.len() as u64;
        if count == 0 {
            return;
        }
        match request(&batch, self.durability, self.tier.access().time().wall_ms()) {
            Some((request, created_ms)) => {
                // As old as it is: a delete that this node has not heard of yet may be of it.
                let ticket = self.store.put_copies(request, created_ms);
                self.puts.push(Box::pin(async move {
                    // ends: the store's transfers are given up after `OVERDUE`
                    let outcome = match ticket.await {
                        Ok(outcome) => outcome.map_err(|error| format!("{error:?}")),
                        Err(_) => Err("the store stopped".to_owned()),
                    };
                    (outcome, count)
                }));
            }
            None => {
                restored.refused += count;
                restored.tell("a run of blocks could not be placed in the memory for restores");
            }
        }
    }
}

/// The put of neighbouring blocks of one run, from the memory that they lie in, and when they were produced.
fn request(batch: &[Whole], durability: Durability, now_ms: u64) -> Option<(PutRequest, u64)> {
    let (first, last) = (batch.first()?, batch.last()?);
    let indexed = first.index.run(first.run)?;
    let from = first.block as usize;
    let run: Run = part(&indexed.run, from, from.checked_add(batch.len())?)?;
    let memory = first.memory.slice(first.at, (last.at + last.bytes).checked_sub(first.at)?)?;
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
    Some((request, run.created_ms))
}
