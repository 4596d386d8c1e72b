//! A store with a few blocks, made from an export that is written here, and the program that works on it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scratch::Scratch;
use kvarts_layout::export::{ExportedBlock, Frame, HEAD_BYTES, Head, Reading, Run, Writing};
use kvarts_layout::format::body::Parent;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::{BlockKey, ContentId, Coordinate, Geometry, Group, Identity, OriginId};
use serde_json::Value;

pub(crate) const BLOCK: usize = 5000;

pub(crate) fn kvarts(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts")).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

pub(crate) fn good(arguments: &[&str]) -> String {
    let (code, out, err) = kvarts(arguments);
    assert_eq!((code, err.as_str()), (0, ""), "{arguments:?}: {out}");
    out
}

pub(crate) fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&good(arguments)).unwrap()
}

pub(crate) fn identity(revision: &str) -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("small"),
        revision: text(revision),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: geometry().fingerprint(),
        tenant_salt: TenantSalt(vec![]),
        extras: BTreeMap::new(),
    }
}

pub(crate) fn geometry() -> Geometry {
    Geometry::opaque(BLOCK as u64).unwrap()
}

pub(crate) fn bytes(n: u8) -> Vec<u8> {
    (0..BLOCK).map(|at| (at as u8).wrapping_mul(n | 1) ^ (at >> 8) as u8).collect()
}

pub(crate) fn run(revision: &str, keys: std::ops::Range<u8>, parent: Parent, first: u32) -> (Run, Vec<u8>) {
    let payload: Vec<u8> = keys.clone().flat_map(bytes).collect();
    let block = |n: u8| ExportedBlock {
        key: BlockKey([n; 32]),
        origin: OriginId([n ^ 0x55; 16]),
        content: ContentId(*blake3::hash(&bytes(n)).as_bytes()),
        digests: vec![crc32fast::hash(&bytes(n))],
    };
    let run = Run {
        namespace: identity(revision).namespace_id().unwrap(),
        coordinate: Coordinate::Replicated,
        group: Group(0),
        created_ms: 1_700_000_000_000,
        expires_ms: 0,
        first_block: Some(first),
        parent,
        block_bytes: BLOCK as u64,
        blocks: keys.map(block).collect(),
    };
    (run, payload)
}

/// A prompt of six blocks that forks behind the fourth, and another model revision.
pub(crate) fn sample() -> Vec<u8> {
    let mut writing = Writing::new();
    let mut file = writing.begin(7).unwrap();
    file.extend(writing.spec(&geometry()).unwrap());
    for revision in ["r1", "r2"] {
        file.extend(writing.identity(&identity(revision)).unwrap());
    }
    for (run, payload) in [
        run("r1", 1..5, Parent::Root, 0),
        run("r1", 5..7, Parent::Key([4; 32]), 4),
        run("r1", 20..21, Parent::Key([4; 32]), 4),
        run("r2", 1..3, Parent::Root, 0),
    ] {
        file.extend(writing.run(&run).unwrap());
        file.extend(payload);
    }
    file.extend(writing.end().unwrap());
    file
}

pub(crate) type Named = (String, BlockKey, OriginId, ContentId, Vec<u32>);

/// Every block of an export, each verified.
pub(crate) fn blocks(path: &Path) -> BTreeSet<Named> {
    let file = std::fs::read(path).unwrap();
    let mut reading = Reading::new();
    let mut rest = file.as_slice();
    let mut all = BTreeSet::new();
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let head = Head::decode(head).unwrap();
        let (body, behind) = behind.split_at(head.body_bytes());
        let (payload, behind) = behind.split_at(head.payload_bytes() as usize);
        rest = behind;
        let Frame::Run(run) = reading.frame(&head, body).unwrap() else { continue };
        let shape = run.shape(reading.namespace(run.namespace).unwrap()).unwrap();
        for (at, bytes) in payload.chunks(run.block_bytes as usize).enumerate() {
            run.verify(at, &shape, bytes).unwrap();
        }
        let named = run.blocks.iter().map(|block| {
            (run.namespace.to_string(), block.key, block.origin, block.content, block.digests.clone())
        });
        all.extend(named);
    }
    assert!(reading.has_ended());
    all
}

/// A store with the sample in it, and the file that it came from.
pub(crate) fn filled(scratch: &Scratch) -> (String, PathBuf) {
    let file = scratch.path("sample");
    std::fs::write(&file, sample()).unwrap();
    let store = scratch.path("store").display().to_string();
    let arguments =
        ["import", &file.display().to_string(), "--into", &store, "--create", "--segment-mib", "1", "--json"];
    let report = json(&arguments);
    assert_eq!((&report["stored"], &report["refused"]), (&9.into(), &0.into()), "{report}");
    (store, file)
}
