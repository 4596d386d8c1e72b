//! Run classes: what records have in common, interned, so that a record costs the index 28 bytes.
//!
//! A class is a namespace, group, coordinate, layout and encoding; from it and a number of blocks follows where
//! every byte of a record lies. Classes are never removed while the store is open: there are as many as an
//! operator has models, groups and ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, PoisonError};

use kvarts_layout::arrange::RunLayout;
use kvarts_layout::{BlockShape, Coordinate, Group, Layout};

use super::names::Namespace;
use crate::error::Reason;
use crate::ledger::Ledger;
use crate::sync::{Mutex, RwLock, RwLockReadGuard};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ClassKey {
    namespace: u32,
    group: u32,
    coordinate: u64,
    layer_block: bool,
    version: u16,
    encoding: u8,
}

/// What records of one kind have in common.
pub(crate) struct RunClass {
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

impl RunClass {
    /// Where everything lies in a record of this many blocks.
    pub(crate) fn layout_of(&self, blocks: u32) -> Result<Arc<RunLayout>, Reason> {
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layout) = layouts.get(&blocks) {
            return Ok(Arc::clone(layout));
        }
        let layout = RunLayout::new(self.layout, self.layout_version, &self.shape, blocks)
            .map_err(|error| Reason::Shape(error.to_string()))?;
        let layout = Arc::new(layout);
        layouts.insert(blocks, Arc::clone(&layout));
        Ok(layout)
    }
}

impl fmt::Debug for RunClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RunClass({}: group {}, {}, {:?})", self.number, self.group, self.coordinate, self.layout)
    }
}

#[derive(Debug, Default)]
struct Tables {
    numbers: BTreeMap<ClassKey, u32>,
    classes: Vec<Arc<RunClass>>,
    shapes: BTreeMap<(u32, u32, u64), Arc<BlockShape>>,
}

/// All run classes of a store. Usable from any thread.
#[derive(Debug)]
pub(crate) struct RunClasses {
    tables: RwLock<Tables>,
    /// Learns to whom the records of each class belong.
    ledger: Arc<Ledger>,
}

impl RunClasses {
    pub(crate) fn new(ledger: Arc<Ledger>) -> Self {
        Self { tables: RwLock::default(), ledger }
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shape of a block of this group at this coordinate, or why the model has none.
    pub(crate) fn shape(
        &self,
        namespace: &Arc<Namespace>,
        group: Group,
        coordinate: Coordinate,
    ) -> Result<Arc<BlockShape>, Reason> {
        let key = (namespace.local, group.0, coordinate.to_u64());
        if let Some(shape) = self.read().shapes.get(&key) {
            return Ok(Arc::clone(shape));
        }
        let shape = namespace
            .spec
            .geometry
            .shape(group, coordinate, namespace.block_tokens)
            .map_err(|error| Reason::Shape(error.to_string()))?;
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(tables.shapes.entry(key).or_insert_with(|| Arc::new(shape))))
    }

    /// The class, made if it is new.
    pub(crate) fn intern(
        &self,
        namespace: &Arc<Namespace>,
        (group, coordinate): (Group, Coordinate),
        (layout, layout_version, encoding): (Layout, u16, u8),
    ) -> Result<Arc<RunClass>, Reason> {
        let key = ClassKey {
            namespace: namespace.local,
            group: group.0,
            coordinate: coordinate.to_u64(),
            layer_block: layout == Layout::LayerBlock,
            version: layout_version,
            encoding,
        };
        if let Some(class) = self.read().get(&key) {
            return Ok(class);
        }
        let shape = self.shape(namespace, group, coordinate)?;
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(class) = tables.get(&key) {
            return Ok(class);
        }
        let number = u32::try_from(tables.classes.len()).map_err(|_| Reason::TooMany("run classes"))?;
        let namespace = Arc::clone(namespace);
        let layouts = Mutex::default();
        let class = Arc::new(RunClass {
            number,
            namespace,
            group,
            coordinate,
            layout,
            layout_version,
            encoding,
            shape,
            layouts,
        });
        self.ledger.assign(number, class.namespace.id);
        tables.numbers.insert(key, number);
        tables.classes.push(Arc::clone(&class));
        Ok(class)
    }

    /// Every group and coordinate that blocks of a namespace have ever had.
    pub(crate) fn columns(&self, namespace: &Namespace) -> BTreeSet<(Group, Coordinate)> {
        let tables = self.read();
        let here = tables.classes.iter().filter(|class| class.namespace.local == namespace.local);
        here.map(|class| (class.group, class.coordinate)).collect()
    }

    /// How many classes there are, and how many layouts they remember.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let tables = self.read();
        let layouts =
            |class: &Arc<RunClass>| class.layouts.lock().unwrap_or_else(PoisonError::into_inner).len();
        (tables.classes.len(), tables.classes.iter().map(layouts).sum())
    }

    /// The class with this number.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<RunClass>> {
        self.read().classes.get(number as usize).map(Arc::clone)
    }
}

impl Tables {
    fn get(&self, key: &ClassKey) -> Option<Arc<RunClass>> {
        self.classes.get(*self.numbers.get(key)? as usize).map(Arc::clone)
    }
}
