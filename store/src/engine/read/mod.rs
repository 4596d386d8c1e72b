//! Reads: what is looked up on the caller's thread, and what each shard then reads, proves and announces.

pub(crate) mod decode;
pub(crate) mod header_cache;
pub(crate) mod job;
pub(crate) mod lend;
pub(crate) mod listing;
pub(crate) mod part_read;
pub(crate) mod prove;
pub(crate) mod request;
pub(crate) mod single_flight;
pub(crate) mod tile_identity;
pub(crate) mod wanted;

use std::rc::Rc;

use self::decode::Decoder;
use self::header_cache::HeaderCache;
use self::single_flight::SingleFlight;
use super::volume::Volume;

/// What the reads of one shard share.
pub(crate) struct Reads {
    pub(crate) volume: Rc<Volume>,
    /// Proven headers.
    pub(crate) headers: HeaderCache,
    /// Reads that others may share.
    pub(crate) flights: SingleFlight,
    /// Encodes and decodes chunks.
    pub(crate) decoder: Decoder,
}

impl Reads {
    pub(crate) fn new(volume: Rc<Volume>) -> Self {
        Self {
            volume,
            headers: HeaderCache::default(),
            flights: SingleFlight::default(),
            decoder: Decoder::default(),
        }
    }
}
