//! When a bucket is left alone: it has answered nothing useful for a time, however often it was asked. While it is left alone one request is
//! let through now and then, and the first useful answer ends it.

use std::time::Duration;

use kvarts_layout::planted;

/// How long after it is left alone the first request is let through; each further one after twice as long.
const FIRST: Duration = Duration::from_secs(1);

/// When a bucket is left alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// After this number of failures...
    pub(crate) failures: u32,
    /// ...over this time, without any useful answer in between.
    pub(crate) time: Duration,
    /// The longest time between requests that are let through.
    pub(crate) pause: Duration,
}

/// What a bucket answered lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outage {
    failures: u32,
    /// When the first of them came.
    since: Duration,
    /// When the next request is let through, and how long the one after it waits then; while the bucket is left alone.
    next: Option<(Duration, Duration)>,
}

impl Outage {
    /// Whether the bucket is left alone.
    pub(crate) fn is_on(&self) -> bool {
        self.next.is_some()
    }

    /// Whether a request may be made now. One that is let through is to show whether the bucket answers again.
    pub(crate) fn lets_through(&mut self, now: Duration, bounds: Bounds) -> bool {
        match self.next {
            None => true,
            Some((at, _)) if now < at => false,
            Some((_, wait)) => {
                let wait = wait.saturating_mul(2).min(bounds.pause);
                self.next = Some((now.saturating_add(wait), wait));
                true
            }
        }
    }

    /// Something useful was answered.
    pub(crate) fn ends(&mut self) {
        if planted!("bucket-left-alone") && self.is_on() {
            return;
        }
        *self = Self::default();
    }

    /// Nothing useful was.
    pub(crate) fn failed(&mut self, now: Duration, bounds: Bounds) {
        if self.failures == 0 {
            self.since = now;
        }
        self.failures = self.failures.saturating_add(1);
        let is_long = now.saturating_sub(self.since) >= bounds.time;
        if self.next.is_none() && is_long && self.failures >= bounds.failures {
            let wait = FIRST.min(bounds.pause);
            self.next = Some((now.saturating_add(wait), wait));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const BOUNDS: Bounds =
        Bounds { failures: 8, time: Duration::from_secs(3), pause: Duration::from_secs(30) };

    #[test]
    fn failures_at_one_moment_are_no_outage_however_many_they_are() {
        let mut outage = Outage::default();
        (0..1000).for_each(|_| outage.failed(SECOND, BOUNDS));
        assert!(!outage.is_on());
        outage.failed(4 * SECOND, BOUNDS);
        assert!(outage.is_on());
        // Nor are few over a long time, or many with an answer in between.
        let mut outage = Outage::default();
        (0..7).for_each(|at| outage.failed(at * SECOND, BOUNDS));
        assert!(!outage.is_on());
        outage.ends();
        (7..20).for_each(|_| outage.failed(7 * SECOND, BOUNDS));
        assert!(!outage.is_on());
    }

    #[test]
    fn a_bucket_that_is_left_alone_is_asked_now_and_then_and_at_once_when_it_has_answered() {
        let mut outage = Outage::default();
        (0..8).for_each(|at| outage.failed(at * SECOND, BOUNDS));
        let mut asked = Vec::new();
        for at in 7..160 {
            if outage.lets_through(at * SECOND, BOUNDS) {
                asked.push(at);
                outage.failed(at * SECOND, BOUNDS);
            }
        }
        assert_eq!(asked, [8, 10, 14, 22, 38, 68, 98, 128, 158]);
        outage.ends();
        assert!(!outage.is_on() && outage.lets_through(160 * SECOND, BOUNDS));
    }
}
