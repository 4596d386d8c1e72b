//! Gated delta networks beside attention that chooses groups of tokens by a pooled index key, and a convolution over
//! n-grams in some of the linear layers (Qwen3.8-Flash-Next).

use std::num::NonZeroU32;

use crate::ids::Group;
use crate::spec::Role;

use super::config::Config;
use super::dense::heads_part;
use super::indexer::WHOLE_KEYS;
use super::latent::INDEX;
use super::linear::{delta_parts, order};
use super::{Built, ImportError, ImportOptions, part, product};

/// States that ranks hold all of, beside delta states with heads.
const WHOLE_STATES: Group = Group(4);
const NGRAM: &str = "the state of the convolution over n-grams";

/// Full layers keep keys and values, an index key for each `indexer_compress_ratio` tokens, and the keys of a group
/// that is not full. Linear layers in `ple_layer_ids`, counted from one, keep the last inputs of a convolution over
/// n-grams beside their delta state, for all residual streams.
pub(super) fn qwen4(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let mut order = order(config, "indexed_attention")?;
    let mut parts = delta_parts(config, options)?;
    parts.push(heads_part(config, options, "head_dim", "num_key_value_heads")?);
    let dtype = config.model_dtype()?;
    let indexed = config.has("indexer_head_dim");
    if indexed {
        let pool = config.count("indexer_compress_ratio", "the number of tokens for each index key")?;
        let pool = NonZeroU32::new(pool).filter(|pool| pool.get() > 1).ok_or_else(|| {
            config.feature("indexer_compress_ratio", "index keys that are not pooled are not supported")
        })?;
        if config.count("indexer_kv_heads", "the number of index keys for a group of tokens")? != 1 {
            return Err(config.feature(
                "indexer_kv_heads",
                "more than one index key for a group of tokens is not supported",
            ));
        }
        let numbers = config.count("indexer_head_dim", INDEX)?;
        let key = product(config, "indexer_head_dim", &[numbers.into(), dtype.bytes(config)?])?;
        let role = Role::Stream { bytes: key, tokens: pool.get() };
        let mut index = part("index", "mla_index", role, 0, dtype.name());
        // Keys of an open group are held in bf16, whatever format the index has.
        let open = product(config, "indexer_head_dim", &[pool.get().into(), numbers.into(), 2])?;
        let role = Role::State { bytes: open, empty_at_multiple_of: Some(pool) };
        let mut tail = part("tail", "compressor_tail", role, 0, "bf16");
        (index.group, tail.group) = (Some(WHOLE_KEYS), Some(WHOLE_STATES));
        parts.extend([index, tail]);
    }
    let layers = config.numbers("ple_layer_ids")?.unwrap_or_default();
    for &layer in &layers {
        let place = (layer as usize).checked_sub(1).and_then(|at| order.get_mut(at));
        match place {
            Some(kind) if *kind != "full" => *kind = "ngram",
            _ => {
                return Err(config.feature(
                    "ple_layer_ids",
                    "each entry must be the number of a linear layer, counted from 1",
                ));
            }
        }
    }
    if !layers.is_empty() {
        let kernel = config.count("ple_conv_kernel_size", NGRAM)?;
        let factors = [
            config.count("hidden_size", NGRAM)?.into(),
            config.count("hc_count", NGRAM)?.into(),
            kernel.saturating_sub(1).into(),
            config.count("ngram_size", NGRAM)?.into(),
            dtype.bytes(config)?,
        ];
        let bytes = product(config, "ple_conv_kernel_size", &factors)?;
        if bytes == 0 {
            return Err(config.feature(
                "ple_conv_kernel_size",
                "a convolution over one token has no state: at \
                least 2 tokens are needed",
            ));
        }
        let role = Role::State { bytes, empty_at_multiple_of: None };
        let mut ngram = part("ngram", "conv_state", role, 0, dtype.name());
        ngram.group = Some(WHOLE_STATES);
        parts.push(ngram);
    }
    let full = if indexed { vec!["kv", "index", "tail"] } else { vec!["kv"] };
    let linear = vec!["recurrent", "conv"];
    let ngram = vec!["recurrent", "conv", "ngram"];
    Ok(Built {
        parts,
        layer_kinds: vec![("linear", linear), ("ngram", ngram), ("full", full)],
        order,
        ..Built::default()
    })
}
