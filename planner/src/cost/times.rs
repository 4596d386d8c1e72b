//! An engine's times as one value: what a caller brings, stores ask and messages carry.

use super::samples::SampleError;
use super::{Interpolated, Prefill, Roofline, Sample, Scaled, Told};

/// How long an engine computes, from whatever is known of it: measured prefills, a data sheet, or both. Of both, the table
/// is taken that is less off its own samples.
#[derive(Clone, PartialEq, Debug)]
pub struct Times {
    samples: Vec<Sample>,
    roofline: Option<Roofline>,
    table: Table,
}

#[derive(Clone, PartialEq, Debug)]
enum Table {
    Interpolated(Interpolated),
    Roofline(Roofline),
    Scaled(Scaled),
}

impl Times {
    /// From measured prefills, a data sheet, or both.
    pub fn new(samples: Vec<Sample>, roofline: Option<Roofline>) -> Result<Self, SampleError> {
        let table = match roofline {
            Some(roofline) if samples.is_empty() => Table::Roofline(roofline),
            None => Table::Interpolated(Interpolated::new(&samples)?),
            Some(roofline) => {
                let interpolated = Interpolated::new(&samples)?;
                let scaled = Scaled::new(roofline, &samples)?;
                let (between, from_sheet) = (interpolated.told().error, scaled.told().error);
                match between.is_some() && between <= from_sheet {
                    true => Table::Interpolated(interpolated),
                    false => Table::Scaled(scaled),
                }
            }
        };
        Ok(Self { samples, roofline, table })
    }

    /// The measured prefills that they are from.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// The data sheet that they are from.
    pub fn roofline(&self) -> Option<&Roofline> {
        self.roofline.as_ref()
    }

    fn table(&self) -> &dyn Prefill {
        match &self.table {
            Table::Interpolated(table) => table,
            Table::Roofline(table) => table,
            Table::Scaled(table) => table,
        }
    }
}

impl From<Roofline> for Times {
    fn from(roofline: Roofline) -> Self {
        Self { samples: Vec::new(), roofline: Some(roofline), table: Table::Roofline(roofline) }
    }
}

impl Prefill for Times {
    fn prefill_ms(&self, cached: u64, new: u64) -> f64 {
        self.table().prefill_ms(cached, new)
    }

    fn least_ms(&self, prompt: u64, cached: u64) -> f64 {
        self.table().least_ms(prompt, cached)
    }

    fn told(&self) -> Told {
        self.table().told()
    }
}
