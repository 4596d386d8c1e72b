//! Who is waited for, and how long.

use std::task::{Context, Waker};

use kvarts_contract::api::{ReadStream, Verify, read_channel};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::ticket::ticket;
use kvarts_layout::{BlockKey, ChunkShape, Coordinate, Group, LayerShape, NamespaceId};

use super::*;

struct NoOwner;

impl Owner for NoOwner {
    fn suspect(&self, _: ReadRequest, _: Arc<BlockShape>, _: Vec<u32>) {}

    fn later(&self, _: Box<dyn FnOnce() + Send>) {}

    fn is_settled(&self, _: &[u8], _: &[u8]) -> Option<bool> {
        None
    }
}

/// A link whose thread does not run, and the server's end.
fn link() -> (Arc<Shared>, UnixStream) {
    let (stream, server) = UnixStream::pair().unwrap();
    let shared = Arc::new_cyclic(|me| Shared {
        stream,
        outbox: Outbox::default(),
        pending: Mutex::default(),
        deadlines: Mutex::default(),
        call_timeout: Duration::from_secs(60),
        broken: AtomicBool::new(false),
        turn: Mutex::default(),
        called: Condvar::new(),
        inbox: Mutex::default(),
        wake: Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()),
        session: [0; 16],
        instance: Bytes::new(),
        held: Arc::default(),
        owner: Weak::<NoOwner>::new(),
        me: Weak::clone(me),
    });
    (shared, server)
}

/// A read of one block that is under way.
fn read(shared: &Arc<Shared>, id: u64) -> ReadStream {
    let shape =
        BlockShape::new(vec![LayerShape { layer: 0, chunks: vec![ChunkShape { bytes: 64, align: 1 }] }]);
    let shape = shape.unwrap();
    let memory = SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, 64).unwrap();
    let request = ReadRequest {
        namespace: NamespaceId([1; 32]),
        group: Group(0),
        coordinate: Coordinate::Replicated,
        keys: vec![BlockKey([1; 32])],
        layers: None,
        order: Order::Layers,
        into: Placed::blocks(&shape, memory, 1).unwrap(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    };
    let (sink, stream) = read_channel();
    let wanted = Wanted { request, shape: shape.into(), part: None };
    let reading = Reading::new(wanted, sink, false, Vec::new());
    shared.pending().insert(id, Pending::Read(Box::new(reading)));
    stream.brought_by(Arc::clone(shared) as _)
}

fn come(shared: &Shared, kind: Kind, id: u64) {
    let body = match kind {
        Kind::End => proto::LocalEnd::default().encode_to_vec(),
        _ => Vec::new(),
    };
    let head = Head { length: body.len(), kind, id };
    shared.take(head, body.into(), &mut Inbox::default()).unwrap();
}

fn poll_end(stream: &ReadStream) -> bool {
    stream.poll_end(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn the_memory_of_a_read_is_waited_for_by_who_cannot_fetch_and_not_by_who_fetched_the_end() {
    let (shared, _server) = link();
    let polled = read(&shared, 1);
    assert!(!poll_end(&polled));
    come(&shared, Kind::End, 1);
    assert!(poll_end(&polled));
    drop(polled);
    assert!(shared.is_waited_for(), "a batch is answered when its memory is free");
    come(&shared, Kind::Released, 1);
    assert!(!shared.is_waited_for());

    let fetched = read(&shared, 2);
    come(&shared, Kind::End, 2);
    assert!(fetched.wait_end().is_ok());
    assert!(!shared.is_waited_for(), "this caller needs no thread");
    come(&shared, Kind::Released, 2);
}

#[test]
fn an_end_that_another_caller_fetched_before_it_was_asked_for_is_followed_by_a_call_for_the_release() {
    let (shared, _server) = link();
    let polled = read(&shared, 1);
    come(&shared, Kind::End, 1);
    assert!(!shared.turn().called);
    assert!(poll_end(&polled));
    assert!(shared.turn().called && shared.is_waited_for());
}

/// While its digests are compared a read is in no list; its deadline may pass just then.
#[test]
fn a_deadline_that_passes_while_digests_are_compared_is_kept_and_one_of_an_answered_request_is_not() {
    let (shared, _server) = link();
    let (reply, mut answer) = ticket();
    shared.deadlines().insert(7, Nanos(10));
    shared.late(Nanos(20));
    assert_eq!(shared.deadlines().len(), 1, "forgotten while its request is elsewhere");
    shared.pending().insert(7, Pending::Look(reply, 1));
    shared.late(Nanos(30));
    assert!(matches!(answer.try_take(), Some(Ok(Err(Error(Reason::DeadlinePassed))))));
    assert!(shared.deadlines().is_empty() && shared.pending().is_empty());

    let (reply, _answer) = ticket();
    shared.deadlines().insert(8, Nanos(10));
    shared.pending().insert(8, Pending::Look(reply, 1));
    assert!(shared.take_out(8).is_some());
    assert!(shared.deadlines().is_empty(), "kept for a request that is answered");
}
