//! The small form of rows of the fault campaign: a few seeds of each, in every build. And the planted bugs: each stands
//! in the sources where the list says, and in the documents.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use kvarts_tests::rows::planted::BUGS;
use kvarts_tests::rows::{Ask, Tier, all};

/// Runs a row until it has reached `budget` distinct states; not where the merge tier of the campaign is said to follow, which
/// begins with the same seed and goes further.
fn run(id: &str, budget: u64) {
    let row = all().into_iter().find(|row| row.id == id).expect("there is such a row");
    let [merge, ..] = row.targets;
    assert!(merge >= budget, "{id}: the merge tier goes no further");
    if std::env::var_os("KVARTS_CAMPAIGN").is_some_and(|value| value == "merge") {
        // Not by a macro, whose words of a test that passes are kept from the reader.
        let said = format!(
            "SKIPPED: {id} of campaign_rows: the campaign's merge tier runs it, to {merge} states (KVARTS_CAMPAIGN=merge)\n"
        );
        std::io::stderr().write_all(said.as_bytes()).unwrap();
        return;
    }
    let tally = row.run(&Ask {
        tier: Tier::Merge,
        seed: 0,
        end: None,
        budget: Some(budget),
        workers: 1,
        progress: false,
    });
    assert!(tally.violations.is_empty(), "{id}: {:#?}", tally.violations);
    assert!(tally.skipped.is_none() && tally.distinct >= budget.min(4), "{id}: {tally:?}");
}

#[test]
fn seeds_that_are_asked_for_are_all_run_whatever_the_tier_wants() {
    let row = all().into_iter().find(|row| row.id == "R28").expect("there is such a row");
    let [merge, ..] = row.targets;
    let end = 5 + merge + 2;
    let ask = Ask { tier: Tier::Merge, seed: 5, end: Some(end), budget: None, workers: 1, progress: false };
    let tally = row.run(&ask);
    assert_eq!((tally.seeds, tally.distinct), (5..end, merge + 2), "{:?}", tally.violations);
}

#[test]
fn flipped_bits_are_named_and_cost_their_own_record_at_most() {
    run("R6", 150);
}

#[test]
fn swapped_stale_foreign_and_forged_bytes_are_never_served_and_can_be_repaired() {
    run("R7", 80);
}

#[test]
fn what_is_not_the_disks_latches_nothing_and_leaves_nothing() {
    run("R29", 40);
}

#[test]
fn requests_that_are_left_half_way_leave_nothing() {
    run("R14", 60);
}

#[test]
fn clocks_that_are_set_change_no_answer() {
    run("R17", 9);
}

#[test]
fn any_bytes_can_be_decoded_and_any_store_looked_at() {
    run("R18", 2_000);
}

#[test]
fn recovery_that_is_cut_and_begun_again_gives_the_same() {
    run("R22", 40);
}

#[test]
fn images_of_every_version_open_also_when_the_power_fails_meanwhile() {
    run("R23", 1);
}

#[test]
fn a_device_that_fails_in_any_way_gives_right_bytes_or_an_error_and_leaves_nothing_held() {
    run("R25", 30);
}

#[test]
fn checker_and_recovery_are_of_one_opinion() {
    run("R26", 40);
}

#[test]
fn reads_in_tiles_have_one_production_of_each_block_also_from_memory() {
    run("R31", 240);
}

#[test]
fn nodes_in_trouble_give_no_wrong_byte_and_agree_again_when_it_is_over() {
    run("R33", 6);
}

#[test]
fn members_that_register_themselves_are_those_that_run_and_never_two_majorities() {
    run("R38", 150);
}

#[test]
fn blocks_come_to_nodes_by_the_rules_and_leases() {
    run("R39", 3);
}

#[test]
fn what_was_deleted_comes_back_from_no_bucket_that_nodes_share() {
    run("R41", 24);
}

#[test]
fn sessions_hold_what_they_need_and_leave_nothing() {
    run("R45", 10);
}

#[test]
fn what_stands_still_hangs_or_is_hostile_costs_itself_only() {
    run("R46", 3);
}

#[test]
fn work_grows_as_requests_do() {
    run("R30", 9);
}

#[test]
fn a_fault_a_start_and_a_neighbour_cost_what_they_must() {
    run("R32", 14);
}

#[test]
fn a_drive_that_hangs_costs_its_own_blocks() {
    run("R43", 1);
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// How often each name stands in a `planted!` of the sources.
fn planted() -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    let mut folders: Vec<PathBuf> = [
        "layout/src",
        "store/src",
        "fsck/src",
        "client/src",
        "cluster/src",
        "cold/src",
        "peer/src",
        "server/src",
    ]
    .map(|one| root().join(one))
    .into();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for (at, mark) in text.match_indices("planted!(\"") {
                let name = text[at + mark.len()..].split('"').next().unwrap();
                if name != "name" {
                    *found.entry(name.to_owned()).or_default() += 1;
                }
            }
        }
    }
    found
}

#[test]
fn every_planted_bug_stands_in_the_sources_and_in_the_documents() {
    let found = planted();
    let listed: Vec<&str> = BUGS.iter().map(|bug| bug.name).collect();
    assert!(listed.len() >= 30);
    for name in &listed {
        assert!(found.contains_key(*name), "{name} is listed and stands nowhere");
    }
    for name in found.keys() {
        assert!(listed.contains(&name.as_str()), "{name} stands in the sources and is not listed");
    }
    let text = std::fs::read_to_string(root().join("docs/FAULT_MODEL.md")).unwrap();
    for bug in BUGS {
        let line = format!("| `{}` | {} | {} |", bug.name, bug.row, bug.breaks);
        assert!(text.contains(&line), "docs/FAULT_MODEL.md lacks: {line}");
    }
    let rows = all();
    // Those of the device path have tests in place of rows, and a list of their own.
    let of_a_row = |line: &&str| line.starts_with("| `") && line.contains("` | R");
    let count = text.lines().filter(of_a_row).count();
    assert_eq!(count, BUGS.len(), "docs/FAULT_MODEL.md lists a bug that is not there");
    assert!(BUGS.iter().all(|bug| rows.iter().any(|row| row.id == bug.row)));
}

#[test]
fn no_program_that_is_used_has_bugs_planted_in_it() {
    // The feature is one of these crates alone: builds of the program do not name it.
    for manifest in ["server/Cargo.toml", "Cargo.toml"] {
        let text = std::fs::read_to_string(root().join(manifest)).unwrap();
        assert!(!text.contains("planted"), "{manifest}");
    }
    for manifest in ["layout", "store", "fsck", "client", "cluster", "cold", "gpudirect", "peer", "tests"] {
        let text = std::fs::read_to_string(root().join(manifest).join("Cargo.toml")).unwrap();
        assert!(text.contains("planted") && !text.contains("default ="), "{manifest}");
    }
}
