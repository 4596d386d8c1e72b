//! Compiles the public contract in `proto/` without protoc, and keeps the descriptors for reflection.

use std::error::Error;
use std::path::PathBuf;

const FILES: [&str; 9] =
    ["types", "models", "plans", "store", "reads", "admin", "local", "directory", "lane"];

fn main() -> Result<(), Box<dyn Error>> {
    let proto = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("../proto");
    println!("cargo::rerun-if-changed={}", proto.display());
    let files = FILES.map(|name| proto.join(format!("kvarts/v1/{name}.proto")));
    let descriptors = protox::compile(&files, [&proto])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    #[allow(clippy::disallowed_methods, reason = "a build script writes where cargo says")]
    std::fs::write(out.join("kvarts.v1.bin"), prost::Message::encode_to_vec(&descriptors))?;
    // Bytes fields share the memory of the message that they came in.
    tonic_prost_build::configure()
        .bytes(".")
        .btree_map(".")
        .codec_path("crate::codec::Bounded")
        .compile_fds(descriptors)?;
    let etcd = protox::compile([proto.join("etcd/rpc.proto")], [&proto])?;
    tonic_prost_build::configure().bytes(".").build_server(false).compile_fds(etcd)?;
    Ok(())
}
