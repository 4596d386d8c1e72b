//! `kvarts top`: what a running server does, second by second.
//!
//! Everything comes from the server's metrics: two samples of them make rates ([`mod@figures`]), and these make lines ([`view`]).

mod figures;
mod sample;
mod screen;
mod view;

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;

use figures::figures;
use kvarts_terminal::Failure;
use sample::Sample;
use screen::{Key, Screen};

/// Arguments of `kvarts top`.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// The server's metrics address
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7441")]
    metrics: SocketAddr,
    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Take two samples, print the difference, and exit
    #[arg(long)]
    once: bool,
    /// Print one JSON object for one interval
    #[arg(long)]
    json: bool,
}

/// Shows figures until `q` or Ctrl-C, or once.
pub(crate) fn run(arguments: &TopArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let interval = Duration::from_secs(arguments.interval);
    let fetch = || Sample::fetch(arguments.metrics).map_err(Failure::User);
    let mut before = fetch()?;
    if arguments.once || arguments.json || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal()
    {
        pause(interval);
        let seen = figures(Some(&before), &fetch()?);
        if arguments.json {
            serde_json::to_writer_pretty(&mut *out, &seen).map_err(std::io::Error::from)?;
            return Ok(writeln!(out)?);
        }
        writeln!(out, "http://{}/metrics", arguments.metrics)?;
        for line in view::lines(&seen, usize::MAX, usize::MAX) {
            writeln!(out, "{line}")?;
        }
        return Ok(());
    }
    let screen = Screen::take(out)?;
    let mut seen = figures(None, &before);
    loop {
        let (rows, columns) = screen.size();
        let mut lines = view::lines(&seen, rows.saturating_sub(1), columns);
        lines.push("q quits".to_owned());
        screen.draw(&lines, out)?;
        if screen.key(interval)? == Some(Key::End) {
            return Ok(screen.leave(out)?);
        }
        // A server that is away comes back: the screen says so meanwhile.
        match Sample::fetch(arguments.metrics) {
            Ok(now) => {
                seen = figures(Some(&before), &now);
                before = now;
            }
            Err(why) => seen.read_only = why,
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "a command run by a user, on the real clock")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}
