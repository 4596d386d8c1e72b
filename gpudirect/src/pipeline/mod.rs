//! The layer pipeline: disk to arena to device, layer by layer, in the order in which layers are computed.
//!
//! One read of the store lands tile by tile, a tile a layer, in a ring of arena memory. Two threads belong to a stream
//! (and four that read, where files are read straight): one follows the store's announcements and enqueues each verified layer's copies, with an event behind them; the
//! other waits for the events and opens the ring for the layers that come into the freed memory. The caller's thread
//! waits at most until a layer's copies are enqueued; its device stream waits for the event.
//!
//! - A layer is announced only after every digest of it matched, where it was read to.
//! - Memory of the ring is reused only when the copy from it is done.
//! - What is written to is the caller's to know: its slots are idle, or [`LandRequest::after`] says when they are.
//! - Where files can be read straight into device memory ([`Pipeline::with_files`]) there is a ring there as well, layers are
//!   compared with their digests by the device, and copied within it; what cannot come this way comes through the arena.
//! - Where a layer fails the stream ends, with what is usable and why. Everything it held comes back: the arena's
//!   piece when disk and device have let go of it, streams and threads when the [`LayerStream`] is dropped.

mod direct;
mod stream;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{KvStore, Order, Origins, TileSource, TiledRead, TiledRequest, Verify};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, planted};
use kvarts_store::engine::Store;

use direct::DirectPath;
pub use direct::{DirectUse, FAILURES_MAX};
use stream::{Landing, StagedReader};
pub use stream::{Layer, LayerEnd, LayerStream, Next};

use crate::arena::Arena;
use crate::destination::Destination;
use crate::device::{Device, Event, Stream};
use crate::device_arena::DeviceArena;
use crate::error::LandError;
pub use crate::follow::COPY_TIMEOUT;
use crate::follow::Followed;
use crate::gather::Curve;
use crate::lander::{Column, Lander, Tiles, fits};
use crate::ring::{RingPlace, bytes_needed, places};

/// For how many layers a stream has memory at least: one that is copied and one that is read.
pub const LAYERS_AHEAD: u32 = 2;

/// From this size of a chunk on a copy of its own costs nothing beside its bytes.
pub const DIRECT_BYTES: u64 = 1 << 20;

/// How long a straight read of a file may take before its layer, and all behind it, come through the arena, unless a
/// pipeline is told otherwise.
pub const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Blocks that are to land in device memory.
#[derive(Clone, Debug)]
pub struct LandRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The blocks wanted.
    pub keys: Vec<BlockKey>,
    /// Which layers, counted among the layers that this group has; `None` for all.
    pub layers: Option<Range<u32>>,
    /// Where they are wanted. It describes all layers of the shape, also when fewer are read. Copies go there as soon as a
    /// layer is verified, on a device stream of their own: nothing that was enqueued on other streams may still read or
    /// write these slots, unless `after` says when it is done.
    pub into: Destination,
    /// A point behind which the slots are idle: that of the engine's last kernel that uses them. Copies into them run after
    /// it; what is read and verified before that waits in the ring. Without it they must be idle now. The copies' timeout
    /// ([`Pipeline::with_copy_timeout`]) begins when they are enqueued, so it must be longer than the engine takes.
    pub after: Option<Event>,
    /// The most bytes of the arena that this stream may have. It has what two layers need at least, so a smaller
    /// number asks for that.
    pub depth_bytes: u64,
    /// How much is compared with digests. Less than everything is the operator's choice.
    pub verify: Verify,
    /// What the read is for.
    pub class: Class,
    /// When the caller stops waiting, by the store's clock.
    pub deadline: Option<Nanos>,
}

/// What streams share: a store, a device, an arena, and what was measured of the device.
#[derive(Clone)]
pub struct Pipeline {
    store: Arc<dyn KvStore>,
    device: Arc<dyn Device>,
    arena: Arena,
    curve: Arc<Curve>,
    copy_timeout: Duration,
    read_timeout: Duration,
    direct: Option<Arc<DirectPath>>,
    lander: Option<Lander>,
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline").field("device", &self.device).field("arena", &self.arena).finish()
    }
}

/// Who lent the first layers of a request, and which production of each block they are of.
type Begun = (Store, Arc<Origins>);

/// A piece of the arena, cut for the layers of one request.
struct Seating {
    ring: SharedBuf,
    places: Vec<RingPlace>,
}

impl Pipeline {
    /// A pipeline. Register and pin the arena first: what is not is used all the same, only slower.
    pub fn new(store: Arc<dyn KvStore>, device: Arc<dyn Device>, arena: Arena, curve: Curve) -> Self {
        let curve = Arc::new(curve);
        let (copy_timeout, read_timeout) = (COPY_TIMEOUT, READ_TIMEOUT);
        Self { store, device, arena, curve, copy_timeout, read_timeout, direct: None, lander: None }
    }

    /// The same, whose layers go through the rings of a lander of this device: copies over the link are large then, whatever the size of a page.
    /// A request all of whose chunks have [`DIRECT_BYTES`] is copied to its places without it, and so is one whose pages its kernels cannot move.
    ///
    /// The rings are those of all that use the lander. A copy that fails, or takes longer than the lander's timeout, fails it for all of them, and
    /// what it uses then is kept for good; requests whose slots are in use ([`LandRequest::after`]) wait for each other's slots.
    #[must_use]
    pub fn with_lander(self, lander: Lander) -> Self {
        Self { lander: Some(lander), ..self }
    }

    /// What moves the pages of a request, if a lander does.
    pub(crate) fn through(&self, blocks: &Destination) -> Option<(&Lander, Column)> {
        let lander = self.lander.as_ref()?;
        let chunks = blocks.shape().layers().iter().flat_map(|layer| &layer.chunks);
        let is_small = chunks.map(|chunk| chunk.bytes).any(|bytes| bytes < DIRECT_BYTES);
        Some((lander, fits(lander, blocks).filter(|_| is_small)?))
    }

    /// The same with another bound on how long one layer's copy may take. What takes longer ends its stream with
    /// [`DeviceError::Stuck`](crate::DeviceError::Stuck); its memory is kept until it is done, or the device is declared
    /// lost ([`Device::declare_lost`]).
    #[must_use]
    pub fn with_copy_timeout(self, copy_timeout: Duration) -> Self {
        Self { copy_timeout, ..self }
    }

    /// The same with another bound on how long a straight read may take ([`Pipeline::with_files`]). One that takes longer
    /// keeps its piece of device memory until it ends; the layers come through the arena, and it counts as a failure.
    #[must_use]
    pub fn with_read_timeout(self, read_timeout: Duration) -> Self {
        Self { read_timeout, ..self }
    }

    pub(crate) fn followed(&self) -> Followed {
        Followed { device: Arc::clone(&self.device), timeout: self.copy_timeout }
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn store(&self) -> &Arc<dyn KvStore> {
        &self.store
    }

    pub(crate) fn curve(&self) -> &Arc<Curve> {
        &self.curve
    }

    /// Reads files straight into `arena`'s memory where blocks lie so that it can be done, and where the device verifies
    /// what the request wants verified; the rest comes through the host's arena as before. `lender` must be the store.
    #[must_use]
    pub fn with_files(self, lender: Store, arena: DeviceArena) -> Self {
        Self { direct: Some(Arc::new(DirectPath::new(lender, arena))), ..self }
    }

    /// What has been read straight into device memory so far; `None` without [`Pipeline::with_files`].
    pub fn direct_use(&self) -> Option<DirectUse> {
        self.direct.as_ref().map(|direct| direct.usage())
    }

    /// Begins to read. With [`Pipeline::with_files`] it returns when the store has said where the blocks lie, for which
    /// it may have to read headers; the request's deadline bounds that. When this returns the first layer is on its way, and
    /// the others follow it as the arena and `depth_bytes` allow.
    pub fn land(&self, request: LandRequest) -> Result<LayerStream, LandError> {
        self.check(&request)?;
        if let Some(path) = &self.direct
            && let Some(stream) = direct::land(self, path, &request)?
        {
            return Ok(stream);
        }
        let through = self.through(&request.into);
        let after = request.after.clone();
        let copies = self.copies(&request)?;
        let mut landing = self.stage(request, copies, None)?;
        if let Some((lander, column)) = through {
            landing.through = Some(Tiles::land(lander, column, &landing.ring, after.as_ref())?);
        }
        let counts = (landing.places.len() as u32, landing.into.blocks());
        // The stream of the copies too, which may wait for its work when it goes.
        let keeps = (landing.ring.clone(), landing.into.clone(), landing.copies.clone());
        LayerStream::start(self.followed(), counts, Box::new(keeps), move |queue| {
            StagedReader::new(landing, queue).run();
        })
    }

    /// A device stream for the copies into a request's slots.
    fn copies(&self, request: &LandRequest) -> Result<Stream, LandError> {
        let copies = self.device.stream()?;
        if let Some(after) = &request.after
            && !planted!("read-over-slots-in-use")
        {
            self.device.wait(&copies, after)?;
        }
        Ok(copies)
    }

    /// Which layers are wanted, and the bytes of each layer of the shape.
    fn wanted(request: &LandRequest) -> Result<(Range<u32>, Vec<u64>), LandError> {
        let all = request.into.layer_bytes();
        let wanted = request.layers.clone().unwrap_or(0..all.len() as u32);
        if wanted.is_empty() || wanted.end as usize > all.len() {
            return Err(LandError::Request(format!(
                "the range of layers {}..{} (without its end) is empty, or exceeds the {} layers of the \
                model",
                wanted.start,
                wanted.end,
                all.len()
            )));
        }
        Ok((wanted, all))
    }

    fn check(&self, request: &LandRequest) -> Result<(), LandError> {
        Self::wanted(request)?;
        if request.keys.len() != request.into.blocks() as usize {
            let (keys, places) = (request.keys.len(), request.into.blocks());
            return Err(LandError::Request(format!(
                "{keys} keys were given for {places} destination slots: give one key for each slot"
            )));
        }
        Ok(())
    }

    /// Begins to read through the arena, for copies on a stream: of each block the production that `begun` says, if other
    /// layers of it have come already.
    fn stage(
        &self,
        request: LandRequest,
        copies: Stream,
        begun: Option<&Begun>,
    ) -> Result<Landing, LandError> {
        let (wanted, all) = Self::wanted(&request)?;
        let sizes = all.get(wanted.start as usize..wanted.end as usize).unwrap_or_default();
        let Seating { ring, places } = self.place(sizes, request.depth_bytes)?;
        let tiled = TiledRequest {
            namespace: request.namespace,
            group: request.group,
            coordinate: request.coordinate,
            keys: request.keys,
            layers: wanted.clone(),
            order: Order::Layers,
            verify: request.verify,
            class: request.class,
            deadline: request.deadline,
        };
        let source = match begun {
            Some((lender, origins)) => {
                let tiles = lender.tiles_of(tiled, Some(Arc::clone(origins)));
                tiles.map(|tiles| Box::new(tiles) as Box<dyn TileSource>)
            }
            None => self.store.tiles(tiled),
        };
        let source = source.map_err(|error| LandError::Store(error.0))?;
        let (shape, first) = (Arc::clone(request.into.shape()), wanted.start);
        let read = TiledRead::new(source, shape, Order::Layers, wanted, request.into.blocks());
        let mut landing = Landing {
            device: Arc::clone(&self.device),
            curve: Arc::clone(&self.curve),
            copies,
            into: request.into,
            first,
            places,
            ring,
            read,
            granted: 0,
            arrived: 0,
            has_deadline: request.deadline.is_some(),
            through: None,
        };
        landing.grant(0).map_err(LandError::Store)?;
        Ok(landing)
    }

    /// Takes a piece of the arena and cuts it.
    fn place(&self, wanted: &[u64], depth: u64) -> Result<Seating, LandError> {
        let least = bytes_needed(wanted, LAYERS_AHEAD);
        let total = self.arena.piece_max();
        if least > total {
            return Err(LandError::ArenaTooSmall { wanted: least, total });
        }
        // More than all layers would stay empty.
        let sum = wanted.iter().map(|bytes| bytes.next_multiple_of(crate::ring::ALIGN)).sum::<u64>();
        let most = depth.max(least).min(sum.max(least).next_power_of_two());
        let full = || LandError::ArenaFull { wanted: least, free: self.arena.usage().largest_free };
        let ring = self.arena.take(least, most).ok_or_else(full)?;
        let bug = || LandError::Request("the layers do not fit into the host memory for layers".to_owned());
        let places = places(wanted, ring.len() as u64).ok_or_else(bug)?;
        Ok(Seating { ring, places })
    }
}
