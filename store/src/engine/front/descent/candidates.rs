//! Which records of a namespace may descend from some keys, by what memory knows: more than do, and never fewer.
//!
//! A record of a stream hangs on the block whose fingerprint it has. One that is good for a boundary alone hangs on nothing that memory
//! knows: all of those are candidates. So are records of which some blocks are gone, where a key that is looked for is not here: it
//! may be among them, and what follows it there descends from it. Columns are passed over together, and a key's blocks in one say nothing of those in another; so a
//! key that the links of one column have led to is looked for in the others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvarts_layout::{BlockKey, Coordinate, Group};

use crate::engine::front::links::Places;
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::engine::tasks::notify::yield_now;
use crate::engine::tasks::steps::Section;
use crate::index::{Descent, Lookup, OwnerCursor, RecordId, RecordInfo, Walk};

/// Records that are named one by one; beyond, their segments are listed whole.
const NAMED_MAX: usize = 1 << 20;

/// Where a class of records belongs.
#[derive(Clone, Copy)]
struct Column {
    column: (Group, Coordinate),
    is_boundary: bool,
}

/// What a search for descendants has to look at.
pub(super) struct Candidates {
    namespace: Arc<Namespace>,
    /// Of streams, in which blocks hang on others.
    columns: Vec<(Group, Coordinate)>,
    /// Columns in which a key that was looked for is not here.
    absent: BTreeSet<(Group, Coordinate)>,
    /// What is known of the classes of records; none of those of other namespaces.
    classes: BTreeMap<u32, Option<Column>>,
    /// Keys that were looked for.
    known: BTreeSet<BlockKey>,
    descent: Descent,
    /// By shard: what was found, and what of it was not taken yet.
    all: BTreeMap<u32, Places>,
    found: BTreeMap<u32, Places>,
    named: usize,
}

impl Candidates {
    /// Nothing was looked for yet.
    pub(super) fn of(shared: &Shared, namespace: &Arc<Namespace>) -> Self {
        let is_stream = |group: &Group| {
            namespace.spec.geometry.group(*group).is_none_or(|group| !group.class.is_boundary())
        };
        let columns = shared.classes.columns(namespace);
        Self {
            namespace: Arc::clone(namespace),
            columns: columns.into_iter().filter(|(group, _)| is_stream(group)).collect(),
            absent: BTreeSet::new(),
            classes: BTreeMap::new(),
            known: BTreeSet::new(),
            descent: Descent::default(),
            all: BTreeMap::new(),
            found: BTreeMap::new(),
            named: 0,
        }
    }

    /// Looks for what may descend from these keys, those looked for already left out. Says whether there is more than before.
    pub(super) async fn find(&mut self, shared: &Shared, keys: &BTreeSet<BlockKey>) -> bool {
        // It has sections of its own: others have their turn before and after.
        yield_now().await;
        let is_more = self.find_more(shared, keys).await;
        yield_now().await;
        is_more
    }

    async fn find_more(&mut self, shared: &Shared, keys: &BTreeSet<BlockKey>) -> bool {
        let mut section = Section::begin(&shared.work.searches, &*shared.clock);
        let is_first = self.known.is_empty();
        let mut descent = Descent::default();
        for key in keys {
            if self.known.insert(*key) {
                for (group, coordinate) in &self.columns {
                    let print = shared.index.key().of(self.namespace.local, key, *group, *coordinate);
                    let is_known = match shared.index.lookup(print) {
                        Lookup::Live(at) => self.descent.has(at),
                        _ => {
                            self.absent.insert((*group, *coordinate));
                            false
                        }
                    };
                    if is_first || !is_known {
                        shared.index.descend_from(&mut descent, print);
                    }
                }
                section.step(1 + self.columns.len() as u64).await;
            }
        }
        if descent.roots() == 0 && !is_first {
            return false;
        }
        self.descent = descent;
        self.pass(shared, &mut section).await;
        !self.found.is_empty()
    }

    /// What was found since it was asked last.
    pub(super) fn take_found(&mut self) -> BTreeMap<u32, Places> {
        std::mem::take(&mut self.found)
    }

    /// Looks at every record of the namespace.
    async fn pass(&mut self, shared: &Shared, section: &mut Section<'_>) {
        let account = shared.index.records().ledger().account(self.namespace.id).number();
        let mut some = Vec::new();
        for shard in 0..u16::try_from(shared.shards()).unwrap_or(u16::MAX) {
            let mut cursor = Some(OwnerCursor::default());
            while let Some(from) = cursor {
                cursor = shared.index.records().snapshot_of((shard, Some(account)), from, &mut some);
                for (id, info, _) in some.iter().filter(|(_, info, _)| info.live > 0) {
                    if self.may_descend(shared, (*id, info), section).await {
                        self.note(info);
                    }
                    section.step(1).await;
                }
                section.step(1).await;
            }
        }
    }

    async fn may_descend(
        &mut self,
        shared: &Shared,
        (id, info): (RecordId, &RecordInfo),
        section: &mut Section<'_>,
    ) -> bool {
        let known = *self.classes.entry(info.class).or_insert_with(|| {
            let class = shared.classes.get(info.class);
            let own = class.filter(|class| class.namespace.local == self.namespace.local)?;
            Some(Column { column: (own.group, own.coordinate), is_boundary: own.is_boundary() })
        });
        let Some(Column { column, is_boundary }) = known else { return false };
        let has_gaps = info.live < info.blocks.get() && !kvarts_layout::planted!("gaps-not-looked-into");
        if is_boundary || has_gaps && self.absent.contains(&column) {
            return true;
        }
        let mut walk = Walk::from(id, info);
        loop {
            match shared.index.descends(&mut walk, &mut self.descent, 1) {
                Some(found) => return found,
                None => section.step(1).await,
            }
        }
    }

    fn note(&mut self, info: &RecordInfo) {
        let shard = u32::from(info.shard);
        let is_new = note(self.all.entry(shard).or_default(), info, self.named < NAMED_MAX);
        if is_new {
            self.named += 1;
            note(self.found.entry(shard).or_default(), info, self.named < NAMED_MAX);
        }
    }
}

/// Adds a record to others of its shard; false if it is among them. Where it may not be named, its segment stands for it.
fn note(places: &mut Places, info: &RecordInfo, may_name: bool) -> bool {
    let pages = places.entry(info.segment).or_insert_with(|| Some(BTreeSet::new()));
    match pages {
        None => false,
        Some(pages) if may_name => pages.insert(info.page),
        Some(_) => {
            *pages = None;
            true
        }
    }
}
