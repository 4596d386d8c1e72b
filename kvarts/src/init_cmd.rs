//! `kvarts init`: makes a store without serving it, and prints its id: the node's in a cluster, which the file of members names before any
//! node starts.

use std::io::Write;

use clap::Args;
use kvarts_server::config::Settings;
use kvarts_terminal::Failure;
use serde_json::json;

use crate::serve_cmd::ServeArgs;

/// The arguments of `init`.
#[derive(Args, Debug)]
pub(crate) struct InitArgs {
    /// The directories of the store, separated by commas, one for each device [default: the directories of the configuration]
    #[arg(value_name = "DIRS")]
    at: Option<String>,
    /// Print only this node's entry for the file of members, with the address at which other nodes reach this node
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "json")]
    member: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    serve: Box<ServeArgs>,
}

/// Makes the store, if there is none, and prints its id.
pub(crate) fn run(arguments: &InitArgs, out: &mut dyn Write) -> Result<(), Failure> {
    if let Some(place) = &arguments.member {
        let port = place.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        if port.is_none_or(|(_, port)| !port.parse::<u16>().is_ok_and(|port| port > 0)) {
            return Err(Failure::User(format!(
                "--member {place}: write a host and a port, such as 10.0.0.1:7400"
            )));
        }
    }
    let mut serve = ServeArgs::clone(&arguments.serve);
    if let Some(at) = &arguments.at {
        if let Some(dir) = &serve.settings.directories {
            return Err(Failure::User(format!(
                "{at} and --dir {dir} are both given: give the directories once"
            )));
        }
        serve.settings = Settings { directories: Some(at.clone()), ..serve.settings };
    }
    let config = serve.resolve()?;
    let (id, is_made) = kvarts_server::daemon::init(&config).map_err(Failure::User)?;
    if let Some(place) = &arguments.member {
        return Ok(writeln!(out, "[[node]]\nid = \"{id}\"\naddress = \"{place}\"")?);
    }
    let directories: Vec<String> = config.directories.iter().map(|path| path.display().to_string()).collect();
    if arguments.json {
        let told = json!({ "store": id.to_string(), "made": is_made, "directories": directories });
        return Ok(writeln!(out, "{told:#}")?);
    }
    let what = if is_made { "a store was created in" } else { "a store exists in" };
    writeln!(out, "{what} {}", directories.join(", "))?;
    Ok(writeln!(out, "the id of the store, which is also the id of the node in a cluster: {id}")?)
}
