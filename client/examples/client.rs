//! Reads and puts blocks of a running server: over shared memory on the server's host, and over gRPC on other hosts.
//!
//! `kvarts serve --dir DIRECTORY`, then `cargo run --example client -- http://127.0.0.1:7440`

use std::error::Error;

use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{KvStore, Placed, PutRequest, ReadRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::Identity;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::key::text_keys;
use kvarts_layout::spec::shipped;

const BLOCK_TOKENS: u32 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = std::env::args().nth(1).ok_or("usage: client http://HOST:PORT")?;
    let client = Client::connect(&ConnectOptions::to(endpoint))?;
    println!("path: {}", client.path().name());

    let spec = shipped::load("llama-3.1-8b").ok_or("the model is not shipped with kvarts")?;
    let geometry = spec.geometry();
    let group = geometry.groups().first().ok_or("the model has no state")?.group;
    let coordinate = geometry.coordinate(group, 1, 0)?;
    let shape = geometry.shape(group, coordinate, BLOCK_TOKENS)?;
    // All values that determine the bytes of a block. Two engines share blocks if all of these values are equal.
    let arrangement = Arrangement::new("example", "canonical", "1");
    let identity = Identity::new("llama-3.1-8b", "0e9e39f", "bf16", arrangement, geometry, BLOCK_TOKENS);
    let namespace = client.register(&identity, geometry)?;

    let prompt: Vec<u32> = (0..4 * BLOCK_TOKENS).collect();
    let keys = text_keys(&prompt, BLOCK_TOKENS);
    let (blocks, bytes) = (keys.len() as u32, usize::try_from(shape.block_bytes())? * keys.len());

    // On the server's host, the server's disks write directly into this memory. On other hosts it is ordinary memory.
    let pool =
        SharedBuf::new(&client.pool(bytes)?, 0, bytes).ok_or("the pool is too small for the blocks")?;
    pool.fill(0x5a);
    let from = Placed::blocks(&shape, pool.clone(), blocks)?;
    let put = PutRequest::prompt(namespace, group, coordinate, keys.clone(), from);
    println!("put: {:?}", block_on(client.put(put))??.outcomes);

    pool.fill(0);
    let into = Placed::blocks(&shape, pool.clone(), blocks)?;
    let end = block_on(client.get_into(ReadRequest::new(namespace, group, coordinate, keys, into)))?;
    println!("read: {} blocks, {} failures", end.usable_blocks, end.failures.len());
    Ok(())
}
