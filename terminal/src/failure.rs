//! How a command ends that did not do what it was asked.

use std::io;

/// Why a subcommand did not do what it was asked.
#[derive(Debug)]
pub enum Failure {
    /// Something the user can put right; the text is shown on one line.
    User(String),
    /// The same, where programs may want to tell it from others.
    Refused(Refusal),
    /// What was asked for was done and found problems; the report says which.
    Problems,
    /// Our own output could not be written.
    Output(io::Error),
}

impl Failure {
    /// Something the user can put right, in one sentence.
    pub fn user(message: impl ToString) -> Self {
        Self::User(message.to_string())
    }
}

/// Why a command could not be run, in parts that programs can use.
#[derive(Debug, serde::Serialize)]
pub struct Refusal {
    /// What it is: a name that stays.
    kind: &'static str,
    message: String,
    /// What to do about it.
    advice: Option<String>,
}

impl Refusal {
    /// Of a kind, in a sentence, with what to do about it if anything.
    pub fn new(kind: &'static str, message: impl ToString, advice: &str) -> Self {
        Self { kind, message: message.to_string(), advice: (!advice.is_empty()).then(|| advice.to_owned()) }
    }

    /// All of it on one line.
    pub fn line(&self) -> String {
        match &self.advice {
            Some(advice) => format!("{}: {advice}", self.message),
            None => self.message.clone(),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}
