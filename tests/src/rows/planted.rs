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
    bug("flush-of-another-file", "R1", "the flush goes to another file: the one that was opened before"),
    bug("directory-not-flushed", "R1", "the name of a new segment file is not made durable"),
    bug(
        "relaxed-called-durable",
        "R1",
        "a durable put of a block that was put relaxed is acknowledged without a flush",
    ),
    bug(
        "delete-does-not-wait",
        "R22",
        "a delete takes its sequence number before writes that began earlier have taken theirs",
    )
    .at(7),
    bug("seal-before-flush", "R1", "a footer lists records that have not been flushed").at(2),
    bug(
        "recycled-header-late",
        "R1",
        "records of a new generation are acknowledged before its header is durable",
    )
    .at(3),
    bug("tombstones-recycled", "R22", "a segment is rewritten although no other segment has its tombstones")
        .at(19),
    bug(
        "tombstone-forgotten-early",
        "R22",
        "tombstones are forgotten while records that they delete are on disk",
    )
    .at(1),
    bug("first-chunk-alone", "R22", "a checkpoint lists only the first chunk of its tombstones").at(97),
    bug("sequence-not-restored", "R22", "sequence numbers start over after a recovery").at(12),
    bug("move-without-compare", "R22", "compaction updates the index without a check of the current entry")
        .at(11),
    bug("first-shard-wins", "R13", "of the copies in two shards, the copy that is recovered first counts")
        .at(75),
    bug("torn-tail-adopted", "R1", "recovery adopts records without a check of their payloads"),
    bug("checkpoint-over-the-newest", "R26", "a checkpoint overwrites the newest complete checkpoint").at(1),
    bug(
        "checkpoint-header-first",
        "R26",
        "the header of a checkpoint is written before the rest of the checkpoint is durable",
    ),
    bug("trailer-before-footer", "R26", "the trailer is durable before the footer that it names").at(1),
    bug(
        "lost-header-not-written",
        "R26",
        "recovery seals a segment whose header was lost, and does not write the header",
    )
    .at(4),
    bug("delete-not-durable", "R22", "a delete is acknowledged before its tombstones are flushed").at(4),
    bug("generation-reused", "R22", "a rewritten segment keeps its generation").at(31),
    bug("stored-length-wrong", "R22", "a wrong length is recorded for an encoded chunk"),
    bug("digest-not-compared", "R6", "chunks are served without a check of their digests").at(26),
    bug("decoded-digest-not-compared", "R6", "decoded chunks are served without a check of their digests")
        .at(556),
    bug("quarantined-served", "R6", "a block that failed verification stays in service").at(26),
    bug("fsck-skips-digests", "R6", "the checker reads payloads but does not compare their digests").at(26),
    bug("fsck-skips-padding", "R6", "the checker does not look at padding").at(66),
    bug("fsck-calls-damage-torn", "R6", "the checker reports damage to flushed records as a torn tail")
        .at(148),
    bug(
        "rescan-forgets-holes",
        "R6",
        "in a segment without a footer, recovery treats evicted blocks as torn or live",
    )
    .at(187),
    bug(
        "fsck-forgets-holes",
        "R6",
        "in a segment without a footer, the checker treats evicted blocks as damaged",
    )
    .at(2658),
    bug(
        "tag-not-compared",
        "R7",
        "a record is accepted without a check of its tag: a client can forge a record",
    )
    .at(9),
    bug("position-not-compared", "R7", "a valid structure is accepted at any position").at(79),
    bug(
        "fsck-misses-lost-files",
        "R7",
        "the checker does not report the absence of a segment that the checkpoint lists",
    )
    .at(3),
    bug("repair-keeps-damaged", "R7", "a repair lists all records of the old footer, including damaged ones")
        .at(5),
    bug("repair-drops-good", "R7", "a repair drops good records").at(29),
    bug(
        "repair-costs-neighbours",
        "R7",
        "a repair removes sound blocks that share pages with damaged blocks",
    )
    .at(1218),
    bug(
        "repair-believes-one-reading",
        "R7",
        "a repair discards data that only one of two readings shows as damaged",
    )
    .at(127),
    bug(
        "recycled-header-unseen",
        "R7",
        "recovery treats a reused segment as free if its new header was lost",
    )
    .at(328),
    bug(
        "fsck-recycled-header-unseen",
        "R7",
        "the checker treats a reused segment as free if its new header was lost",
    )
    .at(328),
    bug(
        "key-not-compared",
        "R18",
        "a block is served by the entry in a footer, without a check of the record's own keys",
    ),
    bug("fsck-believes-footers", "R18", "the checker does not compare a footer with its records"),
    bug("failed-write-taken-for-done", "R9", "a write that ends with an error counts as done"),
    bug("shortage-latches", "R29", "a shortage of descriptors or memory makes the store read-only"),
    bug("failed-flush-repeated", "R10", "a failed flush is repeated, and its success is trusted"),
    bug("short-read-taken-for-whole", "R16", "a read that ends short counts as complete").at(20),
    bug("put-over-live", "R16", "a second put of a stored block replaces the block"),
    bug("event-lost", "R16", "a delete has no event"),
    bug("gaps-not-looked-into", "R16", "blocks behind a removed block of the same record are not found")
        .at(111),
    bug("pin-cap-ignored", "R16", "a tenant pins more than its limit").at(1),
    bug("claim-leaked", "R14", "the claim on a block outlives its put"),
    bug("late-put-visible", "R14", "a put becomes visible after its reply said that its deadline had passed")
        .at(2),
    bug("promise-leaked", "R14", "bytes of a quota that were reserved for a put are not released"),
    bug("quota-off-by-one", "R14", "a namespace may exceed its quota by one byte"),
    bug("budget-leaked", "R14", "the bytes of a removed segment are not returned to the budget"),
    bug("lease-ignored", "R17", "eviction takes blocks that a lease holds").at(13),
    bug("lease-forgets-one", "R17", "a lease does not protect every block that it names").at(1),
    bug("lease-never-ends", "R17", "a lease protects blocks after its end").at(13),
    bug("expiry-by-the-wall-clock", "R17", "expired blocks return when the wall clock is set back"),
    bug("expired-served", "R17", "blocks are served after their expiry"),
    bug(
        "follower-walks-every-step",
        "R30",
        "a read that shares the load of another read goes through all steps of its plan for each run",
    )
    .at(3),
    bug("footers-read-again", "R30", "a search for descendants of a key reads all footers repeatedly").at(36),
    bug("eviction-lists-all", "R30", "each choice of a block to evict lists all segments").at(7),
    bug("checkpoint-looks-at-all", "R30", "a checkpoint examines the records of all shards").at(8),
    bug("sweep-looks-at-all", "R30", "a sweep examines segments in which no block has expired").at(10),
    bug(
        "part-for-each-shard",
        "R30",
        "a read has a part for each shard, not one for all shards of a directory that an executor owns",
    )
    .at(0),
    bug("merge-looks-at-all", "R30", "a search for chains starts at every record").at(12),
    bug("delete-in-one-go", "R30", "a delete removes all of its keys under one lock").at(13),
    bug(
        "checkpoint-for-each-segment",
        "R30",
        "the reuse of each segment with tombstones waits for a new checkpoint",
    )
    .at(14),
    bug(
        "tile-with-its-own-origins",
        "R31",
        "each tile of a read uses the production that the index has at that moment",
    ),
    bug(
        "kept-tile-not-looked-up",
        "R31",
        "a cached tile is returned without a look-up of its blocks in the index",
    ),
    bug("kept-tile-of-a-reused-segment", "R31", "a cached tile of a rewritten segment is returned"),
    bug(
        "footer-proves-nothing",
        "R32",
        "a segment whose trailer was zeroed is recovered as if it had never been sealed",
    )
    .at(14),
    bug(
        "fsck-footer-proves-nothing",
        "R32",
        "the checker treats a segment whose trailer was zeroed as never sealed",
    )
    .at(14),
    bug("scan-verifies-holes", "R32", "recovery compares digests of blocks that are holes").at(14),
    bug("holes-filled-again", "R32", "holes of evicted blocks in a scanned segment are filled again").at(14),
    bug("repair-syncs-last", "R7", "a repair flushes once, after all of its writes").at(5),
    bug("device-not-asked", "R32", "puts evict blocks while writes fail"),
    bug("barren-segments-stay", "R32", "segments that failed at their beginning are not used again").at(307),
    bug("latch-lifted-unproven", "R32", "a store resumes although no shard has shown that it accepts writes")
        .at(2),
    bug("short-segments-stay", "R32", "the short segments that starts leave behind are never merged").at(3),
    bug("rest-is-no-room", "R32", "the unused space in segments is not counted when the store makes room")
        .at(11),
    bug(
        "coarse-holes-believed",
        "R32",
        "single pages are punched although the file system frees no space for them",
    )
    .at(38),
    bug("given-back-unflushed", "R32", "bytes return to the budget although the flush of their hole failed")
        .at(5),
    bug("deleted-namespace-remembered", "R32", "the memory of a deleted namespace is not freed").at(6),
    bug(
        "small-pins-are-free",
        "R32",
        "a lease counts only the bytes of its blocks, without a minimum for each block",
    )
    .at(7),
    bug("index-limit-ignored", "R32", "the index takes more memory than its budget").at(8),
    bug("descriptors-not-counted", "R32", "more segment files are made than descriptors are available").at(9),
    bug("spare-room-kept", "R32", "a shard keeps empty segments while another shard evicts").at(12),
    bug("spare-room-waits", "R32", "a shard waits for room from a shard whose device hangs").at(13),
    bug(
        "coldest-by-the-log",
        "R32",
        "the oldest segments of the log are evicted first, even if they were used recently",
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
        "a read ends without the blocks of the other drives if one drive does not answer",
    ),
    bug("quota-waits", "R43", "a put at a quota waits for a shard whose drive hangs").at(2),
    bug("one-lane", "R43", "requests to a silent drive use up the queue of the other drives"),
    bug("behind-not-told", "R44", "a drive that returns does not receive the deletes that it missed").at(1),
    bug(
        "deletes-beside-a-return",
        "R44",
        "deletes are acknowledged while a returning drive has received only the earlier deletes",
    )
    .at(13),
    bug(
        "delete-spans-a-return",
        "R44",
        "a delete that began before the return of a drive is acknowledged without this drive",
    )
    .at(21),
    bug(
        "lost-bytes-counted",
        "R44",
        "files that were counted before their drive failed still count in the budget",
    )
    .at(69),
    bug("given-up-graves-counted", "R44", "the deletes of a drive that is opened again are counted twice")
        .at(5),
    bug("half-made-files-counted", "R44", "unfinished files of a failed drive still count in the budget")
        .at(13),
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
        "a delete gets a lower sequence number than records of an unreadable segment",
    )
    .at(2),
    bug("opens-with-any", "R44", "a store opens with fewer than half of its drives").at(44),
    bug(
        "terms-not-noted",
        "R44",
        "two sets of drives begin the same term if another drive is lost meanwhile",
    )
    .at(1260),
    bug("silence-not-noticed", "R44", "deletes wait for a drive that does not answer").at(3),
    bug(
        "deletes-before-their-term",
        "R44",
        "deletes are acknowledged before the other drives have recorded the loss of a drive",
    )
    .at(23),
    bug("let-go-forgotten", "R30", "removed descendants of a block are counted for ever").at(7),
    bug("evicted-untold", "R1", "blocks are evicted without an event when the store makes room").at(3),
    bug("format-drifts", "R23", "the meaning of bytes on disk differs from that in earlier programs"),
    bug("peer-origin-not-compared", "R33", "pieces of a peer are accepted from any production").at(2),
    bug("peer-digest-not-compared", "R33", "chunks of a peer are not compared with their digests").at(5),
    bug("peer-piece-misplaced", "R33", "chunks of a peer are placed into another block").at(1),
    bug("cancelled-bytes-owed", "R33", "cancelled bytes count as under way for ever"),
    bug("old-members-accepted", "R33", "members of an older epoch replace later ones"),
    bug("connected-without-snapshot", "R33", "a new connection continues at the position of the broken one")
        .at(5),
    bug("holder-taken-for-whole", "R33", "a holder with an incomplete list reports that no node has a block")
        .at(1),
    bug(
        "snapshot-keeps-the-gone",
        "R33",
        "the end of a snapshot keeps entries that the snapshot did not list",
    )
    .at(3),
    bug("departed-still-listed", "R33", "a node that left is still listed with blocks").at(9),
    bug("released-owner-listed", "R33", "an owner is still listed after its lease has ended").at(9),
    bug("old-token-renewed", "R33", "a lease is renewed under an older token").at(34),
    bug("new-holder-not-silent", "R33", "a new holder grants leases at the same time as the previous holder"),
    bug("unconfirmed-holder-grants", "R33", "a holder that no majority has confirmed grants leases").at(34),
    bug(
        "epochs-start-over",
        "R38",
        "after a service has lost all data, its members begin with the first epoch again",
    ),
    bug("epoch-without-majority", "R38", "the members change before a majority has their epoch").at(2),
    bug(
        "members-of-the-gone",
        "R38",
        "members are removed although no majority of the remaining members can be reached",
    )
    .at(35),
    bug("lapsed-stay", "R38", "a node whose registration has run out stays a member"),
    bug("two-changes-at-once", "R38", "all lost members are removed in one epoch").at(1),
    bug("moved-not-followed", "R38", "a member that has moved keeps its old address").at(1),
    bug("address-twice", "R38", "a node with the address of another node is proposed").at(1),
    bug("held-by-the-gone", "R39", "an unreachable node counts as a holder of the blocks of a put"),
    bug("lease-not-asked", "R39", "a put of a chain that another node owns is stored permanently"),
    bug("lease-never-over", "R39", "a put follows a lease that has ended"),
    bug("lease-not-looked-at-again", "R39", "a put continues under a lease that was released meanwhile"),
    bug(
        "released-after-the-answer",
        "R39",
        "a released lease counts on its node until the reply to the release",
    ),
    bug("late-grant-counts", "R39", "the reply to an earlier request restores a released lease").at(2),
    bug("owners-put-held", "R39", "an owner does not store blocks that another node has"),
    bug(
        "owner-not-offered",
        "R39",
        "blocks of a chain that another node stored are not offered to its owner",
    ),
    bug("favour-before-the-chain", "R39", "blocks before the beginning of a chain are also protected").at(4),
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
    bug("stale-copy-stored", "R33", "a copy that was under way is stored after the delete of its block")
        .at(143),
    bug("copy-without-the-end", "R33", "a copy outlives its source").at(11),
    bug("shorter-times-stay", "R33", "a shorter time to live is ignored on another node").at(1),
    bug("deletes-not-noted", "R41", "a manifest does not store deletes"),
    bug("deletes-not-compared", "R41", "a manifest lists a pack whose blocks it lists as deleted"),
    bug(
        "folded-deletes-forgotten",
        "R41",
        "a manifest accepts packs whose blocks were listed before a delete that it has dropped",
    )
    .at(144),
    bug("late-deletes-are-new", "R41", "a delete that arrives late gets the present time").at(1),
    bug("what-outlives-stays", "R41", "a manifest lists copies that outlive a shorter time to live").at(1),
    bug("conditions-not-tried", "R41", "a bucket that ignores conditions of puts is written to").at(8),
    bug("pool-forgets-deletes", "R42", "blocks of a pool are used after later deletes").at(37),
    bug("shared-extents-not-held", "R42", "a stage does not hold blocks that another stage has read").at(1),
    bug("silence-not-kept", "R42", "a stage waits for ever for a read that hangs").at(10),
    bug(
        "draft-keeps-what-was-there",
        "R42",
        "a draft keeps blocks although the store has the bytes of another put",
    )
    .at(13),
    bug(
        "blocks-behind-count-too",
        "R42",
        "when the first block of an extent arrives, all of its blocks count as present",
    ),
    bug(
        "rests-stay",
        "R45",
        "blocks that a session left to its forks are still held after the last fork has ended",
    )
    .at(1),
    bug("silent-peer-awaited", "R46", "a read waits for ever for a node that does not deliver a piece"),
    bug(
        "untaken-answer-kept",
        "R46",
        "a node keeps the memory of pieces that a stopped node does not receive",
    ),
    bug("silent-holder-awaited", "R46", "a look-up waits seconds for a holder that does not answer").at(1),
    bug("nothing-set-aside", "R46", "no memory and no turns are reserved for a tenant"),
    bug(
        "shares-without-places",
        "R46",
        "pieces of other tenants leave gaps in the memory that is reserved for a tenant",
    )
    .at(7),
    bug(
        "bucket-left-alone",
        "R46",
        "requests to a bucket stay suspended after the bucket has answered again",
    ),
    // The last ones take long to be found: the merge tier does without them.
    bug(
        "duplicate-into-the-places",
        "R33",
        "a piece that is requested twice is read twice into the same memory",
    )
    .at(210),
    bug("read-past-its-deadline", "R33", "a read over several paths continues after its deadline").at(3),
    bug(
        "message-lost-to-a-question",
        "R33",
        "a message to a holder is lost if the holder sends a request at the same time",
    )
    .at(865),
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
/// from `seed` on. The other tiers search first.
pub fn found(bug: &Bug, tier: Tier, seed: u64) -> Result<Violation, String> {
    let row = super::all()
        .into_iter()
        .find(|row| row.id == bug.row)
        .ok_or(format!("there is no row {}", bug.row))?;
    let [merge, ..] = row.targets;
    let is_of_nodes = ["R33", "R38", "R39", "R41", "R45", "R46"].contains(&row.id);
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
        // The noted seed may be beyond all that were searched.
        return search().or_else(|missed| look(bug.seed..bug.seed + 1).map_err(|_| missed));
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
