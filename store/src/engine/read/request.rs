//! Requests of reads: what can be refused before a block is looked up, and the names that the index knows blocks by.

use std::ops::Range;
use std::sync::Arc;

use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId};

use crate::engine::shared::Shared;
use crate::index::BlockFingerprint;
use kvarts_contract::api::{MAX_REQUEST_BLOCKS, ReadRequest, SMALL_READ_BYTES, wanted_layers};
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};

/// What is found out of a read once, whatever part of it is read then.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) shape: Arc<BlockShape>,
    /// The wanted layers.
    pub(crate) layers: Range<u32>,
    /// The fingerprint of each block.
    pub(crate) prints: Vec<BlockFingerprint>,
    /// What the read is for: a small one of the foreground is a class of its own.
    pub(crate) class: Class,
}

/// Which blocks are asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    pub(crate) namespace: NamespaceId,
    pub(crate) group: Group,
    pub(crate) coordinate: Coordinate,
    pub(crate) keys: &'a [BlockKey],
    pub(crate) layers: Option<&'a Range<u32>>,
    pub(crate) class: Class,
}

impl<'a> From<&'a ReadRequest> for Wish<'a> {
    fn from(request: &'a ReadRequest) -> Self {
        let ReadRequest { namespace, group, coordinate, class, .. } = *request;
        Self { namespace, group, coordinate, keys: &request.keys, layers: request.layers.as_ref(), class }
    }
}

/// Checks which blocks are asked for and names them as the index does. It counts as a use of them.
pub(crate) fn name(shared: &Shared, wish: Wish<'_>) -> Result<Subject, Reason> {
    let namespace = shared.names.get(wish.namespace).ok_or(Reason::UnknownNamespace(wish.namespace))?;
    let shape = namespace.shape(wish.group, wish.coordinate)?;
    let layers = wanted_layers(wish.layers, &shape)?;
    let key = shared.index.key();
    let print = |name: &BlockKey| key.of(namespace.local, name, wish.group, wish.coordinate);
    let prints: Vec<_> = wish.keys.iter().map(print).collect();
    count_use(shared, wish.class, &prints);
    let bytes = shape.layers_bytes(&layers).saturating_mul(wish.keys.len() as u64);
    Ok(Subject { class: class_of(wish.class, bytes), shape, layers, prints })
}

pub(super) fn check(shared: &Shared, request: &ReadRequest) -> Result<(), Reason> {
    check_count(&request.keys)?;
    let (expected, found) = (request.keys.len() as u64, u64::from(request.into.block_count()));
    if expected != found {
        return Err(Reason::Length { expected, found });
    }
    if request.into.gate().is_some() {
        // All layers are read at once.
        return Err(Reason::Overlap);
    }
    check_keys(shared, &request.keys, request.deadline)
}

/// Refuses what can be refused of any read by its keys and its deadline.
pub(crate) fn check_keys(shared: &Shared, keys: &[BlockKey], deadline: Option<Nanos>) -> Result<(), Reason> {
    check_count(keys)?;
    check_in_time(shared, deadline)?;
    check_unequal(keys)
}

/// Refuses a request for no blocks or for too many.
pub(crate) fn check_count(keys: &[BlockKey]) -> Result<(), Reason> {
    match keys.len() {
        0 => Err(Reason::Empty),
        1..=MAX_REQUEST_BLOCKS => Ok(()),
        _ => Err(Reason::TooMany("blocks")),
    }
}

/// Refuses a request whose deadline has passed.
pub(crate) fn check_in_time(shared: &Shared, deadline: Option<Nanos>) -> Result<(), Reason> {
    match deadline.is_some_and(|deadline| deadline <= shared.clock.now()) {
        true => Err(Reason::DeadlineInPast),
        false => Ok(()),
    }
}

/// Refuses a request that has a key twice.
pub(crate) fn check_unequal(keys: &[BlockKey]) -> Result<(), Reason> {
    // By eight of their bytes, which for most are all that differ: a sort of words, and of keys only where these are equal.
    let begin = |key: &BlockKey| key.as_bytes().first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    let mut sorted: Vec<(u64, &BlockKey)> = keys.iter().map(|key| (begin(key), key)).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair.first() == pair.last()) {
        Some(pair) => Err(pair.first().map_or(Reason::Empty, |(_, key)| Reason::Duplicate(**key))),
        None => Ok(()),
    }
}

/// The class of a read of this many bytes: small ones of the foreground are a class of their own, and no others are.
fn class_of(class: Class, bytes: u64) -> Class {
    match class {
        Class::Small | Class::Foreground if bytes <= SMALL_READ_BYTES => Class::Small,
        Class::Small => Class::Foreground,
        other => other,
    }
}

/// Counts a use of these blocks. Who only looks whether blocks are well does not use them.
pub(crate) fn count_use(shared: &Shared, class: Class, prints: &[BlockFingerprint]) {
    if class != Class::Background {
        shared.index.touch_with(prints, shared.epoch(), Some(shared.second()));
    }
}
