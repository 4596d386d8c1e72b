//! The command line: which subcommands there are, and how each ends.
//!
//! A subcommand is one variant of [`Command`] and one module with its arguments and a `run`. How each ends decides
//! `kvarts_terminal::program`.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use kvarts_terminal::Failure;
use kvarts_terminal::program::{self, usage_fault};
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit_codes::EXIT_CODES;
use crate::offline::{export_cmd, import_cmd, inspect_cmd, ls_cmd};
use crate::{
    client_cmd, cold_cmd, compact_cmd, config_cmd, demo, doctor, fsck_cmd, gpu_cmd, health_cmd, identity_cmd,
    init_cmd, lab_cmd, model_cmd, plan_cmd, replace_cmd, serve_cmd, top,
};

/// What the end of the help says.
const LAST_WORDS: &str = "\
First steps: `kvarts demo` is a demonstration, `kvarts doctor DIR` checks this machine, `kvarts serve` runs a server; then \
`kvarts identity`, `put`, `match`, `get`. These commands administer a server: `budget`, `checkpoint`, `compact`, `drain`, \
`reload`, `resume`, `scrub`.

";

/// A disk tier for the KV cache of language models.
#[derive(Parser, Debug)]
#[command(name = "kvarts", version, after_help = format!("{LAST_WORDS}{EXIT_CODES}"), max_term_width = 80)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Benchmark Kvarts against bare programs over the same data
    Bench(lab_cmd::HandedOver),
    /// Show or change the disk budget of a running server
    Budget(client_cmd::BudgetArgs),
    /// Write a checkpoint of a running server, which shortens its next start
    Checkpoint(client_cmd::AdminArgs),
    /// Show the cluster of a running server
    Cluster(client_cmd::ClusterArgs),
    /// Keep blocks in object storage: push, list, check, collect, restore
    Cold(cold_cmd::ColdArgs),
    /// Defragment a store: on a running server, or offline, in place or into a new store
    Compact(compact_cmd::CompactArgs),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// Check and show a server's configuration, create tokens
    Config(config_cmd::ConfigArgs),
    /// Delete blocks from a running server
    Delete(client_cmd::DeleteArgs),
    /// Demonstrate Kvarts on a server in a temporary directory, in under a minute
    Demo(demo::DemoArgs),
    /// Check whether this machine suits a server, and list the changes to make
    Doctor(doctor::DoctorArgs),
    /// Finish the calls of a running server, and stop it
    Drain(client_cmd::DrainArgs),
    /// Export blocks of a store to a portable file
    Export(export_cmd::ExportArgs),
    /// Check a store offline, and repair it with --repair
    Fsck(fsck_cmd::FsckArgs),
    /// Read blocks from a running server into a file
    Get(client_cmd::GetArgs),
    /// Describe GPU devices, and measure copies to them
    Gpu(gpu_cmd::GpuArgs),
    /// Check whether a running server is ready; the exit code gives the result
    Health(health_cmd::HealthArgs),
    /// Print a template of an identity: the fields that determine the bytes of blocks
    Identity(identity_cmd::IdentityArgs),
    /// Import the blocks of an exported file into a store
    Import(import_cmd::ImportArgs),
    /// Create a store without serving it, and print its id, which names the node in a cluster
    Init(init_cmd::InitArgs),
    /// Show the segments and records of a store
    Inspect(inspect_cmd::InspectArgs),
    /// List the blocks in the files of a store, or without a directory the models of a running server
    Ls(ls_cmd::LsArgs),
    /// Write a manual page for each subcommand into a directory
    Man(ManArgs),
    /// Show how much of a prompt a running server can restore
    Match(client_cmd::MatchArgs),
    /// Show, import and check model specs
    Model(model_cmd::ModelArgs),
    /// Protect blocks of a running server from eviction, and list pins and leases
    Pin(client_cmd::PinArgs),
    /// Compute the benefit of restoring a prefix, and the best node for a request
    Plan(Box<plan_cmd::PlanArgs>),
    /// Put blocks from a file into a running server
    Put(client_cmd::PutArgs),
    /// Reload tenants, tokens and certificates of a running server, as SIGHUP does
    Reload(client_cmd::AdminArgs),
    /// Replace lost directories of a store with empty ones, offline
    Replace(replace_cmd::ReplaceArgs),
    /// End the read-only state of a running server after a fault, when the cause has been removed
    Resume(client_cmd::AdminArgs),
    /// Compare every block of a running server with its digests
    Scrub(client_cmd::AdminArgs),
    /// Run the server
    Serve(Box<serve_cmd::ServeArgs>),
    /// Show the sessions of a running server, which hold the blocks of conversations
    Session(client_cmd::SessionArgs),
    /// Simulate a disk tier, an engine or a cluster in virtual time
    Sim(lab_cmd::HandedOver),
    /// Show the state, limits and counters of a running server
    Stat(client_cmd::AdminArgs),
    /// Delete all blocks of a tenant of a running server
    Tenant(client_cmd::TenantArgs),
    /// Show hits and misses, calls, disks, tenants and nodes of a running server, live
    Top(top::TopArgs),
    /// Print puts, evictions and deletes of a running server as they happen
    Watch(client_cmd::WatchArgs),
}

/// Arguments of `kvarts completions`.
#[derive(Args, Debug)]
struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Arguments of `kvarts man`.
#[derive(Args, Debug)]
struct ManArgs {
    /// An existing directory; existing pages with the same names are replaced
    directory: PathBuf,
}

/// Runs the program with the process's arguments and standard streams.
pub(crate) fn main() -> ExitCode {
    outlive_file_size_limit();
    program::main(run)
}

/// From now on a write beyond the limit of a file's size (`ulimit -f`) is an error like others; by default its signal ends the
/// process. Where it cannot be handled, all is as it was.
fn outlive_file_size_limit() {
    if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() {
        let _inside = runtime.enter();
        // Nothing waits for it. The handler stays when this is gone.
        let _ = signal(SignalKind::from_raw(Signal::XFSZ.as_raw()));
    }
}

fn run(arguments: impl IntoIterator<Item = OsString>, out: &mut dyn Write) -> Result<(), Failure> {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        // Help and the version are answers, not faults.
        Err(error) if !error.use_stderr() => return Ok(write!(out, "{}", error.render())?),
        Err(error) => return Err(Failure::User(usage_fault(&error))),
    };
    match cli.command {
        Command::Bench(arguments) => lab_cmd::run("bench", &arguments),
        Command::Budget(arguments) => client_cmd::budget(&arguments, out),
        Command::Checkpoint(arguments) => client_cmd::checkpoint(&arguments, out),
        Command::Cluster(arguments) => client_cmd::cluster(&arguments, out),
        Command::Cold(arguments) => cold_cmd::run(&arguments, out),
        Command::Compact(arguments) => compact_cmd::run(&arguments, out),
        Command::Completions(arguments) => {
            // The generator panics where its writer fails, as a closed pipe does.
            let mut text = Vec::new();
            clap_complete::generate(arguments.shell, &mut Cli::command(), "kvarts", &mut text);
            Ok(out.write_all(&text)?)
        }
        Command::Config(arguments) => config_cmd::run(&arguments, out),
        Command::Delete(arguments) => client_cmd::delete(&arguments, out),
        Command::Demo(arguments) => demo::run(&arguments, out),
        Command::Doctor(arguments) => doctor::run(&arguments, out),
        Command::Drain(arguments) => client_cmd::drain(&arguments, out),
        Command::Export(arguments) => export_cmd::run(&arguments, out),
        Command::Fsck(arguments) => fsck_cmd::run(&arguments, out),
        Command::Get(arguments) => client_cmd::get(&arguments, out),
        Command::Gpu(arguments) => gpu_cmd::run(&arguments, out),
        Command::Health(arguments) => health_cmd::run(&arguments, out),
        Command::Identity(arguments) => identity_cmd::run(&arguments, out),
        Command::Import(arguments) => import_cmd::run(&arguments, out),
        Command::Init(arguments) => init_cmd::run(&arguments, out),
        Command::Inspect(arguments) => inspect_cmd::run(&arguments, out),
        Command::Ls(arguments) => ls_cmd::run(&arguments, out),
        Command::Man(arguments) => clap_mangen::generate_to(Cli::command(), &arguments.directory)
            .map_err(|error| Failure::User(format!("{}: {error}", arguments.directory.display()))),
        Command::Match(arguments) => client_cmd::matching(&arguments, out),
        Command::Model(arguments) => model_cmd::run(&arguments, out),
        Command::Pin(arguments) => client_cmd::pin(&arguments, out),
        Command::Put(arguments) => client_cmd::put(&arguments, out),
        Command::Reload(arguments) => client_cmd::reload(&arguments, out),
        Command::Replace(arguments) => replace_cmd::run(&arguments, out),
        Command::Resume(arguments) => client_cmd::resume(&arguments, out),
        Command::Scrub(arguments) => client_cmd::scrub(&arguments, out),
        Command::Serve(arguments) => serve_cmd::run(&arguments, out),
        Command::Session(arguments) => client_cmd::session(&arguments, out),
        Command::Plan(arguments) => plan_cmd::run(&arguments, out),
        Command::Sim(arguments) => lab_cmd::run("sim", &arguments),
        Command::Stat(arguments) => client_cmd::stat(&arguments, out),
        Command::Tenant(arguments) => client_cmd::tenant(&arguments, out),
        Command::Top(arguments) => top::run(&arguments, out),
        Command::Watch(arguments) => client_cmd::watch(&arguments, out),
    }
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
        assert_eq!(fault(&["kvarts"]), "a subcommand is required: `--help` lists the subcommands");
        let unknown = fault(&["kvarts", "modle"]);
        assert_eq!(
            unknown,
            "unrecognized subcommand 'modle'; tip: some similar subcommands exist: 'delete', 'model'"
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
