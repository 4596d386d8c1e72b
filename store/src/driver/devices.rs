//! What executors tell each other of the devices: how many urgent reads there were, and whether they answer.
//!
//! Each executor writes what it alone counts, on cache lines of its own. It looks at the others' where something less urgent waits,
//! and where a device does not answer.

use std::sync::Arc;
use std::time::Duration;

use super::URGENT;
use kvarts_contract::class::Class;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::atomic::{AtomicU64, Ordering};

/// What has been at a device for this long is stuck, also where it has no deadline.
pub(super) const OVERDUE: Duration = Duration::from_secs(10);

/// The devices of a store, as one executor sees them.
#[derive(Clone, Debug)]
pub struct Devices {
    /// Urgent reads: of each device, of each class, of each executor.
    counts: Arc<[Count]>,
    /// Of each device, of each executor.
    answers: Arc<[Answers]>,
    devices: usize,
    executors: usize,
    /// Which executor this is.
    own: usize,
}

/// Apart from others' in memory.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Count(AtomicU64);

/// What a device answers an executor.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Answers {
    /// Since when it has had something without having answered anything; 0 if it has nothing.
    waits_since: AtomicU64,
    /// When it answered last.
    answered: AtomicU64,
}

impl Devices {
    /// Of this number of devices and of executors; the first executor's.
    pub fn of(devices: usize, executors: usize) -> Self {
        let (devices, executors) = (devices.max(1), executors.max(1));
        let counts = (0..devices * URGENT.len() * executors).map(|_| Count::default()).collect();
        let answers = (0..devices * executors).map(|_| Answers::default()).collect();
        Self { counts, answers, devices, executors, own: 0 }
    }

    /// Another executor's.
    pub fn of_executor(&self, own: usize) -> Self {
        Self { own: own % self.executors, ..self.clone() }
    }

    /// The counts of all executors. What one has at the device is in front of the others' urgent reads, too.
    fn counts_of(&self, lane: usize, class: Class) -> &[Count] {
        let first = (lane % self.devices * URGENT.len() + class as usize) * self.executors;
        self.counts.get(first..first + self.executors).unwrap_or_default()
    }

    /// An urgent read, if it is one, is asked for.
    pub(super) fn note_read(&self, lane: usize, class: Class) {
        if URGENT.contains(&class)
            && let Some(Count(count)) = self.counts_of(lane, class).get(self.own)
        {
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// Urgent reads of a class, of all executors.
    pub(super) fn urgent_reads(&self, lane: usize, class: Class) -> u64 {
        let all = self.counts_of(lane, class).iter();
        all.fold(0, |sum, Count(count)| sum.wrapping_add(count.load(Ordering::Relaxed)))
    }

    /// The device of a lane has something of this executor's from now on, or has answered something now and `has_more`, or not.
    pub(super) fn note_answers(&self, lane: usize, now: Nanos, (has_answered, has_more): (bool, bool)) {
        let Some(answers) = self.answers.get(lane % self.devices * self.executors + self.own) else { return };
        if has_answered {
            answers.answered.store(now.0, Ordering::Relaxed);
        }
        answers.waits_since.store(if has_more { now.0.max(1) } else { 0 }, Ordering::Relaxed);
    }

    /// Whether devices other than this one leave all executors without an answer now, and none of them has answered lately: then it
    /// is the machine that stands still, and not a device.
    pub(super) fn none_answers_beside(&self, lane: usize, now: Nanos) -> bool {
        let lately = |at: u64| at != 0 && now.since(Nanos(at)) < OVERDUE / 2;
        let own = lane % self.devices * self.executors;
        let others =
            self.answers.iter().enumerate().filter(|(at, _)| !(own..own + self.executors).contains(at));
        let (mut waits, mut answers) = (false, false);
        for (_, other) in others {
            let since = other.waits_since.load(Ordering::Relaxed);
            waits |= since != 0 && !lately(since);
            answers |= lately(other.answered.load(Ordering::Relaxed));
        }
        waits && !answers
    }
}
