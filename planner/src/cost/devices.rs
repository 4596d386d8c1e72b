//! What devices can do by their data sheets, and what models compute for a token.
//!
//! Figures of devices are dense bf16 arithmetic and memory bandwidth as published; a device's parts of them are what
//! engines are usually seen to reach. Figures of models follow from their configurations: parameters used for a
//! token, operations for each pair of a token and one before it, bytes kept for a token.

use serde::{Deserialize, Serialize};

/// One accelerator.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// 1e12 operations a second.
    pub tflops: f64,
    /// 1e9 bytes a second of device memory.
    pub hbm_gb_per_s: f64,
    /// 1e9 bytes of device memory.
    pub hbm_gb: f64,
    /// The part of its arithmetic that a prefill reaches.
    pub prefill_part: f64,
    /// The part of its bandwidth that decoding reaches.
    pub memory_part: f64,
    /// What every step takes besides.
    pub step_ms: f64,
}

/// What a model computes and reads.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// All parameters.
    pub params: f64,
    /// Those used for a token.
    pub active_params: f64,
    /// Bytes of a parameter.
    pub weight_bytes: f64,
    /// Operations for each pair of a token and one that it attends to, over all layers.
    pub attention_flops: f64,
    /// Bytes that are kept of each token, over all layers. Without [`Sparse`] attention all of them are read.
    pub kv_bytes: f64,
    /// How attention chooses, where it does not look at every token.
    #[serde(default)]
    pub sparse: Option<Sparse>,
}

/// Attention to a bounded number of tokens, which an index over all of them chooses. Then the operations for each pair are
/// the index's.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sparse {
    /// Tokens that a token attends to, at most.
    pub tokens: f64,
    /// Operations for each of these, over all layers.
    pub flops: f64,
    /// Bytes of the index of each token, over all layers: these are read of all tokens before.
    pub index_bytes: f64,
}

impl Compute {
    /// Operations of attention for `new` tokens, each of which has `before` tokens before it.
    pub(super) fn attention(&self, new: f64, before: f64) -> f64 {
        let chosen = self.sparse.map_or(0.0, |sparse| sparse.flops * before.min(sparse.tokens));
        new * (self.attention_flops * before + chosen)
    }

    /// Bytes that are read of `cached` tokens for `new` ones.
    pub(super) fn read(&self, cached: f64, new: f64) -> f64 {
        match self.sparse {
            None => self.kv_bytes * cached,
            Some(sparse) => {
                let chosen = cached.min(new * sparse.tokens);
                sparse.index_bytes * cached + (self.kv_bytes - sparse.index_bytes) * chosen
            }
        }
    }
}

const fn device_of(tflops: f64, hbm_gb_per_s: f64, hbm_gb: f64) -> Device {
    Device { tflops, hbm_gb_per_s, hbm_gb, prefill_part: 0.5, memory_part: 0.7, step_ms: 2.0 }
}

/// Devices by name.
pub const DEVICES: [(&str, Device); 6] = [
    ("a100", device_of(312.0, 2039.0, 80.0)),
    ("h100", device_of(989.0, 3350.0, 80.0)),
    ("h200", device_of(989.0, 4800.0, 141.0)),
    ("h20", device_of(148.0, 4000.0, 96.0)),
    ("b200", device_of(2250.0, 8000.0, 180.0)),
    ("l40s", device_of(362.0, 864.0, 48.0)),
];

/// Of grouped-query attention: 4 operations for each of a query head's dimensions, keys and values together.
const fn dense(params: f64, active: f64, layers: f64, query_dims: f64, kv_bytes: f64) -> Compute {
    Compute {
        params: params * 1e9,
        active_params: active * 1e9,
        weight_bytes: 2.0,
        attention_flops: 4.0 * layers * query_dims,
        kv_bytes,
        sparse: None,
    }
}

/// Shipped models by name. Of models with latent attention the pair costs what absorbed heads compute (128 heads of
/// 576 and 512 dimensions); where an indexer chooses what is attended to, it is the indexer that looks at every pair. What a
/// layer of linear attention computes for a token is part of its active parameters. The 32 query heads of qwen3.5-397b are those
/// of its smaller sister.
pub const MODELS: [(&str, Compute); 22] = [
    ("llama-3.1-8b", dense(8.03, 8.03, 32.0, 4096.0, 131_072.0)),
    ("llama-3.1-70b", dense(70.6, 70.6, 80.0, 8192.0, 327_680.0)),
    ("mistral-small-24b", dense(23.6, 23.6, 40.0, 4096.0, 163_840.0)),
    ("qwen3-32b", dense(32.8, 32.8, 64.0, 8192.0, 262_144.0)),
    ("qwen3-coder-30b-a3b", dense(30.5, 3.3, 48.0, 4096.0, 98_304.0)),
    ("glm-4.5", dense(355.0, 32.0, 92.0, 12_288.0, 376_832.0)),
    ("minimax-m2", dense(230.0, 10.0, 62.0, 6144.0, 253_952.0)),
    ("gpt-oss-20b", windowed(dense(20.9, 3.6, 12.0, 4096.0, 24_576.0), 0.65, 12.0, 4096.0, 128.0)),
    ("gpt-oss-120b", windowed(dense(116.8, 5.1, 18.0, 4096.0, 36_864.0), 0.55, 18.0, 4096.0, 128.0)),
    ("gemma-3-27b", windowed(dense(27.0, 27.0, 10.0, 4096.0, 81_920.0), 2.0, 52.0, 4096.0, 1024.0)),
    ("qwen3-next-80b", dense(80.0, 3.0, 12.0, 4096.0, 24_576.0)),
    ("qwen3-next-80b-bf16state", dense(80.0, 3.0, 12.0, 4096.0, 24_576.0)),
    ("qwen3.5-397b", dense(397.0, 17.0, 15.0, 8192.0, 30_720.0)),
    ("qwen3.5-397b-bf16state", dense(397.0, 17.0, 15.0, 8192.0, 30_720.0)),
    ("kimi-k2", latent(1040.0, 32.0, 61.0, 64.0, 70_272.0)),
    ("kimi-k2-fp8", latent(1040.0, 32.0, 61.0, 64.0, 40_016.0)),
    ("deepseek-v3", latent(671.0, 37.0, 61.0, 128.0, 70_272.0)),
    ("deepseek-v3.2", indexed(671.0, 37.0, 61.0, 64.0, 48_068.0)),
    ("deepseek-v4-flash", compressed([284.0, 13.0], [21.0, 20.0, 43.0], 64.0, 512.0, 132.0)),
    ("deepseek-v4-flash-fp4idx", compressed([284.0, 13.0], [21.0, 20.0, 43.0], 64.0, 512.0, 68.0)),
    ("deepseek-v4-pro", compressed([1600.0, 49.0], [30.0, 31.0, 61.0], 128.0, 1024.0, 132.0)),
    ("deepseek-v4-pro-fp4idx", compressed([1600.0, 49.0], [30.0, 31.0, 61.0], 128.0, 1024.0, 68.0)),
];

/// With `layers` more that look at the last `tokens` only, and weights of `weight_bytes` each. What windows read for a step is left
/// out: it does not grow.
const fn windowed(full: Compute, weight_bytes: f64, layers: f64, query_dims: f64, tokens: f64) -> Compute {
    let sparse = Sparse { tokens, flops: 4.0 * layers * query_dims, index_bytes: full.kv_bytes };
    Compute { weight_bytes, sparse: Some(sparse), ..full }
}

/// Two kinds of layers over compressed entries of 512 dimensions, and windows of 128 tokens beside them (arXiv 2606.19348): of
/// one kind 64 indexer heads of 128 dimensions look at every entry of four tokens, and `top` of these are attended to; of the
/// other kind every entry of 128 tokens is.
const fn compressed(params: [f64; 2], layers: [f64; 3], heads: f64, top: f64, index_bytes: f64) -> Compute {
    let ([params, active], [chosen, dense, windows]) = (params, layers);
    let entry = 2.0 * heads * (512.0 + 512.0);
    let (tokens, window) = (4.0 * top, 128.0 * windows * entry);
    let index_bytes = chosen * index_bytes / 4.0 + dense * 584.0 / 128.0;
    Compute {
        params: params * 1e9,
        active_params: active * 1e9,
        weight_bytes: 0.6,
        attention_flops: chosen * 2.0 * 64.0 * 128.0 / 4.0 + dense * entry / 128.0,
        kv_bytes: index_bytes + chosen * 584.0 / 4.0,
        sparse: Some(Sparse { tokens, flops: chosen * entry / 4.0 + window / tokens, index_bytes }),
    }
}

const fn latent(params: f64, active: f64, layers: f64, heads: f64, kv_bytes: f64) -> Compute {
    let attention_flops = 2.0 * layers * heads * (576.0 + 512.0);
    let (params, active_params) = (params * 1e9, active * 1e9);
    Compute { params, active_params, weight_bytes: 1.0, attention_flops, kv_bytes, sparse: None }
}

/// 64 indexer heads of 128 dimensions look at each pair; 128 heads attend to the 2,048 tokens that they choose.
const fn indexed(params: f64, active: f64, layers: f64, heads: f64, kv_bytes: f64) -> Compute {
    let attention_flops = 2.0 * layers * heads * 128.0;
    let (params, active_params) = (params * 1e9, active * 1e9);
    let flops = 2.0 * layers * 128.0 * (576.0 + 512.0);
    let sparse = Some(Sparse { tokens: 2048.0, flops, index_bytes: layers * 132.0 });
    Compute { params, active_params, weight_bytes: 1.0, attention_flops, kv_bytes, sparse }
}

/// A device by its name.
pub fn device(name: &str) -> Option<Device> {
    DEVICES.iter().find(|(known, _)| *known == name).map(|(_, device)| *device)
}

/// What a shipped model computes, by its name.
pub fn model(name: &str) -> Option<Compute> {
    MODELS.iter().find(|(known, _)| *known == name).map(|(_, model)| *model)
}
