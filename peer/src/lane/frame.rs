//! Frames: a head of twenty bytes, and a body that is a message of `proto/kvarts/v1/lane.proto`.
//!
//! ```text
//! 0        4      6      8          16      20
//! | length | kind | zero | number   | crc32 | body: `length` bytes
//! ```
//!
//! All numbers are little-endian; the digest is the CRC-32 of the sixteen bytes before it and of the body. So a frame that the
//! way has changed is none, and ends its connection. Nothing is allocated for a body before its length was compared with a limit,
//! and then no more than what has come of it.

use bytes::Bytes;
use crc32fast::Hasher;

use super::limits::STEP_BYTES;
use super::wire::{Broken, Wire, moved};

/// Bytes before each body.
pub(super) const HEAD_BYTES: usize = 20;

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// `LaneHello`, from the caller.
    Hello = 1,
    /// `LaneWelcome`.
    Welcome = 2,
    /// `LaneProof`, from the caller.
    Proof = 3,
    /// No body: the caller may ask.
    Ready = 4,
    /// `LaneOpen`, from the caller, as the next four.
    Open = 5,
    /// `LaneRead`.
    Read = 6,
    /// No body: the piece of this number is not wanted any more. It is answered nevertheless.
    Cancel = 7,
    /// `LaneRead`, of blocks whose bytes did not match their digests: they are to be read again. Not answered.
    Doubt = 8,
    /// No body. Answered with `Pong`.
    Ping = 9,
    /// `LaneAnswer` to the piece of the same number, and behind it the bytes.
    Answer = 128,
    /// No body.
    Pong = 129,
}

impl Kind {
    fn of(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Proof,
            4 => Self::Ready,
            5 => Self::Open,
            6 => Self::Read,
            7 => Self::Cancel,
            8 => Self::Doubt,
            9 => Self::Ping,
            128 => Self::Answer,
            129 => Self::Pong,
            _ => return None,
        })
    }
}

/// A frame without its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    pub(super) length: usize,
    pub(super) kind: Kind,
    /// Which piece it is about: chosen by the caller, used once in a connection.
    pub(super) number: u64,
}

impl Head {
    /// The head without its digest.
    fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let length = u32::try_from(self.length).unwrap_or(u32::MAX).to_le_bytes();
        let parts = length.into_iter().chain((self.kind as u16).to_le_bytes()).chain([0, 0]);
        for (byte, part) in bytes.iter_mut().zip(parts.chain(self.number.to_le_bytes())) {
            *byte = part;
        }
        bytes
    }

    /// What these bytes say, and the digest.
    fn parse(bytes: &[u8; HEAD_BYTES]) -> Option<(Self, u32)> {
        let [a, b, c, d, k, l, y, z, rest @ ..] = *bytes;
        let (number, crc32) = rest.split_first_chunk::<8>()?;
        let kind = Kind::of(u16::from_le_bytes([k, l])).filter(|_| [y, z] == [0, 0])?;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        let crc32 = u32::from_le_bytes(*crc32.first_chunk()?);
        Some((Self { length, kind, number: u64::from_le_bytes(*number) }, crc32))
    }

    fn digest(&self, body: &[u8]) -> u32 {
        let mut digest = Hasher::new();
        digest.update(&self.bytes());
        digest.update(body);
        digest.finalize()
    }
}

/// A whole frame.
pub(super) fn frame(kind: Kind, number: u64, message: &impl prost::Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(HEAD_BYTES + length);
    bytes.resize(HEAD_BYTES, 0);
    // A vector grows as needed: this cannot fail.
    let _ = message.encode(&mut bytes);
    let head = Head { length, kind, number };
    let digest = head.digest(bytes.get(HEAD_BYTES..).unwrap_or_default()).to_le_bytes();
    for (byte, part) in bytes.iter_mut().zip(head.bytes().into_iter().chain(digest)) {
        *byte = part;
    }
    bytes
}

/// A frame without a body.
pub(super) fn bare(kind: Kind, number: u64) -> Vec<u8> {
    frame(kind, number, &())
}

/// A message in a body.
pub(super) fn message<M: prost::Message + Default>(body: Bytes) -> Result<M, Broken> {
    M::decode(body).map_err(|_| Broken::Protocol("the body of a frame is not a valid message"))
}

/// The frame that is being received.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    head: [u8; HEAD_BYTES],
    /// Bytes that have come of the head, and then of the body.
    got: usize,
    /// The head, once it is whole, and its digest.
    of: Option<(Head, u32)>,
    body: Vec<u8>,
}

impl Incoming {
    /// Whether a frame has begun that is not whole.
    pub(super) fn has_begun(&self) -> bool {
        self.got > 0 || self.of.is_some()
    }

    /// The next frame if all of it has come. `limit` says how long the body after a head may be; none if there must not be such
    /// a frame.
    pub(super) fn next(
        &mut self,
        wire: &dyn Wire,
        limit: impl Fn(&Head) -> Option<usize>,
    ) -> Result<Option<(Head, Bytes)>, Broken> {
        let (head, digest) = loop {
            if let Some(known) = self.of {
                break known;
            }
            let rest = self.head.get_mut(self.got..).unwrap_or_default();
            let Some(got) = moved(wire.receive(rest))? else { return Ok(None) };
            self.got += got;
            if self.got == HEAD_BYTES {
                let (head, digest) =
                    Head::parse(&self.head).ok_or(Broken::Protocol("the head of a frame is not valid"))?;
                let most = limit(&head).ok_or(Broken::Protocol("a frame arrived out of order"))?;
                if head.length > most {
                    return Err(Broken::Protocol("a frame is larger than the limit"));
                }
                (self.of, self.got) = (Some((head, digest)), 0);
            }
        };
        while self.got < head.length {
            if self.got == self.body.len() {
                self.body.resize(head.length.min(self.got + STEP_BYTES), 0);
            }
            let rest = self.body.get_mut(self.got..).unwrap_or_default();
            let Some(got) = moved(wire.receive(rest))? else { return Ok(None) };
            self.got += got;
        }
        let body = std::mem::take(&mut self.body);
        (self.of, self.got) = (None, 0);
        if head.digest(&body) != digest {
            return Err(Broken::Protocol("a frame was damaged in transit"));
        }
        Ok(Some((head, body.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::wire::Plain;
    use kvarts_wire::proto;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, Plain) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, Plain::new(listener.accept().unwrap().0))
    }

    /// What becomes of these bytes, after which the stream ends.
    fn receive(bytes: &[u8], limit: usize) -> Result<(Head, Bytes), Broken> {
        let (mut one, wire) = pair();
        one.write_all(bytes).unwrap();
        drop(one);
        let mut incoming = Incoming::default();
        loop {
            if let Some(found) = incoming.next(&wire, |_| Some(limit))? {
                return Ok(found);
            }
        }
    }

    #[test]
    fn a_frame_comes_back_and_no_flipped_bit_and_no_cut_makes_another() {
        let message = proto::LaneOpen { namespace: 7, identity: vec![9; 100].into() };
        let bytes = frame(Kind::Open, 3, &message);
        let (head, body) = receive(&bytes, 200).unwrap();
        assert_eq!((head.kind, head.number, head.length), (Kind::Open, 3, bytes.len() - HEAD_BYTES));
        assert_eq!(super::message::<proto::LaneOpen>(body), Ok(message));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(receive(&flipped, 1 << 20).is_err(), "bit {bit}");
        }
        for cut in 0..bytes.len() {
            assert_eq!(receive(&bytes[..cut], 200), Err(Broken::Gone), "cut at {cut}");
        }
    }

    #[test]
    fn a_body_that_is_too_long_is_refused_before_it_is_waited_for() {
        let bytes = frame(Kind::Open, 3, &proto::LaneOpen { namespace: 7, identity: vec![9; 100].into() });
        let (mut one, wire) = pair();
        one.write_all(&bytes[..HEAD_BYTES]).unwrap();
        let mut incoming = Incoming::default();
        let refused = loop {
            match incoming.next(&wire, |_| Some(20)) {
                Ok(found) => assert_eq!(found, None),
                Err(broken) => break broken,
            }
        };
        assert!(matches!(refused, Broken::Protocol(_)) && incoming.body.capacity() == 0);
    }
}
