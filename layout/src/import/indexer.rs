//! Sparse indexers that several layers share (GLM-5, Hunyuan 4), and index keys beside whole heads (MiniMax-M3).
//!
//! A layer with an indexer of its own keeps index keys; one that takes the choice of the layer before it keeps none.

use crate::ids::Group;
use crate::spec::Role;

use super::config::Config;
use super::dense::heads_part;
use super::latent::{INDEX, INDEX_DIM, expect, latent_part};
use super::{Built, Dtype, ImportError, ImportOptions, part, product};

/// Index keys beside parts with heads, whose group they cannot be in: ranks hold all of them.
pub(super) const WHOLE_KEYS: Group = Group(3);

/// GLM-5: `indexer_types`, or the schedule from which its configuration class makes them.
pub(super) fn glm(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let own = match (types(config, layers)?, schedule(config, layers)?) {
        (Some(types), Some(schedule)) if types != schedule => {
            return Err(config
                .feature("indexer_types", "the field contradicts index_topk_pattern or index_topk_freq"));
        }
        (Some(own), _) | (None, Some(own)) => own,
        (None, None) => vec![true; layers],
    };
    with_own(config, options, &own)
}

/// Hunyuan 4: `indexer_types`, or an indexer in layer 0 and each fourth layer from 1, as the architecture defines.
pub(super) fn hunyuan(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    if let Some(kinds) = config.layer_types(layers)? {
        let sparse = ["deepseek_sparse_attention", "sparse_attention", "sparse"];
        if let Some((index, other)) = kinds.iter().enumerate().find(|(_, kind)| !sparse.contains(kind)) {
            return Err(config.unknown_layer("layer_types", index, other, "deepseek_sparse_attention"));
        }
    }
    let by_rule = |layer: usize| layer == 0 || layer.saturating_sub(1).checked_rem(4) == Some(0);
    let own = types(config, layers)?.unwrap_or_else(|| (0..layers).map(by_rule).collect());
    with_own(config, options, &own)
}

/// The kernels of a sparse layer keep the fp8 entry unless the caller says otherwise.
fn with_own(config: &Config<'_>, options: &ImportOptions, own: &[bool]) -> Result<Built, ImportError> {
    expect(config, "index_head_dim", INDEX, INDEX_DIM)?;
    let (bytes, label) = options.index_dtype.key();
    let index = part("index", "mla_index", Role::Stream { bytes, tokens: 1 }, 0, label);
    Ok(Built {
        parts: vec![latent_part(config, options.kv_dtype.unwrap_or(Dtype::Fp8))?, index],
        layer_kinds: vec![("indexed", vec!["mla", "index"]), ("shared", vec!["mla"])],
        order: own.iter().map(|&own| if own { "indexed" } else { "shared" }).collect(),
        ..Built::default()
    })
}

/// Which layers `indexer_types` gives an indexer of their own.
fn types(config: &Config<'_>, layers: usize) -> Result<Option<Vec<bool>>, ImportError> {
    let Some(types) = config.texts("indexer_types")? else { return Ok(None) };
    if types.len() != layers {
        return Err(config.wrong_length("indexer_types", types.len(), layers));
    }
    let own = |(index, kind): (usize, &&str)| match *kind {
        "full" => Ok(true),
        "shared" => Ok(false),
        other => Err(config.unknown_layer("indexer_types", index, other, "full or shared")),
    };
    let own = types.iter().enumerate().map(own).collect::<Result<Vec<_>, _>>()?;
    match own.first() {
        Some(false) => Err(config.feature(
            "indexer_types",
            "the first layer shares an indexer, but no layer \
            before it has one",
        )),
        _ => Ok(Some(own)),
    }
}

/// `index_topk_pattern`, a letter a layer, or one layer of each `index_topk_freq` from `index_skip_topk_offset`.
fn schedule(config: &Config<'_>, layers: usize) -> Result<Option<Vec<bool>>, ImportError> {
    if config.has("index_topk_pattern") {
        let pattern = config.text("index_topk_pattern", "the list of layers with an indexer")?;
        if pattern.chars().count() != layers {
            return Err(config.wrong_length("index_topk_pattern", pattern.chars().count(), layers));
        }
        let own = |(index, letter): (usize, char)| match letter {
            'F' => Ok(true),
            'S' => Ok(false),
            other => Err(config.unknown_layer("index_topk_pattern", index, &other.to_string(), "F or S")),
        };
        return pattern.chars().enumerate().map(own).collect::<Result<_, _>>().map(Some);
    }
    if !config.has("index_topk_freq") {
        return Ok(None);
    }
    let each = config.count("index_topk_freq", "the number of layers that share an indexer")? as usize;
    let offset = config.optional_number("index_skip_topk_offset")?.unwrap_or(2) as usize;
    let own = |layer: usize| layer.saturating_add(1).saturating_sub(offset).checked_rem(each) == Some(0);
    Ok(Some((0..layers).map(own).collect()))
}

/// MiniMax-M3: every layer keeps keys and values; sparse ones an index key a token as well, in the model's own format.
pub(super) fn minimax_m3(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let sparse = config
        .nested("sparse_attention_config", "the list of layers that select blocks with an index key")?;
    if sparse.switch("use_sparse_attention")? == Some(false) {
        return Err(sparse
            .feature("use_sparse_attention", "this architecture is not supported without sparse attention"));
    }
    let flags = |field: &str, what| -> Result<Vec<u32>, ImportError> {
        let flags = sparse.numbers(field)?.ok_or_else(|| sparse.missing(field, what))?;
        match (flags.len() == layers, flags.iter().enumerate().find(|(_, flag)| **flag > 1)) {
            (false, _) => Err(sparse.wrong_length(field, flags.len(), layers)),
            (true, Some((index, other))) => {
                Err(sparse.unknown_layer(field, index, &other.to_string(), "0 or 1"))
            }
            (true, None) => Ok(flags),
        }
    };
    let chosen = flags("sparse_attention_freq", "the list of sparse layers")?;
    let keys_only =
        flags("sparse_disable_index_value", "the list of layers whose indexer stores keys but no values")?;
    if chosen.iter().zip(&keys_only).any(|(chosen, keys_only)| *chosen == 1 && *keys_only == 0) {
        return Err(
            sparse.feature("sparse_disable_index_value", "an indexer that stores values is not supported")
        );
    }
    let numbers = sparse.count("sparse_index_dim", INDEX)?;
    let dtype = config.model_dtype()?;
    let bytes = product(&sparse, "sparse_index_dim", &[numbers.into(), dtype.bytes(config)?])?;
    let mut index = part("index", "mla_index", Role::Stream { bytes, tokens: 1 }, 0, dtype.name());
    index.group = Some(WHOLE_KEYS);
    Ok(Built {
        parts: vec![heads_part(config, options, "head_dim", "num_key_value_heads")?, index],
        layer_kinds: vec![("full", vec!["kv"]), ("sparse", vec!["kv", "index"])],
        order: chosen.iter().map(|&flag| if flag == 1 { "sparse" } else { "full" }).collect(),
        ..Built::default()
    })
}
