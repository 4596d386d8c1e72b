//! The forms that settings are written in: the file's tables, the environment's variables, the program's flags. One
//! list of names serves all three.

use std::path::Path;

use clap::Args;
use kvarts_layout::spec::shipped::distance;
use serde::Deserialize;

use super::{Complaint, Setting};

/// A tenant in the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantForm {
    pub(super) name: String,
    /// What keeps its data apart. By default it follows from the name. After a change the tenant no longer finds the data stored before.
    #[serde(default)]
    pub(super) salt: Option<String>,
    /// Its data has no salt: it is what a server without tokens stores, and what was stored before there were tokens.
    #[serde(default)]
    pub(super) unsalted: bool,
    #[serde(default)]
    pub(super) pin: Option<String>,
    #[serde(default)]
    pub(super) calls: Option<usize>,
    #[serde(default)]
    pub(super) bandwidth: Option<String>,
    #[serde(default)]
    pub(super) disk: Option<String>,
}

/// A token in the file, by its hash.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TokenForm {
    pub(super) tenant: String,
    pub(super) rights: Vec<String>,
    pub(super) hash: String,
    /// Seconds since 1970.
    #[serde(default)]
    pub(super) expires: Option<u64>,
}

/// How a table of the reference begins.
fn heading(table: &str) -> String {
    let columns = "| In the file | Environment | Flag | Value | Default | Meaning |";
    format!("\n## [{table}]\n\n{columns}\n|---|---|---|---|---|---|\n")
}

/// Whether Kubernetes made this variable, of a Service of the pod's namespace whose name begins as those of a table do
/// (`kvarts-store`). Of each Service there is a `..._SERVICE_HOST`; without it a name is one that was misspelt.
fn is_of_a_service(name: &str, names: &[String]) -> bool {
    let continues = |rest: &str, with: &str| {
        rest.strip_prefix(with).is_some_and(|more| more.is_empty() || more.starts_with('_'))
    };
    names.iter().filter_map(|one| one.strip_suffix("_SERVICE_HOST")).any(|service| {
        name.strip_prefix(service).is_some_and(|rest| {
            rest == "_SERVICE_HOST" || continues(rest, "_SERVICE_PORT") || continues(rest, "_PORT")
        })
    })
}

macro_rules! settings {
    ($(
        #[doc = $help:literal]
        $field:ident, $table:literal, $key:literal, $variable:literal, $flag:literal, $value:literal, $default:literal;
    )*) => {
        /// Every setting that can stand in the file, the environment and the flags. What is absent is left to the
        /// layer below.
        #[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
        pub struct Settings {
            $(
                #[doc = $help]
                #[arg(long = $flag, value_name = $value, help = concat!(
                    $help, " [default: ", $default, "; file: ", $table, ".", $key, "; environment: ", $variable, "]"
                ))]
                pub $field: Option<String>,
            )*
        }

        /// The tables of `docs/reference/configuration.md`: every setting by its table in the file.
        pub fn reference() -> String {
            let mut text = String::new();
            let mut table = "";
            $(
                if table != $table {
                    table = $table;
                    text.push_str(&heading(table));
                }
                text.push_str(concat!("| `", $key, "` | `", $variable, "` | `--", $flag, "` | "));
                text.push_str(&$value.replace('|', "\\|"));
                text.push_str(concat!(" | ", $default, " |", $help, " |\n"));
            )*
            text
        }

        impl Settings {
            /// Refuses a variable whose name begins as those of a table do and is none of them: a setting that was
            /// misspelt would otherwise be one that has no effect.
            pub fn refuse_unknown(names: impl IntoIterator<Item = String>) -> Result<(), Complaint> {
                const KNOWN: &[(&str, &str)] = &[$(($table, $variable)),*];
                let names: Vec<String> = names.into_iter().collect();
                for name in names.iter().filter(|name| !is_of_a_service(name, &names)) {
                    let Some(table) = name.strip_prefix("KVARTS_").and_then(|rest| rest.split('_').next()) else { continue };
                    let of_table = |(known, _): &&(&str, &str)| known.eq_ignore_ascii_case(table);
                    let here: Vec<&str> = KNOWN.iter().filter(of_table).map(|(_, variable)| *variable).collect();
                    if !here.is_empty() && !here.contains(&name.as_str()) {
                        let what = format!("unknown setting; the settings are {}", here.join(", "));
                        return Err(Complaint::new(name, &what));
                    }
                }
                Ok(())
            }

            /// What the environment says.
            pub(super) fn from_environment(
                variable: impl Fn(&str) -> Option<String>,
            ) -> Result<Self, Complaint> {
                Ok(Self { $($field: variable($variable),)* })
            }

            /// What another layer says wins.
            pub(super) fn overlay(&mut self, over: &Self) {
                $(if over.$field.is_some() { self.$field.clone_from(&over.$field); })*
            }

            /// What is set here, as coming `from` somewhere.
            pub(super) fn origins(&self, from: &'static str) -> Vec<Setting> {
                let mut all = Vec::new();
                $(if let Some(value) = &self.$field {
                    let name = concat!($table, ".", $key);
                    all.push(Setting { name, value: value.clone(), from });
                })*
                all
            }

            /// These and all others, which are at their defaults.
            pub(super) fn with_defaults(mut some: Vec<Setting>) -> Vec<Setting> {
                const DEFAULTS: &[(&str, &str)] = &[$((concat!($table, ".", $key), $default)),*];
                for &(name, value) in DEFAULTS {
                    if some.iter().all(|one| one.name != name) {
                        some.push(Setting { name, value: value.to_owned(), from: "default" });
                    }
                }
                some
            }

            /// Every setting, by its table and its name there.
            const NAMES: &[(&str, &str)] = &[$(($table, $key)),*];

            fn set(&mut self, table: &str, key: &str, value: String) -> bool {
                match (table, key) {
                    $(($table, $key) => self.$field = Some(value),)*
                    _ => return false,
                }
                true
            }
        }
    };
}

settings! {
    /// Directories of the store, separated by commas: one directory for each disk
    directories, "store", "directories", "KVARTS_STORE_DIRECTORIES", "dir", "DIRS", "./kvarts-data";
    /// Maximum size of the store on disk: a size such as 64G, or a percentage of the disks such as 90%
    budget, "store", "budget", "KVARTS_STORE_BUDGET", "budget", "SIZE|PERCENT", "80% of the free space";
    /// Size of each segment file of a new store; an existing store keeps its segment size
    segment, "store", "segment", "KVARTS_STORE_SEGMENT", "segment", "SIZE", "256 MiB";
    /// Number of shards in each directory of a new store; one executor serves each shard
    shards, "store", "shards", "KVARTS_STORE_SHARDS", "shards", "NUMBER", "2 to 16, depending on the budget";
    /// Eviction policy of a full store: weighted or lru
    policy, "store", "policy", "KVARTS_STORE_POLICY", "policy", "NAME", "weighted";
    /// Limit of the bytes written in a day; beyond the limit, the store accepts only blocks for which it has received an earlier put
    endurance, "store", "endurance", "KVARTS_STORE_ENDURANCE", "endurance", "SIZE", "no limit";
    /// Number of executors of the engine
    executors, "store", "executors", "KVARTS_STORE_EXECUTORS", "executors", "NUMBER", "2 for each directory, but at most the larger of 2 and an eighth of the cores";
    /// Interface to the disks: auto, ring (io_uring) or pool (threads)
    io, "store", "io", "KVARTS_STORE_IO", "io", "NAME", "auto";
    /// Features of io_uring that the server does not use, separated by commas
    io_disable, "store", "io_disable", "KVARTS_STORE_IO_DISABLE", "io-disable", "NAMES", "none";
    /// Runtime of the executors: auto, glommio or threads
    runtime, "store", "runtime", "KVARTS_STORE_RUNTIME", "runtime", "NAME", "auto";
    /// Address of gRPC, or none
    grpc, "listen", "grpc", "KVARTS_LISTEN_GRPC", "listen-grpc", "ADDRESS|none", "127.0.0.1:7440";
    /// The local socket, or none
    socket, "listen", "socket", "KVARTS_LISTEN_SOCKET", "listen-socket", "PATH|none", "kvarts.sock in the first directory";
    /// Group whose members may connect to the local socket, by name or number
    socket_group, "listen", "socket_group", "KVARTS_LISTEN_SOCKET_GROUP", "socket-group", "GROUP", "only the server's user";
    /// Address of metrics, or none
    metrics, "listen", "metrics", "KVARTS_LISTEN_METRICS", "listen-metrics", "ADDRESS|none", "127.0.0.1:7441";
    /// Required to listen on a network without TLS and tokens: the words "anyone may read and write"
    open_network, "listen", "open_network", "KVARTS_LISTEN_OPEN_NETWORK", "open-network", "WORDS", "none";
    /// Required to serve metrics on a network, or under other names than localhost: the words "anyone may read metrics"
    open_metrics, "listen", "open_metrics", "KVARTS_LISTEN_OPEN_METRICS", "open-metrics", "WORDS", "none";
    /// Seconds for which a stopping server still accepts calls while its health check returns NOT_SERVING; 0 to 30
    lame_duck, "listen", "lame_duck", "KVARTS_LISTEN_LAME_DUCK", "lame-duck", "SECONDS", "0";
    /// The server's certificate chain, a PEM file
    certificate, "tls", "certificate", "KVARTS_TLS_CERTIFICATE", "tls-certificate", "FILE", "none";
    /// The server's key, a PEM file
    key, "tls", "key", "KVARTS_TLS_KEY", "tls-key", "FILE", "none";
    /// The certificate of the authority (CA) that must have signed the clients' certificates, a PEM file
    client_authority, "tls", "client_authority", "KVARTS_TLS_CLIENT_AUTHORITY", "tls-client-authority", "FILE", "none";
    /// Memory for requests, in bytes
    memory, "limits", "memory", "KVARTS_LIMITS_MEMORY", "memory", "SIZE", "256 MiB";
    /// Limit of the tile cache, which uses memory for requests while no request needs this memory; 0 for no cache
    cache, "limits", "cache", "KVARTS_LIMITS_CACHE", "cache", "SIZE", "all of limits.memory";
    /// Limit of the memory that local clients share with the server
    shared, "limits", "shared", "KVARTS_LIMITS_SHARED", "shared", "SIZE", "a quarter of the memory, at most 64 GiB";
    /// Limit of the memory of the index; the server evicts blocks when the index is near the limit
    index, "limits", "index", "KVARTS_LIMITS_INDEX", "index-memory", "SIZE", "a quarter of the memory";
    /// Limit of concurrent connections
    connections, "limits", "connections", "KVARTS_LIMITS_CONNECTIONS", "connections", "NUMBER", "16384";
    /// Number of threads for connections
    threads, "limits", "threads", "KVARTS_LIMITS_THREADS", "threads", "NUMBER", "2, or 1 on one core";
    /// The members of this node's cluster: a TOML file, or etcd://HOST:PORT/PREFIX
    members, "cluster", "members", "KVARTS_CLUSTER_MEMBERS", "cluster", "FILE|URL", "no cluster";
    /// The name of the cluster; a node refuses nodes with another name
    cluster_name, "cluster", "name", "KVARTS_CLUSTER_NAME", "cluster-name", "NAME", "kvarts";
    /// The shared secret of the cluster's nodes: a file of 32 bytes or more
    cluster_secret, "cluster", "secret", "KVARTS_CLUSTER_SECRET", "cluster-secret", "FILE", "none";
    /// This node's certificate chain for other nodes, a PEM file; its DNS name is kvarts- followed by the node's id
    cluster_certificate, "cluster", "certificate", "KVARTS_CLUSTER_CERTIFICATE", "cluster-certificate", "FILE", "none";
    /// The key of this node's certificate, a PEM file
    cluster_key, "cluster", "key", "KVARTS_CLUSTER_KEY", "cluster-key", "FILE", "none";
    /// The certificate of the authority (CA) that signed the nodes' certificates, a PEM file
    cluster_authority, "cluster", "authority", "KVARTS_CLUSTER_AUTHORITY", "cluster-authority", "FILE", "none";
    /// With etcd: the address of this node for other nodes, a host and a port
    cluster_address, "cluster", "address", "KVARTS_CLUSTER_ADDRESS", "cluster-address", "HOST:PORT", "none";
    /// With etcd: the zone of this node; nodes of one zone are near to each other
    cluster_zone, "cluster", "zone", "KVARTS_CLUSTER_ZONE", "cluster-zone", "NAME", "none";
    /// With etcd: seconds after which an unreachable node is removed from the members
    cluster_lease, "cluster", "lease", "KVARTS_CLUSTER_LEASE", "cluster-lease", "SECONDS", "15";
    /// With etcd: the certificate of the authority (CA) that signed etcd's certificate, a PEM file; enables TLS to etcd
    cluster_etcd_authority, "cluster", "etcd_authority", "KVARTS_CLUSTER_ETCD_AUTHORITY", "cluster-etcd-authority", "FILE", "none";
    /// With etcd: this node's certificate chain for etcd, a PEM file
    cluster_etcd_certificate, "cluster", "etcd_certificate", "KVARTS_CLUSTER_ETCD_CERTIFICATE", "cluster-etcd-certificate", "FILE", "none";
    /// With etcd: the key of this node's certificate for etcd, a PEM file
    cluster_etcd_key, "cluster", "etcd_key", "KVARTS_CLUSTER_ETCD_KEY", "cluster-etcd-key", "FILE", "none";
    /// With etcd: a file with this node's name and password for etcd, as NAME:PASSWORD
    cluster_etcd_password, "cluster", "etcd_password", "KVARTS_CLUSTER_ETCD_PASSWORD", "cluster-etcd-password", "FILE", "none";
    /// Address on which this node serves other nodes
    cluster_listen, "cluster", "listen", "KVARTS_CLUSTER_LISTEN", "cluster-listen", "ADDRESS", "this node's address in the list of members";
    /// Port on which other nodes read blocks from this node; set the port if a firewall is between the nodes
    cluster_lane_port, "cluster", "lane_port", "KVARTS_CLUSTER_LANE_PORT", "cluster-lane-port", "NUMBER", "any free port";
    /// Maximum number of copies of blocks that this node's part of the directory lists; each uses 20 bytes of memory
    cluster_entries, "cluster", "entries", "KVARTS_CLUSTER_ENTRIES", "cluster-entries", "NUMBER", "16000000";
    /// Limit of the bytes that this node sends to other nodes in a second
    cluster_serve_rate, "cluster", "serve_rate", "KVARTS_CLUSTER_SERVE_RATE", "cluster-serve-rate", "SIZE", "no limit";
    /// What a put does with a block that another node already stores: store, keep (store for the time in cluster.copy_hold) or single (do not store)
    cluster_put, "cluster", "put", "KVARTS_CLUSTER_PUT", "cluster-put", "NAME", "store";
    /// A block of another node is copied to this node at this number of reads a second or more; 0 for never
    cluster_hot_reads, "cluster", "hot_reads", "KVARTS_CLUSTER_HOT_READS", "cluster-hot-reads", "NUMBER", "8";
    /// Time to live of automatic copies, in seconds: copies of hot blocks (cluster.hot_reads), and blocks that a put keeps (cluster.put)
    cluster_copy_hold, "cluster", "copy_hold", "KVARTS_CLUSTER_COPY_HOLD", "cluster-copy-hold", "SECONDS", "600";
    /// The bucket of the cold tier: s3://BUCKET/PREFIX, with credentials and endpoint from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), or file:///DIRECTORY
    cold_bucket, "cold", "bucket", "KVARTS_COLD_BUCKET", "cold-bucket", "URL", "no cold tier";
    /// Limit of the requests to the bucket in a day (UTC)
    cold_requests, "cold", "requests", "KVARTS_COLD_REQUESTS", "cold-requests", "NUMBER", "1000000";
    /// Limit of the bytes written to the bucket in a day
    cold_written, "cold", "written", "KVARTS_COLD_WRITTEN", "cold-written", "SIZE", "1 TiB";
    /// Limit of the bytes read from the bucket in a day
    cold_read, "cold", "read", "KVARTS_COLD_READ", "cold-read", "SIZE", "4 TiB";
    /// Seconds between two reads of a manifest of the bucket
    cold_refresh, "cold", "refresh", "KVARTS_COLD_REFRESH", "cold-refresh", "SECONDS", "30";
    /// Limit of the memory for restores from the bucket; a block uses this memory during its restore and for some seconds after it
    cold_memory, "cold", "memory", "KVARTS_COLD_MEMORY", "cold-memory", "SIZE", "limits.memory, but at least 128 MiB and at most 256 MiB";
    /// Upload blocks to the bucket before their eviction: on or off
    cold_spill, "cold", "spill", "KVARTS_COLD_SPILL", "cold-spill", "NAME", "on";
    /// Upload only blocks with at least this number of recent uses; 0 to 3
    cold_uses, "cold", "uses", "KVARTS_COLD_USES", "cold-uses", "NUMBER", "1";
    /// Upload only blocks of at least this age, in seconds; blocks that expire within the same time are not uploaded
    cold_age, "cold", "age", "KVARTS_COLD_AGE", "cold-age", "SECONDS", "600";
    /// Upload only blocks with at most this number of bytes per token; larger blocks are faster to compute than to restore
    cold_token_bytes, "cold", "token_bytes", "KVARTS_COLD_TOKEN_BYTES", "cold-token-bytes", "SIZE", "no limit";
    /// Limit of the bytes that are uploaded to the bucket in a second
    cold_rate, "cold", "rate", "KVARTS_COLD_RATE", "cold-rate", "SIZE", "64 MiB";
    /// Whether look-ups of connectors report blocks of the bucket as found: off, on, or the number of tokens that an engine computes in a second (a block is then reported if a restore is faster than computing the block)
    cold_offer, "cold", "offer", "KVARTS_COLD_OFFER", "cold-offer", "NAME", "off";
    /// Path from files to device memory: auto, direct, compatibility or staging
    cufile, "device", "cufile", "KVARTS_DEVICE_CUFILE", "cufile", "NAME", "auto";
    /// Hours between two runs of the scrubber, or 0 for none
    scrub_hours, "scrub", "hours", "KVARTS_SCRUB_HOURS", "scrub-hours", "NUMBER", "24";
    /// Limit of the bytes that the scrubber reads in a second
    scrub_pace, "scrub", "pace", "KVARTS_SCRUB_PACE", "scrub-pace", "SIZE", "32 MiB";
    /// Format of the log: text or json
    log_format, "log", "format", "KVARTS_LOG_FORMAT", "log-format", "NAME", "text";
    /// Level of the log, such as info or kvarts_server=debug
    log_level, "log", "level", "KVARTS_LOG_LEVEL", "log-level", "LEVEL", "info";
}

/// What a file says.
#[derive(Default)]
pub(super) struct Form {
    pub(super) settings: Settings,
    pub(super) tenants: Vec<TenantForm>,
    pub(super) tokens: Vec<TokenForm>,
}

/// Reads the file: every name in it must be known. What is wrong is told with its line, and with the name that is probably meant.
pub(super) fn read(path: &Path, text: &str) -> Result<Form, Complaint> {
    let fault = |line: Option<usize>, what: &str| {
        let line = line.map_or_else(String::new, |line| format!(":{line}"));
        let words: Vec<&str> = what.split_whitespace().collect();
        Complaint::new(&format!("{}{line}", path.display()), &words.join(" "))
    };
    let tables: toml::Table = toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start));
        fault(before.map(|before| 1 + before.matches('\n').count()), error.message())
    })?;
    let of_list = |table: &'static str| {
        move |error: toml::de::Error| {
            let field = error.message().split('`').nth(1).unwrap_or_default();
            fault(line_of(text, table, field), &format!("{table}: {}", error.message()))
        }
    };
    let (mut settings, mut tenants, mut tokens) = (Settings::default(), Vec::new(), Vec::new());
    for (name, value) in tables {
        match (name.as_str(), value) {
            ("tenants", list) => tenants = list.try_into().map_err(of_list("tenants"))?,
            ("tokens", list) => tokens = list.try_into().map_err(of_list("tokens"))?,
            (table, toml::Value::Table(entries)) => {
                for (key, value) in entries {
                    let line = || line_of(text, table, &key);
                    let value = scalar(&value)
                        .ok_or_else(|| fault(line(), &format!("{table}.{key} is not a text or a number")))?;
                    if !settings.set(table, &key, value) {
                        let what = format!("the setting {table}.{key} does not exist{}", meant(table, &key));
                        return Err(fault(line(), &what));
                    }
                }
            }
            (other, _) => {
                return Err(fault(line_of(text, "", other), &format!("the table {other} does not exist")));
            }
        }
    }
    Ok(Form { settings, tenants, tokens })
}

/// The place of a setting in a file, if it stands there: the file, the line and the name.
pub(super) fn place_of(path: &Path, text: &str, setting: &str) -> Option<String> {
    let (table, key) = setting.split_once('.')?;
    Some(format!("{}:{}: {setting}", path.display(), line_of(text, table, key)?))
}

/// The line of a name in a table of a file, if it stands at the beginning of one.
fn line_of(text: &str, table: &str, name: &str) -> Option<usize> {
    let mut of = "";
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            of = header.trim_start_matches('[').split(']').next().unwrap_or_default().trim();
        } else if of == table
            && let Some((found, _)) = line.split_once('=')
            && found.trim().trim_matches(['"', '\'']) == name
        {
            return Some(number);
        }
    }
    None
}

/// The setting that is most like a name that is none, as the end of a sentence.
fn meant(table: &str, key: &str) -> String {
    let plain = |table: &str, key: &str| format!("{table}.{key}").chars().take(64).collect::<Vec<char>>();
    let wanted = plain(table, key);
    let scored =
        Settings::NAMES.iter().map(|(table, key)| (distance(&wanted, &plain(table, key)), table, key));
    match scored.min_by_key(|(edits, ..)| *edits) {
        Some((..=3, table, key)) => format!(": did you mean {table}.{key}?"),
        _ => String::new(),
    }
}

fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Array(list) => Some(list.iter().map(scalar).collect::<Option<Vec<_>>>()?.join(",")),
        _ => None,
    }
}
