//! Requests of a trace, one JSON object a line, streamed: `{"timestamp": ms, "input_length": tokens, "output_length":
//! tokens, "hash_ids": [..]}`, the ids of its blocks in order, equal where prefixes are (the Mooncake traces' format).
//!
//! A trace whose size of blocks is known ([`Trace::in_blocks_of`]) must name every full block of each prompt, or none.
//!
//! Of what the published variants of the format have besides, `chat_id` and `parent_chat_id` say from which request one goes on, `type` its
//! kind, and `turn` is passed over; any other field is a fault, as are times that are negative or go back: each names its line.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{BufRead, Read};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

/// The longest line.
pub const LINE_BYTES_MAX: u64 = 64 << 20;
/// The most blocks of a request.
pub const BLOCKS_MAX: usize = 1 << 20;
/// Kinds of requests that are told apart.
pub const KINDS_MAX: usize = 64;
/// The most tokens of a request, prompt and answer together: as many as a plan has blocks at most.
pub const TOKENS_MAX: u64 = 1 << 24;
/// The last time, in milliseconds: three centuries.
pub const TIME_MS_MAX: f64 = 1e13;

/// Whether a request may have these tokens of prompt and answer.
pub fn tokens_are_few(input: u64, output: u64) -> bool {
    input.checked_add(output).is_some_and(|tokens| tokens <= TOKENS_MAX)
}

/// One request.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Request {
    /// When it arrives, in milliseconds since the trace's zero.
    pub at_ms: f64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Its blocks, in order.
    pub blocks: Vec<u64>,
    /// Its conversation, and the one from which that goes on.
    pub chat: Option<u64>,
    /// See above.
    pub parent: Option<u64>,
    /// Its kind, among those of the trace ([`KINDS_MAX`]); others have none.
    pub kind: Option<Arc<str>>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    #[serde(default)]
    chat_id: Value,
    #[serde(default)]
    parent_chat_id: Value,
    #[serde(default, rename = "type")]
    kind: Value,
    #[serde(default, rename = "turn")]
    _turn: serde::de::IgnoredAny,
}

/// What is wrong with a trace, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceError {
    /// The line, from 1; 0 for the whole.
    pub line: u64,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.what),
            line => write!(f, "line {line}: {}", self.what),
        }
    }
}

impl std::error::Error for TraceError {}

/// Reads requests as they are asked for; ends with the first fault.
#[derive(Debug)]
pub struct Trace<R> {
    from: R,
    bytes: Vec<u8>,
    line: u64,
    last_ms: f64,
    block_tokens: Option<u32>,
    kinds: BTreeSet<Arc<str>>,
    ended: bool,
}

impl<R: BufRead> Trace<R> {
    /// A trace from its beginning.
    pub fn new(from: R) -> Self {
        Self {
            from,
            bytes: Vec::new(),
            line: 0,
            last_ms: 0.0,
            block_tokens: None,
            kinds: BTreeSet::new(),
            ended: false,
        }
    }

    /// The tokens of its blocks are known: a request whose ids are too few for its prompt, or too many for all of its tokens,
    /// is a fault.
    pub fn in_blocks_of(mut self, tokens: u32) -> Self {
        self.block_tokens = Some(tokens.max(1));
        self
    }

    fn check_ids(&mut self, ids: u64, input_tokens: u64, output_tokens: u64) -> Result<(), TraceError> {
        let Some(tokens) = self.block_tokens.map(u64::from).filter(|_| ids > 0) else { return Ok(()) };
        let (least, most) =
            (input_tokens / tokens, input_tokens.saturating_add(output_tokens).div_ceil(tokens));
        if (least..=most).contains(&ids) {
            return Ok(());
        }
        Err(self.fault(format!(
            "hash_ids: the line has {ids} blocks of {tokens} tokens, but a prompt of {input_tokens} tokens \
            and an answer of {output_tokens} tokens have {least} to {most} blocks: give the `block_tokens` of \
            the trace, or remove the line"
        )))
    }

    fn fault(&mut self, what: impl fmt::Display) -> TraceError {
        self.ended = true;
        TraceError { line: self.line, what: what.to_string() }
    }

    fn read(&mut self) -> Result<Option<Request>, TraceError> {
        loop {
            self.bytes.clear();
            self.line += 1;
            let read = self.from.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut self.bytes);
            let read = read.map_err(|error| self.fault(error))?;
            if read == 0 {
                self.ended = true;
                return Ok(None);
            }
            if read as u64 > LINE_BYTES_MAX {
                return Err(self.fault(format!("the line is longer than {} MiB", LINE_BYTES_MAX >> 20)));
            }
            if !self.bytes.trim_ascii().is_empty() {
                return self.parse().map(Some);
            }
        }
    }

    fn parse(&mut self) -> Result<Request, TraceError> {
        let parsed: Line = match serde_json::from_slice(&self.bytes) {
            Ok(parsed) => parsed,
            Err(error) => {
                // The parser counts lines of what it was given: one.
                let text = error.to_string();
                let text = text.split(" at line ").next().unwrap_or(&text).to_owned();
                return Err(self.fault(format!("{text} (column {})", error.column())));
            }
        };
        if !parsed.timestamp.is_finite() || parsed.timestamp < 0.0 {
            return Err(self.fault(format!("timestamp {} is below zero", parsed.timestamp)));
        }
        if parsed.timestamp < self.last_ms {
            return Err(self.fault(format!(
                "timestamp {} is before {} of the line above: sort the trace by time",
                parsed.timestamp, self.last_ms
            )));
        }
        if parsed.timestamp > TIME_MS_MAX {
            return Err(self
                .fault(format!("timestamp {} is larger than the limit of {TIME_MS_MAX}", parsed.timestamp)));
        }
        if parsed.hash_ids.len() > BLOCKS_MAX {
            return Err(self.fault(format!("the request has more than {BLOCKS_MAX} blocks")));
        }
        if !tokens_are_few(parsed.input_length, parsed.output_length) {
            return Err(self.fault(format!(
                "input_length {} and output_length {} together exceed the limit of {TOKENS_MAX} tokens",
                parsed.input_length, parsed.output_length
            )));
        }
        self.check_ids(parsed.hash_ids.len() as u64, parsed.input_length, parsed.output_length)?;
        self.last_ms = parsed.timestamp;
        // None is written as -1. What is no number is no number of a conversation.
        let id = |id: Value| id.as_u64();
        Ok(Request {
            at_ms: parsed.timestamp,
            input_tokens: parsed.input_length,
            output_tokens: parsed.output_length,
            blocks: parsed.hash_ids,
            chat: id(parsed.chat_id),
            parent: id(parsed.parent_chat_id),
            kind: parsed.kind.as_str().and_then(|kind| self.kind(kind)),
        })
    }

    fn kind(&mut self, kind: &str) -> Option<Arc<str>> {
        if !self.kinds.contains(kind) && self.kinds.len() < KINDS_MAX {
            self.kinds.insert(kind.into());
        }
        self.kinds.get(kind).cloned()
    }
}

impl<R: BufRead> Iterator for Trace<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended { None } else { self.read().transpose() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Result<Request, TraceError>> {
        Trace::new(text.as_bytes()).collect()
    }

    fn fault(text: &str) -> String {
        read(text).pop().unwrap().unwrap_err().to_string()
    }

    const GOOD: &str = r#"{"timestamp": 5, "input_length": 3, "output_length": 2, "hash_ids": [1, 2]}"#;

    #[test]
    fn a_request_is_a_line_and_empty_lines_are_none() {
        let requests = read(&format!("{GOOD}\n\n{GOOD}\r\n"));
        let expected = Request {
            at_ms: 5.0,
            input_tokens: 3,
            output_tokens: 2,
            blocks: vec![1, 2],
            ..Request::default()
        };
        assert_eq!(requests, [Ok(expected.clone()), Ok(expected)]);
        let more = GOOD.replace('{', r#"{"chat_id": 7, "parent_chat_id": -1, "turn": 2, "type": "text", "#);
        assert!(read(&more).pop().unwrap().is_ok());
        assert!(read("").is_empty());
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line_and_ends_the_trace() {
        assert_eq!(
            fault(&format!("{GOOD}\n{}", GOOD.replace("5", "-5"))),
            "line 2: timestamp -5 is below zero"
        );
        let back = format!("{GOOD}\n\n{}\n{GOOD}", GOOD.replace("5", "4"));
        assert_eq!(read(&back).len(), 2);
        assert_eq!(fault(&back), "line 3: timestamp 4 is before 5 of the line above: sort the trace by time");
        assert!(fault(&GOOD.replace("hash_ids", "ids")).starts_with("line 1: unknown field `ids`, expected"));
        assert!(fault(r#"{"timestamp": 5}"#).starts_with("line 1: missing field `input_length`"));
        assert!(fault(&GOOD[..30]).starts_with("line 1: EOF while parsing"));
        assert!(fault(&GOOD.replace("[1, 2]", "[1, -2]")).starts_with("line 1: invalid value"));
        assert_eq!(
            fault(&format!("{GOOD}\n{}", GOOD.replace("5,", "1e300,"))),
            format!("line 2: timestamp {} is larger than the limit of {TIME_MS_MAX}", 1e300)
        );
    }

    #[test]
    fn tokens_of_a_request_have_a_bound_which_is_told_with_the_line() {
        let with = |input: u64, output: u64| {
            let line = GOOD.replace("3,", &format!("{input},")).replace("2,", &format!("{output},"));
            format!("{GOOD}\n{}", line.replace("[1, 2,", "[1,").replace("[1, 2]", "[]"))
        };
        for (input, output) in
            [(3, u64::MAX), (u64::MAX, 2), (u64::MAX, u64::MAX), (TOKENS_MAX, 1), (1, TOKENS_MAX)]
        {
            assert_eq!(
                fault(&with(input, output)),
                format!(
                    "line 2: input_length {input} and output_length {output} together exceed the limit of 16777216 tokens"
                )
            );
        }
        assert!(read(&with(TOKENS_MAX - 1, 1)).pop().unwrap().is_ok());
    }

    #[test]
    fn holes_in_a_request_s_blocks_are_told_on_one_line_with_their_place() {
        let hole = fault(&format!("{GOOD}\n{}", GOOD.replace("[1, 2]", "[1, null, 2]")));
        assert!(hole.starts_with("line 2: invalid type: null, expected u64 (column 7"), "{hole}");
        // A prompt of three tokens and an answer of two, in blocks of two: one to three of them.
        let ids = |ids: &str, tokens| {
            let text = format!("{GOOD}\n{}", GOOD.replace("[1, 2]", ids));
            let mut read: Vec<_> = Trace::new(text.as_bytes()).in_blocks_of(tokens).collect();
            assert_eq!(read.len(), 2);
            read.pop().unwrap().map(drop).map_err(|error| error.to_string())
        };
        for good in ["[]", "[1]", "[1, 2, 3]"] {
            assert_eq!(ids(good, 2), Ok(()), "{good}");
        }
        let told = |ids: u32| {
            Err(format!(
                "line 2: hash_ids: the line has {ids} blocks of 2 tokens, but a prompt of 3 tokens and an answer of 2 tokens \
                 have 1 to 3 blocks: give the `block_tokens` of the trace, or remove the line"
            ))
        };
        assert_eq!(ids("[1, 2, 3, 4]", 2), told(4));
        let long = GOOD.replace("3,", "3000,");
        let read: Vec<_> = Trace::new(long.as_bytes()).in_blocks_of(512).collect();
        let error = read.first().unwrap().as_ref().unwrap_err().to_string();
        assert!(
            error.starts_with("line 1: hash_ids: the line has 2 blocks of 512 tokens, but a prompt of 3000"),
            "{error}"
        );
    }
}
