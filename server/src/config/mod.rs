//! How a server is configured: one TOML file, the environment and flags over built-in defaults.
//!
//! Each scalar setting has one name everywhere: `listen.grpc` in the file is `KVARTS_LISTEN_GRPC` in the environment
//! and `--listen-grpc` as a flag. A flag wins over the environment, that over the file, that over the default. Tenants
//! and tokens stand in the file alone. With no configuration at all a server works and is reachable from its own host
//! only.

mod bound;
mod check;
mod cold;
mod complaint;
mod decided;
mod form;
mod memory;
pub mod size;
mod socket;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

pub use bound::Part;
pub use complaint::Complaint;
pub use form::{Settings, reference};
use kvarts_cluster::hot::Rule;
use kvarts_gpudirect::cufile::Wish;
use kvarts_peer::etcd::EtcdOptions;
use kvarts_peer::node::PutPolicy;
use kvarts_store::engine::EvictionPolicy;
use kvarts_store::home::RuntimeChoice;
use kvarts_store::io::{Features, IoChoice};
pub(crate) use memory::charged_group;

use crate::cold::ColdConfig;
use crate::state::auth::{Gate, Token, TokenHash};
use crate::state::tenant::{Tenant, TenantLimits};
use crate::state::{Right, Rights};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The port of gRPC.
pub const GRPC_PORT: u16 = 7440;
/// The port of metrics.
pub const METRICS_PORT: u16 = 7441;
/// What must be written to let a server listen to a network without TLS and tokens.
pub const OPEN_WORDS: &str = "anyone may read and write";
/// What must be written to show metrics to a network.
pub const OPEN_METRICS_WORDS: &str = "anyone may read metrics";

/// What a log line looks like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Certificates and keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// The server's certificate chain, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The authority whose certificates clients must have, PEM.
    pub client_authority: Option<PathBuf>,
}

/// What a node shows to others, and whom it believes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeTlsFiles {
    /// Its certificate chain, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The authority of the cluster, PEM.
    pub authority: PathBuf,
}

/// Who names the members of a cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MembersFrom {
    /// A file, the same on every node.
    File(PathBuf),
    /// They register themselves.
    Etcd {
        /// Where.
        at: EtcdOptions,
        /// How it lets this node in.
        access: EtcdFiles,
        /// Where other nodes reach this one.
        address: String,
        /// Nodes of one zone are near to each other.
        zone: String,
    },
}

/// The files by which etcd lets a node in.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EtcdFiles {
    /// The authority of etcd's certificate, PEM; none: it is asked without TLS.
    pub authority: Option<PathBuf>,
    /// The certificate that etcd is shown, and its key, PEM.
    pub own: Option<(PathBuf, PathBuf)>,
    /// A name and a password.
    pub password: Option<PathBuf>,
}

/// Where a node finds its cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClusterConfig {
    /// Who names the members.
    pub members: MembersFrom,
    /// The name of the cluster.
    pub name: String,
    /// The file with what all nodes know; none: only members on this host.
    pub secret: Option<PathBuf>,
    /// This node's certificate, its key and the authority of the cluster; none: nothing between nodes is encrypted.
    pub tls: Option<NodeTlsFiles>,
    /// Where other nodes are served; none: at this node's address among the members.
    pub listen: Option<SocketAddr>,
    /// The port of that address at which they read blocks; 0: any.
    pub lane_port: u16,
    /// Copies that this node's part of the directory may know.
    pub entries: u64,
    /// Bytes a second that other nodes get from this one; none: no limit.
    pub serve_rate: Option<u64>,
    /// What puts do with blocks that another node has.
    pub put: PutPolicy,
    /// When blocks that are read from other nodes are copied here; none: never by themselves.
    pub hot: Option<Rule>,
}

/// A complete, checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directories of the store, one for each device.
    pub directories: Vec<PathBuf>,
    /// Bytes that the store may have on disk; none: what fits, decided at the start.
    pub budget: Option<u64>,
    /// The same as hundredths of the disks.
    pub budget_part: Option<u32>,
    /// Bytes of a segment file, used when the store is made; none: the usual size.
    pub segment_bytes: Option<u64>,
    /// When the store is made: shards of each directory; none: by the budget, decided at the start.
    pub shards: Option<u32>,
    /// Memory that the index may take; none: a part of the machine's, decided at the start.
    pub index: Option<u64>,
    /// What is evicted first when the budget is full.
    pub policy: EvictionPolicy,
    /// Bytes that may be written in a day before puts are filtered; none: no limit.
    pub endurance: Option<u64>,
    /// Executors of the engine.
    pub executors: usize,
    /// The way to the disks.
    pub io: IoChoice,
    /// Features of the ring that are not to be used.
    pub io_disable: Features,
    /// What executors run on.
    pub runtime: RuntimeChoice,
    /// Where gRPC listens; none: nowhere.
    pub grpc: Option<SocketAddr>,
    /// The local socket; none: there is none.
    pub socket: Option<PathBuf>,
    /// The group whose members may connect to it, by name or number; none: only the server's user.
    pub socket_group: Option<String>,
    /// Where metrics are served; none: nowhere.
    pub metrics: Option<SocketAddr>,
    /// Whether they are shown by whatever name is asked, as words said; else a listener of this host is asked by its address.
    pub open_metrics: bool,
    /// How long calls are taken after health says that the server stops.
    pub lame_duck: Duration,
    /// For the network.
    pub tls: Option<TlsFiles>,
    /// Memory that requests share.
    pub memory: u64,
    /// What of that may keep tiles that were read.
    pub cache: u64,
    /// Memory of local clients that may be mapped.
    pub shared: u64,
    /// Connections at a time.
    pub connections: usize,
    /// Threads that serve connections.
    pub threads: usize,
    /// Who may do what.
    pub gate: Gate,
    /// The cluster that this node belongs to; none: it stands alone.
    pub cluster: Option<ClusterConfig>,
    /// The bucket behind the disks; none: there is no cold tier.
    pub cold: Option<ColdConfig>,
    /// How files should reach the memory of devices.
    pub cufile: Wish,
    /// How long after each other the scrubber runs; none: never.
    pub scrub_every: Option<Duration>,
    /// Bytes a second that it reads at most.
    pub scrub_pace: u64,
    /// What log lines look like.
    pub log_format: LogFormat,
    /// Which log lines there are.
    pub log_level: String,
    /// Each setting, what it is, and where that comes from: for `kvarts config show`.
    pub origins: Vec<Setting>,
}

/// One setting as it was decided.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Setting {
    /// Its name in the file.
    pub name: &'static str,
    /// What it is.
    pub value: String,
    /// `default`, `file`, `environment` or `flag`.
    pub from: &'static str,
}

impl Config {
    /// Puts the layers together, the later winning, and checks the result.
    pub fn resolve(
        file: Option<(&Path, &str)>,
        environment: impl Fn(&str) -> Option<String>,
        flags: &Settings,
    ) -> Result<Self, Complaint> {
        let form = file.map(|(path, text)| form::read(path, text)).transpose()?;
        let form::Form { mut settings, tenants, tokens } = form.unwrap_or_default();
        let mut origins = settings.origins("file");
        let around = Settings::from_environment(&environment)?;
        origins.extend(around.origins("environment"));
        origins.extend(flags.origins("flag"));
        settings.overlay(&around);
        settings.overlay(flags);
        let gate = gate(&tenants, &tokens)?;
        let from: BTreeMap<&str, &str> = origins.iter().map(|setting| (setting.name, setting.from)).collect();
        check::complete(&settings, gate, origins.clone()).map_err(|complaint| {
            let is_of_file = from.get(complaint.place()) == Some(&"file");
            let place = file.filter(|_| is_of_file);
            match place.and_then(|(path, text)| form::place_of(path, text, complaint.place())) {
                Some(place) => Complaint::new(&place, complaint.what()),
                None => complaint,
            }
        })
    }

    /// The configuration without any file, environment or flag.
    pub fn standard() -> Result<Self, Complaint> {
        Self::resolve(None, |_| None, &Settings::default())
    }
}

/// Who is admitted: without tokens, everyone.
fn gate(tenants: &[form::TenantForm], tokens: &[form::TokenForm]) -> Result<Gate, Complaint> {
    let mut known: Vec<Arc<Tenant>> = Vec::new();
    for (number, form) in (1u32..).zip(tenants) {
        if form.name.is_empty() || known.iter().any(|tenant| tenant.name == form.name) {
            return Err(Complaint::new(
                "tenants",
                "a tenant has no name, or the name of another tenant: give each tenant its own name",
            ));
        }
        let standard = TenantLimits::default();
        let limits = TenantLimits {
            pin_bytes: form.pin.as_deref().map(size::parse).transpose()?,
            calls: form.calls.unwrap_or(standard.calls).max(1),
            bandwidth: form.bandwidth.as_deref().map(size::parse).transpose()?,
            disk: form.disk.as_deref().map(size::parse).transpose()?,
        };
        if form.unsalted && form.salt.is_some() {
            return Err(Complaint::new(
                "tenants.unsalted",
                "a tenant has both a salt and `unsalted`: remove one of the two settings",
            ));
        }
        let salt = form.unsalted.then(String::new).or_else(|| form.salt.clone()).map(String::into_bytes);
        if salt.as_ref().is_some_and(|salt| salt.len() > kvarts_layout::identity::MAX_SALT_BYTES) {
            return Err(Complaint::new("tenants.salt", "the salt is longer than 64 bytes"));
        }
        if known.iter().any(|tenant| salt.as_ref().is_some_and(|salt| *salt == tenant.salt.0)) {
            let what = "two tenants would share data, because they have the same salt or are both \
                unsalted: give each tenant its own salt";
            return Err(Complaint::new("tenants.salt", what));
        }
        known.push(Tenant::new(&form.name, number, salt, limits));
    }
    if tokens.is_empty() {
        if known.is_empty() {
            return Ok(Gate::Open(Tenant::only()));
        }
        return Err(Complaint::new(
            "tokens",
            "tenants are configured without tokens, so no client could \
            connect: add a token for each tenant",
        ));
    }
    let token = |form: &form::TokenForm| {
        let tenant = known.iter().find(|tenant| tenant.name == form.tenant);
        let unknown = || {
            let name = &form.tenant;
            let what = format!(
                "the tenant {name:?} of a token is not in [[tenants]]: add the tenant, or correct the name"
            );
            Complaint::new("tokens.tenant", &what)
        };
        let tenant = tenant.ok_or_else(unknown)?;
        let rights = Rights::named(form.rights.iter().map(String::as_str));
        let names = Right::EACH.map(|right| right.to_string()).join(", ");
        Ok(Token {
            hash: form.hash.parse::<TokenHash>().map_err(|why| Complaint::new("tokens.hash", why))?,
            tenant: Arc::clone(tenant),
            rights: rights.ok_or_else(|| {
                Complaint::new("tokens.rights", &format!("each right must be one of {names}"))
            })?,
            expires: form.expires,
        })
    };
    Ok(Gate::Tokens(tokens.iter().map(token).collect::<Result<_, Complaint>>()?))
}

#[cfg(test)]
mod tests;
