//! Why a text is not a model spec, and where: said in one line, with nothing of the text that could break it.

use std::fmt;

use super::error::SpecError;

/// The most bytes a spec's text may have.
pub const MAX_SPEC_BYTES: usize = 1 << 20;

/// Where in a spec's text a fault is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// The text as a whole.
    Whole,
    /// A position in the text, both counted from one.
    Text {
        /// The line.
        line: usize,
        /// The column, in characters.
        column: usize,
    },
    /// A key, as a dotted path.
    Key(String),
}

/// What is wrong there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FormFault {
    /// The text is larger than [`MAX_SPEC_BYTES`].
    TooLarge,
    /// The text is not TOML of this form: the reader's message.
    Text(String),
    /// The role needs this key.
    Missing,
    /// The role has no such key.
    Unwanted,
    /// Not a valid name.
    Name,
    /// A text longer than this many bytes.
    TooLong(usize),
    /// A name that is defined nowhere.
    Undefined(String),
    /// A definition that nothing uses.
    Unused,
    /// The same name twice.
    Twice(String),
    /// A part to read that no layer before keeps, or that the layer keeps itself.
    NoSource(String),
    /// A run that repeats zero times or holds no layers.
    EmptyRun,
    /// Numbers that are not a geometry.
    Spec(SpecError),
}

/// Why a text is not a model spec, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FormError {
    /// Where the fault is.
    pub place: Place,
    /// What it is.
    pub fault: FormFault,
}

impl fmt::Display for FormError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Whole => {}
            Place::Text { line, column } => write!(f, "line {line}, column {column}: ")?,
            Place::Key(key) => write!(f, "{key}: ")?,
        }
        match &self.fault {
            FormFault::TooLarge => write!(
                f,
                "the model spec is longer than the limit of {MAX_SPEC_BYTES} \
                bytes"
            ),
            FormFault::Text(message) => f.write_str(message),
            FormFault::Missing => {
                f.write_str("the key is missing, and the role of the part requires this key")
            }
            FormFault::Unwanted => f.write_str("a part of this role cannot have this key"),
            FormFault::Name => f.write_str(
                "the name is not valid: use a short name of lower-case \
                letters, digits, `_` and `-` that begins with a letter",
            ),
            FormFault::TooLong(limit) => write!(f, "the text is longer than {limit} bytes"),
            FormFault::Undefined(name) => write!(f, "`{}` is not defined", printable(name)),
            FormFault::Unused => f.write_str("no layer uses this definition"),
            FormFault::Twice(name) => write!(f, "the list has `{name}` twice"),
            FormFault::NoSource(name) => {
                write!(
                    f,
                    "this kind of layer must not read `{0}`: a layer can read `{0}` only if an \
                    earlier layer stores `{0}` and the layer itself does not",
                    printable(name)
                )
            }
            FormFault::EmptyRun => {
                f.write_str("the run is empty: give at least one layer and one repetition")
            }
            FormFault::Spec(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for FormError {}

/// The most characters of a text of the user's that an error repeats.
const MAX_SHOWN: usize = 400;

/// A text as an error may repeat it: on one line, without control characters, not long.
pub(super) fn printable(text: &str) -> String {
    text.chars().take(MAX_SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A fault of the value of a key.
pub(super) fn at(key: impl Into<String>, fault: FormFault) -> FormError {
    FormError { place: Place::Key(printable(&key.into())), fault }
}
