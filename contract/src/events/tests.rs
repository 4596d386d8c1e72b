//! The ring, gaps, and recordings.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};

use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey, NamespaceId};
use proptest::prelude::*;

use super::record::{Content, EventRecorder, replay};
use super::*;

fn block(n: u8) -> IndexKey {
    let coordinate =
        if n.is_multiple_of(2) { Coordinate::Replicated } else { Coordinate::heads(1, 2, 8).unwrap() };
    IndexKey {
        namespace: NamespaceId([n % 3; 32]),
        key: BlockKey([n; 32]),
        group: Group(u32::from(n) % 5),
        coordinate,
    }
}

fn tell(log: &EventLog, n: u8) {
    log.change().tell(u64::from(n), EventKind::Stored, Cause::Put, Subject::Block(block(n)));
}

const EVENT_BYTES: usize = size_of::<(u64, EventKind, Cause, Subject)>();

#[test]
fn a_reader_gets_every_event_in_order_or_is_told_of_the_gap() {
    let log = EventLog::new(9, 10 * EVENT_BYTES);
    let mut reader = log.subscribe(None);
    assert_eq!(reader.try_next(100), Ok(Vec::new()));
    (0..10).for_each(|n| tell(&log, n));
    let read = reader.try_next(4).unwrap();
    assert_eq!(read.iter().map(|event| event.sequence.number).collect::<Vec<_>>(), [1, 2, 3, 4]);
    (10..14).for_each(|n| tell(&log, n));
    // The fifth is the oldest that is kept: nothing was lost to this reader yet.
    assert_eq!(reader.try_next(100).unwrap().len(), 10);
    (0..11).for_each(|n| tell(&log, n));
    let gap = reader.try_next(100).unwrap_err();
    assert_eq!(gap.resume, Sequence { stream: 9, number: 15 });
    assert_eq!(log.subscribe(Some(gap.resume)).try_next(100).unwrap().len(), 10);
    assert!(log.bytes() <= 16 * EVENT_BYTES);
}

#[test]
fn what_nobody_can_name_is_a_gap_for_every_reader_once() {
    let log = EventLog::new(9, 10 * EVENT_BYTES);
    let (mut reader, mut behind) = (log.subscribe(None), log.subscribe(None));
    tell(&log, 1);
    assert_eq!(reader.try_next(100).unwrap().len(), 1);
    log.change().lose();
    tell(&log, 2);
    for reader in [&mut reader, &mut behind] {
        let gap = reader.try_next(100).unwrap_err();
        *reader = log.subscribe(Some(gap.resume));
        assert_eq!(reader.try_next(100).unwrap().len(), 1);
    }
    log.change().lose();
    assert!(reader.try_next(1).is_err(), "also where nothing comes after it");
}

#[test]
fn a_point_of_another_stream_or_of_the_future_is_a_gap() {
    let log = EventLog::new(9, 10 * EVENT_BYTES);
    tell(&log, 1);
    for from in [Sequence { stream: 8, number: 1 }, Sequence { stream: 9, number: 2 }] {
        assert!(log.subscribe(Some(from)).try_next(1).is_err());
    }
    assert_eq!(log.subscribe(Some(Sequence { stream: 9, number: 0 })).try_next(1).unwrap().len(), 1);
}

#[derive(Default)]
struct Counted(AtomicUsize);

impl Wake for Counted {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_waiting_reader_is_woken_once_by_the_next_event_and_by_the_end() {
    let (counted, log) = (Arc::new(Counted::default()), EventLog::new(9, 10 * EVENT_BYTES));
    let waker = Waker::from(Arc::clone(&counted));
    let mut context = Context::from_waker(&waker);
    let mut reader = log.subscribe(None);
    for _ in 0..3 {
        assert!(reader.poll_next(&mut context, 10).is_pending());
    }
    tell(&log, 1);
    tell(&log, 2);
    assert_eq!(counted.0.load(Ordering::SeqCst), 1);
    assert!(
        matches!(reader.poll_next(&mut context, 10), std::task::Poll::Ready(Some(Ok(some))) if some.len() == 2)
    );
    assert!(reader.poll_next(&mut context, 10).is_pending());
    log.close();
    assert_eq!(counted.0.load(Ordering::SeqCst), 2);
    assert!(matches!(reader.poll_next(&mut context, 10), std::task::Poll::Ready(None)));
}

fn kinds() -> impl Strategy<Value = (EventKind, Cause)> {
    prop::sample::select(vec![
        (EventKind::Stored, Cause::Put),
        (EventKind::Stored, Cause::Moved),
        (EventKind::Evicted, Cause::Room),
        (EventKind::Evicted, Cause::Quota),
        (EventKind::Expired, Cause::Ttl),
        (EventKind::Deleted, Cause::Key),
        (EventKind::Deleted, Cause::Prefix),
        (EventKind::Quarantined, Cause::Damage),
    ])
}

proptest! {
    #[test]
    fn a_recording_gives_the_content_also_when_its_last_line_is_cut_off(
        pages: Vec<Vec<u8>>,
        changes in prop::collection::vec((kinds(), any::<u8>(), 0..20u8), 0..60),
        cut in 1..80usize,
    ) {
        let log = EventLog::new(0xfeed_beef, 1 << 20);
        let start = log.sequence();
        let mut recorder = EventRecorder::new(Vec::new());
        let mut content = Content::default();
        recorder.begin(start).unwrap();
        content.sequence = Some(start);
        for blocks in pages {
            let blocks = blocks.into_iter().map(block).collect();
            let page = SnapshotPage { sequence: start, blocks, next: None };
            recorder.page(&page).unwrap();
            content.page(&page);
        }
        for ((kind, cause), n, whole) in changes {
            match whole {
                0 => log.change().tell(7, EventKind::Deleted, Cause::Namespace, Subject::Namespace(block(n).namespace)),
                _ => log.change().tell(7, kind, cause, Subject::Block(block(n))),
            }
        }
        let mut reader = log.subscribe(Some(start));
        let mut before_last = content.clone();
        loop {
            let events = reader.try_next(7).unwrap();
            if events.is_empty() {
                break;
            }
            for event in events {
                before_last = content.clone();
                recorder.event(&event).unwrap();
                // What was written already is not written twice.
                recorder.event(&event).unwrap();
                content.apply(&event);
            }
        }
        let written = recorder.into_inner();
        prop_assert_eq!(&replay(written.as_slice()).unwrap(), &content);
        if reader.sequence().number > 0 {
            let cut = written.len() - cut.min(40);
            prop_assert_eq!(&replay(&written[..cut]).unwrap(), &before_last);
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
        let _ = replay(bytes.as_slice());
    }
}

#[test]
fn a_hole_a_later_version_and_a_line_without_end_are_refused() {
    let start = r#"{"kvarts_events":1,"stream":"00000000000000ff","after":3}"#;
    let event = |number: u64| {
        let namespace = "07".repeat(32);
        format!(
            r#"{{"event":"deleted","reason":"namespace","at_ms":1,"number":{number},"namespace":"{namespace}"}}"#
        )
    };
    assert!(replay(format!("{start}\n{}\n{}\n", event(4), event(5)).as_bytes()).is_ok());
    let failed = |text: String| replay(text.as_bytes()).unwrap_err().to_string();
    assert!(failed(format!("{start}\n{}\n", event(5))).contains("events between them are missing"));
    assert!(failed(format!("{}\n", event(4))).contains("before the first line"));
    assert!(failed(format!("{}\n", start.replace(":1,", ":2,"))).contains("version is 2"));
    assert!(failed(format!("{start}\n{}", " ".repeat(5000))).contains("longer"));
}
