//! What asks: a trace, streamed, or sessions that are made from a seed and wait for their answers.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::trace::{Request, TOKENS_MAX, TraceError};

/// One request on its way in.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Arrival {
    /// When, in milliseconds.
    pub at_ms: f64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Blocks of the prompt, and behind them those that the answer fills, as far as they are known.
    pub blocks: Vec<u64>,
    /// Which session it is of, if of any; and whether it is its last request.
    pub session: Option<(u32, bool)>,
    /// Its kind, if the trace has kinds.
    pub kind: Option<Arc<str>>,
}

impl Arrival {
    /// A request of a trace, at its time. Each has a token of prompt and answer at least.
    pub fn of(request: Request) -> Self {
        Self {
            at_ms: request.at_ms,
            input_tokens: request.input_tokens.max(1),
            output_tokens: request.output_tokens.max(1),
            blocks: request.blocks,
            session: None,
            kind: request.kind,
        }
    }
}

/// Who asks.
pub trait Work {
    /// The next request that does not wait for an answer, in the order of time.
    fn next(&mut self) -> Result<Option<Arrival>, TraceError>;

    /// A session's request has ended; what it asks next.
    fn ended(&mut self, session: u32, now_ms: f64) -> Option<Arrival>;

    /// Another request that this end made possible, of a session that waited for it.
    fn another(&mut self, _now_ms: f64) -> Option<Arrival> {
        None
    }

    /// A session's request was refused; what it asks next. With none it ends.
    fn refused(&mut self, _session: u32, _now_ms: f64) -> Option<Arrival> {
        None
    }

    /// The next request that comes before a step of an engine, by the step's number and whenever that is.
    fn before_step(&mut self, _: u64, _now_ms: f64) -> Option<Arrival> {
        None
    }
}

/// A trace, whose times may be made denser or longer apart.
#[derive(Debug)]
pub struct TraceWork<I> {
    requests: I,
    scale: f64,
}

impl<I> TraceWork<I> {
    /// `scale` times as many requests a second as the trace has.
    pub fn new(requests: I, scale: f64) -> Self {
        Self { requests, scale }
    }
}

impl<I: Iterator<Item = Result<Request, TraceError>>> Work for TraceWork<I> {
    fn next(&mut self) -> Result<Option<Arrival>, TraceError> {
        let Some(request) = self.requests.next().transpose()? else { return Ok(None) };
        let arrival = Arrival::of(request);
        Ok(Some(Arrival { at_ms: arrival.at_ms / self.scale, ..arrival }))
    }

    fn ended(&mut self, _: u32, _: f64) -> Option<Arrival> {
        None
    }
}

/// Sessions that grow turn by turn.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sessions {
    /// How many.
    pub count: u32,
    /// How many begin a second; 0 for all at once.
    pub per_second: f64,
    /// Beginnings that they share, and tokens of each.
    pub shared: u32,
    /// Tokens of a shared beginning.
    pub shared_tokens: f64,
    /// Mean turns of a session.
    pub turns: f64,
    /// Mean tokens that a turn adds.
    pub append_tokens: f64,
    /// Mean tokens of an answer.
    pub output_tokens: f64,
    /// The longest session.
    pub tokens_max: f64,
    /// Mean time between an answer and the next turn.
    pub think_ms: f64,
    /// How uneven tokens and turns are: the spread of their logarithm.
    pub spread: f64,
    /// Of 1000 turns, those behind which the user is away for `idle_ms`.
    pub idle_per_1000: u32,
    /// See above.
    pub idle_ms: f64,
    /// Sessions that go on from one prompt: rollouts of one task.
    pub fork: u32,
    /// The same seed gives the same sessions.
    pub seed: u64,
}

impl Default for Sessions {
    fn default() -> Self {
        CHAT
    }
}

/// Kinds of sessions by name. The agents' are made in the manner of DualPath's three sets (arXiv 2602.21548): longest
/// session, turns, tokens that a turn adds and tokens of an answer.
pub const KINDS: [(&str, Sessions); 7] = [
    ("chat", CHAT),
    ("agents-32k", agents(32_768.0, 60.0, 608.0, 148.0)),
    ("agents-48k", agents(49_152.0, 106.0, 474.0, 172.0)),
    ("agents-64k", agents(65_536.0, 157.0, 429.0, 176.0)),
    (
        "coding",
        Sessions {
            turns: 40.0,
            append_tokens: 900.0,
            output_tokens: 350.0,
            think_ms: 3000.0,
            spread: 1.2,
            shared_tokens: 12_000.0,
            ..CHAT
        },
    ),
    (
        "rollouts",
        Sessions { fork: 8, turns: 6.0, append_tokens: 400.0, output_tokens: 600.0, think_ms: 500.0, ..CHAT },
    ),
    ("idle-return", Sessions { turns: 12.0, idle_per_1000: 150, idle_ms: 600_000.0, ..CHAT }),
];

const CHAT: Sessions = Sessions {
    count: 1000,
    per_second: 1.0,
    shared: 4,
    shared_tokens: 2000.0,
    turns: 5.0,
    append_tokens: 300.0,
    output_tokens: 200.0,
    tokens_max: 131_072.0,
    think_ms: 10_000.0,
    spread: 0.5,
    idle_per_1000: 0,
    idle_ms: 0.0,
    fork: 1,
    seed: 1,
};

const fn agents(tokens_max: f64, turns: f64, append_tokens: f64, output_tokens: f64) -> Sessions {
    Sessions {
        tokens_max,
        turns,
        append_tokens,
        output_tokens,
        think_ms: 0.0,
        per_second: 0.0,
        shared: 1,
        ..CHAT
    }
}

impl Sessions {
    /// A kind by its name.
    pub fn named(name: &str) -> Option<Self> {
        KINDS.iter().find(|(known, _)| *known == name).map(|(_, sessions)| *sessions)
    }
}

/// A small generator of numbers that is the same everywhere (SplitMix64).
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Above 0, up to 1.
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end.max(1) as u64) as usize
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Around a mean, with a long tail: log-normal.
    fn uneven(&mut self, mean: f64, spread: f64) -> f64 {
        // The sum of twelve evens is near enough to a normal.
        let normal: f64 = (0..12).map(|_| self.unit()).sum::<f64>() - 6.0;
        mean * (spread * normal - spread * spread / 2.0).exp()
    }
}

#[derive(Clone, Debug)]
struct Session {
    dice: Dice,
    tokens: u64,
    turns: u64,
    blocks: Vec<u64>,
}

/// Sessions under way.
#[derive(Debug)]
pub struct SessionWork {
    of: Sessions,
    block_tokens: u64,
    starting: BinaryHeap<Reverse<(u64, u32)>>,
    sessions: Vec<Option<Session>>,
    next_block: u64,
    shared: Vec<Vec<u64>>,
}

impl SessionWork {
    /// All sessions, none of which has begun.
    pub fn new(of: Sessions, block_tokens: u32) -> Self {
        let mut dice = Dice(of.seed);
        let block_tokens = u64::from(block_tokens.max(1));
        let mut next_block = 0;
        let mut fresh = |blocks: u64| {
            next_block += blocks;
            (next_block - blocks..next_block).collect::<Vec<u64>>()
        };
        let shared: Vec<Vec<u64>> =
            (0..of.shared).map(|_| fresh((of.shared_tokens.max(0.0) as u64) / block_tokens)).collect();
        let (mut at, mut starting) = (0.0, BinaryHeap::new());
        for number in 0..of.count {
            if of.per_second > 0.0 {
                at += dice.exponential(1000.0 / of.per_second);
            }
            starting.push(Reverse(((at * 1e3) as u64, number)));
        }
        let sessions = (0..of.count).map(|_| None).collect();
        Self { of, block_tokens, starting, sessions, next_block, shared }
    }

    fn begin(&mut self, number: u32) -> Option<Session> {
        // Those of one fork have one beginning, and then go their own ways.
        let task = u64::from(number / self.of.fork.max(1));
        let mut common = Dice(self.of.seed ^ task.wrapping_mul(0x5851_f42d_4c95_7f2d));
        let which = common.below(self.shared.len());
        let mut blocks = self.shared.get(which).cloned().unwrap_or_default();
        let turns = common.uneven(self.of.turns, self.of.spread).round().max(1.0) as u64;
        if self.of.fork > 1 {
            let more = common.uneven(self.of.append_tokens * 4.0, self.of.spread).min(TOKENS_MAX as f64);
            let more = more as u64 / self.block_tokens;
            blocks.extend((0..more).map(|n| (1 << 62) | (task << 24) | n));
        }
        let tokens = blocks.len() as u64 * self.block_tokens;
        let dice =
            Dice(self.of.seed.wrapping_add(0x9e37 + u64::from(number)).wrapping_mul(0x2545_f491_4f6c_dd1d));
        Some(Session { dice, tokens, turns, blocks })
    }

    fn turn(&mut self, number: u32, at_ms: f64) -> Option<Arrival> {
        let of = self.of;
        let session = self.sessions.get_mut(number as usize)?.as_mut()?;
        // What has more tokens than a request may have is refused as such, whatever they are.
        let most = TOKENS_MAX as f64;
        let append = session.dice.uneven(of.append_tokens, of.spread).clamp(1.0, most) as u64;
        let output = session.dice.uneven(of.output_tokens, of.spread).clamp(1.0, most) as u64;
        let input = session.tokens + append;
        let after = input + output;
        session.tokens = after;
        session.turns -= 1;
        let over = after as f64 + of.append_tokens + of.output_tokens > of.tokens_max;
        let last = session.turns == 0 || over;
        while (session.blocks.len() as u64) < after / self.block_tokens {
            session.blocks.push(self.next_block);
            self.next_block += 1;
        }
        let blocks = session.blocks.clone();
        if last && let Some(place) = self.sessions.get_mut(number as usize) {
            *place = None;
        }
        Some(Arrival {
            at_ms,
            input_tokens: input,
            output_tokens: output,
            blocks,
            session: Some((number, last)),
            kind: None,
        })
    }
}

impl Work for SessionWork {
    fn next(&mut self) -> Result<Option<Arrival>, TraceError> {
        let Some(Reverse((at_us, number))) = self.starting.pop() else { return Ok(None) };
        let session = self.begin(number);
        if let Some(place) = self.sessions.get_mut(number as usize) {
            *place = session;
        }
        Ok(self.turn(number, at_us as f64 / 1e3))
    }

    fn ended(&mut self, number: u32, now_ms: f64) -> Option<Arrival> {
        let of = self.of;
        let session = self.sessions.get_mut(number as usize)?.as_mut()?;
        let away = session.dice.below(1000) < of.idle_per_1000 as usize;
        let think = if of.think_ms > 0.0 { session.dice.exponential(of.think_ms) } else { 0.0 };
        let pause = think + if away { of.idle_ms } else { 0.0 };
        self.turn(number, now_ms + pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_the_same_from_one_seed_and_grow_turn_by_turn() {
        for (name, of) in KINDS {
            let of = Sessions { count: 20, ..of };
            let run = |seed| {
                let mut work = SessionWork::new(Sessions { seed, ..of }, 64);
                let mut all = Vec::new();
                while let Some(first) = work.next().unwrap() {
                    let (number, mut last) = first.session.unwrap();
                    all.push(first);
                    while !last {
                        let now = all.last().unwrap().at_ms + 5.0;
                        let next = work.ended(number, now).unwrap();
                        last = next.session.unwrap().1;
                        assert!(
                            next.at_ms >= now && next.blocks.starts_with(&all.last().unwrap().blocks),
                            "{name}"
                        );
                        all.push(next);
                    }
                    assert_eq!(work.ended(number, 0.0), None);
                }
                all
            };
            let all = run(1);
            assert_eq!(all, run(1), "{name}");
            assert_ne!(all, run(2), "{name}");
            assert!(
                all.iter().all(|one| one.blocks.len() as u64 == (one.input_tokens + one.output_tokens) / 64)
            );
            assert!(all.iter().all(|one| (one.input_tokens as f64) < of.tokens_max + 20_000.0), "{name}");
            assert_eq!(Sessions::named(name), Some(of).map(|sessions| Sessions { count: 1000, ..sessions }));
        }
        assert_eq!(Sessions::named("none"), None);
    }
}
