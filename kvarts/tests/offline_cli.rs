//! Runs the real `kvarts import`, `export`, `ls` and `inspect` on real directories: what goes in comes out with the same
//! origin ids and digests, and nothing of a file that is not whole becomes visible.

use std::collections::BTreeSet;
use std::path::Path;

use crate::sample::*;
use crate::scratch::Scratch;
use kvarts_layout::{BlockKey, OriginId};
use serde_json::Value;

#[test]
fn what_is_imported_is_exported_again_with_the_same_origin_ids_and_digests() {
    let scratch = Scratch::new("round");
    let (store, file) = filled(&scratch);
    let again = scratch.path("again");
    let out = good(&["export", &store, "--all", "--to", &again.display().to_string()]);
    assert!(out.contains("9 blocks"), "{out}");
    assert_eq!(blocks(&again), blocks(&file));
    assert!(!scratch.path("again.partial").exists());
    // The secret stands at byte 72 of the superblock.
    let superblock = std::fs::read(Path::new(&store).join("superblock")).unwrap();
    let (secret, id) = (&superblock[72..104], &superblock[32..48]);
    let exported = std::fs::read(&again).unwrap();
    assert!(!exported.windows(32).any(|bytes| bytes == secret), "the secret left with the export");
    assert!(!exported.windows(16).any(|bytes| bytes == id), "the store's id left with the export");
    // Once more: everything is there already.
    let once = ["import", &again.display().to_string(), "--into", &store, "--json"];
    let report = json(&once);
    assert_eq!((&report["stored"], &report["already_there"]), (&0.into(), &9.into()));
    assert!(good(&["fsck", &store, "--deep"]).contains("clean"));
    let taken = kvarts(&["export", &store, "--all", "--to", &again.display().to_string()]);
    assert!(taken.0 == 2 && taken.2.contains("exists already"), "{taken:?}");
}

#[test]
fn a_namespace_or_a_prefix_can_be_exported_alone() {
    let scratch = Scratch::new("some");
    let (store, file) = filled(&scratch);
    let all = blocks(&file);
    let namespace = identity("r2").namespace_id().unwrap().to_string();
    let to = scratch.path("r2");
    good(&["export", &store, "--namespace", &namespace, "--to", &to.display().to_string()]);
    let expected: BTreeSet<Named> = all.iter().filter(|one| one.0 == namespace).cloned().collect();
    assert_eq!((expected.len(), blocks(&to)), (2, expected));
    // The prefix that ends with block 5, and what descends from it: not the other branch, not the other model.
    let to = scratch.path("prefix");
    let key = BlockKey([5; 32]).to_string();
    good(&["export", &store, "--prefix", &key, "--to", &to.display().to_string()]);
    let keys: Vec<u8> = blocks(&to).iter().map(|one| one.1.0[0]).collect();
    assert_eq!(keys, [1, 2, 3, 4, 5, 6]);
    let none = scratch.path("none").display().to_string();
    let nothing = kvarts(&["export", &store, "--prefix", &"ab".repeat(32), "--to", &none]);
    assert!(nothing.0 == 2 && !Path::new(&none).exists(), "{nothing:?}");
    let which = kvarts(&["export", &store, "--to", &none]);
    assert!(which.0 == 2 && which.2.contains("--all"), "{which:?}");
}

#[test]
fn nothing_of_a_damaged_file_becomes_visible() {
    let scratch = Scratch::new("damaged");
    let sound = sample();
    let file = scratch.path("file");
    let store = scratch.path("store").display().to_string();
    let name = file.display().to_string();
    // The last payload, the last frame, a cut, bytes behind the end: each comes after sound runs.
    let mut payload = sound.clone();
    let place = sound.len() - 64 - 40 - 100;
    payload[place] ^= 1;
    let mut end = sound.clone();
    let last = end.len() - 1;
    end[last] ^= 1;
    let longer = [sound.as_slice(), b"x"].concat();
    for (bad, says) in [
        (payload, "digest"),
        (end, "damaged"),
        (sound[..sound.len() - 1].to_vec(), "incomplete"),
        (longer, "follow the end"),
        (
            b"no export at all, but long enough to have a head of its own, as it were".to_vec(),
            "not an export",
        ),
    ] {
        std::fs::write(&file, bad).unwrap();
        let (code, out, err) = kvarts(&["import", &name, "--into", &store, "--create"]);
        assert!(code == 2 && out.is_empty() && err.contains(says), "{code} {out} {err}");
        assert!(!Path::new(&store).exists(), "a store was made for a file that is not whole");
    }
    std::fs::write(&file, sound).unwrap();
    let absent = kvarts(&["import", &name, "--into", &store]);
    assert!(absent.0 == 2 && absent.2.contains("--create") && !Path::new(&store).exists(), "{absent:?}");
    assert!(good(&["import", &name, "--into", &store, "--dry-run"]).contains("dry run"));
    assert!(!Path::new(&store).exists());
}

#[test]
fn ls_shows_prefixes_as_trees_within_its_limit() {
    let scratch = Scratch::new("ls");
    let (store, _) = filled(&scratch);
    let text = good(&["ls", &store]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines.iter().any(|line| line.starts_with("small r1  namespace ") && line.contains("7 blocks")),
        "{text}"
    );
    let root =
        lines.iter().position(|line| line.contains("0101010101010101 from token 0: 64 tokens")).unwrap();
    assert!(lines[root].ends_with("forks into 2"), "{text}");
    assert!(lines[root + 1].starts_with("    0505050505050505 from token 64: 32 tokens"), "{text}");
    assert!(lines[root + 2].starts_with("    1414141414141414 from token 64: 16 tokens"), "{text}");
    let listing = json(&["ls", &store, "--json", "--limit", "1"]);
    let namespaces = listing["namespaces"].as_array().unwrap();
    let r1 = namespaces.iter().find(|one| one["model"] == "small r1").unwrap();
    assert_eq!((r1["branches"].as_array().unwrap().len(), &r1["branches_left_out"]), (1, &2.into()));
    let other = kvarts(&["ls", &store, "--namespace", &"ab".repeat(32)]);
    assert_eq!(other.0, 2);
}

#[test]
fn inspect_shows_the_store_its_segments_and_every_digest_of_a_record() {
    let scratch = Scratch::new("inspect");
    let (store, _) = filled(&scratch);
    let text = good(&["inspect", &store]);
    assert!(text.contains("9 blocks in 4 artifacts") && text.contains("key: # live"), "{text}");
    let whole = json(&["inspect", &store, "--json"]);
    let sum: u64 = ["live_bytes", "dead_bytes", "overhead_bytes", "free_bytes"]
        .iter()
        .map(|part| whole[part].as_u64().unwrap())
        .sum();
    assert_eq!(Some(sum), whole["file_bytes"].as_u64());
    let artifacts = |row: &serde_json::Value| row["artifacts"].as_u64().unwrap();
    let rows = whole["namespaces"].as_array().unwrap();
    assert_eq!(artifacts(&whole), rows.iter().map(artifacts).sum::<u64>(), "one definition of an artifact");
    let segments = whole["segments"].as_array().unwrap();
    let used = segments.iter().find(|one| one["live_blocks"] != 0).unwrap();
    let at = format!("{}/{}", used["shard"], used["segment"]);
    let text = good(&["inspect", &store, &at]);
    assert!(text.contains("OFFSET") && text.contains("small r"), "{text}");
    let head = good(&["inspect", &store, &format!("{at}/0")]);
    assert!(head.contains("the header of a segment") && head.contains("first_sequence"), "{head}");
    let segment = json(&["inspect", &store, &at, "--json"]);
    let record = &segment["records_of_blocks"][0];
    let at = format!("{at}/{}", record["offset"]);
    let view = json(&["inspect", &store, &at, "--json"]);
    let block = &view["blocks"][0];
    let n = u8::from_str_radix(&block["key"].as_str().unwrap()[..2], 16).unwrap();
    assert_eq!(block["content"], blake3::hash(&bytes(n)).to_hex().as_str());
    assert_eq!(block["origin"], OriginId([n ^ 0x55; 16]).to_string());
    assert_eq!(block["chunks"][0]["crc32"], format!("{:08x}", crc32fast::hash(&bytes(n))));
    assert!(good(&["inspect", &store, &at]).contains("every digest matches"));
    // A payload byte is changed: the record is shown, and what is wrong with it.
    let offset = block["chunks"][0]["offset"].as_u64().unwrap() as usize;
    let path = format!(
        "{store}/shard-{:04}/segment-{:08}",
        used["shard"].as_u64().unwrap(),
        used["segment"].as_u64().unwrap()
    );
    let mut file = std::fs::read(&path).unwrap();
    file[offset + 9] ^= 4;
    std::fs::write(&path, file).unwrap();
    assert!(good(&["inspect", &store, &at]).contains("DAMAGED: chunk 0 of block 0"));
    // An export names it and leaves it out.
    let to = scratch.path("left").display().to_string();
    let (code, out, _) = kvarts(&["export", &store, "--all", "--to", &to, "--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["complete"]), (1, &false.into()));
    assert_eq!(report["left_out"][0]["offset"], record["offset"]);
    let left = report["blocks_left_out"].as_u64().unwrap();
    assert_eq!(blocks(Path::new(&to)).len() as u64 + left, 9);
    for (wrong, says) in [("9/0", "no segment 0"), ("0", "SHARD/SEGMENT"), ("0/0/5", "at a multiple of 4096")]
    {
        let (code, _, err) = kvarts(&["inspect", &store, wrong]);
        assert!(code == 2 && err.contains(says), "{wrong}: {err}");
    }
}

#[test]
fn a_check_that_measures_tells_its_rate_beside_that_of_reading_the_same_files_alone() {
    let scratch = Scratch::new("measured");
    let (file, store) = (scratch.path("file"), scratch.path("store"));
    std::fs::write(&file, sample()).unwrap();
    let (file, store) = (file.to_str().unwrap(), store.to_str().unwrap());
    good(&["import", file, "--into", store, "--create", "--segment-mib", "1"]);
    let plain = json(&["fsck", store, "--json"]);
    assert_eq!((&plain["device_ratio"], &plain["bare_gib_per_s"]), (&Value::Null, &Value::Null));
    let measured = json(&["fsck", store, "--measure", "--deep", "--json"]);
    let number = |field: &str| measured[field].as_f64().unwrap_or_else(|| panic!("{field}: {measured:#}"));
    let ratio = number("gib_per_s") / number("bare_gib_per_s");
    assert!((number("device_ratio") - ratio).abs() < 1e-9 && ratio > 0.0, "{measured:#}");
    // What was only read for the comparison is not in the check's own bytes.
    assert_eq!((&measured["blocks"], &measured["clean"]), (&plain["blocks"], &true.into()));
    assert_eq!(json(&["fsck", store, "--measure", "--json"])["bytes_scanned"], plain["bytes_scanned"]);
    assert!(
        good(&["fsck", store, "--measure"])
            .contains("speed relative to plain reads of a part of these files: ")
    );
    for other in ["--quick", "--repair"] {
        assert_eq!(kvarts(&["fsck", store, "--measure", other]).0, 2, "{other}");
    }
}
