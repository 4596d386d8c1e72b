//! How fast a bucket brings bytes: a rate, apart from the time until the first byte, by what came lately.
//!
//! What came long ago counts less and less, and after a while it is not known any more how fast the bucket is: an estimate that says that
//! nothing pays keeps anything from being brought, and so from being measured again. For the same reason a block is offered now and then
//! although the estimate is against it.

use std::time::Duration;

/// After this time what came counts half.
const HALF: Duration = Duration::from_secs(30);
/// After this time without anything the rate is not known.
const UNKNOWN: Duration = Duration::from_secs(600);
/// Of less than this, as it counts, a rate says little: a short restore does not fill a link.
const ENOUGH: f64 = (16 << 20) as f64;
/// How long after the last bytes, or the last try, a block is offered to try it.
const TRY_AFTER: Duration = Duration::from_secs(30);

/// What came over the way to a bucket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Estimate {
    bytes: f64,
    seconds: f64,
    /// When something came last; nothing has if it is not there.
    at: Option<Duration>,
    tried_at: Duration,
}

impl Estimate {
    /// Bytes came, of which the first took `latency` if they are the first ones after a rest.
    pub(super) fn came(&mut self, bytes: u64, time: Duration, latency: Option<Duration>, now: Duration) {
        // Bytes that come with their first one, or long after it, do not tell the two times apart: half of the time is theirs at least.
        let time = time.saturating_sub(latency.unwrap_or_default()).max(time / 2);
        let kept = self.kept(now);
        self.bytes = self.bytes * kept + bytes as f64;
        self.seconds = self.seconds * kept + time.as_secs_f64();
        self.at = Some(now);
    }

    /// The part that still counts.
    fn kept(&self, now: Duration) -> f64 {
        let age = now.saturating_sub(self.at.unwrap_or(now));
        0.5f64.powf(age.as_secs_f64() / HALF.as_secs_f64())
    }

    /// Bytes a second, if anything came in the last minutes.
    pub(super) fn rate(&self, now: Duration) -> Option<u64> {
        let is_known = self.at.is_some_and(|at| now.saturating_sub(at) < UNKNOWN);
        (is_known && self.bytes > 0.0 && self.seconds > 0.0)
            .then(|| ((self.bytes / self.seconds) as u64).max(1))
    }

    /// Whether so much came lately that the rate is that of the way, and not of a few short requests.
    pub(super) fn is_sure(&self, now: Duration) -> bool {
        self.bytes * self.kept(now) >= ENOUGH
    }

    /// Whether a block is to be offered although the estimate is against it: then that counts as tried.
    pub(super) fn tries(&mut self, now: Duration) -> bool {
        let last = self.at.unwrap_or_default().max(self.tried_at);
        let tries = now.saturating_sub(last) >= TRY_AFTER;
        if tries {
            self.tried_at = now;
        }
        tries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn one_short_restore_is_no_measure_of_the_way_and_a_long_one_is() {
        let mut estimate = Estimate::default();
        assert!(estimate.rate(SECOND).is_none() && !estimate.is_sure(SECOND));
        // One block of 2 MiB in 100 ms, of which 60 are the time to its first byte.
        estimate.came(2 * MIB, 100 * MS, Some(60 * MS), SECOND);
        assert_eq!(estimate.rate(SECOND), Some(40 * MIB));
        assert!(!estimate.is_sure(SECOND));
        // At a thousand a second, the short one hardly counts.
        estimate.came(1024 * MIB, SECOND, None, 2 * SECOND);
        let rate = estimate.rate(2 * SECOND).unwrap() / MIB;
        assert!((950..1000).contains(&rate) && estimate.is_sure(2 * SECOND), "{rate}");
    }

    #[test]
    fn a_rate_ages_by_the_clock_until_it_is_not_sure_and_then_not_known() {
        let mut estimate = Estimate::default();
        estimate.came(256 * MIB, 4 * SECOND, None, SECOND);
        let (sure, known): (Vec<u32>, Vec<u32>) = (
            (1..1200).filter(|at| estimate.is_sure(*at * SECOND)).collect(),
            (1..1200).filter(|at| estimate.rate(*at * SECOND) == Some(64 * MIB)).collect(),
        );
        assert_eq!((sure.len(), known.len()), (121, 600));
        // What came before the bucket became slower is soon outweighed.
        (0..60).for_each(|at| estimate.came(MIB, SECOND, None, (61 + at) * SECOND));
        let rate = estimate.rate(121 * SECOND).unwrap() / MIB;
        assert!(rate < 3, "{rate}");
    }

    #[test]
    fn a_block_is_tried_now_and_then_and_not_with_each_look_up() {
        let mut estimate = Estimate::default();
        estimate.came(MIB, 4 * SECOND, None, SECOND);
        let tried: Vec<u32> = (1..100).filter(|at| estimate.tries(*at * SECOND)).collect();
        assert_eq!(tried, [31, 61, 91]);
    }
}
