//! The ring: what only it does, and what becomes of it when it is dropped or forbidden.

use std::io::Write;

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::io::scratch::Scratch;
use crate::io::{MetaOp, OpenMode, Reply, conformance};
use kvarts_contract::io_error::{DirId, FileId, Name};

/// A ring, or nothing where the machine forbids it, which is said where no test harness hides it.
fn ring(scratch: &Scratch, features: &Features) -> Option<Ring> {
    match Ring::new(&[scratch.path().to_owned()], features) {
        Ok(ring) => Some(ring),
        Err(RingError::Environment(why)) => panic!("{why}"),
        Err(RingError::Forbidden(why)) => {
            static ONCE: std::sync::Once = std::sync::Once::new();
            ONCE.call_once(|| {
                let _ = writeln!(std::io::stderr(), "SKIPPED, NOT PASSED: every test of the ring: {why}");
            });
            None
        }
    }
}

fn conforms(features: &Features) {
    let scratch = Scratch::on_disk();
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
    let scratch = Scratch::on_disk();
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
    ring.files.insert(eventfd(0, EventfdFlags::CLOEXEC).unwrap(), DirId(0))
}

/// The per-transfer flags of an entry, which lie at byte 28 of what the kernel reads.
fn transfer_flags(entry: &squeue::Entry) -> u32 {
    // SAFETY: an entry is 64 bytes of plain data, laid out as the kernel has it.
    let bytes = unsafe { &*(&raw const *entry).cast::<[u8; 64]>() };
    u32::from_le_bytes([bytes[28], bytes[29], bytes[30], bytes[31]])
}

#[test]
fn a_durable_write_carries_the_flag_for_it_registered_or_not_vectored_or_not() {
    let scratch = Scratch::on_disk();
    for (features, flag) in
        [(Features::default(), 2), (Features { disable: [Feature::DurableWrite].into() }, 0)]
    {
        let Some(mut ring) = ring(&scratch, &features) else { return };
        let buf = SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, 4096).unwrap();
        let file = endless(&ring);
        for _ in 0..2 {
            for sync in [false, true] {
                let op = Op::Write { file, offset: 0, from: buf.clone(), sync };
                let op_v = Op::WriteV { file, offset: 0, from: [buf.clone()].into(), sync };
                for op in [op, op_v] {
                    let file = ring.files.get(file).unwrap();
                    let ranges = Box::new([IoVec::of(&buf)]);
                    let pending =
                        Pending { token: Token(0), op, file, ranges, written: None, in_kernel: false };
                    let entry = ring.entry(&pending);
                    assert_eq!(transfer_flags(&entry), if sync { flag } else { 0 });
                }
            }
            let _ = ring.register(buf.region());
        }
    }
}

#[test]
fn a_durable_write_that_is_two_operations_fails_if_its_flush_does() {
    let scratch = Scratch::on_disk();
    let Some(mut ring) = ring(&scratch, &Features { disable: [Feature::DurableWrite].into() }) else {
        return;
    };
    // An eventfd takes the write and knows no flush.
    let file = endless(&ring);
    let buf = SharedBuf::new(&Region::anonymous(8).unwrap(), 0, 8).unwrap();
    for (sync, result) in [(false, 8), (true, -22)] {
        ring.submit(Token(5), Op::Write { file, offset: 0, from: buf.clone(), sync });
        let completion = wait(&mut ring);
        assert_eq!((completion.token, completion.result), (Token(5), result));
    }
    assert_eq!(Arc::strong_count(buf.region()), 1);
}

#[test]
fn a_transfer_across_two_registered_pieces_is_as_good_as_any() {
    let scratch = Scratch::on_disk();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let Some(registered) = &mut ring.registered else { return };
    registered.set_piece(2 * 4096);
    let region = Region::anonymous(5 * 4096).unwrap();
    if ring.register(&region).is_err() {
        return;
    }
    let file = open(&mut ring, "file");
    let all = SharedBuf::new(&region, 0, 5 * 4096).unwrap();
    all.copy_in(0, &(0..5 * 4096).map(|at| (at / 512) as u8).collect::<Vec<_>>());
    let expected = all.to_vec();
    ring.submit(Token(1), Op::Write { file, offset: 0, from: all.clone(), sync: false });
    assert_eq!(wait(&mut ring).result, 5 * 4096);
    for (at, len) in [(0, 2), (1, 2), (2, 2), (4, 1), (0, 5)] {
        let part = SharedBuf::new(&region, at * 4096, len * 4096).unwrap();
        part.fill(0xff);
        ring.submit(Token(2), Op::Read { file, offset: at as u64 * 4096, into: part.clone() });
        assert_eq!(wait(&mut ring).result, len as i32 * 4096);
        assert_eq!(all.to_vec(), expected);
    }
}

#[test]
fn an_operation_that_would_never_end_is_cancelled_when_the_ring_is_dropped() {
    let scratch = Scratch::on_disk();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let buf = SharedBuf::new(&Region::anonymous(8).unwrap(), 0, 8).unwrap();
    let file = endless(&ring);
    ring.submit(Token(1), Op::Read { file, offset: 0, into: buf.clone() });
    ring.reap(&mut Vec::new());
    assert_eq!(Arc::strong_count(buf.region()), 2);
    drop(ring);
    assert_eq!(Arc::strong_count(buf.region()), 1);
}

#[test]
fn no_more_operations_are_in_the_kernel_than_the_completion_queue_holds() {
    let scratch = Scratch::on_disk();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let buf = SharedBuf::new(&Region::anonymous(8).unwrap(), 0, 8).unwrap();
    let file = endless(&ring);
    for number in 0..5000 {
        ring.submit(Token(number), Op::Read { file, offset: 0, into: buf.clone() });
    }
    ring.reap(&mut Vec::new());
    let room = ring.ring.params().cq_entries() as usize;
    assert!(ring.in_kernel > room / 2 && ring.in_kernel < room, "{} of {room}", ring.in_kernel);
    assert_eq!(ring.overflow.len(), 5000 - ring.in_kernel);
    drop(ring);
    assert_eq!(Arc::strong_count(buf.region()), 1);
}

#[test]
fn memory_that_the_kernel_has_not_given_back_when_the_ring_is_dropped_is_leaked_and_counted() {
    let scratch = Scratch::on_disk();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let buf = SharedBuf::new(&Region::anonymous(8).unwrap(), 0, 8).unwrap();
    let file = endless(&ring);
    ring.submit(Token(1), Op::Read { file, offset: 0, into: buf.clone() });
    ring.reap(&mut Vec::new());
    let before = leaked();
    // It times out at once.
    ring.drop_waits = 0;
    drop(ring);
    assert_eq!(Arc::strong_count(buf.region()), 2, "the kernel may still write there");
    assert_eq!(leaked(), (before.0 + 1, before.1 + 8));
}

#[test]
fn a_completion_that_nobody_waits_for_is_counted_and_harms_nothing() {
    let scratch = Scratch::on_disk();
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

/// Nothing is heard of an operation that the kernel never saw.
#[test]
fn what_the_kernel_would_not_take_is_known_before_the_executor_sleeps_and_offered_again() {
    let scratch = Scratch::on_disk();
    let Some(mut ring) = ring(&scratch, &Features::default()) else { return };
    let file = open(&mut ring, "file");
    let buf = SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, 4096).unwrap();
    assert!(!ring.unsent());
    // As a kernel without memory does.
    ring.refusals.set(1);
    ring.submit(Token(1), Op::Write { file, offset: 0, from: buf.clone(), sync: false });
    // It does not sleep until something comes: nothing would.
    ring.park(None);
    assert!(ring.unsent());
    assert_eq!(wait(&mut ring).result, 4096);
    assert!(!ring.unsent());
    // What waits because there is enough in the kernel is no reason to wake: its completions are.
    let endless = endless(&ring);
    for number in 0..5000 {
        ring.submit(Token(number), Op::Read { file: endless, offset: 0, into: buf.clone() });
    }
    ring.reap(&mut Vec::new());
    assert!(!ring.overflow.is_empty() && !ring.unsent());
}

#[test]
fn a_thread_pinned_to_one_core_keeps_the_helper_threads_off_it() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let scratch = Scratch::on_disk();
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
