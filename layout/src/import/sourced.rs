//! Layers that read what an earlier layer keeps (DeepSeek-V4.1).
//!
//! Each layer keeps a window. Only the layers that `kv_source_layer_ids` names keep entries for the whole context, with
//! an index key beside each; a layer after them reads those of the last source before it. A source that makes one entry
//! of two tokens holds the first of them until the second comes, and nothing where an entry is whole.

use std::num::NonZeroU32;

use crate::spec::form::DraftPart;
use crate::spec::{Absence, Role};

use super::config::Config;
use super::dense::{WINDOW, replay};
use super::latent::{INDEX, INDEX_DIM, LATENT_DIM, ROPE, ROPE_DIM, expect};
use super::{Built, Dtype, ImportError, ImportOptions, part};

/// 512 fp8 numbers and a scale of a byte for each 32 of them.
const ENTRY: (u64, &str) = (528, "mxfp8, ue8m0 scales");
/// 512 numbers of 4 bits and a scale of a byte for each 16 of them.
const SMALL_ENTRY: (u64, &str) = (288, "nvfp4, fp8 scales");
/// A token's value and score in fp32.
const OPEN_TOKEN: u64 = 4096;

/// What a layer does, by its ratio: 1 or 2 tokens an entry.
struct Names {
    entry: &'static str,
    index: &'static str,
    source: &'static str,
    index_reader: &'static str,
    reader: &'static str,
}

const PAIRS: Names = Names {
    entry: "pairs",
    index: "pairs_index",
    source: "pairs_source",
    index_reader: "pairs_index_reader",
    reader: "pairs_reader",
};
const TOKENS: Names = Names {
    entry: "tokens",
    index: "tokens_index",
    source: "tokens_source",
    index_reader: "tokens_index_reader",
    reader: "tokens_reader",
};

/// DeepSeek-V4.1.
pub(super) fn deepseek_v41(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let (entry, label) = match options.kv_dtype {
        None | Some(Dtype::Fp8) => ENTRY,
        Some(Dtype::Nvfp4) => SMALL_ENTRY,
        Some(_) => {
            return Err(config.feature(
                "head_dim",
                "the cache entries of this architecture are supported only in fp8 and nvfp4",
            ));
        }
    };
    expect(config, "head_dim", "the size of an entry", LATENT_DIM)?;
    expect(config, "qk_rope_head_dim", ROPE, ROPE_DIM)?;
    expect(config, "index_head_dim", INDEX, INDEX_DIM)?;
    let window = config.count("sliding_window", WINDOW)?;
    let layers = config.layer_count()?;
    let order = order(config, layers)?;
    let replayed = replay(window, layers);
    // Windows keep the larger entry whatever the sources keep.
    let mut sliding =
        part("window", "swa_window", Role::Window { bytes: ENTRY.0, tokens: window }, 0, ENTRY.1);
    sliding.absence = replayed;
    let (index_bytes, index_label) = options.index_dtype.key();
    let stream = |name: &str, kind: &str, bytes: u64, tokens: u32, label: &str| {
        part(name, kind, Role::Stream { bytes, tokens }, 0, label)
    };
    Ok(Built {
        parts: vec![
            sliding,
            stream(PAIRS.entry, "csa_main", entry, 2, label),
            stream(PAIRS.index, "csa_index", index_bytes, 2, index_label),
            stream(TOKENS.entry, "csa_main", entry, 1, label),
            stream(TOKENS.index, "csa_index", index_bytes, 1, index_label),
            tail(replayed),
        ],
        draft: None,
        layer_kinds: vec![
            ("window", vec!["window"]),
            (PAIRS.source, vec![PAIRS.entry, PAIRS.index, "window", "tail"]),
            (PAIRS.index_reader, vec!["window"]),
            (PAIRS.reader, vec!["window"]),
            (TOKENS.source, vec![TOKENS.entry, TOKENS.index, "window"]),
            (TOKENS.index_reader, vec!["window"]),
            (TOKENS.reader, vec!["window"]),
        ],
        reads: vec![
            (PAIRS.index_reader, vec![PAIRS.entry, PAIRS.index]),
            (PAIRS.reader, vec![PAIRS.entry]),
            (TOKENS.index_reader, vec![TOKENS.entry, TOKENS.index]),
            (TOKENS.reader, vec![TOKENS.entry]),
        ],
        order,
        note: "On devices whose kernels use the entry format of DeepSeek-V4, an entry has 584 bytes instead \
            of the 528 bytes given here."
            .to_owned(),
    })
}

fn tail(replayed: Absence) -> DraftPart {
    let role = Role::State { bytes: OPEN_TOKEN, empty_at_multiple_of: NonZeroU32::new(2) };
    let mut tail = part("tail", "compressor_tail", role, 0, "fp32");
    tail.absence = replayed;
    tail
}

/// What each layer does. A layer that reads must be of its source's ratio: entries of another cover other tokens.
fn order(config: &Config<'_>, layers: usize) -> Result<Vec<&'static str>, ImportError> {
    let ratios = config
        .numbers("compress_ratios")?
        .ok_or_else(|| config.missing("compress_ratios", "the number of tokens for each entry of a layer"))?;
    // The list may go on with the draft layers, which a spec does not have.
    let drafts = config.optional_number("num_nextn_predict_layers")?.unwrap_or(0) as usize;
    if ratios.len() != layers && Some(ratios.len()) != layers.checked_add(drafts) {
        return Err(config.wrong_length("compress_ratios", ratios.len(), layers));
    }
    let sources = config.layer_ids("kv_source_layer_ids", "the list of layers that store entries", layers)?;
    let indices =
        config.layer_ids("index_source_layer_ids", "the list of layers that select entries", layers)?;
    let mut source = None;
    let mut chosen = false;
    let mut order = Vec::with_capacity(layers);
    for (layer, &ratio) in ratios.iter().enumerate().take(layers) {
        let refuse = |reason| config.feature(&format!("compress_ratios[{layer}]"), reason);
        let names = match ratio {
            0 if sources.contains(&layer) || indices.contains(&layer) => {
                return Err(refuse(
                    "a layer in kv_source_layer_ids or index_source_layer_ids must have entries",
                ));
            }
            0 => {
                order.push("window");
                continue;
            }
            1 => TOKENS,
            2 => PAIRS,
            other => {
                let found = other.to_string();
                return Err(config.unknown_layer("compress_ratios", layer, &found, "0, 1 or 2"));
            }
        };
        let chooses = indices.contains(&layer);
        chosen |= chooses;
        if !chosen {
            return Err(refuse(
                "this layer reads selected entries, but neither this layer nor an earlier layer is in \
                index_source_layer_ids",
            ));
        }
        if sources.contains(&layer) {
            if !chooses {
                return Err(refuse("a layer in kv_source_layer_ids must also be in index_source_layer_ids"));
            }
            source = Some(ratio);
            order.push(names.source);
        } else if source != Some(ratio) {
            return Err(refuse(
                "the nearest earlier layer in kv_source_layer_ids is missing or has another compress_ratio",
            ));
        } else {
            order.push(if chooses { names.index_reader } else { names.reader });
        }
    }
    Ok(order)
}
