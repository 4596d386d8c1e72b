//! Entries of the list of deletes as bytes, on the wire and in the file: with bounds.

use std::sync::Arc;

use kvarts_cluster::deletes::{Column, Entry, Known, Name, Numbered, What};
use kvarts_cluster::members::{MEMBERS_MAX, NodeId};
use kvarts_contract::api::MAX_REQUEST_BLOCKS;
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_wire::{convert, proto};
use proto::delete_entry::What as Wire;

use super::super::wire::{Malformed, node};

/// Bytes of entries of one message, about.
pub(super) const MESSAGE_BYTES: usize = 3 << 20;
/// Entries of one message that is taken.
const ENTRIES_MAX: usize = 1 << 16;
/// Nodes that numbers are known of: members that there were, too.
const KNOWN_MAX: usize = 16 * MEMBERS_MAX;

/// An entry as it is told.
pub(super) fn wire_entry((of, sequence): &Name, after: u64, entry: &Entry) -> proto::DeleteEntry {
    let column = |(group, coordinate): Column| convert::wire_column(group, coordinate);
    let (what, column, keys, ends_ms) = match &entry.what {
        What::Keys(of, keys) => (Wire::Keys, of.map(column), convert::key_bytes(keys), 0),
        What::Prefix(keys) => (Wire::Prefix, None, convert::key_bytes(keys), 0),
        What::Everything => (Wire::Everything, None, bytes::Bytes::new(), 0),
        What::Sooner(of, keys, ends_ms) => {
            (Wire::Sooner, Some(column(*of)), convert::key_bytes(keys), *ends_ms)
        }
    };
    proto::DeleteEntry {
        node: of.0.to_vec().into(),
        sequence: *sequence,
        after,
        what: what.into(),
        namespace: entry.namespace.0.to_vec().into(),
        column,
        keys,
        below_ms: entry.below_ms,
        ends_ms,
    }
}

/// An entry that was told.
pub(super) fn entry(wire: &proto::DeleteEntry) -> Result<Numbered, Malformed> {
    let namespace = <[u8; 32]>::try_from(&wire.namespace[..]).map(NamespaceId);
    let namespace = namespace.map_err(|_| Malformed("namespace: 32 bytes"))?;
    let keys = keys(&wire.keys)?;
    let column = |column: &proto::Column| {
        convert::column(Some(column)).map_err(|_| Malformed("the column is not valid"))
    };
    let of = wire.column.as_ref().map(column).transpose()?;
    let what = match (Wire::try_from(wire.what), &keys[..], of) {
        (Ok(Wire::Keys), [_, ..], of) => What::Keys(of, keys),
        (Ok(Wire::Prefix), [_, ..], None) => What::Prefix(keys),
        (Ok(Wire::Everything), [], None) => What::Everything,
        (Ok(Wire::Sooner), [_, ..], Some(of)) => What::Sooner(of, keys, wire.ends_ms),
        _ => return Err(Malformed("the delete is empty")),
    };
    if wire.sequence == 0 || wire.sequence == u64::MAX || wire.after >= wire.sequence {
        return Err(Malformed("the number of the delete is not valid"));
    }
    let entry = Arc::new(Entry { namespace, below_ms: wire.below_ms, what });
    Ok(Numbered { name: (node(&wire.node)?, wire.sequence), after: wire.after, entry })
}

/// Keys, one after the other.
pub(super) fn keys(bytes: &[u8]) -> Result<Vec<BlockKey>, Malformed> {
    let (keys, []) = bytes.as_chunks::<32>() else { return Err(Malformed("keys: each key needs 32 bytes")) };
    if keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Malformed("keys: the limit is 65,536 keys"));
    }
    Ok(keys.iter().map(|key| BlockKey(*key)).collect())
}

/// Entries that were told.
pub(super) fn entries(wire: &[proto::DeleteEntry]) -> Result<Vec<Numbered>, Malformed> {
    if wire.len() > ENTRIES_MAX {
        return Err(Malformed("the message has too many entries"));
    }
    wire.iter().map(entry).collect()
}

/// Entries as they are told.
pub(super) fn wire_entries(entries: &[Numbered]) -> Vec<proto::DeleteEntry> {
    entries.iter().map(|told| wire_entry(&told.name, told.after, &told.entry)).collect()
}

/// How far a node has all.
pub(super) fn wire_known(known: &Known) -> Vec<proto::DeletesKnown> {
    let one = |(of, sequence): (&NodeId, &u64)| proto::DeletesKnown {
        node: of.0.to_vec().into(),
        sequence: *sequence,
    };
    known.iter().map(one).collect()
}

/// How far a node says that it has all.
pub(super) fn known(wire: &[proto::DeletesKnown]) -> Result<Known, Malformed> {
    if wire.len() > KNOWN_MAX {
        return Err(Malformed("the list has more nodes than a cluster can have"));
    }
    wire.iter().map(|one| Ok((node(&one.node)?, one.sequence))).collect()
}

/// Bits, from the lowest of the first byte on.
pub(super) fn bits(bits: &[bool]) -> bytes::Bytes {
    let mut bytes = vec![0u8; bits.len().div_ceil(8)];
    for (at, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
        if let Some(byte) = bytes.get_mut(at / 8) {
            *byte |= 1 << (at % 8);
        }
    }
    bytes.into()
}

/// Whether a bit is set; those behind the end are not.
pub(super) fn bit(bytes: &[u8], at: usize) -> bool {
    bytes.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use kvarts_layout::{Coordinate, Group, StoreId};
    use proptest::prelude::*;

    /// Entries of every kind.
    pub(in super::super) fn some() -> impl Strategy<Value = (Name, Arc<Entry>)> {
        let keys = || prop::collection::vec(any::<[u8; 32]>().prop_map(BlockKey), 1..5);
        let column = || (0u32..3).prop_map(|group| (Group(group), Coordinate::Replicated));
        let what = prop_oneof![
            (prop::option::of(column()), keys()).prop_map(|(of, keys)| What::Keys(of, keys)),
            keys().prop_map(What::Prefix),
            Just(What::Everything),
            (column(), keys(), any::<u64>()).prop_map(|(of, keys, ends)| What::Sooner(of, keys, ends)),
        ];
        let name = (any::<[u8; 16]>().prop_map(StoreId), 1u64..1 << 50);
        (name, any::<[u8; 32]>(), any::<u64>(), what).prop_map(|(name, namespace, below_ms, what)| {
            (name, Arc::new(Entry { namespace: NamespaceId(namespace), below_ms, what }))
        })
    }

    proptest! {
        #[test]
        fn entries_arrive_as_they_were_told((name, said) in some(), before in 1u64..9) {
            let after = name.1.saturating_sub(before);
            let told = Numbered { name, after, entry: said };
            prop_assert_eq!(entries(&wire_entries(std::slice::from_ref(&told))), Ok(vec![told]));
        }

        #[test]
        fn bits_arrive_as_they_were_told(said in prop::collection::vec(any::<bool>(), 0..40)) {
            let bytes = bits(&said);
            let found: Vec<bool> = (0..said.len()).map(|at| bit(&bytes, at)).collect();
            prop_assert!(!bit(&bytes, said.len()));
            prop_assert_eq!(found, said);
        }

        #[test]
        fn entries_of_a_hostile_node_are_refused_or_bounded(
            bytes in prop::collection::vec(any::<u8>(), 0..100), what in any::<i32>(), sequence in any::<u64>(), after in any::<u64>()
        ) {
            let wire = proto::DeleteEntry {
                node: bytes.clone().into(), namespace: bytes.clone().into(), keys: bytes.into(), what, sequence, after,
                ..proto::DeleteEntry::default()
            };
            let _ = entry(&wire);
            let _ = known(&[proto::DeletesKnown { node: wire.node, sequence }]);
        }
    }
}
