//! From settings to a configuration that can be: every value checked, every absent one decided.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kvarts_cluster::hot::Rule;
use kvarts_gpudirect::cufile::Wish;
use kvarts_peer::etcd::{self, EtcdOptions};
use kvarts_peer::node::PutPolicy;
use kvarts_store::engine::EvictionPolicy;
use kvarts_store::home::RuntimeChoice;
use kvarts_store::io::{Features, IoChoice};

use super::cold;
use super::complaint::Complaint;
use super::decided::{Decided, number, sized};
use super::form::Settings;
use super::memory;
use super::size;
use super::socket;
use super::{
    ClusterConfig, Config, EtcdFiles, GRPC_PORT, LogFormat, METRICS_PORT, MembersFrom, NodeTlsFiles,
    OPEN_METRICS_WORDS, OPEN_WORDS, Setting, TlsFiles,
};
use crate::human;
use crate::state::auth::Gate;

fn address(name: &str, text: &str) -> Result<Option<SocketAddr>, Complaint> {
    if text == "none" {
        return Ok(None);
    }
    let refuse = |_| {
        Complaint::new(
            name,
            &format!(
                "{text:?} is not an address: write an IP address and a port such as 127.0.0.1:7440, or none"
            ),
        )
    };
    text.parse().map(Some).map_err(refuse)
}

/// The cores that this process may use.
/// Executors that are begun without being asked for.
const EXECUTORS_MAX: usize = 16;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Executors for this number of directories: two for each, up to sixteen, of an eighth of the cores: the rest are the engine's, which the server
/// runs beside. Two at least, where there are two cores.
pub(super) fn executors_of(cores: usize, directories: usize) -> usize {
    let most = (cores / 8).max(cores.min(2));
    directories.saturating_mul(2).clamp(1, EXECUTORS_MAX).min(most)
}

/// The first directory whose disk is there.
fn first_there(directories: &[PathBuf]) -> Result<&PathBuf, Complaint> {
    let there = directories.iter().find(|directory| directory.exists()).or(directories.first());
    there.ok_or_else(|| {
        Complaint::new(
            "store.directories",
            "the list of directories is empty: name at least one directory (--dir)",
        )
    })
}

/// Checks everything and fills in what was left open.
pub(super) fn complete(set: &Settings, gate: Gate, mut origins: Vec<Setting>) -> Result<Config, Complaint> {
    // Of what several layers say, the last counts.
    let mut seen = std::collections::BTreeSet::new();
    origins.reverse();
    origins.retain(|setting| seen.insert(setting.name));
    let mut decided = Decided(origins);
    let directories = directories(set, &mut decided);
    let first = first_there(&directories)?;
    let socket = decided.or("listen.socket", set.socket.as_ref(), socket::of(first).display());
    let default = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let grpc = decided.or("listen.grpc", set.grpc.as_ref(), default(GRPC_PORT));
    let metrics = decided.or("listen.metrics", set.metrics.as_ref(), default(METRICS_PORT));
    let segment = set.segment.as_ref().map(|text| sized("store.segment", text)).transpose()?;
    if segment.is_none() {
        decided.or("store.segment", None, "the segment size of the store, or 256 MiB for a new store");
    }
    let (few, own) = (cores().min(2), executors_of(cores(), directories.len()));
    let executors = decided.or("store.executors", set.executors.as_ref(), own);
    let threads = decided.or("limits.threads", set.threads.as_ref(), few);
    let connections = decided.or("limits.connections", set.connections.as_ref(), 16_384);
    let memory = decided.or("limits.memory", set.memory.as_ref(), "256 MiB");
    let cache = decided.or("limits.cache", set.cache.as_ref(), &memory);
    let policy = decided.or("store.policy", set.policy.as_ref(), EvictionPolicy::default().name());
    let shared = decided.or("limits.shared", set.shared.as_ref(), memory::default_share());
    let io = decided.or("store.io", set.io.as_ref(), "auto");
    let runtime = decided.or("store.runtime", set.runtime.as_ref(), "auto");
    let cufile = decided.or("device.cufile", set.cufile.as_ref(), "auto");
    let scrub_hours = decided.or("scrub.hours", set.scrub_hours.as_ref(), 24);
    let scrub_hours: u32 = number("scrub.hours", &scrub_hours)?;
    let scrub_pace = decided.or("scrub.pace", set.scrub_pace.as_ref(), "32 MiB");
    let lame_duck = decided.or("listen.lame_duck", set.lame_duck.as_ref(), 0);
    let format = decided.or("log.format", set.log_format.as_ref(), "text");
    let (budget, budget_part) = budget(set.budget.as_deref())?;
    let config = Config {
        budget,
        budget_part,
        segment_bytes: segment,
        shards: set.shards.as_ref().map(|text| number("store.shards", text)).transpose()?,
        index: set.index.as_ref().map(|text| sized("limits.index", text)).transpose()?,
        policy: EvictionPolicy::named(&policy).ok_or_else(|| {
            Complaint::new("store.policy", &format!("the value must be weighted or lru, not {policy}"))
        })?,
        endurance: set.endurance.as_ref().map(|text| sized("store.endurance", text)).transpose()?,
        executors: number("store.executors", &executors)?,
        io: io.parse::<IoChoice>().map_err(|why| Complaint::new("store.io", &why.to_string()))?,
        io_disable: disabled(set.io_disable.as_deref())?,
        runtime: runtime.parse::<RuntimeChoice>().map_err(|why| Complaint::new("store.runtime", &why))?,
        grpc: address("listen.grpc", &grpc)?,
        socket: (socket != "none").then(|| PathBuf::from(&socket)),
        socket_group: set.socket_group.clone(),
        metrics: address("listen.metrics", &metrics)?,
        open_metrics: set.open_metrics.is_some(),
        lame_duck: Duration::from_secs(number("listen.lame_duck", &lame_duck)?),
        tls: tls(set)?,
        memory: sized("limits.memory", &memory)?,
        cache: sized("limits.cache", &cache)?.min(sized("limits.memory", &memory)?),
        shared: sized("limits.shared", &shared)?,
        connections: number("limits.connections", &connections)?,
        threads: number("limits.threads", &threads)?,
        gate,
        cluster: cluster(set, &mut decided)?,
        cold: cold::cold(set, sized("limits.memory", &memory)?, &mut decided)?,
        cufile: cufile.parse::<Wish>().map_err(|why| Complaint::new("device.cufile", &why))?,
        scrub_every: (scrub_hours > 0).then(|| Duration::from_secs(u64::from(scrub_hours) * 3600)),
        scrub_pace: sized("scrub.pace", &scrub_pace)?.max(1 << 20),
        log_format: log_format(&format)?,
        log_level: levels(decided.or("log.level", set.log_level.as_ref(), "info"))?,
        directories,
        origins: Settings::with_defaults(decided.0),
    };
    bounds(&config)?;
    network(&config, set.open_network.as_deref())?;
    metrics_network(&config, set.open_metrics.as_deref())?;
    Ok(config)
}

fn log_format(name: &str) -> Result<LogFormat, Complaint> {
    match name {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(Complaint::new("log.format", &format!("the value must be text or json, not {name}"))),
    }
}

fn directories(set: &Settings, decided: &mut Decided) -> Vec<PathBuf> {
    let names = decided.or("store.directories", set.directories.as_ref(), "./kvarts-data");
    names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(PathBuf::from).collect()
}

fn disabled(text: Option<&str>) -> Result<Features, Complaint> {
    let Some(text) = text else { return Ok(Features::default()) };
    text.parse::<Features>().map_err(|why| Complaint::new("store.io_disable", &why.to_string()))
}

/// Words for how much is logged.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Which log lines there are: a level, or levels for parts of the program. A word that is no level would be taken for the
/// name of a part, and silence everything else.
fn levels(text: String) -> Result<String, Complaint> {
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    for part in &parts {
        let level = part.rsplit_once('=').map_or(*part, |(_, level)| level);
        if !is_level(level) {
            let what =
                format!("the log level {part:?} does not exist: write {}, or PART=LEVEL", LEVELS.join(", "));
            return Err(Complaint::new("log.level", &what));
        }
    }
    Ok(parts.join(","))
}

fn tls(set: &Settings) -> Result<Option<TlsFiles>, Complaint> {
    match (&set.certificate, &set.key) {
        (Some(certificate), Some(key)) => Ok(Some(TlsFiles {
            certificate: certificate.into(),
            key: key.into(),
            client_authority: set.client_authority.as_ref().map(PathBuf::from),
        })),
        (None, None) if set.client_authority.is_none() => Ok(None),
        _ => Err(Complaint::new("tls", "set both the certificate and the key")),
    }
}

fn cluster(set: &Settings, decided: &mut Decided) -> Result<Option<ClusterConfig>, Complaint> {
    let Some(members) = &set.members else {
        let others = [
            &set.cluster_name,
            &set.cluster_secret,
            &set.cluster_certificate,
            &set.cluster_key,
            &set.cluster_authority,
            &set.cluster_address,
            &set.cluster_listen,
            &set.cluster_lane_port,
            &set.cluster_entries,
            &set.cluster_serve_rate,
            &set.cluster_put,
            &set.cluster_hot_reads,
            &set.cluster_copy_hold,
        ];
        return match others.iter().any(|other| other.is_some()) {
            true => Err(Complaint::new(
                "cluster.members",
                "the setting is missing, and other settings of [cluster] require it: name the file of \
                members",
            )),
            false => Ok(None),
        };
    };
    let members = members_from(members, set, decided)?;
    let name = decided.or("cluster.name", set.cluster_name.as_ref(), "kvarts");
    let entries = decided.or("cluster.entries", set.cluster_entries.as_ref(), 16_000_000);
    let listen = set.cluster_listen.as_deref().map(|text| address("cluster.listen", text)).transpose()?;
    let hold =
        number("cluster.copy_hold", &decided.or("cluster.copy_hold", set.cluster_copy_hold.as_ref(), 600))?;
    if !(1..=MOST_HOLD).contains(&hold) {
        return Err(Complaint::new(
            "cluster.copy_hold",
            &format!("the value must be 1 to 86400 seconds, not {hold}"),
        ));
    }
    let hold = Duration::from_secs(hold);
    let put = match &*decided.or("cluster.put", set.cluster_put.as_ref(), "store") {
        "store" => PutPolicy::Store,
        "keep" => PutPolicy::Keep(hold),
        "single" => PutPolicy::Single(hold),
        other => {
            let what = format!("the value must be store, keep or single, not {other}");
            return Err(Complaint::new("cluster.put", &what));
        }
    };
    let reads_per_second =
        number("cluster.hot_reads", &decided.or("cluster.hot_reads", set.cluster_hot_reads.as_ref(), 8))?;
    let hot = (reads_per_second > 0).then_some(Rule { reads_per_second, hold });
    Ok(Some(ClusterConfig {
        members,
        name,
        secret: set.cluster_secret.as_ref().map(PathBuf::from),
        tls: node_tls(set)?,
        listen: listen.flatten(),
        lane_port: set.cluster_lane_port.as_ref().map_or(Ok(0), |port| number("cluster.lane_port", port))?,
        entries: number("cluster.entries", &entries)?,
        serve_rate: set
            .cluster_serve_rate
            .as_ref()
            .map(|text| sized("cluster.serve_rate", text))
            .transpose()?,
        put,
        hot,
    }))
}

/// Seconds that a copy may live which is made by rule.
const MOST_HOLD: u64 = 24 * 60 * 60;

fn members_from(members: &str, set: &Settings, decided: &mut Decided) -> Result<MembersFrom, Complaint> {
    let access = etcd_files(set)?;
    if !members.starts_with("etcd:") {
        return match access == EtcdFiles::default() {
            true => Ok(MembersFrom::File(members.into())),
            false => Err(Complaint::new(
                "cluster.members",
                "settings of etcd are given, but the members are \
                in a file: use etcd://HOST:PORT/PREFIX, or remove the settings",
            )),
        };
    }
    let at = "the address of etcd is not valid: write etcd://HOST:PORT[,HOST:PORT]/PREFIX";
    let (endpoints, prefix) = etcd::parse(members).ok_or_else(|| Complaint::new("cluster.members", at))?;
    let address = set.cluster_address.clone().filter(|text| is_place(text));
    let needed = "the setting is missing, and etcd requires it: set the host and port at which other nodes \
        connect to this node";
    let address = address.ok_or_else(|| Complaint::new("cluster.address", needed))?;
    let lease = number("cluster.lease", &decided.or("cluster.lease", set.cluster_lease.as_ref(), 15))?;
    if !(2..=3600).contains(&lease) {
        return Err(Complaint::new(
            "cluster.lease",
            &format!("the value must be 2 to 3600 seconds, not {lease}"),
        ));
    }
    let zone = set.cluster_zone.clone().unwrap_or_default();
    Ok(MembersFrom::Etcd { access, at: EtcdOptions { endpoints, prefix, lease }, address, zone })
}

fn etcd_files(set: &Settings) -> Result<EtcdFiles, Complaint> {
    let file = |text: &Option<String>| text.as_ref().map(PathBuf::from);
    let authority = file(&set.cluster_etcd_authority);
    let own = match (file(&set.cluster_etcd_certificate), file(&set.cluster_etcd_key)) {
        (Some(certificate), Some(key)) if authority.is_some() => Some((certificate, key)),
        (None, None) => None,
        _ => {
            let what = "set this setting together with etcd_key and etcd_authority";
            return Err(Complaint::new("cluster.etcd_certificate", what));
        }
    };
    Ok(EtcdFiles { authority, own, password: file(&set.cluster_etcd_password) })
}

/// Whether a text is a host and a port that can be called.
fn is_place(text: &str) -> bool {
    let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    port.and_then(|(_, port)| port.parse::<u16>().ok()).is_some_and(|port| port > 0)
}

fn node_tls(set: &Settings) -> Result<Option<NodeTlsFiles>, Complaint> {
    match (&set.cluster_certificate, &set.cluster_key, &set.cluster_authority) {
        (Some(certificate), Some(key), Some(authority)) => Ok(Some(NodeTlsFiles {
            certificate: certificate.into(),
            key: key.into(),
            authority: authority.into(),
        })),
        (None, None, None) => Ok(None),
        _ => Err(Complaint::new("cluster.certificate", "set all three of certificate, key and authority")),
    }
}

/// No store is smaller: its segments alone are larger.
const BUDGET_MIN: u64 = 1 << 20;

/// The budget in bytes, or as a part of the disks.
fn budget(text: Option<&str>) -> Result<(Option<u64>, Option<u32>), Complaint> {
    let name = "store.budget";
    match text.map(|text| (text, size::percent(text))) {
        None => Ok((None, None)),
        Some((text, None)) => match sized(name, text)? {
            // A unit or a per cent sign was forgotten: no store is that small.
            bytes if bytes < BUDGET_MIN => Err(Complaint::new(name, &too_small(text.trim(), bytes))),
            bytes => Ok((Some(bytes), None)),
        },
        Some((_, Some(part))) => Ok((None, Some(part.map_err(|fault| Complaint::new(name, fault.what()))?))),
    }
}

/// What is wrong with a budget that no store could have, and what was probably meant by it.
fn too_small(text: &str, bytes: u64) -> String {
    let such = "or a part of the disks such as 90%";
    // With a unit, or as nothing, it was meant: another unit would be a guess.
    if bytes == 0 || text.contains(|c: char| !c.is_ascii_digit()) {
        return format!("{text} is smaller than the smallest store: write a size such as 64G, {such}");
    }
    let shown = human::bytes(bytes);
    match size::percent(&format!("{text}%")) {
        Some(Ok(part)) => format!("{text} means {shown}: write {part}% for a part of the disks, or {text}G"),
        _ => format!("{text} means {shown}: write a unit, such as {text}G, {such}"),
    }
}

/// With what a stop takes beside it, it is over before supervisors lose patience.
const LAME_DUCK_MAX: Duration = Duration::from_secs(30);

fn bounds(config: &Config) -> Result<(), Complaint> {
    if !(1..=256).contains(&config.executors) {
        return Err(Complaint::new(
            "store.executors",
            &format!("the value must be 1 to 256, not {}", config.executors),
        ));
    }
    if let Some(shards) = config.shards.filter(|shards| !(1..=64).contains(shards)) {
        let what = format!("the value must be 1 to 64 for each directory, not {shards}");
        return Err(Complaint::new("store.shards", &what));
    }
    if let Some(bytes) = config.index.filter(|bytes| *bytes < 16 << 20) {
        let what = format!("the value must be at least 16 MiB, not {}", human::bytes(bytes));
        return Err(Complaint::new("limits.index", &what));
    }
    if !(1..=256).contains(&config.threads) {
        return Err(Complaint::new(
            "limits.threads",
            &format!("the value must be 1 to 256, not {}", config.threads),
        ));
    }
    if !(16..=1 << 20).contains(&config.connections) {
        return Err(Complaint::new(
            "limits.connections",
            &format!("the value must be 16 to 1048576, not {}", config.connections),
        ));
    }
    if config.lame_duck > LAME_DUCK_MAX {
        return Err(Complaint::new(
            "listen.lame_duck",
            &format!("the value must be 0 to 30 seconds, not {}", config.lame_duck.as_secs()),
        ));
    }
    if !(64 << 20..=1 << 40).contains(&config.memory) {
        return Err(Complaint::new(
            "limits.memory",
            &format!("the value must be 64 MiB to 1 TiB, not {}", human::bytes(config.memory)),
        ));
    }
    if let Some(path) = config.socket.as_deref().filter(|path| !socket::fits(path)) {
        let (max, len) = (socket::PATH_BYTES_MAX, path.as_os_str().len());
        let what = format!(
            "the path of a socket can have at most {max} bytes, but {} has {len}: set a shorter path, or \
            none",
            path.display()
        );
        return Err(Complaint::new("listen.socket", &what));
    }
    if let Some((budget, segment)) = config.budget.zip(config.segment_bytes)
        && budget < segment.saturating_mul(4)
    {
        let least = human::bytes(segment.saturating_mul(4));
        let what = format!(
            "the budget is smaller than four segments, the minimum: use --budget \"{least}\" \
            or more"
        );
        return Err(Complaint::new("store.budget", &what));
    }
    Ok(())
}

/// What listens to a network must have TLS and tokens, unless it was said in plain words that it need not.
fn network(config: &Config, open: Option<&str>) -> Result<(), Complaint> {
    if open.is_some_and(|words| words != OPEN_WORDS) {
        return Err(Complaint::new(
            "listen.open_network",
            &format!("the only allowed value is {OPEN_WORDS:?}: write this value, or remove the setting"),
        ));
    }
    let Some(address) = config.grpc.filter(|address| !address.ip().is_loopback()) else { return Ok(()) };
    let missing = match (config.tls.is_some(), config.gate.is_open()) {
        (true, false) => return Ok(()),
        (false, true) => "TLS and tokens",
        (false, false) => "TLS",
        (true, true) => "tokens",
    };
    if open.is_some() {
        return Ok(());
    }
    Err(Complaint::new(
        "listen.grpc",
        &format!(
            "{address} can be reached from the network, but the server has no {missing}: configure {missing}, \
            listen on 127.0.0.1, or set listen.open_network to {OPEN_WORDS:?}"
        ),
    ))
}

/// Metrics tell tenants' names and traffic, and have neither TLS nor tokens: on a network they need plain words.
fn metrics_network(config: &Config, open: Option<&str>) -> Result<(), Complaint> {
    if open.is_some_and(|words| words != OPEN_METRICS_WORDS) {
        let what = format!(
            "the only allowed value is {OPEN_METRICS_WORDS:?}: write this value, or remove the setting"
        );
        return Err(Complaint::new("listen.open_metrics", &what));
    }
    match config.metrics.filter(|address| !address.ip().is_loopback()) {
        Some(address) if open.is_none() => Err(Complaint::new(
            "listen.metrics",
            &format!(
                "{address} can be reached from the network, but the metrics page requires neither TLS nor tokens: listen \
                on 127.0.0.1, or set listen.open_metrics to {OPEN_METRICS_WORDS:?}"
            ),
        )),
        _ => Ok(()),
    }
}
