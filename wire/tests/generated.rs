//! `proto/generated/` is what the contract in `proto/` compiles to: code for messages, clients and servers, and the descriptors
//! for reflection. It is kept so that a build needs no compiler of protobuf, and this test holds it to the contract.
//!
//! `KVARTS_BLESS=1 cargo test -p kvarts-wire --test generated` writes it anew.
#![allow(clippy::disallowed_methods, reason = "reads and writes files of the repository")]

use std::path::{Path, PathBuf};

const FILES: [&str; 10] =
    ["types", "models", "plans", "store", "reads", "admin", "local", "directory", "sessions", "lane"];

fn proto() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto")
}

/// Compiles the contract, and the part of etcd's that is used, into a directory.
fn generate(into: &Path) {
    let proto = proto();
    let files = FILES.map(|name| proto.join(format!("kvarts/v1/{name}.proto")));
    let descriptors = protox::compile(&files, [&proto]).unwrap();
    std::fs::write(into.join("kvarts.v1.bin"), prost::Message::encode_to_vec(&descriptors)).unwrap();
    // Bytes fields share the memory of the message that they came in.
    tonic_prost_build::configure()
        .bytes(".")
        .btree_map(".")
        .codec_path("crate::codec::Bounded")
        .out_dir(into)
        .compile_fds(descriptors)
        .unwrap();
    let etcd = protox::compile([proto.join("etcd/rpc.proto")], [&proto]).unwrap();
    tonic_prost_build::configure().bytes(".").build_server(false).out_dir(into).compile_fds(etcd).unwrap();
}

#[test]
fn what_is_kept_is_what_the_contract_compiles_to() {
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("generated-{}", std::process::id()));
    std::fs::create_dir_all(&made).unwrap();
    generate(&made);
    let kept = proto().join("generated");
    let names = |directory: &Path| {
        let entries = std::fs::read_dir(directory).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let all = names(&made);
    assert_eq!(all.len(), 3, "{all:?}");
    if std::env::var_os("KVARTS_BLESS").is_some() {
        for name in &all {
            std::fs::copy(made.join(name), kept.join(name)).unwrap();
        }
    }
    assert_eq!(all, names(&kept), "proto/generated has other files: KVARTS_BLESS=1 makes them");
    for name in &all {
        let equal = std::fs::read(made.join(name)).unwrap() == std::fs::read(kept.join(name)).unwrap();
        assert!(equal, "{name:?} is not what proto/ compiles to: KVARTS_BLESS=1 makes it anew");
    }
    std::fs::remove_dir_all(&made).unwrap();
}
