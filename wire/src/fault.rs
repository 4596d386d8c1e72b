//! Errors on the wire: one mapping from the engine's reasons to the contract, and back in the client.
//!
//! The kind decides the code, one to one; a program reads the whole [`proto::Error`] from the details of the
//! status. A reason that this file does not know travels as its kind and its text.

use bytes::Bytes;
use kvarts_contract::error::{
    DeleteCause, Error, IdentityCause, Kind, LatchCause, Reason, ShapeCause, SpaceCause,
};
use kvarts_layout::{BlockKey, NamespaceId};
use prost::Message;
use tonic::{Code, Status};

use super::limits::{ERRORS_TOLD, RETRY_AFTER};
use crate::{busy, proto};

/// The type of the detail, as `google.protobuf.Any` names types.
const TYPE_URL: &str = "type.googleapis.com/kvarts.v1.Error";

/// `google.rpc.Status`, which details travel in.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<AnyDetail>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct AnyDetail {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

/// Why a call did not succeed, as it goes to the client.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The code of gRPC.
    pub code: Code,
    /// What the contract adds to it.
    pub detail: Box<proto::Error>,
}

/// What a call of this server gives.
pub type Outcome<T> = Result<T, Fault>;

impl Fault {
    fn new(code: Code, kind: proto::Kind, reason: proto::Reason, message: impl Into<String>) -> Self {
        let detail = proto::Error {
            kind: kind.into(),
            reason: reason.into(),
            message: message.into(),
            ..proto::Error::default()
        };
        Self { code, detail: Box::new(detail) }
    }

    /// A message, or a field of one, that is not what the contract says.
    pub fn malformed(what: impl Into<String>) -> Self {
        let (kind, reason) = (proto::Kind::Invalid, proto::Reason::Malformed);
        Self::new(Code::InvalidArgument, kind, reason, what)
    }

    /// Bytes that were damaged on their way here.
    pub fn damaged(offset: u64, expected: u32, found: u32) -> Self {
        let text = format!("bytes at {offset} were damaged in transit: send the bytes again");
        let fault =
            Self::new(Code::InvalidArgument, proto::Kind::Invalid, proto::Reason::DamagedOnTheWay, text);
        let detail = proto::Error { expected: expected.into(), found: found.into(), offset, ..*fault.detail };
        Self { code: fault.code, detail: Box::new(detail) }
    }

    /// The caller is not known.
    pub fn unauthenticated(what: impl Into<String>) -> Self {
        let (kind, reason) = (proto::Kind::Refused, proto::Reason::Denied);
        Self::new(Code::Unauthenticated, kind, reason, what)
    }

    /// The caller may not do that.
    pub fn forbidden(what: impl Into<String>) -> Self {
        let (kind, reason) = (proto::Kind::Refused, proto::Reason::Denied);
        Self::new(Code::PermissionDenied, kind, reason, what)
    }

    /// Not now.
    pub fn busy(what: &'static str) -> Self {
        Reason::Busy(what).into()
    }

    /// The deadline passed, or a slow client was waited for long enough.
    pub fn late(what: impl Into<String>) -> Self {
        let (kind, reason) = (proto::Kind::Deadline, proto::Reason::DeadlinePassed);
        Self::new(Code::DeadlineExceeded, kind, reason, what)
    }

    /// A stream that broke off: what the transport says of it, in the contract's kinds. What was refused says so itself.
    pub fn broken(status: &Status) -> Self {
        if let Some(error) = told(status) {
            return Self { code: status.code(), detail: Box::new(error) };
        }
        match status.code() {
            Code::Cancelled | Code::Unknown | Code::Internal => Self::busy("the connection was interrupted"),
            Code::DeadlineExceeded => Self::late(status.message()),
            _ => Self::malformed(status.message()),
        }
    }

    /// What the client gets.
    pub fn status(&self) -> Status {
        let value = Bytes::from(self.detail.encode_to_vec());
        let detail = AnyDetail { type_url: TYPE_URL.to_owned(), value };
        let message = self.detail.message.clone();
        let details = RpcStatus { code: self.code.into(), message: message.clone(), details: vec![detail] };
        Status::with_details(self.code, message, Bytes::from(details.encode_to_vec()))
    }
}

impl From<Reason> for Fault {
    fn from(reason: Reason) -> Self {
        Self { code: code(reason.kind()), detail: Box::new(detail(&reason)) }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        error.0.into()
    }
}

/// The code of a kind.
pub fn code(kind: Kind) -> Code {
    match kind {
        Kind::Miss => Code::NotFound,
        Kind::Retry => Code::Unavailable,
        Kind::Refused => Code::ResourceExhausted,
        Kind::Invalid => Code::InvalidArgument,
        Kind::Deadline => Code::DeadlineExceeded,
        Kind::Corrupt => Code::DataLoss,
        Kind::ReadOnly => Code::FailedPrecondition,
        Kind::Bug => Code::Internal,
    }
}

fn kind_of(kind: Kind) -> proto::Kind {
    match kind {
        Kind::Miss => proto::Kind::Miss,
        Kind::Retry => proto::Kind::Retry,
        Kind::Refused => proto::Kind::Refused,
        Kind::Invalid => proto::Kind::Invalid,
        Kind::Deadline => proto::Kind::Deadline,
        Kind::Corrupt => proto::Kind::Corrupt,
        Kind::ReadOnly => proto::Kind::ReadOnly,
        Kind::Bug => proto::Kind::Bug,
    }
}

/// A reason in the contract's words.
pub fn detail(reason: &Reason) -> proto::Error {
    use proto::Reason as R;
    let mut error = proto::Error {
        kind: kind_of(reason.kind()).into(),
        message: reason.to_string(),
        ..proto::Error::default()
    };
    if reason.kind() == Kind::Retry {
        error.retry_after_ms = u32::try_from(RETRY_AFTER.as_millis()).unwrap_or(u32::MAX);
    }
    let name = match reason {
        Reason::NotHere(key) => of_key(&mut error, key, R::NotHere),
        Reason::Duplicate(key) => of_key(&mut error, key, R::Duplicate),
        Reason::OutOfOrder(key) => of_key(&mut error, key, R::OutOfOrder),
        Reason::InFlight => R::InFlight,
        Reason::Busy(what) => of_text(&mut error, what, R::Busy),
        Reason::NoSpace(cause) => of_text(&mut error, &cause.to_string(), R::NoSpace),
        Reason::PinCap { limit, wanted } => of_numbers(&mut error, *limit, *wanted, R::PinCap),
        Reason::Quota { limit, wanted } => of_numbers(&mut error, *limit, *wanted, R::Quota),
        Reason::NotAdmitted => R::NotAdmitted,
        Reason::UnknownNamespace(id) => {
            error.namespace = Bytes::copy_from_slice(id.as_bytes());
            R::UnknownNamespace
        }
        Reason::SpecMismatch => R::SpecMismatch,
        Reason::Identity(cause) => of_text(&mut error, &cause.to_string(), R::Identity),
        Reason::Shape(cause) => of_text(&mut error, &cause.to_string(), R::Shape),
        Reason::Empty => R::Empty,
        Reason::TooMany(what) => of_text(&mut error, what, R::TooMany),
        Reason::Length { expected, found } => of_numbers(&mut error, *expected, *found, R::Length),
        Reason::Overlap => R::Overlap,
        Reason::OutOfBounds => R::OutOfBounds,
        Reason::DeadlineInPast => R::DeadlineInPast,
        Reason::DeadlinePassed => R::DeadlinePassed,
        // Where in the log a block lies would tell how much other tenants write: that stands in the server's log alone.
        Reason::Digest { expected, found, .. } => {
            error.message = "the block is damaged: its bytes do not match their digest".to_owned();
            of_numbers(&mut error, u64::from(*expected), u64::from(*found), R::Digest)
        }
        Reason::Header { what, .. } => {
            error.message = format!("the block is damaged: {what}");
            of_text(&mut error, what, R::Header)
        }
        Reason::Media(cause) => of_text(&mut error, &cause.to_string(), R::Media),
        Reason::Latched(cause) => of_text(&mut error, &cause.to_string(), R::Latched),
        Reason::NotDeleted(cause) => of_text(&mut error, &cause.to_string(), R::NotDeleted),
        Reason::Config(what) => of_text(&mut error, what, R::Config),
        Reason::Denied(what) => of_text(&mut error, what, R::Denied),
        Reason::Deleted => R::Deleted,
        Reason::LeaseEnded => R::LeaseEnded,
        Reason::EventGap => R::EventGap,
        Reason::Bug(what) => of_text(&mut error, what, R::Bug),
        _ => R::Unspecified,
    };
    error.reason = name.into();
    error
}

/// The errors of one answer about many blocks: the first of them in full, the others without what would make the answer
/// longer than a client takes.
#[derive(Debug, Default)]
pub struct Told(usize);

impl Told {
    /// A reason in the contract's words, and in fewer of them where many were told already.
    pub fn detail(&mut self, reason: &Reason) -> proto::Error {
        self.0 += 1;
        let error = detail(reason);
        if self.0 <= ERRORS_TOLD {
            return error;
        }
        let (message, what, key) = Default::default();
        proto::Error { message, what, key, ..error }
    }
}

/// The reason that a server told of a block, which it names or not.
pub fn reason_of_block(error: &proto::Error, block: Option<&BlockKey>) -> Reason {
    match reason(error) {
        Reason::NotHere(_) if error.key.is_empty() => Reason::NotHere(block.copied().unwrap_or_default()),
        reason => reason,
    }
}

fn of_key(error: &mut proto::Error, key: &BlockKey, name: proto::Reason) -> proto::Reason {
    error.key = Bytes::copy_from_slice(key.as_bytes());
    name
}

fn of_text(error: &mut proto::Error, what: &str, name: proto::Reason) -> proto::Reason {
    what.clone_into(&mut error.what);
    name
}

fn of_numbers(error: &mut proto::Error, expected: u64, found: u64, name: proto::Reason) -> proto::Reason {
    (error.expected, error.found) = (expected, found);
    name
}

/// The reason that a server told, as the engine would have told it. Whatever the server says, the result has a
/// kind that is no better than what the contract's kind allows.
pub fn reason(error: &proto::Error) -> Reason {
    use proto::Reason as R;
    let what = || if error.what.is_empty() { error.message.clone() } else { error.what.clone() };
    let key = || <[u8; 32]>::try_from(&error.key[..]).map(BlockKey).unwrap_or_default();
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    match error.reason() {
        R::NotHere => Reason::NotHere(key()),
        R::Duplicate => Reason::Duplicate(key()),
        R::OutOfOrder => Reason::OutOfOrder(key()),
        R::InFlight => Reason::InFlight,
        R::Busy => Reason::Busy(busy::said(&error.what)),
        R::NoSpace => Reason::NoSpace(SpaceCause::Remote(error.what.clone())),
        R::PinCap => Reason::PinCap { limit: error.expected, wanted: error.found },
        R::Quota => Reason::Quota { limit: error.expected, wanted: error.found },
        R::NotAdmitted => Reason::NotAdmitted,
        R::UnknownNamespace => {
            let id = <[u8; 32]>::try_from(&error.namespace[..]).unwrap_or_default();
            Reason::UnknownNamespace(NamespaceId(id))
        }
        R::SpecMismatch => Reason::SpecMismatch,
        R::Identity => Reason::Identity(IdentityCause::Remote(what())),
        R::Shape => Reason::Shape(ShapeCause::Remote(what())),
        R::Empty => Reason::Empty,
        R::TooMany => Reason::TooMany(counted(&error.what)),
        R::Length => Reason::Length { expected: error.expected, found: error.found },
        R::Overlap => Reason::Overlap,
        R::OutOfBounds => Reason::OutOfBounds,
        R::DeadlineInPast => Reason::DeadlineInPast,
        R::DeadlinePassed => Reason::DeadlinePassed,
        R::Digest => {
            let (segment, offset) = (error.segment, error.offset);
            let (expected, found) = (narrow(error.expected), narrow(error.found));
            Reason::Digest { shard: 0, segment, offset, expected, found }
        }
        R::Header => Reason::Header { shard: 0, segment: error.segment, offset: error.offset, what: what() },
        R::Media | R::DamagedOnTheWay => Reason::remote(what()),
        R::Latched => Reason::Latched(LatchCause::Remote(what())),
        R::NotDeleted => Reason::NotDeleted(DeleteCause::Remote(what())),
        R::Denied => Reason::Denied(what()),
        R::Deleted => Reason::Deleted,
        R::LeaseEnded => Reason::LeaseEnded,
        R::EventGap => Reason::EventGap,
        R::Config | R::Malformed | R::NotBuilt => Reason::Config(what()),
        R::Bug => Reason::Bug("the server reported an internal error"),
        R::Unspecified => of_kind(error.kind(), what()),
    }
}

/// What there are too many of. Only words that this program knows: a server cannot make it keep others.
fn counted(what: &str) -> &'static str {
    const KNOWN: [&str; 11] = [
        "blocks",
        "blocks that descend from the key",
        "layers",
        "layers of models",
        "bytes",
        "models",
        "leases",
        "keys times coordinates",
        "bytes in one block for this store's segments",
        "blocks in the namespace: delete keys or the whole namespace",
        "separate runs of blocks",
    ];
    KNOWN.into_iter().find(|known| *known == what).unwrap_or("items")
}

fn of_kind(kind: proto::Kind, what: String) -> Reason {
    match kind {
        proto::Kind::Miss | proto::Kind::Corrupt => Reason::remote(what),
        proto::Kind::Retry | proto::Kind::Unspecified => Reason::Busy("the server cannot answer now"),
        proto::Kind::Refused => Reason::Denied(what),
        proto::Kind::Invalid => Reason::Config(what),
        proto::Kind::Deadline => Reason::DeadlinePassed,
        proto::Kind::ReadOnly => Reason::Latched(LatchCause::Remote(what)),
        proto::Kind::Bug => Reason::Bug("the server reported an internal error"),
    }
}

/// The contract's error in the details of a status.
fn told(status: &Status) -> Option<proto::Error> {
    let details = RpcStatus::decode(status.details()).unwrap_or_default();
    let found = details.details.iter().find(|detail| detail.type_url == TYPE_URL);
    found.and_then(|detail| proto::Error::decode(detail.value.clone()).ok())
}

/// The reason behind a status: from its details if it has them, else from its code.
pub fn reason_of(status: &Status) -> Reason {
    if let Some(error) = told(status) {
        return reason(&error);
    }
    if is_late(status) {
        return Reason::DeadlinePassed;
    }
    let text = || format!("{}: {}", status.code(), status.message());
    match status.code() {
        // Too many calls on it were given up: the next call makes another connection.
        Code::ResourceExhausted if is_of_transport(status) => {
            Reason::Busy("the server closed the connection")
        }
        Code::NotFound => Reason::remote(text()),
        Code::DeadlineExceeded => Reason::DeadlinePassed,
        Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => Reason::Config(text()),
        Code::Unauthenticated | Code::PermissionDenied | Code::ResourceExhausted => Reason::Denied(text()),
        Code::FailedPrecondition => Reason::Latched(LatchCause::Remote(text())),
        Code::DataLoss => Reason::remote(text()),
        _ => Reason::Busy("the server cannot be reached"),
    }
}

/// Whether it was the transport that ended a call. What a server says has no cause on this side.
pub fn is_of_transport(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

/// Whether a call ended because its time was over, as this side saw it: the transport calls that a cancellation.
pub fn is_late(status: &Status) -> bool {
    let first = std::error::Error::source(status);
    std::iter::successors(first, |error| error.source()).any(|error| error.is::<tonic::TimeoutExpired>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reasons() -> Vec<Reason> {
        let key = BlockKey([7; 32]);
        let text = || "what".to_owned();
        vec![
            Reason::NotHere(key),
            Reason::InFlight,
            Reason::NoSpace(SpaceCause::Remote(text())),
            Reason::PinCap { limit: 3, wanted: 9 },
            Reason::Quota { limit: 3, wanted: 9 },
            Reason::NotAdmitted,
            Reason::UnknownNamespace(NamespaceId([9; 32])),
            Reason::SpecMismatch,
            Reason::Identity(IdentityCause::Remote(text())),
            Reason::Shape(ShapeCause::Remote(text())),
            Reason::Empty,
            Reason::TooMany("blocks"),
            Reason::Duplicate(key),
            Reason::OutOfOrder(key),
            Reason::Length { expected: 1, found: 2 },
            Reason::Overlap,
            Reason::OutOfBounds,
            Reason::DeadlineInPast,
            Reason::DeadlinePassed,
            Reason::Digest { shard: 0, segment: 1, offset: 4096, expected: 5, found: 6 },
            Reason::Header { shard: 0, segment: 1, offset: 4096, what: text() },
            Reason::remote(text()),
            Reason::Latched(LatchCause::Remote(text())),
            Reason::NotDeleted(DeleteCause::Remote(text())),
            Reason::Config(text()),
            Reason::Denied(text()),
            Reason::Deleted,
            Reason::LeaseEnded,
            Reason::EventGap,
        ]
    }

    #[test]
    fn a_reason_comes_back_from_its_status_as_it_was() {
        for reason in reasons() {
            let status = Fault::from(reason.clone()).status();
            assert_eq!(status.code(), code(reason.kind()), "{reason:?}");
            let told = match reason {
                Reason::Digest { expected, found, .. } => {
                    Reason::Digest { shard: 0, segment: 0, offset: 0, expected, found }
                }
                Reason::Header { what, .. } => Reason::Header { shard: 0, segment: 0, offset: 0, what },
                other => other,
            };
            assert_eq!(reason_of(&status), told);
        }
    }

    #[test]
    fn no_tenant_is_told_where_in_the_log_a_block_lies() {
        let (segment, offset) = (77_123, 8_192_000);
        for reason in [
            Reason::Digest { shard: 0, segment, offset, expected: 5, found: 6 },
            Reason::Header { shard: 0, segment, offset, what: "its header".to_owned() },
        ] {
            let told = detail(&reason);
            assert_eq!((told.segment, told.offset), (0, 0));
            let all = format!("{told:?}");
            assert!(!all.contains("77123") && !all.contains("8192000"), "{all}");
        }
    }

    #[test]
    fn errors_about_any_number_of_blocks_fit_into_an_answer_and_keep_their_kind() {
        let all = crate::limits::KEYS_MAX as u32;
        let key = |block: u32| BlockKey([block as u8; 32]);
        let failures = (0..all).map(|block| (block, Reason::NotHere(key(block)))).collect();
        let end =
            kvarts_contract::api::ReadEnd { usable_blocks: 0, usable_layers: 1, failures, held_bytes: 0 };
        let wire = crate::convert::wire_end(&end);
        assert!(wire.encoded_len() <= 4 << 20, "{}", wire.encoded_len());
        for (failure, (block, reason)) in wire.failures.iter().zip(&end.failures) {
            let told = failure.error.as_ref().unwrap();
            assert_eq!(reason_of_block(told, Some(&key(*block))), *reason);
        }
        assert!(wire.failures[ERRORS_TOLD - 1].error.as_ref().unwrap().message.len() > 10);
        let text = "x".repeat(200);
        let refused = |at: u32| match at % 3 {
            0 => Reason::Busy("a refusal of a length that is usual for them"),
            1 => Reason::Duplicate(key(at)),
            _ => Reason::remote(text.clone()),
        };
        let outcomes =
            (0..all).map(|at| kvarts_contract::api::BlockOutcome::Refused(refused(at))).collect::<Vec<_>>();
        let outcomes = crate::convert::wire_outcomes(&outcomes);
        let reply = proto::PutReply { outcomes, crc32: 0 };
        assert!(reply.encoded_len() <= 4 << 20, "{}", reply.encoded_len());
        for (at, outcome) in (0..).zip(&reply.outcomes) {
            assert_eq!(reason(outcome.error.as_ref().unwrap()).kind(), refused(at).kind());
        }
    }

    #[test]
    fn reasons_with_fixed_texts_keep_their_kind() {
        for reason in [Reason::Busy("the queue is full"), Reason::Bug("impossible"), Reason::TooMany("stars")]
        {
            assert_eq!(reason_of(&Fault::from(reason.clone()).status()).kind(), reason.kind());
        }
    }

    #[test]
    fn a_connection_that_the_server_closed_refuses_nothing() {
        let mut status = Status::new(Code::ResourceExhausted, "h2 protocol error");
        assert_eq!(reason_of(&status).kind(), Kind::Refused, "a server's own word");
        status.set_source(std::sync::Arc::new(std::io::Error::other("too many resets")));
        assert_eq!(reason_of(&status).kind(), Kind::Retry);
    }

    #[test]
    fn a_status_without_details_never_looks_like_success_of_any_kind() {
        for code in 1..=16 {
            let kind = reason_of(&Status::new(Code::from(code), "text")).kind();
            let expected = match Code::from(code) {
                Code::NotFound | Code::DataLoss => Kind::Miss,
                Code::DeadlineExceeded => Kind::Deadline,
                Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => Kind::Invalid,
                Code::Unauthenticated | Code::PermissionDenied | Code::ResourceExhausted => Kind::Refused,
                Code::FailedPrecondition => Kind::ReadOnly,
                _ => Kind::Retry,
            };
            assert_eq!(kind, expected, "code {code}");
        }
    }
}
