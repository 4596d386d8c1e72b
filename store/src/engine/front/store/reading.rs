//! Reads, and several that are one.

use std::sync::Arc;

use super::{FULL, Store};
use crate::api::{Origins, ReadRequest, ReadStream, read_channel};
use crate::engine::front::router::Message;
use crate::engine::read::job;
use crate::error::{Error, Reason};

impl Store {
    /// Reads as [`KvStore::read`](crate::api::KvStore::read) does, and of each block only the production that `origins`
    /// has for it, or the first that any of the reads meets that share it: a block that was put anew meanwhile is not
    /// here. `first` is where this read's blocks begin there. For whoever reads parts of blocks one after the other.
    pub fn read_part(
        &self,
        request: ReadRequest,
        origins: &Arc<Origins>,
        first: u32,
    ) -> Result<ReadStream, Error> {
        self.begin_read(request, Some((Arc::clone(origins), first)))
    }

    pub(super) fn begin_read(
        &self,
        request: ReadRequest,
        origins: Option<(Arc<Origins>, u32)>,
    ) -> Result<ReadStream, Error> {
        let (sink, stream) = read_channel();
        for (shard, part) in job::begin(&self.0.shared, request, origins, sink)? {
            let Some(sender) = self.0.router.to(shard) else { continue };
            if let Err(error) = sender.try_send(Message::Read(shard, part))
                && let Message::Read(_, part) = error.into_inner()
            {
                part.refuse(&Reason::Busy(FULL));
            }
        }
        Ok(stream)
    }
}
