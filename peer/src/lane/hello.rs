//! The first words of a connection: each side proves to the other that it has the cluster's secret.
//!
//! The proof is BLAKE3, keyed with the secret, of everything that both have said, versions and both nonces among it, and of who
//! says it. So words of another connection prove nothing, neither side's words can be given back to it as its answer, and
//! what was changed on the way to make the other side believe in an older version or in no secret makes the proof another.
//! What follows is encrypted where the nodes have certificates ([`super::secured`]), and then each of them has shown before that it is
//! the node that it says it is; without certificates it is neither encrypted nor signed.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use kvarts_contract::clock::{Clock, Entropy, Nanos};
use kvarts_layout::StoreId;
use kvarts_wire::proto;

use super::frame::{Head, Incoming, Kind, bare, frame, message};
use super::limits::{CLUSTER_BYTES_MAX, HELLO, HELLO_BYTES_MAX, MAGIC, VERSION};
use super::secured::Secured;
use super::wire::{Broken, Host, Ready, Wire, moved};
use crate::credentials::Credentials;

/// What all nodes of a cluster know, and only they.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Who a node is to the others of its cluster.
#[derive(Clone, Debug)]
pub struct Member {
    /// The name of the cluster: nodes of others are refused.
    pub cluster: String,
    /// This node.
    pub node: StoreId,
    /// The cluster's secret. A node without one talks only to nodes that have none either.
    pub secret: Option<Secret>,
    /// Its certificate. A node that has one talks only to nodes that have one of the same authority.
    pub credentials: Option<Arc<Credentials>>,
    /// Its clock.
    pub clock: Arc<dyn Clock>,
    /// Its randomness.
    pub entropy: Arc<dyn Entropy>,
    /// What its threads run on.
    pub host: Arc<dyn Host>,
}

/// The sides of a connection.
#[derive(Clone, Copy)]
enum Side {
    Caller,
    Called,
}

/// What the proof of one side is, given what both have said.
fn proof(
    secret: Option<&Secret>,
    side: Side,
    hello: &proto::LaneHello,
    welcome: &proto::LaneWelcome,
) -> Option<blake3::Hash> {
    let mut hasher = blake3::Hasher::new_keyed(&secret?.0);
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(MAGIC);
    part(match side {
        Side::Caller => b"caller",
        Side::Called => b"called",
    });
    part(&hello.version.to_le_bytes());
    part(hello.cluster.as_bytes());
    part(&hello.node);
    part(&hello.peer);
    part(&hello.nonce);
    part(&[u8::from(hello.secret)]);
    part(&welcome.version.to_le_bytes());
    part(&welcome.node);
    part(&welcome.nonce);
    Some(hasher.finalize())
}

/// Whether a proof is the one that is due. Takes as long whatever is wrong with it.
fn is_due(due: Option<blake3::Hash>, given: &[u8]) -> bool {
    match (due, <[u8; 32]>::try_from(given)) {
        (Some(due), Ok(given)) => due == blake3::Hash::from_bytes(given),
        (None, _) => given.is_empty(),
        (Some(_), Err(_)) => false,
    }
}

fn wire_proof(proof: Option<blake3::Hash>) -> Bytes {
    proof.map_or_else(Bytes::new, |proof| Bytes::copy_from_slice(proof.as_bytes()))
}

impl Member {
    fn nonce(&self) -> Bytes {
        let mut nonce = [0; 32];
        self.entropy.fill(&mut nonce);
        Bytes::copy_from_slice(&nonce)
    }

    /// A connection to this peer, which both sides believe.
    pub(super) fn connect(&self, plain: Arc<dyn Wire>, peer: StoreId) -> Result<Arc<dyn Wire>, Broken> {
        let Some(credentials) = &self.credentials else {
            self.call(&*plain, peer)?;
            return Ok(plain);
        };
        let secured = Secured::calling(plain, credentials, peer)?;
        // What TLS knows is more than that the connection has ended.
        self.call(&secured, peer).map_err(|broken| secured.trouble().unwrap_or(broken))?;
        Ok(Arc::new(secured))
    }

    /// A connection that was made to this node, before anything is said over it.
    pub(super) fn accept(&self, plain: Arc<dyn Wire>) -> Result<Arc<dyn Wire>, Broken> {
        Ok(match &self.credentials {
            Some(credentials) => Arc::new(Secured::called(plain, credentials)?),
            None => plain,
        })
    }

    /// Says the caller's part of the first words.
    pub(super) fn call(&self, wire: &dyn Wire, peer: StoreId) -> Result<(), Broken> {
        let talk = Talk::new(self, wire);
        wire.greet(&*self.host, talk.clock, talk.until)?;
        let hello = proto::LaneHello {
            version: VERSION,
            cluster: self.cluster.clone(),
            node: Bytes::copy_from_slice(self.node.as_bytes()),
            peer: Bytes::copy_from_slice(peer.as_bytes()),
            nonce: self.nonce(),
            secret: self.secret.is_some(),
        };
        talk.send(MAGIC)?;
        talk.send(&frame(Kind::Hello, 0, &hello))?;
        let welcome: proto::LaneWelcome = message(talk.next(Kind::Welcome)?)?;
        if welcome.version != VERSION {
            return Err(Broken::Refused(
                "the other node has another protocol version: use one version of kvarts on all nodes",
            ));
        }
        if welcome.node[..] != peer.as_bytes()[..] || welcome.nonce.len() != 32 {
            return Err(Broken::Refused("another node listens at this address"));
        }
        let secret = self.secret.as_ref();
        if !is_due(proof(secret, Side::Called, &hello, &welcome), &welcome.proof) {
            return Err(Broken::Refused(
                "the other node has another cluster secret: give all nodes the same cluster.secret",
            ));
        }
        let proof = wire_proof(proof(secret, Side::Caller, &hello, &welcome));
        talk.send(&frame(Kind::Proof, 0, &proto::LaneProof { proof }))?;
        talk.next(Kind::Ready).map(drop)
    }

    /// Says the other part, and who calls.
    pub(super) fn answer(&self, wire: &dyn Wire) -> Result<StoreId, Broken> {
        let talk = Talk::new(self, wire);
        wire.greet(&*self.host, talk.clock, talk.until)?;
        talk.expect_magic()?;
        let hello: proto::LaneHello = message(talk.next(Kind::Hello)?)?;
        if hello.version != VERSION {
            return Err(Broken::Refused(
                "the other node has another protocol version: use one version of kvarts on all nodes",
            ));
        }
        if hello.cluster.len() > CLUSTER_BYTES_MAX || hello.cluster != self.cluster {
            return Err(Broken::Refused("the other node belongs to another cluster"));
        }
        if hello.peer[..] != self.node.as_bytes()[..] {
            return Err(Broken::Refused("the connection was intended for another node"));
        }
        if hello.secret != self.secret.is_some() {
            return Err(Broken::Refused(
                "only one of the two nodes has a secret: give all nodes the same cluster.secret",
            ));
        }
        let caller = <[u8; 16]>::try_from(&hello.node[..])
            .map_err(|_| Broken::Protocol("the id of the node is not valid"))?;
        if !wire.is_of(StoreId(caller)) {
            return Err(Broken::Refused("the certificate of the other node is for another name"));
        }
        if hello.nonce.len() != 32 {
            return Err(Broken::Protocol("the nonce has a wrong length"));
        }
        let mut welcome = proto::LaneWelcome {
            version: VERSION,
            node: Bytes::copy_from_slice(self.node.as_bytes()),
            nonce: self.nonce(),
            proof: Bytes::new(),
        };
        let secret = self.secret.as_ref();
        welcome.proof = wire_proof(proof(secret, Side::Called, &hello, &welcome));
        talk.send(&frame(Kind::Welcome, 0, &welcome))?;
        let given: proto::LaneProof = message(talk.next(Kind::Proof)?)?;
        if !is_due(proof(secret, Side::Caller, &hello, &welcome), &given.proof) {
            return Err(Broken::Refused(
                "the other node has another cluster secret: give all nodes the same cluster.secret",
            ));
        }
        talk.send(&bare(Kind::Ready, 0))?;
        Ok(StoreId(caller))
    }
}

/// Words that wait for each other.
struct Talk<'a> {
    wire: &'a dyn Wire,
    clock: &'a dyn Clock,
    host: &'a dyn Host,
    until: Nanos,
}

impl<'a> Talk<'a> {
    fn new(member: &'a Member, wire: &'a dyn Wire) -> Self {
        let Member { clock, host, .. } = member;
        Self { wire, clock: &**clock, host: &**host, until: clock.now().plus(HELLO) }
    }

    fn pause(&self, ready: Ready) -> Result<(), Broken> {
        let left = self.until.since(self.clock.now());
        if left.is_zero() {
            return Err(Broken::Silent);
        }
        self.host.sleep(None, Some((self.wire, ready)), Some(left));
        Ok(())
    }

    fn send(&self, mut bytes: &[u8]) -> Result<(), Broken> {
        while !bytes.is_empty() {
            match moved(self.wire.send(bytes, false))? {
                Some(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                None => self.pause(Ready::ToSend)?,
            }
        }
        Ok(())
    }

    fn expect_magic(&self) -> Result<(), Broken> {
        let (mut magic, mut got) = ([0; MAGIC.len()], 0);
        while got < magic.len() {
            match moved(self.wire.receive(magic.get_mut(got..).unwrap_or_default()))? {
                Some(more) => got += more,
                None => self.pause(Ready::ToReceive)?,
            }
        }
        if magic == *MAGIC {
            Ok(())
        } else {
            Err(Broken::Protocol("the first bytes do not belong to the protocol between nodes"))
        }
    }

    /// The body of the next frame, which must be of this kind.
    fn next(&self, kind: Kind) -> Result<Bytes, Broken> {
        let mut incoming = Incoming::default();
        let limit = |head: &Head| (head.kind == kind).then_some(HELLO_BYTES_MAX);
        loop {
            match incoming.next(self.wire, limit)? {
                Some((_, body)) => return Ok(body),
                None => self.pause(Ready::ToReceive)?,
            }
        }
    }
}
