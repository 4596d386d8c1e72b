//! Sessions: the blocks of a conversation, held until the client closes the session or its lease ends.
//!
//! [`Session`] remembers the keys, so that it can repeat them: to hold blocks that were not stored yet, and to continue at another node.
//! [`Client`] also has the plain calls.

use std::time::Duration;

use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_planner::route::Class;
use kvarts_planner::tails::Tail;
use kvarts_wire::{convert, proto, sessions};

use super::Client;

/// Leases that a session has, one for each column and extension, before it takes one for each column in the place of all: less than a
/// server allows.
const LEASES_MAX: usize = 512;

/// The terms of a session.
#[derive(Clone, Debug)]
pub struct SessionTerms {
    /// The namespace of the model.
    pub namespace: NamespaceId,
    /// The columns in which blocks are held. Without a column no block is held.
    pub columns: Vec<(Group, Coordinate)>,
    /// The number of leading blocks that other sessions share. The session's own chain begins after them.
    pub shared_blocks: u32,
    /// The duration of the session without a renewal.
    pub lease: Duration,
}

/// The last answer of the server.
#[derive(Clone, Debug)]
pub struct SessionTold {
    /// The number of blocks of the call that are held in all columns.
    pub held: u32,
    /// The class of the turn.
    pub class: Class,
    /// The advice for its windows and states.
    pub tail: Option<Tail>,
    /// In a cluster: the owner of the chain.
    pub owner: Option<proto::OwnerLease>,
    /// Whether the owner is the server's node.
    pub is_owner: bool,
}

/// A session of a client. Dropping it sends nothing to the server: the session ends with its lease.
#[derive(Debug)]
pub struct Session {
    client: Client,
    terms: SessionTerms,
    id: u64,
    keys: Vec<BlockKey>,
    /// The first block that it holds itself, and does not stand on its parent for.
    own: u32,
    extensions: usize,
    /// Whether the server has received a hand-over of it.
    is_given_up: bool,
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn told(reply: &proto::SessionReply) -> SessionTold {
    SessionTold {
        held: reply.held,
        class: sessions::class(reply.class()),
        tail: reply.tail.as_ref().map(sessions::tail),
        owner: reply.owner.clone(),
        is_owner: reply.is_owner,
    }
}

impl SessionTerms {
    fn columns(&self) -> Vec<proto::Column> {
        self.columns.iter().map(|(group, coordinate)| convert::wire_column(*group, *coordinate)).collect()
    }

    fn open(
        &self,
        client: &Client,
        session: u64,
        keys: &[BlockKey],
        turn: Option<proto::SessionTurn>,
    ) -> Result<proto::SessionReply, Error> {
        client.open_session(proto::OpenSessionRequest {
            namespace: self.namespace.as_bytes().to_vec().into(),
            columns: self.columns(),
            keys: convert::key_bytes(keys),
            shared_blocks: self.shared_blocks,
            lease_ms: millis(self.lease),
            session,
            turn,
        })
    }
}

impl Session {
    fn new(client: &Client, terms: SessionTerms, id: u64, keys: &[BlockKey], own: u32) -> Self {
        let (client, keys) = (client.clone(), keys.to_vec());
        Self { client, terms, id, keys, own, extensions: 0, is_given_up: false }
    }

    /// Opens a session for a conversation that begins with these blocks.
    pub fn open(
        client: &Client,
        terms: SessionTerms,
        keys: &[BlockKey],
        turn: Option<proto::SessionTurn>,
    ) -> Result<(Self, SessionTold), Error> {
        let reply = terms.open(client, 0, keys, turn)?;
        Ok((Self::new(client, terms, reply.session, keys, 0), told(&reply)))
    }

    /// The number of the session on its server, and on the server to which it is handed over.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The keys of its blocks, beginning with the first.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// A new session that continues after the first `blocks` blocks of this session, and holds only its own blocks.
    pub fn fork(&self, blocks: u32, turn: Option<proto::SessionTurn>) -> Result<(Self, SessionTold), Error> {
        let keys = self.keys.get(..blocks as usize).ok_or(Reason::TooMany("blocks"))?;
        let reply = self.client.fork_session(proto::ForkSessionRequest {
            session: self.id,
            blocks,
            key: convert::key_bytes(keys.last().map(std::slice::from_ref).unwrap_or_default()),
            lease_ms: millis(self.terms.lease),
            turn,
        })?;
        Ok((Self::new(&self.client, self.terms.clone(), reply.session, keys, blocks), told(&reply)))
    }

    /// Adds the next blocks, and renews the lease. Call it before the blocks are computed, for the turn's class and advice, and call
    /// [`hold`](Self::hold) after they were put.
    pub fn extend(
        &mut self,
        keys: &[BlockKey],
        turn: Option<proto::SessionTurn>,
    ) -> Result<SessionTold, Error> {
        let first = self.keys.len();
        self.keys.extend_from_slice(keys);
        let done = self.say(first, turn);
        if done.is_err() {
            self.keys.truncate(first);
        }
        done
    }

    /// Holds the blocks from `first` on that are stored by now, and renews the lease.
    pub fn hold(&mut self, first: u32) -> Result<SessionTold, Error> {
        self.say((first.max(self.own)) as usize, None)
    }

    fn say(&mut self, first: usize, turn: Option<proto::SessionTurn>) -> Result<SessionTold, Error> {
        let is_full = self.extensions * self.terms.columns.len() >= LEASES_MAX;
        let first = if is_full { self.own as usize } else { first };
        let reply = self.client.extend_session(proto::ExtendSessionRequest {
            session: self.id,
            first_block: u32::try_from(first).map_err(|_| Reason::TooMany("blocks"))?,
            keys: convert::key_bytes(self.keys.get(first..).unwrap_or_default()),
            columns: self.terms.columns(),
            lease_ms: millis(self.terms.lease),
            turn,
        })?;
        self.extensions = if is_full { 1 } else { self.extensions + 1 };
        Ok(told(&reply))
    }

    /// Renews the lease.
    pub fn renew(&self) -> Result<(), Error> {
        let lease_ms = millis(self.terms.lease);
        self.client.renew_session(proto::RenewSessionRequest { session: self.id, lease_ms }).map(drop)
    }

    /// Continues the session at another node, under the same number. The call gives up the chain at this node, claims it at the other node,
    /// and then releases the blocks held here. If the other node refuses, the session stays handed over here until its lease ends;
    /// meanwhile it may be handed over to a third node, or to the same node again.
    pub fn hand_over(&mut self, to: &Client) -> Result<SessionTold, Error> {
        if !self.is_given_up {
            self.client.hand_over_session(proto::HandOverSessionRequest { session: self.id })?;
            self.is_given_up = true;
        }
        let reply = self.terms.open(to, self.id, &self.keys, None)?;
        // Without an answer it ends with its lease there.
        let _ = self.client.close_session(self.id);
        (self.client, self.own, self.extensions, self.is_given_up) = (to.clone(), 0, 0, false);
        Ok(told(&reply))
    }

    /// Ends the session. Returns false if it had ended.
    pub fn close(&self) -> Result<bool, Error> {
        self.client.close_session(self.id)
    }
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident, $call:ident, $asked:ident, $reply:ident;)*) => {
        impl Client {
            $(
                $(#[$doc])*
                pub fn $name(&self, request: proto::$asked) -> Result<proto::$reply, Error> {
                    let mut server = self.remote.sessions();
                    let request = self.remote.request(request, None);
                    self.remote.ask(async move { server.$call(request).await })
                }
            )*
        }
    };
}

calls! {
    /// Opens a session: see `sessions.proto`.
    open_session, open, OpenSessionRequest, SessionReply;
    /// Forks a session.
    fork_session, fork, ForkSessionRequest, SessionReply;
    /// Extends a session, or holds its blocks again.
    extend_session, extend, ExtendSessionRequest, SessionReply;
    /// Changes the remaining time of a session, to a longer or shorter one.
    renew_session, renew, RenewSessionRequest, RenewSessionReply;
    /// Hands a session over to another node.
    hand_over_session, hand_over, HandOverSessionRequest, HandOverSessionReply;
    /// Lists the sessions of the caller's tenant, or one of them.
    sessions, list, ListSessionsRequest, ListSessionsReply;
}

impl Client {
    /// Ends a session. Returns false if there was none.
    pub fn close_session(&self, session: u64) -> Result<bool, Error> {
        let mut server = self.remote.sessions();
        let request = self.remote.request(proto::CloseSessionRequest { session }, None);
        self.remote.ask(async move { server.close(request).await }).map(|reply| reply.ended_now)
    }
}
