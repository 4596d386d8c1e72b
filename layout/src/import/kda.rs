//! Kimi Delta Attention beside latent attention (Kimi-Linear, Kimi-K3, Ling-3.0).
//!
//! A delta layer keeps a square matrix of each head in fp32, and the last inputs of its convolutions over queries,
//! keys and values, which have equally many heads.

use crate::spec::Role;
use crate::spec::form::DraftPart;

use super::config::Config;
use super::latent;
use super::{Built, ImportError, ImportOptions, part, product};

/// What a delta layer is made of.
pub(super) struct Delta {
    /// Where the numbers stand, for faults.
    pub(super) heads_field: &'static str,
    pub(super) heads: u16,
    pub(super) dim: u32,
    pub(super) kernel: u32,
}

impl Delta {
    /// The recurrent state and the inputs of the convolution: parts `recurrent` and `conv`.
    pub(super) fn parts(
        &self,
        config: &Config<'_>,
        options: &ImportOptions,
    ) -> Result<Vec<DraftPart>, ImportError> {
        let inputs = self.kernel.saturating_sub(1);
        if inputs == 0 {
            return Err(config.feature(
                self.heads_field,
                "a convolution over one token has no state: at least \
                2 tokens are needed",
            ));
        }
        let (heads, dim) = (u64::from(self.heads), u64::from(self.dim));
        let state_dtype = config.state_dtype(options, "mamba_ssm_dtype")?;
        let state_bytes = product(config, self.heads_field, &[heads, dim, dim, state_dtype.bytes(config)?])?;
        // The convolution keeps the model's own numbers, whatever the cache is quantised to.
        let conv_dtype = config.model_dtype()?;
        let conv_bytes =
            product(config, self.heads_field, &[3, heads, dim, inputs.into(), conv_dtype.bytes(config)?])?;
        let state = |bytes| Role::State { bytes, empty_at_multiple_of: None };
        Ok(vec![
            part("recurrent", "recurrent_state", state(state_bytes), self.heads, state_dtype.name()),
            part("conv", "conv_state", state(conv_bytes), self.heads, conv_dtype.name()),
        ])
    }
}

const HEADS: &str = "the number of heads of a delta layer";
const DIM: &str = "the size of a head";
const KERNEL: &str = "the number of tokens in the convolution";

/// Kimi-Linear and Kimi-K3: `linear_attn_config` lists layers of both kinds, counted from one.
pub(super) fn kimi(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let inner = config.nested("linear_attn_config", "the list of delta layers and their sizes")?;
    let last = layers.saturating_add(1);
    let delta_layers = inner.layer_ids("kda_layers", "the list of delta layers", last)?;
    let full_layers =
        inner.layer_ids("full_attn_layers", "the list of layers with latent attention", last)?;
    let kind = |layer: usize| match (delta_layers.contains(&layer), full_layers.contains(&layer)) {
        (true, false) => Ok("delta"),
        (false, true) => Ok("mla"),
        _ => Err(inner
            .feature("kda_layers", "each layer must be in exactly one of kda_layers and full_attn_layers")),
    };
    let order = (1..last).map(kind).collect::<Result<Vec<_>, _>>()?;
    let delta = Delta {
        heads_field: "num_heads",
        heads: inner.heads("num_heads", HEADS)?,
        dim: inner.count("head_dim", DIM)?,
        kernel: inner.count("short_conv_kernel_size", KERNEL)?,
    };
    // Number formats stand in the text model's own object.
    beside_latents(config, options, &delta, order)
}

/// Ling-3.0: latent attention is the last of every `layer_group_size` layers, and all layers of an unfinished group.
pub(super) fn bailing(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let size = config.count("layer_group_size", "the interval of latent-attention layers")? as usize;
    let whole = layers.saturating_sub(layers.checked_rem(size).unwrap_or(0));
    let order = (0..layers)
        .map(|layer| {
            let ends = layer.saturating_add(1).checked_rem(size) == Some(0);
            if ends || layer >= whole { "mla" } else { "delta" }
        })
        .collect();
    let delta = Delta {
        heads_field: "num_attention_heads",
        heads: config.heads("num_attention_heads", HEADS)?,
        dim: config.count("head_dim", DIM)?,
        kernel: config.count("short_conv_kernel_size", KERNEL)?,
    };
    beside_latents(config, options, &delta, order)
}

fn beside_latents(
    config: &Config<'_>,
    options: &ImportOptions,
    delta: &Delta,
    order: Vec<&'static str>,
) -> Result<Built, ImportError> {
    latent::refuse_indexer(config)?;
    let mut parts = delta.parts(config, options)?;
    parts.push(latent::plain_part(config, config.kv_dtype(options)?)?);
    Ok(Built {
        parts,
        layer_kinds: vec![("delta", vec!["recurrent", "conv"]), ("mla", vec!["mla"])],
        order,
        ..Built::default()
    })
}
