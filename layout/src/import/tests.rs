//! Each known architecture imports to the shipped geometry; what is not understood is refused by name.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::spec::shipped;

fn import(config: &Value, options: &ImportOptions) -> Result<ModelSpec, ImportError> {
    import_hf_config(&config.to_string(), options)
}

fn refusal(config: &Value) -> String {
    import(config, &ImportOptions::default()).unwrap_err().to_string()
}

fn with(mut config: Value, field: &str, value: Value) -> Value {
    config[field] = value;
    config
}

fn without(mut config: Value, field: &str) -> Value {
    config.as_object_mut().unwrap().remove(field);
    config
}

fn llama(layers: u32, hidden: u32, heads: u32) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": 8, "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "rope_theta": 500000.0, "torch_dtype": "bfloat16", "vocab_size": 128256
    })
}

fn mistral() -> Value {
    json!({
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 128, "hidden_size": 5120,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "sliding_window": null,
        "torch_dtype": "bfloat16"
    })
}

fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 5120,
        "max_window_layers": 64, "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "sliding_window": null, "use_sliding_window": false, "torch_dtype": "bfloat16"
    })
}

fn qwen3_moe() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
        "hidden_size": 2048, "num_attention_heads": 32, "num_experts": 128, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": false, "torch_dtype": "bfloat16"
    })
}

fn glm() -> Value {
    json!({
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 128, "hidden_size": 5120,
        "num_attention_heads": 96, "num_hidden_layers": 92, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "torch_dtype": "bfloat16"
    })
}

fn minimax() -> Value {
    json!({
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": vec![1; 62],
        "head_dim": 128, "hidden_size": 3072, "num_attention_heads": 48, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "num_mtp_modules": 3, "use_mtp": true, "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    })
}

fn deepseek(model_type: &str, class: &str) -> Value {
    json!({
        "architectures": [class], "model_type": model_type, "hidden_size": 7168, "kv_lora_rank": 512,
        "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}
    })
}

fn deepseek_v3() -> Value {
    with(deepseek("deepseek_v3", "DeepseekV3ForCausalLM"), "num_nextn_predict_layers", json!(1))
}

fn kimi() -> Value {
    with(deepseek("kimi_k2", "DeepseekV3ForCausalLM"), "num_nextn_predict_layers", json!(0))
}

fn deepseek_v32() -> Value {
    let mut config = deepseek("deepseek_v32", "DeepseekV32ForCausalLM");
    config["index_head_dim"] = json!(128);
    config["index_n_heads"] = json!(64);
    config["index_topk"] = json!(2048);
    config
}

fn gpt_oss(layers: usize) -> Value {
    let types: Vec<&str> = ["sliding_attention", "full_attention"].repeat(layers / 2);
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880,
        "layer_types": types, "num_attention_heads": 64, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    })
}

fn gemma3() -> Value {
    json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "mm_tokens_per_image": 256, "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
        "text_config": {
            "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32,
            "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024
        }
    })
}

fn qwen3_next() -> Value {
    json!({
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "full_attention_interval": 4,
        "head_dim": 256, "hidden_size": 2048, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 2, "torch_dtype": "bfloat16"
    })
}

fn qwen3_5() -> Value {
    let types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"].repeat(15);
    json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "vision_config": {"depth": 27},
        "text_config": {
            "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "full_attention_interval": 4,
            "head_dim": 256, "hidden_size": 4096, "layer_types": types, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
            "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
            "num_attention_heads": 32, "num_hidden_layers": 60, "num_key_value_heads": 2
        }
    })
}

fn deepseek_v4(ratios: &[u32], layers: u32) -> Value {
    json!({
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "compress_ratios": ratios,
        "head_dim": 512, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 1024,
        "num_attention_heads": 128, "num_hidden_layers": layers, "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1, "qk_rope_head_dim": 64, "sliding_window": 128, "torch_dtype": "bfloat16"
    })
}

fn pro() -> Value {
    let ratios: Vec<u32> = [128, 128].into_iter().chain([4, 128].repeat(29)).chain([4]).collect();
    deepseek_v4(&ratios, 61)
}

fn flash() -> Value {
    // With the draft layer's entry at the end, as the checkpoint has it.
    let ratios: Vec<u32> = [0, 0].into_iter().chain([4, 128].repeat(20)).chain([4, 0]).collect();
    deepseek_v4(&ratios, 43)
}

fn options(kv: Option<Dtype>, state: Option<Dtype>, index_dtype: IndexDtype) -> ImportOptions {
    ImportOptions { kv_dtype: kv, state_dtype: state, index_dtype, ..ImportOptions::default() }
}

#[test]
fn every_known_architecture_imports_to_the_shipped_geometry() {
    let plain = ImportOptions::default;
    let kv = |dtype| options(Some(dtype), None, IndexDtype::Fp8);
    let bf16_state = || options(None, Some(Dtype::Bf16), IndexDtype::Fp8);
    let fp4_index = || options(None, None, IndexDtype::Fp4);
    let cases = [
        ("llama-3.1-8b", llama(32, 4096, 32), plain()),
        ("llama-3.1-70b", llama(80, 8192, 64), plain()),
        ("mistral-small-24b", mistral(), plain()),
        ("qwen3-32b", qwen3(), plain()),
        ("qwen3-coder-30b-a3b", qwen3_moe(), plain()),
        ("glm-4.5", glm(), plain()),
        ("minimax-m2", minimax(), plain()),
        ("kimi-k2", kimi(), plain()),
        ("kimi-k2-fp8", kimi(), kv(Dtype::Fp8)),
        ("deepseek-v3", deepseek_v3(), plain()),
        ("deepseek-v3.2", deepseek_v32(), plain()),
        ("gpt-oss-20b", gpt_oss(24), kv(Dtype::Bf16)),
        ("gpt-oss-120b", gpt_oss(36), kv(Dtype::Bf16)),
        ("gemma-3-27b", gemma3(), plain()),
        ("qwen3-next-80b", qwen3_next(), plain()),
        ("qwen3-next-80b-bf16state", qwen3_next(), bf16_state()),
        ("qwen3.5-397b", qwen3_5(), plain()),
        ("qwen3.5-397b-bf16state", qwen3_5(), bf16_state()),
        ("deepseek-v4-pro", pro(), plain()),
        ("deepseek-v4-pro-fp4idx", pro(), fp4_index()),
        ("deepseek-v4-flash", flash(), plain()),
        ("deepseek-v4-flash-fp4idx", flash(), fp4_index()),
    ];
    assert_eq!(cases.len(), shipped::names().len(), "a case for every shipped model");
    for (name, config, options) in cases {
        let spec = import(&config, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        let shipped = shipped::load(name).unwrap();
        assert_eq!(spec.geometry(), shipped.geometry(), "{name}");
        let absences = |spec: &ModelSpec| {
            let groups = spec.geometry().groups().to_vec();
            groups.iter().map(|known| spec.group_absence(known.group, 256)).collect::<Vec<_>>()
        };
        assert_eq!(absences(&spec), absences(&shipped), "{name}");
        assert_eq!(ModelSpec::parse(&spec.to_toml()), Ok(spec), "{name}");
    }
}

#[test]
fn the_spec_says_what_was_read_and_what_was_left_out() {
    let spec = import(&deepseek_v3(), &ImportOptions::default()).unwrap();
    let source = "config.json, model_type deepseek_v3: torch_dtype bf16, kv_lora_rank 512, qk_rope_head_dim 64, \
                  num_hidden_layers 61";
    assert_eq!(spec.source(), source);
    assert_eq!(spec.note(), "Layers of drafts (multi-token prediction) are not included.");
    assert_eq!(spec.name(), "deepseek_v3");
    let named = with(llama(32, 4096, 32), "_name_or_path", json!("meta-llama/Llama-3.1-8B"));
    assert_eq!(import(&named, &ImportOptions::default()).unwrap().name(), "Llama-3.1-8B");
    let options = ImportOptions { name: Some("mine".into()), block_tokens: Some(16), ..Default::default() };
    let mine = import(&named, &options).unwrap();
    assert_eq!((mine.name(), mine.default_block_tokens()), ("mine", 16));
}

#[test]
fn a_missing_fact_is_named() {
    let facts: &[(Value, &str)] = &[
        (llama(32, 4096, 32), "num_hidden_layers"),
        (llama(32, 4096, 32), "num_key_value_heads"),
        (llama(32, 4096, 32), "hidden_size"),
        (llama(32, 4096, 32), "torch_dtype"),
        (llama(32, 4096, 32), "model_type"),
        (qwen3(), "head_dim"),
        (minimax(), "attn_type_list"),
        (deepseek_v3(), "kv_lora_rank"),
        (deepseek_v3(), "qk_rope_head_dim"),
        (deepseek_v32(), "index_head_dim"),
        (gpt_oss(24), "layer_types"),
        (gpt_oss(24), "sliding_window"),
        (gemma3(), "text_config"),
        (qwen3_next(), "linear_conv_kernel_dim"),
        (qwen3_next(), "full_attention_interval"),
        (pro(), "compress_ratios"),
        (pro(), "sliding_window"),
    ];
    for (config, field) in facts {
        for config in [without(config.clone(), field), with(config.clone(), field, Value::Null)] {
            let error = refusal(&config);
            assert!(
                error.starts_with(&format!("{field}: the field is missing; expected ")),
                "{field}: {error}"
            );
        }
    }
    let mut nested = gemma3();
    nested["text_config"].as_object_mut().unwrap().remove("num_key_value_heads");
    assert!(
        refusal(&nested).starts_with("text_config.num_key_value_heads: the field is missing"),
        "{}",
        refusal(&nested)
    );
    assert!(
        refusal(&gpt_oss(24)).starts_with("torch_dtype: the field is missing"),
        "{}",
        refusal(&gpt_oss(24))
    );
}

#[test]
fn numbers_that_cannot_be_are_refused_with_their_field() {
    for value in
        [json!(0), json!(-3), json!(61.5), json!("61"), json!(1u64 << 40), json!(u64::MAX), json!([1])]
    {
        let error = refusal(&with(llama(32, 4096, 32), "num_key_value_heads", value.clone()));
        assert!(error.starts_with("num_key_value_heads: found `"), "{value}: {error}");
    }
    let error = refusal(&with(qwen3(), "num_hidden_layers", json!(4097)));
    assert_eq!(error, "num_hidden_layers: found 4097; expected at most 4096");
    let error = refusal(&with(qwen3(), "num_key_value_heads", json!(65536)));
    assert_eq!(error, "num_key_value_heads: found 65536; expected at most 65535");
    let mut wide = with(qwen3(), "head_dim", json!(1 << 20));
    wide["num_key_value_heads"] = json!(65535);
    let error = refusal(&wide);
    assert!(
        error.starts_with(
            "no valid spec follows from the configuration: part.kv.bytes: the part has 274873712640 bytes"
        ),
        "{error}"
    );
    let error = refusal(&with(llama(32, 4096, 32), "hidden_size", json!(4097)));
    assert!(
        error.starts_with("hidden_size: found 4097; expected a multiple of num_attention_heads (32)"),
        "{error}"
    );
    let mut huge = qwen3_next();
    for field in ["linear_num_value_heads", "linear_num_key_heads"] {
        huge[field] = json!(65535);
    }
    for field in ["linear_value_head_dim", "linear_key_head_dim", "linear_conv_kernel_dim"] {
        huge[field] = json!(1 << 20);
    }
    let error = refusal(&huge);
    assert!(error.contains("part.recurrent.bytes") || error.contains("a value that is too large"), "{error}");
}

#[test]
fn an_unknown_architecture_is_refused_with_the_facts_that_are_missing() {
    let mamba =
        json!({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 64});
    assert_eq!(
        refusal(&mamba),
        "the architecture `mamba2` is not supported, because these facts about the architecture are missing: \
        the cached state of each kind of layer (its parts, and how their sizes depend on the number of \
        tokens), num_key_value_heads, head_dim, the cache's number format (torch_dtype). If you know these \
        facts, write a spec by hand"
    );
    let draft = with(llama(1, 4096, 32), "architectures", json!(["LlamaForCausalLMEagle3"]));
    assert!(refusal(&draft).starts_with("the architecture `LlamaForCausalLMEagle3` is not supported"));
    let long = with(mamba, "model_type", json!(format!("a\n\u{1b}[31m{}", "x".repeat(1000))));
    let error = refusal(&long);
    assert!(error.len() < 500 && !error.contains(char::is_control), "{error}");
}

#[test]
fn features_that_would_change_the_geometry_are_refused() {
    let cases = [
        (with(mistral(), "sliding_window", json!(4096)), "sliding_window: a sliding window is not supported"),
        (with(qwen3(), "use_sliding_window", json!(true)), "use_sliding_window: a sliding window is not"),
        (with(llama(32, 4096, 32), "attention_chunk_size", json!(8192)), "attention_chunk_size: chunked"),
        (with(llama(32, 4096, 32), "kv_lora_rank", json!(512)), "kv_lora_rank: latent attention is not part"),
        (
            with(deepseek_v3(), "index_topk", json!(2048)),
            "index_topk: this architecture has no sparse indexer",
        ),
        (with(deepseek_v32(), "index_topk_freq", json!(4)), "index_topk_freq: an indexer shared between"),
        (with(deepseek_v32(), "index_head_dim", json!(64)), "index_head_dim: found 64; expected 128"),
        (with(pro(), "head_dim", json!(256)), "head_dim: found 256; expected 512"),
        (
            with(pro(), "compress_ratios", json!(vec![2; 61])),
            "compress_ratios[0]: found `2`; expected 0, 4 or 128",
        ),
        (
            with(pro(), "compress_ratios", json!(vec![4; 60])),
            "compress_ratios: found 60 entries; expected one entry for each of the 61",
        ),
        (
            with(minimax(), "attn_type_list", json!(vec![0; 62])),
            "attn_type_list[0]: found `0`; expected 1 (full attention)",
        ),
        (
            with(gpt_oss(2), "layer_types", json!(["sliding_attention", "chunked"])),
            "layer_types[1]: found `chunked`",
        ),
        (
            with(gpt_oss(2), "layer_types", json!(["full_attention"])),
            "layer_types: found 1 entries; expected one entry for each",
        ),
        (
            with(qwen3(), "layer_types", json!(vec!["linear_attention"; 64])),
            "layer_types[0]: found `linear_attention`",
        ),
        (with(qwen3_next(), "layer_types", json!(vec!["mamba"; 48])), "layer_types[0]: found `mamba`"),
        (
            with(qwen3_next(), "linear_num_value_heads", json!(17)),
            "linear_num_value_heads: found 17; expected a multiple",
        ),
        (
            with(qwen3_next(), "linear_conv_kernel_dim", json!(1)),
            "linear_conv_kernel_dim: a convolution over one",
        ),
        (
            with(llama(32, 4096, 32), "torch_dtype", json!("int8")),
            "torch_dtype: found `\"int8\"`; expected bfloat16",
        ),
        (
            with(qwen3(), "quantization_config", json!({"kv_cache_scheme": {"num_bits": 8}})),
            "quantization_config.kv_cache_scheme: the checkpoint quantises the cache: set the KV data type",
        ),
    ];
    for (config, expected) in cases {
        let error = refusal(&config);
        assert!(error.starts_with(expected), "{expected}: {error}");
    }
    let fp8 = options(Some(Dtype::Fp8), None, IndexDtype::Fp8);
    let odd = import(&with(kimi(), "kv_lora_rank", json!(256)), &fp8).unwrap_err().to_string();
    assert!(odd.starts_with("kv_lora_rank: found 256; expected 512"), "{odd}");
    let bf16 = options(Some(Dtype::Bf16), None, IndexDtype::Fp8);
    assert!(
        import(&pro(), &bf16)
            .unwrap_err()
            .to_string()
            .starts_with("head_dim: the cache entries of this architecture")
    );
}

#[test]
fn data_types_scale_what_they_are_about_and_nothing_else() {
    let stream = |config: &Value, kv| {
        let spec = import(config, &options(kv, None, IndexDtype::Fp8)).unwrap();
        let geometry = spec.geometry().clone();
        (
            geometry.stream_bytes_per_token(256).unwrap().whole().unwrap(),
            geometry.boundary_bytes(256).unwrap(),
        )
    };
    assert_eq!(stream(&llama(32, 4096, 32), Some(Dtype::Fp8)).0, 65_536);
    assert_eq!(stream(&llama(32, 4096, 32), Some(Dtype::Fp32)).0, 262_144);
    assert_eq!(stream(&with(llama(32, 4096, 32), "torch_dtype", json!("float16")), None).0, 131_072);
    let (full, fp8) = (stream(&qwen3_next(), None), stream(&qwen3_next(), Some(Dtype::Fp8)));
    assert_eq!((fp8.0 * 2, fp8.1), full, "the recurrent state and the convolution are not quantised");
    let half = with(qwen3_next(), "mamba_ssm_dtype", json!("bfloat16"));
    assert_eq!(stream(&half, None).1, 39_518_208);
    assert_eq!(stream(&deepseek_v32(), Some(Dtype::Bf16)).0, 61 * (1152 + 132));
}

#[test]
fn what_is_not_a_configuration_is_refused_with_its_place() {
    let refusal = |text: &str| import_hf_config(text, &ImportOptions::default()).unwrap_err().to_string();
    assert_eq!(refusal("{\n  \"a\": }"), "line 2, column 8: the text is not valid JSON: expected value");
    assert_eq!(refusal(""), "line 1, column 0: the text is not valid JSON: EOF while parsing a value");
    assert!(refusal("[]").starts_with("config: found `[]`; expected an object"));
    assert!(refusal(&"[".repeat(100_000)).contains("recursion limit"));
    assert_eq!(
        refusal(&" ".repeat(MAX_CONFIG_BYTES + 1)),
        "the model configuration is larger than the limit of 1048576 bytes"
    );
}

proptest! {
    #[test]
    fn a_configuration_with_any_field_changed_imports_or_is_refused_in_one_line(
        which in 0usize..13,
        field in any::<prop::sample::Index>(),
        value in prop::sample::select(&[
            "null", "0", "-1", "1", "3", "1e300", "1048576", "18446744073709551615", "true", "\"x\"", "[]",
            "[1]", "[\"full_attention\"]", "{}", "\"\\n\"",
        ][..]),
        nested in any::<bool>(),
    ) {
        let configs = [
            llama(32, 4096, 32), mistral(), qwen3(), qwen3_moe(), glm(), minimax(), deepseek_v3(),
            deepseek_v32(), gpt_oss(24), gemma3(), qwen3_next(), qwen3_5(), pro(),
        ];
        let mut config = configs[which].clone();
        let inner = nested && config.get("text_config").is_some();
        let map = if inner { &mut config["text_config"] } else { &mut config };
        let map = map.as_object_mut().unwrap();
        let keys: Vec<String> = map.keys().cloned().collect();
        map.insert(field.get(&keys).clone(), serde_json::from_str(value).unwrap());
        if let Err(error) = import(&config, &options(Some(Dtype::Bf16), None, IndexDtype::Fp8)) {
            let error = error.to_string();
            prop_assert!(!error.contains(char::is_control) && error.len() < 600, "{}", error);
        }
    }
}
