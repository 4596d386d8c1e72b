//! The decoder of what arrives on a connection: however the bytes are cut up, the same frames come out of them, and no
//! more memory is held than has arrived and may be waited for.

use proptest::prelude::*;

use super::*;
use crate::local::frame::{Kind, bare};
use crate::local::limits::RECEIVING_BYTES_MAX;
use crate::state::locals::LocalLimits;

/// What comes out of a stream of bytes, and why it ended, if it did.
#[derive(Default, PartialEq, Debug)]
struct Taken {
    frames: Vec<(Head, Bytes)>,
    broken: Option<String>,
}

fn limits(mapped_max: u64, files_max: u64) -> LocalLimits {
    LocalLimits { mapped_max, files_max, threads: 1 }
}

/// Of a client that has said who it is.
fn known(locals: &Arc<Locals>) -> Incoming {
    let mut incoming = Incoming::new(locals);
    incoming.belongs_to(1, Arc::new(locals.sessions.part(1)));
    incoming
}

/// Takes pieces in, as they come from a socket.
fn take<'a>(locals: &Arc<Locals>, pieces: impl Iterator<Item = &'a [u8]>) -> Taken {
    let (mut incoming, mut taken) = (known(locals), Taken::default());
    let mut arrived = 0;
    for piece in pieces {
        incoming.bytes.extend_from_slice(piece);
        arrived += piece.len();
        loop {
            // What was announced is no reason to allocate: only what has arrived is.
            assert!(incoming.bytes.capacity() <= 2 * arrived + 64, "{}", incoming.bytes.capacity());
            match incoming.next() {
                Ok(Next::Frame(head, body)) => taken.frames.push((head, body)),
                Ok(Next::More) => break,
                Ok(Next::Wait) => panic!("no other session receives"),
                Err(Ended::Broken(why)) => {
                    taken.broken = Some(why);
                    return taken;
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        let waited_for = incoming.large.as_ref().map_or(0, |large| large.amount);
        assert!(waited_for <= arrived as u64 + RECEIVING_STEP_BYTES + RECEIVE_BYTES as u64);
    }
    taken
}

fn cut_up<'a>(bytes: &'a [u8], cuts: &'a [prop::sample::Index]) -> impl Iterator<Item = &'a [u8]> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    places.push(bytes.len());
    places.sort_unstable();
    let mut last = 0;
    places.into_iter().map(move |place| &bytes[std::mem::replace(&mut last, place)..place])
}

/// Frames of any kind, some with bodies larger than any session has to itself.
fn streams() -> impl Strategy<Value = Vec<u8>> {
    let body = prop_oneof![
        8 => prop::collection::vec(any::<u8>(), 0..300),
        1 => (SMALL_BODY_BYTES - 2..SMALL_BODY_BYTES * 3).prop_map(|length| vec![7; length]),
    ];
    let one = (prop::sample::select(Kind::ALL), any::<u64>(), body).prop_map(|(kind, id, body)| {
        let head = Head { length: body.len(), kind, id };
        [&head.bytes()[..], &body].concat()
    });
    prop::collection::vec(one, 0..6).prop_map(|frames| frames.concat())
}

proptest! {
    #[test]
    fn however_bytes_are_cut_up_the_same_frames_come_out(
        stream in streams(),
        noise in prop::collection::vec(any::<u8>(), 0..40),
        flip in prop::option::of(any::<prop::sample::Index>()),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let locals = Arc::new(Locals::default());
        let mut bytes = [stream.clone(), noise].concat();
        if let (Some(flip), false) = (flip, bytes.is_empty()) {
            let bit = flip.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let whole = take(&locals, std::iter::once(&bytes[..]));
        prop_assert_eq!(&take(&locals, cut_up(&bytes, &cuts)), &whole);
        // Whatever came out is what went in.
        let again: Vec<u8> =
            whole.frames.iter().flat_map(|(head, body)| [&head.bytes()[..], body].concat()).collect();
        prop_assert!(bytes.starts_with(&again));
        if let Some(why) = &whole.broken {
            let refused = Head::parse(&bytes[again.len()..]).unwrap_err();
            prop_assert!([NoFrame::TooLong, NoFrame::Unknown].contains(&refused));
            prop_assert_eq!(why, &refused.to_string());
        }
        // No session receives any more.
        prop_assert!(all(&locals).is_some());
    }
}

/// Everything that may be received, with room for one tenant.
fn all(locals: &Arc<Locals>) -> Option<Part> {
    locals.receiving.try_take(1, RECEIVING_BYTES_MAX)
}

#[test]
fn a_long_body_has_room_for_what_arrived_of_it_and_gives_it_back() {
    let locals = Arc::new(Locals::default());
    let head = Head { length: BODY_BYTES_MAX, kind: Kind::Read, id: 1 }.bytes();
    let mut first = known(&locals);
    first.bytes.extend_from_slice(&head);
    assert!(matches!(first.next(), Ok(Next::More)));
    assert_eq!(locals.receiving.used(), RECEIVING_STEP_BYTES, "what was announced is not what arrived");
    let others = locals.receiving.try_take(1, RECEIVING_BYTES_MAX - RECEIVING_STEP_BYTES).unwrap();
    let turn = locals.whole.try_take(1, 1).unwrap();
    let mut second = known(&locals);
    second.bytes.extend_from_slice(&head);
    assert!(matches!(second.next(), Ok(Next::Wait)), "there is no room for a second one");
    assert!(second.late().is_none(), "a client that waits for others and has nothing stalls none");
    first.bytes.extend_from_slice(&vec![0; RECEIVING_STEP_BYTES as usize]);
    assert!(matches!(first.next(), Ok(Next::Wait)), "there is no room for more of the first one");
    assert!(first.late().is_none(), "the server takes nothing: its client is not to blame");
    drop(others);
    assert!(matches!(first.next(), Ok(Next::More)));
    assert!(first.late().is_some(), "now its client is waited for");
    first.bytes.extend_from_slice(&vec![0; BODY_BYTES_MAX - RECEIVING_STEP_BYTES as usize]);
    first.bytes.extend_from_slice(&bare(Kind::Cancel, 1));
    assert!(matches!(first.next(), Ok(Next::Frame(_, body)) if body.len() == BODY_BYTES_MAX));
    assert!(matches!(second.next(), Ok(Next::More)), "the first one's part came back");
    assert!(second.late().is_some(), "now its client is waited for");
    assert!(matches!(first.next(), Ok(Next::Frame(Head { kind: Kind::Cancel, .. }, _))));
    assert!(first.bytes.capacity() <= SMALL_BODY_BYTES * 4, "{}", first.bytes.capacity());
    drop((second, turn));
    assert!(all(&locals).is_some());
}

/// Two megabytes and somewhat, of which the server takes one step at a time.
#[test]
fn however_many_bodies_begin_at_once_all_of_them_are_received_in_the_end() {
    let locals = Arc::new(Locals::default());
    let (length, step) = ((2 << 20) - HEAD_BYTES, RECEIVING_STEP_BYTES as usize);
    let head = Head { length, kind: Kind::Read, id: 1 }.bytes();
    let mut all: Vec<(Incoming, usize)> = (0..100)
        .map(|_| {
            let mut incoming = known(&locals);
            incoming.bytes.extend_from_slice(&head);
            (incoming, length)
        })
        .collect();
    let mut taken = 0;
    for _ in 0..400 {
        for (incoming, left) in &mut all {
            match incoming.next() {
                Ok(Next::Frame(..)) => taken += 1,
                // The server reads only then; and not more than was granted.
                Ok(Next::More) => {
                    let some = step.min(*left);
                    *left -= some;
                    incoming.bytes.extend_from_slice(&vec![0; some]);
                }
                Ok(Next::Wait) => {
                    assert!(incoming.late().is_none(), "a client that waits for the server is not late")
                }
                Err(error) => panic!("{error:?}"),
            }
        }
        assert!(locals.receiving.used() <= locals.receiving.all());
    }
    assert_eq!(taken, all.len());
    assert_eq!((locals.receiving.used(), locals.whole.used()), (0, 0));
}

#[test]
fn slow_senders_of_one_tenant_leave_room_for_a_request_of_another() {
    let locals = Arc::new(Locals::new(limits(0, 0), &[1, 2], [0; 16]));
    let head = Head { length: BODY_BYTES_MAX, kind: Kind::Read, id: 1 }.bytes();
    let slow: Vec<Incoming> = (0..40)
        .map(|_| {
            let mut incoming = known(&locals);
            incoming.bytes.extend_from_slice(&head);
            incoming.bytes.extend_from_slice(&vec![0; 2 << 20]);
            let _ = incoming.next();
            incoming
        })
        .collect();
    let mut other = Incoming::new(&locals);
    other.belongs_to(2, Arc::new(locals.sessions.part(2)));
    other.bytes.extend_from_slice(&head);
    for _ in 0..BODY_BYTES_MAX / (1 << 20) {
        assert!(matches!(other.next(), Ok(Next::More)));
        other.bytes.extend_from_slice(&vec![0; 1 << 20]);
    }
    assert!(matches!(other.next(), Ok(Next::Frame(..))));
    drop(slow);
    assert_eq!(locals.receiving.used(), 0);
}

#[test]
fn a_large_body_must_come_at_a_least_rate() {
    let locals = Arc::new(Locals::default());
    let mut incoming = known(&locals);
    incoming.bytes.extend_from_slice(&Head { length: BODY_BYTES_MAX, kind: Kind::Read, id: 1 }.bytes());
    assert!(matches!(incoming.next(), Ok(Next::More)));
    let since = incoming.since.unwrap();
    assert_eq!(incoming.late().unwrap() - since, SLOW + Duration::from_secs(1));
    incoming.bytes.extend_from_slice(&vec![0; 5 << 20]);
    assert!(matches!(incoming.next(), Ok(Next::More)));
    assert_eq!(incoming.late().unwrap() - since, SLOW + Duration::from_secs(6));
}

#[test]
fn who_has_not_said_who_he_is_gets_nothing_of_what_others_share() {
    let locals = Arc::new(Locals::default());
    for (length, taken) in [(HELLO_BYTES_MAX, true), (HELLO_BYTES_MAX + 1, false), (BODY_BYTES_MAX, false)] {
        let mut unknown = Incoming::new(&locals);
        unknown.bytes.extend_from_slice(&Head { length, kind: Kind::Hello, id: 1 }.bytes());
        assert_eq!(unknown.next().is_ok(), taken, "{length}");
        assert!(unknown.large.is_none());
    }
    assert!(all(&locals).is_some());
}

#[tokio::test]
async fn a_client_that_closes_before_it_has_read_everything_left_and_did_nothing_wrong() {
    let locals = Arc::new(Locals::new(limits(1 << 20, 16), &[1], [0; 16]));
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    std::io::Write::write_all(&mut ours, b"an answer that is not read").unwrap();
    drop(theirs);
    let ours = Line::new(ours).unwrap();
    ours.readable().await.unwrap();
    let ended = Incoming::new(&locals).receive(&ours);
    assert!(matches!(ended, Err(Ended::Left)), "{ended:?}");
}

#[test]
fn descriptors_that_wait_for_their_frames_count_among_the_files_of_memories() {
    // Room for three files, all of one tenant.
    let locals = Arc::new(Locals::new(limits(0, 3), &[1], [0; 16]));
    let file = || rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut all: Vec<Incoming> = (0..3).map(|_| known(&locals)).collect();
    for (incoming, count) in all.iter_mut().zip([1, 3, 2]) {
        for _ in 0..count {
            incoming.descriptors.push(file());
            assert!(incoming.count_descriptors().is_ok());
        }
    }
    assert_eq!(locals.files.used(), 3, "one of each connection is its own");
    all[0].descriptors.push(file());
    assert!(all[0].count_descriptors().is_err(), "there is no room for another one");
    assert!(all[1].take_descriptor().is_some());
    assert_eq!(locals.files.used(), 2);
    drop(all);
    assert_eq!(locals.files.used(), 0);
}
