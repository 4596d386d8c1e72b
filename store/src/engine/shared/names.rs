//! Namespaces and specs by their ids and by the short local ids that records carry.
//!
//! Local ids are given once for the whole store and never reused while it lives, so a local id means the same in
//! every shard and segment. What a local id means is on disk, in the same segment, before the first record that
//! uses it: see `log`. A namespace is refused when its identity names another spec than the one given with it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kvarts_layout::format::body::Definition;
use kvarts_layout::identity::{TenantSalt, namespace_of};
use kvarts_layout::spec::Geometry;
use kvarts_layout::{BlockShape, Coordinate, Fingerprint, Group, Identity, NamespaceId};
use kvarts_planner::cost::Prefill;
use kvarts_planner::keep;

use kvarts_contract::error::{IdentityCause, Reason};
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use kvarts_contract::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Shapes that are kept of a namespace: a model has as many as it has groups and ranks, and may be asked for more.
const SHAPES_MAX: usize = 256;

/// What moves the bytes of a model, as the store keeps it.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) id: Fingerprint,
    pub(crate) local: u32,
    pub(crate) canonical: Vec<u8>,
    pub(crate) geometry: Geometry,
}

/// One registered identity.
#[derive(Debug)]
pub(crate) struct Namespace {
    pub(crate) id: NamespaceId,
    pub(crate) local: u32,
    pub(crate) canonical: Vec<u8>,
    pub(crate) block_tokens: u32,
    pub(crate) spec: Arc<Spec>,
    /// Namespaces of one tenant have one.
    pub(crate) salt: TenantSalt,
    /// The shapes of its blocks by group and coordinate: they go with it.
    shapes: Mutex<BTreeMap<(u32, u64), Arc<BlockShape>>>,
    /// Bytes that are kept of a token.
    token_bytes: u64,
    /// How long its engine computes a token, in nanoseconds; 0: not known. It is told with each plan that is asked for; until then
    /// it is what a model that is known by its name or spec usually takes.
    token_ns: AtomicU64,
    /// Whether anything on disk may be of it: a put began, or recovery found it there.
    used: AtomicBool,
    /// Deletes in it that have ended since the store was opened.
    deletes: AtomicU64,
}

impl Namespace {
    /// As it is after a delete: under another short id.
    fn renumbered(&self, local: u32) -> Self {
        Self {
            id: self.id,
            local,
            canonical: self.canonical.clone(),
            block_tokens: self.block_tokens,
            spec: Arc::clone(&self.spec),
            salt: self.salt.clone(),
            shapes: Mutex::default(),
            token_bytes: self.token_bytes,
            token_ns: AtomicU64::new(self.token_ns.load(Ordering::Relaxed)),
            // The delete is on disk.
            used: AtomicBool::new(true),
            deletes: AtomicU64::new(self.deletes.load(Ordering::SeqCst)),
        }
    }

    /// A put of it begins: from now on something on disk may be of it.
    pub(crate) fn note_put(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// Of all deletes in it that have ended, a number that no other count of them has, nor what is registered under its name when it was
    /// forgotten, nor the store when it is opened again as another `stream` of events. Never 0.
    pub(crate) fn deletes(&self, stream: u64) -> u64 {
        let named = u64::from(self.local) << 32;
        stream.wrapping_add(named).wrapping_add(self.deletes.load(Ordering::SeqCst)).max(1)
    }

    /// Whether anything on disk may be of it.
    pub(crate) fn is_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    /// Notes how long its engine computes.
    pub(crate) fn note_times(&self, times: &dyn Prefill) {
        let Some(token_ns) = keep::token_ns(times) else { return };
        self.token_ns.store(token_ns, Ordering::Relaxed);
    }

    /// What each byte of its blocks is worth: those of all groups and coordinates are, together, what a prefix takes.
    pub(crate) fn worth(&self) -> i8 {
        let token_ns = Some(self.token_ns.load(Ordering::Relaxed)).filter(|token_ns| *token_ns > 0);
        keep::worth(self.token_bytes, token_ns)
    }

    /// The shape of a block of this group at this coordinate, or why the model has none.
    pub(crate) fn shape(&self, group: Group, coordinate: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        let mut shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (group.0, coordinate.to_u64());
        if let Some(shape) = shapes.get(&key) {
            return Ok(Arc::clone(shape));
        }
        let shape = self.spec.geometry.shape(group, coordinate, self.block_tokens);
        let shape = Arc::new(shape?);
        if shapes.len() < SHAPES_MAX {
            shapes.insert(key, Arc::clone(&shape));
        }
        Ok(shape)
    }

    /// The definitions that a segment needs before records of this namespace, spec first.
    pub(crate) fn definitions(&self) -> [Definition; 2] {
        let definition =
            |local, id, canonical: &Vec<u8>| Definition { local, id, canonical: canonical.clone() };
        [
            definition(self.spec.local, self.spec.id.0, &self.spec.canonical),
            definition(self.local, self.id.0, &self.canonical),
        ]
    }
}

#[derive(Debug, Default)]
struct Tables {
    namespaces: BTreeMap<NamespaceId, Arc<Namespace>>,
    /// Short ids that mean a namespace, or one that is being deleted.
    locals: BTreeSet<u32>,
    /// The last of them that was given out.
    last_local: u32,
    specs: BTreeMap<Fingerprint, Arc<Spec>>,
    specs_by_local: BTreeMap<u32, Fingerprint>,
    /// The last short id of a spec that was given out.
    last_spec: u32,
    /// How long blocks live whose put does not say.
    default_ttls: BTreeMap<NamespaceId, Duration>,
    /// Namespaces whose delete has not been acknowledged: nothing is put in them.
    condemned: BTreeSet<NamespaceId>,
    /// Those of them whose delete is under way.
    deleting: BTreeSet<NamespaceId>,
}

impl Tables {
    fn spec(&mut self, id: Fingerprint, local: u32, canonical: &[u8]) -> Result<Arc<Spec>, Reason> {
        if let Some(spec) = self.specs.get(&id) {
            return Ok(Arc::clone(spec));
        }
        let geometry = Geometry::decode_canonical(canonical)?;
        if geometry.fingerprint() != id {
            return Err(Reason::SpecMismatch);
        }
        let spec = Arc::new(Spec { id, local, canonical: canonical.to_vec(), geometry });
        self.specs.insert(id, Arc::clone(&spec));
        self.specs_by_local.insert(local, id);
        self.last_spec = self.last_spec.max(local);
        Ok(spec)
    }

    /// A short id that no spec has ever had.
    fn next_spec(&self) -> u32 {
        self.last_spec.saturating_add(1)
    }

    /// Forgets a namespace of which nothing was ever put, and its spec if no other has that.
    fn forget_unused(&mut self, id: NamespaceId) -> bool {
        let Some(namespace) = self.namespaces.get(&id) else { return false };
        let is_kept = namespace.is_used()
            || self.condemned.contains(&id)
            || self.deleting.contains(&id)
            || self.default_ttls.contains_key(&id);
        if is_kept {
            return false;
        }
        let (local, spec) = (namespace.local, Arc::clone(&namespace.spec));
        self.namespaces.remove(&id);
        self.locals.remove(&local);
        if !self.namespaces.values().any(|other| Arc::ptr_eq(&other.spec, &spec)) {
            self.specs.remove(&spec.id);
            self.specs_by_local.remove(&spec.local);
        }
        true
    }

    fn namespace(&mut self, local: u32, canonical: &[u8], spec: Arc<Spec>) -> Result<Arc<Namespace>, Reason> {
        let id = namespace_of(canonical);
        if let Some(namespace) = self.namespaces.get(&id) {
            return Ok(Arc::clone(namespace));
        }
        let identity = Identity::decode(canonical)?;
        if identity.spec_fingerprint != spec.id {
            return Err(Reason::SpecMismatch);
        }
        let block_tokens = identity.block_tokens;
        spec.geometry.check_block_tokens(block_tokens)?;
        let token_bytes = keep::token_bytes(&spec.geometry, block_tokens);
        let token_ns = keep::usual_token_ns(&identity.model, spec.id).unwrap_or(0);
        let (canonical, salt, shapes) = (canonical.to_vec(), identity.tenant_salt, Mutex::default());
        let namespace = Arc::new(Namespace {
            id,
            local,
            canonical,
            block_tokens,
            spec,
            salt,
            shapes,
            token_bytes,
            token_ns: AtomicU64::new(token_ns),
            used: AtomicBool::new(false),
            deletes: AtomicU64::new(0),
        });
        self.namespaces.insert(id, Arc::clone(&namespace));
        self.take_local(local);
        Ok(namespace)
    }

    /// A short id that no namespace has ever had.
    fn next_local(&self) -> u32 {
        self.last_local.saturating_add(1)
    }

    fn take_local(&mut self, local: u32) {
        self.locals.insert(local);
        self.last_local = self.last_local.max(local);
    }
}

/// All namespaces of a store. Usable from any thread; lookups share.
#[derive(Debug, Default)]
pub(crate) struct Names(RwLock<Tables>);

impl Names {
    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an identity known. Registering it again, with the same spec, gives the same namespace.
    pub(crate) fn register(
        &self,
        identity: &Identity,
        geometry: &Geometry,
    ) -> Result<Arc<Namespace>, Reason> {
        let canonical = identity.encode()?;
        let fingerprint = geometry.fingerprint();
        if identity.spec_fingerprint != fingerprint {
            return Err(Reason::SpecMismatch);
        }
        let mut tables = self.write();
        let local = tables.next_spec();
        let spec = tables.spec(fingerprint, local, &geometry.canonical_bytes())?;
        let local = tables.next_local();
        tables.namespace(local, &canonical, spec)
    }

    /// Takes in a spec that recovery found, under its own local id if that is free.
    pub(crate) fn recover_spec(&self, found: &Definition) -> Result<(), Reason> {
        let mut tables = self.write();
        // A segment that was damaged when others were made may give a short id that is another's by now.
        let is_taken = tables.specs_by_local.contains_key(&found.local);
        let local = if is_taken { tables.next_spec() } else { found.local };
        tables.spec(Fingerprint(found.id), local, &found.canonical).map(drop)
    }

    /// Whether the spec is known.
    pub(crate) fn has_spec(&self, id: [u8; 32]) -> bool {
        self.read().specs.contains_key(&Fingerprint(id))
    }

    /// Takes in an identity that recovery found, under its own local id if that is free. Its spec must have been
    /// taken in before.
    pub(crate) fn recover_identity(&self, found: &Definition) -> Result<Arc<Namespace>, Reason> {
        if namespace_of(&found.canonical).0 != found.id {
            return Err(Reason::Identity(IdentityCause::Rule(
                "a namespace id does not match the identity of the namespace",
            )));
        }
        let identity = Identity::decode(&found.canonical)?;
        let mut tables = self.write();
        let spec =
            tables.specs.get(&identity.spec_fingerprint).map(Arc::clone).ok_or(Reason::SpecMismatch)?;
        // A segment that was damaged when others were made may give a short id that is another's by now.
        let is_taken = tables.locals.contains(&found.local);
        let local = if is_taken { tables.next_local() } else { found.local };
        let namespace = tables.namespace(local, &found.canonical, spec)?;
        namespace.note_put();
        Ok(namespace)
    }

    /// Forgets a namespace of which nothing was ever put here; false if there may be something. Its short ids are not given
    /// out again: a put that begins in this moment is refused when it is done.
    pub(crate) fn forget_unused(&self, id: NamespaceId) -> bool {
        self.write().forget_unused(id)
    }

    /// Cuts a namespace off from what it holds: from now on it is known by another short id, and nothing can be put
    /// in it until [`Names::restore`]. Gives what it was; `None` if it is unknown or being deleted already.
    pub(crate) fn retire(&self, id: NamespaceId) -> Option<Arc<Namespace>> {
        let mut tables = self.write();
        let retired = tables.namespaces.get(&id).map(Arc::clone)?;
        if !tables.deleting.insert(id) {
            return None;
        }
        tables.condemned.insert(id);
        let fresh = retired.renumbered(tables.next_local());
        tables.take_local(fresh.local);
        tables.namespaces.insert(id, Arc::new(fresh));
        Some(retired)
    }

    /// Nothing is here any more of what a namespace was before its delete: its short id is forgotten, and never given out
    /// again.
    pub(crate) fn forget(&self, retired: &Namespace) {
        let mut tables = self.write();
        if tables.namespaces.get(&retired.id).is_none_or(|now| now.local != retired.local) {
            tables.locals.remove(&retired.local);
        }
    }

    /// A delete in it ends: what was read before, of whatever it was, may be what was deleted.
    pub(crate) fn note_delete(&self, id: NamespaceId) {
        if let Some(namespace) = self.get(id) {
            namespace.deletes.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Nothing can be put in a namespace until it is deleted again.
    pub(crate) fn condemn(&self, id: NamespaceId) {
        self.write().condemned.insert(id);
    }

    /// Ends a delete. If it was not acknowledged, nothing can be put in the namespace until it is deleted again: what
    /// is left of it may lie in some shards, and must not mix with what comes after.
    pub(crate) fn restore(&self, id: NamespaceId, acknowledged: bool) {
        let mut tables = self.write();
        tables.deleting.remove(&id);
        if acknowledged {
            tables.condemned.remove(&id);
        }
    }

    /// Why nothing can be put in a namespace, if so.
    pub(crate) fn closed(&self, id: NamespaceId) -> Option<Reason> {
        let tables = self.read();
        let busy = match (tables.condemned.contains(&id), tables.deleting.contains(&id)) {
            (false, _) => return None,
            (true, true) => "the namespace is being deleted",
            (true, false) => "the last delete of the namespace did not finish (repeat the delete first)",
        };
        Some(Reason::Busy(busy))
    }

    /// Whether this is what its id means now: not once it was deleted.
    pub(crate) fn is_current(&self, namespace: &Arc<Namespace>) -> bool {
        self.read().namespaces.get(&namespace.id).is_some_and(|now| now.local == namespace.local)
    }

    /// Sets how long blocks of a namespace live whose put does not say; false if it is unknown.
    pub(crate) fn set_default_ttl(&self, id: NamespaceId, ttl: Option<Duration>) -> bool {
        let mut tables = self.write();
        if !tables.namespaces.contains_key(&id) {
            return false;
        }
        match ttl {
            Some(ttl) => tables.default_ttls.insert(id, ttl),
            None => tables.default_ttls.remove(&id),
        };
        true
    }

    /// How long blocks of a namespace live whose put does not say.
    pub(crate) fn default_ttl(&self, id: NamespaceId) -> Option<Duration> {
        self.read().default_ttls.get(&id).copied()
    }

    /// All namespaces whose identity has this salt.
    pub(crate) fn of_salt(&self, salt: &TenantSalt) -> Vec<NamespaceId> {
        let tables = self.read();
        let has = |namespace: &&Arc<Namespace>| namespace.salt == *salt;
        tables.namespaces.values().filter(has).map(|namespace| namespace.id).collect()
    }

    /// The same, as they are.
    pub(crate) fn with_salt(&self, salt: &TenantSalt) -> Vec<Arc<Namespace>> {
        let tables = self.read();
        tables.namespaces.values().filter(|namespace| namespace.salt == *salt).map(Arc::clone).collect()
    }

    /// The namespaces of each salt.
    pub(crate) fn by_salt(&self) -> BTreeMap<Vec<u8>, Vec<NamespaceId>> {
        let mut all = BTreeMap::<Vec<u8>, Vec<NamespaceId>>::new();
        for (id, namespace) in &self.read().namespaces {
            match all.get_mut(&namespace.salt.0) {
                Some(of_salt) => of_salt.push(*id),
                None => drop(all.insert(namespace.salt.0.clone(), vec![*id])),
            }
        }
        all
    }

    /// How many short ids there are, and how many shapes are kept.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let tables = self.read();
        let ids = tables.locals.len() + tables.specs_by_local.len() + tables.condemned.len();
        let shapes = |one: &Arc<Namespace>| one.shapes.lock().unwrap_or_else(PoisonError::into_inner).len();
        (ids, tables.namespaces.values().map(shapes).sum())
    }

    /// The namespace under this id.
    pub(crate) fn get(&self, id: NamespaceId) -> Option<Arc<Namespace>> {
        self.read().namespaces.get(&id).map(Arc::clone)
    }
}
