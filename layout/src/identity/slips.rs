//! Slips of the pen in an identity's file: a field that is nearly one, and a number format that is nearly one that engines use.
//!
//! `kv_dtype` is free text, because engines invent formats: a value is never refused for being unknown. One that differs from a
//! known name as a slip does is only asked about.

use crate::spec::shipped::distance;
use std::fmt;

/// Names of number formats as engines and models write them.
const DTYPES: [&str; 44] = [
    "auto",
    "bf16",
    "bfloat16",
    "f16",
    "f32",
    "float",
    "float16",
    "float32",
    "float64",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "fp16",
    "fp32",
    "fp4",
    "fp6",
    "fp64",
    "fp8",
    "fp8_ds_mla",
    "fp8_e4m3",
    "fp8_e4m3fn",
    "fp8_e4m3fnuz",
    "fp8_e5m2",
    "fp8_e5m2fnuz",
    "fp8e4m3",
    "fp8e5m2",
    "half",
    "i4",
    "i8",
    "int16",
    "int32",
    "int4",
    "int8",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nvfp4",
    "q4_0",
    "q8_0",
    "u8",
    "uint4",
    "uint8",
];

/// A value that is probably another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Doubt {
    /// Its line, from 1; 0 where that is not known.
    pub line: usize,
    /// What the file says.
    pub said: String,
    /// What is probably meant.
    pub meant: &'static str,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(
            f,
            "kv_dtype is {:?}, which is no number format of a known engine: did you mean {:?}? The \
            server uses the value as it is, and only an identity with the same value finds these blocks",
            self.said, self.meant
        )
    }
}

/// The known number format that this one is a slip of, if it is one of none itself.
pub fn dtype(said: &str) -> Option<&'static str> {
    let plain = said.strip_prefix("torch.").unwrap_or(said);
    if DTYPES.contains(&plain) || plain.len() > 32 {
        return None;
    }
    DTYPES.iter().copied().find(|known| is_slip(plain, known))
}

/// Whether one is the other in another case, with two neighbours swapped, or with one character too many, too few, or
/// wrong. Another digit is another format.
fn is_slip(said: &str, known: &str) -> bool {
    let lower: Vec<char> = said.to_lowercase().chars().collect();
    let known: Vec<char> = known.chars().collect();
    if lower == known {
        return true;
    }
    let differing: Vec<(usize, (&char, &char))> =
        lower.iter().zip(&known).enumerate().filter(|(_, (one, other))| one != other).collect();
    match (lower.len() == known.len(), &differing[..]) {
        (true, [(_, (one, other))]) => !(one.is_ascii_digit() && other.is_ascii_digit()) && known.len() > 3,
        (true, [(first, (a, b)), (second, (c, d))]) => {
            first.checked_add(1) == Some(*second) && a == d && b == c
        }
        (true, _) => false,
        (false, _) => known.len() > 3 && digits(&lower) == digits(&known) && distance(&lower, &known) == 1,
    }
}

fn digits(text: &[char]) -> Vec<char> {
    text.iter().copied().filter(char::is_ascii_digit).collect()
}

/// A parser's message about an unknown field, with the known one that is most like it; `-` and `_` are the same.
pub(super) fn field(message: &str) -> Option<String> {
    let rest = message.strip_prefix("unknown field `")?;
    let (said, known) = rest.split_once("`, expected ")?;
    let plain = |name: &str| name.replace('-', "_").chars().take(64).collect::<Vec<char>>();
    let wanted = plain(said);
    let named = known.split('`').skip(1).step_by(2);
    let scored = named.map(|name| (distance(&wanted, &plain(name)), name));
    let (_, meant) = scored.filter(|(edits, _)| *edits <= 2).min_by_key(|(edits, _)| *edits)?;
    Some(format!("unknown field `{said}`: did you mean `{}`?", meant.replace('-', "_")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_of_number_formats_are_asked_about_and_unknown_formats_are_not() {
        for (said, meant) in [
            ("bf61", "bf16"),
            ("BF16", "bf16"),
            ("bff16", "bf16"),
            ("bg16", "bf16"),
            ("f8_e4m3", "fp8_e4m3"),
            ("fp8-e4m3", "fp8_e4m3"),
            ("torch.bfloat61", "bfloat16"),
            ("flaot16", "float16"),
        ] {
            assert_eq!(dtype(said), Some(meant), "{said}");
        }
        for said in [
            "bf16",
            "torch.float16",
            "fp8",
            "fp5",
            "fp3",
            "f16",
            "u4",
            "int2",
            "turbo3",
            "fp8, fp32 scale",
            "test",
            "1",
            "",
        ] {
            assert_eq!(dtype(said), None, "{said}");
        }
    }

    #[test]
    fn a_field_that_is_nearly_one_is_named() {
        let said = |name: &str| {
            field(&format!("unknown field `{name}`, expected one of `model`, `kv_dtype`, `rope`"))
        };
        assert_eq!(said("kv-dtpe").unwrap(), "unknown field `kv-dtpe`: did you mean `kv_dtype`?");
        assert_eq!(said("KV-DTYPE"), None);
        assert_eq!(said("colour"), None);
        assert_eq!(field("expected an equals"), None);
    }
}
