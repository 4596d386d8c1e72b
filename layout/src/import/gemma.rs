//! Gemma: sliding windows beside full attention, with heads of their own (Gemma 4) and layers that read the cache of
//! others (Gemma 3n's form of Gemma 4).

use super::config::Config;
use super::dense::{WINDOW, heads_part, replay, sliding_or_full, window_part, windowed, windows_of};
use super::{Built, ImportError, ImportOptions};

/// Gemma 2: `layer_types`, or every second layer is full, as the architecture defines.
pub(super) fn gemma2(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let (order, note) =
        periodic(config, (2, "Every second layer has full attention, as the architecture defines."))?;
    windowed(config, options, order, note)
}

/// Gemma 3: `layer_types`, or `sliding_window_pattern`, whose last layer of each period is full. The architecture
/// itself makes the period 6 if the file says neither.
pub(super) fn gemma3(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let (order, note) =
        periodic(config, (6, "Every sixth layer has full attention, as the architecture defines."))?;
    windowed(config, options, order, note)
}

/// Command R7B: the same with a period of 4. A window has the token itself beside the `sliding_window` before it.
pub(super) fn cohere2(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    let layers =
        periodic(config, (4, "Every fourth layer has full attention, as the architecture defines."))?;
    let window = config.count("sliding_window", WINDOW)?.saturating_add(1);
    windows_of(config, options, layers, window)
}

/// Which layers are windows, and what the spec says of it. `own`: every how many layers one is full where the file does
/// not say.
fn periodic(config: &Config<'_>, own: (u32, &str)) -> Result<(Vec<&'static str>, String), ImportError> {
    let layers = config.layer_count()?;
    if let Some(types) = config.layer_types(layers)? {
        let order = sliding_or_full(config, &types)?;
        return Ok((order, String::new()));
    }
    let (period, note) = match config.has("sliding_window_pattern") {
        true => {
            (config.count("sliding_window_pattern", "the interval of full-attention layers")?, String::new())
        }
        false => (own.0, own.1.to_owned()),
    };
    let order = (1u32..)
        .take(layers)
        .map(|layer| if layer.checked_rem(period) == Some(0) { "full" } else { "sliding" })
        .collect();
    Ok((order, note))
}

/// Gemma 4: full layers have heads of `global_head_dim`, and `num_global_key_value_heads` of them where
/// `attention_k_eq_v` is on; engines keep the keys twice there. The last `num_kv_shared_layers` read the cache of the
/// last layer of their kind before them and keep nothing.
pub(super) fn gemma4(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    if config.has("use_bidirectional_attention") && config.text("use_bidirectional_attention", "")? == "all" {
        return Err(config.feature("use_bidirectional_attention", "encoders have no KV cache"));
    }
    let layers = config.layer_count()?;
    let Some(types) = config.layer_types(layers)? else {
        return Err(config.missing("layer_types", "the list of layers with sliding windows"));
    };
    let mut order = sliding_or_full(config, &types)?;
    let shared = config.optional_number("num_kv_shared_layers")?.unwrap_or(0) as usize;
    let own = layers.checked_sub(shared).filter(|&own| own > 0).ok_or_else(|| {
        config.feature(
            "num_kv_shared_layers",
            "every layer reads the cache of another layer: at least one \
            layer must have its own",
        )
    })?;
    let readers = order.split_off(own);
    if let Some(kind) = readers.iter().find(|kind| !order.contains(kind)) {
        let reason = match *kind {
            "full" => {
                "a full-attention layer reads the cache of an earlier full-attention layer, but no earlier \
                full-attention layer has its own cache"
            }
            _ => {
                "a sliding-window layer reads the cache of an earlier sliding-window layer, but no earlier \
                sliding-window layer has its own cache"
            }
        };
        return Err(config.feature("num_kv_shared_layers", reason));
    }
    let separate = config.switch("attention_k_eq_v")? == Some(true)
        && config.optional_number("num_global_key_value_heads")?.is_some();
    let global_heads = if separate { "num_global_key_value_heads" } else { "num_key_value_heads" };
    let window = config.count("sliding_window", WINDOW)?;
    let mut sliding = window_part(config, options, window)?;
    // Windows of readers are replayed too: theirs are the same.
    sliding.absence = replay(window, order.iter().chain(&readers).filter(|kind| **kind == "sliding").count());
    let note = match shared {
        0 => String::new(),
        _ => format!("The last {shared} of {layers} layers read the cache of other layers and are left out."),
    };
    Ok(Built {
        parts: vec![sliding, heads_part(config, options, "global_head_dim", global_heads)?],
        layer_kinds: vec![("sliding", vec!["window"]), ("full", vec!["kv"])],
        order,
        note,
        ..Built::default()
    })
}
