//! docs/FORMAT.md says what the code does: every offset in its tables, every constant, every label.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use rkyv::Archived;

use super::body::*;
use super::checkpoint::*;
use super::footer::*;
use super::recovery::{RECORD_ROWS, SEGMENT_ROWS};
use super::*;

/// Offset, bytes and name of each field of a table.
type Table = Vec<(usize, usize, String)>;

fn bytes_of<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! archived {
    ($name:literal, $body:ty: $($field:ident),+) => {
        ($name, {
            let rows = vec![$((
                offset_of!(Archived<$body>, $field),
                bytes_of(|archived: &Archived<$body>| &archived.$field),
                stringify!($field).to_owned(),
            )),+];
            assert!(rows.is_sorted(), concat!($name, ": the archive's order is the declared order"));
            rows
        })
    };
}

fn fixed(fields: &[Field]) -> Table {
    fields.iter().map(|field| (field.offset, field.bytes, field.name.to_owned())).collect()
}

fn tables() -> BTreeMap<&'static str, Table> {
    BTreeMap::from([
        ("preamble", fixed(seal::PREAMBLE_FIELDS)),
        ("long", fixed(seal::LONG_FIELDS)),
        ("superblock", fixed(superblock::FIELDS)),
        ("segment-header", fixed(segment::FIELDS)),
        ("record", fixed(record::FIELDS)),
        ("footer", fixed(footer::FIELDS)),
        ("trailer", fixed(trailer::FIELDS)),
        ("checkpoint-header", fixed(checkpoint::HEADER_FIELDS)),
        ("checkpoint-chunk", fixed(checkpoint::CHUNK_FIELDS)),
        archived!("BlockName", BlockName: key, origin),
        archived!("Extension", Extension: id, critical, bytes),
        archived!("Blocks", Blocks: coordinate, created_ms, expires_ms, namespace, spec, group, blocks,
            stored_lengths, extensions, first_block, layout_version, layout, encoding, parent),
        archived!("Definition", Definition: local, id, canonical),
        archived!("Tombstone", Tombstone: below, coordinate, namespace, group, key),
        archived!("Tombstones", Tombstones: entries),
        archived!("Epoch", Epoch: below, namespace),
        archived!("Defined", Defined: local, id),
        archived!("Entry", Entry: offset, sequence, payload_bytes, header_bytes, content),
        archived!("Footer", Footer: records),
        archived!("SegmentState", SegmentState: generation, live_bytes, first_sequence, last_sequence, log_end,
            segment, state),
        archived!("DefinitionState", DefinitionState: generation, offset, segment, local, id, is_spec),
        archived!("BlockState", BlockState: expires_ms, pinned_until_ms, last_access_s, flags, name),
        archived!("RecordState", RecordState: generation, offset, sequence, payload_bytes, coordinate,
            created_ms, segment, header_bytes, namespace, spec, group, first_entry, entries_total, blocks,
            first_block, layout_version, layout, encoding, flags, parent),
        archived!("Totals", Totals: segments, definitions, records, blocks, tombstones, epochs, chunks),
    ])
}

#[allow(clippy::disallowed_methods, reason = "a test reads the document it checks")]
fn document() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/FORMAT.md");
    String::from_utf8(std::fs::read(path).unwrap()).unwrap()
}

/// The cells of the table rows that follow `<!-- KIND: NAME -->`, for each name.
fn marked_tables(document: &str, kind: &str) -> BTreeMap<String, Vec<Vec<String>>> {
    let mut tables = BTreeMap::new();
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        let name = line.strip_prefix(&format!("<!-- {kind}: ")).and_then(|rest| rest.strip_suffix(" -->"));
        let Some(name) = name else { continue };
        let rows = lines.by_ref().skip_while(|line| line.is_empty()).take_while(|line| line.starts_with('|'));
        let cells = |row: &str| row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
        let previous = tables.insert(name.to_owned(), rows.skip(2).map(cells).collect());
        assert!(previous.is_none(), "{name} twice");
    }
    tables
}

#[test]
fn the_tables_of_the_document_are_the_fields_of_the_code() {
    let documented = marked_tables(&document(), "fields");
    let expected = tables();
    let names = |keys: Vec<&str>| keys.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(
        documented.keys().cloned().collect::<BTreeSet<_>>(),
        names(expected.keys().copied().collect())
    );
    for (name, expected) in expected {
        let found: Table = documented[name]
            .iter()
            .map(|row| {
                (row[0].parse().unwrap(), row[1].parse().unwrap(), row[2].trim_matches('`').to_owned())
            })
            .collect();
        assert_eq!(found, expected, "{name}");
        assert!(documented[name].iter().all(|row| row[3].len() > 8), "{name}: a field without a meaning");
    }
}

#[test]
fn the_recovery_table_of_the_document_is_the_one_of_the_code() {
    let documented = marked_tables(&document(), "rows");
    let rows = |rows: Vec<recovery::Row>| {
        rows.into_iter()
            .map(|row| {
                let label = format!("`{}`", row.label);
                vec![label, row.severity.label().into(), row.decision.label().into(), row.cause.into()]
            })
            .collect::<Vec<Vec<String>>>()
    };
    assert_eq!(documented["records"], rows(RECORD_ROWS.iter().map(|row| row.row).collect()));
    assert_eq!(documented["segments"], rows(SEGMENT_ROWS.iter().map(|row| row.row).collect()));
}

#[test]
fn magics_and_domain_strings_of_the_document_are_those_of_the_code() {
    let documented = &marked_tables(&document(), "structures")["all"];
    let text = |bytes: &[u8]| format!("`{}`", String::from_utf8_lossy(bytes).trim_end_matches('\0'));
    let expected: Vec<Vec<String>> = Structure::ALL
        .into_iter()
        .map(|structure| {
            vec![
                text(&structure.magic()),
                structure.fixed_bytes().to_string(),
                structure.max_bytes().to_string(),
                text(structure.domain()),
                structure.rest_domain().map_or("none".to_owned(), |domain| text(domain)),
            ]
        })
        .collect();
    let found: Vec<Vec<String>> = documented.iter().map(|row| row[1..].to_vec()).collect();
    assert_eq!(found, expected);
}
