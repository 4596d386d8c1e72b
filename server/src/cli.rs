//! The command line: which subcommands there are, and how each ends.
//!
//! A subcommand is one variant of [`Command`] and one module with its arguments and a `run`. It writes what it has
//! to say to the writer it is given and reports everything else as a [`Failure`]; this module alone decides about
//! exit codes and what stands on standard error:
//! - 0 for success, and for a reader of our output that went away;
//! - 2 for whatever the user can put right, with exactly one line that says what;
//! - 1 for problems that were found and reported, and for everything else.

use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::offline::{export_cmd, import_cmd, inspect_cmd, ls_cmd};
use crate::{bench, client_cmd, compact_cmd, config_cmd, demo, fsck_cmd, gpu_cmd, model_cmd, serve_cmd};

/// A storage engine for the KV-cache artifacts of language models.
#[derive(Parser, Debug)]
#[command(name = "kvarts", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Measure the engine beside a bare loop over the same files
    Bench(Box<bench::BenchArgs>),
    /// Write what is live in a store together, offline, in place or as a new store
    Compact(compact_cmd::CompactArgs),
    /// Check and show a server's configuration, make tokens
    Config(config_cmd::ConfigArgs),
    /// Delete blocks of a running server
    Delete(client_cmd::DeleteArgs),
    /// Show what this is for, on a server in a temporary directory, in under a minute
    Demo(demo::DemoArgs),
    /// Write artifacts of a store into a portable file
    Export(export_cmd::ExportArgs),
    /// Check a store offline, and repair it when asked
    Fsck(fsck_cmd::FsckArgs),
    /// Read blocks of a running server into a file
    Get(client_cmd::GetArgs),
    /// Describe devices and measure how memory reaches them
    Gpu(gpu_cmd::GpuArgs),
    /// Put the artifacts of an exported file into a store
    Import(import_cmd::ImportArgs),
    /// Show what lies where in a store
    Inspect(inspect_cmd::InspectArgs),
    /// List what is there: with a directory the artifacts in its files, without one the models of a running server
    Ls(ls_cmd::LsArgs),
    /// Ask a running server how much of a prompt can be restored
    Match(client_cmd::MatchArgs),
    /// Show, import and check model specs
    Model(model_cmd::ModelArgs),
    /// Hold blocks of a running server against eviction
    Pin(client_cmd::PinArgs),
    /// Put blocks from a file into a running server
    Put(client_cmd::PutArgs),
    /// Run the daemon
    Serve(Box<serve_cmd::ServeArgs>),
    /// Show what a running server is and has done
    Stat(client_cmd::StatArgs),
    /// Follow what happens to blocks of a running server
    Watch(client_cmd::WatchArgs),
}

/// Why a subcommand did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something the user can put right; the text is shown on one line.
    User(String),
    /// What was asked for was done and found problems; the report says which.
    Problems,
    /// Our own output could not be written.
    Output(io::Error),
}

impl Failure {
    pub(crate) fn user(message: impl ToString) -> Self {
        Self::User(message.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Runs the program with the process's arguments and standard streams.
pub fn main() -> ExitCode {
    let mut out = BufWriter::new(io::stdout().lock());
    let result = match run(std::env::args_os(), &mut out) {
        Ok(()) => out.flush().map_err(Failure::from),
        // What could not be said does not change what was found.
        Err(failure) => {
            let _ = out.flush();
            Err(failure)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Problems) => ExitCode::FAILURE,
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Failure::Output(error)) => {
            complain(&format!("cannot write the output: {error}"));
            ExitCode::FAILURE
        }
        Err(Failure::User(message)) => {
            complain(&message);
            ExitCode::from(2)
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

fn run(arguments: impl IntoIterator<Item = OsString>, out: &mut dyn Write) -> Result<(), Failure> {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        // Help and the version are answers, not faults.
        Err(error) if !error.use_stderr() => return Ok(write!(out, "{}", error.render())?),
        Err(error) => return Err(Failure::User(usage_fault(&error))),
    };
    match cli.command {
        Command::Bench(arguments) => bench::run(&arguments, out),
        Command::Compact(arguments) => compact_cmd::run(&arguments, out),
        Command::Config(arguments) => config_cmd::run(&arguments, out),
        Command::Delete(arguments) => client_cmd::delete(&arguments, out),
        Command::Demo(arguments) => demo::run(&arguments, out),
        Command::Export(arguments) => export_cmd::run(&arguments, out),
        Command::Fsck(arguments) => fsck_cmd::run(&arguments, out),
        Command::Get(arguments) => client_cmd::get(&arguments, out),
        Command::Gpu(arguments) => gpu_cmd::run(&arguments, out),
        Command::Import(arguments) => import_cmd::run(&arguments, out),
        Command::Inspect(arguments) => inspect_cmd::run(&arguments, out),
        Command::Ls(arguments) => ls_cmd::run(&arguments, out),
        Command::Match(arguments) => client_cmd::matching(&arguments, out),
        Command::Model(arguments) => model_cmd::run(&arguments, out),
        Command::Pin(arguments) => client_cmd::pin(&arguments, out),
        Command::Put(arguments) => client_cmd::put(&arguments, out),
        Command::Serve(arguments) => serve_cmd::run(&arguments, out),
        Command::Stat(arguments) => client_cmd::stat(&arguments, out),
        Command::Watch(arguments) => client_cmd::watch(&arguments, out),
    }
}

/// What is wrong with the arguments, on one line: the parser's message without its usage text.
fn usage_fault(error: &clap::Error) -> String {
    use clap::error::ErrorKind;
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "which subcommand? `--help` lists them".to_owned();
    }
    let text = error.render().to_string();
    let message = text.split("\nUsage:").next().unwrap_or(&text);
    let message = message.split("\nFor more information").next().unwrap_or(message);
    let words: Vec<&str> = message.split_whitespace().collect();
    let message = words.join(" ");
    message.strip_prefix("error: ").unwrap_or(&message).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(arguments: &[&str]) -> String {
        let arguments = arguments.iter().map(OsString::from);
        match run(arguments, &mut Vec::new()) {
            Err(Failure::User(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn faulty_arguments_are_told_on_one_line() {
        assert_eq!(fault(&["kvarts"]), "which subcommand? `--help` lists them");
        let unknown = fault(&["kvarts", "modle"]);
        assert_eq!(
            unknown,
            "unrecognized subcommand 'modle' tip: some similar subcommands exist: 'delete', 'model'"
        );
        let missing = fault(&["kvarts", "model", "show"]);
        assert_eq!(missing, "the following required arguments were not provided: <NAME|FILE>");
        assert!(fault(&["kvarts", "model", "show", "x", "--tp", "-1"]).contains("'-1'"));
    }

    #[test]
    fn the_arguments_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
