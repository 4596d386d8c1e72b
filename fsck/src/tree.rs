//! The artifacts of a store as trees: which blocks follow which, runs without a fork as one branch.
//!
//! Parents are what puts said they are. Keys are opaque, so nothing keeps two records from naming each other as parents:
//! every block is shown once, whatever they say.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, NamespaceId};

use crate::contents::{Contents, Fate, Run};
use crate::names::Namespace;

/// What a branch hangs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stem {
    /// Nothing: a prompt begins here.
    Root,
    /// The branch above it.
    Branch,
    /// A block that is not here.
    Absent,
    /// Not known: flat pages.
    Unknown,
}

/// Blocks that follow each other without a fork, or all pages of a namespace without known parents.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Branch {
    /// Branches above it.
    pub depth: u32,
    /// What it hangs on.
    pub stem: Stem,
    /// Its first key.
    #[serde(serialize_with = "as_text")]
    pub first: BlockKey,
    /// Its last key.
    #[serde(serialize_with = "as_text")]
    pub last: BlockKey,
    /// How many blocks of the prompt come before it, where that is known.
    pub first_block: Option<u32>,
    /// Keys.
    pub keys: u64,
    /// Blocks: a key may have several groups and coordinates.
    pub blocks: u64,
    /// Bytes on disk.
    pub bytes: u64,
    /// Branches that hang on it.
    pub forks: u64,
}

/// The artifacts of one namespace.
#[derive(Debug)]
pub struct Tree {
    /// The namespace.
    pub namespace: Arc<Namespace>,
    /// Its records of which a block counts.
    pub artifacts: u64,
    /// Its blocks that count.
    pub blocks: u64,
    /// Their bytes on disk.
    pub bytes: u64,
    /// The first branches, in order.
    pub branches: Vec<Branch>,
    /// Branches beyond the limit.
    pub left_out: u64,
}

fn as_text<S: serde::Serializer>(value: &BlockKey, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

type Key = [u8; 32];

#[derive(Debug)]
struct Node {
    parent: Parent,
    first_block: Option<u32>,
    blocks: u64,
    bytes: u64,
}

/// Every block of a run that counts, with its ordinal and what comes before it.
fn links(run: &Run) -> impl Iterator<Item = (u32, Key, Parent)> {
    let names = &run.blocks.blocks;
    let live = (0u32..).zip(names.iter().zip(&run.fates)).filter(|(_, (_, fate))| **fate == Fate::Live);
    live.map(move |(at, (name, _))| {
        let before = (at as usize).checked_sub(1).and_then(|before| names.get(before));
        (at, name.key, run.blocks.parent.behind(before))
    })
}

/// The trees of all namespaces, or of one; at most `limit` branches of each.
pub fn trees(contents: &Contents, only: Option<NamespaceId>, limit: usize) -> Vec<Tree> {
    let mut by_namespace = BTreeMap::<NamespaceId, Vec<&Run>>::new();
    let wanted = |run: &&Run| run.live() > 0 && only.is_none_or(|only| run.namespace.id == only);
    for run in contents.runs.iter().filter(wanted) {
        by_namespace.entry(run.namespace.id).or_default().push(run);
    }
    by_namespace.into_values().filter_map(|runs| tree(&runs, limit)).collect()
}

fn tree(runs: &[&Run], limit: usize) -> Option<Tree> {
    let namespace = Arc::clone(&runs.first()?.namespace);
    let mut forest = Forest::default();
    for run in runs {
        let each = run.bytes().checked_div(run.fates.len() as u64).unwrap_or(0);
        for (at, key, parent) in links(run) {
            let first_block = run.blocks.first_block.and_then(|first| first.checked_add(at));
            forest.add(key, Node { parent, first_block, blocks: 1, bytes: each });
        }
    }
    let sum = |what: fn(&Run) -> u64| runs.iter().map(|run| what(run)).fold(0, u64::saturating_add);
    let mut tree = Tree {
        namespace,
        artifacts: runs.len() as u64,
        blocks: sum(Run::live),
        bytes: sum(Run::live_bytes),
        branches: Vec::new(),
        left_out: 0,
    };
    forest.walk(&mut |branch| {
        if tree.branches.len() < limit {
            tree.branches.push(branch);
        } else {
            tree.left_out = tree.left_out.saturating_add(1);
        }
    });
    Some(tree)
}

#[derive(Debug, Default)]
struct Forest {
    nodes: BTreeMap<Key, Node>,
    children: BTreeMap<Key, Vec<Key>>,
    seen: BTreeSet<Key>,
}

impl Forest {
    fn add(&mut self, key: Key, node: Node) {
        match self.nodes.get_mut(&key) {
            Some(known) => {
                known.blocks = known.blocks.saturating_add(node.blocks);
                known.bytes = known.bytes.saturating_add(node.bytes);
                if known.parent == Parent::Unknown {
                    known.parent = node.parent;
                }
                known.first_block = known.first_block.or(node.first_block);
            }
            None => drop(self.nodes.insert(key, node)),
        }
    }

    fn walk(mut self, each: &mut dyn FnMut(Branch)) {
        for (key, node) in &self.nodes {
            if let Parent::Key(parent) = node.parent
                && self.nodes.contains_key(&parent)
            {
                self.children.entry(parent).or_default().push(*key);
            }
        }
        let absent = |parent: &Key| !self.nodes.contains_key(parent);
        let starts = |is_start: &dyn Fn(&Parent) -> bool| -> Vec<Key> {
            let nodes = self.nodes.iter().filter(|(_, node)| is_start(&node.parent));
            nodes.map(|(key, _)| *key).collect()
        };
        let roots = starts(&|parent| *parent == Parent::Root);
        let orphans = starts(&|parent| matches!(parent, Parent::Key(parent) if absent(parent)));
        let pages: Vec<Key> = self.nodes.keys().copied().collect();
        for (stem, keys) in [(Stem::Root, roots), (Stem::Absent, orphans)] {
            keys.into_iter().for_each(|key| self.grow(key, stem, each));
        }
        self.pages(&pages, each);
        // What is left names each other.
        for key in pages {
            self.grow(key, Stem::Absent, each);
        }
    }

    /// Shows a branch and everything on it.
    fn grow(&mut self, key: Key, stem: Stem, each: &mut dyn FnMut(Branch)) {
        let mut stack = vec![(key, stem, 0u32)];
        while let Some((key, stem, depth)) = stack.pop() {
            let Some(mut branch) = self.branch(key, stem, depth) else { continue };
            let forks = self.children.get(&branch.last.0).cloned().unwrap_or_default();
            let forks: Vec<Key> = forks.into_iter().filter(|key| !self.seen.contains(key)).collect();
            branch.forks = forks.len() as u64;
            each(branch);
            stack.extend(forks.into_iter().rev().map(|key| (key, Stem::Branch, depth.saturating_add(1))));
        }
    }

    /// The blocks from a key on up to the next fork or end; `None` if it was shown already.
    fn branch(&mut self, key: Key, stem: Stem, depth: u32) -> Option<Branch> {
        let mut next = key;
        let mut branch: Option<Branch> = None;
        while self.seen.insert(next) {
            let node = self.nodes.get(&next)?;
            let branch = branch.get_or_insert(Branch {
                depth,
                stem,
                first: BlockKey(next),
                last: BlockKey(next),
                first_block: node.first_block,
                keys: 0,
                blocks: 0,
                bytes: 0,
                forks: 0,
            });
            branch.last = BlockKey(next);
            branch.keys = branch.keys.saturating_add(1);
            branch.blocks = branch.blocks.saturating_add(node.blocks);
            branch.bytes = branch.bytes.saturating_add(node.bytes);
            match self.children.get(&next).map(Vec::as_slice) {
                Some([only]) => next = *only,
                _ => break,
            }
        }
        branch
    }

    /// All pages on which nothing hangs, as one branch; those that have children begin branches of their own.
    fn pages(&mut self, keys: &[Key], each: &mut dyn FnMut(Branch)) {
        let mut all: Option<Branch> = None;
        for key in keys {
            let is_page = self.nodes.get(key).is_some_and(|node| node.parent == Parent::Unknown);
            if !is_page || self.seen.contains(key) {
                continue;
            }
            if self.children.contains_key(key) {
                self.grow(*key, Stem::Unknown, each);
                continue;
            }
            let Some(page) = self.branch(*key, Stem::Unknown, 0) else { continue };
            match &mut all {
                Some(all) => {
                    all.last = page.last;
                    all.keys = all.keys.saturating_add(page.keys);
                    all.blocks = all.blocks.saturating_add(page.blocks);
                    all.bytes = all.bytes.saturating_add(page.bytes);
                }
                None => all = Some(page),
            }
        }
        all.into_iter().for_each(each);
    }
}

/// The keys of the prefix that ends with a key, as far as it is here, and of everything that descends from it, in every
/// namespace.
pub fn lineage(contents: &Contents, key: BlockKey) -> BTreeSet<(NamespaceId, BlockKey)> {
    let mut parents = BTreeMap::new();
    let mut children = BTreeMap::<(NamespaceId, Key), Vec<Key>>::new();
    for run in &contents.runs {
        for (_, key, parent) in links(run) {
            if let Parent::Key(parent) = parent {
                parents.insert((run.namespace.id, key), parent);
                children.entry((run.namespace.id, parent)).or_default().push(key);
            }
        }
    }
    let namespaces: BTreeSet<NamespaceId> = contents.runs.iter().map(|run| run.namespace.id).collect();
    let mut all = BTreeSet::new();
    for namespace in namespaces {
        let mut stack = vec![key.0];
        while let Some(next) = stack.pop() {
            if all.insert((namespace, BlockKey(next))) {
                stack.extend(children.get(&(namespace, next)).into_iter().flatten());
            }
        }
        let mut next = key.0;
        while let Some(parent) = parents.get(&(namespace, next)) {
            if !all.insert((namespace, BlockKey(*parent))) {
                break;
            }
            next = *parent;
        }
    }
    all
}
