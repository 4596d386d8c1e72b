//! Makes a model spec from the `config.json` of a Hugging Face checkpoint.
//!
//! Only architectures whose cache is known are imported, and only with features that are understood: an unknown
//! architecture, a missing fact, or a feature that would change the geometry is refused with its name. Nothing is
//! guessed; where an architecture itself fixes a value that the file may leave out, the code says so.

mod config;
mod dense;
mod dtype;
mod gemma;
mod indexer;
mod kda;
mod latent;
mod linear;
mod mamba;
mod ngram;
mod pooled;
#[cfg(test)]
mod served_tests;
mod sourced;
#[cfg(test)]
mod tests;
mod vector;
mod windowed_latent;

use std::fmt;

use crate::spec::form::{Draft, DraftPart, Run};
use crate::spec::{Absence, FormError, ModelSpec, Role};

use config::Config;

pub use dtype::{Dtype, IndexDtype};

/// The most bytes a configuration may have.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// What the engine decides and the configuration does not say.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// The spec's name; otherwise the last component of `_name_or_path`, or the model type.
    pub name: Option<String>,
    /// The cache's number format; otherwise the model's own, or the format that the architecture's kernels fix.
    pub kv_dtype: Option<Dtype>,
    /// The recurrent state's number format; otherwise `mamba_ssm_dtype`, or fp32 as the reference code keeps it.
    pub state_dtype: Option<Dtype>,
    /// The number format of an indexer's keys.
    pub index_dtype: IndexDtype,
    /// The spec's block tokens; otherwise 256.
    pub block_tokens: Option<u32>,
    /// Whether draft (multi-token-prediction) layers are included, as an engine has them that decodes with them.
    pub draft_layers: bool,
}

/// Why a configuration cannot be imported.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ImportError {
    /// More than [`MAX_CONFIG_BYTES`].
    TooLarge,
    /// Not JSON.
    Json {
        /// The line, counted from one.
        line: usize,
        /// The column, counted from one.
        column: usize,
        /// The reader's message.
        message: String,
    },
    /// A fact that is not there.
    Missing {
        /// The field, as a dotted path.
        field: String,
        /// What it would say.
        what: &'static str,
    },
    /// A value that is not what the field should hold.
    Value {
        /// The field, as a dotted path.
        field: String,
        /// The value found, shortened.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A feature of a known architecture that would change the geometry in a way that is not understood.
    Feature {
        /// The field, as a dotted path.
        field: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// An architecture whose cache is not known.
    Architecture {
        /// Its name, shortened.
        name: String,
        /// The facts that a spec of it needs and that the file does not give.
        missing: Vec<&'static str>,
    },
    /// The numbers do not make a spec.
    Spec(FormError),
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => write!(
                f,
                "the model configuration is larger than the limit of \
                {MAX_CONFIG_BYTES} bytes"
            ),
            Self::Json { line, column, message } => {
                write!(f, "line {line}, column {column}: the text is not valid JSON: {message}")
            }
            Self::Missing { field, what } => write!(f, "{field}: the field is missing; expected {what}"),
            Self::Value { field, found, expected } => {
                write!(f, "{field}: found {found}; expected {expected}")
            }
            Self::Feature { field, reason } => write!(f, "{field}: {reason}"),
            Self::Architecture { name, missing } => write!(
                f,
                "the architecture {name} is not supported, because these facts about the architecture are \
                missing: {}. If you know these facts, write a spec by hand",
                missing.join(", ")
            ),
            Self::Spec(error) => write!(f, "no valid spec follows from the configuration: {error}"),
        }
    }
}

impl std::error::Error for ImportError {}

/// Layers and parts of a model, as an architecture's rules give them.
#[derive(Default)]
struct Built {
    parts: Vec<DraftPart>,
    layer_kinds: Vec<(&'static str, Vec<&'static str>)>,
    /// Parts of an earlier layer that a kind of layer reads.
    reads: Vec<(&'static str, Vec<&'static str>)>,
    order: Vec<&'static str>,
    /// The part that a draft layer of this architecture keeps one like, where that is known.
    draft: Option<&'static str>,
    note: String,
}

type Build = fn(&Config<'_>, &ImportOptions) -> Result<Built, ImportError>;

/// An architecture whose cache is known.
struct Architecture {
    model_type: &'static str,
    class: &'static str,
    /// Where the text model's facts are, if not at the top.
    nested: Option<&'static str>,
    build: Build,
    /// Fields that are refused elsewhere, and that this architecture's rules read.
    understands: &'static [&'static str],
}

const fn known(model_type: &'static str, class: &'static str, build: Build) -> Architecture {
    Architecture { model_type, class, nested: None, build, understands: &[] }
}

const fn nested(model_type: &'static str, class: &'static str, build: Build) -> Architecture {
    Architecture { model_type, class, nested: Some(TEXT), build, understands: &[] }
}

impl Architecture {
    const fn understands(mut self, fields: &'static [&'static str]) -> Self {
        self.understands = fields;
        self
    }
}

const SHARED_LAYERS: &[&str] = &["num_kv_shared_layers"];
const SHARED_INDEXER: &[&str] = &["index_topk_freq", "index_topk_pattern"];

const ARCHITECTURES: &[Architecture] = &[
    known("llama", "LlamaForCausalLM", dense::with_derived_head_dim),
    known("mistral", "MistralForCausalLM", dense::with_derived_head_dim),
    known("mixtral", "MixtralForCausalLM", dense::with_derived_head_dim),
    known("ministral3", "Ministral3ForCausalLM", dense::with_derived_head_dim),
    known("qwen2", "Qwen2ForCausalLM", dense::with_derived_head_dim),
    known("qwen2_moe", "Qwen2MoeForCausalLM", dense::with_derived_head_dim),
    known("phi3", "Phi3ForCausalLM", dense::with_derived_head_dim),
    known("granite", "GraniteForCausalLM", dense::with_derived_head_dim),
    known("granitemoe", "GraniteMoeForCausalLM", dense::with_derived_head_dim),
    known("granitemoeshared", "GraniteMoeSharedForCausalLM", dense::with_derived_head_dim),
    known("olmoe", "OlmoeForCausalLM", dense::with_derived_head_dim),
    known("stablelm", "StableLmForCausalLM", dense::with_derived_head_dim),
    known("nemotron", "NemotronForCausalLM", dense::with_derived_head_dim),
    known("ernie4_5", "Ernie4_5ForCausalLM", dense::with_derived_head_dim),
    known("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", dense::with_derived_head_dim),
    known("cohere", "CohereForCausalLM", dense::with_derived_head_dim),
    known("apertus", "ApertusForCausalLM", dense::with_derived_head_dim),
    known("glm4", "Glm4ForCausalLM", dense::with_derived_head_dim),
    known("gemma", "GemmaForCausalLM", dense::full),
    known("qwen3", "Qwen3ForCausalLM", dense::full),
    known("qwen3_moe", "Qwen3MoeForCausalLM", dense::full),
    nested("qwen2_vl", "Qwen2VLForConditionalGeneration", dense::with_derived_head_dim),
    nested("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", dense::with_derived_head_dim),
    nested("qwen3_vl", "Qwen3VLForConditionalGeneration", dense::full),
    nested("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", dense::full),
    nested("glm4v", "Glm4vForConditionalGeneration", dense::with_derived_head_dim),
    nested("glm4v_moe", "Glm4vMoeForConditionalGeneration", dense::with_derived_head_dim),
    known("glm4_moe", "Glm4MoeForCausalLM", dense::full),
    known("minimax_m2", "MiniMaxM2ForCausalLM", dense::minimax),
    known("minimax", "MiniMaxM2ForCausalLM", dense::minimax),
    known("gpt_oss", "GptOssForCausalLM", dense::by_layer_types),
    known("gemma2", "Gemma2ForCausalLM", gemma::gemma2),
    known("cohere2", "Cohere2ForCausalLM", gemma::cohere2),
    known("exaone4", "Exaone4ForCausalLM", dense::by_layer_types),
    nested("gemma3", "Gemma3ForConditionalGeneration", gemma::gemma3),
    known("gemma3_text", "Gemma3ForCausalLM", gemma::gemma3),
    nested("gemma4", "Gemma4ForConditionalGeneration", gemma::gemma4).understands(SHARED_LAYERS),
    known("gemma4_text", "Gemma4ForCausalLM", gemma::gemma4).understands(SHARED_LAYERS),
    known("deepseek_v2", "DeepseekV2ForCausalLM", latent::mla),
    known("glm4_moe_lite", "Glm4MoeLiteForCausalLM", latent::mla),
    known("deepseek_v3", "DeepseekV3ForCausalLM", latent::mla),
    known("kimi_k2", "DeepseekV3ForCausalLM", latent::mla),
    known("deepseek_v32", "DeepseekV32ForCausalLM", latent::sparse),
    known("deepseek_v4", "DeepseekV4ForCausalLM", latent::compressed),
    known("qwen3_next", "Qwen3NextForCausalLM", linear::gated_delta),
    nested("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", linear::gated_delta),
    known("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", linear::gated_delta),
    nested("qwen3_5", "Qwen3_5ForConditionalGeneration", linear::gated_delta),
    known("qwen3_5_text", "Qwen3_5ForCausalLM", linear::gated_delta),
    nested("qwen4_exp", "Qwen4ExpForConditionalGeneration", ngram::qwen4),
    known("qwen4_exp_text", "Qwen4ExpForCausalLM", ngram::qwen4),
    known("kimi_linear", "KimiLinearForCausalLM", kda::kimi),
    nested("kimi_k3", "KimiK3ForConditionalGeneration", kda::kimi),
    known("bailing_hybrid", "BailingMoeV3ForCausalLM", kda::bailing),
    known("glm_moe_dsa", "GlmMoeDsaForCausalLM", indexer::glm).understands(SHARED_INDEXER),
    known("dots3_note", "Dots3NoteForCausalLM", windowed_latent::dots3_note),
    known("hy_v4", "HYV4ForCausalLM", indexer::hunyuan),
    known("minimax_m3_text", "MiniMaxM3SparseForCausalLM", indexer::minimax_m3),
    nested("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", indexer::minimax_m3),
    nested("deepseek_v41", "DeepseekV41ForCausalLM", sourced::deepseek_v41),
    nested("glm5_next", "Glm5NextForConditionalGeneration", pooled::glm5_next),
    known("glm5_next_text", "Glm5NextForCausalLM", pooled::glm5_next),
    known("nemotron_h", "NemotronHForCausalLM", mamba::nemotron),
];

/// Models that turn pictures into tokens of a text model, which has a `model_type` of its own and keeps all there is.
const WRAPPERS: &[(&str, &str)] = &[
    ("idefics3", "Idefics3ForConditionalGeneration"),
    ("internvl", "InternVLForConditionalGeneration"),
    ("kimi_k25", "KimiK25ForConditionalGeneration"),
    ("kimi_vl", "KimiVLForConditionalGeneration"),
    ("llava", "LlavaForConditionalGeneration"),
    ("llava_next", "LlavaNextForConditionalGeneration"),
    ("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
    ("mistral3", "Mistral3ForConditionalGeneration"),
    ("smolvlm", "SmolVLMForConditionalGeneration"),
];

/// The spec of the model that a `config.json` describes, or which fact stands in the way.
pub fn import_hf_config(json: &str, options: &ImportOptions) -> Result<ModelSpec, ImportError> {
    if json.len() > MAX_CONFIG_BYTES {
        return Err(ImportError::TooLarge);
    }
    let value: serde_json::Value = serde_json::from_str(json).map_err(|error| ImportError::Json {
        line: error.line(),
        column: error.column(),
        message: config::message_of(&error),
    })?;
    let top = Config::top(&value)?;
    let (known, config) = text_model(top)?;
    config.refuse_shared_features(known.understands)?;
    let mut built = (known.build)(&config, options)?;
    let drafts = draft_layers(&config)?;
    let note = match (drafts, options.draft_layers) {
        (0, false) => built.note,
        (_, false) => format!("{} Layers of drafts (multi-token prediction) are not included.", built.note),
        (0, true) => {
            let field = config.path("num_nextn_predict_layers");
            return Err(ImportError::Missing { field, what: "the number of draft layers" });
        }
        (_, true) => {
            let reason = "the cached state of this architecture's draft layers is not known";
            let like = built.draft.and_then(|name| built.parts.iter().find(|part| part.name == name));
            let mut draft =
                like.cloned().ok_or_else(|| config.feature("num_nextn_predict_layers", reason))?;
            (draft.name, draft.kind) = ("draft".to_owned(), "draft".to_owned());
            built.parts.push(draft);
            built.layer_kinds.push(("draft", vec!["draft"]));
            built.order.extend((0..drafts).map(|_| "draft"));
            let last = if drafts == 1 {
                "layer is a draft".to_owned()
            } else {
                format!("{drafts} layers are drafts")
            };
            format!("{} The last {last} (multi-token prediction).", built.note)
        }
    };
    Draft {
        name: options.name.clone().unwrap_or_else(|| config.model_name(known.model_type)),
        source: format!("config.json, model_type {}: {}", known.model_type, config.facts()),
        note: note.trim().to_owned(),
        block_tokens: options.block_tokens.unwrap_or(crate::spec::DEFAULT_BLOCK_TOKENS),
        parts: built.parts,
        layer_kinds: of_used(built.layer_kinds, &built.order),
        reads: of_used(built.reads, &built.order),
        runs: vec![Run { repeat: 1, of: built.order.into_iter().map(str::to_owned).collect() }],
    }
    .finish_used()
    .map_err(ImportError::Spec)
}

const TEXT: &str = "text_config";
const TEXT_FACTS: &str = "the configuration of the text model";

/// What keeps the cache, and where its facts are.
fn text_model<'a>(top: Config<'a>) -> Result<(&'static Architecture, Config<'a>), ImportError> {
    let model_type = top.text("model_type", "the name of the architecture")?;
    if let Some((_, class)) = WRAPPERS.iter().find(|(name, _)| *name == model_type) {
        expect_class(&top, class)?;
        let text = top.nested(TEXT, TEXT_FACTS)?;
        let known = architecture(&text)?;
        return match known.nested {
            // A wrapper in a wrapper.
            Some(_) => Err(unknown(&text, known.model_type)),
            None => Ok((known, text)),
        };
    }
    let known = architecture(&top)?;
    match known.nested {
        // Files that were written before their architecture had a part for pictures have the facts at the top.
        Some(key) if top.has(key) || !top.has("num_hidden_layers") => {
            Ok((known, top.nested(key, TEXT_FACTS)?))
        }
        _ => Ok((known, top)),
    }
}

fn unknown(config: &Config<'_>, name: &str) -> ImportError {
    ImportError::Architecture { name: config::shorten(name), missing: missing_facts(config) }
}

fn architecture(config: &Config<'_>) -> Result<&'static Architecture, ImportError> {
    let model_type = config.text("model_type", "the name of the architecture")?;
    let known = ARCHITECTURES.iter().find(|known| known.model_type == model_type);
    let known = known.ok_or_else(|| unknown(config, model_type))?;
    expect_class(config, known.class)?;
    Ok(known)
}

/// Another class under a known model type is another model: a draft head, an encoder, a changed cache.
fn expect_class(config: &Config<'_>, class: &str) -> Result<(), ImportError> {
    let classes = config.texts("architectures")?.unwrap_or_default();
    match classes.iter().find(|other| **other != class) {
        Some(other) => Err(unknown(config, other)),
        None => Ok(()),
    }
}

/// Lists of parts for the kinds of layers that occur.
fn of_used(
    lists: Vec<(&'static str, Vec<&'static str>)>,
    order: &[&'static str],
) -> Vec<(String, Vec<String>)> {
    let used = lists.into_iter().filter(|(name, _)| order.contains(name));
    used.map(|(name, parts)| (name.to_owned(), parts.into_iter().map(str::to_owned).collect())).collect()
}

fn missing_facts(top: &Config<'_>) -> Vec<&'static str> {
    let mut missing = vec![
        "the cached state of each kind of layer (its parts, and how their sizes depend on the number of \
        tokens)",
    ];
    let facts = [
        ("num_hidden_layers", "num_hidden_layers"),
        ("num_key_value_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
    ];
    missing.extend(facts.iter().filter(|(field, _)| !top.has(field)).map(|(_, what)| *what));
    if !top.has("torch_dtype") && !top.has("dtype") {
        missing.push("the cache's number format (torch_dtype)");
    }
    missing
}

fn draft_layers(config: &Config<'_>) -> Result<u32, ImportError> {
    let mtp = config.optional_number("mtp_num_hidden_layers")?;
    Ok(match config.optional_number("num_nextn_predict_layers")?.or(mtp) {
        Some(layers) => layers,
        None => config.optional_number("num_mtp_modules")?.unwrap_or(0),
    })
}

/// A part with what most parts have in common.
fn part(name: &str, kind: &str, role: Role, heads: u16, dtype: &str) -> DraftPart {
    DraftPart {
        name: name.to_owned(),
        kind: kind.to_owned(),
        role,
        heads,
        align: 1,
        group: None,
        dtype: dtype.to_owned(),
        absence: Absence::Required,
        note: String::new(),
    }
}

/// The product, or a refusal that names the field that is most likely at fault.
fn product(config: &Config<'_>, field: &str, factors: &[u64]) -> Result<u64, ImportError> {
    factors.iter().try_fold(1u64, |product, &factor| product.checked_mul(factor)).ok_or_else(|| {
        ImportError::Value {
            field: config.path(field),
            found: "a value that is too large".to_owned(),
            expected: "a size that fits 64 bits".to_owned(),
        }
    })
}
