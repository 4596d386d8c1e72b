//! Models that clients registered, each for the tenant that did.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use kvarts_contract::api::KvStore;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};

use super::Caller;
use kvarts_wire::limits::LAYER_MEMORY;

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

impl Model {
    /// It is put to, looked up or read.
    pub fn used(&self, now_ms: u64) {
        self.last_used.fetch_max(now_ms, Ordering::Relaxed);
    }

    /// When it last was, in milliseconds since 1970; 0 if it was not since it was registered.
    pub fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::Relaxed)
    }

    /// The bytes of a block of a column; refused if the model has no such state.
    pub fn shape(&self, group: Group, coordinate: Coordinate) -> Result<BlockShape, Reason> {
        Ok(self.geometry.shape(group, coordinate, self.identity.block_tokens)?)
    }
}

/// The models of all tenants.
#[derive(Debug, Default)]
pub struct Models(RwLock<BTreeMap<(u32, NamespaceId), Arc<Model>>>);

impl Models {
    /// Registers a model with the store, for the caller's tenant. `listed` is its bytes in a list of models.
    pub fn register(
        &self,
        store: &dyn KvStore,
        caller: &Caller,
        identity: Identity,
        geometry: Geometry,
        (listed, most): (u64, ModelLimits),
    ) -> Result<Arc<Model>, Error> {
        let tenant = caller.tenant.number;
        let id = identity.namespace_id().map_err(Reason::from)?;
        if let Some(model) = self.find(caller, id)
            && model.geometry == geometry
        {
            return Ok(model);
        }
        let memory = geometry.layers().len() as u64 * LAYER_MEMORY + listed;
        let known = self.all(caller);
        let others = known.iter().filter(|model| model.namespace != id);
        let (listed_all, memory_all) =
            others.fold((listed, memory), |(l, m), model| (l + model.listed, m + model.memory));
        if known.len() >= most.count || listed_all > most.listed {
            return Err(Reason::TooMany("models").into());
        }
        if memory_all > most.memory {
            return Err(Reason::TooMany("layers of models").into());
        }
        let namespace = store.register(&identity, &geometry)?;
        let model =
            Arc::new(Model { namespace, identity, geometry, listed, memory, last_used: AtomicU64::new(0) });
        let mut models = self.0.write().unwrap_or_else(PoisonError::into_inner);
        models.insert((tenant, namespace), Arc::clone(&model));
        Ok(model)
    }

    /// The caller's model of this name. Another tenant's is as unknown as one that was never registered.
    pub fn get(&self, caller: &Caller, namespace: NamespaceId) -> Result<Arc<Model>, Reason> {
        self.find(caller, namespace).ok_or(Reason::UnknownNamespace(namespace))
    }

    /// What the models of a tenant take: how many they are, their bytes in a list, and in memory.
    pub fn used(&self, tenant: u32) -> ModelLimits {
        let of = |(count, listed, memory), model: &Arc<Model>| {
            (count + 1, listed + model.listed, memory + model.memory)
        };
        let (count, listed, memory) = self.of_tenant(tenant).iter().fold((0, 0, 0), of);
        ModelLimits { count, listed, memory }
    }

    /// All models of the caller's tenant.
    pub fn all(&self, caller: &Caller) -> Vec<Arc<Model>> {
        self.of_tenant(caller.tenant.number)
    }

    fn of_tenant(&self, tenant: u32) -> Vec<Arc<Model>> {
        let models = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let first = (tenant, NamespaceId([0; 32]));
        let last = (tenant, NamespaceId([0xff; 32]));
        models.range(first..=last).map(|(_, model)| Arc::clone(model)).collect()
    }

    fn find(&self, caller: &Caller, namespace: NamespaceId) -> Option<Arc<Model>> {
        let models = self.0.read().unwrap_or_else(PoisonError::into_inner);
        models.get(&(caller.tenant.number, namespace)).cloned()
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
        let (namespace, last_used) = (NamespaceId([3; 32]), AtomicU64::new(0));
        Arc::new(Model { namespace, identity, geometry, listed: 64, memory: 64, last_used })
    }
}
