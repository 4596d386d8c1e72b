//! Orders that the device path must keep, taken away one at a time: a test of this program must fail then. A test that passes over a broken
//! order shows nothing.

use std::path::Path;
use std::process::Stdio;

use kvarts_layout::planted;

use crate::standin::{Kit, again};
use crate::way::is_real;

/// In the process of a test: the bug that is planted there.
const PLANTED: &str = "KVARTS_PLANTED";

/// How such a process ends in which an assertion failed.
const FOUND: i32 = 78;

/// Each bug, a test that must find it, and what it breaks.
const BUGS: [(&str, &str, &str); 14] = [
    (
        "saved-before-computed",
        "lander::layers_leave_behind_what_computes_them_and_before_their_pages_are_written_again",
        "a save does not wait for the kernels that compute a layer",
    ),
    (
        "landed-while-in-use",
        "lander::layers_land_behind_what_still_uses_their_pages_and_before_what_computes_on_them",
        "pages are written before the last kernel that uses them",
    ),
    (
        "landed-layer-not-awaited",
        "lander::kernels_wait_for_copies_copies_for_their_segment_and_the_engine_for_its_layer",
        "the engine computes on a layer before it has landed",
    ),
    (
        "spread-before-copied",
        "lander::kernels_wait_for_copies_copies_for_their_segment_and_the_engine_for_its_layer",
        "the bytes of a ring segment are distributed to pages before the copies into the segment are done",
    ),
    (
        "segment-not-awaited",
        "lander::kernels_wait_for_copies_copies_for_their_segment_and_the_engine_for_its_layer",
        "a segment of the ring is filled again before its bytes have been distributed to pages",
    ),
    (
        "left-before-gathered",
        "lander::what_leaves_is_copied_when_it_was_gathered",
        "a segment of the ring is copied to the host before the bytes of the pages are in it",
    ),
    (
        "stored-before-computed",
        "pipeline::a_layer_leaves_when_it_is_computed",
        "a layer that is stored does not wait for the kernels that compute it",
    ),
    (
        "read-over-slots-in-use",
        "pipeline::nothing_is_written_to_slots_before_the_engine_is_done_with_them",
        "a layer stream writes slots before the engine's last kernel that uses them",
    ),
    (
        "tiles-left-before-computed",
        "pipeline::a_layer_leaves_when_it_is_computed",
        "a layer that is stored through a lander does not wait for the kernels that compute it",
    ),
    (
        "tiles-landed-while-in-use",
        "pipeline::nothing_is_written_to_slots_before_the_engine_is_done_with_them",
        "a layer stream through a lander writes slots before the engine's last kernel that uses them",
    ),
    (
        "layer-not-awaited",
        "pipeline::a_layer_is_used_after_its_copies_and_its_seat_too",
        "the engine computes on a layer of a stream before the layer has landed",
    ),
    (
        "done-when-enqueued",
        "pipeline::a_layer_is_used_after_its_copies_and_its_seat_too",
        "memory is used again as soon as its copies are enqueued",
    ),
    (
        "loss-not-declared",
        "devices::a_layer_that_landed_before_its_device_was_lost_ends_the_stream",
        "a device is used after it was declared lost",
    ),
    (
        "digests-of-other-chunks",
        "digests::digests_are_the_stores_for_chunks_of_any_length_and_place",
        "digests come back for chunks that were not requested",
    ),
];

/// Plants the bug that the environment names, if it names one.
pub(crate) fn plant() {
    if let Ok(bug) = std::env::var(PLANTED) {
        planted::plant_for_good(bug);
        // It is found: nothing waits for streams that the test left standing.
        std::panic::set_hook(Box::new(|_| std::process::exit(FOUND)));
    }
}

#[test]
fn each_order_that_is_taken_away_is_missed_by_its_test() {
    // Elsewhere than here a program that can be broken on purpose is not built.
    if !planted::POSSIBLE || is_real() {
        return;
    }
    let missed: Vec<&str> = BUGS
        .into_iter()
        .filter(|(bug, test, _)| {
            let kit = if test.starts_with("lander") { Kit::Bare } else { Kit::Whole };
            let mut command = again(kit, test);
            command.env(PLANTED, bug).stdout(Stdio::piped()).stderr(Stdio::null());
            let output = command.output().unwrap();
            let found = output.status.code() == Some(FOUND);
            // The name of no test would run nothing, and succeed.
            assert!(String::from_utf8_lossy(&output.stdout).contains("running 1 test"), "{test}");
            !found
        })
        .map(|(bug, ..)| bug)
        .collect();
    assert!(missed.is_empty(), "planted and not found: {missed:?}");
}

#[test]
fn planted_bugs_are_those_of_the_sources_and_of_the_page() {
    let house = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut folders = vec![house.join("gpudirect/src")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
                continue;
            }
            let text = std::fs::read_to_string(&entry).unwrap_or_default();
            let names = text.split("planted!(\"").skip(1).filter_map(|rest| rest.split('"').next());
            found.extend(names.map(str::to_owned));
        }
    }
    found.sort();
    let mut listed = BUGS.map(|(bug, ..)| bug.to_owned()).to_vec();
    listed.sort();
    assert_eq!(found, listed);
    let page = std::fs::read_to_string(house.join("docs/FAULT_MODEL.md")).unwrap();
    for (bug, test, breaks) in BUGS {
        let row = format!("| `{bug}` | `{test}` | {breaks} |");
        assert!(page.contains(&row), "docs/FAULT_MODEL.md lacks: {row}");
    }
}
