//! Number formats of caches, and how many bytes a vector takes in each.

use super::ImportError;
use super::config::Config;

/// The number format of a cache entry or a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dtype {
    /// bfloat16, two bytes.
    Bf16,
    /// float16, two bytes.
    Fp16,
    /// float32, four bytes.
    Fp32,
    /// An 8-bit float; for latent attention the 656-byte entry with its scales.
    Fp8,
    /// 8-bit integers, with an fp32 scale beside each key and each value of each head.
    Int8,
    /// 4-bit floats, with an fp8 scale for each 16 of them beside the vector; for latent attention the record of the
    /// architecture.
    Nvfp4,
}

/// The number format of an indexer's keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IndexDtype {
    /// fp8 with one fp32 scale.
    #[default]
    Fp8,
    /// MXFP4.
    Fp4,
}

impl Dtype {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp32 => "fp32",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// What a spec says of keys and values in this format.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Int8 => "int8, fp32 scale a vector",
            Self::Nvfp4 => "nvfp4, fp8 scale each 16 numbers",
            _ => self.name(),
        }
    }

    /// Bytes of one number in a format that has nothing else.
    pub(super) fn bytes(self, config: &Config<'_>) -> Result<u64, ImportError> {
        match self {
            Self::Fp8 => Ok(1),
            Self::Bf16 | Self::Fp16 => Ok(2),
            Self::Fp32 => Ok(4),
            Self::Int8 | Self::Nvfp4 => {
                Err(config
                    .feature("dtype", "this number format has scales, and no record of it is known here"))
            }
        }
    }

    /// Bytes of one key or one value of `numbers` numbers, with its scales.
    pub(super) fn vector_bytes(
        self,
        config: &Config<'_>,
        field: &str,
        numbers: u32,
    ) -> Result<u64, ImportError> {
        let numbers = u64::from(numbers);
        match self {
            Self::Int8 => Ok(numbers.saturating_add(4)),
            Self::Nvfp4 => match (numbers.checked_rem(16), numbers.checked_div(2), numbers.checked_div(16)) {
                (Some(0), Some(data), Some(scales)) => Ok(data.saturating_add(scales)),
                _ => Err(ImportError::Value {
                    field: config.path(field),
                    found: numbers.to_string(),
                    expected: "a multiple of 16, for which the format has one scale each,".to_owned(),
                }),
            },
            _ => Ok(numbers.saturating_mul(self.bytes(config)?)),
        }
    }
}

impl IndexDtype {
    /// Bytes of a key of 128 numbers, and what a spec says of it.
    pub(super) fn key(self) -> (u64, &'static str) {
        match self {
            Self::Fp8 => (132, "fp8, fp32 scale"),
            Self::Fp4 => (68, "mxfp4"),
        }
    }
}
