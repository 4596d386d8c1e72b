//! Latent attention of the DeepSeek family: plain, with a sparse indexer, and with compressed entries (V4).

use std::num::NonZeroU32;

use crate::spec::form::DraftPart;
use crate::spec::{Absence, Role};

use super::config::Config;
use super::dense::replay;
use super::{Built, Dtype, ImportError, ImportOptions, part, product};

const LATENT: &str = "the size of the latent";
pub(super) const ROPE: &str = "the size of the rotary key";
pub(super) const INDEX: &str = "the size of an indexer key";

/// The dimensions for which the fp8 entry formats are defined.
pub(super) const LATENT_DIM: u32 = 512;
pub(super) const ROPE_DIM: u32 = 64;
pub(super) const INDEX_DIM: u32 = 128;

/// Plain latent attention (DeepSeek-V3, Kimi K2).
pub(super) fn mla(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    refuse_indexer(config)?;
    let dtype = config.kv_dtype(options)?;
    if dtype == Dtype::Nvfp4 {
        return Err(config.feature(
            "kv_lora_rank",
            "the number format nvfp4 is supported only for models with a sparse indexer",
        ));
    }
    Ok(Built {
        parts: vec![latent_part(config, dtype)?],
        layer_kinds: vec![("mla", vec!["mla"])],
        order: vec!["mla"; config.layer_count()?],
        draft: Some("mla"),
        ..Built::default()
    })
}

/// Latent attention with an indexer key beside each entry (DeepSeek-V3.2). Its kernels keep the fp8 entry unless
/// the caller says otherwise.
pub(super) fn sparse(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    expect(config, "index_head_dim", INDEX, INDEX_DIM)?;
    let index = part("index", "mla_index", Role::Stream { bytes: 132, tokens: 1 }, 0, "fp8, fp32 scale");
    Ok(Built {
        parts: vec![latent_part(config, options.kv_dtype.unwrap_or(Dtype::Fp8))?, index],
        layer_kinds: vec![("sparse", vec!["mla", "index"])],
        order: vec!["sparse"; config.layer_count()?],
        ..Built::default()
    })
}

pub(super) fn refuse_indexer(config: &Config<'_>) -> Result<(), ImportError> {
    for field in ["index_head_dim", "index_topk"] {
        if config.has(field) {
            return Err(config.feature(field, "this architecture has no sparse indexer"));
        }
    }
    Ok(())
}

/// One latent with its rotary key a token, as the part `mla`, in the records of sparse kernels where a format has scales.
pub(super) fn latent_part(config: &Config<'_>, dtype: Dtype) -> Result<DraftPart, ImportError> {
    let record = match dtype {
        // 512 fp8 numbers, 4 fp32 scales, 64 bf16 numbers.
        Dtype::Fp8 => Some((656, "fp8 latent, fp32 scales, bf16 rope")),
        // 512 numbers of 4 bits, 64 fp8 numbers, 32 fp8 scales.
        Dtype::Nvfp4 => Some((352, "nvfp4 latent, fp8 scales, fp8 rope")),
        _ => None,
    };
    let (bytes, label) = match record {
        Some(record) => {
            expect(config, "kv_lora_rank", LATENT, LATENT_DIM)?;
            expect(config, "qk_rope_head_dim", ROPE, ROPE_DIM)?;
            record
        }
        None => return plain_part(config, dtype),
    };
    Ok(part("mla", "mla", Role::Stream { bytes, tokens: 1 }, 0, label))
}

/// The same where kernels keep every number of the latent and of the rotary key in one format without scales.
pub(super) fn plain_part(config: &Config<'_>, dtype: Dtype) -> Result<DraftPart, ImportError> {
    let latent = config.count("kv_lora_rank", LATENT)?;
    // Without rotary numbers the configuration says 0.
    let rope = match config.optional_number("qk_rope_head_dim")? {
        Some(0) => 0,
        _ => config.count("qk_rope_head_dim", ROPE)?,
    };
    let numbers = u64::from(latent).saturating_add(rope.into());
    let bytes = product(config, "kv_lora_rank", &[numbers, dtype.bytes(config)?])?;
    Ok(part("mla", "mla", Role::Stream { bytes, tokens: 1 }, 0, dtype.name()))
}

/// Refuses formats with scales where no record is known for latents of this architecture.
pub(super) fn refuse_records(config: &Config<'_>, dtype: Dtype) -> Result<(), ImportError> {
    match dtype {
        Dtype::Bf16 | Dtype::Fp16 | Dtype::Fp32 => Ok(()),
        _ => Err(config.feature(
            "kv_lora_rank",
            "the cache entries of this architecture are supported only in number formats without scales",
        )),
    }
}

/// Compressed attention (DeepSeek-V4): each layer has a window, and by its compress ratio no (0), compressed
/// sparse (4) or heavily compressed (128) entries with what their compressors still hold.
pub(super) fn compressed(config: &Config<'_>, options: &ImportOptions) -> Result<Built, ImportError> {
    if options.kv_dtype.is_some_and(|dtype| dtype != Dtype::Fp8) {
        return Err(
            config.feature("head_dim", "the cache entries of this architecture are supported only in fp8")
        );
    }
    expect(config, "head_dim", "the size of an entry", LATENT_DIM)?;
    expect(config, "qk_rope_head_dim", ROPE, ROPE_DIM)?;
    let window = config.count("sliding_window", "the number of tokens in the window")?;
    let layers = config.layer_count()?;
    let order = by_ratio(config, layers)?;
    if order.contains(&"csa") {
        expect(config, "index_head_dim", INDEX, INDEX_DIM)?;
    }
    let replay = match replay(window, layers) {
        Absence::Recompute { tokens } => tokens,
        Absence::Required => 0,
    };
    // 448 fp8 numbers, 64 bf16 numbers, 7 scales of a byte, one byte of padding.
    let (entry, label) = (584, "fp8, ue8m0 scales, bf16 rope");
    let (index_bytes, index_label) = options.index_dtype.key();
    let mut sliding = part("window", "swa_window", Role::Window { bytes: entry, tokens: window }, 0, label);
    sliding.absence = Absence::Recompute { tokens: replay };
    let tail = |name: &str, bytes_per_token: u64, tokens: u32, overlaps: bool| -> Result<_, ImportError> {
        let role = Role::State {
            bytes: product(config, "head_dim", &[bytes_per_token, tokens.into()])?,
            // Entries that do not overlap leave nothing behind at a whole entry.
            empty_at_multiple_of: if overlaps { None } else { NonZeroU32::new(tokens) },
        };
        let mut tail = part(name, "compressor_tail", role, 0, "fp32");
        tail.absence = Absence::Recompute { tokens: replay.saturating_add(tokens.into()) };
        Ok(tail)
    };
    Ok(Built {
        parts: vec![
            part("csa", "csa_main", Role::Stream { bytes: entry, tokens: 4 }, 0, label),
            part("csa_index", "csa_index", Role::Stream { bytes: index_bytes, tokens: 4 }, 0, index_label),
            part("hca", "hca", Role::Stream { bytes: entry, tokens: 128 }, 0, label),
            sliding,
            // A token's value and score in fp32; twice that where two entries overlap.
            tail("csa_tail", 8192, 8, true)?,
            tail("index_tail", 2048, 8, true)?,
            tail("hca_tail", 4096, 128, false)?,
        ],
        layer_kinds: vec![
            ("swa", vec!["window"]),
            ("csa", vec!["csa", "csa_index", "window", "csa_tail", "index_tail"]),
            ("hca", vec!["hca", "window", "hca_tail"]),
        ],
        order,
        ..Built::default()
    })
}

fn by_ratio(config: &Config<'_>, layers: usize) -> Result<Vec<&'static str>, ImportError> {
    let Some(ratios) = config.numbers("compress_ratios")? else {
        let field = config.path("compress_ratios");
        return Err(ImportError::Missing { field, what: "the compression of each layer" });
    };
    // The list may go on with the draft layers, which a spec does not have.
    let drafts = config.optional_number("num_nextn_predict_layers")?.unwrap_or(0) as usize;
    if ratios.len() != layers && Some(ratios.len()) != layers.checked_add(drafts) {
        return Err(config.wrong_length("compress_ratios", ratios.len(), layers));
    }
    let kind = |(index, ratio): (usize, &u32)| match ratio {
        0 => Ok("swa"),
        4 => Ok("csa"),
        128 => Ok("hca"),
        other => Err(config.unknown_layer("compress_ratios", index, &other.to_string(), "0, 4 or 128")),
    };
    ratios.iter().enumerate().take(layers).map(kind).collect()
}

/// A dimension for which the entry's format is defined.
pub(super) fn expect(
    config: &Config<'_>,
    field: &str,
    what: &'static str,
    only: u32,
) -> Result<(), ImportError> {
    match config.count(field, what)? {
        found if found == only => Ok(()),
        found => Err(ImportError::Value {
            field: config.path(field),
            found: found.to_string(),
            expected: format!("{only}, the only supported size of a cache entry"),
        }),
    }
}
