//! Which blocks of other nodes are read so often here that a copy is worth its bytes, and which copies are not any more.
//!
//! Each node decides for itself, by its own reads: a block that is read from other nodes at a rate above a limit is copied, for a
//! time. Reads of the copy count as well, so that when its time is over the rate is known: above half of the limit the block is
//! copied again with the next read, below it the copy is gone and has to earn its place anew. So a rate that moves about the limit
//! makes and drops no copies all the time. Nothing is prolonged: a copy whose time could be prolonged would be told apart from the
//! node's own block by nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, planted};

/// Blocks whose reads are counted: when there are more, those that are hardly read make room.
pub const COUNTED_MAX: usize = 1 << 16;
/// Within this time what was read counts half.
pub const HALF_LIFE: Duration = Duration::from_secs(8);
/// Counts that are hardly any.
const COLD: f64 = 0.5;

/// Blocks of one column.
pub type ColumnName = (NamespaceId, Group, Coordinate);

/// When a block is hot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Reads a second from which on a block is copied.
    pub reads_per_second: u32,
    /// How long a copy lives.
    pub hold: Duration,
}

impl Rule {
    /// How many reads count at this rate.
    fn level(&self) -> f64 {
        f64::from(self.reads_per_second) * HALF_LIFE.as_secs_f64() / std::f64::consts::LN_2
    }
}

/// How often a block was read lately.
#[derive(Clone, Copy, Debug)]
struct Warmth {
    level: f64,
    at: Duration,
    /// Until when it need not be copied: a copy is on its way, or here.
    copied_until: Option<Duration>,
}

impl Warmth {
    fn level(&self, now: Duration) -> f64 {
        let halves = now.saturating_sub(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64();
        self.level * (-halves).exp2()
    }
}

/// The blocks that are read from other nodes, and how often.
#[derive(Clone, Debug)]
pub struct Hot {
    rule: Rule,
    columns: BTreeMap<ColumnName, BTreeMap<BlockKey, Warmth>>,
    counted: usize,
    /// When room was made last.
    swept: Duration,
}

impl Hot {
    /// Nothing was read yet.
    pub fn new(rule: Rule) -> Self {
        Self { rule, columns: BTreeMap::new(), counted: 0, swept: Duration::ZERO }
    }

    /// How long a copy lives.
    pub fn hold(&self) -> Duration {
        self.rule.hold
    }

    /// A read of these blocks; of each whether it is here. Gives those that are to be copied now. They count as copied from here on
    /// ([`Hot::failed`] says that they are not).
    pub fn read<'a>(
        &mut self,
        column: ColumnName,
        blocks: impl Iterator<Item = (&'a BlockKey, bool)>,
        now: Duration,
    ) -> Vec<BlockKey> {
        let (most, hold) = (self.rule.level(), self.rule.hold);
        let mut hot = Vec::new();
        for (key, is_here) in blocks {
            if is_here {
                // The node's own blocks are not counted, its copies are.
                if let Some(warmth) = self.columns.get_mut(&column).and_then(|of| of.get_mut(key)) {
                    (warmth.level, warmth.at) = (warmth.level(now) + 1.0, now);
                }
                continue;
            }
            let is_known = self.columns.get(&column).is_some_and(|of| of.contains_key(key));
            if !is_known && !self.has_room(now) {
                continue;
            }
            let of = self.columns.entry(column).or_default();
            let new = Warmth { level: 0.0, at: now, copied_until: None };
            let warmth = of.entry(*key).or_insert_with(|| {
                self.counted += 1;
                new
            });
            (warmth.level, warmth.at) = (warmth.level(now) + 1.0, now);
            let limit = match warmth.copied_until {
                Some(until) if now < until => continue,
                Some(_) => most / 2.0,
                None if planted!("hot-at-once") => 0.0,
                None => most,
            };
            warmth.copied_until = (warmth.level >= limit).then_some(now + hold);
            if warmth.copied_until.is_some() {
                hot.push(*key);
            }
        }
        hot
    }

    /// These blocks were to be copied, and were not: the next read may try again.
    pub fn failed(&mut self, column: ColumnName, keys: &[BlockKey]) {
        let Some(of) = self.columns.get_mut(&column) else { return };
        for key in keys {
            if let Some(warmth) = of.get_mut(key) {
                // What it takes to be copied is counted anew: a node without room is not asked by each read.
                (warmth.copied_until, warmth.level) = (None, 0.0);
            }
        }
    }

    /// Whether one more block can be counted; if not, those make room that are hardly read and not copied. Not more often than
    /// they can have cooled.
    fn has_room(&mut self, now: Duration) -> bool {
        if self.counted < COUNTED_MAX {
            return true;
        }
        if now < self.swept + HALF_LIFE / 8 && self.swept > Duration::ZERO {
            return false;
        }
        self.swept = now;
        let stays = |warmth: &Warmth| {
            warmth.level(now) > COLD || warmth.copied_until.is_some_and(|until| now < until)
        };
        self.columns.retain(|_, of| {
            of.retain(|_, warmth| stays(warmth));
            !of.is_empty()
        });
        self.counted = self.columns.values().map(BTreeMap::len).sum();
        self.counted < COUNTED_MAX
    }

    /// Blocks that are copied now, or on their way.
    pub fn copied(&self, now: Duration) -> usize {
        let all = self.columns.values().flat_map(BTreeMap::values);
        all.filter(|warmth| warmth.copied_until.is_some_and(|until| now < until)).count()
    }

    /// Blocks whose reads are counted.
    pub fn len(&self) -> usize {
        self.counted
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.counted == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: Duration = Duration::from_secs(60);

    fn column() -> ColumnName {
        (NamespaceId([1; 32]), Group(0), Coordinate::default())
    }

    fn key(n: u64) -> BlockKey {
        BlockKey(*blake3::hash(&n.to_le_bytes()).as_bytes())
    }

    fn hot() -> Hot {
        Hot::new(Rule { reads_per_second: 4, hold: HOLD })
    }

    /// Reads one block at a rate for a time. Gives when copies were asked for.
    fn at_rate(hot: &mut Hot, here: bool, rate: f64, from: f64, until: f64) -> Vec<f64> {
        let (mut now, mut asked) = (from, Vec::new());
        while now < until {
            if !hot.read(column(), [(&key(1), here)].into_iter(), Duration::from_secs_f64(now)).is_empty() {
                asked.push(now);
            }
            now += 1.0 / rate;
        }
        asked
    }

    #[test]
    fn a_block_is_copied_once_when_its_rate_is_above_the_limit_for_a_while() {
        assert_eq!(at_rate(&mut hot(), false, 3.5, 0.0, 600.0), Vec::<f64>::new());
        let mut one = hot();
        let asked = at_rate(&mut one, false, 6.0, 0.0, 59.0);
        assert_eq!(asked.len(), 1, "{asked:?}");
        assert!((5.0..20.0).contains(&asked[0]), "not by a burst, and soon: {asked:?}");
        assert_eq!(one.copied(Duration::from_secs(59)), 1);
    }

    #[test]
    fn a_copy_whose_time_is_over_is_made_again_above_half_of_the_limit_and_not_below() {
        for (rate, again) in [(2.5, true), (1.5, false)] {
            let mut hot = hot();
            let asked = at_rate(&mut hot, false, 8.0, 0.0, 20.0);
            assert_eq!(asked.len(), 1);
            let end = asked[0] + HOLD.as_secs_f64();
            // While the copy is here it is read here.
            assert_eq!(at_rate(&mut hot, true, rate, 20.0, end), Vec::<f64>::new());
            assert_eq!(at_rate(&mut hot, false, rate, end, end + 5.0).len(), usize::from(again), "at {rate}");
            // One that was given up needs the whole limit again.
            let later = at_rate(&mut hot, false, rate, end + 5.0, end + 50.0);
            assert!(later.is_empty(), "at {rate}: {later:?}");
        }
    }

    #[test]
    fn what_this_node_has_itself_is_not_counted() {
        let mut hot = hot();
        assert_eq!(at_rate(&mut hot, true, 100.0, 0.0, 60.0), Vec::<f64>::new());
        assert!(hot.is_empty());
    }

    #[test]
    fn a_copy_that_failed_is_tried_again_and_not_by_each_read() {
        let mut hot = hot();
        assert_eq!(at_rate(&mut hot, false, 8.0, 0.0, 20.0).len(), 1);
        hot.failed(column(), &[key(1), key(2)]);
        assert_eq!(hot.copied(Duration::from_secs(20)), 0);
        let asked = at_rate(&mut hot, false, 8.0, 20.0, 60.0);
        assert_eq!(asked.len(), 1);
        assert!(asked[0] > 25.0, "{asked:?}");
    }

    #[test]
    fn counts_are_bounded_and_what_is_hardly_read_makes_room() {
        let mut hot = hot();
        let all: Vec<BlockKey> = (0..COUNTED_MAX as u64 + 10).map(key).collect();
        let read = |hot: &mut Hot, keys: &[BlockKey], at: u64| {
            hot.read(column(), keys.iter().map(|key| (key, false)), Duration::from_secs(at))
        };
        assert!(read(&mut hot, &all, 1).is_empty());
        assert_eq!(hot.len(), COUNTED_MAX);
        // All of them have cooled but one.
        (0..50).for_each(|_| drop(read(&mut hot, &all[..1], 40)));
        assert!(read(&mut hot, &all[COUNTED_MAX..], 41).is_empty());
        assert_eq!(hot.len(), 11);
        assert_eq!(hot.copied(Duration::from_secs(41)), 1);
    }
}
