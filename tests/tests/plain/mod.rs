//! Calls of gRPC whose messages are whatever bytes there are.

use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::served::Served;

/// Messages that are whatever bytes there are.
#[derive(Clone, Copy, Default)]
pub(crate) struct Plain;

impl Codec for Plain {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Every method but those that would end the server or change its size.
pub(crate) const METHODS: [&str; 27] = [
    "Models/RegisterModel",
    "Models/ListModels",
    "Store/Put",
    "Store/Match",
    "Store/Exists",
    "Store/Unlock",
    "Store/Pin",
    "Store/Unpin",
    "Store/ListPins",
    "Store/Renew",
    "Store/SetDefaultTtl",
    "Store/SetTtl",
    "Store/Delete",
    "Reads/Get",
    "Reads/GetLayers",
    "Plans/Route",
    "Sessions/Open",
    "Sessions/Fork",
    "Sessions/Extend",
    "Sessions/Renew",
    "Sessions/HandOver",
    "Sessions/Close",
    "Sessions/List",
    "Admin/Stats",
    "Admin/Checkpoint",
    "Admin/Compact",
    "Admin/Scrub",
];

/// How a method answers a message of these bytes.
pub(crate) fn answer(
    served: &Served,
    channel: &Channel,
    token: Option<&str>,
    (method, message): (&str, Vec<u8>),
) -> Result<(), Status> {
    let path = format!("/kvarts.v1.{method}").parse().unwrap();
    served.runtime.block_on(async {
        let mut grpc = tonic::client::Grpc::new(channel.clone());
        grpc.ready().await.unwrap();
        let mut request = Request::new(tokio_stream::iter([Bytes::from(message)]));
        request.set_timeout(Duration::from_secs(30));
        if let Some(token) = token {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        let mut stream = grpc.streaming(request, path, Plain).await?.into_inner();
        while stream.message().await?.is_some() {}
        Ok(())
    })
}
