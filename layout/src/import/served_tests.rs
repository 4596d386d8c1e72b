//! Configurations of models that engines serve now: what they import to, and what of them is refused.
//!
//! `layout/testdata/configs/` has the configurations; `docs/models.md` says where each comes from. The numbers below are
//! those of vLLM's own classes, with which `scripts/engines check vllm` compares them again where it can build the model.

use serde_json::{Value, json};

use super::*;
use crate::ids::Group;

macro_rules! config {
    ($name:literal) => {
        include_str!(concat!("../../testdata/configs/", $name, ".json"))
    };
}

fn import(config: &str, kv: Option<Dtype>, index_dtype: IndexDtype) -> Result<ModelSpec, ImportError> {
    import_hf_config(config, &ImportOptions { kv_dtype: kv, index_dtype, ..ImportOptions::default() })
}

/// Bytes a token and at a boundary, in blocks of 256.
fn sizes(config: &str, kv: Option<Dtype>, index_dtype: IndexDtype) -> (u64, u64) {
    let spec = import(config, kv, index_dtype).unwrap();
    assert_eq!(ModelSpec::parse(&spec.to_toml()).as_ref(), Ok(&spec));
    let geometry = spec.geometry();
    let stream = geometry.stream_bytes_per_token(256).unwrap();
    (stream.whole().unwrap(), geometry.boundary_bytes(256).unwrap())
}

/// The refusal of a configuration in which one field is another.
fn refusal(config: &str, field: &str, value: Value) -> String {
    let mut config: Value = serde_json::from_str(config).unwrap();
    let inner = config["text_config"].is_object() && field != "architectures";
    let mut place = if inner { &mut config["text_config"] } else { &mut config };
    for key in field.split('.') {
        place = &mut place[key];
    }
    *place = value;
    import(&config.to_string(), None, IndexDtype::Fp8).unwrap_err().to_string()
}

#[test]
fn served_models_have_the_sizes_of_the_engines_own_classes() {
    let (fp8, fp4) = (IndexDtype::Fp8, IndexDtype::Fp4);
    let bf16 = Some(Dtype::Bf16);
    let cases = [
        ("qwen2", config!("qwen2"), None, fp8, (28 * 2048, 0)),
        ("qwen3_5", config!("qwen3_5"), None, fp8, (16 * 4096, 48 * (3_145_728 + 61_440))),
        ("nemotron_h", config!("nemotron_h"), None, fp8, (4 * 4096, 24 * (4_194_304 + 61_440))),
        ("bailing_hybrid", config!("bailing_hybrid"), None, fp8, (7 * 1152, 35 * (1_048_576 + 36_864))),
        ("gemma4", config!("gemma4"), None, fp8, (10 * 8192, 50 * 16_384 * 1024)),
        ("gemma4_text", config!("gemma4_text"), None, fp8, (3 * 2048, 12 * 1024 * 512)),
        ("kimi_linear", config!("kimi_linear"), None, fp8, (7 * 1152, 20 * (2_097_152 + 73_728))),
        ("kimi_linear", config!("kimi_linear"), Some(Dtype::Fp8), fp8, (7 * 576, 20 * (2_097_152 + 73_728))),
        ("kimi_k3", config!("kimi_k3"), None, fp8, (24 * 1152, 69 * (6_291_456 + 221_184))),
        ("glm_moe_dsa", config!("glm_moe_dsa"), None, fp8, (78 * 656 + 21 * 132, 0)),
        ("glm_moe_dsa", config!("glm_moe_dsa"), bf16, fp8, (78 * 1152 + 21 * 132, 0)),
        ("glm_moe_dsa", config!("glm_moe_dsa"), Some(Dtype::Nvfp4), fp8, (78 * 352 + 21 * 132, 0)),
        ("hy_v4", config!("hy_v4"), bf16, fp8, (34 * 1152 + 10 * 132, 0)),
        ("minimax_m3", config!("minimax_m3"), None, fp8, (60 * 2048 + 57 * 256, 0)),
        ("deepseek_v41", config!("deepseek_v41"), None, fp8, (1650, 40 * 528 * 128)),
        ("deepseek_v41", config!("deepseek_v41"), Some(Dtype::Nvfp4), fp4, (890, 40 * 528 * 128)),
        ("glm5_next", config!("glm5_next"), None, fp8, (11 * (1024 + 33), 34 * (4_194_304 + 147_456))),
    ];
    for (name, config, kv, index_dtype, expected) in cases {
        assert_eq!(sizes(config, kv, index_dtype), expected, "{name} {kv:?}");
    }
}

/// Of families whose layers keep keys and values: layers that keep all of them, layers with a window, its tokens, and
/// the bytes of a token in one layer.
const HEADS: &[(&str, u64, u64, u64, u64)] = &[
    ("mixtral", 32, 0, 0, 8 * 512),
    ("ministral3", 34, 0, 0, 8 * 512),
    ("qwen2_moe", 24, 0, 0, 16 * 512),
    ("phi3", 40, 0, 0, 10 * 512),
    ("granite", 40, 0, 0, 8 * 512),
    ("granitemoe", 32, 0, 0, 8 * 256),
    ("granitemoeshared", 40, 0, 0, 8 * 256),
    ("olmoe", 16, 0, 0, 16 * 512),
    ("stablelm", 32, 0, 0, 32 * 320),
    ("nemotron", 32, 0, 0, 8 * 512),
    ("ernie4_5", 18, 0, 0, 2 * 512),
    ("ernie4_5_moe", 28, 0, 0, 4 * 512),
    ("cohere", 40, 0, 0, 8 * 512),
    ("apertus", 32, 0, 0, 8 * 512),
    ("glm4", 40, 0, 0, 2 * 512),
    ("gemma", 28, 0, 0, 16 * 1024),
    ("gemma2", 21, 21, 4096, 8 * 1024),
    ("cohere2", 8, 24, 4097, 8 * 512),
    ("exaone4", 16, 48, 4096, 8 * 512),
    ("qwen3_vl", 36, 0, 0, 8 * 512),
    ("qwen3_vl_moe", 48, 0, 0, 4 * 512),
    ("qwen2_vl", 28, 0, 0, 4 * 512),
    ("qwen2_5_vl", 28, 0, 0, 4 * 512),
    ("glm4v", 40, 0, 0, 2 * 512),
    ("glm4v_moe", 46, 0, 0, 8 * 512),
    ("mistral3", 40, 0, 0, 8 * 512),
    ("llava", 32, 0, 0, 32 * 512),
    ("internvl", 28, 0, 0, 4 * 512),
    ("idefics3", 32, 0, 0, 8 * 512),
    ("smolvlm", 24, 0, 0, 32 * 256),
    // One latent of 512 numbers and a rotary key of 64.
    ("deepseek_v2", 27, 0, 0, 1152),
    ("glm4_moe_lite", 47, 0, 0, 1152),
    ("kimi_k25", 61, 0, 0, 1152),
];

#[test]
fn families_have_the_sizes_of_the_engines_own_classes() {
    let families: Value = serde_json::from_str(config!("families")).unwrap();
    let mut left: Vec<&String> = families.as_object().unwrap().keys().collect();
    let mut expect = |name: &str, expected| {
        left.retain(|other| *other != name);
        assert_eq!(sizes(&families[name].to_string(), None, IndexDtype::Fp8), expected, "{name}");
    };
    for &(name, full, windows, tokens, bytes) in HEADS {
        expect(name, (full * bytes, windows * tokens * bytes));
    }
    // Twelve layers with an index key for four tokens; 36 delta layers, of which two have a convolution over n-grams.
    let delta = 2_097_152 + 49_152;
    expect("qwen4_exp", (12 * (2 * 1024 + 64), 36 * delta + 2 * 147_456));
    // Latents of 512 tokens in 24 layers; in six a latent a token, and an index key.
    expect("dots3_note", (6 * (1152 + 132), 24 * 1152 * 512));
    assert!(left.is_empty(), "no size is said of {left:?}");
}

#[test]
fn what_would_change_the_geometry_of_a_family_is_refused_by_its_field() {
    let families: Value = serde_json::from_str(config!("families")).unwrap();
    let of = |name: &str| families[name].to_string();
    let cases = [
        ("mixtral", "sliding_window", json!(4096), "sliding_window: a sliding window is not"),
        ("qwen2_moe", "use_sliding_window", json!(true), "sliding_window: a sliding window is not"),
        ("exaone4", "layer_types", json!(null), "layer_types: the field is missing"),
        ("cohere2", "layer_types", json!(["chunked_attention"]), "layer_types: found 1 entries"),
        ("glm4_moe_lite", "index_topk", json!(2048), "index_topk: this architecture has no sparse indexer"),
        (
            "mistral3",
            "model_type",
            json!("mllama_text_model"),
            "the architecture `mllama_text_model` is not supported",
        ),
        ("llava", "model_type", json!("qwen3_vl"), "the architecture `qwen3_vl` is not supported"),
        (
            "llava",
            "architectures",
            json!(["LlavaEncoder"]),
            "the architecture `LlavaEncoder` is not supported",
        ),
        ("dots3_note", "layer_types", json!(null), "layer_types: the field is missing"),
        ("dots3_note", "swa_kv_lora_rank", json!(null), "swa_kv_lora_rank: the field is missing"),
        (
            "qwen4_exp",
            "ple_layer_ids",
            json!([4]),
            "text_config.ple_layer_ids: each entry must be the number of a linear layer",
        ),
        (
            "qwen4_exp",
            "ple_layer_ids",
            json!([0]),
            "text_config.ple_layer_ids: each entry must be the number of a linear layer",
        ),
        ("qwen4_exp", "ple_conv_kernel_size", json!(1), "text_config.ple_conv_kernel_size: a convolution"),
        ("qwen4_exp", "indexer_kv_heads", json!(2), "text_config.indexer_kv_heads: more than one index key"),
        (
            "qwen4_exp",
            "indexer_compress_ratio",
            json!(1),
            "text_config.indexer_compress_ratio: index keys that",
        ),
    ];
    for (name, field, value, expected) in cases {
        let error = refusal(&of(name), field, value);
        assert!(error.starts_with(expected), "{name}, {expected}: {error}");
    }
    // Without an indexer its full layers keep keys and values alone.
    let mut dense = families["qwen4_exp"].clone();
    dense["text_config"]["indexer_head_dim"] = Value::Null;
    assert_eq!(sizes(&dense.to_string(), None, IndexDtype::Fp8).0, 12 * 2 * 1024);
}

#[test]
fn draft_layers_are_included_where_it_is_known_what_they_keep() {
    let families: Value = serde_json::from_str(config!("families")).unwrap();
    let with_drafts = |config: &Value| {
        let options = ImportOptions { draft_layers: true, ..ImportOptions::default() };
        import_hf_config(&config.to_string(), &options)
    };
    let spec = with_drafts(&families["glm4_moe_lite"]).unwrap();
    assert_eq!(spec.geometry().stream_bytes_per_token(256).unwrap().whole(), Some(48 * 1152));
    assert_eq!(spec.note(), "The last layer is a draft (multi-token prediction).");
    let refused = [
        (
            &families["mixtral"],
            "num_nextn_predict_layers: the field is missing; expected the number of draft layers",
        ),
        // A convolution over delta layers holds inputs of drafts as well: how many, the engine decides.
        (
            &serde_json::from_str(config!("glm5_next")).unwrap(),
            "text_config.num_nextn_predict_layers: the cached state of",
        ),
    ];
    for (config, expected) in refused {
        let error = with_drafts(config).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn formats_with_scales_take_the_bytes_of_their_scales() {
    // 28 layers, 4 heads of 128: a key and a value each with an fp32 scale, or with an fp8 scale for each 16 numbers.
    assert_eq!(sizes(config!("qwen2"), Some(Dtype::Int8), IndexDtype::Fp8).0, 28 * 4 * 2 * (128 + 4));
    assert_eq!(sizes(config!("qwen2"), Some(Dtype::Nvfp4), IndexDtype::Fp8).0, 28 * 4 * 2 * (64 + 8));
    let spec = import(config!("qwen2"), Some(Dtype::Int8), IndexDtype::Fp8).unwrap();
    assert_eq!(spec.parts()[0].dtype, "int8, fp32 scale a vector");
    let odd = with(config!("qwen2"), "head_dim", json!(72));
    let error = import(&odd, Some(Dtype::Nvfp4), IndexDtype::Fp8).unwrap_err().to_string();
    assert_eq!(
        error,
        "head_dim: found 72; expected a multiple of 16, because the format has one scale for each 16 numbers"
    );
    let refused = [
        (config!("kimi_linear"), Dtype::Int8),
        (config!("kimi_linear"), Dtype::Nvfp4),
        (config!("glm5_next"), Dtype::Nvfp4),
    ];
    for (config, dtype) in refused {
        let error = import(config, Some(dtype), IndexDtype::Fp8).unwrap_err().to_string();
        assert!(error.contains("scales"), "{error}");
    }
}

fn with(config: &str, field: &str, value: Value) -> String {
    let mut config: Value = serde_json::from_str(config).unwrap();
    config[field] = value;
    config.to_string()
}

#[test]
fn sources_are_kept_once_and_read_by_the_layers_after_them() {
    let spec = import(config!("deepseek_v41"), None, IndexDtype::Fp8).unwrap();
    let count = |name: &str| {
        let place = spec.parts().iter().position(|part| part.name == name).unwrap();
        (spec.layers_by_part()[place], spec.readers_by_part()[place])
    };
    assert_eq!(count("window"), (40, 0));
    // Layers 2, 8 and 14 of eighteen keep entries of two tokens, layer 20 of twenty keeps entries of one.
    assert_eq!((count("pairs"), count("tokens")), ((3, 15), (1, 19)));
    // Of the eight layers that choose entries, four are no sources: 5, 11 and 17 among pairs, 30 among tokens.
    assert_eq!((count("pairs_index"), count("tokens_index")), ((3, 3), (1, 1)));
    assert_eq!(count("tail"), (3, 0));
    assert_eq!(spec.geometry().entry_tokens(), 2);
    assert!(!spec.geometry().is_stored(Group(2), 2), "an open pair is no boundary");
}

#[test]
fn a_pool_that_is_not_full_is_held_and_not_stored() {
    let spec = import(config!("glm5_next"), None, IndexDtype::Fp8).unwrap();
    let tail = spec.parts().iter().find(|part| part.name == "tail").unwrap();
    assert_eq!(tail.geometry.role.held_bytes(), Some(4 * 2 * 128 * 2));
    assert_eq!(tail.geometry.role.stored_bytes(256), Some(0));
    assert_eq!(spec.geometry().entry_tokens(), 4);
}

#[test]
fn index_keys_are_kept_only_where_a_layer_has_an_indexer_of_its_own() {
    let index_layers = |config: &str| {
        let spec = import(config, None, IndexDtype::Fp8).unwrap();
        let place = spec.parts().iter().position(|part| part.name == "index").unwrap();
        spec.layers_by_part()[place]
    };
    let glm = config!("glm_moe_dsa");
    assert_eq!(index_layers(glm), 21);
    let every = with(glm, "index_topk_freq", Value::Null);
    assert_eq!(index_layers(&every), 78);
    let types: Vec<&str> = (0..78).map(|layer| if layer % 39 == 0 { "full" } else { "shared" }).collect();
    assert_eq!(index_layers(&with(&every, "indexer_types", json!(types))), 2);
    let pattern = format!("F{}", "S".repeat(77));
    assert_eq!(index_layers(&with(&every, "index_topk_pattern", json!(pattern))), 1);
    assert_eq!(index_layers(&with(config!("hy_v4"), "indexer_types", Value::Null)), 10);
}

fn expect_refused<const N: usize>(cases: [(&str, &str, Value, &str); N]) {
    for (config, field, value, expected) in cases {
        let error = refusal(config, field, value);
        assert!(error.starts_with(expected), "{expected}: {error}");
    }
}

#[test]
fn what_would_change_the_geometry_of_a_served_model_is_refused_by_its_field() {
    let shared = vec!["shared"; 78];
    let cases = [
        (config!("qwen2"), "use_sliding_window", json!(true), "sliding_window: a sliding window is not"),
        (
            config!("qwen3_5"),
            "layer_types",
            json!(["full_attention"]),
            "text_config.layer_types: found 1 entries",
        ),
        (
            config!("nemotron_h"),
            "hybrid_override_pattern",
            json!("M-"),
            "hybrid_override_pattern: found 2 entries",
        ),
        (
            config!("nemotron_h"),
            "n_groups",
            json!(7),
            "mamba_num_heads: found 128; expected a multiple of the number",
        ),
        (
            config!("bailing_hybrid"),
            "short_conv_kernel_size",
            json!(null),
            "short_conv_kernel_size: the field is missing",
        ),
        (
            config!("bailing_hybrid"),
            "architectures",
            json!(["BailingMoeV2_5ForCausalLM"]),
            "the architecture `BailingMoeV2_5ForCausalLM` is not supported",
        ),
        (
            config!("gemma4"),
            "num_kv_shared_layers",
            json!(60),
            "text_config.num_kv_shared_layers: every layer reads",
        ),
        (
            config!("gemma4_text"),
            "num_kv_shared_layers",
            json!(33),
            "num_kv_shared_layers: a full-attention layer",
        ),
        (
            config!("kimi_linear"),
            "linear_attn_config.kda_layers",
            json!([1, 2, 3, 4]),
            "linear_attn_config.kda_layers: each layer must be in exactly one of kda_layers and",
        ),
        (
            config!("kimi_k3"),
            "linear_attn_config.kda_layers",
            json!([94]),
            "text_config.linear_attn_config.kda_layers: found `[94]`; expected numbers of layers below 94",
        ),
        (config!("glm_moe_dsa"), "indexer_types", json!(shared), "indexer_types: the first layer shares"),
        (
            config!("glm_moe_dsa"),
            "indexer_types",
            json!(vec!["full"; 78]),
            "indexer_types: the field contradicts index_topk_pattern or",
        ),
        (
            config!("hy_v4"),
            "layer_types",
            json!(vec!["full_attention"; 34]),
            "layer_types[0]: found `full_att",
        ),
    ];
    expect_refused(cases);
}

#[test]
fn what_would_change_the_geometry_of_a_model_with_index_keys_is_refused_by_its_field() {
    let cases = [
        (
            config!("minimax_m3"),
            "sparse_attention_config.sparse_disable_index_value",
            json!(vec![0; 60]),
            "sparse_attention_config.sparse_disable_index_value: an indexer that stores values is",
        ),
        (config!("minimax_m3"), "index_topk_freq", json!(4), "index_topk_freq: an indexer shared between"),
        (
            config!("deepseek_v41"),
            "kv_source_layer_ids",
            json!([2, 8, 14]),
            "text_config.compress_ratios[20]: the nearest earlier layer in kv_source",
        ),
        (
            config!("deepseek_v41"),
            "kv_source_layer_ids",
            json!(null),
            "text_config.kv_source_layer_ids: the field is missing; expected the list of layers that store entries",
        ),
        (
            config!("deepseek_v41"),
            "index_source_layer_ids",
            json!([8]),
            "text_config.compress_ratios[2]: this layer reads selected entries",
        ),
        (
            config!("deepseek_v41"),
            "compress_ratios",
            json!(vec![4; 40]),
            "text_config.compress_ratios[0]: found `4`",
        ),
        (config!("glm5_next"), "index_kpool", json!(1), "text_config.index_kpool: index keys that are not"),
        (config!("glm5_next"), "layer_types", json!(null), "text_config.layer_types: the field is missing"),
    ];
    expect_refused(cases);
}

#[test]
fn the_page_says_of_every_model_type_of_vllm_whether_it_is_imported() {
    let page = include_str!("../../../docs/models.md");
    let row = |title: &str| -> Vec<&str> {
        let row = page.lines().find(|line| line.starts_with(&format!("| {title} |"))).unwrap();
        row.split('`').skip(1).step_by(2).collect()
    };
    let (known, unknown) = (row("known"), row("unknown"));
    assert!(known.len() >= 20 && unknown.len() >= 50, "{} known, {} unknown", known.len(), unknown.len());
    let is_known = |kind: &str| {
        ARCHITECTURES.iter().any(|known| known.model_type == kind)
            || WRAPPERS.iter().any(|(name, _)| *name == kind)
    };
    let odd: Vec<&&str> = known.iter().filter(|kind| !is_known(kind)).collect();
    assert!(odd.is_empty(), "listed as known: {odd:?}");
    for kind in unknown {
        assert!(!is_known(kind), "{kind} is imported");
        let config = json!({ "model_type": kind, "num_hidden_layers": 2 }).to_string();
        let error = import(&config, None, IndexDtype::Fp8).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the architecture `{kind}` is not supported")), "{error}");
    }
}
