//! The bare server that a server is measured beside: the same transport and the same messages, from memory or out of a
//! file, with no store behind them.

use std::convert::Infallible;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use crc32fast::Hasher;
use kvarts_contract::api::Order;
use prost::Message;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use kvarts_server::grpc::frame::{self, Outgoing, ReadBody};
use kvarts_server::grpc::one_message;
use kvarts_wire::digest::StreamDigest;
use kvarts_wire::{limits, proto};

/// Answers every read with the same messages. Of the request it takes only what digests begin with.
#[derive(Clone, Debug)]
pub(super) struct BareServer {
    source: Source,
    /// Messages of an answer.
    messages: u64,
}

#[derive(Clone, Debug)]
enum Source {
    /// One message's bytes, shared and not copied: the processor has them in its cache.
    Memory(Bytes, Hasher),
    /// A file, read message by message into memory that is used again, each compared with its digest: the least that
    /// a server of verified bytes must do, were the disk as fast as memory.
    File(Arc<Stored>),
}

#[derive(Debug)]
struct Stored {
    file: File,
    /// Bytes of a message.
    each: usize,
    /// Of each message of the file.
    digests: Vec<u32>,
    spare: Mutex<Vec<Vec<u8>>>,
}

/// Memory of a message, which is used again when the message has been sent.
struct PooledBytes {
    bytes: Vec<u8>,
    home: Arc<Stored>,
}

impl AsRef<[u8]> for PooledBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for PooledBytes {
    fn drop(&mut self) {
        self.home.spare().push(std::mem::take(&mut self.bytes));
    }
}

impl Stored {
    fn spare(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message's bytes and their digest; nothing if they are not what was stored.
    fn read(self: &Arc<Self>, number: u64) -> Option<(Bytes, Hasher)> {
        let which = usize::try_from(number).ok()? % self.digests.len().max(1);
        let spare = self.spare().pop();
        let mut bytes = spare.unwrap_or_else(|| vec![0; self.each]);
        self.file.read_exact_at(&mut bytes, (which * self.each) as u64).ok()?;
        let mut digested = Hasher::new();
        digested.update(&bytes);
        let pooled = Bytes::from_owner(PooledBytes { bytes, home: Arc::clone(self) });
        (digested.clone().finalize() == *self.digests.get(which)?).then_some((pooled, digested))
    }
}

impl BareServer {
    /// A server that answers with `messages` messages of these bytes.
    pub(super) fn of_memory(bytes: &Bytes, messages: u64) -> Self {
        let mut digested = Hasher::new();
        digested.update(bytes);
        Self { source: Source::Memory(bytes.clone(), digested), messages }
    }

    /// A server that answers with `messages` messages of `each` bytes of a file whose content is `bytes`, read from its
    /// beginning again and again.
    pub(super) fn of_file(file: File, bytes: &[u8], each: usize, messages: u64) -> Self {
        let digests = bytes.chunks_exact(each).map(crc32fast::hash).collect();
        let stored = Stored { file, each, digests, spare: Mutex::default() };
        Self { source: Source::File(Arc::new(stored)), messages }
    }
}

impl NamedService for BareServer {
    const NAME: &'static str = proto::reads_server::SERVICE_NAME;
}

impl Service<http::Request<Body>> for BareServer {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self { source, messages } = self.clone();
        Box::pin(async move {
            let (to, incoming) = mpsc::channel(limits::FRAMES_WAITING);
            tokio::spawn(async move {
                // A request that cannot be read is answered with other digests, which its client refuses.
                let asked = one_message(request.into_body()).await.unwrap_or_default();
                let asked = proto::ReadRequest::decode(asked).unwrap_or_default();
                let mut digest = StreamDigest::of_read(Order::Layers, &asked);
                let mut offset = 0;
                for number in 0..messages {
                    let read = match &source {
                        Source::Memory(bytes, digested) => Some((bytes.clone(), digested.clone())),
                        Source::File(stored) => stored.read(number),
                    };
                    let Some((bytes, digested)) = read else { break };
                    let about = proto::ReadData { offset, ..proto::ReadData::default() };
                    offset += bytes.len() as u64;
                    let crc32 = digest.read_data(&about, &digested, bytes.len());
                    if to.send(frame::data(&about, crc32, vec![bytes])).await.is_err() {
                        return;
                    }
                }
                // A client that is gone needs no status.
                let _ = to.send(Outgoing::End(Ok(()))).await;
            });
            Ok(frame::response(ReadBody::new(incoming)))
        })
    }
}
