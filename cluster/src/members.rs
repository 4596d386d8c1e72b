//! Who belongs to the cluster in one epoch. Every change of the members is a new epoch, whose number only grows.
//!
//! Where nothing else runs a file names them, the same one on every node:
//!
//! ```toml
//! epoch = 1
//! [[node]]
//! id = "00112233445566778899aabbccddeeff"   # kvarts serve says it when it starts
//! address = "10.0.0.1:7400"
//! zone = "rack-1"                            # optional
//! ```

use std::collections::BTreeSet;
use std::fmt;

use kvarts_layout::StoreId;
use serde::Deserialize;

/// Members that a cluster may have.
pub const MEMBERS_MAX: usize = 1024;
/// The greatest number of an epoch.
pub const EPOCH_MAX: u64 = u32::MAX as u64;
/// The longest file of members that is read.
pub const FILE_BYTES_MAX: usize = 1 << 20;

/// A node's name: that of its store, so that a directory which is moved to another host stays itself.
pub type NodeId = StoreId;

/// One node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its name.
    pub id: NodeId,
    /// Where other nodes reach it: a host and a port.
    pub address: String,
    /// Nodes of one zone are near to each other; empty if nothing is known.
    pub zone: String,
}

/// The members of one epoch, in the order of their names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Members {
    epoch: u64,
    list: Vec<Member>,
}

/// Why members are none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MembersError {
    /// The file is not TOML, or has other fields: with the line.
    Syntax(String),
    /// A field of the node of this place (from one) cannot be.
    Field {
        /// Which node, from one.
        node: usize,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// There are none, or too many.
    Count(usize),
    /// The number of the epoch is too great: tokens of leases begin with it.
    Epoch(u64),
    /// Two nodes have this name or address.
    Twice(String),
}

impl fmt::Display for MembersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax(what) => write!(f, "{what}"),
            Self::Field { node, what } => write!(f, "node {node}: {what}"),
            Self::Count(count) => write!(
                f,
                "the list of members has {count} nodes: a cluster has 1 to \
                {MEMBERS_MAX}"
            ),
            Self::Epoch(epoch) => {
                write!(
                    f,
                    "the epoch is {epoch}, but the limit is {EPOCH_MAX}: increase the epoch by one \
                    for each change of the list of members"
                )
            }
            Self::Twice(what) => write!(f, "two nodes have the same {what}"),
        }
    }
}

impl std::error::Error for MembersError {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileNode {
    id: String,
    address: String,
    #[serde(default)]
    zone: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    epoch: u64,
    #[serde(default)]
    node: Vec<FileNode>,
}

impl Members {
    /// The members of an epoch.
    pub fn new(epoch: u64, mut list: Vec<Member>) -> Result<Self, MembersError> {
        if epoch > EPOCH_MAX {
            return Err(MembersError::Epoch(epoch));
        }
        if list.is_empty() || list.len() > MEMBERS_MAX {
            return Err(MembersError::Count(list.len()));
        }
        list.sort_by_key(|member| member.id);
        let same = list.windows(2).find_map(|pair| match pair {
            [a, b] if a.id == b.id => Some(format!("id {}", a.id)),
            _ => None,
        });
        let mut addresses = BTreeSet::new();
        let same = same.or_else(|| {
            let again = list.iter().find(|member| !addresses.insert(member.address.as_str()))?;
            Some(format!("address {}", again.address))
        });
        match same {
            Some(what) => Err(MembersError::Twice(what)),
            None => Ok(Self { epoch, list }),
        }
    }

    /// Those that a file names.
    pub fn parse(text: &str) -> Result<Self, MembersError> {
        if text.len() > FILE_BYTES_MAX {
            return Err(MembersError::Syntax(format!(
                "the list of members is longer than {FILE_BYTES_MAX} \
                bytes"
            )));
        }
        let file: File = toml::from_str(text).map_err(|error| MembersError::Syntax(error.to_string()))?;
        if file.node.len() > MEMBERS_MAX {
            return Err(MembersError::Count(file.node.len()));
        }
        let nodes = (1..).zip(file.node);
        let list = nodes.map(|(node, wire)| member(wire).map_err(|what| MembersError::Field { node, what }));
        Self::new(file.epoch, list.collect::<Result<_, _>>()?)
    }

    /// As a file names them.
    pub fn to_text(&self) -> String {
        let mut text = format!("epoch = {}\n", self.epoch);
        for Member { id, address, zone } in &self.list {
            let [address, zone] = [address, zone].map(|value| toml::Value::String(value.clone()));
            text += &format!("[[node]]\nid = \"{id}\"\naddress = {address}\nzone = {zone}\n");
        }
        text
    }

    /// What tells these members from others of the same epoch: their names, by which they hold the directory. Where one is reached may
    /// differ from node to node.
    pub fn digest(&self) -> [u8; 32] {
        let ids: Vec<u8> = self.list.iter().flat_map(|member| member.id.0).collect();
        blake3::derive_key("kvarts cluster members, version 1", &ids)
    }

    /// The number of the epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// All of them, in the order of their names.
    pub fn list(&self) -> &[Member] {
        &self.list
    }

    /// The member of this name.
    pub fn get(&self, id: NodeId) -> Option<&Member> {
        self.list.get(self.place_of(id)?)
    }

    /// Which one it is in the list.
    pub fn place_of(&self, id: NodeId) -> Option<usize> {
        self.list.binary_search_by_key(&id, |member| member.id).ok()
    }
}

/// Whether nodes can be called there: a name or an address of IPv4, or one of IPv6 in brackets, and a port.
fn is_address(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => host.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let may_be = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            !host.is_empty() && host.chars().all(may_be)
        }
    };
    is_host && port.parse::<u16>().is_ok_and(|port| port > 0)
}

fn member(wire: FileNode) -> Result<Member, String> {
    let FileNode { id, address, zone } = wire;
    let id = id.parse().map_err(|error| format!("id: {error}"))?;
    if !is_address(&address) {
        return Err(format!(
            "the address {address:?} is not valid: write a host and a port, as in \"10.0.0.1:7400\" or \
            \"[2001:db8::1]:7400\""
        ));
    }
    Ok(Member { id, address, zone })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(nodes: &[(&str, &str)]) -> String {
        let node = |(id, address): &(&str, &str)| format!("[[node]]\nid = {id:?}\naddress = {address:?}\n");
        format!("epoch = 3\n{}", nodes.iter().map(node).collect::<String>())
    }

    const A: &str = "00112233445566778899aabbccddeeff";
    const B: &str = "ffeeddccbbaa99887766554433221100";

    #[test]
    fn members_are_the_same_in_whatever_order_a_file_names_them() {
        let here = Members::parse(&file(&[(A, "a:1"), (B, "b:1")])).unwrap();
        let there = Members::parse(&file(&[(B, "b:1"), (A, "a:1")])).unwrap();
        assert_eq!(here, there);
        assert_eq!((here.epoch(), here.list().len()), (3, 2));
        assert_eq!(Members::parse(&here.to_text()), Ok(here.clone()));
        assert_eq!(here.get(B.parse().unwrap()).unwrap().address, "b:1");
        assert_eq!(here.get(NodeId::default()), None);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_with_its_place() {
        let error = |text: &str| Members::parse(text).unwrap_err().to_string();
        assert!(error("epoch = 1\nnodes = 3\n").contains("line 2"), "{}", error("epoch = 1\nnodes = 3\n"));
        assert_eq!(error("epoch = 1\n"), "the list of members has 0 nodes: a cluster has 1 to 1024");
        assert_eq!(error(&file(&[(A, "a:1"), ("12", "b:1")])), "node 2: id: expected 32 hexadecimal digits");
        for address in [
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:70000",
            "2001:db8::2:7400",
            "a host:1",
            "[::1:1",
            "a/b:1",
        ] {
            assert!(error(&file(&[(A, address)])).starts_with("node 1: the address"), "{address}");
        }
        assert_eq!(error(&file(&[(A, "a:1"), (A, "b:1")])), format!("two nodes have the same id {A}"));
        assert_eq!(error(&file(&[(A, "a:1"), (B, "a:1")])), "two nodes have the same address a:1");
        let late = file(&[(A, "a:1")]).replace("epoch = 3", "epoch = 202611261200");
        assert!(
            error(&late).starts_with("the epoch is 202611261200, but the limit is 4294967295"),
            "{}",
            error(&late)
        );
        assert!(Members::parse(&file(&[(A, "[2001:db8::2]:7400")])).is_ok());
        assert!(error(&" ".repeat(FILE_BYTES_MAX + 1)).contains("longer"));
    }
}
