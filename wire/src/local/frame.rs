//! Frames: a head of sixteen bytes, and a body that is a message of `proto/kvarts/v1/local.proto` or of the contract.
//!
//! ```text
//! 0        4      6      8                16
//! | length | kind | zero | id             | body: `length` bytes
//! ```
//!
//! All numbers are little-endian. Nothing is allocated for a body before its length was compared with the limit, and
//! then no more than what has arrived of it.

use kvarts_layout::BlockKey;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use super::limits::{BODY_BYTES_MAX, HEAD_BYTES};

macro_rules! kinds {
    ($($(#[doc = $help:literal])* $name:ident = $number:literal;)*) => {
        /// What a frame is.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Kind {
            $($(#[doc = $help])* $name,)*
        }

        impl Kind {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The kind of this number, if there is one.
            pub fn of(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Its number.
            pub fn number(self) -> u16 {
                match self {
                    $(Self::$name => $number,)*
                }
            }
        }
    };
}

kinds! {
    /// To the server, first: `Hello`. Answered with `Welcome`, or `Failed` and the end of the connection.
    Hello = 1;
    /// `ShareRequest`, with a descriptor or without.
    Share = 2;
    /// `UnshareRequest`.
    Unshare = 3;
    /// `LocalRead`. Answered with any number of `Arrived`, one `End` and one `Released`; or with `Failed` alone.
    Read = 4;
    /// `LocalPut`. Answered with `Done` (`PutReply`).
    Put = 5;
    /// No body: the read or put of the same id is of no interest any more. Not answered itself; a read that it ends
    /// still says `Released`.
    Cancel = 6;
    /// `SettledRequest`. Answered with `Done` (`SettledReply`).
    Settled = 7;
    /// `MatchRequest`. Answered, as the following, with `Done` and the reply of the contract.
    Match = 16;
    /// `ExistsRequest`.
    Exists = 17;
    /// `UnlockRequest`.
    Unlock = 18;
    /// `RenewRequest`.
    Renew = 19;
    /// To the client: `Welcome`.
    Welcome = 128;
    /// The reply to the request of the same id.
    Done = 129;
    /// `Error`: why there is none.
    Failed = 130;
    /// `LocalArrived`.
    Arrived = 131;
    /// `LocalEnd`.
    End = 132;
    /// No body: the memory of this read is not written to any more. The last word about an id.
    Released = 133;
}

/// A frame without its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Bytes of the body, at most [`BODY_BYTES_MAX`].
    pub length: usize,
    /// What it is.
    pub kind: Kind,
    /// Which request it is about; chosen by the client, used once.
    pub id: u64,
}

/// Why bytes are no frame. The connection cannot go on after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoFrame {
    /// A body that is longer than any may be.
    TooLong,
    /// A kind that there is not, or a field that must be zero and is not.
    Unknown,
}

impl std::fmt::Display for NoFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::TooLong => "a frame is larger than the limit",
            Self::Unknown => "the kind of a frame is unknown",
        })
    }
}

impl Head {
    /// The head that these bytes begin with; nothing if there are too few of them.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, NoFrame> {
        let Some((head, _)) = bytes.split_first_chunk::<HEAD_BYTES>() else { return Ok(None) };
        let [a, b, c, d, k, l, y, z, id @ ..] = *head;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > BODY_BYTES_MAX {
            return Err(NoFrame::TooLong);
        }
        let kind = Kind::of(u16::from_le_bytes([k, l])).filter(|_| [y, z] == [0, 0]);
        Ok(Some(Self { length, kind: kind.ok_or(NoFrame::Unknown)?, id: u64::from_le_bytes(id) }))
    }

    /// The head as bytes.
    pub fn bytes(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        let length = u32::try_from(self.length).unwrap_or(u32::MAX);
        let parts = length.to_le_bytes().into_iter().chain(self.kind.number().to_le_bytes()).chain([0, 0]);
        for (byte, part) in bytes.iter_mut().zip(parts.chain(self.id.to_le_bytes())) {
            *byte = part;
        }
        bytes
    }
}

/// A whole frame.
pub fn frame(kind: Kind, id: u64, message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(HEAD_BYTES + length);
    bytes.extend_from_slice(&Head { length, kind, id }.bytes());
    // A vector grows as needed: this cannot fail.
    let _ = message.encode(&mut bytes);
    bytes
}

/// A whole frame whose message has one more field of bytes, numbered `field`, in which these keys stand one after the other. They go
/// straight into the frame: a scheduler's question has thousands.
pub fn frame_with_keys(
    kind: Kind,
    id: u64,
    message: &impl Message,
    field: u32,
    keys: &[BlockKey],
) -> Vec<u8> {
    let bytes_of_keys = size_of_val(keys);
    let fields = message.encoded_len() + key_len(field) + encoded_len_varint(bytes_of_keys as u64);
    let length = fields + bytes_of_keys;
    let mut bytes = Vec::with_capacity(HEAD_BYTES + length);
    bytes.extend_from_slice(&Head { length, kind, id }.bytes());
    // A vector grows as needed: this cannot fail.
    let _ = message.encode(&mut bytes);
    encode_key(field, WireType::LengthDelimited, &mut bytes);
    encode_varint(bytes_of_keys as u64, &mut bytes);
    keys.iter().for_each(|key| bytes.extend_from_slice(&key.0));
    bytes
}

/// A frame without a body.
pub fn bare(kind: Kind, id: u64) -> Vec<u8> {
    Head { length: 0, kind, id }.bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto;
    use proptest::prelude::*;

    #[test]
    fn keys_that_go_straight_into_a_frame_are_those_of_its_message() {
        for count in [0, 1, 3, 4, 511, 512, 8192_u32] {
            let keys: Vec<_> = (0..count).map(|n| BlockKey([(n % 251) as u8; 32])).collect();
            let without = proto::ExistsRequest { lease_ms: 7, of_cluster: true, ..Default::default() };
            let bytes = frame_with_keys(Kind::Exists, 5, &without, 3, &keys);
            let head = Head::parse(&bytes).unwrap().unwrap();
            assert_eq!((head.kind, head.id, head.length), (Kind::Exists, 5, bytes.len() - HEAD_BYTES));
            let whole = proto::ExistsRequest { keys: crate::convert::key_bytes(&keys), ..without };
            assert_eq!(proto::ExistsRequest::decode(&bytes[HEAD_BYTES..]).unwrap(), whole);
        }
    }

    #[test]
    fn every_kind_has_a_number_of_its_own_and_comes_back() {
        let mut numbers: Vec<u16> = Kind::ALL.iter().map(|kind| kind.number()).collect();
        for kind in Kind::ALL {
            let head = Head { length: 7, kind: *kind, id: u64::MAX - 3 };
            assert_eq!(Head::parse(&head.bytes()), Ok(Some(head)));
        }
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), Kind::ALL.len());
    }

    #[test]
    fn what_is_no_frame_is_refused_before_its_body_is_waited_for() {
        let head = Head { length: BODY_BYTES_MAX, kind: Kind::Read, id: 1 };
        assert_eq!(Head::parse(&head.bytes()), Ok(Some(head)));
        let mut bytes = head.bytes();
        bytes[0] = 1;
        assert_eq!(Head::parse(&bytes), Err(NoFrame::TooLong));
        for (at, byte) in [(4, 0xff), (5, 1), (6, 1), (7, 1)] {
            let mut bytes = head.bytes();
            bytes[at] = byte;
            assert_eq!(Head::parse(&bytes), Err(NoFrame::Unknown), "byte {at}");
        }
        assert_eq!(Head::parse(&head.bytes()[..15]), Ok(None));
    }

    #[test]
    fn a_frame_is_its_head_and_its_message() {
        let hello = proto::Hello { version: 1, token: "kvarts_x".to_owned(), ..proto::Hello::default() };
        let bytes = frame(Kind::Hello, 9, &hello);
        let head = Head::parse(&bytes).unwrap().unwrap();
        assert_eq!((head.length, head.kind, head.id), (bytes.len() - HEAD_BYTES, Kind::Hello, 9));
        assert_eq!(proto::Hello::decode(&bytes[HEAD_BYTES..]).unwrap(), hello);
        assert_eq!(bare(Kind::Cancel, 3).len(), HEAD_BYTES);
    }

    proptest::proptest! {
        /// The decoders of everything that a client may send: whatever the bytes, an answer and no panic.
        #[test]
        fn no_bytes_upset_the_decoders(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400),
        ) {
            if let Ok(Some(head)) = Head::parse(&bytes) {
                proptest::prop_assert!(head.length <= BODY_BYTES_MAX);
                proptest::prop_assert_eq!(&head.bytes()[..], &bytes[..HEAD_BYTES]);
            }
            let _ = proto::Hello::decode(&bytes[..]);
            let _ = proto::ShareRequest::decode(&bytes[..]);
            let _ = proto::LocalPut::decode(&bytes[..]);
            if let Ok(read) = proto::LocalRead::decode(&bytes[..]) {
                proptest::prop_assert_eq!(proto::LocalRead::decode(&read.encode_to_vec()[..]).unwrap(), read);
            }
            let _ = proto::LocalArrived::decode(&bytes[..]);
            let _ = proto::LocalEnd::decode(&bytes[..]);
        }

        /// What is encoded comes back, and a flipped bit makes it an error or something else that may be, whose bytes
        /// are those of the flipped one.
        #[test]
        fn a_frame_comes_back_and_a_flipped_bit_makes_no_more_than_another_frame(
            read in reads(), put in puts(), id in any::<u64>(), flip in any::<prop::sample::Index>(),
        ) {
            prop_assert_eq!(back::<proto::LocalRead>(&frame(Kind::Read, id, &read)).unwrap().1, read.clone());
            prop_assert_eq!(back::<proto::LocalPut>(&frame(Kind::Put, id, &put)).unwrap().1, put.clone());
            for (kind, bytes) in [
                (Kind::Read, frame(Kind::Read, id, &read)),
                (Kind::Put, frame(Kind::Put, id, &put)),
                (Kind::Cancel, bare(Kind::Cancel, id)),
            ] {
                let mut flipped = bytes.clone();
                let bit = flip.index(bytes.len() * 8);
                flipped[bit / 8] ^= 1 << (bit % 8);
                let Ok(head) = Head::parse(&flipped) else { continue };
                let head = head.unwrap();
                prop_assert_eq!(&head.bytes()[..], &flipped[..HEAD_BYTES]);
                prop_assert!(head.length <= BODY_BYTES_MAX);
                let whole = Head::parse(&bytes).unwrap().unwrap();
                prop_assert!(bit / 8 < HEAD_BYTES || head == whole);
                match kind {
                    Kind::Read => once_more::<proto::LocalRead>(&flipped)?,
                    Kind::Put => once_more::<proto::LocalPut>(&flipped)?,
                    _ => prop_assert_ne!(head, whole),
                }
            }
        }
    }

    /// The head and the message of a frame that is whole.
    fn back<M: Message + Default>(bytes: &[u8]) -> Option<(Head, M)> {
        let head = Head::parse(bytes).ok()??;
        let body = bytes.get(HEAD_BYTES..HEAD_BYTES + head.length)?;
        Some((head, M::decode(body).ok()?))
    }

    /// A message that can be read is the same when it is written and read once more.
    fn once_more<M: Message + Default + PartialEq>(bytes: &[u8]) -> Result<(), TestCaseError> {
        if let Some((head, message)) = back::<M>(bytes) {
            let (_, again) = back::<M>(&frame(head.kind, head.id, &message)).unwrap();
            prop_assert!(again == message);
        }
        Ok(())
    }

    fn some_bytes() -> impl Strategy<Value = bytes::Bytes> {
        prop::collection::vec(any::<u8>(), 0..100).prop_map(Into::into)
    }

    fn places() -> impl Strategy<Value = Option<proto::LocalPlaces>> {
        let target = (any::<u32>(), any::<u64>(), any::<u64>());
        let target =
            target.prop_map(|(memory, base, stride)| proto::local_places::Target { memory, base, stride });
        let all = (prop::collection::vec(target, 0..8), prop::collection::vec(any::<u32>(), 0..20));
        prop::option::of(all.prop_map(|(targets, slots)| proto::LocalPlaces { targets, slots }))
    }

    fn reads() -> impl Strategy<Value = proto::LocalRead> {
        let range = (any::<u32>(), any::<u32>());
        let range = range.prop_map(|(start, end)| proto::read_request::LayerRange { start, end });
        let asked = (some_bytes(), some_bytes(), prop::option::of(range), 0..4i32);
        let asked = asked.prop_map(|(namespace, keys, layers, class)| proto::ReadRequest {
            namespace,
            keys,
            layers,
            class,
            ..Default::default()
        });
        (prop::option::of(asked), any::<bool>(), places(), any::<u64>()).prop_map(
            |(read, by_blocks, into, timeout_us)| {
                let (part, origins) = (by_blocks, vec![vec![1; 16].into(), bytes::Bytes::new()]);
                proto::LocalRead { read, by_blocks, into, timeout_us, part, origins }
            },
        )
    }

    fn puts() -> impl Strategy<Value = proto::LocalPut> {
        let header = (some_bytes(), some_bytes(), any::<Option<u32>>(), any::<i32>());
        let header = header.prop_map(|(namespace, keys, first_block, durability)| proto::PutHeader {
            namespace,
            keys,
            first_block,
            durability,
            ..Default::default()
        });
        let crc32 = prop::collection::vec(any::<u32>(), 0..20);
        (prop::option::of(header), places(), crc32, any::<u64>())
            .prop_map(|(header, from, crc32, timeout_us)| proto::LocalPut { header, from, crc32, timeout_us })
    }
}
