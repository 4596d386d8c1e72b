//! What a stored byte is worth: how much computing it spares. Stores choose by it what they evict and what they let in, and
//! so does the simulator.
//!
//! A byte is worth the computing of a token by the bytes that are kept of it, as a power of two against a usual model. How
//! long an engine computes a token is known once it has asked for a plan. Until then it is what a shipped model of this name, or
//! of these bytes, takes on a usual device. Of a model that is not known either, a byte is worth as much as usual: bytes
//! alone do not say what they spare, because models that keep much of a token compute much for it, or little.

use kvarts_layout::Fingerprint;
use kvarts_layout::spec::Geometry;

use crate::cost::{Prefill, Roofline, device, shipped_like};

/// Bytes of a token that are worth as much as usual, and how long such a token is computed: 8e9 parameters at half
/// of what an H100's data sheet says.
const USUAL_BYTES_A_TOKEN: u64 = 64 << 10;
const USUAL_TOKEN_NS: u64 = 32_000;
/// How far from it an engine's own time counts: a caller who says more than is so must not have the store for itself.
const TOKEN_NS_MAX: u64 = USUAL_TOKEN_NS << 4;
const TOKEN_NS_MIN: u64 = USUAL_TOKEN_NS >> 4;
/// Tokens of the prefix by which times and bytes are compared, and those that are computed behind it.
const PREFIX_TOKENS: u64 = 8192;
const NEW_TOKENS: u64 = 256;
/// The device that shipped models are compared on while no engine has told its times.
const FLEET_DEVICE: &str = "h100";
/// Askings, this one among them, with which a block of usual worth is let in where little may be written.
const ASKINGS: u8 = 2;

/// How long an engine computes a token of a prefix, in nanoseconds and bounded; `None` where the times say nothing of use.
///
/// The step that computes what is new is taken either way: what counts is what the prefix adds to it, where the times say so.
pub fn token_ns(times: &dyn Prefill) -> Option<u64> {
    let alone = times.prefill_ms(0, PREFIX_TOKENS);
    let added = times.prefill_ms(0, PREFIX_TOKENS + NEW_TOKENS) - times.prefill_ms(PREFIX_TOKENS, NEW_TOKENS);
    let spared = if added.is_finite() && added > 0.0 { added } else { alone };
    let each = spared / PREFIX_TOKENS as f64 * 1e6;
    (each.is_finite() && each > 0.0).then(|| (each as u64).clamp(TOKEN_NS_MIN, TOKEN_NS_MAX))
}

/// The same of a model whose engine has told nothing, by what it is called and the fingerprint of its spec: as a shipped model's
/// cost on one H100. `None` of a model that is like none of them.
pub fn usual_token_ns(model: &str, spec: Fingerprint) -> Option<u64> {
    token_ns(&Roofline::new(shipped_like(model, spec)?, device(FLEET_DEVICE)?, 1))
}

/// Bytes that are kept of each token of a usual prefix, over all groups and all coordinates of a model: what is spared by it is
/// spared once, however many ranks hold parts of it.
pub fn token_bytes(geometry: &Geometry, block_tokens: u32) -> u64 {
    let tokens = PREFIX_TOKENS.max(block_tokens.into());
    let Ok(bytes) = geometry.bytes_for_tokens(tokens, block_tokens) else { return USUAL_BYTES_A_TOKEN };
    let all = bytes.stream_bytes.saturating_add(bytes.boundary_bytes);
    all.checked_div(bytes.tokens).unwrap_or(USUAL_BYTES_A_TOKEN)
}

/// What each byte of a model's blocks is worth, from the bytes that are kept of a token ([`token_bytes`]) and how long one is
/// computed ([`token_ns`], [`usual_token_ns`]): a value higher by one is worth twice as much. 0 is usual, and what a byte is worth
/// of which it is not known how long it takes to compute.
pub fn worth(token_bytes: u64, token_ns: Option<u64>) -> i8 {
    let Some(token_ns) = token_ns else { return 0 };
    let spared = token_ns.clamp(TOKEN_NS_MIN, TOKEN_NS_MAX) as f64 / USUAL_TOKEN_NS as f64;
    let kept = token_bytes.max(1) as f64 / USUAL_BYTES_A_TOKEN as f64;
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
    use crate::cost::{MODELS, Sample, Times, model};
    use kvarts_layout::spec::shipped;

    /// A shipped model's bytes of a token, what a byte is worth while nothing is told, and the rate from which loading pays.
    fn of(name: &str) -> (u64, i8, f64) {
        let spec = shipped::load(name).unwrap();
        let bytes = token_bytes(spec.geometry(), spec.default_block_tokens());
        let times = Roofline::new(model(name).unwrap(), device("h100").unwrap(), 1);
        let spared = times.prefill_ms(0, 8192 + 256) - times.prefill_ms(8192, 256);
        (bytes, worth(bytes, usual_token_ns(name, spec.fingerprint())), bytes as f64 * 8192.0 / spared)
    }

    #[test]
    fn without_times_no_pair_of_shipped_models_is_in_the_wrong_order() {
        let all: Vec<_> = MODELS.iter().map(|(name, _)| (*name, of(name))).collect();
        let (mut right, mut pairs) = (0, 0);
        for (place, (one, (_, one_worth, one_rate))) in all.iter().enumerate() {
            for (other, (_, other_worth, other_rate)) in all.iter().skip(place + 1) {
                pairs += 1;
                // The less a disk must deliver for its bytes to pay, the more each of them is worth.
                let (least, most) =
                    if one_rate < other_rate { (one_worth, other_worth) } else { (other_worth, one_worth) };
                assert!(
                    least >= most,
                    "{one} {one_worth} at {one_rate}, {other} {other_worth} at {other_rate}"
                );
                right += usize::from(least > most);
            }
        }
        assert_eq!(pairs, 22 * 21 / 2);
        // The others are worth the same to the power of two.
        assert!(right > pairs * 3 / 4, "{right} of {pairs}");
    }

    #[test]
    fn a_model_that_is_not_known_is_worth_as_much_as_usual_whatever_its_bytes() {
        for bytes in [0, 1, 5031, 64 << 10, 327_680, u64::MAX] {
            assert_eq!(worth(bytes, None), 0);
        }
        assert_eq!(usual_token_ns("other/unheard-of-7b", Fingerprint([7; 32])), None);
    }

    #[test]
    fn heads_on_eight_ranks_are_worth_what_they_are_on_one() {
        // What a store keeps of each block is one of the coordinates; the bytes of a token are those of all of them.
        let spec = shipped::load("llama-3.1-70b").unwrap();
        let (geometry, tokens) = (spec.geometry(), spec.default_block_tokens());
        let group = geometry.groups().first().unwrap().group;
        for ranks in [1u16, 2, 4, 8] {
            let columns = geometry.coordinates(group, ranks).unwrap();
            let shapes = columns.iter().map(|column| geometry.shape(group, *column, tokens).unwrap());
            let bytes: u64 = shapes.map(|shape| shape.block_bytes()).sum();
            assert_eq!(bytes / u64::from(tokens), token_bytes(geometry, tokens), "{ranks} ranks");
        }
    }

    #[test]
    fn what_a_caller_says_of_its_engine_counts_within_bounds() {
        let usual = worth(64 << 10, Some(USUAL_TOKEN_NS));
        assert_eq!(usual, 0);
        assert_eq!(worth(64 << 10, Some(u64::MAX)), 4);
        assert_eq!(worth(64 << 10, Some(0)), -4);
        assert!(worth(0, Some(1)) > worth(u64::MAX, Some(u64::MAX)));
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
