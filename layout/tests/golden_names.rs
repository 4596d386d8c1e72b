//! Golden vectors of every name in the format: `testdata/golden_names.json` holds inputs and results, so that
//! another language can check that it computes the same names. This test computes all of them anew.
//!
//! `KVARTS_BLESS=1 cargo test -p kvarts-layout --test golden_names` writes the file: only when the names are
//! meant to change, which orphans every stored block.

use kvarts_layout::coord::{coordinates, tensor_parallel};
use kvarts_layout::identity::{Arrangement, NONE, Quantisation, TenantSalt, namespace_of};
use kvarts_layout::key::{ROOT_KEY, split_vllm_offload_key};
use kvarts_layout::{
    BlockExtra, BlockKey, Coordinate, Fingerprint, Group, Identity, IndexKey, KeyChain, NamespaceId,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/golden_names.json");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn plain_identity() -> Identity {
    Identity {
        model: "meta-llama/Llama-3.1-8B-Instruct".into(),
        revision: "0e9e39f249a16976918f6564b8830bc894c89659".into(),
        tokenizer: "0e9e39f249a16976918f6564b8830bc894c89659".into(),
        adapter: NONE.into(),
        kv_dtype: "bf16".into(),
        quantisation: Quantisation { recipe: NONE.into(), scales: NONE.into() },
        rope: "llama3 theta=500000 factor=8 low=1 high=4 original=8192".into(),
        window: NONE.into(),
        arrangement: Arrangement { engine: "vllm".into(), layout: "NHD".into(), version: "1".into() },
        block_tokens: 16,
        spec_fingerprint: Fingerprint([0x11; 32]),
        tenant_salt: TenantSalt::default(),
        extras: BTreeMap::new(),
    }
}

fn rich_identity() -> Identity {
    Identity {
        model: "deepseek-ai/DeepSeek-V4-Pro".into(),
        adapter: "support-bot@7".into(),
        kv_dtype: "fp8_e4m3".into(),
        quantisation: Quantisation {
            recipe: "448 fp8 + 64 bf16, ue8m0 per 64".into(),
            scales: "in entry".into(),
        },
        window: "128".into(),
        arrangement: Arrangement {
            engine: "sglang".into(),
            layout: "page_first".into(),
            version: "0.5.23".into(),
        },
        block_tokens: 256,
        tenant_salt: TenantSalt((0..16).collect()),
        extras: [
            ("indexer", "fp4"),
            ("\u{e9}tat", "gr\u{f6}\u{df}e"),
            ("Upper", ""),
            ("a", "1"),
            ("ab", "2"),
        ]
        .map(|(name, value)| (name.into(), value.into()))
        .into(),
        ..plain_identity()
    }
}

fn identities() -> Value {
    let vector = |identity: Identity| {
        let encoded = identity.encode().unwrap();
        assert_eq!(Identity::decode(&encoded).as_ref(), Ok(&identity));
        assert_eq!(identity.namespace_id(), Ok(namespace_of(&encoded)));
        json!({ "fields": identity, "canonical": hex(&encoded), "namespace_id": namespace_of(&encoded).to_string() })
    };
    json!([vector(plain_identity()), vector(rich_identity())])
}

fn refused_identities() -> Value {
    let encoded = plain_identity().encode().unwrap();
    let next_version =
        encoded.iter().enumerate().map(|(i, &byte)| if i == 14 { b'2' } else { byte }).collect();
    let no_model = [&encoded[..16], &[0; 4], &encoded[20 + plain_identity().model.len()..]].concat();
    let refused = |why: &str, bytes: Vec<u8>| {
        assert!(Identity::decode(&bytes).is_err(), "{why}");
        json!({ "why": why, "bytes": hex(&bytes) })
    };
    json!([
        refused("cut short", encoded[..encoded.len() - 1].to_vec()),
        refused("a byte too many", [encoded.as_slice(), &[0]].concat()),
        refused("another version", next_version),
        refused("an empty model", no_model),
    ])
}

/// `(name, the same as a program would say it, the extra)`.
fn extras() -> Vec<(Value, Vec<u8>)> {
    let mut media = BlockExtra::new();
    media.content(3, &[0xaa; 32]).unwrap().content(0, b"image-uuid").unwrap();
    let mut all = media.clone();
    all.embeddings(&[0xbb; 32]).unwrap().salt(b"request").unwrap();
    let (aa, bb) = (hex(&[0xaa; 32]), hex(&[0xbb; 32]));
    let contents = json!([{ "at": 3, "name": aa }, { "at": 0, "name": hex(b"image-uuid") }]);
    vec![
        (json!({}), BlockExtra::new().encode()),
        (json!({ "contents": contents }), media.encode()),
        (json!({ "contents": contents, "embeddings": [bb], "salts": [hex(b"request")] }), all.encode()),
    ]
}

fn chains() -> Value {
    let chain = |blocks: Vec<(Vec<u32>, Vec<u8>)>| {
        let mut chain = KeyChain::new();
        let vector = blocks.into_iter().map(|(tokens, extra)| {
            let key = chain.push(&tokens, &extra).to_string();
            json!({ "tokens": tokens, "extra": hex(&extra), "key": key })
        });
        Value::from_iter(vector)
    };
    let text = |from: u32, count: u32| ((from..from + count).collect::<Vec<u32>>(), Vec::new());
    let extra = |index: usize| extras()[index].1.clone();
    json!([
        chain(vec![text(0, 4), text(4, 4), text(8, 4)]),
        chain(vec![(vec![], vec![]), (vec![u32::MAX, 0, 128_000], vec![])]),
        chain(vec![text(1, 2), (vec![3, 4], extra(1)), (vec![5, 6], extra(2)), text(7, 2)]),
    ])
}

/// Blocks that cross every internal buffer: `token i` of a chain is `i * 2654435761 mod 2^32`.
fn generated_chains() -> Value {
    let vector = |block_tokens: u32, blocks: u32| {
        let tokens: Vec<u32> = (0..block_tokens * blocks).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let mut keys = Vec::new();
        KeyChain::new().push_all(&tokens, block_tokens, |_| &[], |key| keys.push(key.to_string()));
        json!({ "block_tokens": block_tokens, "keys": keys })
    };
    json!([vector(16, 3), vector(256, 3), vector(512, 2), vector(10_000, 2)])
}

fn foreign_keys() -> Value {
    let counting: Vec<u8> = (0..64).collect();
    let vector = |bytes: &[u8]| {
        let key = BlockKey::from_foreign(bytes).unwrap();
        json!({ "bytes": hex(bytes), "key": key.to_string() })
    };
    let text = hex(&counting[..32]);
    json!([
        vector(&counting[..1]),
        vector(&counting[..8]),
        vector(&counting[..31]),
        vector(&counting[..32]),
        vector(&counting[..33]),
        vector(&counting),
        vector(text.as_bytes()),
    ])
}

fn offload_keys() -> Value {
    let vector = |hash: &[u8], group: u32| {
        let bytes = [hash, &group.to_be_bytes()].concat();
        let (key, found) = split_vllm_offload_key(&bytes).unwrap();
        assert_eq!(found, Group(group));
        json!({ "bytes": hex(&bytes), "key": key.to_string(), "group": group })
    };
    json!([vector(&[0x42; 32], 0), vector(&[0x42; 32], 258), vector(&[0x42; 8], 1)])
}

fn coordinate_json(coordinate: Coordinate) -> Value {
    match coordinate {
        Coordinate::Replicated => json!("replicated"),
        Coordinate::Heads { start, count, of } => json!({ "start": start, "count": count, "of": of }),
    }
}

fn coordinate_vectors() -> Value {
    let all = [
        Coordinate::Replicated,
        Coordinate::heads(0, 1, 1).unwrap(),
        Coordinate::heads(6, 2, 8).unwrap(),
        Coordinate::heads(0x0102, 0x0304, 0x0506).unwrap(),
        Coordinate::heads(0, u16::MAX, u16::MAX).unwrap(),
    ];
    all.into_iter()
        .map(|coordinate| {
            json!({ "coordinate": coordinate_json(coordinate), "encoded": hex(&coordinate.to_u64().to_le_bytes()) })
        })
        .collect()
}

fn splits() -> Value {
    let vector = |(heads, ranks): (u16, u16)| {
        let by_rank: Value =
            (0..ranks).map(|rank| coordinate_json(tensor_parallel(heads, ranks, rank).unwrap())).collect();
        let distinct: Value = coordinates(heads, ranks).unwrap().into_iter().map(coordinate_json).collect();
        json!({ "heads": heads, "ranks": ranks, "by_rank": by_rank, "distinct": distinct })
    };
    [(0, 2), (8, 1), (8, 4), (8, 8), (2, 8)].into_iter().map(vector).collect()
}

fn index_keys() -> Value {
    let key = KeyChain::new().push(&[1, 2, 3, 4], &[]);
    let namespace = plain_identity().namespace_id().unwrap();
    let vector = |group: u32, coordinate: Coordinate| {
        let index = IndexKey { namespace, key, group: Group(group), coordinate };
        assert_eq!(IndexKey::decode(&index.encode()), Some(index));
        json!({
            "namespace_id": namespace.to_string(),
            "key": key.to_string(),
            "group": group,
            "coordinate": coordinate_json(coordinate),
            "encoded": hex(&index.encode()),
        })
    };
    json!([vector(0, Coordinate::Replicated), vector(0x0102_0304, Coordinate::heads(2, 2, 8).unwrap())])
}

fn refused_index_keys() -> Value {
    let zero = IndexKey { namespace: NamespaceId::default(), ..IndexKey::default() }.encode();
    let with_coordinate = |raw: u64| [&zero[..68], &raw.to_le_bytes()].concat();
    let refused = |why: &str, bytes: Vec<u8>| {
        assert_eq!(IndexKey::decode(&bytes), None, "{why}");
        json!({ "why": why, "bytes": hex(&bytes) })
    };
    json!([
        refused("a byte too few", zero[..75].to_vec()),
        refused("a byte too many", [zero.as_slice(), &[0]].concat()),
        refused("an empty head range", with_coordinate(8 << 32)),
        refused("heads past the last", with_coordinate(7 | 2 << 16 | 8 << 32)),
        refused("padding that is not zero", with_coordinate(1 << 16 | 8 << 32 | 1 << 48)),
    ])
}

fn vectors() -> Value {
    let extras: Value = extras()
        .into_iter()
        .map(|(items, extra)| json!({ "items": items, "encoded": hex(&extra) }))
        .collect();
    json!({
        "about": "Bytes are hexadecimal. Names in `contents`, embeddings and salts are bytes too. See docs/FORMAT.md.",
        "identities": identities(),
        "refused_identities": refused_identities(),
        "root_key": ROOT_KEY.to_string(),
        "block_extras": extras,
        "chains": chains(),
        "generated_chains": generated_chains(),
        "foreign_keys": foreign_keys(),
        "vllm_offload_keys": offload_keys(),
        "coordinates": coordinate_vectors(),
        "tensor_parallel": splits(),
        "index_keys": index_keys(),
        "refused_index_keys": refused_index_keys(),
    })
}

#[test]
#[allow(clippy::disallowed_methods, reason = "blessing writes the golden file; no store is involved")]
fn every_name_is_computed_as_in_the_golden_file() {
    let computed = vectors();
    if std::env::var_os("KVARTS_BLESS").is_some() {
        std::fs::write(PATH, serde_json::to_string_pretty(&computed).unwrap() + "\n").unwrap();
    }
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(PATH).unwrap()).unwrap();
    for (section, expected) in golden.as_object().unwrap() {
        assert_eq!(computed.get(section), Some(expected), "section {section} differs from {PATH}");
    }
    assert_eq!(computed.as_object().unwrap().len(), golden.as_object().unwrap().len());
    // The other way round too: what a reader of the file makes of its fields.
    for vector in golden["identities"].as_array().unwrap() {
        let identity = Identity::from_json(&vector["fields"].to_string()).unwrap();
        assert_eq!(identity.namespace_id().unwrap().to_string(), vector["namespace_id"]);
    }
}
