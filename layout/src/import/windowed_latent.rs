//! Latents in every layer, of the newest tokens alone in some (Dots 3 Note).

use crate::spec::Role;

use super::config::Config;
use super::dense::{WINDOW, replay, sliding_or_full};
use super::latent::{INDEX, INDEX_DIM, ROPE, expect, plain_part, refuse_records};
use super::{Built, ImportError, ImportOptions, part, product};

/// Dots 3 Note: `layer_types` says which layers are sliding windows, whose latents and rotary keys have sizes of their
/// own; the others have a latent and an index key. vLLM pads the rows of both to the same size.
pub(super) fn dots3_note(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers = config.layer_count()?;
    let Some(types) = config.layer_types(layers)? else {
        return Err(config.missing("layer_types", "the list of layers with sliding windows"));
    };
    let order = sliding_or_full(config, &types)?;
    let dtype = config.kv_dtype(options)?;
    refuse_records(config, dtype)?;
    expect(config, "index_head_dim", INDEX, INDEX_DIM)?;
    let (bytes, label) = options.index_dtype.key();
    let index = part("index", "mla_index", Role::Stream { bytes, tokens: 1 }, 0, label);
    let tokens = config.count("sliding_window_size", WINDOW)?;
    let latent = config.count("swa_kv_lora_rank", "the size of the latent of a window")?;
    let rope = config.count("swa_qk_rope_head_dim", ROPE)?;
    let numbers = u64::from(latent).saturating_add(rope.into());
    let bytes = product(config, "swa_kv_lora_rank", &[numbers, dtype.bytes(config)?])?;
    let mut window = part("window", "mla_window", Role::Window { bytes, tokens }, 0, dtype.name());
    window.absence = replay(tokens, order.iter().filter(|kind| **kind == "sliding").count());
    Ok(Built {
        parts: vec![window, plain_part(config, dtype)?, index],
        layer_kinds: vec![("sliding", vec!["window"]), ("full", vec!["mla", "index"])],
        order,
        ..Built::default()
    })
}
