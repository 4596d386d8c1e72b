//! Mamba-2 layers beside attention (Nemotron-H).

use crate::spec::Role;

use super::config::Config;
use super::dense::heads_part;
use super::{Built, ImportError, ImportOptions, part, product};

/// Nemotron-H: `layers_block_type` or `hybrid_override_pattern` says which layers are Mamba-2 and which attention;
/// the others keep nothing.
pub(super) fn nemotron(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let all = blocks(config)?;
    let total = all.len();
    let order: Vec<&'static str> = all.into_iter().flatten().collect();
    let heads = config.heads("mamba_num_heads", "the number of heads of a Mamba-2 layer")?;
    let head_dim = config.count("mamba_head_dim", "the size of a Mamba-2 head")?;
    let state =
        config.count("ssm_state_size", "the number of state elements for each element of a Mamba-2 head")?;
    let groups =
        config.heads(renamed(config, "n_groups", "mamba_n_groups"), "the number of groups of heads")?;
    let kernel = config
        .count(renamed(config, "conv_kernel", "mamba_d_conv"), "the number of tokens in the convolution")?;
    if heads.checked_rem(groups) != Some(0) {
        return Err(ImportError::Value {
            field: config.path("mamba_num_heads"),
            found: heads.to_string(),
            expected: format!("a multiple of the number of groups ({groups})"),
        });
    }
    let inputs = kernel.saturating_sub(1);
    if inputs == 0 {
        return Err(config.feature(
            "conv_kernel",
            "a convolution over one token has no state: at least 2 \
            tokens are needed",
        ));
    }
    let state_dtype = config.state_dtype(options, "mamba_ssm_cache_dtype")?;
    let state_bytes = product(
        config,
        "mamba_num_heads",
        &[heads.into(), head_dim.into(), state.into(), state_dtype.bytes(config)?],
    )?;
    let own = product(config, "mamba_num_heads", &[heads.into(), head_dim.into()])?;
    let shared = product(config, "ssm_state_size", &[2, groups.into(), state.into()])?;
    let conv_dtype = config.model_dtype()?;
    let conv_bytes = product(
        config,
        "conv_kernel",
        &[own.saturating_add(shared), inputs.into(), conv_dtype.bytes(config)?],
    )?;
    let role = |bytes| Role::State { bytes, empty_at_multiple_of: None };
    let kept = order.len();
    Ok(Built {
        parts: vec![
            // Ranks share out groups, and with each the heads that belong to it.
            part("recurrent", "recurrent_state", role(state_bytes), groups, state_dtype.name()),
            part("conv", "conv_state", role(conv_bytes), groups, conv_dtype.name()),
            heads_part(config, options, "head_dim", "num_key_value_heads")?,
        ],
        layer_kinds: vec![("mamba", vec!["recurrent", "conv"]), ("full", vec!["kv"])],
        order,
        note: format!("{kept} of {total} layers have state in the cache; the others are left out."),
        ..Built::default()
    })
}

/// The name under which a field stands.
fn renamed(config: &Config<'_>, name: &'static str, older: &'static str) -> &'static str {
    if config.has(older) { older } else { name }
}

/// What each layer keeps, or nothing.
fn blocks(config: &Config<'_>) -> Result<Vec<Option<&'static str>>, ImportError> {
    let layers = config.layer_count()?;
    let (field, blocks): (_, Vec<String>) = match config.texts("layers_block_type")? {
        Some(types) => ("layers_block_type", types.into_iter().map(str::to_owned).collect()),
        None => {
            let pattern = config.text("hybrid_override_pattern", "the kind of each layer")?;
            ("hybrid_override_pattern", pattern.chars().map(String::from).collect())
        }
    };
    if blocks.len() != layers {
        return Err(config.wrong_length(field, blocks.len(), layers));
    }
    let kind = |(index, block): (usize, &String)| match block.as_str() {
        "M" | "mamba" | "linear_attention" => Ok(Some("mamba")),
        "*" | "attention" | "full_attention" => Ok(Some("full")),
        "-" | "E" | "mlp" | "moe" => Ok(None),
        other => Err(config.unknown_layer(
            field,
            index,
            other,
            "mamba (or M), attention (or *), mlp (or -) or moe (or E)",
        )),
    };
    blocks.iter().enumerate().map(kind).collect()
}
