//! Exact non-negative fractions, for sizes such as 584 bytes each 128 tokens.
//!
//! A ratio is always in lowest terms, so that equal values are equal structs. No operation rounds; what does
//! not fit 64 bits is `None`.

use std::fmt;

/// A non-negative rational number in lowest terms.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ratio {
    numerator: u64,
    denominator: u64,
}

/// Digits after the point that [`Ratio`] prints at most before it falls back to a fraction.
const DECIMALS: u32 = 9;

pub(super) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while let Some(rest) = a.checked_rem(b) {
        (a, b) = (b, rest);
    }
    a
}

/// The least common multiple, or `None` if it does not fit or either number is zero.
pub(super) fn lcm(a: u64, b: u64) -> Option<u64> {
    a.checked_div(gcd(a, b))?.checked_mul(b).filter(|&lcm| lcm > 0)
}

impl Ratio {
    /// `numerator / denominator` in lowest terms, or `None` if the denominator is zero.
    pub fn new(numerator: u64, denominator: u64) -> Option<Self> {
        let divisor = gcd(numerator, denominator);
        (denominator > 0).then_some(())?;
        Some(Self {
            numerator: numerator.checked_div(divisor)?,
            denominator: denominator.checked_div(divisor)?,
        })
    }

    /// The numerator in lowest terms.
    pub fn numerator(self) -> u64 {
        self.numerator
    }

    /// The denominator in lowest terms, at least one.
    pub fn denominator(self) -> u64 {
        self.denominator
    }

    /// The whole number that this ratio is, if it is one.
    pub fn whole(self) -> Option<u64> {
        (self.denominator == 1).then_some(self.numerator)
    }

    /// The exact product, or `None` if it does not fit.
    pub fn checked_mul(self, factor: u64) -> Option<Self> {
        let divisor = gcd(factor, self.denominator);
        Some(Self {
            numerator: self.numerator.checked_mul(factor.checked_div(divisor)?)?,
            denominator: self.denominator.checked_div(divisor)?,
        })
    }

    /// The nearest double: what JSON shows. Exact for every ratio whose denominator is a power of two and whose
    /// numerator is below 2^53, which every shipped model's is.
    #[allow(clippy::arithmetic_side_effects, reason = "floating point does not panic")]
    pub fn to_f64(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }
}

impl fmt::Display for Ratio {
    /// The exact decimal if it has at most nine digits after the point, the fraction if not.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(whole) = self.whole() {
            return write!(f, "{whole}");
        }
        let scaled = 10u64.checked_pow(DECIMALS).and_then(|scale| self.checked_mul(scale)?.whole());
        let Some(scaled) = scaled else { return write!(f, "{}/{}", self.numerator, self.denominator) };
        let digits = format!("{scaled:010}");
        let (whole, fraction) = digits.split_at(digits.len().saturating_sub(DECIMALS as usize));
        write!(f, "{whole}.{}", fraction.trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_ratio_prints_as_the_exact_decimal_or_as_a_fraction() {
        let text = |numerator, denominator| Ratio::new(numerator, denominator).unwrap().to_string();
        assert_eq!(text(0, 7), "0");
        assert_eq!(text(131_072, 1), "131072");
        assert_eq!(text(705_464, 128), "5511.4375");
        assert_eq!(text(1, 128), "0.0078125");
        assert_eq!(text(1, 3), "1/3");
        assert_eq!(text(u64::MAX, 1), u64::MAX.to_string());
        assert_eq!(text(u64::MAX, 2), format!("{}/2", u64::MAX));
    }

    #[test]
    fn a_zero_denominator_is_refused() {
        assert_eq!(Ratio::new(1, 0), None);
        assert_eq!(Ratio::new(0, 0), None);
    }

    proptest! {
        #[test]
        fn equal_values_are_equal_structs(n in 0u64..1 << 20, d in 1u64..1 << 20, k in 1u64..1 << 20) {
            prop_assert_eq!(Ratio::new(n, d), Ratio::new(n * k, d * k));
        }

        #[test]
        fn a_product_divides_back(n in 0u64..1 << 30, d in 1u64..1 << 30, k in 1u64..1 << 30) {
            let product = Ratio::new(n, d).unwrap().checked_mul(k).unwrap();
            prop_assert_eq!(
                u128::from(product.numerator()) * u128::from(d),
                u128::from(n) * u128::from(k) * u128::from(product.denominator())
            );
        }
    }
}
