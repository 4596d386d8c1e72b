//! What a reader waits for: the stream of a read, the turns of its memory, and events.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey, NamespaceId};
use shuttle::thread;

use super::Scene;
use kvarts_contract::api::{ReadEnd, ReadEvent, StepGate, read_channel};
use kvarts_contract::events::{Cause, EventKind, EventLog, Subject};
use kvarts_contract::sync::{Event, Race};

pub(super) fn scenes() -> Vec<Scene> {
    let scene = |name, play, finds, cost| Scene { name, play, finds, cost };
    vec![
        scene("a step that is opened is taken", gate, &[Race::GateLooksFirst], 3),
        scene("a read's end arrives after all of it", reads, &[], 5),
        scene("events are told in order and once", events, &[], 5),
    ]
}

/// Ends a thread's sleep when it is woken.
struct Alarm(Event);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.ring();
    }
}

impl Alarm {
    fn new() -> (Arc<Self>, Waker) {
        let alarm = Arc::new(Self(Event::new().expect("an eventfd")));
        (Arc::clone(&alarm), Waker::from(alarm))
    }

    fn sleep(&self) {
        self.0.wait(None);
        self.0.empty();
    }
}

/// Waits for what `poll` gives, asking again only when woken.
fn wait<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let (alarm, waker) = Alarm::new();
    loop {
        if let Poll::Ready(value) = poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        alarm.sleep();
    }
}

fn gate() {
    let gate = StepGate::new(0);
    let waiters: Vec<_> = (0..2)
        .map(|step| {
            let gate = gate.clone();
            thread::spawn(move || {
                wait(|context| match gate.is_open_or_wake(step, context.waker()) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                });
                assert!(gate.is_open(step), "an open step was closed");
            })
        })
        .collect();
    gate.open(1);
    gate.open(2);
    waiters.into_iter().for_each(|waiter| waiter.join().expect("it did not panic"));
}

fn reads() {
    let (sink, stream) = read_channel();
    let (left, leaving) = read_channel();
    let storing = thread::spawn(move || {
        for block in 0..2 {
            sink.send(ReadEvent::Block(block));
        }
        sink.send(ReadEvent::End(ReadEnd { usable_blocks: 2, held_bytes: 1, ..ReadEnd::default() }));
        sink.send(ReadEvent::Released);
        drop(left);
    });
    let dropping = thread::spawn(move || drop(leaving));
    assert_eq!(wait(|context| stream.poll_next(context)), ReadEvent::Block(0));
    assert_eq!(stream.next_blocking(), ReadEvent::Block(1));
    let end = wait(|context| stream.poll_end(context));
    assert_eq!(end, Ok(ReadEnd { usable_blocks: 2, ..ReadEnd::default() }));
    storing.join().expect("it did not panic");
    dropping.join().expect("it did not panic");
}

fn events() {
    let log = EventLog::new(5, 1 << 10);
    let mut read = log.subscribe(None);
    let telling: Vec<_> = (0..2u8)
        .map(|who| {
            let log = Arc::clone(&log);
            thread::spawn(move || {
                for n in 0..2u8 {
                    let name = IndexKey {
                        namespace: NamespaceId([1; 32]),
                        key: BlockKey([who * 10 + n; 32]),
                        group: Group(0),
                        coordinate: Coordinate::Replicated,
                    };
                    log.change().tell(0, EventKind::Stored, Cause::Put, Subject::Block(name));
                }
            })
        })
        .collect();
    let reading = thread::spawn(move || {
        let mut numbers = Vec::new();
        let mut keys = Vec::new();
        while let Some(some) = wait(|context| read.poll_next(context, 2)) {
            for event in some.expect("the ring holds all of them") {
                numbers.push(event.sequence.number);
                if let Subject::Block(name) = event.subject {
                    keys.push(name.key.0[0]);
                }
            }
        }
        (numbers, keys)
    });
    telling.into_iter().for_each(|teller| teller.join().expect("it did not panic"));
    log.close();
    let (numbers, keys) = reading.join().expect("it did not panic");
    assert_eq!(numbers, [1, 2, 3, 4]);
    for who in [0, 10] {
        let told: Vec<_> = keys.iter().filter(|key| **key / 10 * 10 == who).collect();
        assert_eq!(told, [&who, &(who + 1)], "a thread's events are told in its order");
    }
}
