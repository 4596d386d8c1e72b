//! The shipped numbers, the encoding, the text form and the shapes of specs.

use proptest::prelude::*;

use super::*;
use crate::coord::{Coordinate, TpError};
use crate::shape::{BlockShape, MAX_CHUNK_BYTES};

const STREAMS: Group = Group(0);
const WINDOWS: Group = Group(1);
const STATES: Group = Group(2);

fn load(name: &str) -> ModelSpec {
    shipped::load(name).unwrap()
}

/// Name, layers, stream bytes of one token (numerator, denominator), stored bytes at a boundary of 256-token
/// blocks as windows and states, fingerprint.
type Row = (&'static str, usize, (u64, u64), u64, u64, &'static str);

#[rustfmt::skip]
const SIZES: &[Row] = &[
    ("llama-3.1-8b", 32, (131_072, 1), 0, 0, "0e08dfdcaa6999a2b7155f520482754820a220b5ce079002582619e025bc5c95"),
    ("llama-3.1-70b", 80, (327_680, 1), 0, 0, "1fe8921de3e0c12d455811729cefcdb5f58f0b7e0e8d3697ac0e108870b157b0"),
    ("mistral-small-24b", 40, (163_840, 1), 0, 0, "b7bb642f59ec0e8e65d7fe0228dc901bf4e6d87c3511d647414e9619f66bfe8a"),
    ("qwen3-32b", 64, (262_144, 1), 0, 0, "87fa8092f56cae7461ea70db0f315bc7c13a2e03d2f4321b9a893ada70df33bc"),
    ("qwen3-coder-30b-a3b", 48, (98_304, 1), 0, 0, "ca4cb8528af6433d031c3fd9b92af88d3a01aab88d959e0933b877053b1dc182"),
    ("glm-4.5", 92, (376_832, 1), 0, 0, "86a66c9d99da0ced9b54df7e24efaacc83b8ce34e2db5bbbf707e582dbb1780a"),
    ("minimax-m2", 62, (253_952, 1), 0, 0, "b97b04974b44f7a4ac31e9b6745adf2cbe72d0c0a96e068de85881eb7e08883f"),
    ("kimi-k2", 61, (70_272, 1), 0, 0, "4e5a23f5b7d8c3952e9e3973e14124696ed970d1db8bf16c3b71089c2cc27bce"),
    ("kimi-k2-fp8", 61, (40_016, 1), 0, 0, "66e098772ac6a567dd8db00659c1870491b986261bed5e60413aaaca1149f506"),
    ("deepseek-v3", 61, (70_272, 1), 0, 0, "4e5a23f5b7d8c3952e9e3973e14124696ed970d1db8bf16c3b71089c2cc27bce"),
    ("deepseek-v3.2", 61, (48_068, 1), 0, 0, "dc9943c1815227ba01bcdd1dab79f6464320a370a154bb1584376720fcda117f"),
    ("gpt-oss-20b", 24, (24_576, 1), 3_145_728, 0, "f1f1623af490f82a3669d20a43acecd554b497cb75ce0b1dac38916002d3ddea"),
    ("gpt-oss-120b", 36, (36_864, 1), 4_718_592, 0, "1fa3487e93a798804c87339fa99c0195a62314021dc55a5f7ed5d9c192921550"),
    ("gemma-3-27b", 62, (81_920, 1), 436_207_616, 0, "fee2b3d8e60287e817798079454dfe6933e117c1d5ca1d12f7044abde558c404"),
    ("qwen3-next-80b", 48, (24_576, 1), 0, 77_266_944, "9a38fcafa29d68be83f85663c58feb046db9865a12c8d03717738e996020a3f4"),
    ("qwen3-next-80b-bf16state", 48, (24_576, 1), 0, 39_518_208, "50ee5709f45cd07dd8b6c83d8aced9d9687ba7f6da4609c0ba4e11bed8da0b0f"),
    ("qwen3.5-397b", 60, (30_720, 1), 0, 192_061_440, "98723505326a0a955f43f3f1140fd668756e6cbdc80eadd418fcf04c5936404b"),
    ("qwen3.5-397b-bf16state", 60, (30_720, 1), 0, 97_689_600, "c89474515ce02f052aa12d87bbd42c4d8c0c33e55098a420b42fe39d3bf1d2f2"),
    ("deepseek-v4-pro", 61, (705_464, 128), 4_559_872, 2_457_600, "9de1597f9f88c8e2c0af0b4fcd333e4a5129187f51b093046eb6013189f6e9f9"),
    ("deepseek-v4-pro-fp4idx", 61, (644_024, 128), 4_559_872, 2_457_600, "1fa3ce108076cc5883ce03d8745769141f45ad77957cee8412fb6177059646c2"),
    ("deepseek-v4-flash", 43, (15_401, 4), 3_214_336, 1_720_320, "9d0709d5ba20864b2b6e232c00233744c1f078066d82739d4113626f237ce3f1"),
    ("deepseek-v4-flash-fp4idx", 43, (14_057, 4), 3_214_336, 1_720_320, "40f68cefbb990e591381718edaf125aad368d77163624484cff7fb8198fbb664"),
];

#[test]
fn every_shipped_model_has_the_published_sizes_and_its_pinned_fingerprint() {
    assert_eq!(SIZES.len(), shipped::names().len(), "a row for every model");
    for &(name, layers, (numerator, denominator), windows, states, fingerprint) in SIZES {
        let spec = load(name);
        let geometry = spec.geometry();
        let bytes = |group| geometry.group_bytes(group, 256).unwrap_or(0);
        assert_eq!(geometry.layers().len(), layers, "{name}");
        let stream = Ratio::new(numerator, denominator).unwrap();
        assert_eq!(geometry.stream_bytes_per_token(256), Ok(stream), "{name}");
        assert_eq!((bytes(WINDOWS), bytes(STATES)), (windows, states), "{name}");
        assert_eq!(geometry.boundary_bytes(256), Ok(windows + states), "{name}");
        assert_eq!(spec.fingerprint().to_string(), fingerprint, "{name}");
    }
}

/// Part, bytes a layer at a boundary of 256-token blocks, bytes that the engine holds, layers.
type V4Row = (&'static str, u64, u64, u64);

#[test]
fn windows_and_compressor_tails_of_deepseek_v4_are_counted_apart() {
    let rows = |name: &str| -> Vec<(String, u64, u64, u64)> {
        let spec = load(name);
        let counts = spec.layers_by_part();
        let boundary =
            spec.parts().iter().zip(counts).filter(|(part, _)| part.geometry.role.class().is_boundary());
        boundary
            .map(|(part, layers)| {
                let role = part.geometry.role;
                (part.name.clone(), role.stored_bytes(256).unwrap(), role.held_bytes().unwrap(), layers)
            })
            .collect()
    };
    let expect = |name: &str, expected: &[V4Row]| {
        let expected: Vec<_> = expected.iter().map(|&(part, a, b, c)| (part.to_owned(), a, b, c)).collect();
        let mut found = rows(name);
        found.sort();
        assert_eq!(found, expected, "{name}");
    };
    expect(
        "deepseek-v4-pro",
        &[
            ("csa_tail", 65_536, 65_536, 30),
            ("hca_tail", 0, 524_288, 31),
            ("index_tail", 16_384, 16_384, 30),
            ("window", 74_752, 74_752, 61),
        ],
    );
    expect(
        "deepseek-v4-flash",
        &[
            ("csa_tail", 65_536, 65_536, 21),
            ("hca_tail", 0, 524_288, 20),
            ("index_tail", 16_384, 16_384, 21),
            ("window", 74_752, 74_752, 43),
        ],
    );
}

#[test]
fn costs_of_absence_are_exact_replays_or_required() {
    let cost = |name: &str, group| load(name).group_absence(group, 256);
    let recompute = |tokens| Some(Absence::Recompute { tokens });
    assert_eq!(cost("gpt-oss-120b", WINDOWS), recompute(128 * 18));
    assert_eq!(cost("gpt-oss-20b", WINDOWS), recompute(128 * 12));
    assert_eq!(cost("gemma-3-27b", WINDOWS), recompute(1024 * 52));
    assert_eq!(cost("deepseek-v4-pro", WINDOWS), recompute(128 * 61));
    // The tail of 128 tokens is empty at a multiple of 128: only the one of 8 can be absent.
    assert_eq!(cost("deepseek-v4-flash", STATES), recompute(128 * 43 + 8));
    assert_eq!(cost("qwen3-next-80b", STATES), Some(Absence::Required));
    assert_eq!(cost("llama-3.1-8b", STREAMS), Some(Absence::Required));
    assert_eq!(cost("llama-3.1-8b", WINDOWS), None);
}

#[test]
fn a_block_of_deepseek_v4_has_the_entries_of_its_tokens_in_layer_order() {
    let spec = load("deepseek-v4-pro");
    let shape = spec.geometry().shape(STREAMS, Coordinate::Replicated, 256).unwrap();
    assert_eq!(shape.block_bytes(), 256 * 705_464 / 128);
    let bytes = |layer: usize| -> Vec<u64> { shape.layers()[layer].chunks.iter().map(|c| c.bytes).collect() };
    assert_eq!((bytes(0), bytes(1), bytes(2)), (vec![1168], vec![1168], vec![64 * 584, 64 * 132]));
    assert_eq!((bytes(3), bytes(60)), (vec![1168], vec![64 * 584, 64 * 132]));
    assert_eq!(shape.layers().len(), 61);
}

#[test]
fn a_state_that_is_empty_at_block_boundaries_is_not_in_the_block() {
    let spec = load("deepseek-v4-pro");
    let states = spec.geometry().shape(STATES, Coordinate::Replicated, 256).unwrap();
    assert_eq!(states.layers().len(), 30, "the compressors of CSA layers only");
    assert_eq!(states.layers()[0].layer, 2, "layers keep their index in the model");
    assert_eq!(states.block_bytes(), 30 * (65_536 + 16_384));
    assert!(spec.geometry().is_stored(STATES, 256));
}

fn tail_only(empty_at: u32) -> Geometry {
    let kind = Kind::new("compressor_tail").unwrap();
    let role = Role::State { bytes: 100, empty_at_multiple_of: std::num::NonZeroU32::new(empty_at) };
    Geometry::new(&[PartGeometry { kind, role, heads: 0, align: 1, group: STATES }], &[vec![0]]).unwrap()
}

#[test]
fn a_group_that_is_always_empty_has_no_shape_and_says_so() {
    let geometry = tail_only(128);
    assert!(!geometry.is_stored(STATES, 256));
    assert_eq!(
        geometry.shape(STATES, Coordinate::Replicated, 256),
        Err(SpecError::NothingStored { group: STATES })
    );
    assert_eq!(geometry.shape(STATES, Coordinate::Replicated, 64).unwrap().block_bytes(), 100);
    assert!(geometry.is_stored(STATES, 192), "192 tokens is not a multiple of 128");
    assert_eq!(geometry.boundary_bytes(256), Ok(0));
    assert_eq!(geometry.boundary_bytes(64), Ok(100));
}

#[test]
fn block_tokens_must_be_whole_entries_of_every_stream() {
    let spec = load("deepseek-v4-pro");
    assert_eq!(spec.geometry().entry_tokens(), 128);
    for block_tokens in [0, 64, 192, 1 << 21] {
        let refused = Err(SpecError::BlockTokens { block_tokens, multiple_of: 128 });
        assert_eq!(spec.geometry().shape(STREAMS, Coordinate::Replicated, block_tokens), refused);
        assert!(spec.geometry().stream_bytes_per_token(block_tokens).is_err());
        assert!(spec.geometry().bytes_for_tokens(1, block_tokens).is_err());
    }
    assert!(load("llama-3.1-8b").geometry().shape(STREAMS, all_heads(8), 1).is_ok());
}

fn all_heads(heads: u16) -> Coordinate {
    Coordinate::heads(0, heads, heads).unwrap()
}

#[test]
fn a_coordinate_must_be_of_the_groups_own_kind() {
    let refused = |spec: &ModelSpec, coordinate| {
        let heads = spec.geometry().group(STREAMS).unwrap().heads;
        assert_eq!(
            spec.geometry().shape(STREAMS, coordinate, 256),
            Err(SpecError::Coordinate { group: STREAMS, heads, coordinate })
        );
    };
    let (split, replicated) = (load("llama-3.1-70b"), load("deepseek-v3"));
    refused(&split, Coordinate::Replicated);
    refused(&split, Coordinate::heads(0, 1, 16).unwrap());
    refused(&replicated, all_heads(8));
    // A coordinate built past its checks is a refusal too.
    refused(&split, Coordinate::Heads { start: 0, count: 0, of: 0 });
    let rank = split.geometry().shape(STREAMS, Coordinate::heads(3, 1, 8).unwrap(), 256).unwrap();
    assert_eq!(rank.block_bytes() * 8, 327_680 * 256);
}

#[test]
fn ranks_share_out_heads_replicate_latents_and_share_heads_that_are_too_few() {
    let coordinates = |name: &str, group, ranks| load(name).geometry().coordinates(group, ranks);
    assert_eq!(coordinates("llama-3.1-70b", STREAMS, 8).unwrap().len(), 8);
    assert_eq!(coordinates("deepseek-v3.2", STREAMS, 8), Ok(vec![Coordinate::Replicated]));
    let two = [Coordinate::heads(0, 1, 2).unwrap(), Coordinate::heads(1, 1, 2).unwrap()];
    assert_eq!(coordinates("qwen3-next-80b", STREAMS, 8), Ok(two.to_vec()));
    assert_eq!(coordinates("qwen3-next-80b", STATES, 8).unwrap().len(), 8);
    assert_eq!(
        coordinates("llama-3.1-8b", STREAMS, 3),
        Err(SpecError::Ranks(TpError::Uneven { heads: 8, ranks: 3 }))
    );
    assert_eq!(coordinates("llama-3.1-8b", WINDOWS, 1), Err(SpecError::UnknownGroup { group: WINDOWS }));
}

#[test]
fn a_window_kept_in_full_is_a_stream_of_the_blocks_own_tokens() {
    let spec = load("gpt-oss-120b");
    let geometry = spec.geometry();
    let block = geometry.shape(WINDOWS, all_heads(8), 256).unwrap();
    assert_eq!(block.block_bytes(), 18 * 128 * 2048, "a window does not depend on the block");
    let stream = geometry.window_stream_shape(WINDOWS, all_heads(8), 256).unwrap();
    assert_eq!(stream.block_bytes(), 18 * 256 * 2048);
    let refused = geometry.window_stream_shape(STREAMS, all_heads(8), 256);
    assert_eq!(refused, Err(SpecError::NotAWindow { group: STREAMS }));
    assert_eq!(geometry.group(WINDOWS).unwrap().window_tokens, 128);
    assert_eq!(geometry.group(STREAMS).unwrap().window_tokens, 0);
}

#[test]
fn a_prefix_is_counted_in_whole_blocks_with_one_boundary() {
    let spec = load("gpt-oss-120b");
    let bytes = |tokens| spec.geometry().bytes_for_tokens(tokens, 256).unwrap();
    let expected =
        PrefixBytes { blocks: 3, tokens: 768, stream_bytes: 768 * 36_864, boundary_bytes: 4_718_592 };
    assert_eq!(bytes(1000), expected);
    assert_eq!((bytes(255).blocks, bytes(255).stream_bytes, bytes(255).boundary_bytes), (0, 0, 0));
    assert_eq!(spec.geometry().bytes_for_tokens(u64::MAX, 256), Err(SpecError::Overflow));
    // 5.38 GiB of DeepSeek-V4-Pro for a million tokens, exactly.
    let million = load("deepseek-v4-pro").geometry().bytes_for_tokens(1 << 20, 256).unwrap();
    assert_eq!(million.stream_bytes, (1 << 20) / 128 * 705_464);
}

#[test]
fn an_opaque_page_has_its_bytes_whatever_a_blocks_tokens() {
    let spec = ModelSpec::opaque("pages", 98_304).unwrap();
    for block_tokens in [1, 16, 256, 999] {
        let shape = spec.geometry().shape(STREAMS, Coordinate::Replicated, block_tokens).unwrap();
        assert_eq!(shape, BlockShape::opaque(98_304).unwrap());
    }
    assert_eq!(spec.geometry().stream_bytes_per_token(16), Ok(Ratio::new(6144, 1).unwrap()));
    assert_eq!(spec.geometry(), &Geometry::opaque(98_304).unwrap());
    let refused = ModelSpec::opaque("pages", 0).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "part.page.bytes: the part has 0 bytes: a part has 1 to 4294967296 bytes"
    );
    assert!(ModelSpec::opaque("pages", MAX_CHUNK_BYTES + 1).is_err());
}

#[test]
fn descriptions_are_not_in_the_fingerprint_and_everything_that_moves_bytes_is() {
    let text = shipped::text("deepseek-v4-pro").unwrap();
    let original = load("deepseek-v4-pro");
    let with = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        ModelSpec::parse(&text.replacen(from, to, 1)).unwrap_or_else(|error| panic!("{to}: {error}"))
    };
    for (from, to) in [
        ("name = \"deepseek-v4-pro\"", "name = \"renamed\""),
        ("source = \"", "source = \"corrected: "),
        ("note = \"", "note = \"corrected: "),
        ("block_tokens = 256", "block_tokens = 512"),
        ("recompute_tokens = 7808", "recompute_tokens = 9"),
        ("dtype = \"fp32\"", "dtype = \"float32\""),
    ] {
        let changed = with(from, to);
        assert_ne!(changed, original, "{to}");
        assert_eq!(changed.fingerprint(), original.fingerprint(), "{to}");
    }
    for (from, to) in [
        ("kind = \"csa_index\"", "kind = \"csa_other\""),
        ("bytes = 132", "bytes = 133"),
        ("per_tokens = 128", "per_tokens = 64"),
        ("window_tokens = 128", "window_tokens = 127"),
        ("empty_at_multiple_of = 128", "empty_at_multiple_of = 64"),
        ("empty_at_multiple_of = 128", ""),
        ("bytes = 65536", "bytes = 65536\nalign = 16"),
        ("bytes = 65536", "bytes = 65536\ngroup = 7"),
        ("repeat = 29", "repeat = 28"),
        ("of = [\"csa\", \"hca\"]", "of = [\"hca\", \"csa\"]"),
        ("hca = [\"hca\", \"window\"", "hca = [\"window\", \"hca\""),
    ] {
        assert_ne!(with(from, to).fingerprint(), original.fingerprint(), "{to}");
    }
    let dense = shipped::text("llama-3.1-8b").unwrap();
    let replicated = ModelSpec::parse(&dense.replace("heads = 8", "heads = 0")).unwrap();
    assert_ne!(replicated.fingerprint(), load("llama-3.1-8b").fingerprint(), "heads");
}

#[test]
fn shipped_specs_survive_their_canonical_bytes_and_their_text() {
    for name in shipped::names() {
        let spec = load(name);
        let bytes = spec.geometry().canonical_bytes();
        assert!(bytes.len() < 1024, "{name} has {} canonical bytes", bytes.len());
        assert_eq!(Geometry::decode_canonical(&bytes).as_ref(), Ok(spec.geometry()), "{name}");
        assert_eq!(ModelSpec::parse(&spec.to_toml()), Ok(spec), "{name}");
    }
}

#[test]
fn the_canonical_bytes_of_a_small_geometry_are_these() {
    let bytes = tail_only(128).canonical_bytes();
    let mut expected = vec![1, 1, 0, 15];
    expected.extend_from_slice(b"compressor_tail");
    expected.extend_from_slice(&[4, 100, 0, 0, 0, 0, 0, 0, 0, 128, 0, 0, 0]);
    expected.extend_from_slice(&[0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
    expected.extend_from_slice(&[1, 0, 1, 0, 0]);
    assert_eq!(bytes, expected);
}

#[test]
fn bytes_that_are_not_canonical_are_refused_with_their_reason() {
    let bytes = tail_only(128).canonical_bytes();
    let decode = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut edited = bytes.clone();
        edit(&mut edited);
        Geometry::decode_canonical(&edited).unwrap_err()
    };
    for cut in 0..bytes.len() {
        assert_eq!(decode(&|b| b.truncate(cut)), CanonicalError::Truncated, "cut at {cut}");
    }
    assert_eq!(decode(&|b| b.push(0)), CanonicalError::Trailing);
    assert_eq!(decode(&|b| b[0] = 2), CanonicalError::Version(2));
    assert_eq!(decode(&|b| b[4] = b'C'), CanonicalError::Kind);
    assert_eq!(decode(&|b| b[19] = 5), CanonicalError::Role);
    assert_eq!(decode(&|b| b[19] = 2), CanonicalError::Role, "a page has no tokens");
    assert_eq!(decode(&|b| b[34] = 3), CanonicalError::Spec(SpecError::Align { align: 3 }));
    assert_eq!(decode(&|b| b[20] = 0), CanonicalError::Spec(SpecError::PartBytes { bytes: 0 }));
    assert_eq!(decode(&|b| b.resize(MAX_CANONICAL_BYTES + 1, 0)), CanonicalError::TooLarge);
    // A second part that equals the first is the same geometry in another encoding.
    let twice = |b: &mut Vec<u8>| {
        let part = b[3..42].to_vec();
        b.splice(42..42, part);
        b[1] = 2;
        let at = b.len() - 3;
        b[at] = 2;
        b.extend_from_slice(&[1, 0]);
    };
    assert_eq!(decode(&twice), CanonicalError::NotCanonical);
}

/// A spec's text with one line changed, and what is said about it.
const FAULTS: &[(&str, &str, &str)] = &[
    (
        "bytes = 2048",
        "bytes = -1",
        "line 12, column 9: invalid value: integer `-1`, expected a whole number from 0 to 18446744073709551615",
    ),
    ("bytes = 2048", "bytes = 18446744073709551616", "line 12, column 9: "),
    (
        "bytes = 2048",
        "bytes = 4294967297",
        "part.kv.bytes: the part has 4294967297 bytes: a part has 1 to 4294967296 bytes",
    ),
    ("bytes = 2048", "bytes = 0", "part.kv.bytes: the part has 0 bytes: a part has 1 to 4294967296 bytes"),
    ("bytes = 2048", "bytes = 2048.5", "line 12, column 9: "),
    ("bytes = 2048", "bytes = \"2048\"", "line 12, column 9: "),
    ("bytes = 2048", "bytes = 2049", "part.kv.heads: 2049 bytes cannot be split evenly over 8 heads"),
    ("bytes = 2048", "byte = 2048", "line 12, column 1: unknown field `byte`, expected "),
    ("bytes = 2048", "bytes = 2048\nalign = 3", "part.kv.align: the alignment is 3: use a power of two"),
    ("bytes = 2048", "bytes = 2048\nper_tokens = 0", "part.kv.per_tokens: the number of tokens is 0"),
    (
        "bytes = 2048",
        "bytes = 2048\nwindow_tokens = 8",
        "part.kv.window_tokens: a part of this role cannot have this key",
    ),
    (
        "role = \"stream\"",
        "role = \"window\"",
        "part.kv.window_tokens: the key is missing, and the role of the part requires this key",
    ),
    ("role = \"stream\"", "role = \"river\"", "line 11, column 8: unknown variant `river`, expected "),
    ("role = \"stream\"", "", "line 9, column 1: missing field `role`"),
    ("kind = \"dense_kv\"", "kind = \"Dense KV\"", "part.kv.kind: the name is not valid"),
    ("heads = 8", "heads = 65536", "line 14, column 9: "),
    ("name = \"tiny\"", "", "missing field `name`"),
    ("name = \"tiny\"", "name = \"a b\"", "name: the name is not valid"),
    ("block_tokens = 256", "block_tokens = 0", "block_tokens: a block has 0 tokens: use a multiple of 1"),
    ("repeat = 4", "repeat = 0", "layers[0]: the run is empty: give at least one layer and one repetition"),
    ("repeat = 4", "repeat = 4097", "layers[0]: the model has more than 4096 layers"),
    ("repeat = 4", "repeat = 4294967295", "layers[0]: the model has more than 4096 layers"),
    ("[{ repeat = 4, of = [\"full\"] }]", "[]", "layers: the model has no layer: give at least one"),
    ("of = [\"full\"]", "of = []", "layers[0]: the run is empty: give at least one layer and one repetition"),
    ("of = [\"full\"]", "of = [\"fool\"]", "layers[0]: `fool` is not defined"),
    ("full = [\"kv\"]", "full = []", "layer.full: layer 0 must have 1 to 64 parts"),
    ("full = [\"kv\"]", "full = [\"kw\"]", "layer.full: `kw` is not defined"),
    ("full = [\"kv\"]", "full = [\"kv\", \"kv\"]", "layer.full: the list has `kv` twice"),
    ("full = [\"kv\"]", "full = [\"kv\"]\nother = [\"kv\"]", "layer.other: no layer uses this definition"),
    ("full = [\"kv\"]", "full = [\"kv\"]\n\"o\\nd\" = [\"kv\"]", "layer.o d: no layer uses this definition"),
    ("[part.kv]", "[part.kw]", "layer.full: `kv` is not defined"),
    ("[part.kv]", "[part.kv", "line 9, column 9: "),
];

const TINY: &str = r#"name = "tiny"
source = "made up"
block_tokens = 256
layers = [{ repeat = 4, of = ["full"] }]

[layer]
full = ["kv"]

[part.kv]
kind = "dense_kv"
role = "stream"
bytes = 2048
dtype = "bf16"
heads = 8
"#;

#[test]
fn a_faulty_text_is_refused_in_one_line_that_names_the_place() {
    assert!(ModelSpec::parse(TINY).is_ok());
    for (from, to, expected) in FAULTS {
        assert!(TINY.contains(from), "{from}");
        let error = ModelSpec::parse(&TINY.replacen(from, to, 1)).expect_err(to).to_string();
        assert!(error.contains(expected), "{to}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn the_example_of_the_text_form_is_a_spec() {
    let (_, example) = include_str!("form.rs").split_once("//! ```toml\n").unwrap();
    let (example, _) = example.split_once("//! ```\n").unwrap();
    let text: String = example.lines().map(|line| format!("{}\n", line.trim_start_matches("//!"))).collect();
    let spec = ModelSpec::parse(&text).unwrap();
    assert_eq!((spec.geometry().layers().len(), spec.geometry().groups().len()), (43, 2));
}

#[test]
fn texts_that_are_too_large_too_deep_or_not_toml_are_refused() {
    let large = format!("{TINY}# {}", "x".repeat(10 << 20));
    assert_eq!(ModelSpec::parse(&large), Err(FormError { place: Place::Whole, fault: FormFault::TooLarge }));
    for text in ["", "\0", "{\"name\": 1}", "plain words", &"[".repeat(100_000), &"a.".repeat(100_000)] {
        let error = ModelSpec::parse(text).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.len() < 600, "{error}");
    }
}

#[test]
fn parts_that_do_not_fit_one_group_are_refused_at_the_part() {
    let two = |second: &str| {
        let text = TINY.replace("[\"kv\"]", "[\"kv\", \"more\"]");
        let more = "[part.more]\nkind = \"x\"\nbytes = 64\ndtype = \"\"\n";
        ModelSpec::parse(&format!("{text}\n{more}{second}")).unwrap_err().to_string()
    };
    let roles = two("role = \"state\"\ngroup = 0\nheads = 8");
    assert!(roles.starts_with("part.more.group: group 0 has parts of different kinds"), "{roles}");
    let heads = two("role = \"stream\"\nheads = 4");
    assert!(
        heads.starts_with("part.more.heads: the parts of group 0 have different numbers of heads"),
        "{heads}"
    );
    let entries = two("role = \"stream\"\nheads = 8\nper_tokens = 1048575\n").replace("more", "");
    assert!(
        entries.starts_with("block_tokens: a block has 256 tokens: use a multiple of 1048575"),
        "{entries}"
    );
}

#[test]
fn streams_without_a_common_block_and_blocks_that_are_too_large_are_refused() {
    let part = |bytes, tokens, group| PartGeometry {
        kind: Kind::new("x").unwrap(),
        role: Role::Stream { bytes, tokens },
        heads: 0,
        align: 1,
        group: Group(group),
    };
    let new = |parts: &[PartGeometry], layer: Vec<u16>| Geometry::new(parts, &[layer]).map(|_| ());
    assert_eq!(new(&[part(1, 1021, 0), part(1, 1031, 0)], vec![0, 1]), Err(SpecError::EntryTokens));
    let block = SpecError::BlockBytes { group: Group(3) };
    assert_eq!(new(&[part(1 << 32, 1, 3)], vec![0; 17]), Err(block));
    assert_eq!(new(&[part(1 << 32, 1, 3)], vec![0; 16]), Ok(()));
    assert_eq!(new(&[part(1, 1, 0)], vec![1]), Err(SpecError::UnknownPart { layer: 0 }));
    assert_eq!(new(&[part(1, 1, 0), part(2, 1, 0)], vec![0]), Err(SpecError::UnusedPart { part: 1 }));
    assert_eq!(new(&[part(1, 1, 0)], vec![0; 65]), Err(SpecError::LayerParts { layer: 0 }));
    assert_eq!(Geometry::new(&[part(1, 1, 0)], &vec![vec![0]; 4097]), Err(SpecError::TooManyLayers));
    assert_eq!(Geometry::new(&[part(1, 1, 0)], &vec![vec![0; 64]; 1025]), Err(SpecError::TooManyChunks));
    assert_eq!(Geometry::new(&[], &[]), Err(SpecError::NoLayers));
}

fn any_part() -> impl Strategy<Value = PartGeometry> {
    let kinds = prop::sample::select(KNOWN_KINDS);
    (kinds, 0u8..4, 1u64..5000, 0u32..6, 0u32..3, 0u32..3).prop_map(
        |((kind, _), role, units, t, align, group)| {
            let heads = [0u16, 2, 6][group as usize];
            let bytes = units * u64::from(heads.max(1));
            let role = match role {
                0 => Role::Stream { bytes, tokens: 1 << t },
                1 => Role::Page { bytes },
                2 => Role::Window { bytes, tokens: 1 + t },
                _ => Role::State { bytes, empty_at_multiple_of: std::num::NonZeroU32::new(t * 8) },
            };
            let group = Group(group + 10 * role.class().default_group().0);
            PartGeometry { kind: Kind::new(kind).unwrap(), role, heads, align: 1 << align, group }
        },
    )
}

prop_compose! {
    fn any_geometry()(parts in prop::collection::vec(any_part(), 1..8))(
        layers in prop::collection::vec(prop::collection::vec(0..parts.len() as u16, 1..6), 1..20),
        parts in Just(parts),
    ) -> Geometry {
        // Every part is used: one layer has them all.
        let mut layers = layers;
        layers.push((0..parts.len() as u16).collect());
        Geometry::new(&parts, &layers).unwrap()
    }
}

proptest! {
    #[test]
    fn every_geometry_survives_its_canonical_bytes(geometry in any_geometry()) {
        let bytes = geometry.canonical_bytes();
        let decoded = Geometry::decode_canonical(&bytes).unwrap();
        prop_assert_eq!(&decoded, &geometry);
        prop_assert_eq!(decoded.fingerprint(), geometry.fingerprint());
    }

    #[test]
    fn any_bytes_decode_to_a_geometry_of_exactly_those_bytes_or_are_refused(
        geometry in any_geometry(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        noise in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut edited = geometry.canonical_bytes();
        for (at, byte) in edits {
            let at = at.index(edited.len());
            edited[at] = byte;
        }
        let cut = cut.index(edited.len() + 1);
        for bytes in [&edited[..], &edited[..cut], &noise[..]] {
            if let Ok(decoded) = Geometry::decode_canonical(bytes) {
                prop_assert_eq!(decoded.canonical_bytes(), bytes);
                // What decodes can be asked for anything.
                for known in decoded.groups() {
                    let _ = decoded.shape(known.group, Coordinate::Replicated, decoded.entry_tokens());
                }
            }
        }
    }

    #[test]
    fn the_coordinates_of_a_group_share_out_its_bytes_exactly(
        geometry in any_geometry(),
        ranks in prop::sample::select(&[1u16, 2][..]),
        blocks in 1u32..4,
    ) {
        let block_tokens = geometry.entry_tokens() * blocks;
        let mut all = 0;
        for known in geometry.groups() {
            let whole = geometry.group_bytes(known.group, block_tokens).unwrap();
            let mut shared = 0;
            for coordinate in geometry.coordinates(known.group, ranks).unwrap() {
                match geometry.shape(known.group, coordinate, block_tokens) {
                    Ok(shape) => shared += shape.block_bytes(),
                    Err(error) => {
                        prop_assert_eq!(error, SpecError::NothingStored { group: known.group });
                        prop_assert!(!geometry.is_stored(known.group, block_tokens));
                    }
                }
            }
            prop_assert_eq!(shared, whole);
            all += whole;
        }
        let prefix = geometry.bytes_for_tokens(block_tokens.into(), block_tokens).unwrap();
        prop_assert_eq!(prefix.stream_bytes + prefix.boundary_bytes, all);
    }

    #[test]
    fn any_text_is_a_spec_or_is_refused_in_one_short_line(text in "[a-z\\[\\]{}=\"., \n0-9_-]{0,200}") {
        if let Err(error) = ModelSpec::parse(&text) {
            let error = error.to_string();
            prop_assert!(!error.contains('\n') && error.len() < 600, "{}", error);
        }
    }

    #[test]
    fn every_spec_survives_its_text(
        geometry in any_geometry(),
        note in "\\PC{0,20}",
        recompute in prop::option::of(0u64..1 << 40),
    ) {
        let parts: Vec<form::DraftPart> = geometry
            .parts()
            .iter()
            .enumerate()
            .map(|(index, part)| form::DraftPart {
                name: format!("p{index}"),
                kind: part.kind.as_str().to_owned(),
                role: part.role,
                heads: part.heads,
                align: part.align,
                group: Some(part.group),
                dtype: note.clone(),
                absence: recompute.map_or(Absence::Required, |tokens| Absence::Recompute { tokens }),
                note: note.clone(),
            })
            .collect();
        // A layer of the text form names a part once.
        let layers = geometry.layers().iter().map(|layer| {
            let mut seen = Vec::new();
            layer.iter().for_each(|part| if !seen.contains(part) { seen.push(*part) });
            seen
        });
        let layer_kinds: Vec<(String, Vec<String>)> = layers
            .enumerate()
            .map(|(index, layer)| (format!("l{index}"), layer.iter().map(|p| format!("p{p}")).collect()))
            .collect();
        let of = layer_kinds.iter().map(|(name, _)| name.clone()).collect();
        let draft = form::Draft {
            name: "random".to_owned(),
            source: note.clone(),
            note,
            block_tokens: geometry.entry_tokens(),
            parts,
            layer_kinds,
            reads: Vec::new(),
            runs: vec![form::Run { repeat: 2, of }],
        };
        let spec = draft.finish().unwrap();
        prop_assert_eq!(ModelSpec::parse(&spec.to_toml()), Ok(spec));
    }
}
