//! A store whose answers the test gives.

use std::sync::Mutex;
use std::time::Duration;

use kvarts_contract::api::{
    ContainsReply, ContainsRequest, DeleteReply, DeleteRequest, KvStore, LeaseId, MatchReply, MatchRequest,
    Missing, Presence, PutReply, PutRequest, ReadRequest, ReadSink, ReadStream, Sequence, SnapshotCursor,
    SnapshotPage, Subscription, TtlReply, TtlRequest, read_channel,
};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::events::EventLog;
use kvarts_contract::ticket::{Reply, Ticket, ticket};
use kvarts_layout::{Geometry, Identity, NamespaceId};

/// A put, and whom to answer.
pub type Asked = (PutRequest, Reply<Result<PutReply, Error>>);

/// A store whose answers the test gives.
#[derive(Default, Debug)]
pub struct Scripted {
    /// What registrations give; none are refused.
    pub namespace: Mutex<Option<NamespaceId>>,
    /// Puts that have no answer yet.
    pub puts: Mutex<Vec<Asked>>,
    /// Reads.
    pub reads: Mutex<Vec<(ReadRequest, ReadSink)>>,
    /// What there is of the blocks that are asked for.
    pub presence: Mutex<Vec<Presence>>,
    /// Leases that were given back.
    pub unlocked: Mutex<Vec<LeaseId>>,
    /// Why puts and reads are refused at once.
    pub refuse: Mutex<Option<Reason>>,
}

impl KvStore for Scripted {
    fn register(&self, _: &Identity, _: &Geometry) -> Result<NamespaceId, Error> {
        self.namespace.lock().unwrap().ok_or(Error(Reason::SpecMismatch))
    }

    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>> {
        let (reply, answer) = ticket();
        match self.refuse.lock().unwrap().clone() {
            Some(reason) => reply.send(Err(Error(reason))).unwrap(),
            None => self.puts.lock().unwrap().push((request, reply)),
        }
        answer
    }

    fn match_prefix(&self, _: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        Err(Error(Reason::Empty))
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        let presence = self.presence.lock().unwrap().clone();
        assert_eq!(presence.len(), request.keys.len());
        let lease = request.lease.map(|terms| LeaseId(terms.hold.as_secs()));
        Ok(ContainsReply { presence, missing: Missing::default(), lease, deletes: 0 })
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        let mut unlocked = self.unlocked.lock().unwrap();
        let fresh = !unlocked.contains(&lease);
        unlocked.push(lease);
        fresh
    }

    fn renew(&self, _: LeaseId, _: Duration) -> Result<(), Error> {
        Err(Error(Reason::LeaseEnded))
    }

    fn delete(&self, _: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        ticket().1
    }

    fn set_ttl(&self, _: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        Err(Error(Reason::Empty))
    }

    fn set_default_ttl(&self, _: NamespaceId, _: Option<Duration>) -> Result<(), Error> {
        Err(Error(Reason::Empty))
    }

    fn subscribe(&self, from: Option<Sequence>) -> Subscription {
        EventLog::new(0, 0).subscribe(from)
    }

    fn snapshot(&self, _: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        ticket().1
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        if let Some(reason) = self.refuse.lock().unwrap().clone() {
            return Err(Error(reason));
        }
        let (sink, stream) = read_channel();
        self.reads.lock().unwrap().push((request, sink));
        Ok(stream)
    }
}
