//! Every limit of the lane, by name. What passes these is bounded before anything is allocated for it.

use std::time::Duration;

/// What a connection begins with.
pub const MAGIC: &[u8; 8] = b"KVARTSP1";
/// The version of what follows.
pub const VERSION: u32 = 2;
/// The most bytes of a frame's body before both sides know each other.
pub const HELLO_BYTES_MAX: usize = 1 << 10;
/// The most bytes of a cluster's name.
pub const CLUSTER_BYTES_MAX: usize = 255;
/// The most bytes of an identity.
pub const IDENTITY_BYTES_MAX: usize = 256 << 10;
/// Blocks of one piece.
pub const KEYS_MAX: usize = 4096;
/// Chunks of one piece.
pub const CHUNKS_MAX: u64 = 1 << 17;
/// Bytes of one piece.
pub const PIECE_BYTES_MAX: u64 = 16 << 20;
/// The most bytes of a request's body: keys, origins, and what else it says.
pub const REQUEST_BYTES_MAX: usize = KEYS_MAX * (32 + 17) + (1 << 10);
/// The most bytes of an answer's body, the piece's bytes apart: digests, origins, failures.
pub const ANSWER_BYTES_MAX: usize = CHUNKS_MAX as usize * 4 + KEYS_MAX * (16 + 5 + 2) + (1 << 10);
/// Pieces of one connection that may be under way at a time, those among them that were cancelled.
pub const PIECES_MAX: usize = 256;
/// Bytes that a peer may owe at a time: what a network holds, and little more. What stands in a socket's queue beyond that is in no
/// cache any more when it is read. Further pieces wait at the side that asks; one is asked for however long it is.
pub const UNDER_WAY_BYTES: u64 = 8 << 20;
/// Namespaces that one connection may open.
pub const NAMESPACES_MAX: usize = 4096;
/// Bytes of requests that wait to be sent on one connection, and of answers to look-alikes of a ping.
pub const OUTBOX_BYTES_MAX: usize = 4 << 20;
/// Bytes that are read of a frame's body at once: no more memory is taken than has come.
pub const STEP_BYTES: usize = 64 << 10;
/// The longest that a piece may be waited for.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// How long both sides may take to say who they are.
pub const HELLO: Duration = Duration::from_secs(5);
/// How long a connection is tried to be made.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long a peer that owes something may say nothing at all. After half of it it is asked whether it is there.
pub const SILENCE: Duration = Duration::from_secs(10);
/// How long the rest of a frame may take, and an answer beyond what [`TAKING_RATE`] allows.
pub const STALL: Duration = Duration::from_secs(20);
/// Bytes a second at which an answer must be taken at least, after [`STALL`].
pub const TAKING_RATE: u64 = 1 << 20;
/// The pause before a connection is tried again, first and at most; each is twice the one before.
pub const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Blocks of one connection that may be read again because they did not match at the receiver, and how soon one more.
pub const DOUBTS_MAX: u32 = 256;
/// See [`DOUBTS_MAX`].
pub const DOUBT_EVERY: Duration = Duration::from_secs(1);
/// The pause after a connection could not be taken, for want of descriptors for example.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
