//! Short reads of the local path: one message answers each, and the executor that ends it sends it.
#![allow(
    clippy::disallowed_methods,
    reason = "real servers and the kernel's counts of threads stand outside the simulation"
)]
#![allow(clippy::result_large_err, reason = "the contract's error, as it came")]

mod raw;
mod read_allocations;
mod served;

use std::sync::{Mutex, PoisonError};

use kvarts_contract::api::BlockOutcome;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_wire::local::frame::{Head, Kind, bare};
use kvarts_wire::local::limits::HEAD_BYTES;
use kvarts_wire::proto;
use prost::Message;
use raw::{BLOCK, Raw, local_read, places};
use rustix::net::RecvFlags;
use served::ClientStage;

/// Sessions of other tests in this process are not counted.
static ALONE: Mutex<()> = Mutex::new(());

/// How often the threads of sessions have gone to sleep.
fn sleeps_of_sessions() -> u64 {
    let mut sleeps = 0;
    for thread in std::fs::read_dir("/proc/self/task").unwrap() {
        let folder = thread.unwrap().path();
        let Ok(name) = std::fs::read_to_string(folder.join("comm")) else { continue };
        if name.trim() == "kvarts-session" {
            let status = std::fs::read_to_string(folder.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            sleeps += line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or_default();
        }
    }
    sleeps
}

/// The frames of what the socket gives at once.
fn frames_at_once(raw: &Raw) -> Vec<(Head, Vec<u8>)> {
    let mut bytes = vec![0; 65536];
    let (count, _) = rustix::net::recv(&raw.stream, &mut bytes[..], RecvFlags::empty()).unwrap();
    let (mut rest, mut frames) = (&bytes[..count], Vec::new());
    while let Some(head) = Head::parse(rest).unwrap() {
        let (frame, behind) = rest.split_at(HEAD_BYTES + head.length);
        frames.push((head, frame[HEAD_BYTES..].to_vec()));
        rest = behind;
    }
    assert!(rest.is_empty());
    frames
}

#[test]
fn a_short_read_is_answered_in_one_message_and_wakes_its_session_for_the_request_alone() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let stage = ClientStage::open("local-short");
    let desk = Desk::new(&stage, "short");
    let keys = desk.keys(0..1);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), [BlockOutcome::Stored]);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, BLOCK);
    let (reads, before) = (200, sleeps_of_sessions());
    for id in 100..100 + reads {
        raw.say(Kind::Read, id, &local_read(desk.namespace, &keys, places(1, 1)));
        let frames = frames_at_once(&raw);
        let kinds: Vec<(Kind, u64)> = frames.iter().map(|(head, _)| (head.kind, head.id)).collect();
        assert_eq!(kinds, [(Kind::Arrived, id), (Kind::End, id), (Kind::Released, id)]);
        let arrived = proto::LocalArrived::decode(&frames[0].1[..]).unwrap();
        let layers: Vec<_> = arrived.parts.iter().filter_map(|part| part.layer).collect();
        assert_eq!(
            layers.iter().map(|ready| (ready.layer, ready.blocks)).collect::<Vec<_>>(),
            [(0, 1), (1, 1), (2, 1)]
        );
        let end = proto::LocalEnd::decode(&frames[1].1[..]).unwrap().end.unwrap();
        assert_eq!((end.usable_blocks, end.usable_layers, end.failures.len()), (1, 3, 0));
        // Long enough for a session that is told that its answer was taken.
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    // Each read wakes the session once; a loaded machine may let it sleep less often.
    let sleeps = sleeps_of_sessions() - before;
    assert!(sleeps <= reads + reads / 4, "{sleeps} for {reads} reads");
    // Nothing is under way, although the session was not woken to see that.
    stage.served.until("nothing is under way", |daemon| {
        daemon.state().locals.clients().iter().all(|client| client.under_way == 0)
            && daemon.state().calls() == 0
    });
}

#[test]
fn short_reads_that_were_cancelled_or_asked_for_all_at_once_all_have_their_last_word() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let stage = ClientStage::open("local-short-many");
    let desk = Desk::new(&stage, "many");
    let keys = desk.keys(0..2);
    // The second one is not here.
    assert_eq!(desk.outcomes(desk.request(pages(), &keys[..1], 1)), [BlockOutcome::Stored]);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, 2 * BLOCK);
    for round in 0..20 {
        let ids = 1000 * (round + 1)..1000 * (round + 1) + 200;
        for id in ids.clone() {
            let wanted = if id % 3 == 0 { &keys[..] } else { &keys[..1] };
            let read = local_read(desk.namespace, wanted, places(1, wanted.len() as u32));
            raw.say(Kind::Read, id, &read);
            if id % 7 == 0 {
                std::io::Write::write_all(&mut raw.stream, &bare(Kind::Cancel, id)).unwrap();
            }
        }
        let (mut ended, mut released) = (Vec::new(), Vec::new());
        while released.len() < ids.clone().count() {
            let (head, body) = raw.hear().unwrap();
            match head.kind {
                Kind::Arrived => {}
                Kind::End => {
                    let end = proto::LocalEnd::decode(&body[..]).unwrap().end.unwrap();
                    let missing = usize::from(head.id % 3 == 0);
                    assert_eq!((end.usable_blocks, end.failures.len()), (1, missing), "{}", head.id);
                    ended.push(head.id);
                }
                Kind::Released => released.push(head.id),
                other => panic!("{other:?}"),
            }
        }
        released.sort_unstable();
        assert!(released.iter().copied().eq(ids.clone()));
        let told = |id: &u64| ended.iter().filter(|ended| *ended == id).count();
        assert!(ids.clone().filter(|id| id % 7 != 0).all(|id| told(&id) == 1));
    }
    drop(raw);
    raw::expect_nothing_left(&stage.served);
}
