//! A way to bytes: own disks, a peer's disks. A read over several paths gives each of them pieces of itself.

use std::sync::Arc;

use kvarts_contract::api::{Origins, ReadRequest, ReadStream};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_store::engine::Store;

/// Some layers of some blocks, as part of a larger read.
#[derive(Clone, Debug)]
pub struct Piece {
    /// What is read, and where to; blocks count from zero. All of it is verified.
    pub request: ReadRequest,
    /// Which production of each block the read is about: of each block all pieces give bytes of one only, the first that any of
    /// them met.
    pub origins: Arc<Origins>,
    /// Which block of `origins` the first block of the piece is.
    pub first: u32,
}

/// A way to bytes.
pub trait Path: Send + Sync {
    /// Begins to read a piece. What the stream announces is complete, verified, and of the production that `origins` names, as
    /// [`KvStore::read`](kvarts_contract::api::KvStore::read) says. A stream that is dropped cancels the piece, but its memory may
    /// be written to until the last clone of the request's places is gone.
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason>;

    /// Since when it leads nowhere, if it does not now: what only it leads to fails at once when that has lasted.
    fn away_since(&self) -> Option<Nanos> {
        None
    }
}

impl Path for Store {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        self.read_part(piece.request, &piece.origins, piece.first).map_err(|error| error.0)
    }
}
