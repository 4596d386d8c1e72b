//! How a program begins and ends: its arguments, its exit code, and what stands on standard error.
//!
//! A command writes what it has to say to the writer it is given and reports everything else as a [`Failure`]; this module alone
//! decides about exit codes:
//! - 0 for success: what was asked for was done, found nothing wrong, and was told in full;
//! - 1 for problems that were found and reported;
//! - 2 for whatever else keeps a command from its work or its answer from being written, with exactly one line that says
//!   what; with `--json` one object with `error` stands on standard output besides;
//! - 141, and not a word, where the reader of our output went away before its end: what a shell says of a program that a
//!   closed pipe ended. It never means that a store is clean. Problems that were found by then stay 1.

use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use crate::{Failure, Refusal};

/// Of a program that a closed pipe ended, as a shell says it.
const CUT_OFF: u8 = 141;

/// Runs a program with the process's arguments and standard streams.
pub fn main(run: impl FnOnce(Vec<OsString>, &mut dyn Write) -> Result<(), Failure>) -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let json = answers_in_json(&arguments);
    let mut out = BufWriter::new(io::stdout().lock());
    let result = run(arguments, &mut out);
    ExitCode::from(end(result, json, &mut out))
}

/// Whether standard output is for a program: a refusal then goes there too. What `get` writes there are blocks.
fn answers_in_json(arguments: &[OsString]) -> bool {
    let mut words = arguments.iter().skip(1).take_while(|word| *word != "--");
    words.next().is_some_and(|command| command != "get") && words.any(|word| word == "--json")
}

/// The last words of a command, and its exit code.
fn end(result: Result<(), Failure>, json: bool, out: &mut dyn Write) -> u8 {
    let refusal = match result {
        Ok(()) => return told(out.flush(), 0),
        // What was found by then is true, also where the reader goes away before the end.
        Err(Failure::Problems) => match told(out.flush(), 1) {
            CUT_OFF => return 1,
            code => return code,
        },
        Err(Failure::Output(error)) => return told(Err(error), 2),
        Err(Failure::User(message)) => Refusal::new("invalid", message, ""),
        Err(Failure::Refused(refusal)) => refusal,
    };
    complain(&refusal.line());
    if json {
        let told = serde_json::json!({ "error": refusal });
        // The line and the code have said it already.
        let _ = writeln!(out, "{told:#}");
    }
    let _ = out.flush();
    2
}

/// The exit code of a command that wrote its answer, or did not.
fn told(written: io::Result<()>, code: u8) -> u8 {
    match written {
        Ok(()) => code,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => CUT_OFF,
        Err(error) => {
            complain(&format!("the output could not be written: {error}"));
            2
        }
    }
}

fn complain(message: &str) {
    // If standard error is gone, the exit code is all there is left to say.
    let _ = writeln!(io::stderr(), "kvarts: {}", one_line(message));
}

fn one_line(message: &str) -> String {
    message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What is wrong with the arguments, on one line: the parser's message without its usage text.
pub fn usage_fault(error: &clap::Error) -> String {
    use clap::error::ErrorKind;
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "a subcommand is required: `--help` lists the subcommands".to_owned();
    }
    let text = error.render().to_string();
    let message = text.split("\nUsage:").next().unwrap_or(&text);
    let message = message.split("\nFor more information").next().unwrap_or(message);
    let mut said = String::new();
    for line in message.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        said += if said.is_empty() {
            ""
        } else if line.starts_with("tip:") {
            "; "
        } else {
            " "
        };
        said += &words.join(" ");
    }
    said.strip_prefix("error: ").unwrap_or(&said).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_an_object_where_a_program_reads_and_never_among_the_blocks_of_a_get() {
        let json = |words: &[&str]| answers_in_json(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(json(&["kvarts", "fsck", "--json", "dir"]) && json(&["kvarts", "ls", "--json"]));
        assert!(!json(&["kvarts", "fsck", "dir"]) && !json(&["kvarts", "fsck", "--", "--json"]));
        assert!(!json(&["kvarts", "get", "--json", "--to", "-"]) && !json(&["kvarts", "--json"]));
        let mut out = Vec::new();
        assert_eq!(end(Err(Failure::User("no".to_owned())), true, &mut out), 2);
        let said: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!((&said["error"]["kind"], &said["error"]["message"]), (&"invalid".into(), &"no".into()));
        let mut out = Vec::new();
        assert_eq!((end(Err(Failure::User("no".to_owned())), false, &mut out), out.len()), (2, 0));
    }
}
