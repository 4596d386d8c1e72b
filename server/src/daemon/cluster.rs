//! This node among others: its members' file, its secret or its certificate, and where it serves the other nodes.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvarts_cluster::members::{FILE_BYTES_MAX, Member, Members, NodeId};
use kvarts_peer::credentials::{Credentials, Pem};
use kvarts_peer::etcd::{EtcdAccess, Registered};
use kvarts_peer::lane::ServeLimits;
use kvarts_peer::node::{ClusterNode, NodeOptions, OFFER_EVERY, Patience, Secret};
use kvarts_store::engine::Store;

use super::deletes_file::DeletesFile;
use super::ports::Port;
use super::starts;
use crate::config::{ClusterConfig, EtcdFiles, MembersFrom, NodeTlsFiles};
use crate::state::auth::Gate;

/// The least that a secret has.
const SECRET_BYTES_MIN: usize = 32;
/// The most that is read of its file.
const SECRET_BYTES_MAX: u64 = 4096;
/// Chains whose owner one node decides.
const CHAINS_MAX: usize = 1 << 20;

/// The members that a file names. Says in one line what is wrong with it.
pub(super) fn members(path: &Path) -> Result<Members, String> {
    let told = |what: &dyn std::fmt::Display| {
        let words: Vec<String> = what.to_string().split_whitespace().map(str::to_owned).collect();
        format!("cluster.members: {}: {}", path.display(), words.join(" "))
    };
    let size = std::fs::metadata(path).map_err(|error| told(&error))?.len();
    if size > FILE_BYTES_MAX as u64 {
        return Err(told(&format!("the file is longer than {FILE_BYTES_MAX} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| told(&error))?;
    Members::parse(&text).map_err(|error| told(&error))
}

/// How long a node that registers itself waits to be a member.
const JOIN: Duration = Duration::from_secs(60);

/// The members that are known before anything is asked, and the one that is this node.
fn known(config: &ClusterConfig, me: NodeId) -> Result<(Vec<Member>, Member), String> {
    match &config.members {
        MembersFrom::Etcd { address, zone, .. } => {
            let own = Member { id: me, address: address.clone(), zone: zone.clone() };
            Ok((vec![own.clone()], own))
        }
        MembersFrom::File(path) => {
            let members = members(path)?;
            let own = members.get(me).cloned().ok_or_else(|| {
                format!(
                    "cluster.members: this node is not in {}: add to the file, on all nodes, [[node]] id = \
                    \"{me}\" address = \"HOST:PORT\", and increase the epoch of the file by one",
                    path.display()
                )
            })?;
            Ok((members.list().to_vec(), own))
        }
    }
}

/// How etcd lets this node in.
fn access(files: &EtcdFiles, notes: &mut Vec<String>) -> Result<EtcdAccess, String> {
    let mut access = EtcdAccess::default();
    if let Some(authority) = &files.authority {
        let authority = read_file("etcd_authority", authority)?;
        let own = match &files.own {
            Some((chain, key)) => Some((read_file("etcd_certificate", chain)?, read_file("etcd_key", key)?)),
            None => None,
        };
        let own = own.as_ref().map(|(chain, key)| (&chain[..], &key[..]));
        access = access.over_tls(&authority, own).map_err(told_of)?;
    }
    if let Some(path) = &files.password {
        let line = read_file("etcd_password", path)?;
        let line = std::str::from_utf8(&line).ok();
        let found = line.and_then(|line| access.with_password(line));
        access = found.ok_or_else(|| {
            format!("cluster.etcd_password: the file {} must have one line NAME:PASSWORD", path.display())
        })?;
    }
    if access.says_its_password_aloud() {
        notes.push(
            "the password for etcd is sent unencrypted: set cluster.etcd_authority, or use a private network"
                .to_owned(),
        );
    }
    Ok(access)
}

/// The first members, and what keeps this node registered among them.
async fn first(
    config: &ClusterConfig,
    own: Member,
    notes: &mut Vec<String>,
) -> Result<(Members, Option<Registered>), String> {
    match &config.members {
        MembersFrom::File(path) => Ok((members(path)?, None)),
        MembersFrom::Etcd { at, access: files, .. } => {
            let registered = Registered::start(at.clone(), access(files, notes)?, own);
            let told = |trouble| {
                format!(
                    "cluster.members: the node did not become a member within {} s: {trouble}",
                    JOIN.as_secs()
                )
            };
            let members = registered.first(JOIN).await.map_err(told)?;
            Ok((members, Some(registered)))
        }
    }
}

/// Refuses files that no node can be started with, whatever its name: before there is a store that gives it one.
pub(super) fn check(config: &ClusterConfig, gate: &Gate) -> Result<(), String> {
    if let Some(files) = &config.tls {
        Credentials::check(&read_pem(files)?).map_err(told_of)?;
    }
    let all = match &config.members {
        MembersFrom::File(path) => members(path)?.list().to_vec(),
        MembersFrom::Etcd { access: files, .. } => {
            access(files, &mut Vec::new())?;
            known(config, NodeId::default())?.0
        }
    };
    secret(config, gate, &all).map(drop)
}

/// This node as the members and its certificate know it.
pub(super) struct Named {
    all: Vec<Member>,
    own: Member,
    credentials: Option<Arc<Credentials>>,
}

impl Named {
    /// Refused where a file does not name the node of this store: then an operator needs the name, and the store that has it.
    pub(super) fn of(config: &ClusterConfig, me: NodeId) -> Result<Self, String> {
        let (all, own) = known(config, me)?;
        let read = |files| Credentials::new(me, &read_pem(files)?).map_err(told_of);
        Ok(Self { all, own, credentials: config.tls.as_ref().map(read).transpose()? })
    }
}

/// Begins to serve the other nodes.
pub(super) async fn start(
    (config, gate, port, has_tier): (&ClusterConfig, &Gate, Option<Port>, bool),
    Named { all, own, credentials }: Named,
    directories: &[PathBuf],
    store: &Store,
    notes: &mut Vec<String>,
) -> Result<Arc<ClusterNode>, String> {
    let secret = secret(config, gate, &all)?;
    if credentials.is_none() && !all.iter().all(is_local) {
        notes.push(
            "traffic between nodes is not encrypted: set cluster.certificate, or use a private network"
                .to_owned(),
        );
    }
    let port = match port {
        Some(port) => port,
        None => Port::take(resolve(&own)?, "cluster.listen")?,
    };
    let (listener, _) = port.listen()?;
    let (members, registered) = first(config, own, notes).await?;
    let out = store.health().out;
    let in_use = (0u16..).zip(directories).filter(|(at, _)| !out.contains_key(at));
    let (in_use, out): (Vec<&Path>, _) = (in_use.map(|(_, one)| one.as_path()).collect(), !out.is_empty());
    let start = starts::count(&in_use, out, store.clock().unix_millis() / 1000)?;
    let options = NodeOptions {
        cluster: config.name.clone(),
        members,
        secret,
        credentials,
        entries_max: config.entries,
        chains_max: CHAINS_MAX,
        start,
        deletes: Arc::new(DeletesFile::new(directories, store)),
        lane_port: config.lane_port,
        serve: ServeLimits { bytes_per_second: config.serve_rate, ..ServeLimits::default() },
        put: config.put,
        patience: Patience::default(),
        has_tier,
        hot: config.hot,
        offer_every: OFFER_EVERY,
    };
    let node = ClusterNode::start(store.clone(), listener, options)?;
    if let Some(registered) = registered {
        node.follow(registered);
    }
    Ok(node)
}

/// A certificate, its key and an authority that were refused, with the settings' names.
fn told_of(what: String) -> String {
    format!("cluster.{what}")
}

/// The longest certificate file that is read.
const PEM_BYTES_MAX: u64 = 1 << 20;

fn read_pem(files: &NodeTlsFiles) -> Result<Pem, String> {
    Ok(Pem {
        certificate: read_file("certificate", &files.certificate)?,
        key: read_file("key", &files.key)?,
        authority: read_file("authority", &files.authority)?,
    })
}

/// The bytes of a file that the setting `name` names.
fn read_file(name: &str, path: &Path) -> Result<Vec<u8>, String> {
    let told = |what: &dyn std::fmt::Display| format!("cluster.{name}: {}: {what}", path.display());
    let size = std::fs::metadata(path).map_err(|error| told(&error))?.len();
    if size > PEM_BYTES_MAX {
        return Err(told(&format!("the file is longer than {PEM_BYTES_MAX} bytes")));
    }
    std::fs::read(path).map_err(|error| told(&error))
}

/// Certificates and members as files have them now, which can be taken over.
pub(super) struct Renewed {
    pem: Option<Pem>,
    members: Option<Members>,
}

impl Renewed {
    /// Reads them and looks whether they can be taken over. Nothing changes.
    pub(super) fn check(config: &ClusterConfig, node: &ClusterNode) -> Result<Self, String> {
        let pem = config.tls.as_ref().map(read_pem).transpose()?;
        match (&pem, node.credentials()) {
            (Some(pem), Some(credentials)) => credentials.check_replacement(pem).map_err(told_of)?,
            (None, None) => {}
            _ => {
                return Err(
                    "certificates of nodes can be switched on or off only at a start: restart the server"
                        .to_owned(),
                );
            }
        }
        let members = match &config.members {
            MembersFrom::File(path) => Some((members(path)?, path)),
            MembersFrom::Etcd { .. } => None,
        };
        if let Some((members, path)) = &members {
            node.check_members(members)
                .map_err(|why| format!("cluster.members: {}: {why}", path.display()))?;
        }
        Ok(Self { pem, members: members.map(|(members, _)| members) })
    }

    /// Takes them over. Says what an operator should know, a sentence each.
    pub(super) fn take(self, node: &Arc<ClusterNode>) -> Result<Vec<String>, String> {
        if let Some((pem, credentials)) = self.pem.as_ref().zip(node.credentials()) {
            credentials.replace(pem).map_err(told_of)?;
        }
        let before = node.members();
        let stale = self.members.as_ref().and_then(|file| not_taken(file, &before));
        if let Some(members) = self.members {
            node.change_members(members)?;
        }
        let members = node.members();
        let now = format!("cluster: epoch {} with {} nodes", members.epoch(), members.list().len());
        Ok(std::iter::once(now).chain(stale).collect())
    }
}

/// Why the members of a file stay what they are here, if they differ: only a greater epoch counts.
fn not_taken(file: &Members, here: &Members) -> Option<String> {
    let (new, old) = (file.epoch(), here.epoch());
    match new.cmp(&old) {
        std::cmp::Ordering::Greater => None,
        std::cmp::Ordering::Equal if file.list() == here.list() => None,
        std::cmp::Ordering::Equal => Some(format!(
            "cluster.members: the file was ignored, because its members differ from the members in use \
            but its epoch is the same ({old}): increase the epoch by one"
        )),
        std::cmp::Ordering::Less => Some(format!(
            "cluster.members: the file was ignored, because its epoch {new} is older than the epoch \
            {old} in use"
        )),
    }
}

/// What nodes show each other. A program that has it reads the blocks of all tenants: all know it only where this server asks no client
/// for a token and is reached from this host alone.
fn secret(config: &ClusterConfig, gate: &Gate, members: &[Member]) -> Result<Secret, String> {
    let Some(path) = &config.secret else {
        let listens_here = config.listen.is_none_or(|address| address.ip().is_loopback());
        let why = match (gate.is_open(), listens_here && members.iter().all(is_local)) {
            // Certificates say who is a node.
            _ if config.tls.is_some() => None,
            // Programs that may connect to this host's own addresses are trusted, as with gRPC.
            (true, true) => None,
            (_, false) => Some("members on other hosts require"),
            (false, true) => Some("this server requires tokens of clients, so nodes require"),
        };
        return match why {
            None => Ok(Secret::new(&[0; SECRET_BYTES_MIN])),
            Some(why) => Err(format!(
                "cluster.certificate: {why} certificates or a secret: set the certificates, or set cluster.secret to a file with the same 32 random bytes on every \
                 node (head -c 32 /dev/urandom > FILE)"
            )),
        };
    };
    let told = |what: &dyn std::fmt::Display| format!("cluster.secret: {}: {what}", path.display());
    let size = std::fs::metadata(path).map_err(|error| told(&error))?.len();
    if size > SECRET_BYTES_MAX {
        return Err(told(&format!("the file is longer than {SECRET_BYTES_MAX} bytes")));
    }
    let bytes = std::fs::read(path).map_err(|error| told(&error))?;
    if bytes.len() < SECRET_BYTES_MIN {
        return Err(told(&format!(
            "the file has {} bytes, but {SECRET_BYTES_MIN} random bytes are required",
            bytes.len()
        )));
    }
    Ok(Secret::new(&bytes))
}

/// Whether a node is reached on this host alone.
fn is_local(member: &Member) -> bool {
    resolve(member).is_ok_and(|address| address.ip().is_loopback())
}

fn resolve(member: &Member) -> Result<SocketAddr, String> {
    let found = member.address.to_socket_addrs().map_err(|error| format!("{}: {error}", member.address))?;
    found.into_iter().next().ok_or_else(|| format!("{}: the host name has no address", member.address))
}
