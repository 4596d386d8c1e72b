//! The shortest use of a store: puts the state of a prompt, finds this state for a longer prompt, and reads it layer by layer.
//!
//! `cargo run --example first -- DIRECTORY`

use std::error::Error;

use kvarts_contract::{BufMut, ModelBlocks};
use kvarts_store::home::Home;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os().nth(1).ok_or("usage: first DIRECTORY")?;
    let home = Home::in_directory(directory, 1 << 30)?; // created if absent; at most 1 GiB on its disk
    let blocks = ModelBlocks::new(home.store().clone(), "my-engine", "llama-3.1-8b", "0e9e39f", "bf16", 64)?;

    // What an engine computed for a prompt of 128 tokens: the bytes of two blocks, all layers of each.
    let prompt: Vec<u32> = (0..128).collect();
    let mut state = BufMut::zeroed(2 * blocks.block_bytes())?;
    state.fill(0x5a);
    println!("put: {:?}", blocks.put(&prompt, state)?.outcomes);

    // Another prompt that begins with the same tokens: the engine need not compute its first two blocks again.
    let longer: Vec<u32> = (0..256).collect();
    let usable = blocks.matched(&longer)?;
    println!("match: {usable} of 4 blocks");
    let mut layers = blocks.read_layers(&longer, usable)?;
    for layer in &mut layers {
        // This layer is complete and verified: the engine computes with it while the next layer is read.
        println!("layer {}: {} blocks, {} bytes", layer.layer, layer.blocks, layer.bytes.len());
    }
    // If a block could not be read, there are fewer blocks, and the engine computes the rest.
    println!("read: {} blocks", layers.end().map_or(0, |end| end.usable_blocks));
    home.close()?;
    Ok(())
}
