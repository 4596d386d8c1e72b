//! `kvarts health`: whether a running server serves, for supervisors that run a command and read its exit code.
//!
//! The answer comes from the server's metrics address, without a token and from memory, whatever else the server does.

use std::io::Write;
use std::net::SocketAddr;

use clap::Args;
use kvarts_terminal::Failure;
use serde_json::json;

use crate::metrics_address::{ask, strange};

/// Arguments of `kvarts health`.
#[derive(Args, Debug)]
pub(crate) struct HealthArgs {
    /// The server's metrics address
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7441")]
    metrics: SocketAddr,
    /// Check only whether a restart is needed because an executor has died, not whether the server accepts writes
    #[arg(long)]
    alive: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints it. A server that is not well ends with exit code 1.
pub(crate) fn run(arguments: &HealthArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let path = if arguments.alive { "/alive" } else { "/health" };
    let answer = ask(arguments.metrics, path).map_err(Failure::User)?;
    let body = answer.body.trim_end();
    let mut lines = body.lines();
    let fault = match (answer.is("200"), answer.is("503")) {
        (true, _) if lines.next() == Some("ok") => None,
        (_, true) => Some(body),
        _ => return Err(Failure::User(strange(arguments.metrics, path, &answer))),
    };
    // Directories that are out of use: the server serves without them.
    let without: Vec<&str> = if fault.is_none() { lines.collect() } else { Vec::new() };
    match arguments.json {
        true => {
            let mut all = json!({ "well": fault.is_none(), "reason": fault });
            if let Some(fields) = all.as_object_mut().filter(|_| fault.is_none()) {
                fields.insert("directories_out".to_owned(), json!(without));
            }
            writeln!(out, "{all}")?;
        }
        false => {
            writeln!(out, "{}", fault.unwrap_or("well"))?;
            without.iter().try_for_each(|line| writeln!(out, "  {line}"))?;
        }
    }
    match fault {
        None => Ok(()),
        Some(_) => Err(Failure::Problems),
    }
}
