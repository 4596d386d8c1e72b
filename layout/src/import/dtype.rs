//! Number formats of caches.

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
