//! How many bytes a number and a vector take in each number format.

use super::config::Config;
use super::{Dtype, ImportError};

impl Dtype {
    /// Bytes of one number in a format that has nothing else.
    pub(super) fn bytes(self, config: &Config<'_>) -> Result<u64, ImportError> {
        match self {
            Self::Fp8 => Ok(1),
            Self::Bf16 | Self::Fp16 => Ok(2),
            Self::Fp32 => Ok(4),
            Self::Int8 | Self::Nvfp4 => {
                Err(config.feature("dtype", "the scales of this number format are not supported"))
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
                    expected: "a multiple of 16, because the format has one scale for each 16 numbers"
                        .to_owned(),
                }),
            },
            _ => Ok(numbers.saturating_mul(self.bytes(config)?)),
        }
    }
}
