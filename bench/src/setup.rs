//! What every benchmark needs first: a store in its directory (`scratch`), a model, keys, and blocks in the store.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use kvarts_contract::api::{BlockOutcome, Durability, KvStore, Parent, Placed, PutRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::spec::shipped;
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, Layout, ModelSpec, NamespaceId,
};
use kvarts_store::engine::{Options, Store};
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::{Features, IoChoice};

use super::report::Report;
use kvarts_terminal::Failure;

/// What all benchmarks take.
#[derive(Args, Debug, Clone)]
pub(super) struct Common {
    /// Parent of the store's directory [default: the current directory]
    #[arg(long)]
    pub(super) dir: Option<PathBuf>,
    /// Keep the store at the end
    #[arg(long)]
    pub(super) keep: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Rounds in which the contestants take turns
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(3..=1000))]
    pub(super) pairs: u32,
    /// Runtime of the executors: auto, glommio or threads
    #[arg(long, default_value = "auto")]
    pub(super) runtime: RuntimeChoice,
    /// Interface to the disks: auto, ring or pool
    #[arg(long, default_value = "auto")]
    pub(super) io: IoChoice,
    /// Features of io_uring that are not used, separated by commas
    #[arg(long)]
    pub(super) io_disable: Option<Features>,
    /// Number of executors, and of threads of the bare loop
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) executors: u16,
    /// Cores to which the executors and the bare loop's threads are pinned, in turn
    #[arg(long, value_delimiter = ',')]
    pub(super) cores: Vec<usize>,
}

/// Opens a store in `directory`, and makes the directories above it: the engine refuses those, which may be a disk that is not mounted,
/// but here all of them are the run's own.
pub(super) fn open(common: &Common, directory: &Path, store: Options) -> Result<Home, Failure> {
    open_all(common, vec![directory.to_owned()], store)
}

/// The same in several directories.
pub(super) fn open_all(common: &Common, directories: Vec<PathBuf>, store: Options) -> Result<Home, Failure> {
    for above in directories.iter().filter_map(|directory| directory.parent()) {
        std::fs::create_dir_all(above)
            .map_err(|error| Failure::User(format!("{}: {error}", above.display())))?;
    }
    let options = HomeOptions {
        directories,
        io: common.io,
        features: common.io_disable.clone().unwrap_or_default(),
        runtime: common.runtime,
        cores: common.cores.clone(),
        store: Options { executors: usize::from(common.executors), ..store },
        ..HomeOptions::default()
    };
    Home::open(&options).map_err(Failure::user)
}

/// The facts that every report begins with.
pub(super) fn describe(report: &mut Report, common: &Common, home: &Home) -> Result<(), Failure> {
    let io = block_on(home.store().io()).map_err(Failure::user)?;
    if let Some((facts, _)) = io.first() {
        report.fact("backend", facts.backend);
        let on = facts.features.iter().filter(|(_, state)| state.is_ok()).map(|(name, _)| *name);
        report.fact("features", on.collect::<Vec<_>>().join(","));
    }
    let runtime = home.notes().iter().find_map(|note| note.strip_prefix("executors run on "));
    report.fact("runtime", runtime.unwrap_or("unknown"));
    report.fact("executors", common.executors);
    report.fact("pairs", common.pairs);
    Ok(())
}

/// A namespace and the blocks that are put in it.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub(super) name: String,
    pub(super) namespace: NamespaceId,
    pub(super) group: Group,
    pub(super) coordinate: Coordinate,
    pub(super) shape: Arc<BlockShape>,
    pub(super) block_tokens: u32,
}

/// The identity of a model in a benchmark.
pub(super) fn identity(name: &str, block_tokens: u32, geometry: &Geometry) -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text(name),
        revision: text("bench"),
        tokenizer: text("bench"),
        adapter: text("none"),
        kv_dtype: text("bench"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("bench"), layout: text("canonical"), version: text("1") },
        block_tokens,
        spec_fingerprint: geometry.fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

impl Common {
    /// What a benchmark needs of it that has no use for the rest.
    pub(super) fn quiet(dir: Option<PathBuf>, json: bool, pairs: u32) -> Self {
        let (runtime, io) = (RuntimeChoice::Auto, IoChoice::default());
        Self { dir, keep: false, json, pairs, runtime, io, io_disable: None, executors: 1, cores: Vec::new() }
    }
}

/// A shipped model.
pub(super) fn model(name: &str) -> Result<ModelSpec, Failure> {
    shipped::load(name).ok_or_else(|| {
        Failure::User(format!("no shipped model is named `{name}`; `kvarts model list` lists them"))
    })
}

impl Subject {
    /// Makes a model's first group known to the store, whole (not shared out among ranks).
    pub(super) fn new(store: &Store, spec: &ModelSpec, block_tokens: Option<u32>) -> Result<Self, Failure> {
        Self::of_rank(store, spec, block_tokens, 1)
    }

    /// The same, what the first of `ranks` tensor-parallel ranks holds.
    pub(super) fn of_rank(
        store: &Store,
        spec: &ModelSpec,
        block_tokens: Option<u32>,
        ranks: u16,
    ) -> Result<Self, Failure> {
        let block_tokens = block_tokens.unwrap_or(spec.default_block_tokens());
        let geometry = spec.geometry();
        let group = geometry.groups().first().map_or(Group(0), |group| group.group);
        let coordinate = geometry.coordinate(group, ranks, 0).map_err(Failure::user)?;
        let shape = geometry.shape(group, coordinate, block_tokens).map_err(Failure::user)?;
        let identity = identity(spec.name(), block_tokens, geometry);
        let namespace = store.register(&identity, geometry).map_err(Failure::user)?;
        let (name, shape) = (spec.name().to_owned(), Arc::new(shape));
        Ok(Self { name, namespace, group, coordinate, shape, block_tokens })
    }

    /// A durable put of these blocks from `memory`, which holds them in canonical order.
    pub(super) fn put(
        &self,
        keys: Vec<BlockKey>,
        parent: Parent,
        memory: SharedBuf,
        layout: Option<Layout>,
    ) -> Result<PutRequest, Failure> {
        let blocks = keys.len() as u32;
        Ok(PutRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            parent,
            first_block: None,
            keys,
            from: Placed::blocks(&self.shape, memory, blocks).map_err(Failure::user)?,
            layout,
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        })
    }

    /// Stores blocks under these keys, `batch` in one put, each put a continuation of the one before.
    pub(super) fn fill(
        &self,
        store: &Store,
        keys: &[BlockKey],
        batch: usize,
        layout: Option<Layout>,
    ) -> Result<(), Failure> {
        let memory = noise(self.shape.block_bytes() as usize * batch)?;
        let mut parent = Parent::Root;
        for (done, keys_put) in keys.chunks(batch).enumerate() {
            progress(&format!("storing: {} of {} blocks", done * batch, keys.len()));
            let len = self.shape.block_bytes() as usize * keys_put.len();
            let from = memory
                .slice(0, len)
                .ok_or_else(|| Failure::user("the memory of the benchmark is too small"))?;
            let request = self.put(keys_put.to_vec(), parent, from, layout)?;
            expect_stored(&block_on(store.put(request)))?;
            parent = keys_put.last().map_or(Parent::Root, |last| Parent::Key(*last));
        }
        progress("");
        Ok(())
    }
}

type PutAnswer = Result<
    Result<kvarts_contract::api::PutReply, kvarts_contract::error::Error>,
    kvarts_contract::ticket::Abandoned,
>;

/// Whether every block of a put was stored.
pub(super) fn expect_stored(answer: &PutAnswer) -> Result<(), Failure> {
    match answer {
        Ok(Ok(reply)) => {
            let mut others = reply.outcomes.iter().filter(|outcome| **outcome != BlockOutcome::Stored);
            let Some(first) = others.next() else { return Ok(()) };
            let (count, all) = (others.count() + 1, reply.outcomes.len());
            Err(Failure::User(format!(
                "{count} of {all} blocks of a put were not stored; the outcome of the first of these: \
                {first:?}"
            )))
        }
        Ok(Err(error)) => Err(Failure::user(error)),
        Err(_) => Err(Failure::user("the store has stopped")),
    }
}

/// Different keys for different numbers.
pub(super) fn key(series: u64, number: u64) -> BlockKey {
    let mut state = series.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.wrapping_mul(0xd134_2543_de82_ef95);
    let mut bytes = [0; 32];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&mix(&mut state).to_le_bytes());
    }
    BlockKey(bytes)
}

/// The next number of a sequence that looks random (splitmix64).
pub(super) fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Memory of this many bytes, or why there is none.
pub(super) fn memory(len: usize) -> Result<SharedBuf, Failure> {
    let region = Region::anonymous(len).map_err(|error| {
        Failure::User(format!("{} MiB of memory could not be allocated: {error}", len >> 20))
    })?;
    SharedBuf::new(&region, 0, len).ok_or_else(|| Failure::user("the memory of the benchmark is too small"))
}

/// Memory full of bytes that nothing compresses.
pub(super) fn noise(len: usize) -> Result<SharedBuf, Failure> {
    let buf = memory(len)?;
    noise_into(&buf);
    Ok(buf)
}

/// Fills memory with it.
pub(super) fn noise_into(buf: &SharedBuf) {
    let (len, mut state, mut page) = (buf.len(), 1, vec![0u8; 1 << 16]);
    for at in (0..len).step_by(page.len()) {
        let here = page.len().min(len - at);
        for word in page.chunks_exact_mut(8) {
            word.copy_from_slice(&mix(&mut state).to_le_bytes());
        }
        buf.copy_in(at, &page[..here]);
    }
}

/// Says on a terminal what is being done; nothing where output is not looked at.
pub(crate) fn progress(what: &str) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // A terminal that is gone misses nothing.
        let _ = write!(err, "\r\x1b[K{what}").and_then(|()| err.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_different_numbers_and_series_differ() {
        let mut keys: Vec<_> = (0..3).flat_map(|series| (0..1000).map(move |n| key(series, n))).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 3000);
    }
}
