//! Times from what a device can do: the greater of arithmetic and of bytes moved, and both scaled to measured times.

use super::devices::{Compute, Device, Sparse};
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

/// What one step of an engine does for all its sequences.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Step {
    tokens: f64,
    attention_flops: f64,
    state_bytes: f64,
}

impl Roofline {
    /// A model on `ranks` devices of one kind. They share the work evenly; messages between ranks are not counted.
    pub fn new(model: Compute, device: Device, ranks: u32) -> Self {
        Self { model, device, ranks: f64::from(ranks.max(1)) }
    }

    /// What the model computes.
    pub fn compute(&self) -> &Compute {
        &self.model
    }

    /// One of the devices.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How many devices share the work.
    pub fn devices(&self) -> u32 {
        self.ranks as u32
    }

    /// Whether every figure is a sound one: times follow that are positive.
    pub fn is_sound(&self) -> bool {
        let Compute { params, active_params, weight_bytes, attention_flops, kv_bytes, sparse } = self.model;
        let Device { tflops, hbm_gb_per_s, hbm_gb: _, prefill_part, memory_part, step_ms } = self.device;
        let above = [params, active_params, weight_bytes, tflops, hbm_gb_per_s, prefill_part, memory_part];
        let sparse = sparse.unwrap_or(Sparse { tokens: 0.0, flops: 0.0, index_bytes: 0.0 });
        let not_below = [attention_flops, kv_bytes, step_ms, sparse.tokens, sparse.flops, sparse.index_bytes];
        above.iter().all(|figure| figure.is_finite() && *figure > 0.0)
            && not_below.iter().all(|figure| figure.is_finite() && *figure >= 0.0)
            && sparse.index_bytes <= kv_bytes
    }

    /// A prefill is part of a step.
    pub fn prefill(&self, step: &mut Step, cached: u64, new: u64) {
        let (cached, new) = (cached as f64, new as f64);
        // Each new token attends to those before it.
        step.attention_flops += self.model.attention(new, cached + new / 2.0);
        step.state_bytes += self.model.read(cached, new);
        step.tokens += new;
    }

    /// A token of each of `batch` sequences, which have `context` tokens together, is part of a step.
    pub fn decode(&self, step: &mut Step, batch: u64, context: u64) {
        if batch == 0 {
            return;
        }
        let (batch, context) = (batch as f64, context as f64);
        step.attention_flops += self.model.attention(batch, context / batch);
        step.state_bytes += self.model.read(context, batch);
        step.tokens += batch;
    }

    /// How long a step takes.
    pub fn step_ms(&self, step: &Step) -> f64 {
        let flops = 2.0 * self.model.active_params * step.tokens + step.attention_flops;
        // However few tokens there are, the weights that they use are read; however many, once.
        let touched = (self.model.active_params * step.tokens).min(self.model.params);
        let bytes = touched * self.model.weight_bytes + step.state_bytes;
        self.device.step_ms + (flops / self.flops_per_ms()).max(bytes / self.bytes_per_ms())
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
        let mut step = Step::default();
        self.prefill(&mut step, cached, new);
        self.step_ms(&step)
    }

    /// Fewer new tokens are fewer operations. Bytes that are read of what is there grow with it: they are not counted.
    fn least_ms(&self, prompt: u64, cached: u64) -> f64 {
        let sparse = self.model.sparse.map(|sparse| Sparse { index_bytes: 0.0, ..sparse });
        let without = Self { model: Compute { kv_bytes: 0.0, sparse, ..self.model }, ..*self };
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
        let mut step = Step::default();
        self.decode(&mut step, batch, context);
        self.step_ms(&step)
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
