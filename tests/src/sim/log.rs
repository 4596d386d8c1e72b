//! What happened, one line per device operation, with a running digest: same seed, same digest.
//!
//! Only the last lines are kept as text can be made of them at any time; the digest covers all of them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use kvarts_contract::clock::Nanos;

/// How many events are kept for reading.
const TAIL: usize = 400;

/// One operation, or one remark of the harness.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// Counts events.
    pub step: u64,
    /// When it completed.
    pub time: Nanos,
    /// What was asked.
    pub op: &'static str,
    /// Of which file or directory.
    pub name: Arc<str>,
    /// Where in the file.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// What the simulation did with it.
    pub decision: &'static str,
    /// The completion's result.
    pub result: i64,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, time, op, name, offset, len, decision, result } = self;
        write!(f, "{step:>6} {:>12} us  {op:<9} {name} @{offset}+{len} {decision} -> {result}", time.0 / 1000)
    }
}

/// The events of one world.
#[derive(Clone, Debug)]
pub struct EventLog {
    tail: VecDeque<Event>,
    steps: u64,
    mixer: Mixer,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { tail: VecDeque::new(), steps: 0, mixer: Mixer::new(0) }
    }
}

impl EventLog {
    /// Adds an event; its step is set here.
    pub fn push(&mut self, mut event: Event) {
        self.steps += 1;
        event.step = self.steps;
        self.mixer.word(event.time.0);
        self.mixer.text(event.op);
        self.mixer.text(&event.name);
        self.mixer.word(event.offset);
        self.mixer.word(event.len);
        self.mixer.text(event.decision);
        self.mixer.word(event.result.cast_unsigned());
        if self.tail.len() == TAIL {
            self.tail.pop_front();
        }
        self.tail.push_back(event);
    }

    /// How many events there were.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// A digest of all events, in order. Equal on every machine and in every build.
    pub fn digest(&self) -> u128 {
        self.mixer.value()
    }

    /// The last events, oldest first.
    pub fn tail(&self) -> impl DoubleEndedIterator<Item = &Event> {
        self.tail.iter()
    }

    /// The last `lines` events as text.
    pub fn text(&self, lines: usize) -> String {
        let skipped = self.tail.len().saturating_sub(lines);
        self.tail.iter().skip(skipped).map(|event| format!("{event}\n")).collect()
    }
}

/// A small digest of words and texts: two lanes of multiply and rotate. Not against an adversary.
#[derive(Clone, Debug)]
pub struct Mixer([u64; 2]);

impl Mixer {
    /// An empty digest of the family `seed`.
    pub fn new(seed: u64) -> Self {
        Self([seed ^ 0x243f_6a88_85a3_08d3, seed.rotate_left(32) ^ 0x1319_8a2e_0370_7344])
    }

    /// Adds a word.
    pub fn word(&mut self, word: u64) {
        let [a, b] = self.0;
        let a = (a ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let b = (b ^ word.rotate_left(29)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        self.0 = [a ^ (a >> 29), b ^ (b >> 32)];
    }

    /// Adds bytes, and how many they were.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.word(u64::from_le_bytes(*word)));
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            self.word(u64::from_le_bytes(word));
        }
        self.word(bytes.len() as u64);
    }

    /// Adds a text.
    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    /// The digest.
    pub fn value(&self) -> u128 {
        let mut end = self.clone();
        end.word(0x5851_f42d_4c95_7f2d);
        u128::from(end.0[0]) << 64 | u128::from(end.0[1])
    }

    /// Half of the digest.
    pub fn low(&self) -> u64 {
        let value = self.value();
        u64::try_from(value & u128::from(u64::MAX)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(time: u64, name: &str, result: i64) -> Event {
        let name = name.into();
        Event { step: 0, time: Nanos(time), op: "read", name, offset: 0, len: 512, decision: "ok", result }
    }

    fn digest(events: &[Event]) -> u128 {
        let mut log = EventLog::default();
        events.iter().cloned().for_each(|event| log.push(event));
        log.digest()
    }

    #[test]
    fn the_digest_sees_every_field_and_the_order() {
        let one = event(1, "a", 512);
        let all = [
            digest(&[]),
            digest(std::slice::from_ref(&one)),
            digest(&[one.clone(), one.clone()]),
            digest(&[one.clone(), event(2, "a", 512)]),
            digest(&[event(2, "a", 512), one.clone()]),
            digest(&[event(1, "b", 512)]),
            digest(&[event(1, "a", -5)]),
            digest(&[Event { op: "write", ..one.clone() }]),
            digest(&[Event { decision: "lost", ..one.clone() }]),
            digest(&[Event { offset: 1, ..one.clone() }]),
            digest(&[Event { len: 1, ..one }]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }

    #[test]
    fn the_digest_is_the_same_on_every_machine() {
        // Written down once: a difference means that recorded seeds and digests are void.
        assert_eq!(
            digest(&[event(1, "a", 512), event(2, "bc", -5)]),
            742_768_394_609_560_419_362_612_048_658_635_263
        );
    }

    #[test]
    fn only_the_last_events_are_kept_and_all_are_counted() {
        let mut log = EventLog::default();
        for time in 0..1000 {
            log.push(event(time * 1000, "segment", 0));
        }
        assert_eq!((log.steps(), log.tail().count()), (1000, TAIL));
        let text = log.text(2);
        assert_eq!(text.lines().count(), 2);
        assert!(text.ends_with("1000          999 us  read      segment @0+512 ok -> 0\n"), "{text}");
    }
}
