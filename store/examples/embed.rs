//! A store inside this process: put the blocks of a prompt, look the prompt up, read it back layer by layer.
//!
//! `cargo run --example embed -- DIRECTORY`

use std::error::Error;

use kvarts_contract::api::{KvStore, MatchRequest, Placed, PutRequest, ReadEvent, ReadRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::BufMut;
use kvarts_layout::Identity;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::key::text_keys;
use kvarts_layout::spec::shipped;
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions};

const BLOCK_TOKENS: u32 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os().nth(1).ok_or("usage: embed DIRECTORY")?;
    let options = Options { budget_bytes: 1 << 30, segment_bytes: 32 << 20, ..Options::default() };
    let home = Home::open(&HomeOptions {
        directories: vec![directory.into()],
        store: options,
        ..HomeOptions::default()
    })?;
    let store = home.store();

    // The shape of a block of this model, and the parts that a usable prefix needs.
    let spec = shipped::load("llama-3.1-8b").ok_or("the model is not shipped with kvarts")?;
    let geometry = spec.geometry();
    let group = geometry.groups().first().ok_or("the model has no state")?.group;
    let coordinate = geometry.coordinate(group, 1, 0)?;
    let shape = geometry.shape(group, coordinate, BLOCK_TOKENS)?;
    // All values that determine the bytes of a block. Two engines share blocks if all of these values are equal.
    let arrangement = Arrangement::new("example", "canonical", "1");
    let identity = Identity::new("llama-3.1-8b", "0e9e39f", "bf16", arrangement, geometry, BLOCK_TOKENS);
    let namespace = store.register(&identity, geometry)?;

    // A prompt of eight blocks, whose attention state would come from the engine.
    let prompt: Vec<u32> = (0..8 * BLOCK_TOKENS).collect();
    let keys = text_keys(&prompt, BLOCK_TOKENS);
    let bytes = usize::try_from(shape.block_bytes())? * keys.len();
    let mut state = BufMut::zeroed(bytes)?;
    state.fill(0x5a);
    let from = Placed::blocks(&shape, state, keys.len() as u32)?;
    let put = PutRequest::prompt(namespace, group, coordinate, keys.clone(), from);
    println!("put: {:?}", block_on(store.put(put))??.outcomes);

    // Looks up how many blocks of a longer prompt are stored.
    let longer: Vec<u32> = (0..12 * BLOCK_TOKENS).collect();
    let asked = text_keys(&longer, BLOCK_TOKENS);
    let found = store.match_prefix(&MatchRequest {
        namespace,
        keys: &asked,
        requirements: &spec.stored_requirements(BLOCK_TOKENS, 1)?,
        recompute_tokens_max: 0,
        lease: None,
        plan: None,
    })?;
    println!("match: {} of {} blocks", found.usable.longest.blocks, asked.len());

    // Each layer is complete and verified when the read announces it. The engine can compute with this layer while the next layer is read.
    let into = Placed::blocks(&shape, BufMut::zeroed(bytes)?, keys.len() as u32)?;
    let read = store.read(ReadRequest::new(namespace, group, coordinate, keys, into))?;
    let mut layers = 0;
    let end = loop {
        match read.next_blocking() {
            ReadEvent::Layer { .. } => layers += 1,
            ReadEvent::End(end) => break end,
            _ => {}
        }
    };
    println!("read: {layers} layers of {} blocks, {} failures", end.usable_blocks, end.failures.len());
    drop(read);
    home.close()?;
    Ok(())
}
