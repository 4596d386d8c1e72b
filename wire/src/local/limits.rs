//! Every limit of the local path, by name. What passes these is bounded before anything is allocated for it.

use std::time::Duration;

/// What a client sends first on a connection: no other protocol on the same socket begins so.
pub const MAGIC: &[u8; 8] = b"KVARTSL1";
/// The version of what follows.
pub const VERSION: u32 = 1;
/// Bytes before the body of each frame.
pub const HEAD_BYTES: usize = 16;
/// The most bytes of a frame's body, either way: the keys and places of the longest request.
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Bodies up to this size each session receives by itself; larger ones share [`RECEIVING_BYTES_MAX`].
pub const SMALL_BODY_BYTES: usize = 64 << 10;
/// The most bytes of the body of the first frame: a hello needs no more, and its client is not known yet.
pub const HELLO_BYTES_MAX: usize = 4 << 10;
/// Bytes of large bodies that are being received at a time, in all sessions together: what has arrived of them.
pub const RECEIVING_BYTES_MAX: u64 = 64 << 20;
/// Bytes by which a large body's part of that grows.
pub const RECEIVING_STEP_BYTES: u64 = 1 << 20;
/// What a client must send of a large body in a second at least, once [`SLOW`] has passed.
pub const RECEIVING_RATE: u64 = 1 << 20;
/// Bytes that are taken from a socket at once.
pub const RECEIVE_BYTES: usize = 64 << 10;
/// Sessions at a time.
pub const SESSIONS_MAX: usize = 1024;
/// Requests of one session that may be under way at a time.
pub const REQUESTS_MAX: usize = 256;
/// Connections at a time that have not said yet who they are, or are gRPC's and wait to be taken.
pub const UNKNOWN_MAX: usize = 256;
/// Memories that one session may share at a time.
pub const MEMORIES_MAX: usize = 256;
/// Sessions that may share one pool at a time: each has a mapping of its own in the server.
pub const POOL_SESSIONS_MAX: usize = 64;
/// Files of memories that the server has open, in all sessions together, where the process may have enough of them.
pub const MEMORY_FILES_MAX: u64 = 4096;
/// Bytes of memories that are registered with the engine's rings, in all sessions together. More is used as it is. Each
/// ring looks up every page of them while it does nothing else.
pub const PINNED_BYTES_MAX: u64 = 1 << 30;
/// The server makes memory for clients up to this part of what may be shared at a time, in its whole life: one in this many.
pub const MADE_PART: u64 = 4;
/// Leases that one session may hold at a time.
pub const LEASES_MAX: usize = 4096;
/// Descriptors that may travel with one frame.
pub const DESCRIPTORS_MAX: usize = 1;
/// Descriptors that have arrived before the frames that they belong to.
pub const DESCRIPTORS_WAITING_MAX: usize = 8;
/// Bytes that wait for a client to take them before its reads are held back.
pub const OUTBOX_BYTES: usize = 256 << 10;
/// Bytes that wait for a client before its connection is given up, whatever they are: answers to requests that it may
/// have under way, none of which may be left out.
pub const OUTBOX_BYTES_MAX: usize = 64 << 20;
/// Bytes beyond [`OUTBOX_BYTES`] that wait for clients, in all sessions together.
pub const UNTAKEN_BYTES_MAX: u64 = 256 << 20;
/// Bytes by which a session's part of that grows.
pub const UNTAKEN_STEP_BYTES: usize = 256 << 10;
/// Announcements that travel in one frame: about this many bytes of them.
pub const ARRIVED_BYTES: usize = 128 << 10;
/// How long a client may take to say who it is.
pub const HELLO: Duration = Duration::from_secs(5);
/// How long a client may take to send the rest of a frame, or to take some of what waits for it.
pub const STALL: Duration = Duration::from_secs(20);
/// After this a large body must have come at [`RECEIVING_RATE`].
pub const SLOW: Duration = Duration::from_secs(5);
/// Bytes of a put that are copied out of a client's memory before other tasks have their turn.
pub const COPY_BYTES: usize = 1 << 20;
/// Bytes of them that are copied at once and then digested: the processor's own caches have them still.
pub const DIGEST_BYTES: usize = 64 << 10;
/// Bytes of a window through which a client copies, and of all of them together.
pub const WINDOW_BYTES: u64 = 8 << 20;
/// See [`WINDOW_BYTES`].
pub const WINDOWS_BYTES: u64 = 32 << 20;
/// Blocks that one session may have read again because they did not match in its memory, and how soon one more.
pub const CONFIRMED_MAX: u32 = 256;
/// See [`CONFIRMED_MAX`].
pub const CONFIRM_EVERY: Duration = Duration::from_secs(1);
