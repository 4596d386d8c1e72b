//! Every decoder of kvarts-layout, and of the cold tier, under libFuzzer: any bytes in, no panic, no hang, bounded memory.
//!
//! `scripts/fuzz TARGET [SECONDS]` builds this with coverage counters and runs one target, named by the variable
//! `KVARTS_FUZZ_TARGET`. Where a decoder is exact, the target also holds it to that: what is accepted encodes to
//! the bytes that were read.
#![no_main]

use std::sync::OnceLock;

use kvarts_layout::format::fuzz;
use kvarts_layout::import::{Dtype, ImportOptions, import_hf_config};
use kvarts_layout::{BlockKey, Coordinate, Geometry, Identity, IndexKey, ModelSpec};

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 17] = [
    ("superblock", fuzz::fuzz_superblock),
    ("segment-header", fuzz::fuzz_segment_header),
    ("record", fuzz::fuzz_record),
    ("footer", fuzz::fuzz_footer),
    ("trailer", fuzz::fuzz_trailer),
    ("checkpoint-header", fuzz::fuzz_checkpoint_header),
    ("checkpoint-chunk", fuzz::fuzz_checkpoint_chunk),
    ("names", fuzz::fuzz_names),
    ("identity", identity),
    ("identity-file", identity_file),
    ("geometry", geometry),
    ("keys", keys),
    ("spec-toml", spec_toml),
    ("config-json", config_json),
    ("chunk", kvarts_layout::codec::fuzz_chunk),
    ("export", kvarts_layout::export::fuzz_export),
    ("cold", kvarts_cold::format::fuzz_cold),
];

fn identity(data: &[u8]) {
    look_at_identity(data);
    // And spliced into a sound encoding, so that what lies behind the first lengths is reached.
    let Some((place, patch)) = data.split_first_chunk::<2>() else { return };
    let mut encoded = SOUND.get_or_init(sound_identity).clone();
    let place = usize::from(u16::from_le_bytes(*place)) % encoded.len();
    let end = encoded.len().min(place + patch.len());
    encoded.splice(place..end, patch.iter().copied());
    look_at_identity(&encoded);
}

static SOUND: OnceLock<Vec<u8>> = OnceLock::new();

fn sound_identity() -> Vec<u8> {
    let fingerprint = "11".repeat(32);
    let json = format!(
        r#"{{"model": "m", "revision": "r", "tokenizer": "none", "adapter": "none", "kv_dtype": "bf16",
        "quantisation": {{"recipe": "none", "scales": "none"}}, "rope": "none", "window": "none",
        "arrangement": {{"engine": "e", "layout": "l", "version": "1"}}, "block_tokens": 256,
        "spec_fingerprint": "{fingerprint}", "tenant_salt": "aabb", "extras": {{"a": "1", "b": ""}}}}"#
    );
    Identity::from_json(&json).and_then(|identity| identity.encode()).expect("a sound identity")
}

fn look_at_identity(data: &[u8]) {
    if let Ok(identity) = Identity::decode(data) {
        assert_eq!(identity.encode().as_deref(), Ok(data));
    }
}

fn identity_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for identity in [Identity::from_json(text), Identity::from_toml(text)].into_iter().flatten() {
        assert_eq!(
            Identity::decode(&identity.encode().expect("a file's identity is complete")),
            Ok(identity)
        );
    }
}

fn geometry(data: &[u8]) {
    let Ok(geometry) = Geometry::decode_canonical(data) else { return };
    assert_eq!(geometry.canonical_bytes(), data);
    for group in geometry.groups() {
        let whole = match group.heads {
            0 => Coordinate::Replicated,
            heads => Coordinate::heads(0, heads, heads).expect("all heads"),
        };
        let _ = geometry.shape(group.group, whole, geometry.entry_tokens());
    }
    let _ = geometry.stream_bytes_per_token(geometry.entry_tokens());
    let _ = geometry.boundary_bytes(geometry.entry_tokens());
}

fn keys(data: &[u8]) {
    if let Some(key) = IndexKey::decode(data) {
        assert_eq!(key.encode().as_slice(), data);
    }
    if let Ok(raw) = <[u8; 8]>::try_from(data) {
        let raw = u64::from_le_bytes(raw);
        assert!(Coordinate::from_u64(raw).is_none_or(|coordinate| coordinate.to_u64() == raw));
    }
    let _ = BlockKey::from_foreign(data);
    let _ = kvarts_layout::key::split_vllm_offload_key(data);
}

fn spec_toml(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(spec) = ModelSpec::parse(text) {
        assert_eq!(ModelSpec::parse(&spec.to_toml()).as_ref(), Ok(&spec));
    }
}

fn config_json(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for kv_dtype in [None, Some(Dtype::Fp8), Some(Dtype::Int8), Some(Dtype::Nvfp4)] {
        let options = ImportOptions { name: Some("fuzz".to_owned()), kv_dtype, ..ImportOptions::default() };
        if let Ok(spec) = import_hf_config(text, &options) {
            assert_eq!(ModelSpec::parse(&spec.to_toml()).as_ref(), Ok(&spec));
        }
    }
}

static CHOSEN: OnceLock<Target> = OnceLock::new();

fn choose() -> Target {
    let name = std::env::var("KVARTS_FUZZ_TARGET").unwrap_or_default();
    match TARGETS.iter().find(|(known, _)| *known == name) {
        Some((_, target)) => *target,
        None => {
            let known: Vec<&str> = TARGETS.iter().map(|(known, _)| *known).collect();
            eprintln!("KVARTS_FUZZ_TARGET is `{name}`: set it to one of {}", known.join(", "));
            std::process::exit(2)
        }
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| CHOSEN.get_or_init(choose)(data));
