//! Latents without a rotary key, whose index keys are pooled (GLM-5.3-Flash).
//!
//! One index key stands for `index_kpool` tokens. Keys and scores of a pool that is not full yet are held in a ring of
//! one pool, which is empty wherever a pool ends.

use std::num::NonZeroU32;

use crate::spec::Role;

use super::config::Config;
use super::indexer::WHOLE_KEYS;
use super::kda::Delta;
use super::latent::{INDEX, INDEX_DIM, expect, plain_part, refuse_records};
use super::{Built, ImportError, ImportOptions, part, product};

/// GLM-5.3-Flash: `layer_types` says which layers are Kimi Delta Attention and which latent attention with an indexer.
pub(super) fn glm5_next(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let Some(types) = config.layer_types(layers)? else {
        return Err(config.missing("layer_types", "the list of delta layers"));
    };
    let kind = |(index, kind): (usize, &&str)| match *kind {
        "linear_attention" => Ok("delta"),
        "full_attention" | "deepseek_sparse_attention" | "indexed_attention" => Ok("pooled"),
        other => Err(config.unknown_layer("layer_types", index, other, "linear_attention or full_attention")),
    };
    let order = types.iter().enumerate().map(kind).collect::<Result<Vec<_>, _>>()?;
    expect(config, "index_head_dim", INDEX, INDEX_DIM)?;
    let pool = config.count("index_kpool", "the number of tokens for each index key")?;
    let pool = NonZeroU32::new(pool).filter(|pool| pool.get() > 1);
    let pool = pool
        .ok_or_else(|| config.feature("index_kpool", "index keys that are not pooled are not supported"))?;
    let delta = Delta {
        heads_field: "linear_num_heads",
        heads: config.heads("linear_num_heads", "the number of heads of a delta layer")?,
        dim: config.count("linear_head_dim", "the size of a head")?,
        kernel: config.count("linear_conv_kernel_dim", "the number of tokens in the convolution")?,
    };
    let mut parts = delta.parts(config, options)?;
    let dtype = config.kv_dtype(options)?;
    refuse_records(config, dtype)?;
    parts.push(plain_part(config, dtype)?);
    let (bytes, label) = options.index_dtype.key();
    parts.push(part("index", "mla_index", Role::Stream { bytes, tokens: pool.get() }, 0, label));
    // A key and a score in bf16 of each token of a pool.
    let open = product(config, "index_kpool", &[pool.get().into(), 2, INDEX_DIM.into(), 2])?;
    let role = Role::State { bytes: open, empty_at_multiple_of: Some(pool) };
    let mut tail = part("tail", "compressor_tail", role, 0, "bf16");
    tail.group = Some(WHOLE_KEYS);
    parts.push(tail);
    Ok(Built {
        parts,
        layer_kinds: vec![("delta", vec!["recurrent", "conv"]), ("pooled", vec!["mla", "index", "tail"])],
        order,
        ..Built::default()
    })
}
