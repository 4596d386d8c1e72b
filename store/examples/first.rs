//! The shortest way into a store: the state of a prompt is put, found again for a longer prompt, and read layer by layer.
//!
//! `cargo run --example first -- DIRECTORY`

use std::error::Error;

use kvarts_contract::{BufMut, ModelBlocks};
use kvarts_store::home::Home;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os().nth(1).ok_or("which directory? `first DIRECTORY`")?;
    let home = Home::in_directory(directory, 1 << 30)?; // made if it is absent; at most 1 GiB on its disk
    let blocks = ModelBlocks::new(home.store().clone(), "my-engine", "llama-3.1-8b", "0e9e39f", "bf16", 64)?;

    // What an engine computed for a prompt of 128 tokens: the bytes of two blocks, all layers of each.
    let prompt: Vec<u32> = (0..128).collect();
    let mut state = BufMut::zeroed(2 * blocks.block_bytes())?;
    state.fill(0x5a);
    println!("put: {:?}", blocks.put(&prompt, state)?.outcomes);

    // Another prompt that begins with the same tokens: its first two blocks need not be computed again.
    let longer: Vec<u32> = (0..256).collect();
    let usable = blocks.matched(&longer)?;
    println!("match: {usable} of 4 blocks");
    let mut layers = blocks.read_layers(&longer, usable)?;
    for layer in &mut layers {
        // Complete and verified: the engine computes with it while the next one comes.
        println!("layer {}: {} blocks, {} bytes", layer.layer, layer.blocks, layer.bytes.len());
    }
    // Fewer, where a block could not be read: the rest is computed again.
    println!("read: {} blocks", layers.end().map_or(0, |end| end.usable_blocks));
    home.close()?;
    Ok(())
}
