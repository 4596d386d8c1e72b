//! Asking before what cannot be undone: one rule for every command.
//!
//! `--yes` says it beforehand. Without it a person at a terminal is asked; where no terminal is, nothing is done.

use std::io::{BufRead, IsTerminal, Write, stderr, stdin};

use clap::Args;
use kvarts_terminal::Failure;

/// Whether what cannot be undone is meant.
#[derive(Args, Debug)]
pub(crate) struct Sure {
    /// Do not ask for confirmation; required without a terminal
    #[arg(long)]
    yes: bool,
}

impl Sure {
    /// Whether it was not said beforehand.
    pub(crate) fn will_ask(&self) -> bool {
        !self.yes
    }

    /// Returns if it is meant. `what` is what will happen.
    pub(crate) fn ask(&self, what: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !(stdin().is_terminal() && stderr().is_terminal()) {
            return Err(Failure::User(format!("{what}: confirm with --yes")));
        }
        // A prompt that could not be written gets no answer.
        let _ = write!(stderr(), "{what}. Type yes to continue: ").and_then(|()| stderr().flush());
        let mut answer = String::new();
        let read = stdin().lock().read_line(&mut answer);
        match read.is_ok() && answer.trim() == "yes" {
            true => Ok(()),
            false => Err(Failure::user("the command was not confirmed, and nothing was changed")),
        }
    }
}
