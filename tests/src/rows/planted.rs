//! Bugs of the kind that real stores had, planted one at a time: each must be found by the row that is there to find it.
//! A row that finds none of them measures nothing.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use kvarts_layout::planted;

use super::{Ask, Row, Tally, Tier, Violation};

/// A bug that can be planted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bug {
    /// Its name, as it stands where it is planted.
    pub name: &'static str,
    /// The row that must find it.
    pub row: &'static str,
    /// What it breaks.
    pub breaks: &'static str,
    /// A seed at which the row finds it: where the merge tier looks first.
    pub seed: u64,
}

const fn bug(name: &'static str, row: &'static str, breaks: &'static str) -> Bug {
    Bug { name, row, breaks, seed: 0 }
}

impl Bug {
    /// The same, found at this seed.
    const fn at(self, seed: u64) -> Self {
        Self { seed, ..self }
    }
}

/// All of them, in the order of the rows.
pub const BUGS: &[Bug] = &[
    bug("ack-before-flush", "R1", "a durable put is acknowledged before its flush"),
    bug("flush-of-another-file", "R1", "the flush goes to the file that was opened before"),
    bug("directory-not-flushed", "R1", "the name of a new segment file is not made durable"),
    bug(
        "relaxed-called-durable",
        "R1",
        "a durable put of a block that was put relaxed is acknowledged without a flush",
    ),
    bug(
        "delete-does-not-wait",
        "R22",
        "a delete takes its sequence before writes that had begun have theirs",
    )
    .at(7),
    bug("seal-before-flush", "R1", "a footer lists records that have not been flushed").at(2),
    bug(
        "recycled-header-late",
        "R1",
        "records of a new generation are acknowledged before its header is durable",
    )
    .at(3),
    bug("tombstones-recycled", "R22", "a segment is rewritten although no other has its tombstones").at(19),
    bug(
        "tombstone-forgotten-early",
        "R22",
        "tombstones are forgotten while records that they kill are on disk",
    )
    .at(9),
    bug("first-chunk-alone", "R22", "a checkpoint lists the first chunk of its tombstones and no other")
        .at(97),
    bug("sequence-not-restored", "R22", "sequences start over after a recovery").at(12),
    bug("move-without-compare", "R22", "compaction switches the index without a check of its present entry")
        .at(11),
    bug("first-shard-wins", "R13", "of copies in two shards the one counts that is recovered first").at(75),
    bug("torn-tail-adopted", "R1", "recovery adopts records without a check of their payloads"),
    bug("checkpoint-over-the-newest", "R26", "a checkpoint is written over the newest whole one").at(1),
    bug(
        "checkpoint-header-first",
        "R26",
        "a checkpoint's header is written before the rest of it is durable",
    ),
    bug("trailer-before-footer", "R26", "the trailer is durable before the footer that it names").at(1),
    bug(
        "lost-header-not-written",
        "R26",
        "recovery seals a segment whose header never arrived, and leaves it without",
    )
    .at(4),
    bug("delete-not-durable", "R22", "a delete is acknowledged before its tombstones are flushed").at(4),
    bug("generation-reused", "R22", "a segment is rewritten under the generation that it had").at(31),
    bug("stored-length-wrong", "R22", "an encoded chunk is recorded with another length than it has"),
    bug("digest-not-compared", "R6", "chunks are served without a check of their digests").at(26),
    bug("decoded-digest-not-compared", "R6", "decoded chunks are served without a check of their digests")
        .at(556),
    bug("quarantined-served", "R6", "a block that failed verification stays in service").at(26),
    bug("fsck-skips-digests", "R6", "the checker reads payloads and does not compare their digests").at(26),
    bug("fsck-skips-padding", "R6", "the checker does not look at padding").at(66),
    bug("fsck-calls-damage-torn", "R6", "the checker takes damage below what was flushed for a torn tail")
        .at(148),
    bug(
        "rescan-forgets-holes",
        "R6",
        "recovery takes evicted blocks of a segment without a footer for torn or live ones",
    )
    .at(187),
    bug(
        "fsck-forgets-holes",
        "R6",
        "the checker takes evicted blocks of a segment without a footer for damaged ones",
    )
    .at(2658),
    bug("tag-not-compared", "R7", "a record counts without its tag: a client can forge one").at(9),
    bug("position-not-compared", "R7", "a sound structure counts wherever it lies").at(79),
    bug("fsck-misses-lost-files", "R7", "the checker does not miss a segment that the checkpoint knows")
        .at(3),
    bug("repair-keeps-damaged", "R7", "a repair lists what the old footer lists, damaged records too").at(5),
    bug("repair-drops-good", "R7", "a repair drops good records").at(29),
    bug(
        "repair-costs-neighbours",
        "R7",
        "a repair takes sound blocks out with damaged ones that they share their pages with",
    )
    .at(1218),
    bug("repair-believes-one-reading", "R7", "a repair gives up what one reading of two calls damaged")
        .at(127),
    bug(
        "recycled-header-unseen",
        "R7",
        "recovery takes a segment that was used again for a free one where its new header was lost",
    )
    .at(328),
    bug(
        "fsck-recycled-header-unseen",
        "R7",
        "the checker takes a segment that was used again for a free one where its new header was lost",
    )
    .at(328),
    bug(
        "key-not-compared",
        "R18",
        "a block is served on the word of a footer, without a look at the record's own keys",
    ),
    bug("fsck-believes-footers", "R18", "the checker does not compare a footer with its records"),
    bug("failed-write-taken-for-done", "R9", "a write that ends with an error counts as done"),
    bug("shortage-latches", "R29", "a want of descriptors or memory makes the store read-only"),
    bug("failed-flush-repeated", "R10", "a flush that failed is tried again, and its success believed"),
    bug("short-read-taken-for-whole", "R16", "a read that ends short counts as whole").at(20),
    bug("put-over-live", "R16", "a second put of a block that is here replaces it"),
    bug("event-lost", "R16", "a delete has no event"),
    bug("gaps-not-looked-into", "R16", "blocks behind a removed one are not found in its record").at(111),
    bug("pin-cap-ignored", "R16", "a tenant pins more than it may").at(1),
    bug("claim-leaked", "R14", "the claim on a block's name outlives its put"),
    bug("late-put-visible", "R14", "a put that was answered with its deadline becomes visible afterwards")
        .at(2),
    bug("promise-leaked", "R14", "bytes of a quota that were reserved for a put are not released"),
    bug("quota-off-by-one", "R14", "a namespace may have a byte more than its quota"),
    bug("budget-leaked", "R14", "the bytes of a removed segment are not returned to the budget"),
    bug("lease-ignored", "R17", "eviction takes blocks that a lease holds").at(13),
    bug("lease-forgets-one", "R17", "a lease does not hold every block that it was given for").at(1),
    bug("lease-never-ends", "R17", "a lease holds past its end").at(13),
    bug("expiry-by-the-wall-clock", "R17", "the wall clock, set back, brings expired blocks back"),
    bug("expired-served", "R17", "blocks are served past their time"),
    bug(
        "follower-walks-every-step",
        "R30",
        "a read that follows another one walks all its steps for each run",
    )
    .at(3),
    bug("footers-read-again", "R30", "a search for descendants of a key reads all footers repeatedly").at(36),
    bug("eviction-lists-all", "R30", "every segment is listed for each choice of a block to evict").at(7),
    bug("checkpoint-looks-at-all", "R30", "a checkpoint looks at the records of all shards").at(8),
    bug("sweep-looks-at-all", "R30", "a sweep looks at segments in which nothing has expired").at(10),
    bug("part-for-each-shard", "R30", "a read asks an executor for each shard that it has").at(0),
    bug("merge-looks-at-all", "R30", "a look for chains begins at every record").at(12),
    bug("delete-in-one-go", "R30", "all keys of a delete are taken out under one lock").at(13),
    bug(
        "checkpoint-for-each-segment",
        "R30",
        "a segment that buries something is recycled after a new checkpoint",
    )
    .at(14),
    bug("tile-with-its-own-origins", "R31", "each tile of a read takes the production that it finds"),
    bug(
        "kept-tile-not-looked-up",
        "R31",
        "a kept tile is returned without a look-up of its blocks in the index",
    ),
    bug("kept-tile-of-a-reused-segment", "R31", "a kept tile of a rewritten segment is returned"),
    bug(
        "footer-proves-nothing",
        "R32",
        "a segment whose trailer was zeroed is recovered as if it had never been sealed",
    )
    .at(14),
    bug(
        "fsck-footer-proves-nothing",
        "R32",
        "the checker takes a segment whose trailer was zeroed for one that was never sealed",
    )
    .at(14),
    bug("scan-verifies-holes", "R32", "recovery compares digests of blocks that are holes").at(14),
    bug("holes-filled-again", "R32", "holes of evicted blocks in a scanned segment are filled again").at(14),
    bug("repair-syncs-last", "R7", "a repair flushes once, behind all that it writes").at(5),
    bug("device-not-asked", "R32", "puts evict blocks while writes fail"),
    bug("barren-segments-stay", "R32", "segments that failed at their beginning are not used again").at(307),
    bug(
        "latch-lifted-unproven",
        "R32",
        "a store resumes though no shard has shown that it can be written to",
    )
    .at(2),
    bug("short-segments-stay", "R32", "segments that starts leave behind are never merged").at(3),
    bug("rest-is-no-room", "R32", "missing space of segments is not counted when room is made").at(11),
    bug("coarse-holes-believed", "R32", "single pages are punched where the file system gives none back")
        .at(38),
    bug("given-back-unflushed", "R32", "bytes go back to the budget though the flush of their hole failed")
        .at(5),
    bug("deleted-namespace-remembered", "R32", "the memory of a deleted namespace is not freed").at(6),
    bug("small-pins-are-free", "R32", "a lease counts the bytes of its blocks and not what they take").at(7),
    bug("index-limit-ignored", "R32", "the index takes more memory than its budget").at(8),
    bug("descriptors-not-counted", "R32", "more segment files are made than descriptors are available").at(9),
    bug("spare-room-kept", "R32", "a shard keeps segments that hold nothing while another one evicts").at(12),
    bug("spare-room-waits", "R32", "a shard waits for room from one that hangs").at(13),
    bug(
        "coldest-by-the-log",
        "R32",
        "the oldest segments of the log are evicted first, however recently used",
    )
    .at(10),
    bug("beginnings-go-first", "R32", "the beginning of a chain is evicted to make room for its end").at(15),
    bug(
        "start-waits-for-a-drive",
        "R43",
        "a start waits for a drive that hangs after its superblock was read",
    ),
    bug(
        "silent-part-ends-the-read",
        "R43",
        "a read ends without its other blocks where one drive does not answer",
    ),
    bug("one-lane", "R43", "requests to a silent drive use up the room of the others"),
    bug("behind-not-told", "R44", "a drive that returns does not receive the deletes since").at(1),
    bug(
        "deletes-beside-a-return",
        "R44",
        "deletes are acknowledged while a drive comes back that was told before them",
    )
    .at(53),
    bug(
        "delete-spans-a-return",
        "R44",
        "a delete that began before a drive came back is acknowledged without a part for it",
    )
    .at(77),
    bug("forgotten-while-out", "R44", "deletes are forgotten while an absent drive may have their blocks")
        .at(1),
    bug(
        "unreadable-forgotten",
        "R44",
        "deletes are forgotten while an unreadable segment may have their blocks",
    )
    .at(2),
    bug(
        "sequence-not-passed-over",
        "R44",
        "a delete gets a lower sequence than records of an unreadable segment",
    )
    .at(2),
    bug("opens-with-any", "R44", "a store opens with fewer than half of its drives").at(44),
    bug("terms-not-noted", "R44", "two sets of drives begin one term, as another is lost while they do")
        .at(1260),
    bug("silence-not-noticed", "R44", "deletes wait for a drive that does not answer").at(3),
    bug(
        "deletes-before-their-term",
        "R44",
        "deletes are acknowledged before the other drives know that one is lost",
    )
    .at(23),
    bug("let-go-forgotten", "R30", "removed descendants of a block are counted for ever").at(7),
    bug("evicted-untold", "R1", "blocks are evicted to make room without an event").at(3),
    bug("format-drifts", "R23", "the meaning of bytes on disk differs from that in earlier programs"),
    bug("peer-origin-not-compared", "R33", "a piece of a peer counts whatever production it is of").at(2),
    bug("peer-digest-not-compared", "R33", "chunks of a peer are not compared with their digests").at(5),
    bug("peer-piece-misplaced", "R33", "chunks of a peer go to the place of another block").at(1),
    bug("cancelled-bytes-owed", "R33", "cancelled bytes count as under way for ever"),
    bug("old-members-accepted", "R33", "members of an older epoch replace later ones"),
    bug("connected-without-snapshot", "R33", "a new connection continues at the position of the broken one")
        .at(5),
    bug("holder-taken-for-whole", "R33", "a holder with an incomplete list reports that no node has a block")
        .at(1),
    bug("snapshot-keeps-the-gone", "R33", "the end of a snapshot keeps entries that it did not list").at(3),
    bug("departed-still-listed", "R33", "a node that left is still listed with blocks").at(9),
    bug("released-owner-listed", "R33", "an owner whose lease is over is still the owner").at(9),
    bug("old-token-renewed", "R33", "a lease is renewed under an older token").at(34),
    bug("new-holder-not-silent", "R33", "a new holder grants leases beside the one before it"),
    bug("unconfirmed-holder-grants", "R33", "a holder grants that no majority has confirmed").at(34),
    bug(
        "epochs-start-over",
        "R38",
        "the members of a service that has lost everything begin with the first epoch again",
    ),
    bug("epoch-without-majority", "R38", "the members change before a majority is of their epoch").at(2),
    bug("members-of-the-gone", "R38", "the remaining members have no reachable majority").at(35),
    bug("lapsed-stay", "R38", "a node whose registration has run out stays a member"),
    bug("two-changes-at-once", "R38", "all members that are gone are removed in one epoch").at(1),
    bug("moved-not-followed", "R38", "a member that has moved keeps its old address").at(1),
    bug("address-twice", "R38", "a node is proposed that has the address of another one").at(1),
    bug("held-by-the-gone", "R39", "a put is held by a node that cannot be reached"),
    bug("lease-not-asked", "R39", "a put of a chain that another node owns is stored for good"),
    bug("lease-never-over", "R39", "a put goes by a lease whose time is over"),
    bug("lease-not-looked-at-again", "R39", "a put goes on by a lease that was given up meanwhile"),
    bug(
        "released-after-the-answer",
        "R39",
        "a released lease counts on its node until the reply to the release",
    ),
    bug("late-grant-counts", "R39", "the reply to an earlier request restores a released lease").at(2),
    bug("owners-put-held", "R39", "an owner does not store what another node has"),
    bug(
        "owner-not-offered",
        "R39",
        "blocks of a chain that another node stored are not offered to its owner",
    ),
    bug("favour-before-the-chain", "R39", "blocks before the beginning of a chain are protected, too").at(4),
    bug("favour-stays", "R39", "blocks of a released chain are still protected"),
    bug("hot-at-once", "R39", "a block is copied after one read"),
    bug("hot-copies-stay", "R39", "copies of hot blocks never expire"),
    bug(
        "deletes-not-told-again",
        "R33",
        "a node that was away does not receive the deletes when it is connected again",
    )
    .at(5),
    bug("read-from-who-lacks-deletes", "R33", "blocks are read from a node that lacks deletes").at(129),
    bug("stale-copy-stored", "R33", "a copy that was under way is stored behind the delete of its block")
        .at(143),
    bug("copy-without-the-end", "R33", "a copy outlives its source").at(11),
    bug("shorter-times-stay", "R33", "a shorter time to live is ignored on another node").at(1),
    bug("deletes-not-noted", "R41", "a manifest does not keep deletes"),
    bug("deletes-not-compared", "R41", "a pack is named regardless of the deletes in its manifest"),
    bug("folded-deletes-forgotten", "R41", "blocks that were listed before a forgotten delete are named")
        .at(144),
    bug("late-deletes-are-new", "R41", "a delete that arrives late counts as a present one").at(1),
    bug("what-outlives-stays", "R41", "copies that outlive a shorter time to live stay named").at(1),
    bug("conditions-not-tried", "R41", "a bucket that ignores conditions of puts is written to").at(8),
    bug("pool-forgets-deletes", "R42", "blocks of a pool count regardless of later deletes").at(37),
    bug("shared-extents-not-held", "R42", "a stage does not hold blocks that another stage read").at(1),
    bug("silence-not-kept", "R42", "a stage waits for ever for a read that hangs").at(10),
    bug(
        "draft-keeps-what-was-there",
        "R42",
        "a draft keeps blocks for which another put's bytes were stored",
    )
    .at(13),
    bug("blocks-behind-count-too", "R42", "with the first block of an extent all of it counts as here"),
    bug("rests-stay", "R45", "blocks that a session left to its forks stay held after the last of them")
        .at(1),
    // The last ones take long to be found: the merge tier does without them.
    bug(
        "duplicate-into-the-places",
        "R33",
        "a piece that is asked for twice is read twice into the same places",
    )
    .at(210),
    bug("read-past-its-deadline", "R33", "a read over several paths goes on past its deadline").at(3),
    bug("message-lost-to-a-question", "R33", "a holder's question makes a message to it go missing").at(865),
];

/// Bugs at the end of the list that the merge tier does without.
const LATE: u64 = 3;

/// Distinct states in which a row must have found a bug.
const STATES: u64 = 30_000;
/// Courses of many nodes in which it must have been found: one is no single state, and takes a second.
const COURSES: u64 = 100;

/// Plants a bug on this thread, and on those that rows of the campaign start from it.
pub fn plant(name: &str) -> Result<(), String> {
    if !planted::POSSIBLE {
        return Err("this program was built without the feature `planted`".to_owned());
    }
    let known = BUGS.iter().find(|bug| bug.name == name).ok_or(format!("there is no bug `{name}`"))?;
    planted::plant(Some(known.name));
    Ok(())
}

/// Runs the row of a bug with the bug in place. An error if it finds nothing.
///
/// The merge tier begins with the seed that is noted for the bug, and where the row finds nothing there any more, it searches
/// from `seed` on, as the other tiers do from the beginning.
pub fn found(bug: &Bug, tier: Tier, seed: u64) -> Result<Violation, String> {
    let row = super::all()
        .into_iter()
        .find(|row| row.id == bug.row)
        .ok_or(format!("there is no row {}", bug.row))?;
    let [merge, ..] = row.targets;
    let is_of_nodes = ["R33", "R38", "R39", "R41", "R45"].contains(&row.id);
    let budget = merge.max(if is_of_nodes { COURSES } else { STATES });
    // With an end, as otherwise a row that runs out of new states says so, which is no finding.
    let look = |seeds: Range<u64>| {
        let (seed, end) = (seeds.start, Some(seeds.end));
        let ask = Ask { tier: Tier::Merge, seed, end, budget: Some(budget), workers: 1, progress: false };
        planted::plant(Some(bug.name));
        let tally = row.run(&ask);
        planted::plant(None);
        let missed = || format!("{} does not find {} in {} states", bug.row, bug.name, tally.distinct);
        tally.violations.first().cloned().ok_or_else(missed)
    };
    let search = || look(seed..seed.saturating_add(2 * budget));
    if tier != Tier::Merge {
        return search();
    }
    look(bug.seed..bug.seed + 1).or_else(|_| {
        let violation = search()?;
        eprintln!("R27: {} is noted at seed {}, and found at {}", bug.name, bug.seed, violation.seed);
        Ok(violation)
    })
}

fn run(ask: &Ask, target: u64) -> Tally {
    if !planted::POSSIBLE {
        let why = "no bug can be planted: build it with --features planted";
        return Tally { skipped: Some(why.to_owned()), ..Tally::default() };
    }
    let (next, caught) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let violations: Mutex<Vec<Violation>> = Mutex::default();
    let all = &BUGS[..BUGS.len().min(usize::try_from(target).unwrap_or(usize::MAX))];
    std::thread::scope(|scope| {
        for _ in 0..ask.workers.max(1) {
            scope.spawn(|| {
                while let Some(bug) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match found(bug, ask.tier, ask.seed) {
                        Ok(_) => drop(caught.fetch_add(1, Ordering::Relaxed)),
                        Err(what) => {
                            let violation = Violation { seed: ask.seed, what };
                            violations.lock().unwrap_or_else(PoisonError::into_inner).push(violation);
                        }
                    }
                }
            });
        }
    });
    let violations = violations.into_inner().unwrap_or_else(PoisonError::into_inner);
    let seeds = ask.seed..ask.seed + 1;
    Tally { distinct: caught.into_inner() as u64, visited: 0, seeds, violations, skipped: None }
}

/// Row R27.
pub(super) fn row() -> Row {
    let all = BUGS.len() as u64;
    Row {
        id: "R27",
        what: "bugs planted one at a time, each of which its row must find",
        counts: "planted bugs found",
        targets: [all - LATE, all, all],
        run,
    }
}
