//! The bytes in a bucket do not change by accident, and no bit of them can change unnoticed.
//!
//! `KVARTS_BLESS=1` writes the golden files anew; that is a change of the format.

use kvarts_layout::export::{HEAD_BYTES, Writing};
use kvarts_layout::{Coordinate, Group};
use proptest::prelude::*;

use super::deletions::{DELETES_MAX, KEYS_MAX};
use super::samples::*;
use super::*;

#[allow(clippy::disallowed_methods, reason = "golden files")]
fn golden(name: &str, bytes: &[u8]) {
    let path = format!("{}/testdata/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("KVARTS_BLESS").is_some() {
        std::fs::write(&path, bytes).unwrap();
    }
    assert!(std::fs::read(&path).unwrap() == bytes, "{name} is not what is written now");
}

#[test]
fn the_bytes_of_a_pack_an_index_and_a_manifest_are_golden() {
    let pack = pack();
    golden("pack.bin", &whole(&pack));
    golden("index.bin", &pack.index);
    golden("manifest.bin", &manifest().encode().unwrap());
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a golden file")]
fn a_manifest_of_the_version_without_deletes_is_read_and_knows_of_none() {
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/manifest-1.bin")).unwrap();
    let read = Manifest::decode(&bytes).unwrap();
    let Manifest { begun_ms, deletions, .. } = Manifest::empty(namespace_id("r1"));
    assert_eq!(read, Manifest { begun_ms, deletions, ..manifest() });
    // It is written as one of this version.
    let again = read.encode().unwrap();
    assert_eq!((again[8], Manifest::decode(&again)), (manifest::VERSION as u8, Ok(read)));
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            assert!(Manifest::decode(&flipped).is_err(), "byte {at}, bit {bit}");
        }
    }
}

#[test]
fn an_index_says_of_each_block_where_its_bytes_are_in_the_pack() {
    let pack = pack();
    let index = PackIndex::decode(&pack.index).unwrap();
    let bytes = whole(&pack);
    assert_eq!((index.id(), index.namespace_id()), (pack.id, namespace_id("r1")));
    assert_eq!(index.pack_bytes(), bytes.len() as u64);
    assert_eq!(pack.entry.pack_bytes(), bytes.len() as u64);
    assert_eq!((index.totals().blocks, index.totals().runs, index.runs().len()), (4, 2, 2));
    for (prefix, block) in [(1, 0), (1, 1), (1, 2), (2, 4)] {
        let key = key(prefix, block);
        let place = index.find(&key, Group(0), Coordinate::Replicated).unwrap();
        let run = index.run(place.run).unwrap();
        let at = run.block_at(place.block) as usize;
        assert_eq!(bytes[at..at + BLOCK], bytes_of(prefix, block));
        assert!(pack.entry.may_have(fingerprint(&key)));
        assert!(index.find(&key, Group(1), Coordinate::Replicated).is_none());
    }
    assert!(index.find(&key(1, 3), Group(0), Coordinate::Replicated).is_none());
}

#[test]
fn a_pack_is_an_export_file_and_gives_its_index_back() {
    let pack = pack();
    let (index, bytes) = pack::verify(&whole(&pack)).unwrap();
    assert_eq!((index.id(), bytes), (pack.id, pack.index.to_vec()));
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let pack = pack();
    let bytes = whole(&pack);
    let manifest = manifest().encode().unwrap();
    let is_same_pack = |bytes: &[u8]| pack::verify(bytes).is_ok_and(|(index, _)| index.id() == pack.id);
    let is_same_index = |bytes: &[u8]| PackIndex::decode(bytes).is_ok_and(|index| index.id() == pack.id);
    let is_manifest = |bytes: &[u8]| Manifest::decode(bytes).is_ok();
    type Whole<'a> = (&'a [u8], &'a dyn Fn(&[u8]) -> bool);
    let all: [Whole<'_>; 3] =
        [(&bytes, &is_same_pack), (&pack.index, &is_same_index), (&manifest, &is_manifest)];
    for (which, (sound, is_sound)) in all.into_iter().enumerate() {
        assert!(is_sound(sound));
        for at in 0..sound.len() {
            for bit in 0..8 {
                let mut flipped = sound.to_vec();
                flipped[at] ^= 1 << bit;
                assert!(!is_sound(&flipped), "object {which}, byte {at}, bit {bit}");
            }
            assert!(!is_sound(&sound[..at]), "object {which} cut at {at}");
        }
        assert!(!is_sound(&[sound, &[0]].concat()), "object {which} with a byte behind it");
    }
}

#[test]
fn the_name_of_a_pack_follows_from_its_blocks() {
    let of = |begin_ms, runs: &[(u8, u32, u32)]| {
        let mut builder = PackBuilder::new(&namespace("r1"), begin_ms).unwrap();
        for &(prefix, from, to) in runs {
            let (run, payload) = run("r1", prefix, from, to);
            builder.add(&run, payload).unwrap();
        }
        builder.finish(0).unwrap().id
    };
    let one = of(5, &[(1, 0, 2)]);
    assert_eq!(one, of(5, &[(1, 0, 2)]));
    let others =
        [of(6, &[(1, 0, 2)]), of(5, &[(1, 0, 3)]), of(5, &[(2, 0, 2)]), of(5, &[(1, 0, 1), (1, 1, 2)])];
    assert!(!others.contains(&one));
}

#[test]
fn a_builder_refuses_what_is_no_pack() {
    let empty = || PackBuilder::new(&namespace("r1"), 5).unwrap();
    assert!(empty().finish(0).is_err());
    let (one, payload) = run("r1", 1, 0, 2);
    let mut twice = empty();
    twice.add(&one, payload.clone()).unwrap();
    assert_eq!(twice.add(&one, payload.clone()), Err(FormatError::Rule("a block is in the pack twice")));
    let (other, _) = run("r2", 1, 0, 2);
    assert_eq!(
        empty().add(&other, payload.clone()),
        Err(FormatError::Rule("the blocks of a pack must have one namespace"))
    );
    let mut altered = payload.to_vec();
    altered[200] ^= 1;
    assert!(matches!(empty().add(&one, altered.into()), Err(FormatError::Block(_))));
    assert_eq!(empty().add(&one, payload.slice(1..)), Err(FormatError::Damaged));
}

#[test]
fn room_ends_with_the_target_and_one_large_block_is_a_pack() {
    let mut builder = PackBuilder::new(&namespace("r1"), 5).unwrap();
    assert_eq!(builder.room(BLOCK as u64, 6, 1000), 5);
    assert_eq!(builder.room(5000, 6, 1000), 1);
    assert_eq!(builder.room(BLOCK_MAX + 1, 6, 1000), 0);
    let (run, payload) = run("r1", 1, 0, 4);
    builder.add(&run, payload).unwrap();
    assert_eq!(builder.room(BLOCK as u64, 6, 1000), 1);
    assert_eq!(builder.room(5000, 6, 1000), 0);
}

/// A pack's frames by hand, whose name is right whatever they are.
fn index_of(parts: &dyn Fn(&mut Writing) -> Vec<Vec<u8>>) -> Result<PackIndex, FormatError> {
    let mut writing = Writing::new();
    let mut bytes = writing.begin(5).unwrap();
    bytes.extend(parts(&mut writing).concat());
    bytes.extend(writing.end().unwrap());
    PackIndex::decode(&bytes)
}

#[test]
fn whole_files_that_are_no_pack_are_refused() {
    let (one, _) = run("r1", 1, 0, 2);
    let define = |writing: &mut Writing, revision: &str| {
        vec![writing.spec(&geometry()).unwrap(), writing.identity(&identity(revision)).unwrap()]
    };
    let whole = index_of(&|writing| {
        let mut frames = define(writing, "r1");
        frames.push(writing.run(&one).unwrap());
        frames
    });
    assert_eq!(whole.unwrap().totals().blocks, 2);
    let error = |parts: &dyn Fn(&mut Writing) -> Vec<Vec<u8>>| index_of(parts).map(|_| ()).unwrap_err();
    let empty = error(&|writing| define(writing, "r1"));
    assert_eq!(empty, FormatError::Rule("the number of blocks of a pack is outside its limits"));
    assert_eq!(error(&|_| vec![]), FormatError::Rule("the blocks of a pack must have one namespace"));
    let two = error(&|writing| {
        let mut frames = define(writing, "r1");
        frames.push(writing.identity(&identity("r2")).unwrap());
        frames.push(writing.run(&one).unwrap());
        frames
    });
    assert_eq!(two, FormatError::Rule("the blocks of a pack must have one namespace"));
    let doubled = error(&|writing| {
        let mut frames = define(writing, "r1");
        frames.push(writing.run(&one).unwrap());
        frames.push(writing.run(&one).unwrap());
        frames
    });
    assert_eq!(doubled, FormatError::Rule("a block is in the pack twice"));
}

#[test]
fn a_manifest_comes_back_as_it_was_written() {
    let manifest = manifest();
    assert_eq!(Manifest::decode(&manifest.encode().unwrap()), Ok(manifest));
}

#[test]
fn a_manifest_outside_its_bounds_is_neither_written_nor_read() {
    let mut both = manifest();
    let (id, _) = both.packs.first_key_value().unwrap();
    both.condemned.insert(*id, 1);
    assert!(both.encode().is_err());
    let mut never = manifest();
    never.generation = 0;
    assert!(never.encode().is_err());
    let changed = |change: &dyn Fn(&mut PackEntry)| {
        let mut manifest = manifest();
        change(manifest.packs.first_entry().unwrap().get_mut());
        manifest.encode().is_err()
    };
    assert!(changed(&|pack| pack.filter = vec![]));
    assert!(changed(&|pack| pack.filter = vec![2, 2]));
    assert!(changed(&|pack| pack.blocks = 0));
    assert!(changed(&|pack| pack.payload_bytes = PACK_PAYLOAD_MAX + 1));
    assert!(changed(&|pack| pack.runs = pack.blocks + 1));
    let mut full = Manifest::empty(namespace_id("r1"));
    full.generation = 1;
    let entry = pack().entry;
    for at in 0..=manifest::PACKS_MAX as u32 {
        assert!(full.check().is_ok());
        let mut id = [0; 32];
        id[..4].copy_from_slice(&at.to_le_bytes());
        full.packs.insert(PackId(id), entry.clone());
    }
    assert_eq!(full.check(), Err(FormatError::Rule("the manifest is full: it cannot list more packs")));
}

#[test]
fn a_list_of_deletes_outside_its_bounds_is_neither_written_nor_read() {
    let refused = |change: &dyn Fn(&mut Deletions)| {
        let mut manifest = manifest();
        change(&mut manifest.deletions);
        manifest.encode().is_err()
    };
    let delete = |generation| Delete { generation, at_ms: 1 };
    // Of a generation that never was, or is not yet.
    assert!(refused(&|deletions| deletions.keys.extend([(1, delete(0))])));
    assert!(refused(&|deletions| deletions.keys.extend([(1, delete(8))])));
    assert!(refused(&|deletions| deletions.listed_after = 8));
    assert!(refused(
        &|deletions| deletions.keys = (0..=KEYS_MAX as u64).map(|key| (key, delete(1))).collect()
    ));
    let many = |at_ms| Delete { generation: 1, at_ms };
    assert!(refused(
        &|deletions| deletions.keys = (0..=DELETES_MAX as u64).map(|key| (key, many(key))).collect()
    ));
}

#[test]
fn the_oldest_deletes_are_folded_into_what_refuses_all_that_was_listed_before() {
    let at = |generation| Delete { generation, at_ms: generation * 10 };
    let mut deletions = Deletions::default();
    for generation in 1..=(DELETES_MAX as u64 + 2) {
        deletions.add_keys([generation], at(generation));
    }
    assert_eq!((deletions.keys.len(), deletions.listed_after, deletions.forgotten_ms), (DELETES_MAX, 2, 20));
    let listed =
        |since, fingerprint, created_ms| deletions::Listed { since: Some(since), fingerprint, created_ms };
    // What was listed before a delete that is kept or folded is hidden, and nothing else.
    for (since, fingerprint, is_hidden) in
        [(1, 77_777, true), (2, 77_777, false), (2, 3, true), (3, 3, false)]
    {
        assert_eq!(deletions.hides(listed(since, fingerprint, 1 << 40)), is_hidden, "{since} {fingerprint}");
    }
    assert!(deletions.is_doubtful(20) && !deletions.is_doubtful(21));
    // One that has too many keys by itself.
    deletions.add_keys(0..=KEYS_MAX as u64, at(9000));
    assert_eq!((deletions.keys.len(), deletions.listed_after, deletions.forgotten_ms), (0, 9000, 90_000));
}

#[test]
fn what_was_produced_before_a_delete_is_hidden_whenever_it_was_listed() {
    let mut deletions = Deletions::default();
    deletions.add_keys([5, 6], Delete { generation: 3, at_ms: 100 });
    deletions.add_keys([6], Delete { generation: 4, at_ms: 0 });
    let hides = |deletions: &Deletions, fingerprint, created_ms| {
        deletions.hides(deletions::Listed { since: Some(9), fingerprint, created_ms })
    };
    assert!(hides(&deletions, 5, 100) && hides(&deletions, 6, 100), "a shorter life does not undo a delete");
    assert!(!hides(&deletions, 5, 101) && !hides(&deletions, 7, 1));
    deletions.add_all(Delete { generation: 5, at_ms: 200 });
    assert!(hides(&deletions, 7, 200) && !hides(&deletions, 5, 201) && deletions.keys.is_empty());
    assert!(deletions.hides(deletions::Listed { since: None, fingerprint: 7, created_ms: 1 << 40 }));
}

#[test]
fn a_newer_manifest_is_told_from_a_damaged_one() {
    let mut bytes = manifest().encode().unwrap();
    bytes[8] = 3;
    assert_eq!(Manifest::decode(&bytes), Err(FormatError::Newer(3)));
}

#[test]
fn counts_that_promise_more_than_is_there_allocate_nothing() {
    let mut bytes = manifest().encode().unwrap();
    bytes.truncate(bytes.len() - 32);
    // The counts, that of the first pack's fingerprints, and that of the last delete's keys.
    let last = bytes.len() - manifest().deletions.keys.len() * 8 - 4;
    for at in [12, 16, 20, 104, 108, 180, last] {
        let mut claims = bytes.clone();
        claims[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(Manifest::decode(&manifest::sealed(claims)), Err(FormatError::Rule(_))), "{at}");
    }
    // An index whose first frame claims a body that is not there.
    let mut index = pack().index.to_vec();
    index[12..16].copy_from_slice(&(16u32 << 20).to_le_bytes());
    assert_eq!(PackIndex::decode(&index[..HEAD_BYTES + 8]).map(|_| ()), Err(FormatError::Damaged));
}

type Entry = (u64, u64, u64, u32, std::collections::BTreeSet<u32>);

fn entries() -> impl Strategy<Value = std::collections::BTreeMap<[u8; 32], Entry>> {
    let filter = proptest::collection::btree_set(any::<u32>(), 1..20);
    let entry = (1..=PACK_PAYLOAD_MAX, any::<u64>(), any::<u64>(), 0..=(INDEX_BYTES_MAX as u32), filter);
    proptest::collection::btree_map(any::<[u8; 32]>(), entry, 0..20)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_read_or_refused(data in proptest::collection::vec(any::<u8>(), 0..600)) {
        fuzz_cold(&data);
    }

    #[test]
    fn what_is_nearly_sound_is_read_or_refused(
        which in 0usize..3,
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let pack = pack();
        let manifest = manifest().encode().unwrap();
        // Without its hash, which the fuzzer makes right.
        let unsealed = manifest[..manifest.len() - 32].to_vec();
        let mut bytes = [whole(&pack), pack.index.to_vec(), unsealed][which].clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fuzz_cold(&bytes);
    }

    #[test]
    fn any_manifest_within_bounds_comes_back(
        entries in entries(),
        condemned in proptest::collection::btree_map(any::<[u8; 32]>(), any::<u64>(), 0..20),
        generation in 1u64..,
        (begun_ms, made_after_ms, forgotten_ms) in any::<(u64, u64, u64)>(),
        listed_after in any::<proptest::sample::Index>(),
        deletes in proptest::collection::btree_map(any::<u64>(), (0usize..4, 0u64..3), 0..20),
    ) {
        let mut manifest = Manifest::empty(namespace_id("r1"));
        manifest.generation = generation;
        manifest.begun_ms = begun_ms;
        let deletions = &mut manifest.deletions;
        deletions.made_after_ms = made_after_ms;
        deletions.forgotten_ms = forgotten_ms;
        deletions.listed_after = listed_after.index(usize::MAX) as u64 % generation;
        deletions.keys = deletes
            .into_iter()
            .map(|(key, (back, at_ms))| (key, Delete { generation: (generation - 1).saturating_sub(back as u64) + 1, at_ms }))
            .collect();
        for (id, (payload_bytes, added_ms, expires_ms, index_bytes, filter)) in entries {
            let blocks = filter.len() as u32 + 1;
            let filter = filter.into_iter().collect();
            let entry = PackEntry { payload_bytes, index_bytes, runs: 1, blocks, added_ms, expires_ms, filter };
            manifest.packs.insert(PackId(id), entry);
        }
        manifest.condemned = condemned.into_iter().map(|(id, at)| (PackId(id), at)).collect();
        manifest.condemned.retain(|id, _| !manifest.packs.contains_key(id));
        prop_assert_eq!(Manifest::decode(&manifest.encode().unwrap()), Ok(manifest));
    }
}
