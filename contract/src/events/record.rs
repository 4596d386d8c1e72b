//! Events written down as JSON lines, and read back: `docs/EVENTS.md` says what each line means.
//!
//! A recording begins with the pages of a snapshot and goes on with the events behind it; after a gap it begins
//! again in the same file. So its last snapshot and the events behind it are the content, whatever was lost between.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, BufRead, Write};

use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey, NamespaceId};
use serde_json::{Map, Value, json};

use super::{Cause, Event, EventKind, Sequence, SnapshotPage, Subject};

/// The version of the lines.
pub const RECORD_VERSION: u64 = 1;
/// The most bytes that a line may have.
const LINE_BYTES_MAX: usize = 4096;

/// Writes events down.
#[derive(Debug)]
pub struct EventRecorder<W: Write> {
    out: W,
    /// Nothing is written of events up to here.
    known: Option<Sequence>,
}

impl<W: Write> EventRecorder<W> {
    /// A recorder that writes to `out`, which should be buffered.
    pub fn new(out: W) -> Self {
        Self { out, known: None }
    }

    /// Begins a recording, or begins it again after a gap: the pages of a snapshot follow, then the events behind
    /// this sequence.
    pub fn begin(&mut self, sequence: Sequence) -> io::Result<()> {
        self.known = Some(sequence);
        let (stream, after) = (format!("{:016x}", sequence.stream), sequence.number);
        self.line(&json!({ "kvarts_events": RECORD_VERSION, "stream": stream, "after": after }))
    }

    /// Writes a page of the snapshot.
    pub fn page(&mut self, page: &SnapshotPage) -> io::Result<()> {
        page.blocks.iter().try_for_each(|block| {
            let mut fields = subject_fields(&Subject::Block(*block));
            fields.insert("event".to_owned(), "present".into());
            self.line(&Value::Object(fields))
        })
    }

    /// Writes an event. One that is no later than what was written is passed over.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
        if self.known.is_some_and(|known| event.sequence <= known) {
            return Ok(());
        }
        self.known = Some(event.sequence);
        let mut fields = subject_fields(&event.subject);
        fields.insert("event".to_owned(), event.kind.name().into());
        fields.insert("reason".to_owned(), event.cause.name().into());
        fields.insert("at_ms".to_owned(), event.at_ms.into());
        fields.insert("number".to_owned(), event.sequence.number.into());
        self.line(&Value::Object(fields))
    }

    /// Hands what was written to the file.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// The file.
    pub fn into_inner(self) -> W {
        self.out
    }

    fn line(&mut self, value: &Value) -> io::Result<()> {
        writeln!(self.out, "{value}")
    }
}

fn subject_fields(subject: &Subject) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
    match subject {
        Subject::Namespace(namespace) => put("namespace", namespace.to_string().into()),
        Subject::Block(block) => {
            put("namespace", block.namespace.to_string().into());
            put("key", block.key.to_string().into());
            put("group", block.group.0.into());
            put("coordinate", block.coordinate.to_string().into());
        }
    }
    fields
}

macro_rules! names {
    ($type:ident: $($variant:ident = $name:literal),* $(,)?) => {
        impl $type {
            /// The word for it in recordings.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// What a word of recordings stands for.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

names!(EventKind: Stored = "stored", Evicted = "evicted", Expired = "expired", Deleted = "deleted",
    Quarantined = "quarantined");
names!(Cause: Put = "put", Moved = "moved", Room = "room", Quota = "quota", Ttl = "ttl", Key = "key",
    Prefix = "prefix", Namespace = "namespace", Damage = "damage");

/// Why a recording could not be read.
#[derive(Debug)]
pub enum ReplayError {
    /// The file would not give its lines.
    Io(io::Error),
    /// A line is not what it should be.
    Line {
        /// Counted from one.
        line: u64,
        /// What is wrong with it.
        what: String,
    },
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "the recording cannot be read: {error}"),
            Self::Line { line, what } => write!(f, "line {line} of the recording: {what}"),
        }
    }
}

impl std::error::Error for ReplayError {}

/// What a recording comes to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Content {
    /// The blocks that are here by what the lines say.
    pub blocks: BTreeSet<IndexKey>,
    /// The last point that is known.
    pub sequence: Option<Sequence>,
}

impl Content {
    /// Takes in a page of a snapshot.
    pub fn page(&mut self, page: &SnapshotPage) {
        self.sequence = Some(page.sequence);
        self.blocks.extend(&page.blocks);
    }

    /// Takes in an event.
    pub fn apply(&mut self, event: &Event) {
        self.sequence = Some(event.sequence);
        match (event.kind, event.subject) {
            (EventKind::Stored, Subject::Block(block)) => drop(self.blocks.insert(block)),
            (EventKind::Stored, Subject::Namespace(_)) => {}
            (_, Subject::Block(block)) => drop(self.blocks.remove(&block)),
            (_, Subject::Namespace(namespace)) => self.blocks.retain(|block| block.namespace != namespace),
        }
    }
}

/// Reads a recording and says what is here at its end. A last line that was cut off by a crash is left out; any
/// other line that cannot be read, and a hole between events, is an error.
pub fn replay(mut lines: impl BufRead) -> Result<Content, ReplayError> {
    let (mut content, mut number, mut line) = (Content::default(), 0, Vec::new());
    loop {
        number += 1;
        line.clear();
        let read = read_line(&mut lines, &mut line).map_err(ReplayError::Io)?;
        let wrong = |what: &str| ReplayError::Line { line: number, what: what.to_owned() };
        match read {
            Line::None | Line::Torn => return Ok(content),
            Line::TooLong => return Err(wrong("the line is longer than the limit")),
            Line::Whole => take_line(&mut content, &line).map_err(|what| wrong(&what))?,
        }
    }
}

enum Line {
    Whole,
    Torn,
    TooLong,
    None,
}

fn read_line(lines: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Line> {
    let read = io::Read::take(lines, LINE_BYTES_MAX as u64 + 1).read_until(b'\n', line)?;
    Ok(match line.last() {
        None => Line::None,
        Some(b'\n') => Line::Whole,
        Some(_) if read > LINE_BYTES_MAX => Line::TooLong,
        Some(_) => Line::Torn,
    })
}

fn take_line(content: &mut Content, line: &[u8]) -> Result<(), String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let number = |name: &str| value.get(name).and_then(Value::as_u64);
    if let Some(version) = number("kvarts_events") {
        if version != RECORD_VERSION {
            return Err(format!(
                "the version is {version}, but this program reads only version \
                {RECORD_VERSION}"
            ));
        }
        let stream = text("stream").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        let (Some(stream), Some(number)) = (stream, number("after")) else {
            return Err("the first line lacks `stream` or `after`".to_owned());
        };
        *content = Content { sequence: Some(Sequence { stream, number }), blocks: BTreeSet::new() };
        return Ok(());
    }
    let Some(known) = content.sequence else {
        return Err("an event comes before the first line of the \
        recording"
            .to_owned());
    };
    let subject = subject_of(&value)?;
    let word = text("event").ok_or("the field event is missing")?;
    if word == "present" {
        if let Subject::Block(block) = subject {
            content.blocks.insert(block);
        }
        return Ok(());
    }
    let kind = EventKind::from_name(word).ok_or_else(|| format!("the event {word:?} is unknown"))?;
    let cause = text("reason").and_then(Cause::from_name).ok_or("the field reason is missing or unknown")?;
    let next = number("number").ok_or("the field number is missing")?;
    if known.number.checked_add(1) != Some(next) {
        return Err(format!("event {next} follows event {}: events between them are missing", known.number));
    }
    let sequence = Sequence { number: next, ..known };
    let at_ms = number("at_ms").ok_or("the field at_ms is missing")?;
    content.apply(&Event { sequence, at_ms, kind, cause, subject });
    Ok(())
}

fn subject_of(value: &Value) -> Result<Subject, String> {
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let namespace: NamespaceId = text("namespace").and_then(|text| text.parse().ok()).ok_or(
        "the namespace is not a number of 64 \
            hexadecimal digits",
    )?;
    let Some(key) = text("key") else { return Ok(Subject::Namespace(namespace)) };
    let key: BlockKey = key.parse().map_err(|_| "a key is not a number of 64 hexadecimal digits")?;
    let group = value.get("group").and_then(Value::as_u64).and_then(|group| u32::try_from(group).ok());
    let group = Group(group.ok_or("the field group is missing or not a number")?);
    let coordinate = text("coordinate")
        .and_then(parse_coordinate)
        .ok_or("the field `coordinate` is missing or not valid")?;
    Ok(Subject::Block(IndexKey { namespace, key, group, coordinate }))
}

/// The coordinate that is written so.
fn parse_coordinate(text: &str) -> Option<Coordinate> {
    if text == "replicated" {
        return Some(Coordinate::Replicated);
    }
    let (start, rest) = text.strip_prefix("heads ")?.split_once('+')?;
    let (count, of) = rest.split_once('/')?;
    Coordinate::heads(start.parse().ok()?, count.parse().ok()?, of.parse().ok()?)
}
