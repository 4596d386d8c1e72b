//! Attention that keeps keys and values of every KV head: in full, or for a sliding window in some layers.

use crate::spec::form::DraftPart;
use crate::spec::{Absence, Role};

use super::config::Config;
use super::{Built, ImportError, ImportOptions, part, product};

pub(super) const WINDOW: &str = "the number of tokens in the window of a sliding layer";
const KV_HEADS: &str = "the number of KV heads";
const HEAD_DIM: &str = "the size of a head";

/// Full attention in every layer.
pub(super) fn full(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let head_dim = config.count("head_dim", HEAD_DIM)?;
    all_full(config, options, head_dim)
}

/// Full attention in every layer, where the architecture makes `head_dim` the hidden size divided by the number
/// of attention heads if the file leaves it out.
pub(super) fn with_derived_head_dim(
    config: &Config<'_>,
    options: &ImportOptions,
) -> Result<Built, ImportError> {
    if config.has("head_dim") {
        return full(config, options);
    }
    let hidden =
        config.count("hidden_size", "the number of attention heads, which determines the size of a head")?;
    let heads =
        config.count("num_attention_heads", "the hidden size, which determines the size of a head")?;
    match (hidden.checked_rem(heads), hidden.checked_div(heads)) {
        (Some(0), Some(head_dim)) => all_full(config, options, head_dim),
        _ => Err(ImportError::Value {
            field: config.path("hidden_size"),
            found: hidden.to_string(),
            expected: format!("a multiple of num_attention_heads ({heads})"),
        }),
    }
}

/// MiniMax: `attn_type_list` says which layers are full attention (1); in M2 all are.
pub(super) fn minimax(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let Some(types) = config.numbers("attn_type_list")? else {
        let field = config.path("attn_type_list");
        return Err(ImportError::Missing { field, what: "the list of layers with full attention" });
    };
    if types.len() != layers {
        return Err(config.wrong_length("attn_type_list", types.len(), layers));
    }
    if let Some((index, other)) = types.iter().enumerate().find(|(_, kind)| **kind != 1) {
        return Err(config.unknown_layer("attn_type_list", index, &other.to_string(), "1 (full attention)"));
    }
    full(config, options)
}

/// gpt-oss, EXAONE 4: `layer_types` says which layers are sliding windows.
pub(super) fn by_layer_types(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let Some(types) = config.layer_types(layers)? else {
        let field = config.path("layer_types");
        return Err(ImportError::Missing { field, what: "the list of layers with sliding windows" });
    };
    let order = sliding_or_full(config, &types)?;
    windowed(config, options, order, String::new())
}

fn all_full(config: &Config<'_>, options: &ImportOptions, head_dim: u32) -> Result<Built, ImportError> {
    refuse_other_attention(config)?;
    let layers = config.layer_count()?;
    if let Some(types) = config.layer_types(layers)?
        && let Some((index, other)) = types.iter().enumerate().find(|(_, kind)| **kind != "full_attention")
    {
        return Err(config.unknown_layer("layer_types", index, other, "full_attention"));
    }
    Ok(Built {
        parts: vec![keys_and_values(config, options, head_dim, "head_dim", "num_key_value_heads")?],
        layer_kinds: vec![("full", vec!["kv"])],
        order: vec!["full"; layers],
        draft: Some("kv"),
        ..Built::default()
    })
}

/// Keys and values of the heads that these fields describe, as the part `kv`.
pub(super) fn heads_part(
    config: &Config<'_>,
    options: &ImportOptions,
    dim_field: &'static str,
    heads_field: &'static str,
) -> Result<DraftPart, ImportError> {
    let head_dim = config.count(dim_field, HEAD_DIM)?;
    keys_and_values(config, options, head_dim, dim_field, heads_field)
}

fn keys_and_values(
    config: &Config<'_>,
    options: &ImportOptions,
    head_dim: u32,
    dim_field: &'static str,
    heads_field: &'static str,
) -> Result<DraftPart, ImportError> {
    let heads = config.heads(heads_field, KV_HEADS)?;
    let dtype = config.kv_dtype(options)?;
    let vector = dtype.vector_bytes(config, dim_field, head_dim)?;
    let bytes = product(config, dim_field, &[2, heads.into(), vector])?;
    Ok(part("kv", "dense_kv", Role::Stream { bytes, tokens: 1 }, heads, dtype.label()))
}

/// The same for a window, as the part `window`, whose absence is the caller's to say.
pub(super) fn window_part(
    config: &Config<'_>,
    options: &ImportOptions,
    window: u32,
) -> Result<DraftPart, ImportError> {
    let mut sliding = heads_part(config, options, "head_dim", "num_key_value_heads")?;
    if let Role::Stream { bytes, .. } = sliding.role {
        sliding.role = Role::Window { bytes, tokens: window };
    }
    sliding.name = "window".to_owned();
    sliding.kind = "swa_window".to_owned();
    Ok(sliding)
}

fn refuse_other_attention(config: &Config<'_>) -> Result<(), ImportError> {
    if config.has("kv_lora_rank") {
        return Err(config.feature("kv_lora_rank", "latent attention is not part of this architecture"));
    }
    let off = config.switch("use_sliding_window")? == Some(false);
    if config.has("sliding_window") && !off {
        return Err(
            config.feature("sliding_window", "a sliding window is not supported for this architecture")
        );
    }
    match config.switch("use_sliding_window")? {
        Some(true) => {
            Err(config
                .feature("use_sliding_window", "a sliding window is not supported for this architecture"))
        }
        _ => Ok(()),
    }
}

pub(super) fn sliding_or_full(config: &Config<'_>, types: &[&str]) -> Result<Vec<&'static str>, ImportError> {
    let name = |(index, kind): (usize, &&str)| match *kind {
        "sliding_attention" => Ok("sliding"),
        "full_attention" => Ok("full"),
        other => {
            Err(config.unknown_layer("layer_types", index, other, "sliding_attention or full_attention"))
        }
    };
    types.iter().enumerate().map(name).collect()
}

pub(super) fn windowed(
    config: &Config<'_>,
    options: &ImportOptions,
    order: Vec<&'static str>,
    note: String,
) -> Result<Built, ImportError> {
    windows_of(config, options, (order, note), config.count("sliding_window", WINDOW)?)
}

/// Full layers, and windows of this many tokens.
pub(super) fn windows_of(
    config: &Config<'_>,
    options: &ImportOptions,
    (order, note): (Vec<&'static str>, String),
    window: u32,
) -> Result<Built, ImportError> {
    let mut sliding = window_part(config, options, window)?;
    sliding.absence = replay(window, order.iter().filter(|kind| **kind == "sliding").count());
    Ok(Built {
        parts: vec![sliding, heads_part(config, options, "head_dim", "num_key_value_heads")?],
        layer_kinds: vec![("sliding", vec!["window"]), ("full", vec!["kv"])],
        order,
        note,
        ..Built::default()
    })
}

/// What an exact replay of windows costs: each window layer reaches one window further back.
pub(super) fn replay(window: u32, layers: usize) -> Absence {
    Absence::Recompute { tokens: u64::from(window).saturating_mul(layers as u64) }
}
