//! Labels that neither chance damage nor the engine produces, from stores that are written by hand: what only a mistaken or
//! a newer writer leaves. And: every label of the checker's own has a test that names it and a row in docs/FORMAT.md.

use std::collections::BTreeSet;

use kvarts_fsck::check::{Checked, Level};
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::findings::{Finding, LABELS};
use kvarts_layout::format::body::{
    BlockName, Blocks, Definition, ENCODING_RAW, EXTENSION_ENCRYPTION, Epoch, Extension, Parent,
};
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::seal::{FORMAT_VERSION, claimed_position, claimed_structure};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::{PAGE, Position, Secret, Structure, VERSION, fuzz};
use kvarts_layout::{Layout, RunLayout, StoreId};
use kvarts_tests::fixture;
use kvarts_tests::sim::Seed;
use kvarts_tests::witness::{directories, examine, problems, small, worked};

const SEGMENT_BYTES: u64 = 256 << 10;
const SEGMENT: &str = "shard-0000/segment-00000000";
const ID: StoreId = StoreId([3; 16]);
const BLOCKS: u32 = 3;

fn secret() -> Secret {
    Secret::new([9; 32])
}

fn superblock() -> Superblock {
    Superblock {
        store: ID,
        directory: 0,
        sequence: 2,
        secret: secret(),
        created_ms: 1,
        segment_bytes: SEGMENT_BYTES,
        min_reader: VERSION,
        clean: false,
        directories: 1,
        shards_total: 1,
        shards: vec![0],
        membership: Membership::default(),
    }
}

fn slots(first: &Superblock, second: &Superblock) -> Vec<u8> {
    [first.encode(0).unwrap(), second.encode(1).unwrap()].concat()
}

/// What a segment is written with: each may be mistaken.
struct Draft {
    spec: Definition,
    identity: Definition,
    blocks: Blocks,
    payload: Vec<u8>,
    /// Whether each record says that all before it had been flushed, and one follows that does.
    durable: bool,
    /// Records of definitions that are written.
    defined: bool,
    /// Changes the header of the record of blocks; then it is made to prove itself again.
    header: fn(&mut [u8]),
    /// Changes what stands on the page behind the payload's last byte.
    padding: fn(&mut [u8]),
}

impl Draft {
    fn new() -> Self {
        let (identity, geometry) = (fixture::identity("r1"), fixture::geometry());
        let definition = |local, id, canonical| Definition { local, id, canonical };
        let (group, coordinate) = fixture::columns()[1];
        let run = RunLayout::new(Layout::FullBlock, 1, &fixture::shape(group, coordinate), BLOCKS).unwrap();
        let name = |n: u32| BlockName { key: fixture::key(1, n.into()).0, origin: [n as u8; 16] };
        Self {
            spec: definition(1, geometry.fingerprint().0, geometry.canonical_bytes()),
            identity: definition(2, identity.namespace_id().unwrap().0, identity.encode().unwrap()),
            blocks: Blocks {
                coordinate: coordinate.to_u64(),
                created_ms: 5,
                expires_ms: 0,
                namespace: 2,
                spec: 1,
                group: group.0,
                blocks: (0..BLOCKS).map(name).collect(),
                stored_lengths: vec![],
                extensions: vec![],
                first_block: Some(0),
                layout_version: 1,
                layout: 0,
                encoding: ENCODING_RAW,
                parent: Parent::Root,
            },
            payload: vec![0; run.payload_bytes() as usize],
            durable: true,
            defined: true,
            header: |_| {},
            padding: |_| {},
        }
    }

    fn digests(&self) -> Vec<u32> {
        let (group, coordinate) = fixture::columns()[1];
        let shape = fixture::shape(group, coordinate);
        let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
        let of_block: Vec<u32> =
            chunks.map(|chunk| crc32fast::hash(&vec![0; chunk.bytes as usize])).collect();
        of_block.repeat(BLOCKS as usize)
    }

    /// The segment, with the page of its record of blocks.
    fn store(self) -> (MemoryDisk, usize) {
        let segment = Position { store: ID, shard: 0, segment: 0, generation: 1, offset: 0 };
        let header = SegmentHeader {
            position: segment,
            secret: secret(),
            created_ms: 1,
            segment_bytes: SEGMENT_BYTES,
            first_sequence: 1,
        };
        let mut image = header.encode().unwrap();
        let digests = self.digests();
        let mut bodies = vec![];
        if self.defined {
            bodies.push((Body::Spec(self.spec.clone()), vec![], &[][..]));
            bodies.push((Body::Identity(self.identity.clone()), vec![], &[]));
        }
        bodies.push((Body::Blocks(self.blocks.clone()), digests, &self.payload));
        if self.durable {
            bodies.push((Body::Epoch(Epoch { below: 1, namespace: [1; 32] }), vec![], &[]));
        }
        let mut at = 0;
        for (sequence, (body, digests, payload)) in (1..).zip(bodies) {
            let position = segment.at(image.len() as u64);
            let durable_upto = if self.durable { position.offset } else { 0 };
            let fields = Fields { sequence, durable_upto, payload_bytes: payload.len() as u64 };
            let mut head = record::encode(&position, &secret(), &fields, &body, &digests).unwrap();
            if !payload.is_empty() {
                at = image.len();
                (self.header)(&mut head);
                fuzz::prove(Structure::Record, &mut head, &position, &secret());
            }
            image.extend(head);
            image.extend(payload);
            let end = image.len();
            image.resize(end.next_multiple_of(PAGE), 0);
            if !payload.is_empty() {
                (self.padding)(&mut image[end..]);
            }
        }
        image.resize(SEGMENT_BYTES as usize, 0);
        let disk = MemoryDisk::new();
        disk.plant("superblock", slots(&superblock(), &superblock()));
        disk.plant(SEGMENT, image);
        (disk, at)
    }
}

fn look(disk: &MemoryDisk) -> Checked {
    let before: Vec<_> = disk.files().into_iter().map(|path| disk.contents(&path)).collect();
    let quick = examine(std::slice::from_ref(disk), Level::Quick).unwrap();
    let checked = examine(std::slice::from_ref(disk), Level::Full).unwrap();
    let deep = examine(std::slice::from_ref(disk), Level::Deep).unwrap();
    assert_eq!(deep.findings.problem_count, checked.findings.problem_count, "{}", problems(&deep));
    assert!(quick.findings.problem_count <= checked.findings.problem_count, "{}", problems(&quick));
    assert!(disk.steps().is_empty(), "a check wrote something");
    assert!(before.iter().eq(&disk.files().into_iter().map(|path| disk.contents(&path)).collect::<Vec<_>>()));
    checked
}

/// The only finding under a label, and whether the store is clean.
fn only(disk: &MemoryDisk, label: &str) -> (Finding, bool) {
    let checked = look(disk);
    let all = checked.findings.problems.iter().chain(&checked.findings.notes);
    let found: Vec<&Finding> = all.filter(|one| one.label.name == label).collect();
    let [one] = found[..] else { panic!("{label}: {:?}", checked.findings) };
    (one.clone(), checked.findings.is_clean())
}

#[test]
fn a_sound_store_that_was_written_by_hand_is_clean_and_has_nothing_to_say() {
    for durable in [true, false] {
        let (disk, _) = Draft { durable, ..Draft::new() }.store();
        let checked = look(&disk);
        assert!(checked.findings.is_clean() && checked.findings.notes.is_empty(), "{:?}", checked.findings);
        assert_eq!(checked.blocks, u64::from(BLOCKS));
    }
}

#[test]
fn a_definition_that_contradicts_itself_is_named_and_costs_the_blocks_that_need_it() {
    let mut wrong_spec = Draft::new();
    wrong_spec.spec.id[0] ^= 1;
    let mut wrong_name = Draft::new();
    wrong_name.identity.id[0] ^= 1;
    let mut garbled = Draft::new();
    garbled.identity.canonical = vec![0xff; 40];
    for (what, draft) in [("spec", wrong_spec), ("identity", wrong_name), ("garbled", garbled)] {
        let (disk, at) = draft.store();
        let (finding, clean) = only(&disk, "definition-damaged");
        assert!(!clean && finding.place.offset < Some(at as u64), "{what}: {finding:?}");
        let (undefined, _) = only(&disk, "record-undefined");
        let place = (undefined.place.offset, undefined.blocks);
        assert_eq!(place, (Some(at as u64), u64::from(BLOCKS)), "{what}");
    }
}

#[test]
fn a_payload_of_another_length_than_its_spec_gives_is_named_with_its_blocks() {
    let mut short = Draft::new();
    short.payload.truncate(short.payload.len() - 1);
    let mut long = Draft::new();
    long.payload.extend([0; 5000]);
    let mut strange = Draft::new();
    strange.blocks.group = 77;
    for (what, draft) in [("short", short), ("long", long), ("no such group", strange)] {
        let (disk, at) = draft.store();
        let (finding, clean) = only(&disk, "payload-length");
        assert!(!clean, "{what}");
        assert_eq!((finding.place.offset, finding.blocks), (Some(at as u64), u64::from(BLOCKS)), "{what}");
    }
}

#[test]
fn payloads_that_cannot_be_verified_are_notes_and_stay() {
    let mut encrypted = Draft::new();
    encrypted.blocks.extensions =
        vec![Extension { id: EXTENSION_ENCRYPTION, critical: true, bytes: vec![1; 16] }];
    let algorithm = Draft { header: |head| head[record::DIGEST_ALGORITHM.offset] = 9, ..Draft::new() };
    let mut layout = Draft::new();
    layout.blocks.layout = 9;
    for (label, draft) in
        [("encrypted-payload", encrypted), ("unknown-digest", algorithm), ("unknown-encoding", layout)]
    {
        let (disk, at) = draft.store();
        let (finding, clean) = only(&disk, label);
        assert!(clean && finding.place.offset == Some(at as u64), "{label}: {finding:?}");
    }
}

#[test]
fn what_had_not_been_flushed_may_lack_its_definitions_and_its_padding() {
    let (disk, at) = Draft { durable: false, defined: false, ..Draft::new() }.store();
    let (finding, clean) = only(&disk, "record-undefined-tail");
    assert!(clean && finding.place.offset == Some(at as u64), "{finding:?}");
    let (disk, _) = Draft { defined: false, ..Draft::new() }.store();
    assert!(!only(&disk, "record-undefined").1);
    // The payload is no multiple of a page, so that there is room behind it.
    assert!(!Draft::new().payload.len().is_multiple_of(PAGE), "no padding to be torn");
    let dirty: fn(&mut [u8]) = |padding| padding.fill(0x5a);
    let (disk, _) = Draft { durable: false, padding: dirty, ..Draft::new() }.store();
    assert!(only(&disk, "padding-torn").1);
    let (disk, _) = Draft { padding: dirty, ..Draft::new() }.store();
    assert!(!only(&disk, "padding-not-zero").1);
}

#[test]
fn slots_of_a_superblock_that_are_lost_contradict_each_other_or_are_newer_are_named() {
    let (disk, _) = Draft::new().store();
    let with = |image: Vec<u8>| {
        let disk = disk.fork();
        disk.plant("superblock", image);
        disk
    };
    let state = superblock();
    let other = Superblock { created_ms: 2, ..state.clone() };
    let (finding, clean) = only(&with(slots(&state, &other)), "superblock-conflict");
    assert!(!clean && finding.file.is_some_and(|file| file.ends_with("/superblock")));
    let stranger = Superblock { store: StoreId([8; 16]), ..state.clone() };
    assert!(!only(&with(slots(&state, &stranger)), "superblock-conflict").1);
    let newer = Superblock { min_reader: VERSION + 1, ..state.clone() };
    let (finding, clean) = only(&with(slots(&state, &newer)), "superblock-slot-newer");
    assert_eq!((clean, finding.place.offset), (false, Some(PAGE as u64)));
    let (finding, _) = only(&with(slots(&newer, &state)), "superblock-slot-newer");
    assert_eq!(finding.place.offset, Some(0));
    let mut flipped = slots(&state, &state);
    flipped[PAGE + 100] ^= 1;
    let (finding, clean) = only(&with(flipped), "superblock-slot-damaged");
    assert_eq!((clean, finding.place.offset), (false, Some(PAGE as u64)));
    let mut zeroed = slots(&state, &state);
    zeroed[..PAGE].fill(0);
    let (finding, clean) = only(&with(zeroed), "superblock-slot-lost");
    assert_eq!((clean, finding.place.offset), (false, Some(0)));
    // Whatever is wrong with a slot, the blocks are there.
    for image in [slots(&state, &other), slots(&state, &newer)] {
        assert_eq!(look(&with(image)).blocks, u64::from(BLOCKS));
    }
}

#[test]
fn folders_that_are_gone_too_many_or_closed_are_named() {
    let (disk, _) = Draft::new().store();
    let more = disk.fork();
    more.plant_folder("shard-0009");
    let (finding, clean) = only(&more, "shard-unexpected");
    assert_eq!((clean, finding.place.shard), (false, Some(9)));
    let gone = disk.fork();
    gone.remove_folder("shard-0000");
    let (finding, clean) = only(&gone, "shard-missing");
    assert_eq!((clean, finding.place.shard, finding.uncounted), (false, Some(0), Some(0)));
    let store = directories(&worked(Seed(71), &small(2), 30, true)).remove(0);
    store.refuse("shard-0001");
    let (finding, clean) = only(&store, "folder-unreadable");
    assert!(!clean && finding.file.is_some_and(|file| file.ends_with("/shard-0001")));
    // Nothing else is said: what is in it can still be there.
    assert_eq!(look(&store).findings.problem_count, 1, "{}", problems(&look(&store)));
}

/// A structure as a newer program writes it: what it may not change is as it was.
fn newer(page: &mut [u8], secret: &Secret) -> Structure {
    let structure = claimed_structure(page).unwrap();
    let position = claimed_position(page).unwrap();
    page[FORMAT_VERSION.offset..][..2].copy_from_slice(&(VERSION + 1).to_le_bytes());
    fuzz::prove(structure, page, &position, secret);
    structure
}

#[test]
fn single_structures_of_a_newer_program_are_named_and_left_as_they_are() {
    let disk = directories(&worked(Seed(72), &small(1), 40, true)).remove(0);
    let sound = Superblock::decode_pair(&disk.contents("superblock").unwrap(), None).unwrap().superblock;
    let mut seen = BTreeSet::new();
    for path in disk.files() {
        let bytes = disk.contents(&path).unwrap();
        for at in (0..bytes.len()).step_by(PAGE) {
            let Some(structure) = claimed_structure(&bytes[at..]) else { continue };
            let expected: &[&str] = match structure {
                Structure::Superblock => &["superblock-slot-newer"],
                Structure::SegmentHeader => &["segment-newer"],
                Structure::Trailer => &["trailer-newer"],
                Structure::CheckpointHeader => &["checkpoint-newer"],
                Structure::Record => &["newer-record"],
                // A newer shape of these is not recognised apart from damage: what names them is of this version.
                Structure::Footer | Structure::CheckpointChunk => continue,
            };
            if !seen.insert(format!("{structure:?}")) && structure == Structure::Record {
                continue;
            }
            let later = disk.fork();
            later.tamper(&path, |bytes| {
                let len = match structure {
                    Structure::Record => {
                        u32::from_le_bytes(bytes[at + 72..at + 76].try_into().unwrap()) as usize
                    }
                    _ => PAGE,
                };
                assert_eq!(newer(&mut bytes[at..at + len], &sound.secret), structure);
            });
            let checked = look(&later);
            let named = expected.iter().any(|label| checked.findings.times(label) > 0);
            assert!(named, "{structure:?} in {path} at {at}: {:?}", checked.findings.counts);
        }
    }
    assert_eq!(seen.len(), 5, "{seen:?}");
    // A checkpoint is only a shortcut: that of a newer program is a note.
    let later = disk.fork();
    let slot =
        (0..2).map(|slot| format!("shard-0000/checkpoint-{slot}")).find(|path| later.open(path).is_ok());
    later.tamper(&slot.unwrap(), |bytes| {
        newer(&mut bytes[..PAGE], &sound.secret);
    });
    let (finding, _) = only(&later, "checkpoint-newer");
    assert!(!finding.is_problem() && finding.file.is_some_and(|file| file.contains("checkpoint-")));
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a test reads the tests and the document beside it")]
fn every_label_of_the_checkers_own_has_a_test_that_names_it_and_a_row_in_the_document() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tests = String::new();
    let folders = [
        "tests",
        "../fsck/src",
        "../fsck/src/check",
        "../fsck/src/check/deep",
        "../fsck/src/repair",
        "../kvarts/tests",
    ];
    for folder in folders.map(|folder| here.join(folder)) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let is_test =
                |name: &str| name.starts_with("fsck_") || name.contains("tests") || name.starts_with("lost_");
            if path.extension().is_some_and(|ending| ending == "rs")
                && path.file_name().is_some_and(|name| is_test(&name.to_string_lossy()))
            {
                tests += &std::fs::read_to_string(&path).unwrap();
            }
        }
    }
    let document = std::fs::read_to_string(here.join("../docs/FORMAT.md")).unwrap();
    for label in LABELS {
        let name = label.name;
        assert!(tests.contains(&format!("\"{name}\"")), "no test names {name}");
        let row = format!("| `{name}` | {} | {} |", label.severity.label(), label.cause);
        assert!(document.contains(&row), "docs/FORMAT.md has no such row: {row}");
    }
}
