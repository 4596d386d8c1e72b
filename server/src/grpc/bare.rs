//! What a server is measured beside: the same transport and the same messages, from memory or out of a file, with nothing
//! behind them.

use std::convert::Infallible;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use crc32fast::Hasher;
use kvarts_store::api::Order;
use prost::Message;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use super::digest::StreamDigest;
use super::frame::{self, Outgoing, ReadBody};
use super::{limits, services};
use kvarts_wire::proto;

/// Answers every read with so many messages of bytes that it has. Of the request it takes what digests begin with, and
/// nothing else.
#[derive(Clone, Debug)]
pub struct Bare {
    source: Source,
    /// How many messages.
    messages: u64,
}

#[derive(Clone, Debug)]
enum Source {
    /// One message's bytes, shared and not copied: the processor has them in its cache.
    Memory(Bytes, Hasher),
    /// A file, read message by message into memory that is used again, each compared with its digest: the least that
    /// whoever serves verified bytes from a disk has to do, were the disk as fast as memory.
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

/// Memory of a message, which comes back when it has been sent.
struct Lent {
    bytes: Vec<u8>,
    home: Arc<Stored>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Lent {
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
        let lent = Bytes::from_owner(Lent { bytes, home: Arc::clone(self) });
        (digested.clone().finalize() == *self.digests.get(which)?).then_some((lent, digested))
    }
}

impl Bare {
    /// So many messages of these bytes.
    pub fn of_memory(bytes: &Bytes, messages: u64) -> Self {
        let mut digested = Hasher::new();
        digested.update(bytes);
        Self { source: Source::Memory(bytes.clone(), digested), messages }
    }

    /// So many messages of `each` bytes of a file whose content is `bytes`, from its beginning again and again.
    pub fn of_file(file: File, bytes: &[u8], each: usize, messages: u64) -> Self {
        let digests = bytes.chunks_exact(each).map(crc32fast::hash).collect();
        let stored = Stored { file, each, digests, spare: Mutex::default() };
        Self { source: Source::File(Arc::new(stored)), messages }
    }
}

impl NamedService for Bare {
    const NAME: &'static str = proto::reads_server::SERVICE_NAME;
}

impl Service<http::Request<Body>> for Bare {
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
                // Who asks for nothing that can be read finds other digests.
                let asked = services::one_message(request.into_body()).await.unwrap_or_default();
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
            let mut response = http::Response::new(Body::new(ReadBody::new(incoming)));
            let kind = http::HeaderValue::from_static("application/grpc");
            response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
            Ok(response)
        })
    }
}
