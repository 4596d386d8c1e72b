//! Clients that say over HTTP/2 what they are told, and a model of flat pages.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use bytes::Bytes;
use kvarts_wire::digest::StreamDigest;
use kvarts_wire::proto;
use prost::Message;
use tonic::Request;

/// How long a server may take for anything that a test asks.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a page.
pub(crate) const PAGE: usize = 64 << 10;

pub(crate) fn with_token<T>(message: T, token: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

pub(crate) fn key(number: u64) -> [u8; 32] {
    *blake3::hash(&number.to_le_bytes()).as_bytes()
}

pub(crate) fn keys(blocks: std::ops::Range<u64>) -> Bytes {
    blocks.flat_map(key).collect::<Vec<u8>>().into()
}

pub(crate) fn page(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

pub(crate) fn registration() -> proto::RegisterModelRequest {
    let text = |text: &str| text.to_owned();
    let identity = proto::Identity {
        model: text("pages"),
        revision: text("hostile"),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation_recipe: text("none"),
        quantisation_scales: text("none"),
        rope: text("none"),
        window: text("none"),
        arrangement_engine: text("test"),
        arrangement_layout: text("flat"),
        arrangement_version: text("1"),
        block_tokens: 16,
        ..proto::Identity::default()
    };
    proto::RegisterModelRequest {
        identity: Some(identity),
        spec: Some(proto::register_model_request::Spec::OpaquePageBytes(PAGE as u64)),
        columns: Vec::new(),
    }
}

/// The messages of a put of these blocks.
pub(crate) fn put_messages(namespace: &Bytes, blocks: std::ops::Range<u64>) -> Vec<proto::PutRequest> {
    let header =
        proto::PutHeader { namespace: namespace.clone(), keys: keys(blocks.clone()), ..Default::default() };
    let mut parts = vec![proto::put_request::Part::Header(header)];
    for (at, number) in (0u64..).zip(blocks) {
        let (data, offset) = (page(number), at * PAGE as u64);
        parts.push(proto::put_request::Part::Data(proto::PutData { offset, data: data.into() }));
    }
    let mut digest = StreamDigest::of_put();
    let message = |part| proto::PutRequest { crc32: digest.put(&part), part: Some(part) };
    parts.into_iter().map(message).collect()
}

/// An HTTP/2 connection that sends what it is told.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    pub(crate) fn connect(to: &str) -> Self {
        Self::with_window(to, 65_535)
    }

    /// One whose streams take `window` bytes before it makes room for more, which it never does.
    pub(crate) fn with_window(to: &str, window: u32) -> Self {
        let mut raw = Self(TcpStream::connect(to).unwrap());
        raw.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        let [a, b, c, d] = window.to_be_bytes();
        raw.frame(4, 0, 0, &[0, 4, a, b, c, d]);
        raw
    }

    /// A frame. A server that has hung up takes nothing any more, which is its right.
    pub(crate) fn frame(&mut self, kind: u8, flags: u8, stream: u32, body: &[u8]) {
        let length = (body.len() as u32).to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, flags];
        bytes.extend_from_slice(&stream.to_be_bytes());
        bytes.extend_from_slice(body);
        let _ = self.0.write_all(&bytes);
    }

    /// Begins a call; `id` is odd and larger than those before.
    pub(crate) fn call(&mut self, id: u32, path: &str, token: Option<&str>) {
        let mut block = Vec::new();
        let mut field = |name: &str, value: &str| {
            block.extend_from_slice(&[0, name.len() as u8]);
            block.extend_from_slice(name.as_bytes());
            block.push(value.len() as u8);
            block.extend_from_slice(value.as_bytes());
        };
        for (name, value) in
            [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        {
            field(name, value);
        }
        field("content-type", "application/grpc");
        field("te", "trailers");
        if let Some(token) = token {
            field("authorization", &format!("Bearer {token}"));
        }
        // The headers are whole; more of the stream follows.
        self.frame(1, 4, id, &block);
    }

    pub(crate) fn data(&mut self, id: u32, bytes: &[u8], end: bool) {
        self.frame(0, u8::from(end), id, bytes);
    }

    pub(crate) fn reset(&mut self, id: u32) {
        self.frame(3, 0, id, &[0, 0, 0, 8]);
    }

    /// Reads until the server hangs up.
    pub(crate) fn until_closed(mut self) {
        self.0.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "the server goes on");
                    return;
                }
            }
        }
    }
}

/// A message as gRPC frames it.
pub(crate) fn framed(message: &impl Message) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend_from_slice(&(message.encoded_len() as u32).to_be_bytes());
    message.encode(&mut bytes).unwrap();
    bytes
}
