//! The models whose specs come with the crate.
//!
//! Each is a text in `layout/models/`; a test parses all of them and pins their sizes and fingerprints.

use super::ModelSpec;

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        const SHIPPED: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../models/", $name, ".toml")))),*];
    };
}

shipped!(
    "llama-3.1-8b",
    "llama-3.1-70b",
    "mistral-small-24b",
    "qwen3-32b",
    "qwen3-coder-30b-a3b",
    "glm-4.5",
    "minimax-m2",
    "kimi-k2",
    "kimi-k2-fp8",
    "deepseek-v3",
    "deepseek-v3.2",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-3-27b",
    "qwen3-next-80b",
    "qwen3-next-80b-bf16state",
    "qwen3.5-397b",
    "qwen3.5-397b-bf16state",
    "deepseek-v4-pro",
    "deepseek-v4-pro-fp4idx",
    "deepseek-v4-flash",
    "deepseek-v4-flash-fp4idx",
);

/// The names of all shipped models, related ones beside each other.
pub fn names() -> impl ExactSizeIterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

/// The text of a shipped spec, with its comments; `None` if no model of this name is shipped.
pub fn text(name: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(shipped, _)| *shipped == name).map(|(_, text)| *text)
}

/// A shipped spec; `None` if no model of this name is shipped.
pub fn load(name: &str) -> Option<ModelSpec> {
    ModelSpec::parse(text(name)?).ok()
}

/// The shipped name that looks most like this one, or the first that begins with it, if any does.
pub fn similar(name: &str) -> Option<&'static str> {
    let wanted: Vec<char> = name.to_lowercase().chars().take(64).collect();
    let scored = names().map(|shipped| (distance(&wanted, &shipped.chars().collect::<Vec<_>>()), shipped));
    let close = wanted.len().div_ceil(3).max(1);
    scored
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= close)
        .map(|(_, name)| name)
        .or_else(|| names().find(|shipped| wanted.len() >= 3 && shipped.starts_with(&*name.to_lowercase())))
}

/// How many characters must be added, removed or replaced to make one from the other.
pub fn distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (above, from) in (1usize..).zip(a) {
        let mut diagonal = above.saturating_sub(1);
        let mut left = above;
        let mut next = vec![above];
        for (to, &up) in b.iter().zip(row.iter().skip(1)) {
            let replaced = diagonal.saturating_add(usize::from(from != to));
            left = replaced.min(up.saturating_add(1)).min(left.saturating_add(1));
            next.push(left);
            diagonal = up;
        }
        row = next;
    }
    row.last().copied().unwrap_or(a.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_text_is_a_spec_of_its_own_name() {
        for name in names() {
            let spec =
                ModelSpec::parse(text(name).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(spec.name(), name);
            assert!(!spec.source().is_empty(), "{name} says where its numbers come from");
        }
    }

    #[test]
    fn a_misspelt_name_is_recognised_and_a_strange_one_is_not() {
        assert_eq!(similar("llama-3.1-8B"), Some("llama-3.1-8b"));
        assert_eq!(similar("lama3.1-70b"), Some("llama-3.1-70b"));
        assert_eq!(similar("deepseek-v4pro"), Some("deepseek-v4-pro"));
        assert_eq!(similar("qwen3"), names().find(|name| name.starts_with("qwen3")));
        assert_eq!(similar("gpt-4"), None);
        assert_eq!(similar(""), None);
    }

    #[test]
    fn the_distance_counts_edits() {
        let distance = |a: &str, b: &str| {
            super::distance(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>())
        };
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", ""), 3);
    }
}
