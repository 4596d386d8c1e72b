//! What client commands are about: which server, which model, which blocks.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kvarts_contract::api::KvStore;
use kvarts_contract::error::Reason;
use kvarts_layout::identity::IdentityForm;
use kvarts_layout::key::text_keys;
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::spec::shipped;
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, ModelSpec, NamespaceId, Requirements,
};

use super::keys_of;
use crate::{files, model_cmd};
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_server::config::{Config, GRPC_PORT};
use kvarts_terminal::Failure;

/// The most bytes of a file of tokens or keys.
const NAMES_BYTES_MAX: usize = 64 << 20;
/// The most bytes of a token's file, and of a certificate's.
const SECRET_BYTES_MAX: usize = 1 << 20;
/// How long a server may take for its first answer. What is asked of it then has the limits of its call.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// What to do about a server at `place` that accepts connections and answered nothing for so long.
pub(crate) fn hung(place: &str, time: Duration) -> String {
    format!(
        "the server at {place} accepts connections but has sent no answer for {} s, so its process is \
        stopped or waits: read its log, its state (`ps -o pid,stat,wchan:32,cmd -C kvarts`: T is stopped, D \
        waits for a disk) and `dmesg`",
        time.as_secs()
    )
}

/// Which server.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServerArgs {
    /// The server: a socket's path, HOST:PORT, or http(s)://HOST:PORT [default: $KVARTS_SERVER,
    /// or the server of the store ./kvarts-data; without that store, 127.0.0.1:7440]
    #[arg(long, value_name = "ADDR|SOCKET")]
    pub(crate) server: Option<String>,
    /// A file that holds the token [default: $KVARTS_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// For https: the certificate of the authority (CA) that signed the server's certificate, a PEM file
    #[arg(long, value_name = "FILE")]
    authority: Option<PathBuf>,
    /// For a socket with a token: the user id of the server, if the server runs neither as your user nor as root
    /// [default: $KVARTS_SERVER_UID]
    #[arg(long, value_name = "UID")]
    server_uid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// An endpoint from what a person writes.
fn endpoint(text: &str) -> String {
    let is_url = ["http://", "https://", "unix:"].iter().any(|scheme| text.starts_with(scheme));
    if is_url {
        text.to_owned()
    } else if text.contains('/') || Path::new(text).exists() {
        format!("unix:{text}")
    } else {
        format!("http://{text}")
    }
}

/// A store in this directory whose server does not run.
fn not_running(store: &Path) -> Failure {
    Failure::User(format!(
        "no server runs for the store here ({}): start a server with `kvarts serve`, or give another \
        server with --server",
        store.display()
    ))
}

impl ServerArgs {
    /// The endpoint, and the directory of the store here where that decides it.
    fn endpoint(&self) -> Result<(String, Option<PathBuf>), Failure> {
        if let Some(server) = self.server.clone().or_else(|| std::env::var("KVARTS_SERVER").ok()) {
            return Ok((endpoint(&server), None));
        }
        let config = Config::standard().map_err(Failure::user)?;
        let store = config.directories.into_iter().find(|store| store.join("superblock").exists());
        let socket = config.socket.filter(|socket| socket.exists());
        match (socket, store) {
            (Some(socket), store) => Ok((format!("unix:{}", socket.display()), store)),
            // Another server is not what a command in this directory means.
            (None, Some(store)) => Err(not_running(&store)),
            (None, None) => Ok((format!("http://127.0.0.1:{GRPC_PORT}"), None)),
        }
    }

    /// Connects.
    pub(crate) fn connect(&self, via: Via) -> Result<Client, Failure> {
        let file =
            self.token_file.clone().or_else(|| std::env::var_os("KVARTS_TOKEN_FILE").map(PathBuf::from));
        let read = |path: &PathBuf, what| files::read_text(path, SECRET_BYTES_MAX, what);
        let token = file.as_ref().map(|path| read(path, "a token")).transpose()?;
        let authority = self.authority.as_ref().map(|path| read(path, "a certificate")).transpose()?;
        let (endpoint, store) = self.endpoint()?;
        let options = ConnectOptions {
            token: token.map(|token| token.trim().to_owned()),
            authority: authority.map(String::into_bytes),
            via,
            first_answer: Some(FIRST_ANSWER),
            server_uid: self.server_uid.or_else(|| std::env::var("KVARTS_SERVER_UID").ok()?.parse().ok()),
            ..ConnectOptions::to(endpoint.clone())
        };
        Client::connect(&options).map_err(|error| match (&error.0, &store) {
            (Reason::Away(_), Some(store)) => not_running(store),
            (Reason::Away(what), None) => Failure::User(format!(
                "no server responds at {what}: start a server with `kvarts serve`, or give another \
                address with --server"
            )),
            (Reason::DeadlinePassed, _) => Failure::User(hung(&endpoint, FIRST_ANSWER)),
            _ => Failure::user(error),
        })
    }
}

/// Which model.
#[derive(Args, Debug)]
pub(crate) struct ModelArgs {
    /// The identity of the blocks, a TOML or JSON file (`kvarts identity` makes a template)
    #[arg(long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// The model: the name of a shipped model, or the file of a spec
    #[arg(long, value_name = "NAME|FILE")]
    pub(super) model: Option<PathBuf>,
    /// Instead of a model: flat pages with this number of bytes
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::bytes, conflicts_with = "model")]
    page_bytes: Option<u64>,
    /// The group of the blocks [default: the first group of the model]
    #[arg(long)]
    group: Option<u32>,
    /// Number of tensor-parallel ranks
    #[arg(long, default_value_t = 1)]
    tp: u16,
    /// The number of this rank [default: 0; match: all ranks]
    #[arg(long)]
    rank: Option<u16>,
}

/// Which blocks.
#[derive(Args, Debug)]
pub(crate) struct KeyArgs {
    /// A file with the tokens of the prompt as numbers, or `-` for standard input; a last, incomplete block is left out
    #[arg(long, value_name = "FILE", conflicts_with = "keys")]
    tokens: Option<PathBuf>,
    /// A file of keys for flat pages, in any order: 64 hexadecimal digits on each line
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
}

/// Blocks of a model that is registered with a server.
#[derive(Clone)]
pub(super) struct Subject {
    pub(super) namespace: NamespaceId,
    pub(super) identity: Identity,
    pub(super) group: Group,
    pub(super) coordinate: Coordinate,
    pub(super) shape: BlockShape,
    pub(super) requirements: Requirements,
    pub(super) keys: Vec<BlockKey>,
    /// Whether the keys follow each other.
    pub(super) chained: bool,
    pub(super) geometry: Geometry,
}

impl Subject {
    /// Blocks of a model that the server knows from now on.
    pub(super) fn new(client: &Client, model: &ModelArgs, keys: &KeyArgs) -> Result<Self, Failure> {
        Self::described(model, keys)?.registered(client)
    }

    pub(super) fn without_keys(client: &Client, model: &ModelArgs) -> Result<Self, Failure> {
        Self::of_model(model)?.registered(client)
    }

    /// What was asked for, before any server was: its namespace is not known yet.
    pub(super) fn described(model: &ModelArgs, keys: &KeyArgs) -> Result<Self, Failure> {
        let mut subject = Self::of_model(model)?;
        let block_tokens = subject.requirements.block_tokens();
        (subject.keys, subject.chained) = match (&keys.tokens, &keys.keys) {
            (Some(file), None) => {
                let text = files::read_text(file, NAMES_BYTES_MAX, "a list of tokens")?;
                let tokens =
                    tokens(&text).map_err(|what| Failure::User(format!("{}: {what}", file.display())))?;
                (text_keys(&tokens, block_tokens), true)
            }
            (None, Some(file)) => {
                let text = files::read_text(file, NAMES_BYTES_MAX, "a list of keys")?;
                (keys_of(&text).map_err(|what| Failure::User(format!("{}: {what}", file.display())))?, false)
            }
            _ => {
                return Err(Failure::user(
                    "--tokens FILE or --keys FILE is required: the file determines the blocks",
                ));
            }
        };
        if subject.keys.is_empty() {
            return Err(Failure::User(format!(
                "the file has fewer tokens than one block, which has {block_tokens} tokens"
            )));
        }
        Ok(subject)
    }

    /// The same, registered.
    pub(super) fn registered(mut self, client: &Client) -> Result<Self, Failure> {
        self.namespace = client.register(&self.identity, &self.geometry).map_err(Failure::user)?;
        Ok(self)
    }

    fn of_model(model: &ModelArgs) -> Result<Self, Failure> {
        let file = model.identity.as_ref().ok_or_else(|| {
            Failure::user(
                "--identity FILE is required: the file gives the model, revision and engine of the bytes; \
                `kvarts identity` writes a template",
            )
        })?;
        let (geometry, spec) = match (&model.model, model.page_bytes) {
            (Some(name), _) => {
                let spec = model_cmd::find(name)?;
                (spec.geometry().clone(), Some(spec))
            }
            (None, Some(bytes)) => (Geometry::opaque(bytes).map_err(Failure::user)?, None),
            (None, None) => {
                return Err(Failure::user(
                    "--model NAME or --page-bytes BYTES is required: the option gives the size of a block",
                ));
            }
        };
        let identity = identity(file, model, &geometry)?;
        if let (Some(given), Some(spec)) = (&model.model, &spec) {
            agree(file, &identity, given, spec)?;
        }
        let block_tokens = identity.block_tokens;
        let first = geometry.groups().first().map_or(Group(0), |group| group.group);
        let group = model.group.map_or(first, Group);
        let rank = model.rank.unwrap_or(0);
        let coordinate = geometry.coordinate(group, model.tp, rank).map_err(Failure::user)?;
        let shape = geometry.shape(group, coordinate, block_tokens).map_err(Failure::user)?;
        let mut requirements = requirements(spec.as_ref(), &geometry, block_tokens, model.tp)?;
        if let Some(rank) = model.rank {
            requirements = of_rank(&requirements, &geometry, model.tp, rank)?;
        }
        let (namespace, keys, chained) = (NamespaceId([0; 32]), Vec::new(), false);
        Ok(Self { namespace, identity, group, coordinate, shape, requirements, keys, chained, geometry })
    }
}

fn requirements(
    spec: Option<&ModelSpec>,
    geometry: &Geometry,
    block_tokens: u32,
    ranks: u16,
) -> Result<Requirements, Failure> {
    if let Some(spec) = spec {
        return spec.stored_requirements(block_tokens, ranks).map_err(Failure::user);
    }
    let group = |group: &kvarts_layout::spec::GroupGeometry| -> Result<Requirement, Failure> {
        let coordinates = geometry.coordinates(group.group, ranks).map_err(Failure::user)?;
        Ok(Requirement { group: group.group, coordinates, need: Need::All, absence: Absence::Required })
    };
    let groups = geometry.groups().iter().map(group).collect::<Result<Vec<_>, _>>()?;
    Requirements::new(block_tokens, groups).map_err(Failure::user)
}

/// What one rank needs of what all of them need.
fn of_rank(all: &Requirements, geometry: &Geometry, ranks: u16, rank: u16) -> Result<Requirements, Failure> {
    let one = |requirement: &Requirement| -> Result<Requirement, Failure> {
        let coordinate = geometry.coordinate(requirement.group, ranks, rank).map_err(Failure::user)?;
        Ok(Requirement { coordinates: vec![coordinate], ..requirement.clone() })
    };
    let groups = all.groups().iter().map(one).collect::<Result<Vec<_>, _>>()?;
    Requirements::new(all.block_tokens(), groups).map_err(Failure::user)
}

/// The identity that the file gives to this model.
fn identity(file: &Path, model: &ModelArgs, geometry: &Geometry) -> Result<Identity, Failure> {
    let text = files::read_text(file, kvarts_layout::identity::MAX_IDENTITY_FILE_BYTES, "an identity")?;
    let read = match text.trim_start().starts_with('{') {
        true => IdentityForm::from_json(&text),
        false => IdentityForm::from_toml(&text),
    };
    let fault = |error| Failure::User(format!("{}: {error}", file.display()));
    let read = read.map_err(fault)?;
    if let Some(doubt) = read.doubt() {
        // A remark beside the answer: where it cannot be written, the answer still can.
        let _ = writeln!(std::io::stderr(), "kvarts: {}, {doubt}", file.display());
    }
    let mut identity = read.of(geometry).map_err(fault)?;
    let (said, found) = (identity.spec_fingerprint, geometry.fingerprint());
    if said != found {
        let (file, given) = (file.display(), model.model.as_ref().map(|name| name.display().to_string()));
        let given = given.map_or("--page-bytes".to_owned(), |name| format!("--model {name}"));
        return Err(Failure::User(format!(
            "the spec_fingerprint in {file} is {said}, but the fingerprint of {given} is {found}: correct \
            the file or the option, or remove the field"
        )));
    }
    // The server gives the salt.
    identity.tenant_salt.0.clear();
    Ok(identity)
}

/// Refuses an identity whose model is a shipped one of another shape than that of `--model`: bytes of the one would be stored under
/// the name of the other. A name that is not shipped says nothing of a shape.
fn agree(file: &Path, identity: &Identity, given: &Path, spec: &ModelSpec) -> Result<(), Failure> {
    let name = identity.model.rsplit('/').next().unwrap_or_default().to_lowercase();
    let other = shipped::load(&name).filter(|other| other.geometry() != spec.geometry());
    let Some(other) = other else { return Ok(()) };
    Err(Failure::User(format!(
        "the model in {} is {}, but --model {} has blocks of another shape: correct the file or the option",
        file.display(),
        other.name(),
        given.display(),
    )))
}

/// Numbers with anything between them that is no letter: JSON, or a list.
fn tokens(text: &str) -> Result<Vec<u32>, String> {
    let separator = |c: char| c.is_whitespace() || [',', '[', ']', ';'].contains(&c);
    let words = text.split(separator).filter(|word| !word.is_empty());
    words.map(|word| word.parse().map_err(|_| format!("{word:?} is not a token number"))).collect()
}

/// A time such as 90s, 30m, 12h, 7d.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let each = match text.get(digits.len()..).unwrap_or_default() {
        "s" | "" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        other => return Err(format!("{other:?} is not a unit of time: use s, m, h or d")),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is not a time: write a number with a unit, such as 90s or 12h"))?;
    if number == 0 {
        return Err(format!("the time {text:?} is zero: write a longer time, such as 90s"));
    }
    let seconds = number.checked_mul(each);
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| format!("the time {text:?} is too long: it must fit 64 bits in seconds"))
}

#[cfg(test)]
mod tests {
    use kvarts_layout::cut::{Cut, Wanted};

    use super::*;

    #[test]
    fn servers_are_named_by_paths_addresses_and_urls() {
        assert_eq!(endpoint("/run/kvarts.sock"), "unix:/run/kvarts.sock");
        assert_eq!(endpoint("./kvarts.sock"), "unix:./kvarts.sock");
        assert_eq!(endpoint("node-7:7440"), "http://node-7:7440");
        assert_eq!(endpoint("https://node-7:7440"), "https://node-7:7440");
        assert_eq!(endpoint("unix:x"), "unix:x");
    }

    /// What Python asks of the same namespace: a client's blocks are cut by these words.
    #[test]
    fn of_windows_and_states_the_program_asks_what_python_asks() {
        for name in ["gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b", "deepseek-v4-flash", "llama-3.1-8b"] {
            let spec = model_cmd::find(std::path::Path::new(name)).unwrap();
            let wanted = Wanted {
                model: "m".to_owned(),
                revision: "1".to_owned(),
                dtype: "bf16".to_owned(),
                engine: "e".to_owned(),
                layout: "l".to_owned(),
                layout_version: "1".to_owned(),
                block_tokens: 256,
                tokenizer: "none".to_owned(),
                adapter: "none".to_owned(),
                quantisation: "none".to_owned(),
                scales: "none".to_owned(),
                rope: "none".to_owned(),
                window: "none".to_owned(),
                extras: std::collections::BTreeMap::new(),
                tp_size: 1,
                tp_rank: 0,
                windows: std::collections::BTreeMap::new(),
            };
            let python = Cut::new(None, Some(name), wanted).unwrap().requirements;
            assert_eq!(requirements(Some(&spec), spec.geometry(), 256, 1).unwrap(), python, "{name}");
        }
    }

    #[test]
    fn tokens_are_numbers_in_json_or_in_a_list() {
        assert_eq!(tokens("[1, 2,3]\n4 5").unwrap(), [1, 2, 3, 4, 5]);
        assert!(tokens("1 two").unwrap_err().contains("two") && tokens("-1").is_err());
    }

    #[test]
    fn times_have_units_and_are_longer_than_nothing() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7200)));
        for wrong in ["", "0s", "h", "5 m", "5y", "-1s", "99999999999999999999d", "9999999999999999d"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
