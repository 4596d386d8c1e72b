//! Models that clients registered, each for the tenant that did.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use kvarts_contract::api::KvStore;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId, Requirements};

use super::Caller;
use kvarts_store::engine::Store;
use kvarts_wire::busy;
use kvarts_wire::limits::{LAYER_MEMORY, REMEMBERED_MAX};

/// A model of one tenant.
#[derive(Debug)]
pub struct Model {
    /// Its name in all requests.
    pub namespace: NamespaceId,
    /// What decides its bytes.
    pub identity: Identity,
    /// What moves bytes.
    pub geometry: Geometry,
    /// Its bytes in a list of models.
    listed: u64,
    /// About what it takes in memory, here and in the store.
    memory: u64,
    /// When it was last put to, looked up or read, in milliseconds since 1970; 0 before that.
    last_used: AtomicU64,
    /// When it was last registered.
    registered: AtomicU64,
    /// What the latest match of it required.
    required: Mutex<Option<Requirements>>,
}

/// What a tenant may have of models.
#[derive(Clone, Copy, Debug)]
pub struct ModelLimits {
    /// How many.
    pub count: usize,
    /// Their bytes in a list.
    pub listed: u64,
    /// What they take in memory.
    pub memory: u64,
}

impl ModelLimits {
    fn with(self, model: &Arc<Model>) -> Self {
        let Self { count, listed, memory } = self;
        Self { count: count + 1, listed: listed + model.listed, memory: memory + model.memory }
    }

    fn without(self, model: &Arc<Model>) -> Self {
        let Self { count, listed, memory } = self;
        Self { count: count - 1, listed: listed - model.listed, memory: memory - model.memory }
    }

    fn is_within(self, most: Self) -> bool {
        self.count <= most.count && self.listed <= most.listed && self.memory <= most.memory
    }
}

impl Model {
    /// It is put to, looked up or read.
    pub fn used(&self, now_ms: u64) {
        self.last_used.fetch_max(now_ms, Ordering::Relaxed);
    }

    /// When it last was, in milliseconds since 1970; 0 if it was not since it was registered.
    pub fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::Relaxed)
    }

    /// A match requires this: which groups, which parts of them, and of which only the last blocks.
    pub fn requires(&self, requirements: &Requirements) {
        let mut required = self.required.lock().unwrap_or_else(PoisonError::into_inner);
        if required.as_ref() != Some(requirements) {
            *required = Some(requirements.clone());
        }
    }

    /// What the latest match of it required: what its engines need of a prefix. `None` where none came since it was registered.
    pub fn required(&self) -> Option<Requirements> {
        self.required.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// When it was last used or registered.
    fn touched(&self) -> u64 {
        self.last_used().max(self.registered.load(Ordering::Relaxed))
    }

    /// The bytes of a block of a column; refused if the model has no such state.
    pub fn shape(&self, group: Group, coordinate: Coordinate) -> Result<BlockShape, Reason> {
        Ok(self.geometry.shape(group, coordinate, self.identity.block_tokens)?)
    }
}

/// The models of all tenants.
#[derive(Debug, Default)]
pub struct Models(RwLock<Tables>);

#[derive(Debug, Default)]
struct Tables {
    models: BTreeMap<(u32, NamespaceId), Arc<Model>>,
    /// Tenants that are gone: what still runs for them registers nothing more.
    gone: BTreeSet<u32>,
}

impl Models {
    /// Registers a model with the store, for the caller's tenant. `listed` is its bytes in a list of models. Where there is no
    /// room, those that nothing uses go, the one that was not used for longest first: its clients register it again.
    pub fn register(
        &self,
        store: &Store,
        caller: &Caller,
        identity: Identity,
        geometry: Geometry,
        (listed, most, now_ms): (u64, ModelLimits, u64),
    ) -> Result<Arc<Model>, Error> {
        let id = identity.namespace_id().map_err(Reason::from)?;
        if identity.tenant_salt != caller.tenant.salt {
            return Err(Reason::Bug("a model has the salt of another tenant").into());
        }
        if let Some(model) = self.find(caller, id)
            && model.geometry == geometry
        {
            model.registered.fetch_max(now_ms, Ordering::Relaxed);
            return Ok(model);
        }
        let memory = geometry.layers().len() as u64 * LAYER_MEMORY + listed;
        if listed > most.listed || memory > most.memory || most.count == 0 {
            return Err(Reason::TooMany("layers of models").into());
        }
        // Held over all of it: what goes to make room is forgotten by the store, too, and may be registered again meanwhile.
        let mut tables = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if tables.gone.contains(&caller.tenant.number) {
            return Err(Reason::Denied("the tenant was removed from the configuration".to_owned()).into());
        }
        tables.make_room(store, caller, id, ModelLimits { count: 1, listed, memory }, most)?;
        if !store.knows(id) && store.namespace_count(&identity.tenant_salt) >= REMEMBERED_MAX {
            return Err(Reason::Busy(busy::MODELS_REMEMBERED).into());
        }
        let namespace = store.register(&identity, &geometry)?;
        let (last_used, registered) = (AtomicU64::new(0), AtomicU64::new(now_ms));
        let required = Mutex::default();
        let model = Model { namespace, identity, geometry, listed, memory, last_used, registered, required };
        let model = Arc::new(model);
        tables.models.insert((caller.tenant.number, namespace), Arc::clone(&model));
        Ok(model)
    }

    /// The caller's model of this name. Another tenant's is as unknown as one that was never registered.
    pub fn get(&self, caller: &Caller, namespace: NamespaceId) -> Result<Arc<Model>, Reason> {
        self.find(caller, namespace).ok_or(Reason::UnknownNamespace(namespace))
    }

    /// What the models of a tenant take: how many they are, their bytes in a list, and in memory.
    pub fn used(&self, tenant: u32) -> ModelLimits {
        let tables = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let nothing = ModelLimits { count: 0, listed: 0, memory: 0 };
        tables.of_tenant(tenant).fold(nothing, |sum, model| sum.with(model))
    }

    /// All models of the caller's tenant.
    pub fn all(&self, caller: &Caller) -> Vec<Arc<Model>> {
        let tables = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let is_callers = |model: &&Arc<Model>| model.identity.tenant_salt == caller.tenant.salt;
        tables.of_tenant(caller.tenant.number).filter(is_callers).map(Arc::clone).collect()
    }

    /// Takes out the models of tenants that are gone. What the store has of them stays.
    pub fn forget(&self, store: &Store, tenants: &[u32]) {
        let mut tables = self.0.write().unwrap_or_else(PoisonError::into_inner);
        tables.gone.extend(tenants);
        let gone: Vec<_> = tables.models.extract_if(.., |(tenant, _), _| tenants.contains(tenant)).collect();
        // One that came with the same salt may have registered the same.
        let kept: BTreeSet<NamespaceId> = tables.models.keys().map(|(_, namespace)| *namespace).collect();
        for (_, model) in gone.iter().filter(|(_, model)| !kept.contains(&model.namespace)) {
            store.forget_unused(model.namespace);
        }
    }

    /// Of two ways by which tenants are kept apart both are looked at: whose number the model is under, and whose salt it has.
    fn find(&self, caller: &Caller, namespace: NamespaceId) -> Option<Arc<Model>> {
        let tables = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let model = tables.models.get(&(caller.tenant.number, namespace))?;
        (model.identity.tenant_salt == caller.tenant.salt).then(|| Arc::clone(model))
    }
}

impl Tables {
    fn of_tenant(&self, tenant: u32) -> impl Iterator<Item = &Arc<Model>> {
        let first = (tenant, NamespaceId([0; 32]));
        let last = (tenant, NamespaceId([0xff; 32]));
        self.models.range(first..=last).map(|(_, model)| model)
    }

    /// Has those models go that are not used, until there is room for one more, called `id`.
    fn make_room(
        &mut self,
        store: &Store,
        caller: &Caller,
        id: NamespaceId,
        more: ModelLimits,
        most: ModelLimits,
    ) -> Result<(), Error> {
        let tenant = caller.tenant.number;
        let others = || self.of_tenant(tenant).filter(move |model| model.namespace != id);
        let mut sum = others().fold(more, |sum, model| sum.with(model));
        // A call or a lease has the model, too.
        let mut unused: Vec<(u64, NamespaceId)> = others()
            .filter(|model| Arc::strong_count(model) == 1)
            .map(|model| (model.touched(), model.namespace))
            .collect();
        unused.sort_unstable();
        let mut unused = unused.into_iter();
        while !sum.is_within(most) {
            let (_, oldest) = unused.next().ok_or(Reason::Busy(busy::MODELS_IN_USE))?;
            if let Some(model) = self.models.remove(&(tenant, oldest)) {
                sum = sum.without(&model);
                if !self.models.keys().any(|(_, namespace)| *namespace == oldest) {
                    store.forget_unused(oldest);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A model of flat pages.
    pub(crate) fn model() -> Arc<Model> {
        let geometry = Geometry::opaque(4096).unwrap();
        let identity = kvarts_layout::identity::IdentityForm::from_json(
            r#"{"model": "pages", "revision": "1", "kv-dtype": "u8", "block-tokens": 16,
                "arrangement": {"engine": "test", "layout": "flat", "version": "1"}}"#,
        );
        let identity = identity.unwrap().of(&geometry).unwrap();
        let (namespace, last_used, registered) = (NamespaceId([3; 32]), AtomicU64::new(0), AtomicU64::new(0));
        let required = Mutex::default();
        Arc::new(Model {
            namespace,
            identity,
            geometry,
            listed: 64,
            memory: 64,
            last_used,
            registered,
            required,
        })
    }
}
