//! Blocks into packs, packs into the bucket: the pack, then its index, then the manifest that names it.
//!
//! What was deleted since it was listed is not named: the manifest knows it, and the change that names a pack goes by what it knows
//! ([`Pusher::listed`]).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_layout::export::{ExportedNamespace, Run};
use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, NamespaceId};

use crate::bucket::Condition;
use crate::check::each_listed;
use crate::error::ColdError;
use crate::format::deletions::Listed;
use crate::format::names::Named;
use crate::format::{FormatError, Manifest, Pack, PackBuilder, Point, names, wide_fingerprint};
use crate::tier::Tier;

/// How blocks are packed.
#[derive(Clone, Debug)]
pub struct PushOptions {
    /// Bytes of blocks that a pack is to have; 16 to 64 MiB is what the format is made for.
    pub pack_bytes: u64,
    /// Bytes of blocks that wait in unfinished packs of all namespaces; a single larger block may exceed it.
    pub memory_bytes: u64,
    /// A pack whose upload began this long ago is not named any more: garbage collection may have taken it for lost. Far below
    /// its grace.
    pub upload_time: Duration,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self { pack_bytes: 32 << 20, memory_bytes: 128 << 20, upload_time: Duration::from_secs(300) }
    }
}

/// What a push came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pushed {
    /// Packs that are in the bucket and named by a manifest.
    pub packs: u64,
    /// Blocks in them.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub payload_bytes: u64,
    /// Blocks that were there already.
    pub already_there: u64,
    /// Blocks that have expired.
    pub expired: u64,
    /// Blocks that are larger than a pack may be.
    pub too_large: u64,
    /// Blocks that were deleted after they were listed.
    pub deleted: u64,
    /// Of `blocks`, those that may have been deleted elsewhere: so long ago that the manifest does not know it any more.
    pub doubtful: u64,
}

impl std::ops::AddAssign for Pushed {
    fn add_assign(&mut self, more: Self) {
        let Self { packs, blocks, payload_bytes, already_there, expired, too_large, deleted, doubtful } =
            more;
        self.packs += packs;
        self.blocks += blocks;
        self.payload_bytes += payload_bytes;
        self.already_there += already_there;
        self.expired += expired;
        self.too_large += too_large;
        self.deleted += deleted;
        self.doubtful += doubtful;
    }
}

/// How often a pack gets another name because the one it had is not to be used.
const NAMES_MAX: u32 = 3;
/// How often a pack is made again because some of its blocks were deleted meanwhile.
const DELETES_MAX: u32 = 8;

/// A run with its bytes, and the state of the manifest that was known when it was listed.
type Taken = (Run, Bytes, Point);

/// A pack that is being filled.
struct Open {
    namespace: Arc<ExportedNamespace>,
    builder: PackBuilder,
    /// What is in it, for another name.
    runs: Vec<Taken>,
}

/// Why a pack is not named.
enum Unnamed {
    /// Something failed.
    Failed(ColdError),
    /// Some of its blocks were deleted, as this manifest says.
    Deleted(Box<Manifest>),
}

impl From<ColdError> for Unnamed {
    fn from(error: ColdError) -> Self {
        Self::Failed(error)
    }
}

impl Open {
    fn new(namespace: &Arc<ExportedNamespace>, begin_ms: u64) -> Result<Self, FormatError> {
        let builder = PackBuilder::new(namespace, begin_ms)?;
        Ok(Self { namespace: Arc::clone(namespace), builder, runs: Vec::new() })
    }

    fn add(&mut self, run: Run, payload: Bytes, listed: Point) -> Result<(), FormatError> {
        self.builder.add(&run, payload.clone())?;
        self.runs.push((run, payload, listed));
        Ok(())
    }
}

/// A pack of these runs. Another time gives it another name.
fn pack_of(
    namespace: &ExportedNamespace,
    runs: &[Taken],
    (begin_ms, added_ms): (u64, u64),
) -> Result<Pack, FormatError> {
    let mut builder = PackBuilder::new(namespace, begin_ms)?;
    for (run, payload, _) in runs {
        builder.add(run, payload.clone())?;
    }
    builder.finish(added_ms)
}

/// Whether a manifest hides a block of a run, which was listed when it was in this state.
fn is_hidden(manifest: &Manifest, run: &Run, key: &BlockKey, listed: Point) -> bool {
    manifest.deletions.hides(Listed {
        since: manifest.since(listed),
        fingerprint: wide_fingerprint(key),
        created_ms: run.created_ms,
    })
}

/// Whether it hides any block of these.
fn hides_any(manifest: &Manifest, runs: &[Taken]) -> bool {
    runs.iter()
        .any(|(run, _, listed)| run.blocks.iter().any(|block| is_hidden(manifest, run, &block.key, *listed)))
}

/// Whether a manifest is the one that was known when each of these was listed.
fn is_known(manifest: &Manifest, runs: &[Taken]) -> bool {
    runs.iter().all(|(_, _, listed)| manifest.since(*listed).is_some())
}

/// What is left of runs without the blocks that a manifest hides; and how many those are.
fn without_hidden(manifest: &Manifest, runs: Vec<Taken>) -> Option<(Vec<Taken>, u64)> {
    let (mut left, mut hidden) = (Vec::new(), 0);
    for (run, payload, listed) in runs {
        let is_gone: Vec<bool> =
            run.blocks.iter().map(|block| is_hidden(manifest, &run, &block.key, listed)).collect();
        let mut at = 0;
        for same in is_gone.chunk_by(|a, b| a == b) {
            let to = at + same.len();
            if same.first() == Some(&true) {
                hidden += same.len() as u64;
            } else if same.len() == run.blocks.len() {
                left.push((run.clone(), payload.clone(), listed));
            } else {
                left.push((part(&run, at, to)?, slice(&payload, run.block_bytes, at, to)?, listed));
            }
            at = to;
        }
    }
    Some((left, hidden))
}

/// The state of each manifest of a bucket: to be asked before blocks of any of its namespaces are listed. What cannot be read is left out.
pub async fn points(tier: &Tier) -> Result<BTreeMap<NamespaceId, Point>, ColdError> {
    let mut found = Vec::new();
    each_listed(tier, names::MANIFESTS, |listed| found.push(Named::parse(&listed.name))).await?;
    let mut points = BTreeMap::new();
    for namespace in found.into_iter().flatten().map(|named| named.namespace()) {
        match tier.read_manifest(namespace).await {
            Ok(known) => drop(points.insert(namespace, known.manifest.point())),
            Err(ColdError::Object(..)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(points)
}

/// Takes blocks and brings them into the tier. What it has taken is there when [`Pusher::finish`] says so; if that is not
/// reached, the packs that were full by then may be.
pub struct Pusher<'a> {
    tier: &'a Tier,
    options: PushOptions,
    open: BTreeMap<NamespaceId, Open>,
    /// What was known of manifests when the blocks that come now were listed.
    listed: BTreeMap<NamespaceId, Point>,
    pushed: Pushed,
    may_name: Option<Guard<'a>>,
}

/// Says whether a pack of a namespace with these blocks may still be named.
type Guard<'a> = Box<dyn Fn(NamespaceId, &[BlockKey]) -> bool + Send + Sync + 'a>;

impl std::fmt::Debug for Pusher<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pusher").field("pushed", &self.pushed).finish_non_exhaustive()
    }
}

fn refused(error: FormatError) -> ColdError {
    ColdError::Object("consecutive blocks cannot be encoded for a pack".to_owned(), error)
}

impl<'a> Pusher<'a> {
    /// Pushes into this tier.
    pub fn new(tier: &'a Tier, options: PushOptions) -> Self {
        let (open, listed) = (BTreeMap::new(), BTreeMap::new());
        Self { tier, options, open, listed, pushed: Pushed::default(), may_name: None }
    }

    /// The blocks of this namespace that come from now on were listed, or read from their store, after its manifest was known to be in
    /// this state: what is deleted later is not named. Of a namespace of which nothing was said all deletes count that its
    /// manifest knows.
    pub fn listed(&mut self, namespace: NamespaceId, after: Point) {
        self.listed.insert(namespace, after);
    }

    /// Asks before each change of a manifest, on what the change is made of, whether a pack of this namespace with these blocks may
    /// still be named. So who deletes blocks says no first and changes the manifest then: a pack that holds them is either there to be
    /// seen, or is named never.
    #[must_use]
    pub fn guarded(mut self, may_name: impl Fn(NamespaceId, &[BlockKey]) -> bool + Send + Sync + 'a) -> Self {
        self.may_name = Some(Box::new(may_name));
        self
    }

    /// Takes the blocks of a run that are not in the tier yet. Their bytes are verified against the run.
    pub async fn add(
        &mut self,
        namespace: &Arc<ExportedNamespace>,
        run: &Run,
        payload: &Bytes,
    ) -> Result<(), ColdError> {
        let count = run.blocks.len() as u64;
        if run.expires_ms != 0 && run.expires_ms <= self.tier.access().time().wall_ms() {
            self.pushed.expired += count;
            return Ok(());
        }
        let keys: Vec<BlockKey> = run.blocks.iter().map(|block| block.key).collect();
        let there = self.tier.locate(run.namespace, (run.group, run.coordinate), &keys).await?;
        let open = self.open.get(&run.namespace);
        let is_new: Vec<bool> = keys
            .iter()
            .zip(there)
            .map(|(key, found)| found.is_none() && !open.is_some_and(|open| open.builder.has(key, run)))
            .collect();
        let mut at = 0;
        while at < is_new.len() {
            let wanted = is_new.get(at).copied().unwrap_or(false);
            let same = is_new.iter().skip(at).take_while(|is_new| **is_new == wanted).count();
            if wanted {
                self.take(namespace, run, payload, (at, at + same)).await?;
            } else {
                self.pushed.already_there += same as u64;
            }
            at += same;
        }
        Ok(())
    }

    /// Takes these blocks of a run, in as many packs as it needs.
    async fn take(
        &mut self,
        namespace: &Arc<ExportedNamespace>,
        run: &Run,
        payload: &Bytes,
        (mut at, to): (usize, usize),
    ) -> Result<(), ColdError> {
        let chunks = run.blocks.first().map_or(0, |block| block.digests.len() as u32);
        while at < to {
            let begin_ms = self.tier.access().time().wall_ms();
            let open = match self.open.remove(&run.namespace) {
                Some(open) => open,
                None => Open::new(namespace, begin_ms).map_err(refused)?,
            };
            let room = open.builder.room(run.block_bytes, chunks, self.options.pack_bytes) as usize;
            if room == 0 && open.builder.blocks() == 0 {
                self.pushed.too_large += (to - at) as u64;
                return Ok(());
            }
            if room == 0 {
                self.upload(open).await?;
                continue;
            }
            let mut open = open;
            let end = to.min(at.saturating_add(room));
            let part = part(run, at, end).ok_or(refused(FormatError::Rule("blocks")))?;
            let bytes = slice(payload, run.block_bytes, at, end).ok_or(refused(FormatError::Damaged))?;
            open.add(part, bytes, self.listed.get(&run.namespace).copied().unwrap_or_default())
                .map_err(refused)?;
            at = end;
            if open.builder.payload_bytes() >= self.options.pack_bytes {
                self.upload(open).await?;
            } else {
                self.open.insert(run.namespace, open);
            }
            self.keep_within_memory().await?;
        }
        Ok(())
    }

    /// Uploads the largest packs while too much waits.
    async fn keep_within_memory(&mut self) -> Result<(), ColdError> {
        loop {
            let waiting: u64 = self.open.values().map(|open| open.builder.payload_bytes()).sum();
            if waiting <= self.options.memory_bytes {
                return Ok(());
            }
            let largest = self.open.iter().max_by_key(|(_, open)| open.builder.payload_bytes());
            let Some(open) = largest.map(|(id, _)| *id).and_then(|id| self.open.remove(&id)) else {
                return Ok(());
            };
            self.upload(open).await?;
        }
    }

    /// Brings what is left into the tier.
    pub async fn finish(mut self) -> Result<Pushed, ColdError> {
        // ends: the time of each request (`patience`)
        self.flush().await?;
        Ok(self.pushed)
    }

    /// Brings what it has taken so far into the tier.
    pub async fn flush(&mut self) -> Result<(), ColdError> {
        while let Some((_, open)) = self.open.pop_first() {
            if open.builder.blocks() > 0 {
                self.upload(open).await?;
            }
        }
        Ok(())
    }

    /// Lets go of what it has taken so far and has not brought into the tier.
    pub fn abandon(&mut self) {
        self.open.clear();
    }

    /// What has been pushed so far.
    pub fn pushed(&self) -> Pushed {
        self.pushed
    }

    /// Pack, index, manifest. A name that garbage collection has taken for lost is given up for another; so is one of a pack with blocks
    /// that were deleted meanwhile, which goes without them.
    async fn upload(&mut self, open: Open) -> Result<(), ColdError> {
        let Open { namespace, builder, mut runs } = open;
        let time = Arc::clone(self.tier.access().time());
        let mut pack = builder.finish(time.wall_ms()).map_err(refused)?;
        let id = namespace.identity.namespace_id();
        let id = id.map_err(|_| refused(FormatError::Rule("identity")))?;
        self.tier.expect_conditions().await?;
        let known = self.tier.manifest(id).await?;
        // What is known to be deleted is not put. Whether this is still the manifest is seen when it is changed.
        let hides = is_known(&known.manifest, &runs) && hides_any(&known.manifest, &runs);
        let mut deleted = hides.then(|| Box::new(known.manifest.clone()));
        let (mut names_left, mut deletes_left, mut begin_ms) = (NAMES_MAX, DELETES_MAX, 0);
        loop {
            if let Some(manifest) = deleted.take() {
                let (left, hidden) =
                    without_hidden(&manifest, runs).ok_or(refused(FormatError::Rule("blocks")))?;
                self.pushed.deleted += hidden;
                if left.is_empty() {
                    return Ok(());
                }
                runs = left;
                begin_ms = time.wall_ms().max(begin_ms + 1);
                pack = pack_of(&namespace, &runs, (begin_ms, time.wall_ms())).map_err(refused)?;
            }
            self.expect_room(id, &pack).await?;
            match self.try_upload(id, &pack, &runs).await {
                Ok(doubtful) => {
                    self.pushed.doubtful += doubtful;
                    break;
                }
                Err(Unnamed::Deleted(manifest)) if deletes_left > 0 => {
                    deletes_left -= 1;
                    deleted = Some(manifest);
                }
                Err(Unnamed::Deleted(_)) => return Err(ColdError::Withdrawn),
                Err(Unnamed::Failed(ColdError::Condemned)) if names_left > 0 => {
                    names_left -= 1;
                    // Another name: a pack whose first frame is of another time.
                    begin_ms = time.wall_ms().max(begin_ms).saturating_add(1);
                    pack = pack_of(&namespace, &runs, (begin_ms, time.wall_ms())).map_err(refused)?;
                }
                Err(Unnamed::Failed(error)) => return Err(error),
            }
        }
        self.pushed.packs += 1;
        self.pushed.blocks += u64::from(pack.entry.blocks);
        self.pushed.payload_bytes += pack.entry.payload_bytes;
        Ok(())
    }

    /// What the manifest has no room for is not put: it would lie there for nothing until garbage collection finds it.
    async fn expect_room(&self, id: NamespaceId, pack: &Pack) -> Result<(), ColdError> {
        let fingerprints = pack.entry.filter.len();
        if self.tier.manifest(id).await?.manifest.has_room(fingerprints) {
            return Ok(());
        }
        // That may have been some time ago.
        let has_room = self.tier.read_manifest(id).await?.manifest.has_room(fingerprints);
        if has_room { Ok(()) } else { Err(ColdError::Full(id)) }
    }

    /// Gives how many of its blocks may have been deleted elsewhere.
    async fn try_upload(&self, id: NamespaceId, pack: &Pack, runs: &[Taken]) -> Result<u64, Unnamed> {
        let access = self.tier.access();
        let begun = access.time().now();
        access.put(&names::pack(id, pack.id), &pack.body, Condition::Any).await?;
        access.put(&names::index(id, pack.id), std::slice::from_ref(&pack.index), Condition::Any).await?;
        let keys: Vec<BlockKey> =
            runs.iter().flat_map(|(run, ..)| run.blocks.iter().map(|block| block.key)).collect();
        let (mut doubtful, mut deleted) = (0, None);
        let named = self.tier.change(id, |manifest| {
            if manifest.packs.contains_key(&pack.id) {
                // By an attempt whose answer was lost.
                return Ok(None);
            }
            if self.may_name.as_ref().is_some_and(|may_name| !may_name(id, &keys)) {
                return Err(ColdError::Withdrawn);
            }
            if !is_known(manifest, runs) {
                return Err(ColdError::Anew(id));
            }
            if hides_any(manifest, runs) {
                deleted = Some(Box::new(manifest.clone()));
                return Err(ColdError::Withdrawn);
            }
            let late = access.time().now().saturating_sub(begun) > self.options.upload_time;
            if late || manifest.condemned.contains_key(&pack.id) {
                return Err(ColdError::Condemned);
            }
            let doubts = |(run, ..): &&Taken| manifest.deletions.is_doubtful(run.created_ms);
            doubtful = runs.iter().filter(doubts).map(|(run, ..)| run.blocks.len() as u64).sum();
            manifest.packs.insert(pack.id, pack.entry.clone());
            Ok(Some(()))
        });
        // ends: attempts that are counted, each with the time of its requests (`patience`)
        match named.await {
            Ok(_) => Ok(doubtful),
            Err(error) => Err(deleted.map_or(Unnamed::Failed(error), Unnamed::Deleted)),
        }
    }
}

/// The blocks `from..to` of a run, as a run.
pub(crate) fn part(run: &Run, from: usize, to: usize) -> Option<Run> {
    let before = from.checked_sub(1).and_then(|before| run.blocks.get(before));
    Some(Run {
        first_block: run.first_block.and_then(|first| first.checked_add(from as u32)),
        parent: match (run.parent, before) {
            (Parent::Unknown, _) => Parent::Unknown,
            (_, Some(before)) => Parent::Key(before.key.0),
            (parent, None) => parent,
        },
        blocks: run.blocks.get(from..to)?.to_vec(),
        ..without_blocks(run)
    })
}

/// A run without its blocks.
fn without_blocks(run: &Run) -> Run {
    Run {
        namespace: run.namespace,
        coordinate: run.coordinate,
        group: run.group,
        created_ms: run.created_ms,
        expires_ms: run.expires_ms,
        first_block: run.first_block,
        parent: run.parent,
        block_bytes: run.block_bytes,
        blocks: Vec::new(),
    }
}

/// The bytes of the blocks `from..to`.
fn slice(payload: &Bytes, block_bytes: u64, from: usize, to: usize) -> Option<Bytes> {
    let each = usize::try_from(block_bytes).ok()?;
    let (from, to) = (from.checked_mul(each)?, to.checked_mul(each)?);
    (to <= payload.len()).then(|| payload.slice(from..to))
}
