//! A shard's directory, and logs that come and go over it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::arrange::LAYOUT_VERSION;
use kvarts_layout::format::Secret;
use kvarts_layout::format::body::{BlockName, Blocks, ENCODING_RAW, Parent, layout_code};
use kvarts_layout::format::record::Body;
use kvarts_layout::identity::{Arrangement, NONE, Quantisation, TenantSalt};
use kvarts_layout::spec::Geometry;
use kvarts_layout::{BlockKey, Coordinate, Group, Identity, Layout, StoreId};
use rustix::fs::FallocateFlags;

use crate::driver::Driver;
use crate::engine::compact::thin;
use crate::engine::recover::{RecoveryReport, recover};
use crate::engine::shard::Shard;
use crate::engine::shared::names::Namespace;
use crate::engine::shared::record_class::RecordForm;
use crate::engine::shared::{Birth, Shared};
use crate::engine::write::draft::{Draft, Payload, Written};
use crate::index::{Lookup, RecordCursor};
use crate::io::scratch::Scratch;
use crate::io::{Features, IoChoice, open_io};
use crate::rt::local::LocalExecutor;
use kvarts_contract::api::Placed;
use kvarts_contract::clock::{ManualClock, SeededEntropy};
use kvarts_contract::{
    buffers::{Arena, Region, SharedBuf},
    io_error::DirId,
};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy},
};

pub(in crate::engine) const SEGMENT_BYTES: u64 = 128 << 10;
pub(in crate::engine) const BLOCK_BYTES: u64 = 5000;
const CREATED_MS: u64 = 1_700_000_000_000;

/// One directory that outlives the logs over it.
pub(in crate::engine) struct Place {
    pub(in crate::engine) scratch: Scratch,
    pub(in crate::engine) clock: Arc<ManualClock>,
    pub(in crate::engine) store: StoreId,
    pub(in crate::engine) budget: u64,
    /// Whether the file system is known to make no holes.
    pub(in crate::engine) no_holes: bool,
}

/// A log over it, with the index that it fills.
#[derive(Clone)]
pub(in crate::engine) struct World {
    pub(in crate::engine) shard: Rc<Shard>,
    pub(in crate::engine) shared: Arc<Shared>,
}

/// What an index says of each block: where it is, what its record is, when it expires.
pub(in crate::engine) type Contents = BTreeMap<[u8; 12], (u16, u32, u32, u16, u16, u32)>;

impl Place {
    #[allow(clippy::disallowed_methods, reason = "a test makes what a store is made of")]
    pub(in crate::engine) fn new() -> Self {
        let store = StoreId(*b"a store of tests");
        let scratch = Scratch::new();
        // As making a store does before anything else.
        std::fs::create_dir(scratch.path().join("shard-0000")).unwrap();
        Self { scratch, clock: ManualClock::new(CREATED_MS), store, budget: 64 << 20, no_holes: false }
    }

    /// Runs `body` over a fresh log and index; what it leaves on disk is what a crash leaves.
    pub(in crate::engine) fn run<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        body: impl FnOnce(World) -> F + 'static,
    ) -> T {
        let clock: Arc<dyn Clock> = Arc::clone(&self.clock) as _;
        let entropy: Arc<dyn Entropy> = SeededEntropy::new(7);
        let dirs = [self.scratch.path().to_owned()];
        let io = open_io(IoChoice::Pool, &dirs, &Features::default()).unwrap();
        let io: Rc<RefCell<dyn crate::io::Io>> = Rc::new(RefCell::new(io));
        let executor = LocalExecutor::new(0, Rc::clone(&io), Arc::clone(&clock), Arc::clone(&entropy));
        let rt = executor.runtime();
        let driver = Rc::new(Driver::new(Rc::clone(&rt), io, crate::driver::Limits::default()));
        let pump = Rc::clone(&driver);
        rt.set_reaper(Box::new(move || pump.pump()));
        let birth = Birth {
            store: self.store,
            secret: Secret::new([self.store.0[0]; 32]),
            segment_bytes: SEGMENT_BYTES,
            created_ms: CREATED_MS,
            budget: self.budget,
            record_bytes_max: 64 << 10,
            shards: 1,
        };
        let shared = Arc::new(Shared::new(birth, clock, entropy));
        let arena = Arena::new(Region::anonymous(1 << 20).unwrap());
        let spawn = Box::new(move |task| rt.spawn(Class::Put, task));
        let begun = thin::in_background;
        let shard = Shard::new((0, DirId(0)), Arc::clone(&shared), (driver, arena), spawn, begun);
        shard.space.no_holes.set(self.no_holes);
        let out = Rc::new(RefCell::new(None));
        let kept = Rc::clone(&out);
        let task = body(World { shard, shared });
        executor.block_on(Box::pin(async move {
            let value = task.await;
            kept.borrow_mut().replace(value);
        }));
        out.take().unwrap()
    }

    /// Recovers into a fresh index and says what is in it then.
    pub(in crate::engine) fn recovered(&self) -> (RecoveryReport, Contents) {
        self.run(|world| async move {
            let report = recover(&world.shard.log).await.unwrap();
            (report, world.contents())
        })
    }

    pub(in crate::engine) fn file(&self, name: &str) -> PathBuf {
        self.scratch.path().join("shard-0000").join(name)
    }

    pub(in crate::engine) fn segment(&self, number: u32) -> PathBuf {
        self.file(&format!("segment-{number:08}"))
    }

    /// Gives pages of a file back, as an eviction does.
    pub(in crate::engine) fn punch(&self, file: &Path, offset: u64, bytes: u64) {
        let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, offset, bytes).unwrap();
    }

    /// Overwrites bytes of a file.
    pub(in crate::engine) fn damage(&self, file: &Path, offset: u64, bytes: &[u8]) {
        let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }
}

#[allow(clippy::disallowed_methods, reason = "a test looks at the files behind the store's back")]
pub(in crate::engine) fn contents_of(file: &Path) -> Vec<u8> {
    std::fs::read(file).unwrap()
}

#[allow(clippy::disallowed_methods, reason = "a test changes the files behind the store's back")]
pub(in crate::engine) fn remove(file: &Path) {
    std::fs::remove_file(file).unwrap();
}

fn identity(model: &str, geometry: &Geometry) -> Identity {
    Identity {
        model: model.into(),
        revision: "1".into(),
        tokenizer: NONE.into(),
        adapter: NONE.into(),
        kv_dtype: "bf16".into(),
        quantisation: Quantisation { recipe: NONE.into(), scales: NONE.into() },
        rope: NONE.into(),
        window: NONE.into(),
        arrangement: Arrangement { engine: "test".into(), layout: "pages".into(), version: "1".into() },
        block_tokens: 16,
        spec_fingerprint: geometry.fingerprint(),
        tenant_salt: TenantSalt::default(),
        extras: BTreeMap::new(),
    }
}

pub(in crate::engine) fn key(number: u64) -> BlockKey {
    let mut key = BlockKey::default();
    key.0[..8].copy_from_slice(&number.to_le_bytes());
    key
}

impl World {
    pub(in crate::engine) fn namespace(&self, model: &str) -> Arc<Namespace> {
        let geometry = Geometry::opaque(BLOCK_BYTES).unwrap();
        self.shared.names.register(&identity(model, &geometry), &geometry).unwrap()
    }

    /// Appends the blocks `first .. first + count` as one record.
    pub(in crate::engine) async fn append(&self, model: &str, first: u64, count: u64) -> Written {
        self.append_until(model, first, count, 0).await
    }

    pub(in crate::engine) async fn append_until(
        &self,
        model: &str,
        first: u64,
        count: u64,
        expires_ms: u64,
    ) -> Written {
        let namespace = self.namespace(model);
        let bytes = (count * BLOCK_BYTES) as usize;
        let memory = SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
        for (block, number) in (first..first + count).enumerate() {
            let block = memory.slice(block * BLOCK_BYTES as usize, BLOCK_BYTES as usize).unwrap();
            block.fill((number % 251) as u8 + 1);
        }
        let (layout, layout_version, encoding) = (Layout::FullBlock, LAYOUT_VERSION, ENCODING_RAW);
        let form = RecordForm { layout, layout_version, encoding };
        let column = (Group(0), Coordinate::Replicated);
        let class = self.shared.classes.intern(&namespace, column, form).unwrap();
        let from = Placed::blocks(&class.shape, memory.clone(), count as u32).unwrap();
        let digest = |block: u64| {
            let at = block as usize * BLOCK_BYTES as usize;
            memory.digest(at, BLOCK_BYTES as usize, crc32fast::hash)
        };
        let digests: Vec<u32> = (0..count).map(digest).collect();
        let name = |number| BlockName { key: key(number).0, origin: [1; 16] };
        let blocks = Blocks {
            coordinate: Coordinate::Replicated.to_u64(),
            created_ms: self.shared.clock.unix_millis(),
            expires_ms,
            namespace: namespace.local,
            spec: namespace.spec.local,
            group: 0,
            blocks: (first..first + count).map(name).collect(),
            stored_lengths: Vec::new(),
            extensions: Vec::new(),
            first_block: None,
            layout_version: LAYOUT_VERSION,
            layout: layout_code(Layout::FullBlock),
            encoding: ENCODING_RAW,
            parent: Parent::Unknown,
        };
        let layout = class.layout_of(count as u32).unwrap();
        let draft = Draft {
            namespace: Some(&namespace),
            body: Body::Blocks(blocks),
            digests: &digests,
            payload: Some(Payload::Placed { layout, from: &from, ordinal: 0 }),
        };
        self.shard.log.append(Class::Put, &draft).await.unwrap()
    }

    /// Appends and flushes.
    pub(in crate::engine) async fn durable(&self, model: &str, first: u64, count: u64) -> Written {
        let written = self.append(model, first, count).await;
        self.shard.log.make_durable(&written).await.unwrap();
        written
    }

    /// Appends a record without payload, and flushes.
    pub(in crate::engine) async fn say(&self, model: &str, body: Body) -> u64 {
        let namespace = self.namespace(model);
        let draft = Draft { namespace: Some(&namespace), body, digests: &[], payload: None };
        let written = self.shard.log.append(Class::Put, &draft).await.unwrap();
        self.shard.log.make_durable(&written).await.unwrap();
        self.shard.volume.sequence.get() - 1
    }

    /// Whether a block can be found.
    pub(in crate::engine) fn has(&self, model: &str, number: u64) -> bool {
        self.at(model, number).is_some()
    }

    /// The segment and page of the record that a block is found in.
    pub(in crate::engine) fn at(&self, model: &str, number: u64) -> Option<(u32, u32)> {
        let namespace = self.namespace(model);
        let index = &self.shared.index;
        let print = index.key().of(namespace.local, &key(number), Group(0), Coordinate::Replicated);
        match index.lookup(print) {
            Lookup::Live(at) => index.records().get(at.record).map(|record| (record.segment, record.page)),
            _ => None,
        }
    }

    pub(in crate::engine) fn contents(&self) -> Contents {
        let index = &self.shared.index;
        let mut contents = Contents::new();
        let mut entries = Vec::new();
        for partition in 0..index.partitions() {
            index.snapshot(partition, &mut entries);
            for entry in &entries {
                let Lookup::Live(at) = entry.state else { panic!("{entry:?} after recovery") };
                let record = index.records().get(at.record).unwrap();
                let place = (record.shard, record.segment, record.page);
                let rest = (at.block, record.blocks.get(), record.expires);
                contents.insert(entry.print.to_bytes(), (place.0, place.1, place.2, rest.0, rest.1, rest.2));
            }
        }
        self.check_live_counts(contents.len());
        contents
    }

    /// Every live block is counted in its record, and no record is there without one.
    fn check_live_counts(&self, blocks: usize) {
        let (mut cursor, mut some, mut live) = (Some(RecordCursor::default()), Vec::new(), 0);
        while let Some(from) = cursor {
            cursor = self.shared.index.records().snapshot(from, &mut some);
            for (_, record) in &some {
                assert!(record.live > 0, "{record:?}");
                live += usize::from(record.live);
            }
        }
        assert_eq!(live, blocks);
    }
}
