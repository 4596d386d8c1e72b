//! Every limit of the gRPC face, by name. What passes these is bounded before anything is allocated for it.

use std::time::Duration;

/// Bytes of data in one message of a stream that this side sends.
pub const FRAME_BYTES: usize = 1 << 20;
/// The most bytes of data that one message of a put may have.
pub const PUT_DATA_BYTES_MAX: usize = 4 << 20;
/// The most bytes of any message. Room for the keys of the longest request, origins included.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// The most bytes of a message that registers a model: a spec of the largest size, and who it is of.
pub const MODEL_BYTES_MAX: usize = 2 << 20;
/// The most repeated messages in one request, at all depths together: each is many times as large in memory.
pub const PARTS_MAX: usize = 1 << 16;
/// Requests up to this size are received as they come, and their answers are not much longer; larger ones share
/// [`LARGE_BYTES_MAX`].
pub const SMALL_REQUEST_BYTES: usize = 64 << 10;
/// Bytes that large requests take in memory: as they came, as what they are decoded into, and their answers.
pub const LARGE_BYTES_MAX: usize = 128 << 20;
/// What a large request counts for of that, for each of its bytes.
pub const LARGE_FACTOR: usize = 4;
/// Large requests that wait for their share of it.
pub const LARGE_WAITING: usize = 256;
/// Bytes a second that a client must send of a large request, once it has had a while.
pub const LARGE_RATE: u64 = 256 << 10;
/// That while.
pub const LARGE_GRACE: Duration = Duration::from_secs(5);
/// The most bytes of a message of health or reflection: it is received before any token is asked for.
pub const OPEN_CALL_BYTES_MAX: usize = 4 << 10;
/// How long a call of health or reflection may go on without a byte from its client while it expects one.
pub const OPEN_CALL_SILENCE: Duration = Duration::from_secs(60);
/// Calls without a token that one connection may have at a time.
pub const OPEN_CALLS_MAX: usize = 4;
/// Bytes that a connection may send before a call on it was let in: a handshake, and calls without a token for as long as
/// it may be without one that needs a token.
pub const STRANGERS_BYTES_MAX: usize = 256 << 10;
/// The same of all of them together. Beyond it who sent more than [`STRANGERS_FEW_BYTES`] is cut off as soon as it sends more.
pub const STRANGERS_SUM_BYTES: usize = 64 << 20;
/// More than a handshake and a first call with a token take.
pub const STRANGERS_FEW_BYTES: usize = 8 << 10;
/// How long a connection is safe from making room for others while no call on it was let in.
pub const STRANGERS_GRACE: Duration = Duration::from_secs(1);
/// One of this many connections is for those that have shown no token yet: known ones come from among these.
pub const STRANGERS_PART: usize = 8;
/// The least that a connection moves before others have their turns, however many its tenant has.
pub const LEAST_TURN_BYTES: usize = 64 << 10;
/// Connections of the local socket beside all others, for administrators alone.
pub const ADMINISTRATORS_PLACES: usize = 8;
/// Look-ups of up to this many entries (keys times coordinates) are done at once, larger ones when it is their tenant's turn.
pub const LIGHT_ENTRIES: usize = 8192;
/// Those that are done at a time for each tenant, and beside these for all.
pub const HEAVY_AT_ONCE: u64 = 1;
/// Those that wait for that.
pub const HEAVY_WAITING: usize = 1024;
/// The most measured prefills of one request: a table is made from them.
pub const PLAN_SAMPLES_MAX: usize = 256;
/// The most boundaries at which a caller may say that it has windows and states.
pub const HELD_BOUNDARIES_MAX: usize = 1024;
/// Tables of prefill times that a server remembers.
pub const TIMES_KEPT: usize = 64;
/// Watchers of events that one tenant may have: each looks at the events of all tenants.
pub const WATCHERS_MAX: usize = 16;
/// The most keys of one request: the engine's own limit.
pub const KEYS_MAX: usize = kvarts_contract::api::MAX_REQUEST_BLOCKS;
/// The most bytes that one put or read may be about, in all.
pub const REQUEST_BYTES_MAX: u64 = 1 << 40;
/// Bytes of a put that are written at once: whole blocks, at least one.
pub const PUT_PIECE_BYTES: u64 = 8 << 20;
/// Pieces of one put that may be on their way to disk while the next is received.
pub const PUT_PIECES_UNDER_WAY: usize = 2;
/// Bytes of a read that are fetched at once, by one that is alone.
pub const TILE_BYTES: u64 = 4 << 20;
/// The same where memory is scarce or many read: smaller tiles leave more for others.
pub const SMALL_TILE_BYTES: u64 = 1 << 20;
/// Tiles that a read which is alone has under way while one is sent.
pub const TILES_AHEAD: usize = 2;
/// Bytes that large reads together have under way if they can help it: a small one finds that much in front of it.
pub const UNDER_WAY_BYTES: u64 = 8 << 20;
/// Reads up to this size have memory of their own, which large ones cannot take.
pub const SMALL_READ_BYTES: u64 = 256 << 10;
/// Messages of one read that wait for the connection to take them.
pub const FRAMES_WAITING: usize = 4;
/// How long a client may take to send a request of one message or the next one of a put, or to take the next one of a
/// read.
pub const STALL: Duration = Duration::from_secs(20);
/// How long a connection may be without its first call that is let in, in multiples of [`STALL`]. A client that connected
/// too early connects again.
pub const FIRST_REQUEST_STALLS: u32 = 6;
/// How long a connection may be without a call after that, in multiples of [`STALL`].
pub const IDLE_STALLS: u32 = 45;
/// How long no connection is taken when the process or the host has no more descriptors or memory for one.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Bytes that every connection begins with: the preface of HTTP/2, of which a silent one has sent less.
pub const PREFACE_BYTES: usize = 24;
/// How long a client may take to send one piece of a put: a byte now and then does not hold memory for ever.
pub const PIECE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a call may wait for memory or its tenant's turn.
pub const WAIT: Duration = Duration::from_secs(20);
/// The longest deadline that a call gets, also where it asked for none.
pub const DEADLINE_MAX: Duration = Duration::from_secs(3600);
/// The same for a call that goes through the whole store: a scrub, a compaction, the purge of a tenant.
pub const WHOLE_STORE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// The longest that a lease or pin holds.
pub const LEASE_MAX: Duration = Duration::from_secs(24 * 3600);
/// The same for a token without the right to pin.
pub const READERS_LEASE_MAX: Duration = Duration::from_secs(600);
/// Models that one tenant may have registered.
pub const MODELS_MAX: usize = 4096;
/// Bytes of all of them in a list: an answer of one message.
pub const MODELS_BYTES_MAX: u64 = 3 << 20;
/// Bytes of memory of all models of one tenant.
pub const MODELS_MEMORY_MAX: u64 = 64 << 20;
/// Models of one tenant that a store remembers: those registered, and those that it has or had blocks of since its start.
pub const REMEMBERED_MAX: usize = 4 * MODELS_MAX;
/// What one layer of a model takes of that.
pub const LAYER_MEMORY: u64 = 128;
/// Layers and chunks of all shapes that one registration may ask for.
pub const SHAPE_PARTS_MAX: usize = 1 << 17;
/// Single blocks of which one answer tells everything that there is to tell about an error. Of those behind them it leaves
/// out what is for people, and the key: any number of them fits into an answer that every client takes (4 MiB).
pub const ERRORS_TOLD: usize = 256;
/// Columns of which one session holds blocks.
pub const SESSION_COLUMNS_MAX: usize = 64;
/// Leases that one tenant may have at a time.
pub const LEASES_MAX: usize = 1 << 16;
/// Columns whose shapes one registration may ask for.
pub const COLUMNS_MAX: usize = 256;
/// Streams that one connection may have.
pub const STREAMS_PER_CONNECTION: u32 = 1024;
/// What one stream may have on its way to a client: enough for a fast network.
pub const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// The same for a connection.
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// What one stream may have on its way to a server: it is kept in memory until the call takes it.
pub const UPLOAD_STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// The same for a connection.
pub const UPLOAD_CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Puts that take bytes at a time: one for each of this many bytes of the memory of requests.
pub const MEMORY_PER_PUT: u64 = 4 << 20;
/// Puts that wait for that. Their clients may have sent a window each.
pub const PUTS_WAITING: usize = 256;
/// The largest HTTP/2 frame that a client takes.
pub const HTTP_FRAME_BYTES: u32 = 1 << 20;
/// The same of a server. A frame is put together in memory that is in no account, before anything is known of
/// the call that it is for.
pub const UPLOAD_FRAME_BYTES: u32 = 64 << 10;
/// Bytes of headers of one request.
pub const HEADER_BYTES_MAX: u32 = 16 << 10;
/// A connection that answers no ping within this time is closed.
pub const KEEPALIVE: Duration = Duration::from_secs(30);
/// When a client that was told to ask again should.
pub const RETRY_AFTER: Duration = Duration::from_millis(50);
/// How a note among a server's notes begins that says what its disks lack for the budget: it is no decision of the start alone.
pub const SHORT_OF_DISK: &str = "short of disk: ";
/// The same of a note that names a directory which is not in use.
pub const LOST_DIRECTORY: &str = "directory ";
