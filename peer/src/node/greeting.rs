//! The first words on a connection between nodes, before any call: each side shows the other that it knows the cluster's secret, for
//! this connection alone. What is heard of one proves nothing on another, and who shows nothing is no caller.

use std::io;
use std::sync::Arc;

use kvarts_cluster::members::NodeId;
use kvarts_contract::clock::Entropy;
use kvarts_layout::StoreId;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::Secret;

/// The first bytes of a caller.
const MAGIC: &[u8; 8] = b"KVARTSN4";
const NONCE: usize = 32;
const PROOF: usize = 32;
/// What a caller says: the magic number, who it is, its nonce and its proof.
const CALL: usize = MAGIC.len() + 16 + NONCE + PROOF;
/// How a caller is answered, before the proof of the side that is called.
const LET_IN: u8 = 1;
const OTHER_SECRET: u8 = 2;
const OTHER_CERTIFICATE: u8 = 3;

/// What a node says on its connections.
#[derive(Clone, Debug)]
pub struct Greeting {
    /// What all nodes know.
    pub secret: Secret,
    /// This node.
    pub me: NodeId,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
}

#[derive(Clone, Copy)]
enum Side {
    Caller = 1,
    Called = 2,
}

/// Who calls whom, and what each of both made for this connection.
struct Words {
    from: NodeId,
    to: NodeId,
    called: [u8; NONCE],
    caller: [u8; NONCE],
}

impl Words {
    fn proof(&self, secret: &Secret, side: Side) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&secret.for_use("kvarts cluster calls, version 4"));
        hasher.update(&[side as u8]).update(self.from.as_bytes()).update(self.to.as_bytes());
        hasher.update(&self.called).update(&self.caller);
        hasher.finalize()
    }
}

fn refused(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what.to_owned())
}

async fn hear<const BYTES: usize>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    // ends: of the caller `CONNECT_TIMEOUT`, of the called `GREETING`, around all that is said
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

async fn say(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    // ends: of the caller `CONNECT_TIMEOUT`, of the called `GREETING`, around all that is said
    stream.write_all(bytes).await?;
    // ends: of the caller `CONNECT_TIMEOUT`, of the called `GREETING`, around all that is said
    stream.flush().await
}

impl Greeting {
    fn nonce(&self) -> [u8; NONCE] {
        let mut nonce = [0; NONCE];
        self.entropy.fill(&mut nonce);
        nonce
    }

    /// Says the caller's words to `peer`, and hears that it is one of the cluster.
    pub async fn call(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        peer: NodeId,
    ) -> io::Result<()> {
        let (called, caller) = (hear(stream).await?, self.nonce());
        let words = Words { from: self.me, to: peer, called, caller };
        let proof = words.proof(&self.secret, Side::Caller);
        let said = [&MAGIC[..], self.me.as_bytes(), &caller, proof.as_bytes()].concat();
        say(stream, &said).await?;
        match hear::<1>(stream).await? {
            [LET_IN] => {}
            [OTHER_SECRET] => {
                return Err(refused(
                    "the other node refused this node: the cluster secrets of the two nodes differ",
                ));
            }
            [OTHER_CERTIFICATE] => {
                return Err(refused(
                    "the other node refused this node: this node's certificate is for another \
                    name",
                ));
            }
            _ => return Err(refused("the program at this address is not a node of this version")),
        }
        match blake3::Hash::from_bytes(hear(stream).await?) == words.proof(&self.secret, Side::Called) {
            true => Ok(()),
            false => {
                Err(refused("another node, or a node with another cluster secret, listens at this address"))
            }
        }
    }

    /// Hears the caller's words, and says the others. Gives who calls: one that this is known of by other means, too.
    pub async fn answer(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        is_known: impl FnOnce(NodeId) -> bool,
    ) -> io::Result<NodeId> {
        let called = self.nonce();
        say(stream, &called).await?;
        let said = hear::<CALL>(stream).await?;
        let parts = said.split_first_chunk().and_then(|(magic, rest)| {
            let (from, rest) = rest.split_first_chunk()?;
            let (caller, proof) = rest.split_first_chunk()?;
            Some((magic, from, caller, <[u8; PROOF]>::try_from(proof).ok()?))
        });
        let Some((MAGIC, from, caller, proof)) = parts else {
            return Err(refused("the calling program has another version, or is not a node"));
        };
        let words = Words { from: StoreId(*from), to: self.me, called, caller: *caller };
        if blake3::Hash::from_bytes(proof) != words.proof(&self.secret, Side::Caller) {
            // Also one that calls another node.
            say(stream, &[OTHER_SECRET]).await?;
            return Err(refused(
                "the cluster secrets of the two nodes differ, or the caller expected a different node at this address",
            ));
        }
        if !is_known(words.from) {
            say(stream, &[OTHER_CERTIFICATE]).await?;
            return Err(refused("the certificate of the other node is for another name"));
        }
        let proof = words.proof(&self.secret, Side::Called);
        say(stream, &[&[LET_IN][..], proof.as_bytes()].concat()).await?;
        Ok(words.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::clock::OsEntropy;
    use tokio::io::duplex;

    const ME: NodeId = StoreId([1; 16]);
    const PEER: NodeId = StoreId([2; 16]);

    fn greeting(me: NodeId, secret: &[u8]) -> Greeting {
        Greeting { secret: Secret::new(secret), me, entropy: OsEntropy::new() }
    }

    async fn both(caller: Greeting, to: NodeId, called: Greeting) -> (Option<String>, Option<NodeId>) {
        let (mut near, mut far) = duplex(64);
        let (said, heard) = tokio::join!(async move { caller.call(&mut near, to).await }, async move {
            called.answer(&mut far, |_| true).await
        });
        (said.err().map(|error| error.to_string()), heard.ok())
    }

    #[tokio::test]
    async fn nodes_with_one_secret_know_each_other_and_no_others() {
        let good = greeting(ME, b"secret");
        assert_eq!(both(good.clone(), PEER, greeting(PEER, b"secret")).await, (None, Some(ME)));
        let (told, who) = both(good.clone(), PEER, greeting(PEER, b"another")).await;
        assert!(
            told.is_some_and(|told| told.contains("the cluster secrets of the two nodes differ"))
                && who.is_none()
        );
        // One that was meant for another node.
        let (told, who) = both(good, PEER, greeting(StoreId([3; 16]), b"secret")).await;
        assert!(told.is_some() && who.is_none());
    }

    #[tokio::test]
    async fn what_was_heard_of_one_connection_proves_nothing_on_another() {
        let (caller, called) = (greeting(ME, b"secret"), greeting(PEER, b"secret"));
        // What both said once.
        let (mut near, mut far) = duplex(1024);
        let nonce = [7; NONCE];
        let words = Words { from: ME, to: PEER, called: nonce, caller: nonce };
        let proof = words.proof(&caller.secret, Side::Caller);
        let said = [&MAGIC[..], ME.as_bytes(), &nonce, proof.as_bytes()].concat();
        near.write_all(&said).await.unwrap();
        assert!(called.answer(&mut far, |_| true).await.is_err());
        // Nor does one prove itself by what the other says.
        let (mut near, mut far) = duplex(1024);
        let thief = async move {
            let nonce: [u8; NONCE] = hear(&mut near).await.unwrap();
            near.write_all(&[&MAGIC[..], ME.as_bytes(), &nonce, &[0; PROOF]].concat()).await.unwrap();
            hear::<1>(&mut near).await.unwrap()
        };
        let (told, answered) = tokio::join!(thief, called.answer(&mut far, |_| true));
        assert!(told == [OTHER_SECRET] && answered.is_err());
    }

    #[tokio::test]
    async fn no_flipped_bit_of_either_sides_words_is_let_in() {
        let called = greeting(PEER, b"secret");
        for bit in 0..CALL * 8 {
            let (mut near, mut far) = duplex(1024);
            let flips = async move {
                let called = hear(&mut near).await.unwrap();
                let words = Words { from: ME, to: PEER, called, caller: [3; NONCE] };
                let proof = words.proof(&Secret::new(b"secret"), Side::Caller);
                let mut said = [&MAGIC[..], ME.as_bytes(), &words.caller, proof.as_bytes()].concat();
                said[bit / 8] ^= 1 << (bit % 8);
                near.write_all(&said).await.unwrap();
                drop(near);
            };
            assert!(tokio::join!(flips, called.answer(&mut far, |_| true)).1.is_err(), "{bit}");
        }
        for bit in 0..(NONCE + 1 + PROOF) * 8 {
            let ((mut near, far), caller) = (duplex(1024), greeting(ME, b"secret"));
            let (mut left, mut right) = duplex(1024);
            let node = called.clone();
            let between = async move {
                let mut far = far;
                let flip = |bytes: &mut [u8], from: usize| {
                    if let Some(byte) = bytes.get_mut((bit / 8).wrapping_sub(from)) {
                        *byte ^= 1 << (bit % 8);
                    }
                };
                let mut nonce: [u8; NONCE] = hear(&mut left).await.unwrap();
                flip(&mut nonce, 0);
                far.write_all(&nonce).await.unwrap();
                let said: [u8; CALL] = hear(&mut far).await.unwrap();
                left.write_all(&said).await.unwrap();
                let mut answer = Vec::new();
                left.read_to_end(&mut answer).await.unwrap();
                flip(&mut answer, NONCE);
                far.write_all(&answer).await.unwrap();
            };
            let answers = async move {
                let _ = node.answer(&mut right, |_| true).await;
            };
            let (said, (), ()) = tokio::join!(async { caller.call(&mut near, PEER).await }, between, answers);
            assert!(said.is_err(), "{bit}");
        }
    }
}
