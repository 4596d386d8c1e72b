//! What a stored byte is worth: how much computing it spares. Stores choose by it what they evict and what they let in, and
//! so does the simulator.
//!
//! A byte is worth the computing of a token by the bytes that are kept of it, as a power of two against a usual model. How
//! long an engine computes a token is known once it has asked for a plan. Until then its tokens take as long as usual:
//! then a byte of a model that keeps few bytes of a token spares more, which of shipped models is nearly always so.

use crate::cost::Prefill;

/// Bytes of a token of blocks that are worth as much as usual, and how long such a token is computed: 8e9 parameters at half
/// of what an H100's data sheet says.
const USUAL_BYTES_A_TOKEN: u64 = 64 << 10;
const USUAL_TOKEN_NS: u64 = 32_000;
/// How far from it an engine's own time counts: a caller who says more than is so must not have the store for itself.
const TOKEN_NS_MAX: u64 = USUAL_TOKEN_NS << 4;
const TOKEN_NS_MIN: u64 = USUAL_TOKEN_NS >> 4;
/// Tokens of the prompt by which times of engines are compared.
const PROMPT_TOKENS: u64 = 8192;
/// Askings, this one among them, with which a block of usual worth is let in where little may be written.
const ASKINGS: u8 = 2;

/// How long an engine computes a token, in nanoseconds and bounded; `None` where the times say nothing of use.
pub fn token_ns(times: &dyn Prefill) -> Option<u64> {
    let each = times.prefill_ms(0, PROMPT_TOKENS) / PROMPT_TOKENS as f64 * 1e6;
    (each.is_finite() && each > 0.0).then(|| (each as u64).clamp(TOKEN_NS_MIN, TOKEN_NS_MAX))
}

/// What each byte of a block is worth, from the block's bytes and tokens and, where it is known, from how long a token is
/// computed ([`token_ns`]): a value higher by one is worth twice as much. 0 is usual.
pub fn worth(block_bytes: u64, block_tokens: u32, token_ns: Option<u64>) -> i8 {
    let each = (block_bytes / u64::from(block_tokens).max(1)).max(1);
    let by_bytes = USUAL_BYTES_A_TOKEN.ilog2() as i8 - each.ilog2() as i8;
    let Some(token_ns) = token_ns else { return by_bytes };
    let spared = token_ns.clamp(TOKEN_NS_MIN, TOKEN_NS_MAX) as f64 / USUAL_TOKEN_NS as f64;
    let kept = each as f64 / USUAL_BYTES_A_TOKEN as f64;
    (spared / kept).log2().round() as i8
}

/// How often a block must have been asked for, this time among them, to be let in where little may be written: once more if
/// its bytes are worth less than half of what others ask for, once less if they are worth more than twice as much. In a
/// store of one model all are equal.
pub fn askings(worth: i8, of_others: f64) -> u8 {
    match f64::from(worth) - of_others {
        more if more > 1.0 => ASKINGS - 1,
        less if less < -1.0 => ASKINGS + 1,
        _ => ASKINGS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Roofline, Sample, Times, device, model};

    #[test]
    fn a_byte_is_worth_more_the_fewer_of_them_a_token_has() {
        assert_eq!(worth(64 << 10, 1, None), 0);
        // 5 KiB and 320 KiB of a token.
        assert_eq!((worth(256 * 5031, 256, None), worth(256 * 327_680, 256, None)), (4, -2));
        assert!(worth(0, 0, None) > worth(u64::MAX, 1, None));
        assert_eq!((worth(1, u32::MAX, None), worth(u64::MAX, 0, None)), (16, -47));
    }

    #[test]
    fn a_byte_is_worth_what_it_spares_where_times_are_known() {
        // Break-even rates of shipped models on one device are times of a token by its bytes: their order is that of worth.
        let of = |name: &str| {
            let compute = model(name).unwrap();
            let times = Roofline::new(compute, device("h100").unwrap(), 8);
            let alone = Roofline::new(compute, device("h100").unwrap(), 1);
            let break_even = compute.kv_bytes / alone.prefill_ms(0, PROMPT_TOKENS);
            (break_even, worth(compute.kv_bytes as u64 * 64, 64, token_ns(&alone)), token_ns(&times).unwrap())
        };
        let ((large, large_worth, fast), (small, small_worth, _)) = (of("llama-3.1-70b"), of("llama-3.1-8b"));
        assert!(large < small && large_worth > small_worth, "{large_worth} and {small_worth}");
        assert!(
            fast < token_ns(&Roofline::new(model("llama-3.1-70b").unwrap(), device("h100").unwrap(), 1))
                .unwrap()
        );
        assert!(of("deepseek-v3").1 > large_worth);
    }

    #[test]
    fn what_a_caller_says_of_its_engine_counts_within_bounds() {
        let usual = worth(64 << 10, 1, Some(USUAL_TOKEN_NS));
        assert_eq!(usual, 0);
        assert_eq!(worth(64 << 10, 1, Some(u64::MAX)), 4);
        assert_eq!(worth(64 << 10, 1, Some(0)), -4);
        let said = |ms| token_ns(&Times::new(vec![Sample { cached: 0, new: 8192, ms }], None).unwrap());
        assert_eq!((said(1e12), said(1e-9)), (Some(TOKEN_NS_MAX), Some(TOKEN_NS_MIN)));
    }

    #[test]
    fn blocks_of_one_model_are_let_in_alike_and_those_of_less_worth_later() {
        for worth in [-3, 0, 4] {
            assert_eq!(askings(worth, f64::from(worth)), ASKINGS);
        }
        assert!(askings(4, 0.0) < ASKINGS && askings(-2, 1.0) > ASKINGS);
    }
}
