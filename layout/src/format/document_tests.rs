//! docs/FORMAT.md says what the code does: every offset in its tables, every constant, every label.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use rkyv::Archived;

use super::body::*;
use super::checkpoint::*;
use super::footer::*;
use super::record::{Body, encode};
use super::recovery::{RECORD_ROWS, SEGMENT_ROWS};
use super::*;
use crate::Geometry;

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
        archived!("SegmentState", SegmentState: generation, first_sequence, last_sequence, log_end, segment, state),
        archived!("RecordState", RecordState: generation, offset, expires_ms, segment, last_access_s),
        archived!("Totals", Totals: segments, namespaces, records, tombstones, epochs, chunks),
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

#[test]
fn the_example_of_a_geometry_encodes_as_the_document_says() {
    let geometry = Geometry::opaque(65_536).unwrap();
    let hex: String = geometry.canonical_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let example = format!("\nencoding     {hex}\nfingerprint  {}\n", geometry.fingerprint());
    assert!(document().contains(&example), "{example}");
}

/// The header of a record as written is never longer than the layouts reckon with, and no page shorter.
#[test]
fn a_records_header_takes_the_pages_that_overheads_are_computed_with() {
    for (blocks, chunks) in [(1u32, 1u32), (1, 183), (16, 80), (64, 275), (256, 61)] {
        let body = Blocks {
            blocks: vec![BlockName { key: [1; 32], origin: [2; 16] }; blocks as usize],
            stored_lengths: Vec::new(),
            extensions: Vec::new(),
            encoding: ENCODING_RAW,
            ..samples::blocks()
        };
        let digests = vec![0; (blocks * chunks) as usize];
        let fields = record::Fields { payload_bytes: 1 << 20, ..samples::fields() };
        let body = Body::Blocks(body);
        let image = encode(&samples::position(4096), &samples::secret(), &fields, &body, &digests).unwrap();
        let bytes = image.len() as u64;
        let reckoned = crate::arrange::record_header_bytes(blocks, chunks);
        assert!(
            bytes <= reckoned && reckoned - bytes <= PAGE_BYTES,
            "{blocks} x {chunks}: {bytes}, {reckoned}"
        );
    }
}

/// A reader of the archive made from the document's words alone.
struct ByHand<'a>(&'a [u8]);

impl<'a> ByHand<'a> {
    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.0[at..at + 2].try_into().unwrap())
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    /// Where a list's elements begin, and how many there are.
    fn list(&self, at: usize) -> (usize, usize) {
        let distance = self.u32(at) as i32 as isize;
        (at.checked_add_signed(distance).unwrap(), self.u32(at + 4) as usize)
    }
}

#[test]
fn a_record_can_be_read_by_the_words_of_the_document() {
    let (_, image) = samples::record();
    let body_bytes = u32::from_le_bytes(image[76..80].try_into().unwrap()) as usize;
    let body = ByHand(&image[128..128 + body_bytes]);
    let root = body_bytes - 112;
    let expected = samples::blocks();
    assert_eq!(body.u64(root), expected.coordinate);
    assert_eq!(body.u64(root + 16), expected.expires_ms);
    assert_eq!(body.u32(root + 28), expected.spec);
    let (blocks, count) = body.list(root + 36);
    assert_eq!(count, 2);
    assert_eq!(body.0[blocks + 48..blocks + 80], expected.blocks[1].key);
    assert_eq!(body.0[blocks + 80..blocks + 96], expected.blocks[1].origin);
    let (extensions, count) = body.list(root + 52);
    assert_eq!((count, body.u16(extensions), body.0[extensions + 2]), (2, EXTENSION_ENCRYPTION, 1));
    let (user, length) = body.list(extensions + 12 + 4);
    assert_eq!((body.u16(extensions + 12), &body.0[user..user + length]), (EXTENSION_USER, &b"agent-7"[..]));
    assert_eq!((body.0[root + 60], body.u32(root + 64)), (1, 16));
    assert_eq!(body.u16(root + 68), expected.layout_version);
    assert_eq!((body.0[root + 72], &body.0[root + 73..root + 105]), (1, &[0x10; 32][..]));
    let digests = (128 + body_bytes).next_multiple_of(16);
    assert_eq!(ByHand(&image).u32(digests + 4), 0xaaaa_0002);
}

#[test]
fn a_footer_can_be_read_by_the_words_of_the_document() {
    let (_, image) = samples::footer_image();
    let body_bytes = u32::from_le_bytes(image[76..80].try_into().unwrap()) as usize;
    let body = ByHand(&image[128..128 + body_bytes]);
    let (entries, count) = body.list(body_bytes - 8);
    assert_eq!(count, samples::footer().records.len());
    let content = |number: usize| entries + number * 152 + 32;
    assert_eq!(body.u64(entries + 152), samples::footer().records[1].offset);
    assert_eq!(count, 6);
    let variants: Vec<u8> = (0..count).map(|number| body.0[content(number)]).collect();
    assert_eq!(variants, [1, 2, 0, 3, 4, 5]);
    assert_eq!((body.u32(content(0) + 4), body.0[content(0) + 8]), (1, 0x31));
    assert_eq!(body.u64(content(2) + 8), samples::blocks().coordinate);
    let (tombstones, count) = body.list(content(3) + 4);
    assert_eq!((count, body.u64(tombstones), body.0[tombstones + 8]), (2, 60, 0));
    assert_eq!((body.0[tombstones + 72 + 8], body.u64(tombstones + 72 + 16)), (1, 0));
    assert_eq!((body.u64(content(4) + 8), body.0[content(4) + 16]), (62, 0x31));
    assert_eq!(body.u16(content(5) + 2), 999);
}

#[test]
fn the_tags_of_a_record_are_computed_as_the_document_says() {
    let (_, image) = samples::record();
    let key: [u8; 32] = std::array::from_fn(|i| 0xc0 ^ i as u8);
    let tag = |domain: &[u8], content: &[u8]| {
        let mut input = domain.to_vec();
        input.resize(24, 0);
        input.extend_from_slice(&image[32..72]);
        input.extend_from_slice(content);
        blake3::keyed_hash(&key, &input).as_bytes()[..16].to_vec()
    };
    assert_eq!(image[80..96], tag(b"kvarts record rest", &image[128..]));
    let mut fixed = image[..128].to_vec();
    fixed[16..32].fill(0);
    assert_eq!(image[16..32], tag(b"kvarts record", &fixed));
    let crc = crc32fast::hash(&[&image[..12], &image[32..128]].concat());
    assert_eq!(image[12..16], crc.to_le_bytes());
}
