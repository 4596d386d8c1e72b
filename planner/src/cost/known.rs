//! Which shipped model another one is like: by what engines call it, else by the fingerprint of its spec.

use std::sync::LazyLock;

use kvarts_layout::Fingerprint;
use kvarts_layout::spec::shipped;

use super::{Compute, MODELS};

/// What may stand behind a model's name without its computing anything else: how it was trained on, and how its weights are kept.
const SAME_MODEL: [&str; 17] = [
    "instruct",
    "it",
    "base",
    "chat",
    "hf",
    "thinking",
    "reasoning",
    "preview",
    "exp",
    "fp8",
    "bf16",
    "awq",
    "gptq",
    "int4",
    "int8",
    "nvfp4",
    "mxfp4",
];

/// Shipped models by the fingerprints of their specs.
static BY_SPEC: LazyLock<Vec<(Fingerprint, Compute)>> = LazyLock::new(|| {
    let of = |(name, compute): &(&str, Compute)| Some((shipped::load(name)?.fingerprint(), *compute));
    MODELS.iter().filter_map(of).collect()
});

/// What a model computes that is called so and has this spec, if a shipped one is like it: `meta-llama/Llama-3.1-8B-Instruct` is
/// llama-3.1-8b. Of several that keep the same of a token it is the one that computes least.
pub fn shipped_like(model: &str, spec: Fingerprint) -> Option<Compute> {
    let called = model.rsplit('/').next().unwrap_or(model).to_lowercase().replace('_', "-");
    let by_name =
        MODELS.iter().filter(|(name, _)| is_called(&called, name)).max_by_key(|(name, _)| name.len());
    if let Some((_, compute)) = by_name {
        return Some(*compute);
    }
    let of_spec = BY_SPEC.iter().filter(|(known, _)| *known == spec).map(|(_, compute)| *compute);
    of_spec.min_by(|one, other| one.active_params.total_cmp(&other.active_params))
}

/// Whether this is a shipped name, with whatever before it and nothing behind it that makes it another model.
fn is_called(called: &str, name: &str) -> bool {
    called.match_indices(name).any(|(at, _)| {
        let (before, behind) =
            (called.get(..at).unwrap_or(called), called.get(at + name.len()..).unwrap_or(called));
        let is_whole = before.is_empty() || before.ends_with('-');
        let mut words = behind.split('-');
        is_whole && words.next() == Some("") && words.all(is_same_model)
    })
}

fn is_same_model(word: &str) -> bool {
    // A date or a version of the weights, or the parameters that are used for a token: `a3b`.
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_active = word.strip_prefix('a').and_then(|rest| rest.strip_suffix('b')).is_some_and(is_number);
    SAME_MODEL.contains(&word) || is_number(word) || is_active
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::model;

    #[test]
    fn a_model_is_known_by_what_engines_call_it() {
        let nothing = Fingerprint([0; 32]);
        for (called, name) in [
            ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
            ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
            ("/models/Qwen3-Coder-30B-A3B-Instruct-FP8", "qwen3-coder-30b-a3b"),
            ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3-next-80b"),
            ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
            ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
            ("google/gemma-3-27b-it", "gemma-3-27b"),
        ] {
            assert_eq!(shipped_like(called, nothing), model(name), "{called}");
        }
        // Other models, whatever of their names is the same.
        for called in ["zai-org/GLM-4.5-Air", "DeepSeek-R1-Distill-Llama-70B", "xqwen3-32b", "qwen3", ""] {
            assert_eq!(shipped_like(called, nothing), None, "{called}");
        }
    }

    #[test]
    fn a_model_of_any_other_name_is_known_by_its_spec() {
        let spec = |name: &str| shipped::load(name).unwrap().fingerprint();
        assert_eq!(shipped_like("ours", spec("glm-4.5")), model("glm-4.5"));
        // Kimi K2 and DeepSeek-V3 keep the same of a token.
        assert_eq!(spec("kimi-k2"), spec("deepseek-v3"));
        assert_eq!(shipped_like("ours", spec("deepseek-v3")), model("kimi-k2"));
        assert_eq!(shipped_like("DeepSeek-V3", spec("deepseek-v3")), model("deepseek-v3"));
    }
}
