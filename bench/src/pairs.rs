//! Taking turns, and what may be said about the result.
//!
//! Contestants run in rounds, forwards in even rounds and backwards in odd ones, so that a machine that gets slower
//! or faster meanwhile favours no contestant. A ratio is taken within each round; of the rounds' ratios the median is told,
//! with an interval by order statistics that holds the true median in 95 of 100 runs, whatever the distribution.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use kvarts_terminal::Failure;

/// The control's bounds outside of which a run says nothing.
const CONTROL: std::ops::RangeInclusive<f64> = 0.95..=1.05;

/// Rounds that are run however long they take: of fewer there is no interval of 95%.
pub(super) const LEAST_ROUNDS: u32 = 6;
/// The same where single rounds are short: the interval leaves out the extremes.
pub(super) const LEAST_SHORT_ROUNDS: u32 = 9;

/// One run of one contestant.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// Seconds on the wall.
    pub(super) seconds: f64,
    /// Seconds of processor time of the whole process, the kernel's helpers for it included.
    pub(super) cpu: f64,
    /// Seconds until the first part was there, where there is such a part.
    pub(super) first: f64,
}

/// A contestant's name and what it does once.
pub(super) type Contestant<'a> = (&'static str, Box<dyn FnMut() -> Result<Sample, Failure> + 'a>);

/// The samples of all contestants, one for each round.
#[derive(Debug)]
pub(super) struct Rounds {
    names: Vec<&'static str>,
    samples: Vec<Vec<Sample>>,
}

/// A median, and the interval that holds the true one in 95 of 100 runs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Summary {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Summary {
    /// One by another, with the widest interval that theirs allow.
    pub(super) fn by(&self, other: &Self) -> Self {
        Self { median: self.median / other.median, low: self.low / other.high, high: self.high / other.low }
    }
}

/// Lets the contestants take turns: one round that does not count, then `rounds` that do.
pub(super) fn take_turns(rounds: u32, contestants: Vec<Contestant<'_>>) -> Result<Rounds, Failure> {
    take_turns_within(Duration::MAX, LEAST_ROUNDS, rounds, contestants)
}

/// The same, on a slow machine fewer rounds: none begins after this time, unless there were not the least that there must be.
pub(super) fn take_turns_within(
    time: Duration,
    least: u32,
    rounds: u32,
    mut contestants: Vec<Contestant<'_>>,
) -> Result<Rounds, Failure> {
    let begin = Instant::now();
    let names = contestants.iter().map(|(name, _)| *name).collect();
    let mut samples = vec![Vec::new(); contestants.len()];
    for round in 0..=rounds {
        if round > least && begin.elapsed() >= time {
            break;
        }
        let mut order: Vec<usize> = (0..contestants.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for place in order {
            let sample = contestants[place].1()?;
            if round > 0 {
                samples[place].push(sample);
            }
        }
    }
    Ok(Rounds { names, samples })
}

impl Rounds {
    /// How many there were.
    pub(super) fn count(&self) -> usize {
        self.samples.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// The samples of one contestant, in the order of the rounds.
    pub(super) fn of(&self, name: &str) -> &[Sample] {
        let place = self.names.iter().position(|known| *known == name);
        place.map_or(&[], |place| &self.samples[place])
    }

    /// What `figure` makes of one contestant's samples.
    pub(super) fn figure(&self, name: &str, figure: impl Fn(&Sample) -> f64) -> Summary {
        summary(self.of(name).iter().map(figure).collect())
    }

    /// What `figure` makes of two contestants' samples of the same round.
    pub(super) fn paired(&self, a: &str, b: &str, figure: impl Fn(&Sample, &Sample) -> f64) -> Summary {
        summary(self.of(a).iter().zip(self.of(b)).map(|(a, b)| figure(a, b)).collect())
    }

    /// What `a` takes above `base`, by what `b` takes.
    pub(super) fn figure_of_three(&self, a: &str, base: &str, b: &str) -> Summary {
        let rounds = self.of(a).iter().zip(self.of(base)).zip(self.of(b));
        summary(rounds.map(|((a, base), b)| (a.seconds - base.seconds) / b.seconds).collect())
    }

    /// How much faster `a` is than `b`: its rate by `b`'s.
    pub(super) fn speed(&self, a: &str, b: &str) -> Summary {
        self.paired(a, b, |a, b| b.seconds / a.seconds)
    }
}

/// Whether a run with this control may be quoted.
pub(super) fn quotable(control: &Summary) -> bool {
    CONTROL.contains(&control.median)
}

/// The median of some numbers, and its interval.
pub(super) fn summary(mut values: Vec<f64>) -> Summary {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        return Summary { median: f64::NAN, low: f64::NAN, high: f64::NAN };
    }
    let median = (values[(n - 1) / 2] + values[n / 2]) / 2.0;
    let skip = tail(n);
    Summary { median, low: values[skip], high: values[n - 1 - skip] }
}

/// How many values may be left out at each end: the most for which fewer than 2.5 in 100 runs have the true
/// median beyond.
fn tail(n: usize) -> usize {
    let mut term = 0.5f64.powi(i32::try_from(n).unwrap_or(i32::MAX));
    let mut below = term;
    let mut skip = 0;
    while skip + 1 < n.div_ceil(2) {
        term *= (n - skip) as f64 / (skip + 1) as f64;
        below += term;
        if below > 0.025 {
            break;
        }
        skip += 1;
    }
    skip
}

/// Processor time of this process since it began: every thread, and the kernel's workers for its rings.
pub(super) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_leaves_out_what_order_statistics_allow() {
        // From tables of the binomial distribution: 6 values give their extremes, 15 the fourth from each end.
        assert_eq!([5, 6, 8, 9, 15, 25].map(tail), [0, 0, 0, 1, 3, 7]);
        let fifteen = summary((0..15).rev().map(f64::from).collect());
        assert_eq!(fifteen, Summary { median: 7.0, low: 3.0, high: 11.0 });
        assert_eq!(summary(vec![2.0, 1.0]), Summary { median: 1.5, low: 1.0, high: 2.0 });
    }

    #[test]
    fn contestants_alternate_and_the_first_round_does_not_count() {
        let log = std::cell::RefCell::new(String::new());
        let contestant = |name: &'static str| -> Contestant<'_> {
            let log = &log;
            (
                name,
                Box::new(move || {
                    log.borrow_mut().push_str(name);
                    Ok(Sample { seconds: if name == "a" { 1.0 } else { 2.0 }, ..Sample::default() })
                }),
            )
        };
        let rounds = take_turns(3, vec![contestant("a"), contestant("b")]).unwrap();
        assert_eq!(*log.borrow(), "abbaabba");
        assert_eq!(rounds.of("a").len(), 3);
        assert_eq!(rounds.speed("a", "b").median, 2.0);
    }

    #[test]
    fn a_slow_machine_has_fewer_rounds_but_not_too_few() {
        let rounds = |time, rounds| {
            let contestant: Contestant<'_> = ("a", Box::new(|| Ok(Sample::default())));
            take_turns_within(time, 9, rounds, vec![contestant]).unwrap().count()
        };
        assert_eq!((rounds(Duration::ZERO, 30), rounds(Duration::ZERO, 3)), (9, 3));
        assert_eq!(rounds(Duration::MAX, 30), 30);
    }

    #[test]
    fn a_control_off_one_is_not_quotable() {
        let control = |median| Summary { median, low: median, high: median };
        assert!(quotable(&control(0.96)) && quotable(&control(1.05)));
        assert!(!quotable(&control(0.94)) && !quotable(&control(1.06)) && !quotable(&control(f64::NAN)));
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = cpu_seconds();
        let mut sum = 0u64;
        while cpu_seconds() - before < 0.001 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
    }
}
