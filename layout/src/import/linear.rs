//! Gated delta networks with full attention every few layers (Qwen3-Next, Qwen3.5).

use crate::spec::Role;

use super::config::Config;
use super::{Built, ImportError, ImportOptions, part, product};

/// Linear layers keep a recurrent state and the last inputs of a convolution; full ones keep keys and values.
pub(super) fn gated_delta(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let order = order(config)?;
    let heads = config.heads("num_key_value_heads", "how many KV heads a full layer has")?;
    let head_dim = config.count("head_dim", "how many numbers a head has")?;
    let kv_dtype = config.kv_dtype(options)?;
    let kv_bytes = product(config, "head_dim", &[2, heads.into(), head_dim.into(), kv_dtype.bytes()])?;
    let key_heads = config.heads("linear_num_key_heads", "how many key heads a linear layer has")?;
    let value_heads = config.heads("linear_num_value_heads", "how many value heads a linear layer has")?;
    let key_dim = config.count("linear_key_head_dim", "how many numbers a key head has")?;
    let value_dim = config.count("linear_value_head_dim", "how many numbers a value head has")?;
    let kernel = config.count("linear_conv_kernel_dim", "how many tokens the convolution sees")?;
    if value_heads.checked_rem(key_heads) != Some(0) {
        return Err(ImportError::Value {
            field: config.path("linear_num_value_heads"),
            found: value_heads.to_string(),
            expected: format!("a multiple of linear_num_key_heads ({key_heads})"),
        });
    }
    let inputs = kernel.saturating_sub(1);
    if inputs == 0 {
        return Err(config.feature("linear_conv_kernel_dim", "a convolution of one token keeps no state"));
    }
    let state_dtype = config.state_dtype(options)?;
    let state_bytes = product(
        config,
        "linear_num_value_heads",
        &[value_heads.into(), key_dim.into(), value_dim.into(), state_dtype.bytes()],
    )?;
    let queries_and_keys = product(config, "linear_num_key_heads", &[2, key_heads.into(), key_dim.into()])?;
    let values = product(config, "linear_num_value_heads", &[value_heads.into(), value_dim.into()])?;
    let channels = queries_and_keys.saturating_add(values);
    // The convolution keeps the model's own numbers, whatever the cache is quantised to.
    let conv_dtype = config.model_dtype()?;
    let conv_bytes =
        product(config, "linear_conv_kernel_dim", &[channels, inputs.into(), conv_dtype.bytes()])?;
    let state = |bytes| Role::State { bytes, empty_at_multiple_of: None };
    Ok(Built {
        parts: vec![
            // Ranks share out key heads, and with each the value heads that belong to it.
            part("recurrent", "recurrent_state", state(state_bytes), key_heads, state_dtype.name()),
            part("conv", "conv_state", state(conv_bytes), key_heads, conv_dtype.name()),
            part("kv", "dense_kv", Role::Stream { bytes: kv_bytes, tokens: 1 }, heads, kv_dtype.name()),
        ],
        layer_kinds: vec![("linear", vec!["recurrent", "conv"]), ("full", vec!["kv"])],
        order,
        note: String::new(),
    })
}

/// `layer_types`, or full attention as the last of every `full_attention_interval` layers.
fn order(config: &Config<'_>) -> Result<Vec<&'static str>, ImportError> {
    let layers = config.layer_count()?;
    let Some(types) = config.layer_types(layers)? else {
        let interval = config.count("full_attention_interval", "every how many layers one is full")?;
        let kind = |layer: u32| if layer.checked_rem(interval) == Some(0) { "full" } else { "linear" };
        return Ok((1u32..).take(layers).map(kind).collect());
    };
    let name = |(index, kind): (usize, &&str)| match *kind {
        "linear_attention" => Ok("linear"),
        "full_attention" => Ok("full"),
        other => Err(config.unknown_layer("layer_types", index, other, "linear_attention or full_attention")),
    };
    types.iter().enumerate().map(name).collect()
}
