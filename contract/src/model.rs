//! Blocks of one shipped model, by the tokens of prompts: the shortest way into a store.
//!
//! It stands on [`KvStore`] alone, so it works over a store in this process and over a client alike. Engines that split state
//! over ranks, keep pages of their own or have several groups make requests themselves.

use std::fmt;
use std::sync::Arc;

use kvarts_layout::identity::Arrangement;
use kvarts_layout::key::text_keys;
use kvarts_layout::spec::shipped;
use kvarts_layout::{BlockShape, Coordinate, Group, Identity, NamespaceId, Requirements};

use crate::api::{
    KvStore, MatchRequest, Parent, Placed, PutReply, PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadStream,
};
use crate::blocking::block_on;
use crate::buffers::{BufMut, SharedBuf};
use crate::error::{Error, Reason, ShapeCause};

/// Blocks of one model in one store, each with the state of the same number of tokens.
pub struct ModelBlocks {
    store: Arc<dyn KvStore>,
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    shape: BlockShape,
    block_tokens: u32,
    requirements: Requirements,
}

impl fmt::Debug for ModelBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelBlocks").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl ModelBlocks {
    /// Blocks of a shipped model, of one revision of its weights in one data type, with all heads on one rank, as `engine`
    /// arranges the bytes of a layer. Other engines, models, revisions, types and sizes of blocks never see them: name the
    /// engine's version, too, where it may arrange them in another way. A model with several groups of blocks (windows or
    /// states beside its stream) is refused.
    pub fn new(
        store: impl KvStore + 'static,
        engine: &str,
        model: &str,
        revision: &str,
        dtype: &str,
        block_tokens: u32,
    ) -> Result<Self, Error> {
        let unknown = || Reason::Config(format!("no shipped model is named `{model}`"));
        let spec = shipped::load(model).ok_or_else(unknown)?;
        let geometry = spec.geometry();
        let [only] = geometry.groups() else {
            let rule = "the model has several groups of blocks: use one request for each group";
            return Err(Reason::Shape(ShapeCause::Rule(rule)).into());
        };
        let group = only.group;
        let coordinate = geometry.coordinate(group, 1, 0).map_err(Reason::from)?;
        let shape = geometry.shape(group, coordinate, block_tokens).map_err(Reason::from)?;
        let requirements = spec.stored_requirements(block_tokens, 1);
        let requirements = requirements.map_err(|_| {
            Reason::Shape(ShapeCause::Rule(
                "blocks of the given number of tokens cannot be looked up: use another block_tokens",
            ))
        })?;
        let arrangement = Arrangement::new(engine, "canonical", "1");
        let identity = Identity::new(model, revision, dtype, arrangement, geometry, block_tokens);
        let namespace = store.register(&identity, geometry)?;
        Ok(Self { store: Arc::new(store), namespace, group, coordinate, shape, block_tokens, requirements })
    }

    /// Bytes of one block: all layers, one after the other.
    pub fn block_bytes(&self) -> usize {
        usize::try_from(self.shape.block_bytes()).unwrap_or(usize::MAX)
    }

    /// Stores the state of a prompt's whole blocks durably; a last block that is not full is not stored. `state` has the
    /// blocks one after the other, and must not change until this returns. Blocks that are there stay as they are.
    pub fn put(&self, tokens: &[u32], state: impl Into<SharedBuf>) -> Result<PutReply, Error> {
        let keys = text_keys(tokens, self.block_tokens);
        let from = Placed::blocks(&self.shape, state, keys.len() as u32)?;
        let put = PutRequest {
            parent: Parent::Root,
            first_block: Some(0),
            ..PutRequest::new(self.namespace, self.group, self.coordinate, keys, from)
        };
        block_on(self.store.put(put)).map_err(|_| Reason::Busy("the store is closing"))?
    }

    /// How many blocks of a prompt can be read from its beginning on. Nothing keeps them from being evicted.
    pub fn matched(&self, tokens: &[u32]) -> Result<u32, Error> {
        let keys = text_keys(tokens, self.block_tokens);
        let reply = self.store.match_prefix(&MatchRequest {
            namespace: self.namespace,
            keys: &keys,
            requirements: &self.requirements,
            recompute_tokens_max: 0,
            lease: None,
            plan: None,
        })?;
        Ok(reply.usable.longest.blocks)
    }

    /// Reads a prompt's first blocks, layer by layer, into memory of its own: at least one block.
    pub fn read_layers(&self, tokens: &[u32], blocks: u32) -> Result<Layers, Error> {
        let mut keys = text_keys(tokens, self.block_tokens);
        keys.truncate(blocks as usize);
        let blocks = keys.len() as u32;
        let mut memory = Vec::new();
        for layer in self.shape.layers() {
            let bytes = layer.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>() * u64::from(blocks);
            let no_room = |_| {
                Reason::Passing(format!(
                    "the {bytes} bytes of memory for a layer could not be \
                allocated"
                ))
            };
            memory
                .push(BufMut::zeroed(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(no_room)?.share());
        }
        let into = Placed::layers(&self.shape, memory.clone(), blocks)?;
        let request = ReadRequest::new(self.namespace, self.group, self.coordinate, keys, into);
        Ok(Layers { stream: self.store.read(request)?, memory, end: None })
    }
}

/// The layers of a read, in the order in which a model computes: each is complete and verified when it is handed out.
#[derive(Debug)]
pub struct Layers {
    stream: ReadStream,
    memory: Vec<SharedBuf>,
    end: Option<ReadEnd>,
}

impl Layers {
    /// How the read ended, once no layer comes any more. A block that could not be read ends the usable prefix before it: what is
    /// not usable by [`ReadEnd::usable_blocks`] and [`ReadEnd::usable_layers`] is to be computed again.
    pub fn end(&self) -> Option<&ReadEnd> {
        self.end.as_ref()
    }
}

/// One layer that arrived.
#[derive(Clone, Debug)]
pub struct LoadedLayer {
    /// Which layer of the model.
    pub layer: u32,
    /// How many blocks of the prompt are good, from the first on.
    pub blocks: u32,
    /// The layer of those blocks: part by part, the blocks one after the other in each.
    pub bytes: SharedBuf,
}

impl Iterator for Layers {
    type Item = LoadedLayer;

    fn next(&mut self) -> Option<LoadedLayer> {
        while self.end.is_none() {
            match self.stream.next_blocking() {
                ReadEvent::Layer { layer, blocks } => {
                    let bytes = self.memory.get(layer as usize)?.clone();
                    return Some(LoadedLayer { layer, blocks, bytes });
                }
                ReadEvent::End(end) => self.end = Some(end),
                ReadEvent::Block(_) | ReadEvent::Released => {}
            }
        }
        None
    }
}
