//! Gated delta networks with full attention every few layers (Qwen3-Next, Qwen3.5).

use crate::spec::Role;
use crate::spec::form::DraftPart;

use super::config::Config;
use super::dense::heads_part;
use super::{Built, ImportError, ImportOptions, part, product};

/// Linear layers keep a recurrent state and the last inputs of a convolution; full ones keep keys and values.
pub(super) fn gated_delta(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let order = order(config, "full_attention")?;
    let mut parts = delta_parts(config, options)?;
    parts.push(heads_part(config, options, "head_dim", "num_key_value_heads")?);
    Ok(Built {
        parts,
        layer_kinds: vec![("linear", vec!["recurrent", "conv"]), ("full", vec!["kv"])],
        order,
        ..Built::default()
    })
}

/// The state of a linear layer, as the parts `recurrent` and `conv`.
pub(super) fn delta_parts(
    config: &Config<'_>,
    options: &ImportOptions,
) -> Result<Vec<DraftPart>, ImportError> {
    let key_heads = config.heads("linear_num_key_heads", "the number of key heads of a linear layer")?;
    let value_heads =
        config.heads("linear_num_value_heads", "the number of value heads of a linear layer")?;
    let key_dim = config.count("linear_key_head_dim", "the size of a key head")?;
    let value_dim = config.count("linear_value_head_dim", "the size of a value head")?;
    let kernel = config.count("linear_conv_kernel_dim", "the number of tokens in the convolution")?;
    if value_heads.checked_rem(key_heads) != Some(0) {
        return Err(ImportError::Value {
            field: config.path("linear_num_value_heads"),
            found: value_heads.to_string(),
            expected: format!("a multiple of linear_num_key_heads ({key_heads})"),
        });
    }
    let inputs = kernel.saturating_sub(1);
    if inputs == 0 {
        return Err(config.feature(
            "linear_conv_kernel_dim",
            "a convolution over one token has no state: at \
            least 2 tokens are needed",
        ));
    }
    let state_dtype = config.state_dtype(options, "mamba_ssm_dtype")?;
    let state_bytes = product(
        config,
        "linear_num_value_heads",
        &[value_heads.into(), key_dim.into(), value_dim.into(), state_dtype.bytes(config)?],
    )?;
    let queries_and_keys = product(config, "linear_num_key_heads", &[2, key_heads.into(), key_dim.into()])?;
    let values = product(config, "linear_num_value_heads", &[value_heads.into(), value_dim.into()])?;
    let channels = queries_and_keys.saturating_add(values);
    // The convolution keeps the model's own numbers, whatever the cache is quantised to.
    let conv_dtype = config.model_dtype()?;
    let conv_bytes =
        product(config, "linear_conv_kernel_dim", &[channels, inputs.into(), conv_dtype.bytes(config)?])?;
    let state = |bytes| Role::State { bytes, empty_at_multiple_of: None };
    Ok(vec![
        // Ranks share out key heads, and with each the value heads that belong to it.
        part("recurrent", "recurrent_state", state(state_bytes), key_heads, state_dtype.name()),
        part("conv", "conv_state", state(conv_bytes), key_heads, conv_dtype.name()),
    ])
}

/// `layer_types`, or full attention as the last of every `full_attention_interval` layers. `other`: what else full
/// attention is called.
pub(super) fn order(config: &Config<'_>, other: &str) -> Result<Vec<&'static str>, ImportError> {
    let layers = config.layer_count()?;
    let Some(types) = config.layer_types(layers)? else {
        let interval = config.count("full_attention_interval", "the interval of full-attention layers")?;
        let kind = |layer: u32| if layer.checked_rem(interval) == Some(0) { "full" } else { "linear" };
        return Ok((1u32..).take(layers).map(kind).collect());
    };
    let name = |(index, kind): (usize, &&str)| match *kind {
        "linear_attention" => Ok("linear"),
        "full_attention" => Ok("full"),
        name if name == other => Ok("full"),
        other => Err(config.unknown_layer("layer_types", index, other, "linear_attention or full_attention")),
    };
    types.iter().enumerate().map(name).collect()
}
