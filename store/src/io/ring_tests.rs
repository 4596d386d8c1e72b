use std::io::Write;

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::io::scratch::Scratch;
use crate::io::{DirId, FileId, MetaOp, Name, OpenMode, Reply, conformance};

/// A ring, or nothing where the machine forbids it, which is said where no test harness hides it.
fn ring(scratch: &Scratch, features: &Features) -> Option<Ring> {
    match Ring::new(&[scratch.path().to_owned()], features) {
        Ok(ring) => Some(ring),
        Err(RingError::Environment(why)) => panic!("{why}"),
        Err(RingError::Forbidden(why)) => {
            let test = std::thread::current().name().unwrap_or("?").to_owned();
            let _ = writeln!(std::io::stderr(), "SKIPPED, NOT PASSED: {test}: {why}");
            None
        }
    }
}

fn conforms(features: &Features) {
    let scratch = Scratch::new();
    if ring(&scratch, features).is_some() {
        conformance::all(&mut || Box::new(ring(&scratch, features).unwrap()));
    }
}

#[test]
fn the_ring_conforms() {
    conforms(&Features::default());
}

#[test]
fn the_ring_conforms_without_any_feature() {
    conforms(&Features::only(&[]));
}

#[test]
fn the_ring_conforms_with_each_feature_disabled_in_turn() {
    for feature in Feature::ALL {
        conforms(&Features { disable: [feature].into() });
    }
}

#[test]
fn the_ring_conforms_with_what_older_kernels_have() {
    use Feature::{CoopTaskrun, DirectIo, DurableWrite, SingleIssuer, TaskrunFlag};
    conforms(&Features::only(&[CoopTaskrun, DirectIo, DurableWrite]));
    conforms(&Features::only(&[CoopTaskrun, TaskrunFlag, DirectIo]));
    conforms(&Features::only(&[SingleIssuer, DirectIo]));
}

#[test]
fn a_disabled_feature_is_reported_as_off_and_the_others_with_a_reason() {
    let scratch = Scratch::new();
    for feature in Feature::ALL {
        let Some(ring) = ring(&scratch, &Features { disable: [feature].into() }) else { return };
        let facts = ring.facts();
        assert_eq!(facts.backend, "ring");
        let mut names: Vec<_> = facts.features.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Feature::ALL.len(), "{facts:?}");
        let (_, outcome) = facts.features.iter().find(|(name, _)| *name == feature.name()).unwrap();
        assert!(outcome.is_err(), "{feature} is on");
        assert!(
            facts
                .features
                .iter()
                .all(|(_, outcome)| outcome.as_ref().err().is_none_or(|why| !why.is_empty()))
        );
    }
}

fn open(ring: &mut Ring, path: &str) -> FileId {
    let name = Name { dir: DirId(0), path: path.into() };
    let mode = OpenMode { write: true, create: true, direct: true };
    ring.submit(Token(0), Op::Meta(MetaOp::Open { name, mode }));
    match wait(ring).reply {
        Some(Reply::Opened(file)) => file,
        other => panic!("{other:?}"),
    }
}

fn wait(ring: &mut Ring) -> Completion {
    let mut completions = Vec::new();
    for _ in 0..100 {
        ring.reap(&mut completions);
        if let Some(completion) = completions.pop() {
            return completion;
        }
        ring.park(Some(Duration::from_millis(100)));
    }
    panic!("no completion");
}

/// A file whose reads never end by themselves.
fn endless(ring: &Ring) -> FileId {
    ring.files.insert(eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap()
}

#[test]
fn a_transfer_across_two_registered_pieces_is_as_good_as_any() {
    let scratch = Scratch::new();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let Some(registered) = &mut ring.registered else { return };
    registered.set_piece(2 * 4096);
    let region = Region::anonymous(5 * 4096).unwrap();
    if ring.register(&region).is_err() {
        return;
    }
    let file = open(&mut ring, "file");
    let all = Buf::new(&region, 0, 5 * 4096).unwrap();
    all.copy_in(0, &(0..5 * 4096).map(|at| (at / 512) as u8).collect::<Vec<_>>());
    let expected = all.to_vec();
    ring.submit(Token(1), Op::Write { file, offset: 0, from: all.clone(), sync: false });
    assert_eq!(wait(&mut ring).result, 5 * 4096);
    for (at, len) in [(0, 2), (1, 2), (2, 2), (4, 1), (0, 5)] {
        let part = Buf::new(&region, at * 4096, len * 4096).unwrap();
        part.fill(0xff);
        ring.submit(Token(2), Op::Read { file, offset: at as u64 * 4096, into: part.clone() });
        assert_eq!(wait(&mut ring).result, len as i32 * 4096);
        assert_eq!(all.to_vec(), expected);
    }
}

#[test]
fn an_operation_that_would_never_end_is_cancelled_when_the_ring_is_dropped() {
    let scratch = Scratch::new();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let buf = Buf::new(&Region::anonymous(8).unwrap(), 0, 8).unwrap();
    let file = endless(&ring);
    ring.submit(Token(1), Op::Read { file, offset: 0, into: buf.clone() });
    ring.reap(&mut Vec::new());
    assert_eq!(Arc::strong_count(buf.region()), 2);
    drop(ring);
    assert_eq!(Arc::strong_count(buf.region()), 1);
}

#[test]
fn memory_that_the_kernel_has_not_given_back_when_the_ring_is_dropped_is_leaked_and_counted() {
    let scratch = Scratch::new();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let buf = Buf::new(&Region::anonymous(8).unwrap(), 0, 8).unwrap();
    let file = endless(&ring);
    ring.submit(Token(1), Op::Read { file, offset: 0, into: buf.clone() });
    ring.reap(&mut Vec::new());
    let before = leaked();
    // Out of patience at once.
    ring.drop_waits = 0;
    drop(ring);
    assert_eq!(Arc::strong_count(buf.region()), 2, "the kernel may still write there");
    assert_eq!(leaked(), (before.0 + 1, before.1 + 8));
}

#[test]
fn a_completion_that_nobody_waits_for_is_counted_and_harms_nothing() {
    let scratch = Scratch::new();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    for word in [0, 7, 1 << 40] {
        let nop = opcode::Nop::new().build().user_data(word);
        assert!(ring.push_entry(&nop));
    }
    let mut completions = Vec::new();
    while ring.unknown < 3 {
        ring.reap(&mut completions);
    }
    assert!(completions.is_empty());
    open(&mut ring, "file");
}

#[test]
fn the_event_descriptor_wakes_for_completions_workers_and_unparks() {
    let scratch = Scratch::new();
    for features in [Features::default(), Features::only(&[Feature::CoopTaskrun]), Features::only(&[])] {
        let Some(mut ring) = ring(&scratch, &features) else { return };
        let event = ring.event_fd().unwrap();
        let name = Name { dir: DirId(0), path: "file".into() };
        let mode = OpenMode { write: true, create: true, direct: false };
        ring.submit(Token(0), Op::Meta(MetaOp::Open { name, mode }));
        let Some(Reply::Opened(file)) = wait_by_event(&mut ring, &event).reply else { panic!() };
        let buf = Buf::new(&Region::anonymous(1 << 20).unwrap(), 0, 1 << 20).unwrap();
        for round in 0..50 {
            ring.submit(Token(round), Op::Write { file, offset: 0, from: buf.clone(), sync: true });
            let completion = wait_by_event(&mut ring, &event);
            assert_eq!((completion.token, completion.result), (Token(round), 1 << 20));
        }
        let unparker = ring.unparker();
        for _ in 0..50 {
            std::thread::scope(|scope| {
                scope.spawn(|| unparker.unpark());
                while ring.arm() {
                    sleep_on(&event);
                    ring.disarm();
                }
            });
        }
    }
}

fn wait_by_event(ring: &mut Ring, event: &OwnedFd) -> Completion {
    let mut completions = Vec::new();
    loop {
        ring.reap(&mut completions);
        if let Some(completion) = completions.pop() {
            assert!(completions.is_empty());
            return completion;
        }
        if ring.arm() {
            sleep_on(event);
            ring.disarm();
        }
    }
}

fn sleep_on(event: &OwnedFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(event, PollFlags::IN)];
    let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&patience)), Ok(1), "nothing woke the sleeper");
    rustix::io::read(event, &mut [0_u8; 8]).unwrap();
}

#[test]
fn a_thread_pinned_to_one_core_keeps_the_helper_threads_off_it() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let scratch = Scratch::new();
    if ring(&scratch, &Features::default()).is_none() {
        return;
    }
    let all = sched_getaffinity(Some(rustix::process::getpid())).unwrap();
    let core = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
    let mut one = CpuSet::new();
    one.set(core);
    // The pin ends with this test's thread.
    sched_setaffinity(None, &one).unwrap();
    let ring = ring(&scratch, &Features::default()).unwrap();
    let facts = ring.facts();
    let (_, outcome) =
        facts.features.iter().find(|(name, _)| *name == Feature::WorkerAffinity.name()).unwrap();
    if all.count() > 1 {
        assert_eq!(*outcome, Ok(()));
    } else {
        assert!(outcome.is_err());
    }
}
