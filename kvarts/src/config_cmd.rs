//! `kvarts config`: what a server would do with a configuration, without starting one; and new tokens.

use std::io::Write;

use clap::{Args, Subcommand};
use kvarts_contract::clock::Entropy;
use kvarts_contract::clock::OsEntropy;
use serde_json::json;

use crate::serve_cmd::ServeArgs;
use kvarts_server::config::Config;
use kvarts_server::human;
use kvarts_server::state::auth::{Gate, TOKEN_PREFIX, TokenHash};
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// Which question about a configuration.
#[derive(Args, Debug)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Subcommand, Debug)]
enum ConfigCommand {
    /// Check a configuration, and print each fault with its place
    Check(Box<ShowArgs>),
    /// Show every setting with its value and source
    Show(Box<ShowArgs>),
    /// Create a token: the secret for a client, its hash for the configuration
    Token(TokenArgs),
}

#[derive(Args, Debug)]
struct ShowArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Args, Debug)]
struct TokenArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs one of the subcommands.
pub(crate) fn run(arguments: &ConfigArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.command {
        ConfigCommand::Check(check) => {
            let config = check.serve.resolve()?;
            kvarts_server::daemon::check(&config).map_err(Failure::User)?;
            let settings = config.origins.iter().filter(|setting| setting.from != "default").count();
            let access = doors(&config);
            if check.json {
                let told = json!({ "good": true, "settings": settings, "access": access });
                return Ok(writeln!(out, "{told:#}")?);
            }
            Ok(writeln!(out, "the configuration is valid: {settings} settings are set, {access}")?)
        }
        ConfigCommand::Show(show) => show_settings(show, out),
        ConfigCommand::Token(token) => new_token(token.json, out),
    }
}

/// The access control in words. Without tokens every client has all rights; only programs of this host reach a loopback address.
fn doors(config: &Config) -> String {
    let all = match (&config.gate, config.grpc) {
        (Gate::Tokens(tokens), _) => return format!("{} tokens", tokens.len()),
        (Gate::Open(_), Some(address)) if address.ip().to_canonical().is_loopback() => {
            "every user of this host".to_owned()
        }
        (Gate::Open(_), Some(address)) => format!("every client that can reach {address}"),
        (Gate::Open(_), None) => "every client that can open the local socket".to_owned(),
    };
    format!("all rights for {all} (no tokens)")
}

fn show_settings(arguments: &ShowArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let mut config = arguments.serve.resolve()?;
    config.origins.sort_by_key(|setting| setting.name);
    let parts = config.memory_parts();
    let all = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
    if arguments.json {
        let parts = parts
            .iter()
            .map(|part| json!({ "what": part.what, "setting": part.setting, "bytes": part.bytes }));
        let memory = json!({ "parts": parts.collect::<Vec<_>>(), "bytes": all });
        let shown = json!({ "settings": config.origins, "access": doors(&config), "memory": memory });
        serde_json::to_writer_pretty(&mut *out, &shown).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    let mut table = Table::new(&[("SETTING", Align::Left), ("VALUE", Align::Left), ("FROM", Align::Left)]);
    for setting in &config.origins {
        table.row([setting.name.to_owned(), setting.value.clone(), setting.from.to_owned()]);
    }
    write!(out, "{table}")?;
    writeln!(out, "access: {}\n", doors(&config))?;
    let mut table = Table::new(&[("MEMORY", Align::Left), ("LIMIT", Align::Right), ("SETTING", Align::Left)]);
    for part in &parts {
        let by = part.setting.unwrap_or("fixed");
        table.row([part.what.to_owned(), human::bytes(part.bytes), by.to_owned()]);
    }
    table.row(["total".to_owned(), human::bytes(all), String::new()]);
    Ok(write!(out, "{table}")?)
}

fn new_token(as_json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let mut secret = [0; 32];
    OsEntropy::new().fill(&mut secret);
    let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let token = format!("{TOKEN_PREFIX}{hex}");
    let hash = TokenHash::of(&token).to_string();
    if as_json {
        return Ok(writeln!(out, "{}", json!({ "token": token, "hash": hash }))?);
    }
    writeln!(out, "token (for the client, shown once): {token}")?;
    Ok(writeln!(out, "hash (for [[tokens]] in the configuration): {hash}")?)
}
