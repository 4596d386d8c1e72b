//! Made-up traces of requests, so that what is said of eviction rests on more than one recorded trace.
//!
//! A trace is a list of requests, each the ids of its blocks in order; equal ids mean equal prefixes, as in the traces
//! that `bench replay` reads. Every shape is made from a seed alone: the same seed and size give the same trace.
//! Shapes differ in what they ask of a policy; none is meant to look like a particular recording.

use std::collections::VecDeque;
use std::io::{self, Write};

/// What a trace looks like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shape {
    /// Conversations that grow turn by turn behind a few shared beginnings, and end at some time.
    Chat,
    /// Agents: long shared beginnings (tools, instructions), short tails of their own, a few quick turns.
    Agents,
    /// Conversations, and among them long prompts that never come again.
    Scan,
    /// Prompts from a tree whose branches are drawn by a power law: no sessions, some prefixes are hot.
    Zipf,
    /// The same prompts in the same order again and again.
    Loop,
    /// Prompts drawn evenly: no policy can know better.
    Uniform,
    /// Hot prompts that are others after a while.
    Shift,
}

impl Shape {
    /// All of them.
    pub(crate) const ALL: [Self; 7] =
        [Self::Chat, Self::Agents, Self::Scan, Self::Zipf, Self::Loop, Self::Uniform, Self::Shift];

    /// As it is written on a command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Agents => "agents",
            Self::Scan => "scan",
            Self::Zipf => "zipf",
            Self::Loop => "loop",
            Self::Uniform => "uniform",
            Self::Shift => "shift",
        }
    }

    /// The shape of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.name() == name)
    }

    /// A trace of `count` requests.
    pub(crate) fn requests(self, seed: u64, count: usize) -> Vec<Vec<u64>> {
        let mut maker = Maker { dice: Dice(seed ^ 0x6b76_6172_7473), next: 0 };
        match self {
            Self::Chat => maker.chat(count, 0),
            Self::Agents => maker.agents(count),
            Self::Scan => maker.chat(count, 12),
            Self::Zipf => maker.tree(count, count),
            Self::Shift => maker.tree(count, count / 6),
            Self::Loop => maker.prompts(count, |n, all| n % all),
            Self::Uniform => {
                let mut dice = Dice(seed.wrapping_add(1));
                maker.prompts(count, |_, all| dice.below(all as u64) as usize)
            }
        }
    }
}

/// Writes requests as `bench replay` reads them, one a second, of blocks of 512 tokens.
pub(crate) fn write(requests: &[Vec<u64>], out: &mut dyn Write) -> io::Result<()> {
    for (second, blocks) in requests.iter().enumerate() {
        let ids: Vec<String> = blocks.iter().map(u64::to_string).collect();
        writeln!(
            out,
            r#"{{"timestamp": {}, "input_length": {}, "output_length": 1, "hash_ids": [{}]}}"#,
            second * 1000,
            blocks.len() * 512,
            ids.join(", ")
        )?;
    }
    Ok(())
}

/// A small generator of numbers that is the same everywhere (SplitMix64).
#[derive(Clone, Debug)]
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// From `least`, each one more half as likely as not with chance `more` of 256: a long tail, cut at `most`.
    fn long(&mut self, least: u64, more: u64, most: u64) -> u64 {
        let mut value = least;
        while value < most && self.below(256) < more {
            value += 1;
        }
        value
    }

    /// A number below `end`, small ones likelier: about one over its place.
    fn skewed(&mut self, end: u64) -> u64 {
        // Even on a logarithmic scale, by whole octaves and evenly within.
        let octaves = u64::from(u64::BITS - end.max(1).leading_zeros());
        let octave = self.below(octaves);
        let low = 1u64 << octave;
        (low + self.below(low) - 1).min(end.saturating_sub(1))
    }
}

/// Makes ids, each of them once.
struct Maker {
    dice: Dice,
    next: u64,
}

/// A conversation under way.
struct Session {
    blocks: Vec<u64>,
    turns: u64,
    due: usize,
}

impl Maker {
    fn fresh(&mut self, count: u64) -> Vec<u64> {
        let from = self.next;
        self.next += count;
        (from..self.next).collect()
    }

    /// `strangers` of 32 requests are long and never come again.
    fn chat(&mut self, count: usize, strangers: u64) -> Vec<Vec<u64>> {
        let systems: Vec<Vec<u64>> = (0..12).map(|n| self.fresh(1 + n % 5)).collect();
        let mut requests = Vec::with_capacity(count);
        let mut waiting: Vec<Session> = Vec::new();
        while requests.len() < count {
            let now = requests.len();
            if self.dice.below(32) < strangers {
                let len = self.dice.long(20, 250, 160);
                requests.push(self.fresh(len));
                continue;
            }
            let due = waiting.iter().position(|session| session.due <= now);
            let mut session = match due {
                Some(at) => waiting.swap_remove(at),
                None => {
                    let system = self.dice.skewed(systems.len() as u64) as usize;
                    let blocks = systems.get(system).cloned().unwrap_or_default();
                    // More than half ask once.
                    let turns = if self.dice.below(256) < 150 { 1 } else { self.dice.long(2, 190, 40) };
                    Session { blocks, turns, due: 0 }
                }
            };
            let grown = if self.dice.below(8) == 0 {
                self.dice.long(8, 248, 120)
            } else {
                self.dice.long(1, 200, 24)
            };
            let grown = self.fresh(grown);
            session.blocks.extend(grown);
            requests.push(session.blocks.clone());
            session.turns -= 1;
            if session.turns > 0 {
                // Who thinks longer comes back later: gaps over several octaves.
                session.due = now + (8 << self.dice.below(7)) as usize + self.dice.below(64) as usize;
                waiting.push(session);
            }
        }
        requests
    }

    fn agents(&mut self, count: usize) -> Vec<Vec<u64>> {
        let tools: Vec<Vec<u64>> = (0..60)
            .map(|_| {
                let len = self.dice.long(6, 240, 60);
                self.fresh(len)
            })
            .collect();
        let mut requests = Vec::with_capacity(count);
        let mut running: VecDeque<Session> = VecDeque::new();
        while requests.len() < count {
            let now = requests.len();
            let due = running.front().is_some_and(|session| session.due <= now);
            let mut session = match running.pop_front() {
                Some(session) if due => session,
                other => {
                    running.extend(other.into_iter().rev());
                    let tool = self.dice.skewed(tools.len() as u64) as usize;
                    let blocks = tools.get(tool).cloned().unwrap_or_default();
                    Session { blocks, turns: self.dice.long(1, 130, 12), due: 0 }
                }
            };
            let grown = self.dice.long(1, 150, 16);
            let grown = self.fresh(grown);
            session.blocks.extend(grown);
            requests.push(session.blocks.clone());
            session.turns -= 1;
            if session.turns > 0 {
                session.due = now + 6;
                running.push_back(session);
            }
        }
        requests
    }

    /// Paths from the root of a tree, children drawn by a power law; after `lasting` requests another tree is used.
    fn tree(&mut self, count: usize, lasting: usize) -> Vec<Vec<u64>> {
        let mut names = std::collections::BTreeMap::<(u64, u64), Vec<u64>>::new();
        let mut requests = Vec::with_capacity(count);
        for number in 0..count {
            let root = (number / lasting.max(1)) as u64;
            let mut place = u64::MAX - root;
            let mut blocks = Vec::new();
            for level in 0..1 + self.dice.below(4) {
                let child = self.dice.skewed(40 << (2 * level));
                let run = match names.get(&(place, child)) {
                    Some(run) => run.clone(),
                    None => {
                        let len = self.dice.long(1, 215, 30);
                        let run = self.fresh(len);
                        names.insert((place, child), run.clone());
                        run
                    }
                };
                place = run.last().copied().unwrap_or(place);
                blocks.extend(run);
            }
            requests.push(blocks);
        }
        requests
    }

    /// Requests that choose among a tenth as many prompts.
    fn prompts(&mut self, count: usize, mut which: impl FnMut(usize, usize) -> usize) -> Vec<Vec<u64>> {
        let prompts: Vec<Vec<u64>> = (0..(count / 10).max(1))
            .map(|_| {
                let len = self.dice.long(4, 235, 60);
                self.fresh(len)
            })
            .collect();
        (0..count).filter_map(|number| prompts.get(which(number, prompts.len())).cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn a_seed_gives_one_trace_and_another_gives_another() {
        for shape in Shape::ALL {
            assert_eq!(shape.requests(7, 300), shape.requests(7, 300), "{}", shape.name());
            assert_ne!(shape.requests(7, 300), shape.requests(8, 300), "{}", shape.name());
            assert_eq!(Shape::named(shape.name()), Some(shape));
            assert_eq!(shape.requests(3, 300).len(), 300);
        }
        assert_eq!(Shape::named("none"), None);
    }

    #[test]
    fn equal_ids_are_equal_prefixes_in_every_shape() {
        for shape in Shape::ALL {
            let mut before = BTreeMap::new();
            for request in shape.requests(5, 2000) {
                assert!(
                    !request.is_empty() && request.iter().collect::<BTreeSet<_>>().len() == request.len()
                );
                let mut parent = None;
                for id in request {
                    assert_eq!(*before.entry(id).or_insert(parent), parent, "{}", shape.name());
                    parent = Some(id);
                }
            }
        }
    }

    #[test]
    fn a_trace_is_written_as_replay_reads_it() {
        let mut text = Vec::new();
        write(&[vec![1, 2], vec![3]], &mut text).unwrap();
        let lines: Vec<serde_json::Value> = text
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!((&lines[0]["hash_ids"][1], &lines[1]["timestamp"]), (&2.into(), &1000.into()));
    }
}
