//! Pages of a cache without layers: batches of opaque bytes, with an eventfd for their completions. LMCache, SGLang's hierarchical
//! cache and NIXL use this interface.
//!
//! `kvarts serve --dir DIRECTORY`, then `cargo run --example pages -- http://127.0.0.1:7440`

use std::error::Error;

use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{KvStore, Placed};
use kvarts_contract::batch::{Completion, Lane, Pages, PagesOptions};
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::spec::ModelSpec;
use kvarts_layout::{BlockKey, BlockShape, Identity};
use rustix::event::{PollFd, PollFlags, poll};

const PAGE_BYTES: u64 = 256 << 10;

/// Waits for the next completed batch.
fn completion(pages: &Pages) -> Result<Completion, Box<dyn Error>> {
    let mut done = Vec::new();
    while pages.drain(&mut done) == 0 {
        poll(&mut [PollFd::new(&pages.event_fd(Lane::Load), PollFlags::IN)], None)?;
    }
    done.pop().ok_or_else(|| "no completion".into())
}

fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = std::env::args().nth(1).ok_or("usage: pages http://HOST:PORT")?;
    let client = Client::connect(&ConnectOptions::to(endpoint))?;

    let spec = ModelSpec::opaque("pages", PAGE_BYTES)?;
    let arrangement = Arrangement::new("example", "pages", "1");
    let identity = Identity::new("pages", "1", "bytes", arrangement, spec.geometry(), 1);
    let namespace = client.register(&identity, spec.geometry())?;
    let pages = Pages::new(client.store(), PagesOptions::new(namespace))?;

    // Keys are any 32 bytes.
    let keys: Vec<BlockKey> = (1..=16).map(|n| BlockKey([n; 32])).collect();
    let bytes = usize::try_from(PAGE_BYTES)? * keys.len();
    let pool =
        SharedBuf::new(&client.pool(bytes)?, 0, bytes).ok_or("the pool is too small for the blocks")?;
    let places = Placed::blocks(&BlockShape::opaque(PAGE_BYTES)?, pool.clone(), keys.len() as u32)?;

    pool.fill(0x5a);
    pages.submit_put(&keys, &places)?;
    println!("put: {} pages written", completion(&pages)?.written);
    pages.submit_exists(&keys)?;
    println!("exists: the first {} pages are stored", completion(&pages)?.usable_prefix());
    pool.fill(0);
    pages.submit_get(&keys, &places)?;
    println!("get: the first {} pages are complete and verified", completion(&pages)?.usable_prefix());
    pages.close();
    Ok(())
}
