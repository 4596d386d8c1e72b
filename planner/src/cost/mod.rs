//! How long an engine takes: prefill by tokens that are there and new ones, decode by sequences and their tokens.
//!
//! Three kinds of tables, each of which says what it is and how far it is off its own samples ([`Told`]):
//!
//! - [`Interpolated`]: an engine's own times, between which is interpolated;
//! - [`Roofline`]: a model's arithmetic and bytes against what a device's data sheet says, where there are no times;
//! - [`Scaled`]: the second, scaled to a few of the first.
//!
//! [`Times`] is whichever of them is the best for what is known of an engine.

mod devices;
mod known;
mod roofline;
mod samples;
#[cfg(test)]
mod tests;
mod times;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use devices::{Compute, DEVICES, Device, MODELS, Sparse, device, model};
pub use known::shipped_like;
pub use roofline::{Roofline, Scaled, Step};
pub use samples::{Interpolated, SampleError};
pub use times::Times;

/// The most samples of a table.
pub const MAX_SAMPLES: usize = 1 << 16;

/// One measured prefill.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// Tokens whose state was there.
    pub cached: u64,
    /// Tokens that were computed.
    pub new: u64,
    /// How long it took.
    pub ms: f64,
}

/// One measured step of decoding.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeSample {
    /// Sequences in the batch.
    pub batch: u64,
    /// Tokens of all of them together.
    pub context: u64,
    /// How long the step took.
    pub ms: f64,
}

/// What a table is, and how good.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Told {
    /// Which kind.
    pub kind: Kind,
    /// Samples that it was made from.
    pub samples: usize,
    /// The mean error on its own samples, each left out in turn where the table would repeat it; as a part of 1.
    /// `None` without samples.
    pub error: Option<f64>,
    /// The greatest of these errors.
    pub error_max: Option<f64>,
}

/// The kinds of tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Between measured times.
    Interpolated,
    /// From a data sheet.
    Roofline,
    /// From a data sheet, scaled to measured times.
    ScaledRoofline,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Interpolated => "interpolated",
            Kind::Roofline => "roofline",
            Kind::ScaledRoofline => "scaled roofline",
        };
        match (self.error, self.error_max) {
            (Some(mean), Some(most)) => write!(
                f,
                "{kind} from {} samples, with an error of {:.1}% on average and {:.1}% at most",
                self.samples,
                100.0 * mean,
                100.0 * most
            ),
            _ => write!(f, "{kind} without measured times, so the error is not known"),
        }
    }
}

/// How long a prefill takes.
pub trait Prefill: fmt::Debug {
    /// The time in which `new` tokens are computed behind `cached` ones.
    fn prefill_ms(&self, cached: u64, new: u64) -> f64;

    /// A lower bound: no prefill of a prompt of `prompt` tokens, of which at most `cached` are there, takes less. The nearer
    /// the bound is to the truth, the sooner plans are found.
    fn least_ms(&self, prompt: u64, cached: u64) -> f64;

    /// What this table is.
    fn told(&self) -> Told;
}

/// How long a step of decoding takes.
pub trait Decode: fmt::Debug {
    /// The time of a step of `batch` sequences that have `context` tokens together.
    fn decode_ms(&self, batch: u64, context: u64) -> f64;
}

/// Mean and greatest relative error.
fn errors(pairs: impl Iterator<Item = (f64, f64)>) -> (Option<f64>, Option<f64>) {
    let (mut count, mut sum, mut most) = (0u32, 0.0, 0.0f64);
    for (said, measured) in pairs {
        let error = (said - measured).abs() / measured;
        (count, sum, most) = (count + 1, sum + error, most.max(error));
    }
    if count == 0 { (None, None) } else { (Some(sum / f64::from(count)), Some(most)) }
}
