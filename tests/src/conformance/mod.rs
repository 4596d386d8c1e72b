//! What every store must do, whatever it is made of: one function for each guarantee of the trait.
//!
//! [`all`] is run against the engine on each of its ways to the disks, against the engine in the simulation and
//! against the reference model. Each function works in a namespace of its own, so one open store serves them all.

mod faults;
mod lookups;
mod puts;
mod reads;
mod space;

use kvarts_contract::api::{
    BlockOutcome, Durability, Order, Parent, Placed, PutRequest, ReadEnd, ReadEvent, ReadRequest, Verify,
};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, Layout, NamespaceId};

use crate::fixture::{self, Style};
use crate::stage::Stage;

/// A guarantee, and the function that checks it.
pub type Case = (&'static str, fn(&Desk<'_>));

/// Every guarantee.
pub fn all() -> Vec<Case> {
    [puts::CASES, reads::CASES, lookups::CASES, faults::CASES, space::CASES].concat()
}

/// Runs every guarantee on one store.
pub fn run_all(stage: &dyn Stage) {
    for (name, case) in all() {
        let desk = Desk::new(stage, name);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&desk)));
        if let Err(panic) = result {
            eprintln!("the guarantee that failed: {name}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// A column of blocks that a case works on, in its own namespace.
pub struct Desk<'a> {
    /// Where the store stands.
    pub stage: &'a dyn Stage,
    /// The case's own namespace.
    pub namespace: NamespaceId,
    /// Its own chain of keys.
    pub chain: u64,
}

impl std::fmt::Debug for Desk<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Desk({})", self.namespace)
    }
}

/// The group with heads at all of them: what most cases use.
pub const fn pages() -> (Group, Coordinate) {
    (fixture::PAGES, Coordinate::Heads { start: 0, count: 2, of: 2 })
}

impl<'a> Desk<'a> {
    /// A desk in the namespace called `name`.
    pub fn new(stage: &'a dyn Stage, name: &str) -> Self {
        let registered = stage.store().register(&fixture::identity(name), &fixture::geometry());
        let namespace = registered.expect("the small model is accepted");
        let chain = u64::from_le_bytes(namespace.0[..8].try_into().expect("eight bytes"));
        Self { stage, namespace, chain }
    }

    /// Keys of the case's own chain.
    pub fn keys(&self, range: std::ops::Range<u64>) -> Vec<BlockKey> {
        fixture::keys(self.chain, range)
    }

    /// A durable put of these blocks as `producer` makes them.
    pub fn request(&self, column: (Group, Coordinate), keys: &[BlockKey], producer: u64) -> PutRequest {
        self.request_from(column, keys, producer, (Style::Blocks, 0))
    }

    /// The same, from memory of this style and skew.
    pub fn request_from(
        &self,
        (group, coordinate): (Group, Coordinate),
        keys: &[BlockKey],
        producer: u64,
        (style, skew): (Style, u64),
    ) -> PutRequest {
        let shape = fixture::shape(group, coordinate);
        let from = fixture::place(&shape, keys.len() as u32, style, skew).expect("a valid placement");
        for (at, key) in (0..).zip(keys) {
            fixture::write_block(&from, at, &fixture::content(key, group, coordinate, producer, &shape));
        }
        PutRequest {
            namespace: self.namespace,
            group,
            coordinate,
            parent: Parent::Root,
            first_block: Some(0),
            keys: keys.to_vec(),
            from,
            layout: None,
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        }
    }

    /// Puts blocks that are not there yet, durably, in this layout.
    pub fn store(&self, column: (Group, Coordinate), keys: &[BlockKey], producer: u64, layout: Layout) {
        let request = PutRequest { layout: Some(layout), ..self.request(column, keys, producer) };
        assert_eq!(self.outcomes(request), vec![BlockOutcome::Stored; keys.len()]);
    }

    /// The outcomes of a put that is well formed.
    pub fn outcomes(&self, request: PutRequest) -> Vec<BlockOutcome> {
        self.stage.put(request).expect("a well-formed put").outcomes
    }

    /// A read of these blocks into new memory, in layer order.
    pub fn read_request(&self, (group, coordinate): (Group, Coordinate), keys: &[BlockKey]) -> ReadRequest {
        let shape = fixture::shape(group, coordinate);
        let into = fixture::place(&shape, keys.len() as u32, Style::Blocks, 0).expect("a valid placement");
        ReadRequest {
            namespace: self.namespace,
            group,
            coordinate,
            keys: keys.to_vec(),
            layers: None,
            order: Order::Layers,
            into,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        }
    }

    /// Reads; the request must be well formed.
    pub fn read(&self, request: &ReadRequest) -> (Vec<ReadEvent>, ReadEnd) {
        self.stage.read(request.clone()).expect("a well-formed read")
    }

    /// Reads these blocks and compares every byte with what `producer` made.
    pub fn expect(&self, column: (Group, Coordinate), keys: &[BlockKey], producer: u64) {
        let request = self.read_request(column, keys);
        let (_, end) = self.read(&request);
        assert_eq!((end.usable_blocks, end.failures), (keys.len() as u32, Vec::new()));
        self.expect_bytes(&request, &(0..keys.len() as u32).collect::<Vec<_>>(), producer);
    }

    /// Reads these blocks in either order: those at these places are not here.
    pub fn expect_missing(&self, column: (Group, Coordinate), keys: &[BlockKey], missing: &[u32]) {
        let expected: Vec<_> = missing.iter().map(|&at| (at, Reason::NotHere(keys[at as usize]))).collect();
        let request = self.read_request(column, keys);
        let (_, end) = self.read(&request);
        // In layer order the blocks behind the first absent one are not read, so the list may lack some of them.
        assert_eq!(
            (Some(end.usable_blocks), end.failures.first()),
            (missing.first().copied(), expected.first())
        );
        assert!(end.failures.iter().all(|failure| expected.contains(failure)), "{:?}", end.failures);
        let (_, end) = self.read(&ReadRequest { order: Order::Blocks, ..request });
        assert_eq!(end.failures, expected);
    }

    /// Compares the wanted layers of these blocks of a read with what `producer` made.
    pub fn expect_bytes(&self, request: &ReadRequest, blocks: &[u32], producer: u64) {
        let shape = fixture::shape(request.group, request.coordinate);
        let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
        for &block in blocks {
            let key = &request.keys[block as usize];
            let expected = fixture::content(key, request.group, request.coordinate, producer, &shape);
            let found = fixture::read_block(&request.into, block, &shape);
            let of_chunk = fixture::layer_of_chunks(&shape);
            for ((part, layer), (found, expected)) in
                of_chunk.iter().enumerate().zip(found.iter().zip(&expected))
            {
                let wanted = layers.contains(layer);
                assert!(!wanted || found == expected, "block {block}, chunk {part}: other bytes");
            }
        }
    }
}

/// A placement of this many blocks of a column.
pub(crate) fn placed((group, coordinate): (Group, Coordinate), blocks: u32) -> Placed {
    let shape: BlockShape = fixture::shape(group, coordinate);
    fixture::place(&shape, blocks, Style::Blocks, 0).expect("a valid placement")
}
