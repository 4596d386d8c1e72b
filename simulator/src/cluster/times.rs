//! How long an engine's steps take: by a data sheet, or by its own steps.

use kvarts_planner::cost::{self, Decode, Kind, Prefill, Roofline, Told};

use serde::{Deserialize, Serialize};

/// An engine whose steps were measured: a step takes the sum of these.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Bytes of a block of all layers.
    pub block_bytes: u64,
    /// Layers.
    pub layers: u32,
    /// Every step.
    pub step_ms: f64,
    /// Each token that is computed.
    #[serde(default)]
    pub token_us: f64,
    /// Each sequence that is in it.
    #[serde(default)]
    pub sequence_us: f64,
    /// Each pair of a token that is computed and one before it.
    #[serde(default)]
    pub pair_ns: f64,
    /// A step that computes prompts, however many, besides: it goes through other kernels.
    #[serde(default)]
    pub prefill_ms: f64,
}

/// See the module.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum EngineTimes {
    /// A shipped model on devices of a kind.
    Sheet(Roofline),
    /// A straight line through measured steps.
    Measured(Measured),
}

/// What one step does for all its sequences.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Step {
    sheet: cost::Step,
    tokens: f64,
    sequences: f64,
    pairs: f64,
    prefills: bool,
}

impl Step {
    /// What a measured step's time is made of: the step itself, tokens, sequences, pairs of a token and one before it, and whether
    /// it computes prompts.
    pub fn terms(&self) -> [f64; 5] {
        [1.0, self.tokens, self.sequences, self.pairs, f64::from(u8::from(self.prefills))]
    }
}

impl EngineTimes {
    /// A prefill of `new` tokens behind `cached` ones is part of a step.
    pub fn prefill(&self, step: &mut Step, cached: u64, new: u64) {
        match self {
            Self::Sheet(sheet) => sheet.prefill(&mut step.sheet, cached, new),
            Self::Measured(_) => {
                step.prefills = true;
                step.tokens += new as f64;
                step.sequences += 1.0;
                step.pairs += new as f64 * (cached as f64 + new as f64 / 2.0);
            }
        }
    }

    /// A token of each of `batch` sequences, which have `context` tokens together, is part of a step.
    pub fn decode(&self, step: &mut Step, batch: u64, context: u64) {
        match self {
            Self::Sheet(sheet) => sheet.decode(&mut step.sheet, batch, context),
            Self::Measured(_) => {
                step.tokens += batch as f64;
                step.sequences += batch as f64;
                step.pairs += context as f64;
            }
        }
    }

    /// How long a step takes.
    pub fn step_ms(&self, step: &Step) -> f64 {
        match self {
            Self::Sheet(sheet) => sheet.step_ms(&step.sheet),
            Self::Measured(measured) => {
                let each = [
                    measured.step_ms,
                    measured.token_us / 1e3,
                    measured.sequence_us / 1e3,
                    measured.pair_ns / 1e6,
                    measured.prefill_ms,
                ];
                each.iter().zip(step.terms()).map(|(each, count)| each * count).sum::<f64>()
            }
        }
    }
}

impl Prefill for EngineTimes {
    fn prefill_ms(&self, cached: u64, new: u64) -> f64 {
        if new == 0 {
            return 0.0;
        }
        let mut step = Step::default();
        self.prefill(&mut step, cached, new);
        self.step_ms(&step)
    }

    fn least_ms(&self, prompt: u64, cached: u64) -> f64 {
        match self {
            Self::Sheet(sheet) => sheet.least_ms(prompt, cached),
            // Fewer new tokens are fewer of everything.
            Self::Measured(_) => self.prefill_ms(cached, prompt.saturating_sub(cached)),
        }
    }

    fn told(&self) -> Told {
        match self {
            Self::Sheet(sheet) => sheet.told(),
            Self::Measured(_) => Told { kind: Kind::Interpolated, samples: 0, error: None, error_max: None },
        }
    }
}

impl Decode for EngineTimes {
    fn decode_ms(&self, batch: u64, context: u64) -> f64 {
        if batch == 0 {
            return 0.0;
        }
        let mut step = Step::default();
        self.decode(&mut step, batch, context);
        self.step_ms(&step)
    }
}
