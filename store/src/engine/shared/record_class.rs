//! Record classes: what records have in common, interned, so that a record costs the index 36 bytes.
//!
//! A class is a namespace, group, coordinate, layout and encoding; from it and a number of blocks follows where
//! every byte of a record lies. There are as many as an operator has models, groups and ranks. Those of a namespace that
//! was deleted go when no task uses them any more; their numbers are not given out again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, PoisonError};

use kvarts_layout::arrange::RunLayout;
use kvarts_layout::{BlockShape, Coordinate, Group, Layout};

use super::names::Namespace;
use crate::ledger::Ledger;
use kvarts_contract::error::Reason;
use kvarts_contract::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// How the bytes of records are laid out and encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RecordForm {
    pub(crate) layout: Layout,
    pub(crate) layout_version: u16,
    pub(crate) encoding: u8,
}

/// Arrangements that a class remembers.
const LAYOUTS_MAX: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ClassKey {
    namespace: u32,
    group: u32,
    coordinate: u64,
    layer_block: bool,
    version: u16,
    encoding: u8,
}

impl ClassKey {
    fn of(namespace: &Namespace, (group, coordinate): (Group, Coordinate), form: RecordForm) -> Self {
        Self {
            namespace: namespace.local,
            group: group.0,
            coordinate: coordinate.to_u64(),
            layer_block: form.layout == Layout::LayerBlock,
            version: form.layout_version,
            encoding: form.encoding,
        }
    }
}

/// What records of one kind have in common.
pub(crate) struct RecordClass {
    /// The index's number for it.
    pub(crate) number: u32,
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) group: Group,
    pub(crate) coordinate: Coordinate,
    pub(crate) layout: Layout,
    pub(crate) layout_version: u16,
    pub(crate) encoding: u8,
    pub(crate) shape: Arc<BlockShape>,
    /// Arrangements by number of blocks: few different ones occur.
    layouts: Mutex<BTreeMap<u32, Arc<RunLayout>>>,
}

impl RecordClass {
    /// Whether its blocks are good for one boundary only: they hang on nothing.
    pub(crate) fn is_boundary(&self) -> bool {
        self.namespace.spec.geometry.group(self.group).is_some_and(|group| group.class.is_boundary())
    }

    /// Where everything lies in a record of this many blocks.
    pub(crate) fn layout_of(&self, blocks: u32) -> Result<Arc<RunLayout>, Reason> {
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layout) = layouts.get(&blocks) {
            return Ok(Arc::clone(layout));
        }
        let layout = RunLayout::new(self.layout, self.layout_version, &self.shape, blocks)?;
        let layout = Arc::new(layout);
        if layouts.len() >= LAYOUTS_MAX {
            layouts.pop_first();
        }
        layouts.insert(blocks, Arc::clone(&layout));
        Ok(layout)
    }
}

impl fmt::Debug for RecordClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RecordClass({}: group {}, {}, {:?})",
            self.number, self.group, self.coordinate, self.layout
        )
    }
}

#[derive(Debug, Default)]
struct Tables {
    numbers: BTreeMap<ClassKey, u32>,
    classes: BTreeMap<u32, Arc<RecordClass>>,
    /// The next number.
    next: u32,
    /// Classes of deleted namespaces, until no task uses them.
    retired: Vec<u32>,
}

/// All record classes of a store. Usable from any thread.
#[derive(Debug)]
pub(crate) struct RecordClasses {
    tables: RwLock<Tables>,
    /// Learns to whom the records of each class belong.
    ledger: Arc<Ledger>,
}

impl RecordClasses {
    pub(crate) fn new(ledger: Arc<Ledger>) -> Self {
        Self { tables: RwLock::default(), ledger }
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The class, if there is one.
    pub(crate) fn known(
        &self,
        namespace: &Namespace,
        column: (Group, Coordinate),
        form: RecordForm,
    ) -> Option<Arc<RecordClass>> {
        self.read().get(&ClassKey::of(namespace, column, form))
    }

    /// The class, made if it is new.
    pub(crate) fn intern(
        &self,
        namespace: &Arc<Namespace>,
        (group, coordinate): (Group, Coordinate),
        form: RecordForm,
    ) -> Result<Arc<RecordClass>, Reason> {
        let column = (group, coordinate);
        let key = ClassKey::of(namespace, column, form);
        if let Some(class) = self.read().get(&key) {
            return Ok(class);
        }
        let shape = namespace.shape(group, coordinate)?;
        let mut tables = self.write();
        if let Some(class) = tables.get(&key) {
            return Ok(class);
        }
        let number = tables.next;
        tables.next = number.checked_add(1).ok_or(Reason::TooMany("record classes"))?;
        let namespace = Arc::clone(namespace);
        let layouts = Mutex::default();
        let class = Arc::new(RecordClass {
            number,
            namespace,
            group,
            coordinate,
            layout: form.layout,
            layout_version: form.layout_version,
            encoding: form.encoding,
            shape,
            layouts,
        });
        self.ledger.assign(number, class.namespace.id);
        tables.numbers.insert(key, number);
        tables.classes.insert(number, Arc::clone(&class));
        Ok(class)
    }

    /// Nothing is here any more of what a namespace was before its delete. Its classes go when no task uses them:
    /// now, or when the next namespace is forgotten.
    pub(crate) fn forget(&self, retired: &Namespace) {
        let mut tables = self.write();
        let Tables { numbers, classes, retired: leaving, .. } = &mut *tables;
        let of = |key: &ClassKey| key.namespace == retired.local;
        leaving.extend(numbers.extract_if(.., |key, _| of(key)).map(|(_, number)| number));
        leaving.retain(|number| {
            // Every holder got it under this lock.
            if classes.get(number).is_some_and(|class| Arc::strong_count(class) > 1) {
                return true;
            }
            classes.remove(number);
            self.ledger.forget(*number);
            false
        });
    }

    /// Every group and coordinate that blocks of a namespace have ever had.
    pub(crate) fn columns(&self, namespace: &Namespace) -> BTreeSet<(Group, Coordinate)> {
        let tables = self.read();
        let here = tables.classes.values().filter(|class| class.namespace.local == namespace.local);
        here.map(|class| (class.group, class.coordinate)).collect()
    }

    /// How many classes there are, and how many layouts they remember.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let tables = self.read();
        let layouts =
            |class: &Arc<RecordClass>| class.layouts.lock().unwrap_or_else(PoisonError::into_inner).len();
        (tables.classes.len(), tables.classes.values().map(layouts).sum())
    }

    /// The class with this number.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<RecordClass>> {
        self.read().classes.get(&number).map(Arc::clone)
    }
}

impl Tables {
    fn get(&self, key: &ClassKey) -> Option<Arc<RecordClass>> {
        self.classes.get(self.numbers.get(key)?).map(Arc::clone)
    }
}
