//! Times from what a device can do: the greater of arithmetic and of bytes moved, and both scaled to measured times.

use super::devices::{Compute, Device};
use super::samples::{SampleError, check};
use super::{Decode, Kind, Prefill, Sample, Told, errors};

/// See the module. Attention grows with the tokens before a token; everything else with new tokens alone.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Roofline {
    model: Compute,
    device: Device,
    /// Devices that share the work.
    ranks: f64,
}

impl Roofline {
    /// A model on so many devices of a kind. Work is shared evenly; what ranks tell each other is not counted.
    pub fn new(model: Compute, device: Device, ranks: u32) -> Self {
        Self { model, device, ranks: f64::from(ranks.max(1)) }
    }

    fn flops_per_ms(&self) -> f64 {
        self.device.tflops * 1e9 * self.device.prefill_part * self.ranks
    }

    fn bytes_per_ms(&self) -> f64 {
        self.device.hbm_gb_per_s * 1e6 * self.device.memory_part * self.ranks
    }
}

impl Prefill for Roofline {
    fn prefill_ms(&self, cached: u64, new: u64) -> f64 {
        if new == 0 {
            return 0.0;
        }
        let (cached, new) = (cached as f64, new as f64);
        // Each new token attends to those before it.
        let pairs = new * (cached + new / 2.0);
        let flops = 2.0 * self.model.active_params * new + self.model.attention_flops * pairs;
        // However few tokens there are, the weights that they use are read.
        let touched = (self.model.active_params * new).min(self.model.params);
        let bytes = touched * self.model.weight_bytes + self.model.kv_bytes * cached;
        self.device.step_ms + (flops / self.flops_per_ms()).max(bytes / self.bytes_per_ms())
    }

    /// Fewer new tokens are fewer operations. Bytes that are read of what is there grow with it: they are not counted.
    fn least_ms(&self, prompt: u64, cached: u64) -> f64 {
        let without = Self { model: Compute { kv_bytes: 0.0, ..self.model }, ..*self };
        without.prefill_ms(cached, prompt.saturating_sub(cached))
    }

    fn told(&self) -> Told {
        Told { kind: Kind::Roofline, samples: 0, error: None, error_max: None }
    }
}

impl Decode for Roofline {
    fn decode_ms(&self, batch: u64, context: u64) -> f64 {
        if batch == 0 {
            return 0.0;
        }
        let (batch, context) = (batch as f64, context as f64);
        let touched = (self.model.active_params * batch).min(self.model.params);
        let flops = 2.0 * self.model.active_params * batch + self.model.attention_flops * context;
        let bytes = touched * self.model.weight_bytes + self.model.kv_bytes * context;
        self.device.step_ms + (flops / self.flops_per_ms()).max(bytes / self.bytes_per_ms())
    }
}

/// A roofline, scaled to a few measured prefills: by one factor of arithmetic and one time for each step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scaled {
    of: Roofline,
    factor: f64,
    told: Told,
}

impl Scaled {
    /// The factor is the one with the least squares of relative errors.
    pub fn new(of: Roofline, samples: &[Sample]) -> Result<Self, SampleError> {
        check(samples)?;
        let ratios = samples.iter().map(|sample| of.prefill_ms(sample.cached, sample.new) / sample.ms);
        let (sum, squares) = ratios.fold((0.0, 0.0), |(sum, squares), r| (sum + r, squares + r * r));
        let factor = sum / squares;
        if !(factor.is_finite() && factor > 0.0) {
            return Err(SampleError::NoFit);
        }
        let said = samples.iter().map(|one| (factor * of.prefill_ms(one.cached, one.new), one.ms));
        let (error, error_max) = errors(said);
        let told = Told { kind: Kind::ScaledRoofline, samples: samples.len(), error, error_max };
        Ok(Self { of, factor, told })
    }

    /// What the roofline's times are multiplied by.
    pub fn factor(&self) -> f64 {
        self.factor
    }
}

impl Prefill for Scaled {
    fn prefill_ms(&self, cached: u64, new: u64) -> f64 {
        self.factor * self.of.prefill_ms(cached, new)
    }

    fn least_ms(&self, prompt: u64, cached: u64) -> f64 {
        self.factor * self.of.least_ms(prompt, cached)
    }

    fn told(&self) -> Told {
        self.told
    }
}

impl Decode for Scaled {
    fn decode_ms(&self, batch: u64, context: u64) -> f64 {
        self.factor * self.of.decode_ms(batch, context)
    }
}
