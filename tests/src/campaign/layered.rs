//! Puts by layers, for workloads with a ledger: nothing of such a put may be found before its seal was asked for.

use std::cell::RefCell;

use kvarts_contract::api::{
    BlockOutcome, Durability, KvStore, LayeredPut, Parent, Placed, PutRequest, StepGate,
};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockShape;
use kvarts_store::engine::Store;

use super::{Ledger, Name, Poller, Put, content, key, register};
use crate::fixture;

/// A put by layers that is under way, from memory that two layers use in turns.
#[derive(Debug)]
pub struct Layered {
    names: Vec<Name>,
    bring: Poller,
    from: Placed,
    shape: BlockShape,
    stream: LayeredPut,
    offered: u32,
}

/// Buffers for the layers of `blocks` blocks: layers with even numbers share one memory, the others another.
fn in_turns(shape: &BlockShape, blocks: u64, skew: u64) -> Vec<SharedBuf> {
    let bytes = |layer: usize| shape.layers()[layer].bytes() * blocks;
    let largest = (0..shape.layers().len()).map(bytes).max().unwrap_or(0);
    let seats = [fixture::memory(largest, skew), fixture::memory(largest, 0)];
    let of = |layer: usize| seats[layer % 2].slice(0, bytes(layer) as usize).expect("as long as the longest");
    (0..shape.layers().len()).map(of).collect()
}

impl Layered {
    /// Begins; a refusal says why the blocks must be put whole.
    pub async fn begin(store: &Store, bring: Poller) -> Result<Self, Reason> {
        Self::begin_by(store, bring, None).await
    }

    /// Begins, with a deadline.
    pub async fn begin_by(store: &Store, bring: Poller, deadline: Option<Nanos>) -> Result<Self, Reason> {
        let Ok(namespace) = register(store) else { panic!("the small model is accepted") };
        let Poller { column, first, count, durable, skew, .. } = bring;
        let (group, coordinate) = fixture::columns()[column];
        let shape = fixture::shape(group, coordinate);
        let names: Vec<Name> = (first..first + count).map(|n| (column, n)).collect();
        let buffers = in_turns(&shape, count, skew);
        let from = Placed::gated_layers(&shape, buffers, count as u32, StepGate::new(0));
        let from = from.expect("a valid placement");
        let begun = store.put_layers(PutRequest {
            namespace,
            group,
            coordinate,
            parent: if first == 0 { Parent::Root } else { Parent::Key(key((column, first - 1))) },
            first_block: None,
            keys: names.iter().map(|name| key(*name)).collect(),
            from: from.clone(),
            layout: None,
            durability: if durable { Durability::Durable } else { Durability::Relaxed },
            expires_after: None,
            origins: None,
            deadline,
        });
        let stream = begun.await.map_err(|_| Reason::Busy("the store is gone"))?.map_err(|error| error.0)?;
        Ok(Self { names, bring, from, shape, stream, offered: 0 })
    }

    /// How many layers there are.
    pub fn layers(&self) -> u32 {
        self.shape.layers().len() as u32
    }

    /// Layers that were offered.
    pub fn offered(&self) -> u32 {
        self.offered
    }

    /// Offers every layer with these pages as its bytes, again and again; returns when they have been written.
    pub async fn forge(&mut self, pages: &[Vec<u8>]) {
        while self.offered < self.layers() {
            self.stream.written(self.offered.saturating_sub(1)).await;
            let layers = fixture::layer_of_chunks(&self.shape);
            let mut pages = pages.iter().cycle();
            let parts = (0u32..).zip(&layers).filter(|(_, layer)| **layer == self.offered);
            for (part, _) in parts {
                for block in 0..self.names.len() as u32 {
                    let to = self.from.chunk(part, block, 4096).expect("it has a place");
                    to.copy_in(0, pages.next().expect("there are pages"));
                }
            }
            self.offered += 1;
            self.stream.offer(self.offered);
            self.stream.written(self.offered).await;
        }
    }

    /// Offers the next layer; returns when it has been written, or the put has ended.
    pub async fn next(&mut self) {
        // Two layers on, its memory was another's.
        self.stream.written(self.offered.saturating_sub(1)).await;
        let layers = fixture::layer_of_chunks(&self.shape);
        for (block, name) in (0..).zip(&self.names) {
            let chunks = content(*name, self.bring.producer);
            for (part, chunk) in (0u32..).zip(&chunks) {
                if layers[part as usize] == self.offered {
                    let to = self.from.chunk(part, block, chunk.len() as u64).expect("it has a place");
                    to.copy_in(0, chunk);
                }
            }
        }
        self.offered += 1;
        self.stream.offer(self.offered);
        self.stream.written(self.offered).await;
    }

    /// Whether it ended by itself.
    pub fn ended(&mut self) -> bool {
        self.why().is_some()
    }

    /// Why it ended by itself, if it did: what its first block was refused for. It is told once.
    pub fn why(&mut self) -> Option<Reason> {
        match self.stream.ended()? {
            Ok(reply) => reply.outcomes.into_iter().find_map(|outcome| match outcome {
                BlockOutcome::Refused(reason) => Some(reason),
                _ => None,
            }),
            Err(error) => Some(error.0),
        }
    }

    /// Seals it and waits for the answer: from here on its blocks may be found, and once that is acknowledged they must
    /// be.
    pub async fn seal(self, ledger: &RefCell<Ledger>) {
        ledger.borrow_mut().tried(&self.names, self.bring.producer);
        let asked = ledger.borrow_mut().next();
        let answer = self.stream.seal().await;
        // Its ticket has been taken; the rest says what the answer is about.
        let (_, ticket) = kvarts_contract::ticket::ticket();
        let put = Put { names: self.names, durable: self.bring.durable, asked, deadline: None, ticket };
        match answer {
            Ok(Ok(reply)) => ledger.borrow_mut().answered(&put, reply),
            Ok(Err(error)) => ledger.borrow_mut().refusals.push(error.0),
            Err(_) => ledger.borrow_mut().refusals.push(Reason::Busy("the store is gone")),
        }
    }
}
