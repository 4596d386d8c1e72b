//! Manifests and indexes in bounded memory: what is where, and the change of a manifest by compare-and-set.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::access::Access;
use crate::bucket::{Condition, Tag};
use crate::conditions::{Conditions, conditions};
use crate::error::ColdError;
use crate::fault::Fault;
use crate::format::manifest::{MANIFEST_BYTES_MAX, NO_ROOM, NO_ROOM_TO_WAIT};
use crate::format::{
    FormatError, INDEX_BYTES_MAX, IndexedRun, Manifest, PackId, PackIndex, Place, Point, fingerprint, names,
};

/// How a tier uses memory and time.
#[derive(Clone, Debug)]
pub struct TierOptions {
    /// How old a manifest may be before it is read again.
    pub refresh: Duration,
    /// How old a manifest may be that is used because the bucket does not answer. Below the grace of garbage collection, or
    /// packs are asked for that are gone: misses.
    pub stale: Duration,
    /// Namespaces whose manifests are kept.
    pub namespaces_max: usize,
    /// Memory for manifests and their filters, beside the last one that was read.
    pub manifest_memory: usize,
    /// Memory for indexes.
    pub index_memory: usize,
    /// Indexes that one look-up reads from the bucket at most: what it does not reach is a miss.
    pub indexes_a_lookup: usize,
    /// How often a manifest is changed at most, while others change it too.
    pub swaps: u32,
    /// Whether it is tried, before anything is written, that the bucket keeps conditions of puts. Without it that is taken for granted: for
    /// buckets of tests alone.
    pub tries_conditions: bool,
}

impl Default for TierOptions {
    fn default() -> Self {
        Self {
            refresh: Duration::from_secs(30),
            stale: Duration::from_secs(15 * 60),
            namespaces_max: 64,
            manifest_memory: 128 << 20,
            index_memory: 64 << 20,
            indexes_a_lookup: 64,
            swaps: 32,
            tries_conditions: true,
        }
    }
}

/// A manifest as it was read.
#[derive(Clone, Debug)]
pub struct Known {
    /// The manifest; empty where there is none.
    pub manifest: Manifest,
    /// Which content of the object it is; `None` where there is none.
    pub tag: Option<Tag>,
    /// Every fingerprint with the number of its pack, by size.
    filter: Vec<(u32, u16)>,
    /// The packs, by number: going through the manifest to the thousandth one for each key would be a thousand steps.
    numbered: Vec<PackId>,
    seen: Seen,
}

/// When a tier saw a manifest.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// When it was asked for, or its change was: what had been written before is in it.
    at: Duration,
    /// Which step of the tier that was, and which its answer.
    asked: u64,
    answered: u64,
    /// Whether it is a change of this tier's own.
    is_change: bool,
}

impl Known {
    fn new(manifest: Manifest, tag: Option<Tag>, seen: Seen) -> Self {
        let of = |(number, pack): (u16, &crate::format::PackEntry)| {
            pack.filter.iter().map(|fingerprint| (*fingerprint, number)).collect::<Vec<_>>()
        };
        // No more packs than a u16 counts: the format's bound.
        let mut filter: Vec<(u32, u16)> = (0u16..).zip(manifest.packs.values()).flat_map(of).collect();
        filter.sort_unstable();
        let numbered = manifest.packs.keys().copied().collect();
        Self { manifest, tag, filter, numbered, seen }
    }

    /// When it was asked for, by the tier's clock: what had been written by then is in it.
    pub fn read_at(&self) -> Duration {
        self.seen.at
    }

    /// Whether this is certainly not older than `other`, of the same namespace.
    ///
    /// What was asked for when the other one was there already is later, and of two that were on their way at once the one with more
    /// changes. A manifest that was deleted and begun anew has fewer changes and was written later: an answer with fewer that was written
    /// before is an old one, whenever it comes.
    fn is_later_than(&self, other: &Self) -> bool {
        let (own, others) = (&self.manifest, &other.manifest);
        if self.seen.asked > other.seen.answered {
            let is_old = own.generation < others.generation && own.written_ms < others.written_ms;
            return self.tag.is_none() || !is_old;
        }
        // A bucket may have been begun anew in between, or the clock of who wrote it be slow: then a look is lost, which costs hits. A
        // change of our own may not be.
        let is_after = other.tag.is_some() && own.written_ms >= others.written_ms;
        own.generation > others.generation && (self.seen.is_change || is_after)
    }

    /// Memory that it takes, about.
    pub fn memory_bytes(&self) -> usize {
        const PACK: usize = 192;
        const CONDEMNED: usize = 48;
        let fingerprints = self.filter.len().saturating_mul(size_of::<(u32, u16)>() + size_of::<u32>());
        let packs = self.manifest.packs.len().saturating_mul(PACK);
        fingerprints
            .saturating_add(packs)
            .saturating_add(self.manifest.condemned.len().saturating_mul(CONDEMNED))
            .saturating_add(self.manifest.deletions.memory_bytes())
    }

    /// The packs that may have a key.
    pub fn packs_with(&self, key: &BlockKey) -> impl Iterator<Item = PackId> + '_ {
        let wanted = fingerprint(key);
        let from = self.filter.partition_point(|(fingerprint, _)| *fingerprint < wanted);
        let found = self.filter.iter().skip(from).take_while(move |(fingerprint, _)| *fingerprint == wanted);
        found.filter_map(|(_, number)| self.numbered.get(usize::from(*number)).copied())
    }

    /// Whether any pack may have a key.
    pub fn may_have(&self, key: &BlockKey) -> bool {
        self.filter.binary_search_by_key(&fingerprint(key), |(fingerprint, _)| *fingerprint).is_ok()
    }
}

/// A block that is in the tier.
#[derive(Clone, Debug)]
pub struct Found {
    /// The index of its pack.
    pub index: Arc<PackIndex>,
    /// Where in that.
    pub place: Place,
}

impl Found {
    /// Its run.
    pub fn run(&self) -> Option<&IndexedRun> {
        self.index.run(self.place.run)
    }
}

#[derive(Debug, Default)]
struct Cache {
    manifests: BTreeMap<NamespaceId, Arc<Known>>,
    /// Steps: requests for manifests, and their answers.
    steps: u64,
    /// The latest answer that is remembered no longer, of whatever namespace: what was asked for before it may be older.
    forgotten: u64,
    /// Puts of manifests that were given up without an answer, by the step of the last one: they may happen yet.
    unsettled: BTreeMap<NamespaceId, u64>,
    indexes: BTreeMap<PackId, (Arc<PackIndex>, u64)>,
    index_bytes: usize,
    uses: u64,
    /// Packs that gave bytes that were not theirs, and how often.
    struck: BTreeMap<PackId, u8>,
    /// How long the first byte of a range takes, decayed, in seconds.
    first_byte_seconds: Option<f64>,
    /// Whether the bucket keeps conditions of puts, once it has said so.
    conditions: Option<Conditions>,
}

impl Cache {
    fn forget_manifest(&mut self, namespace: NamespaceId) {
        if let Some(gone) = self.manifests.remove(&namespace) {
            self.forgotten = self.forgotten.max(gone.seen.answered);
        }
    }
}

/// A bucket as a tier of blocks.
#[derive(Debug)]
pub struct Tier {
    access: Access,
    options: TierOptions,
    cache: Mutex<Cache>,
}

/// A pack that failed so often is not asked again before the next start.
const STRIKES: u8 = 3;
/// Indexes that are read at once for one look-up.
pub(crate) const INDEXES_AT_ONCE: usize = 8;
/// Packs whose failures are remembered.
const STRUCK_MAX: usize = 4096;

impl Tier {
    /// A tier over a bucket.
    pub fn new(access: Access, options: TierOptions) -> Self {
        Self { access, options, cache: Mutex::default() }
    }

    /// The way to its bucket.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Why nothing can be changed in the bucket, as far as it has been tried.
    pub fn read_only(&self) -> Option<String> {
        match &self.lock().conditions {
            Some(Conditions::NotKept(why)) => Some(why.clone()),
            Some(Conditions::Kept) | None => None,
        }
    }

    /// Whether the bucket keeps conditions of puts; it is tried until it has said so once.
    pub async fn conditions(&self) -> Result<Conditions, ColdError> {
        if !self.options.tries_conditions {
            return Ok(Conditions::Kept);
        }
        let known = self.lock().conditions.clone();
        if let Some(known) = known {
            return Ok(known);
        }
        let tried = conditions(&self.access).await?;
        self.lock().conditions = Some(tried.clone());
        Ok(tried)
    }

    /// That something may be changed in the bucket.
    pub(crate) async fn expect_conditions(&self) -> Result<(), ColdError> {
        match self.conditions().await? {
            Conditions::Kept => Ok(()),
            Conditions::NotKept(why) => Err(ColdError::ReadOnly(why)),
        }
    }

    /// The state of a namespace's manifest that is known now: what is listed from now on has seen the deletes that it names. It is asked for where it
    /// is not remembered.
    pub async fn point(&self, namespace: NamespaceId) -> Result<Point, ColdError> {
        let known = match self.remembered(namespace) {
            Some(known) => known,
            None => self.read_manifest(namespace).await?,
        };
        Ok(known.manifest.point())
    }

    /// Its options.
    pub fn options(&self) -> &TierOptions {
        &self.options
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        // A cache: whatever a panic leaves of it is read again.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The manifest of a namespace, read now.
    pub async fn read_manifest(&self, namespace: NamespaceId) -> Result<Arc<Known>, ColdError> {
        let name = names::manifest(namespace);
        let (at, asked) = (self.access.time().now(), self.step());
        let seen = |answered| Seen { at, asked, answered, is_change: false };
        let known = match self.access.get(&name, MANIFEST_BYTES_MAX as u64).await {
            Ok((bytes, tag)) => {
                let manifest = Manifest::decode(&bytes).and_then(|manifest| {
                    let is_it = manifest.namespace == namespace;
                    if is_it {
                        Ok(manifest)
                    } else {
                        Err(FormatError::Rule(
                            "the manifest belongs to another \
                        namespace",
                        ))
                    }
                });
                let manifest = manifest.map_err(|error| ColdError::Object(name, error))?;
                Known::new(manifest, Some(tag), seen(self.step()))
            }
            Err(ColdError::Bucket(_, Fault::Missing)) => {
                Known::new(Manifest::empty(namespace), None, seen(self.step()))
            }
            Err(error) => return Err(error),
        };
        let known = Arc::new(known);
        self.keep(&known);
        Ok(known)
    }

    /// The number of a step: of two the later one has the larger one.
    fn step(&self) -> u64 {
        let mut cache = self.lock();
        cache.steps += 1;
        cache.steps
    }

    /// Remembers a manifest, unless one that may be later is remembered, or was: a late answer brings back nothing that was taken out.
    fn keep(&self, known: &Arc<Known>) {
        let mut cache = self.lock();
        let namespace = known.manifest.namespace;
        match cache.manifests.get(&namespace) {
            None if known.seen.asked > cache.forgotten => {}
            Some(before) if known.is_later_than(before) || self.is_stale(before) => {}
            None | Some(_) => return,
        }
        cache.manifests.insert(namespace, Arc::clone(known));
        let memory =
            |cache: &Cache| cache.manifests.values().map(|known| known.memory_bytes()).sum::<usize>();
        while cache.manifests.len() > 1
            && (cache.manifests.len() > self.options.namespaces_max
                || memory(&cache) > self.options.manifest_memory)
        {
            let others = cache.manifests.values().filter(|one| !Arc::ptr_eq(one, known));
            let oldest = others.min_by_key(|known| known.seen.at).map(|known| known.manifest.namespace);
            let Some(oldest) = oldest else { return };
            cache.forget_manifest(oldest);
        }
    }

    /// Whether a manifest was read so long ago that it is used for nothing any more.
    fn is_stale(&self, known: &Known) -> bool {
        self.access.time().now().saturating_sub(known.seen.at) >= self.options.stale
    }

    /// Whether a put of this manifest may happen yet that this tier has given up. Its next change by this tier settles it: whatever
    /// happens then meets another manifest than it was to replace.
    pub fn is_unsettled(&self, namespace: NamespaceId) -> bool {
        self.lock().unsettled.contains_key(&namespace)
    }

    /// Memory that manifests take now.
    pub fn manifest_memory(&self) -> usize {
        self.lock().manifests.values().map(|known| known.memory_bytes()).sum()
    }

    /// Forgets a manifest: another program is known to have changed it since it was read.
    pub fn forget_manifest(&self, namespace: NamespaceId) {
        let mut cache = self.lock();
        // What was asked for before this may be older.
        cache.steps += 1;
        cache.forgotten = cache.steps;
        cache.manifests.remove(&namespace);
    }

    /// The state of each manifest that is remembered: for namespaces that are listed afterwards.
    pub fn points(&self) -> BTreeMap<NamespaceId, Point> {
        let cache = self.lock();
        cache.manifests.iter().map(|(namespace, known)| (*namespace, known.manifest.point())).collect()
    }

    /// The manifest of a namespace as it is remembered, whatever its age.
    pub fn remembered(&self, namespace: NamespaceId) -> Option<Arc<Known>> {
        self.lock().manifests.get(&namespace).map(Arc::clone)
    }

    /// The manifest of a namespace, not much older than the refresh time; an older one where the bucket fails.
    pub async fn manifest(&self, namespace: NamespaceId) -> Result<Arc<Known>, ColdError> {
        let remembered = self.remembered(namespace);
        let now = self.access.time().now();
        let age = remembered.as_ref().map(|known| now.saturating_sub(known.seen.at));
        if let (Some(known), Some(age)) = (&remembered, age)
            && age < self.options.refresh
        {
            return Ok(Arc::clone(known));
        }
        match (self.read_manifest(namespace).await, remembered, age) {
            (Err(_), Some(known), Some(age)) if age < self.options.stale => Ok(known),
            // What came late is not what is remembered.
            (outcome, ..) => outcome.map(|read| self.remembered(namespace).unwrap_or(read)),
        }
    }

    /// How many leading blocks may be in the tier, by what is remembered of the manifest: from memory alone. `None` where
    /// nothing is remembered.
    pub fn probe(&self, namespace: NamespaceId, keys: &[BlockKey]) -> Option<usize> {
        let known = self.remembered(namespace)?;
        Some(keys.iter().take_while(|key| known.may_have(key)).count())
    }

    /// The index of a pack.
    pub async fn index(&self, namespace: NamespaceId, pack: PackId) -> Result<Arc<PackIndex>, ColdError> {
        if let Some(index) = self.remembered_index(pack) {
            return Ok(index);
        }
        let index = self.read_index(namespace, pack).await?;
        self.keep_index(&index);
        Ok(index)
    }

    /// The index of a pack, read now.
    pub(crate) async fn read_index(
        &self,
        namespace: NamespaceId,
        pack: PackId,
    ) -> Result<Arc<PackIndex>, ColdError> {
        let name = names::index(namespace, pack);
        let known = self.remembered(namespace);
        let entry = known.as_ref().and_then(|known| known.manifest.packs.get(&pack));
        let long = entry.map_or(0, |entry| u64::from(entry.index_bytes));
        let (bytes, _) = self.access.get_known(&name, long, INDEX_BYTES_MAX as u64).await?;
        let index = PackIndex::decode(&bytes).and_then(|index| {
            // The name covers the namespace too; this holds the folder to it.
            let is_it = index.id() == pack && index.namespace_id() == namespace;
            if is_it { Ok(Arc::new(index)) } else { Err(FormatError::Damaged) }
        });
        index.map_err(|error| ColdError::Object(name, error))
    }

    /// Memory that indexes take now.
    pub fn index_memory(&self) -> usize {
        self.lock().index_bytes
    }

    fn remembered_index(&self, pack: PackId) -> Option<Arc<PackIndex>> {
        let mut cache = self.lock();
        cache.uses += 1;
        let uses = cache.uses;
        let (index, used) = cache.indexes.get_mut(&pack)?;
        *used = uses;
        Some(Arc::clone(index))
    }

    fn keep_index(&self, index: &Arc<PackIndex>) {
        let mut cache = self.lock();
        cache.uses += 1;
        let uses = cache.uses;
        if cache.indexes.insert(index.id(), (Arc::clone(index), uses)).is_none() {
            cache.index_bytes = cache.index_bytes.saturating_add(index.memory_bytes());
        }
        while cache.index_bytes > self.options.index_memory && cache.indexes.len() > 1 {
            let oldest = cache.indexes.iter().min_by_key(|(_, (_, used))| *used).map(|(id, _)| *id);
            let Some((gone, _)) = oldest.and_then(|id| cache.indexes.remove(&id)) else { return };
            cache.index_bytes = cache.index_bytes.saturating_sub(gone.memory_bytes());
        }
    }

    /// Forgets an index: the pack is not there any more, or is not what it should be.
    pub(crate) fn forget(&self, pack: PackId) {
        let mut cache = self.lock();
        if let Some((gone, _)) = cache.indexes.remove(&pack) {
            cache.index_bytes = cache.index_bytes.saturating_sub(gone.memory_bytes());
        }
    }

    /// A pack gave bytes that were not its own.
    pub(crate) fn strike(&self, pack: PackId) {
        let mut cache = self.lock();
        if cache.struck.len() < STRUCK_MAX || cache.struck.contains_key(&pack) {
            let strikes = cache.struck.entry(pack).or_default();
            *strikes = strikes.saturating_add(1);
        }
    }

    /// Whether a pack is not asked any more.
    pub fn is_struck(&self, pack: PackId) -> bool {
        self.lock().struck.get(&pack).is_some_and(|strikes| *strikes >= STRIKES)
    }

    /// The first byte of a range took this long.
    pub(crate) fn measured(&self, seconds: f64) {
        let mut cache = self.lock();
        let before = cache.first_byte_seconds.unwrap_or(seconds);
        cache.first_byte_seconds = Some(before * 0.9 + seconds * 0.1);
    }

    /// How long the first byte of a range takes, as far as any was read.
    pub fn first_byte_time(&self) -> Option<Duration> {
        self.lock().first_byte_seconds.map(Duration::from_secs_f64)
    }

    /// Where blocks are, as far as the tier has them and can say so. Only what fails at the manifest is an error; an index
    /// that cannot be had makes its blocks misses.
    pub async fn locate(
        &self,
        namespace: NamespaceId,
        (group, coordinate): (Group, Coordinate),
        keys: &[BlockKey],
    ) -> Result<Vec<Option<Found>>, ColdError> {
        let known = self.manifest(namespace).await?;
        let now_ms = self.access.time().wall_ms();
        let (mut read, mut failed) = self.read_ahead(namespace, &known, keys).await;
        let mut found = Vec::with_capacity(keys.len());
        let mut last: Option<Arc<PackIndex>> = None;
        for key in keys {
            let in_last = last.as_ref().and_then(|index| live(index, key, (group, coordinate), now_ms));
            if in_last.is_some() {
                found.push(in_last);
                continue;
            }
            let mut here = None;
            for pack in known.packs_with(key).filter(|pack| !self.is_struck(*pack)) {
                if failed.contains(&pack) {
                    continue;
                }
                let index = match self.remembered_index(pack) {
                    Some(index) => index,
                    None if read >= self.options.indexes_a_lookup => continue,
                    None => {
                        read += 1;
                        match self.index(namespace, pack).await {
                            Ok(index) => index,
                            Err(_) => {
                                failed.insert(pack);
                                continue;
                            }
                        }
                    }
                };
                here = live(&index, key, (group, coordinate), now_ms);
                if here.is_some() {
                    last = Some(index);
                    break;
                }
            }
            found.push(here);
        }
        Ok(found)
    }

    /// Reads the indexes that a look-up is about to need, several at once: the first of those that may have a key, for each key of which
    /// none is remembered. Gives how many were read, and which of them could not be.
    async fn read_ahead(
        &self,
        namespace: NamespaceId,
        known: &Known,
        keys: &[BlockKey],
    ) -> (usize, BTreeSet<PackId>) {
        let mut ahead: BTreeSet<PackId> = BTreeSet::new();
        for key in keys {
            if ahead.len() >= self.options.indexes_a_lookup {
                break;
            }
            let mut packs = known.packs_with(key).filter(|pack| !self.is_struck(*pack)).peekable();
            let first = packs.peek().copied();
            let is_known = |pack: PackId| ahead.contains(&pack) || self.lock().indexes.contains_key(&pack);
            if let Some(first) = first.filter(|_| !packs.any(is_known)) {
                ahead.insert(first);
            }
        }
        let count = ahead.len();
        let reads =
            ahead.into_iter().map(|pack| async move { (pack, self.index(namespace, pack).await.is_err()) });
        let read: Vec<(PackId, bool)> =
            // ends: the time of each request (`patience`)
            futures_util::stream::iter(reads).buffer_unordered(INDEXES_AT_ONCE).collect().await;
        (count, read.into_iter().filter(|(_, failed)| *failed).map(|(pack, _)| pack).collect())
    }

    /// Changes a manifest by compare-and-set, as often as it takes within the bound. `change` says what to make of the
    /// manifest that it is given, or that nothing is to be done. What another writer does is never lost.
    pub async fn change<T>(
        &self,
        namespace: NamespaceId,
        mut change: impl FnMut(&mut Manifest) -> Result<Option<T>, ColdError>,
    ) -> Result<Option<T>, ColdError> {
        self.expect_conditions().await?;
        for attempt in 0..self.options.swaps.max(1) {
            let known = self.read_manifest(namespace).await?;
            let mut manifest = known.manifest.clone();
            let Some(done) = change(&mut manifest)? else { return Ok(None) };
            manifest.generation = manifest.next_generation();
            manifest.written_ms = self.access.time().wall_ms();
            if known.tag.is_none() {
                manifest.begun_ms = manifest.written_ms;
            }
            if self.swap(&known, manifest).await? {
                return Ok(Some(done));
            }
            self.access.wait_for_turn(attempt).await;
        }
        Err(ColdError::Contended(namespace))
    }

    /// Puts a manifest in the place of another one; says whether that was still there.
    async fn swap(&self, known: &Known, manifest: Manifest) -> Result<bool, ColdError> {
        let namespace = manifest.namespace;
        let name = names::manifest(namespace);
        let bytes = manifest.encode().map_err(|error| match error {
            FormatError::Rule(NO_ROOM) => ColdError::Full(namespace),
            FormatError::Rule(NO_ROOM_TO_WAIT) => ColdError::Waiting(namespace),
            error => ColdError::Object(name.clone(), error),
        })?;
        let condition = known.tag.clone().map_or(Condition::Absent, Condition::Is);
        let (at, asked) = (self.access.time().now(), self.step());
        let mut changing = Changing { tier: self, namespace, asked, is_settled: false };
        match self.access.put(&name, &[Bytes::from(bytes)], condition).await {
            Ok(tag) => {
                changing.has_happened();
                let seen = Seen { at, asked, answered: self.step(), is_change: true };
                self.keep(&Arc::new(Known::new(manifest, Some(tag), seen)));
                Ok(true)
            }
            // Another writer, or an attempt of ours whose answer was lost: the next look says which.
            Err(ColdError::Bucket(_, Fault::Changed)) => {
                changing.is_settled = true;
                Ok(false)
            }
            // A server that refuses a manifest before it has read all of it may close the connection, and its answer is lost.
            Err(error @ ColdError::Bucket(_, Fault::Unreachable(_) | Fault::Failed(_))) => {
                if self.read_manifest(namespace).await?.tag == known.tag {
                    return Err(error);
                }
                changing.is_settled = true;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

/// A put of a manifest that is under way. If it is given up before it is known what became of it, that is remembered.
struct Changing<'a> {
    tier: &'a Tier,
    namespace: NamespaceId,
    asked: u64,
    is_settled: bool,
}

impl Changing<'_> {
    /// It has, so puts that were asked for before it cannot any more.
    fn has_happened(&mut self) {
        self.is_settled = true;
        let mut cache = self.tier.lock();
        if cache.unsettled.get(&self.namespace).is_some_and(|asked| *asked < self.asked) {
            cache.unsettled.remove(&self.namespace);
        }
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if !self.is_settled {
            let mut cache = self.tier.lock();
            let last = cache.unsettled.entry(self.namespace).or_default();
            *last = self.asked.max(*last);
        }
    }
}

/// A block of an index that has not expired.
fn live(
    index: &Arc<PackIndex>,
    key: &BlockKey,
    (group, coordinate): (Group, Coordinate),
    now_ms: u64,
) -> Option<Found> {
    let place = index.find(key, group, coordinate)?;
    let expires_ms = index.run(place.run)?.run.expires_ms;
    (expires_ms == 0 || expires_ms > now_ms).then(|| Found { index: Arc::clone(index), place })
}
