//! The digests of reads and puts: each message carries the digest of all messages up to and including itself.
//!
//! It covers what says where bytes belong and what is complete as well as the bytes, and it goes on from message to
//! message. So a message that a wire changed, swallowed, brought twice or took from another call is found before
//! anything is done with it. `proto/kvarts/v1/types.proto` says what exactly is digested; this is its one implementation.

use crc32fast::Hasher;
use kvarts_contract::api::Order;

use crate::proto;
use proto::parent::Parent;
use proto::put_request::Part as PutPart;
use proto::read_reply::Part as ReadPart;

/// The digest of what one call has sent so far.
#[derive(Clone, Default, Debug)]
pub struct StreamDigest(Hasher);

impl StreamDigest {
    /// A put begins with nothing.
    pub fn of_put() -> Self {
        Self::default()
    }

    /// A read begins with what it was asked for.
    pub fn of_read(order: Order, request: &proto::ReadRequest) -> Self {
        let mut digest = Self::default();
        digest.number(if order == Order::Blocks { 1 } else { 2 });
        digest.bytes(&request.namespace);
        digest.column(request.column.as_ref());
        let layers = request.layers.unwrap_or_default();
        digest.numbers(&[layers.start.into(), layers.end.into(), of_enum(request.class)]);
        digest.bytes(&request.keys);
        digest
    }

    /// The digest with one more message of a put.
    pub fn put(&mut self, part: &PutPart) -> u32 {
        match part {
            PutPart::Header(header) => self.header(header),
            PutPart::Data(data) => {
                self.numbers(&[2, data.offset]);
                self.bytes(&data.data);
            }
        }
        self.digest()
    }

    /// The digest with the answer of a put.
    pub fn put_reply(&mut self, reply: &proto::PutReply) -> u32 {
        self.numbers(&[3, reply.outcomes.len() as u64]);
        for outcome in &reply.outcomes {
            self.number(of_enum(outcome.what));
            self.error(outcome.error.as_ref());
        }
        self.digest()
    }

    /// The digest with one more message of a read.
    pub fn read(&mut self, part: &ReadPart) -> u32 {
        match part {
            ReadPart::Data(data) => {
                self.about(data, data.data.len());
                self.0.update(&data.data);
            }
            ReadPart::Layer(ready) => self.numbers(&[2, ready.layer.into(), ready.blocks.into()]),
            ReadPart::Block(ready) => self.numbers(&[3, ready.block.into()]),
            ReadPart::End(end) => {
                let (blocks, layers) = (end.usable_blocks.into(), end.usable_layers.into());
                self.numbers(&[4, blocks, layers, end.failures.len() as u64]);
                for failure in &end.failures {
                    self.number(failure.block.into());
                    self.error(failure.error.as_ref());
                }
            }
        }
        self.digest()
    }

    /// The digest with one more message of data, whose `len` bytes were digested before.
    pub fn read_data(&mut self, about: &proto::ReadData, data: &Hasher, len: usize) -> u32 {
        self.about(about, len);
        self.0.combine(data);
        self.digest()
    }

    fn about(&mut self, data: &proto::ReadData, len: usize) {
        let (layer, first, blocks) = (data.layer.into(), data.first_block.into(), data.blocks.into());
        self.numbers(&[1, layer, first, blocks, data.offset, len as u64]);
    }

    fn header(&mut self, header: &proto::PutHeader) {
        self.number(1);
        self.bytes(&header.namespace);
        self.column(header.column.as_ref());
        let (kind, key) = match header.parent.as_ref().and_then(|parent| parent.parent.as_ref()) {
            None | Some(Parent::Root(false)) => (0, &[][..]),
            Some(Parent::Root(true)) => (1, &[][..]),
            Some(Parent::Key(key)) => (2, &key[..]),
        };
        self.number(kind);
        self.bytes(key);
        self.number(header.first_block.map_or(0, |block| u64::from(block) + 1));
        self.bytes(&header.keys);
        self.numbers(&[of_enum(header.layout), of_enum(header.durability), header.expires_after_ms]);
        self.bytes(&header.origins);
    }

    fn column(&mut self, column: Option<&proto::Column>) {
        let column = column.copied().unwrap_or_default();
        let at = column.coordinate.unwrap_or_default();
        self.numbers(&[column.group.into(), at.start.into(), at.count.into(), at.of.into()]);
    }

    fn error(&mut self, error: Option<&proto::Error>) {
        let (kind, reason) = error.map_or((0, 0), |error| (of_enum(error.kind), of_enum(error.reason)));
        self.numbers(&[kind, reason]);
    }

    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn numbers(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|number| self.number(*number));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    fn digest(&self) -> u32 {
        self.0.clone().finalize()
    }
}

/// The digest of a model as it was understood, and of what it is called by.
pub fn of_model(identity: &proto::Identity, namespace: &[u8]) -> u32 {
    let mut digest = StreamDigest::default();
    for text in [
        &identity.model,
        &identity.revision,
        &identity.tokenizer,
        &identity.adapter,
        &identity.kv_dtype,
        &identity.quantisation_recipe,
        &identity.quantisation_scales,
        &identity.rope,
        &identity.window,
        &identity.arrangement_engine,
        &identity.arrangement_layout,
        &identity.arrangement_version,
    ] {
        digest.bytes(text.as_bytes());
    }
    digest.number(identity.block_tokens.into());
    digest.bytes(&identity.spec_fingerprint);
    digest.number(identity.extras.len() as u64);
    for text in identity.extras.iter().flat_map(|(name, value)| [name, value]) {
        digest.bytes(text.as_bytes());
    }
    digest.bytes(namespace);
    digest.digest()
}

/// A name's number; one below zero is no name, and as a number of 8 bytes it is none either.
fn of_enum(number: i32) -> u64 {
    i64::from(number).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn column() -> Option<proto::Column> {
        Some(proto::Column { group: 3, coordinate: Some(proto::Coordinate { start: 1, count: 2, of: 8 }) })
    }

    /// The numbers were computed from the text in `types.proto` by another program.
    #[test]
    fn digests_are_what_the_contract_says() {
        let mut digest = StreamDigest::of_read(
            Order::Layers,
            &proto::ReadRequest {
                namespace: vec![1; 32].into(),
                column: column(),
                keys: vec![5; 64].into(),
                layers: Some(proto::read_request::LayerRange { start: 4, end: 6 }),
                class: 2,
            },
        );
        assert_eq!(digest.digest(), 0x2ef9_1a32);
        let data = Bytes::from_static(b"bytes");
        let data = proto::ReadData { layer: 4, first_block: 1, blocks: 2, offset: 7, data };
        assert_eq!(digest.read(&ReadPart::Data(data)), 0x85e4_5e8e);
        assert_eq!(digest.read(&ReadPart::Layer(proto::LayerReady { layer: 4, blocks: 2 })), 0xc4a1_013c);
        assert_eq!(digest.read(&ReadPart::Block(proto::BlockReady { block: 9 })), 0x3bbb_0129);
        let error = |kind, reason| Some(proto::Error { kind, reason, ..Default::default() });
        let failures = vec![proto::read_end::Failure { block: 1, error: error(1, 1) }];
        let end = proto::ReadEnd { usable_blocks: 1, usable_layers: 2, failures };
        assert_eq!(digest.read(&ReadPart::End(end)), 0xb380_2367);

        let mut digest = StreamDigest::of_put();
        let header = proto::PutHeader {
            namespace: vec![1; 32].into(),
            column: column(),
            parent: Some(proto::Parent { parent: Some(Parent::Key(vec![6; 32].into())) }),
            first_block: Some(7),
            keys: vec![5; 32].into(),
            layout: 1,
            durability: 1,
            expires_after_ms: 9,
            origins: vec![4; 16].into(),
        };
        assert_eq!(digest.put(&PutPart::Header(header)), 0x7335_608c);
        let data = proto::PutData { offset: 7, data: Bytes::from_static(b"bytes") };
        assert_eq!(digest.put(&PutPart::Data(data)), 0x7f62_2422);
        let outcome = |what, error| proto::PutOutcome { what, error };
        let outcomes = vec![outcome(1, None), outcome(3, error(3, 8))];
        assert_eq!(digest.put_reply(&proto::PutReply { outcomes, crc32: 0 }), 0xf928_58b3);

        let mut letters = ('a'..='l').map(String::from);
        let mut next = || letters.next().unwrap();
        let text = |text: &str| text.to_owned();
        let identity = proto::Identity {
            model: next(),
            revision: next(),
            tokenizer: next(),
            adapter: next(),
            kv_dtype: next(),
            quantisation_recipe: next(),
            quantisation_scales: next(),
            rope: next(),
            window: next(),
            arrangement_engine: next(),
            arrangement_layout: next(),
            arrangement_version: next(),
            block_tokens: 16,
            spec_fingerprint: vec![8; 32].into(),
            extras: [(text("y"), text("")), (text("x"), text("1"))].into(),
        };
        assert_eq!(of_model(&identity, &[1; 32]), 0x50a2_fe31);
    }

    #[test]
    fn a_message_is_digested_alike_with_its_bytes_and_with_their_digest() {
        let about = proto::ReadData { layer: 1, first_block: 2, blocks: 3, offset: 4, data: Bytes::new() };
        let mut bytes = Hasher::new();
        bytes.update(b"some bytes");
        let whole = proto::ReadData { data: Bytes::from_static(b"some bytes"), ..about.clone() };
        let (mut one, mut other) = (StreamDigest::of_put(), StreamDigest::of_put());
        for _ in 0..2 {
            let found = one.read_data(&about, &bytes, 10);
            assert_eq!(found, other.read(&ReadPart::Data(whole.clone())));
        }
    }
}
