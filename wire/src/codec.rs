//! Messages from bytes: decoded in bounded memory.
//!
//! A repeated message takes two bytes on the wire if it is empty, and many times that in memory. So those of a request
//! that may have them are counted before anything is decoded. Everything else that a message is decoded into is a
//! small multiple of its bytes, which have a bound of their own.

use std::any::TypeId;
use std::marker::PhantomData;

use bytes::{Buf, Bytes};
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstEncoder};

use super::fault::{Fault, Outcome};
use super::limits::PARTS_MAX;
use crate::proto;

/// The contract's codec. A server's answers are decoded as they are: the client knows the server.
#[derive(Clone, Debug)]
pub struct Bounded<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Bounded<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for Bounded<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = Self;

    fn encoder(&mut self) -> ProstEncoder<T> {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<T: Message + 'static, U: Message + Default + 'static> Decoder for Bounded<T, U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // All of a message is in one piece: this shares it.
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        check::<U>(&bytes).map_err(|fault| fault.status())?;
        U::decode(bytes).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// A message, if it is one and has no more parts than any may.
pub fn decode<M: Message + Default + 'static>(bytes: Bytes) -> Outcome<M> {
    check::<M>(&bytes)?;
    M::decode(bytes).map_err(|error| Fault::malformed(error.to_string()))
}

/// Refuses what would have more parts than any message may.
fn check<M: 'static>(bytes: &[u8]) -> Outcome<()> {
    let mut left = PARTS_MAX;
    // What cannot be counted to its end cannot be decoded either, which says what is wrong with it.
    match within::<M>().and_then(|within| count(bytes, within, &mut left)) {
        Some(false) => Err(Fault::malformed(format!("the request has more than {PARTS_MAX} parts"))),
        _ => Ok(()),
    }
}

/// Fields of a message that are repeated messages or bytes, or messages on the way to them: the number, whether it is repeated itself, what is
/// in it.
struct Within(&'static [(u64, bool, Self)]);

const NOTHING: Within = Within(&[]);
const TIMES: Within = Within(&[(1, true, NOTHING)]);
const MATCH: Within =
    Within(&[(4, true, Within(&[(2, true, NOTHING)])), (8, false, Within(&[(2, false, TIMES)]))]);
const ROUTE: Within = Within(&[(4, false, TIMES), (7, true, NOTHING)]);
const REGISTER: Within = Within(&[
    (1, false, Within(&[(15, true, NOTHING)])),
    (2, false, Within(&[(1, true, NOTHING), (2, true, NOTHING)])),
    (6, true, NOTHING),
]);
const LOCAL_READ: Within = Within(&[(3, false, Within(&[(1, true, NOTHING)])), (6, true, NOTHING)]);
const LOCAL_PUT: Within = Within(&[(2, false, Within(&[(1, true, NOTHING)]))]);

/// Of the requests that have repeated messages. The others have none, at any depth.
fn within<M: 'static>() -> Option<&'static Within> {
    let is = |id: TypeId| id == TypeId::of::<M>();
    if is(TypeId::of::<proto::MatchRequest>()) {
        Some(&MATCH)
    } else if is(TypeId::of::<proto::RegisterModelRequest>()) {
        Some(&REGISTER)
    } else if is(TypeId::of::<proto::RouteRequest>()) {
        Some(&ROUTE)
    } else if is(TypeId::of::<proto::LocalRead>()) {
        Some(&LOCAL_READ)
    } else if is(TypeId::of::<proto::LocalPut>()) {
        Some(&LOCAL_PUT)
    } else {
        None
    }
}

/// Counts the repeated messages of a message down from `left`: false if there are more, nothing if it is no message.
fn count(mut bytes: &[u8], within: &Within, left: &mut usize) -> Option<bool> {
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let length = match tag & 7 {
            0 => {
                varint(&mut bytes)?;
                0
            }
            1 => 8,
            2 => varint(&mut bytes)?,
            5 => 4,
            // Groups are in no message of the contract; the decoder bounds their depth and keeps nothing of them.
            3 | 4 => 0,
            _ => return None,
        };
        let (field, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
        bytes = rest;
        let Some((_, repeated, inner)) = within.0.iter().find(|(number, ..)| *number == tag >> 3) else {
            continue;
        };
        if *repeated {
            let Some(fewer) = left.checked_sub(1) else { return Some(false) };
            *left = fewer;
        }
        if !count(field, inner, left)? {
            return Some(false);
        }
    }
    Some(true)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    prost::encoding::decode_varint(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field that is a message: its number, and what is in it.
    fn field(number: u8, inner: &[u8]) -> Vec<u8> {
        let mut bytes = vec![number << 3 | 2];
        prost::encoding::encode_varint(inner.len() as u64, &mut bytes);
        bytes.extend_from_slice(inner);
        bytes
    }

    fn is_refused<M: Message + Default + 'static>(bytes: Vec<u8>) -> bool {
        let answer = decode::<M>(bytes.into());
        answer.is_err_and(|fault| fault.detail.message.contains("parts"))
    }

    /// As many as there may be are taken, one more is not, wherever they are.
    fn expect_bounded<M: Message + Default + 'static>(
        name: &str,
        around: impl Fn(Vec<u8>) -> Vec<u8>,
        number: u8,
    ) {
        let most = |more: usize| around(field(number, &[]).repeat(PARTS_MAX + more));
        assert!(M::decode(&most(0)[..]).is_ok(), "{name}");
        assert!(decode::<M>(most(0).into()).is_ok(), "{name}: as many as there may be");
        assert!(is_refused::<M>(most(1)), "{name}: one more");
    }

    #[test]
    fn no_request_has_more_repeated_messages_than_fit() {
        use proto::{LocalPut, LocalRead, MatchRequest, RegisterModelRequest, RouteRequest};
        let whole = |bytes| bytes;
        expect_bounded::<MatchRequest>("requirements", whole, 4);
        expect_bounded::<MatchRequest>("samples", |samples| field(8, &field(2, &samples)), 1);
        expect_bounded::<RouteRequest>("nodes", whole, 7);
        expect_bounded::<RouteRequest>("samples", |samples| field(4, &samples), 1);
        expect_bounded::<RegisterModelRequest>("columns", whole, 6);
        expect_bounded::<RegisterModelRequest>("parts", |parts| field(2, &parts), 1);
        expect_bounded::<RegisterModelRequest>("layers", |layers| field(2, &layers), 2);
        expect_bounded::<RegisterModelRequest>("extras", |extras| field(1, &extras), 15);
        expect_bounded::<LocalRead>("places", |places| field(3, &places), 1);
        expect_bounded::<LocalRead>("origins", whole, 6);
        expect_bounded::<LocalPut>("places", |places| field(2, &places), 1);
        // A requirement counts as well as each of its coordinates.
        let coordinates = |more: usize| field(4, &field(2, &[]).repeat(PARTS_MAX - 1 + more));
        assert!(decode::<MatchRequest>(coordinates(0).into()).is_ok());
        assert!(is_refused::<MatchRequest>(coordinates(1)));
        // Shared out over several geometries, which are one when they are decoded.
        let half = field(2, &field(1, &[]).repeat(PARTS_MAX / 2 + 1));
        assert!(is_refused::<RegisterModelRequest>(half.repeat(2)));
    }

    #[test]
    fn noise_is_refused_as_what_it_is() {
        for bytes in [vec![0xff; 40], vec![0x22, 200, 1], vec![0x26], vec![0x27]] {
            let fault = decode::<proto::MatchRequest>(bytes.into()).unwrap_err();
            assert!(!fault.detail.message.contains("parts"), "{fault:?}");
        }
    }
}
