//! Random scripts: the same operations on any stage, with outcomes that can be compared.
//!
//! Keys are drawn from few, so that most operations meet blocks that others have touched. Times are moved in
//! steps of a thousand seconds and end at odd halves of them, so that two stages whose operations take different
//! times agree about what has ended.

use std::collections::BTreeSet;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteReply, DeleteRequest, Durability, LeaseId, LeaseTerms, MatchRequest,
    Order, Parent, Presence, PutRequest, ReadEnd, ReadEvent, ReadRequest, SnapshotCursor, Subscription,
    Target, TtlRequest, Verify,
};
use kvarts_contract::class::Class;
use kvarts_contract::error::{Error, Reason, ShapeCause};
use kvarts_contract::events::record::Content;
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::{BlockKey, IndexKey, Layout, NamespaceId, Requirements, UsablePrefix};

use crate::fixture::{self, Style};
use crate::sim::Rng;
use crate::stage::{Stage, ask};

/// Keys that scripts are about.
const KEYS: u64 = 24;
/// The chain that they belong to.
const CHAIN: u64 = 5;

/// One operation.
#[derive(Clone, Debug)]
pub enum Op {
    /// A put of these keys of a column.
    Put {
        /// Which of the fixture's columns.
        column: usize,
        /// Which keys, possibly twice.
        keys: Vec<u64>,
        /// Whose bytes.
        producer: u64,
        /// From what memory.
        memory: (Style, u64),
        /// In which layout.
        layout: Option<Layout>,
        /// When it is answered.
        durability: Durability,
        /// Thousands of seconds that it may live, and a half.
        expires: Option<u64>,
        /// The key that it follows, possibly one of its own; none is unknown.
        parent: Option<u64>,
    },
    /// A read of these keys of a column.
    Read {
        /// Which of the fixture's columns.
        column: usize,
        /// Which keys, possibly twice.
        keys: Vec<u64>,
        /// In which order.
        order: Order,
        /// Which layers, possibly too many.
        layers: Option<std::ops::Range<u32>>,
        /// Into what memory.
        memory: (Style, u64),
    },
    /// A match of the first `keys` keys.
    Match {
        /// How many.
        keys: u64,
        /// Tokens that may be computed again.
        recompute: u64,
        /// The windows of the odd group, in tokens.
        window: u32,
        /// With a lease: tenant, cap in bytes, thousands of seconds and a half.
        lease: Option<(u32, u64, u64)>,
    },
    /// Ends the `n`th lease of the script.
    Unlock(usize),
    /// Makes the `n`th lease of the script end `k` + 0.5 thousand seconds from now, where `k` is the second number.
    Renew(usize, u64),
    /// Holds these keys of a column for ever, or until they are unlocked.
    Pin {
        /// Which of the fixture's columns.
        column: usize,
        /// Which keys.
        keys: Vec<u64>,
    },
    /// Deletes these keys, in one column or in all.
    Delete {
        /// Which of the fixture's columns.
        column: Option<usize>,
        /// Which keys.
        keys: Vec<u64>,
    },
    /// Deletes what descends from a key.
    DeletePrefix(u64),
    /// Deletes everything.
    DeleteAll,
    /// Lets these keys of a column live for `ttl` + 0.5 thousand seconds, or for ever.
    SetTtl {
        /// Which of the fixture's columns.
        column: usize,
        /// Which keys.
        keys: Vec<u64>,
        /// How long.
        ttl: Option<u64>,
    },
    /// The same for puts that do not say.
    DefaultTtl(Option<u64>),
    /// Takes a page of a snapshot.
    Page,
    /// Lets this many thousand seconds pass.
    Pass(u64),
    /// Names a namespace that was never registered.
    Stranger,
}

/// What a read delivered: its events, its end, and the chunks of the blocks that are good.
pub type Delivered = (Vec<ReadEvent>, ReadEnd, Vec<Vec<Vec<u8>>>);

/// What came of an operation.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// Of a put.
    Put(Result<Vec<BlockOutcome>, Reason>),
    /// Of a read.
    Read(Result<Delivered, Reason>),
    /// Of a match; and whether there is a lease.
    Match(Result<(UsablePrefix, u32, bool), Reason>),
    /// Of an unlock.
    Unlock(bool),
    /// Of a delete.
    Delete(Result<DeleteReply, Reason>),
    /// Of a change of a time to live, or a pin: for each key, whether it is here.
    Each(Result<Vec<bool>, Reason>),
    /// Of a renewal.
    Renew(Result<(), Reason>),
    /// Of time.
    Nothing,
}

fn some_keys(rng: &mut Rng) -> Vec<u64> {
    let count = rng.between(1, 6);
    if rng.coin() {
        let first = rng.below(KEYS - count);
        return (first..first + count).collect();
    }
    let mut keys: Vec<_> = (0..count).map(|_| rng.below(KEYS)).collect();
    // Twice the same key is refused: worth a look, not in every other operation.
    if rng.below(4) > 0 {
        keys.sort_unstable();
        keys.dedup();
    }
    keys
}

fn memory(rng: &mut Rng) -> (Style, u64) {
    (Style::ALL[rng.index(3)], [0, 0, 1, 512, 4095][rng.index(5)])
}

impl Op {
    /// Any operation.
    pub fn draw(rng: &mut Rng) -> Self {
        match rng.below(28) {
            20 => Self::Renew(rng.index(6), rng.below(4)),
            21 => Self::Pin { column: rng.index(3), keys: some_keys(rng) },
            22..24 => Self::Delete { column: rng.coin().then(|| rng.index(3)), keys: some_keys(rng) },
            24 => [Self::DeletePrefix(rng.below(KEYS)), Self::DeletePrefix(0), Self::DeleteAll][rng.index(3)]
                .clone(),
            25 => Self::SetTtl {
                column: rng.index(3),
                keys: some_keys(rng),
                ttl: rng.coin().then(|| rng.below(4)),
            },
            26 => Self::DefaultTtl(rng.coin().then(|| rng.below(4))),
            27 => Self::Page,
            0..9 => Self::Put {
                column: rng.index(3),
                keys: some_keys(rng),
                producer: rng.next_u64(),
                memory: memory(rng),
                layout: [None, Some(Layout::FullBlock), Some(Layout::LayerBlock)][rng.index(3)],
                durability: if rng.coin() { Durability::Durable } else { Durability::Relaxed },
                expires: (rng.below(4) == 0).then(|| rng.below(4)),
                parent: rng.coin().then(|| rng.below(KEYS)),
            },
            9..15 => Self::Read {
                column: rng.index(3),
                keys: some_keys(rng),
                order: if rng.coin() { Order::Layers } else { Order::Blocks },
                layers: (rng.below(3) == 0).then(|| {
                    let first = rng.below(3) as u32;
                    first..first + rng.below(3) as u32
                }),
                memory: memory(rng),
            },
            15..18 => Self::Match {
                keys: rng.below(KEYS + 1),
                recompute: rng.below(100),
                window: rng.between(1, 60) as u32,
                lease: rng.coin().then(|| (rng.below(3) as u32, rng.below(200_000), rng.below(4))),
            },
            18 => [Self::Unlock(rng.index(6)), Self::Stranger][rng.index(2)].clone(),
            _ => Self::Pass(rng.between(1, 3)),
        }
    }
}

/// Plays operations on one stage.
pub struct Player<'a> {
    stage: &'a dyn Stage,
    namespace: NamespaceId,
    leases: Vec<LeaseId>,
    /// Reads every event since the script began.
    reader: Subscription,
    /// The content by the first snapshot and the events.
    picture: Content,
    /// A snapshot under way: its pages so far.
    paging: Option<(Content, SnapshotCursor)>,
}

impl std::fmt::Debug for Player<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Player({} leases)", self.leases.len())
    }
}

/// Reasons say the same in other words in places: those are compared by kind.
fn reason(error: Error) -> Reason {
    match error.0 {
        Reason::Shape(_) => Reason::Shape(ShapeCause::Rule("")),
        // Of several keys that stand twice either may be named.
        Reason::Duplicate(_) => Reason::Duplicate(BlockKey::default()),
        other => other,
    }
}

/// Applies every event that is there.
fn follow(reader: &mut Subscription, content: &mut Content) {
    loop {
        let events = reader.try_next(10).expect("no gap in a short script");
        if events.is_empty() {
            return;
        }
        events.iter().for_each(|event| content.apply(event));
    }
}

fn half(thousands: u64) -> Duration {
    Duration::from_secs(thousands * 1000 + 500)
}

fn names(keys: &[u64]) -> Vec<BlockKey> {
    keys.iter().map(|n| fixture::key(CHAIN, *n)).collect()
}

impl<'a> Player<'a> {
    /// A player on this stage.
    pub fn new(stage: &'a dyn Stage) -> Self {
        let registered = stage.store().register(&fixture::identity("script"), &fixture::geometry());
        let namespace = registered.expect("the small model is accepted");
        let (reader, picture) = (stage.store().subscribe(None), Content::default());
        Self { stage, namespace, leases: Vec::new(), reader, picture, paging: None }
    }

    /// Does one operation and waits for what comes of it.
    pub fn play(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Put { .. } => Outcome::Put(self.put(op)),
            Op::Read { .. } => Outcome::Read(self.read(op)),
            Op::Match { .. } => Outcome::Match(self.find(op)),
            Op::Unlock(n) => {
                let lease = self.leases.get(*n).copied().unwrap_or(LeaseId(0));
                Outcome::Unlock(self.stage.store().unlock(lease))
            }
            Op::Renew(n, thousands) => {
                let lease = self.leases.get(*n).copied().unwrap_or(LeaseId(0));
                Outcome::Renew(self.stage.store().renew(lease, half(*thousands)).map_err(reason))
            }
            Op::Pin { column, keys } => Outcome::Each(self.pin(*column, keys)),
            Op::Delete { column, keys } => {
                let column = column.map(|column| fixture::columns()[column]);
                self.delete(Target::Keys { column, keys: names(keys) })
            }
            Op::DeletePrefix(key) => self.delete(Target::Prefix(fixture::key(CHAIN, *key))),
            Op::DeleteAll => self.delete(Target::Namespace),
            Op::SetTtl { column, keys, ttl } => {
                let (group, coordinate) = fixture::columns()[*column];
                let (namespace, keys, ttl) = (self.namespace, names(keys), ttl.map(half));
                let request = TtlRequest { namespace, group, coordinate, keys: &keys, ttl };
                let changed = self.stage.store().set_ttl(&request).map(|reply| reply.changed);
                Outcome::Each(changed.map_err(reason))
            }
            Op::DefaultTtl(ttl) => {
                let set = self.stage.store().set_default_ttl(self.namespace, ttl.map(half));
                Outcome::Renew(set.map_err(reason))
            }
            Op::Page => {
                self.page();
                Outcome::Nothing
            }
            Op::Pass(thousands) => {
                assert!(self.stage.advance(Duration::from_secs(thousands * 1000)));
                Outcome::Nothing
            }
            Op::Stranger => {
                let known = std::mem::replace(&mut self.namespace, NamespaceId([3; 32]));
                let outcome =
                    Outcome::Match(self.find(&Op::Match { keys: 3, recompute: 0, window: 1, lease: None }));
                self.namespace = known;
                outcome
            }
        }
    }

    fn put(&self, op: &Op) -> Result<Vec<BlockOutcome>, Reason> {
        let Op::Put { column, keys, producer, memory, layout, durability, expires, parent } = op else {
            unreachable!("only puts are put")
        };
        let (group, coordinate) = fixture::columns()[*column];
        let shape = fixture::shape(group, coordinate);
        let keys = names(keys);
        let from = fixture::place(&shape, keys.len() as u32, memory.0, memory.1)?;
        for (at, key) in (0..).zip(&keys) {
            let content = fixture::content(key, group, coordinate, *producer, &shape);
            fixture::write_block(&from, at, &content);
        }
        let request = PutRequest {
            namespace: self.namespace,
            group,
            coordinate,
            parent: parent.map_or(Parent::Unknown, |parent| Parent::Key(fixture::key(CHAIN, parent))),
            first_block: None,
            keys,
            from,
            layout: *layout,
            durability: *durability,
            expires_after: expires.map(half),
            origins: None,
            deadline: None,
        };
        self.stage.put(request).map(|reply| reply.outcomes).map_err(reason)
    }

    fn delete(&self, target: Target) -> Outcome {
        let request = DeleteRequest { namespace: self.namespace, target, deadline: None };
        Outcome::Delete(ask(self.stage, self.stage.store().delete(request)).map_err(reason))
    }

    fn pin(&mut self, column: usize, keys: &[u64]) -> Result<Vec<bool>, Reason> {
        let (group, coordinate) = fixture::columns()[column];
        let (namespace, keys) = (self.namespace, names(keys));
        let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
        let reply = self.stage.store().pin(&request, 7, 150_000).map_err(reason)?;
        self.leases.extend(reply.lease);
        Ok(reply.presence.iter().map(|one| *one == Presence::Here).collect())
    }

    /// Takes one page of a snapshot. When it is whole, what it says with the events since is the picture.
    fn page(&mut self) {
        let (mut content, cursor) =
            self.paging.take().map_or_else(Default::default, |(content, cursor)| (content, Some(cursor)));
        let page = ask(self.stage, self.stage.store().snapshot(cursor)).expect("a snapshot");
        content.page(&page);
        match page.next {
            Some(next) => self.paging = Some((content, next)),
            None => {
                let mut since = self.stage.store().subscribe(Some(page.sequence));
                follow(&mut since, &mut content);
                self.look();
                assert_eq!(content.blocks, self.picture.blocks, "a snapshot with its events");
            }
        }
    }

    /// Takes in every event since the last look, and gives what is here by the events alone.
    pub fn look(&mut self) -> &BTreeSet<IndexKey> {
        follow(&mut self.reader, &mut self.picture);
        &self.picture.blocks
    }

    /// Has everything go whose time is over, ends the snapshot that is under way, and gives what is here by events.
    pub fn settle(&mut self) -> BTreeSet<IndexKey> {
        for (group, coordinate) in fixture::columns() {
            let keys = names(&(0..KEYS).collect::<Vec<_>>());
            let namespace = self.namespace;
            let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
            self.stage.store().contains(&request).expect("a well-formed question");
        }
        self.page();
        while self.paging.is_some() {
            self.page();
        }
        self.look().clone()
    }

    fn read(&self, op: &Op) -> Result<Delivered, Reason> {
        let Op::Read { column, keys, order, layers, memory } = op else {
            unreachable!("only reads are read")
        };
        let (group, coordinate) = fixture::columns()[*column];
        let shape = fixture::shape(group, coordinate);
        let into = fixture::place(&shape, keys.len() as u32, memory.0, memory.1)?;
        let request = ReadRequest {
            namespace: self.namespace,
            group,
            coordinate,
            keys: names(keys),
            layers: layers.clone(),
            order: *order,
            into: into.clone(),
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let (events, end) = self.stage.read(request).map_err(reason)?;
        let failed = |block: &u32| end.failures.iter().any(|(at, _)| at == block);
        let good = match order {
            Order::Layers => (0..end.usable_blocks).collect::<Vec<_>>(),
            Order::Blocks => (0..keys.len() as u32).filter(|block| !failed(block)).collect(),
        };
        let bytes = good.iter().map(|block| fixture::read_block(&into, *block, &shape)).collect();
        Ok((events, end, bytes))
    }

    fn find(&mut self, op: &Op) -> Result<(UsablePrefix, u32, bool), Reason> {
        let Op::Match { keys, recompute, window, lease } = op else { unreachable!("only matches are found") };
        let needs = [Need::All, Need::Last { tokens: *window }, Need::At];
        let absences =
            [Absence::Required, Absence::Recompute { tokens: 40 }, Absence::Recompute { tokens: 0 }];
        let groups = fixture::columns()
            .into_iter()
            .zip(needs.into_iter().zip(absences))
            .map(|((group, coordinate), (need, absence))| Requirement {
                group,
                coordinates: vec![coordinate],
                need,
                absence,
            })
            .collect();
        let requirements = Requirements::new(fixture::BLOCK_TOKENS, groups).expect("valid requirements");
        let terms = |(tenant, cap_bytes, hold)| LeaseTerms { hold: half(hold), tenant, cap_bytes };
        let request = MatchRequest {
            namespace: self.namespace,
            keys: &names(&(0..*keys).collect::<Vec<_>>()),
            requirements: &requirements,
            recompute_tokens_max: *recompute,
            lease: lease.map(terms),
            plan: None,
        };
        let found = self.stage.store().match_prefix(&request).map_err(reason)?;
        self.leases.extend(found.lease);
        Ok((found.usable, found.pending, found.lease.is_some()))
    }
}
