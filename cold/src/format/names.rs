//! Names of objects, below the prefix that a bucket is used with.
//!
//! Manifests lie together, so that the namespaces of a bucket are one listing that does not grow with packs.

use kvarts_layout::NamespaceId;

use super::{PackId, hex};

/// Before every name: another version of the format lies beside this one.
pub const ROOT: &str = "kvarts-cold-1/";
/// Before the manifests.
pub const MANIFESTS: &str = "kvarts-cold-1/manifests/";
/// Before the packs of all namespaces.
pub const PACKS: &str = "kvarts-cold-1/packs/";
/// Before the indexes of all namespaces.
pub const INDEXES: &str = "kvarts-cold-1/indexes/";

/// What is put to try whether conditions of puts are kept.
pub const CONDITIONS: &str = "kvarts-cold-1/conditions";

/// What a name is that of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Named {
    /// The manifest of a namespace.
    Manifest(NamespaceId),
    /// A pack.
    Pack(NamespaceId, PackId),
    /// The index of a pack.
    Index(NamespaceId, PackId),
}

impl Named {
    /// Reads a name; `None` for what this program did not make.
    pub fn parse(name: &str) -> Option<Self> {
        if let Some(rest) = name.strip_prefix(MANIFESTS) {
            return hex(rest).map(|id| Self::Manifest(NamespaceId(id)));
        }
        let (is_pack, rest) = match name.strip_prefix(PACKS) {
            Some(rest) => (true, rest),
            None => (false, name.strip_prefix(INDEXES)?),
        };
        let (namespace, pack) = rest.split_once('/')?;
        let (namespace, pack) = (NamespaceId(hex(namespace)?), PackId(hex(pack)?));
        Some(if is_pack { Self::Pack(namespace, pack) } else { Self::Index(namespace, pack) })
    }
}

impl Named {
    /// Of which namespace it is.
    pub fn namespace(&self) -> NamespaceId {
        match self {
            Self::Manifest(namespace) | Self::Pack(namespace, _) | Self::Index(namespace, _) => *namespace,
        }
    }
}

/// A name behind all of the folder that this one lies in, and before every other folder of 64 digits; the name itself where it is not a
/// pack's or an index's.
pub fn behind(name: &str) -> String {
    match Named::parse(name) {
        // The character after the slash.
        Some(Named::Pack(namespace, _)) => format!("{PACKS}{}0", digits(&namespace.0)),
        Some(Named::Index(namespace, _)) => format!("{INDEXES}{}0", digits(&namespace.0)),
        Some(Named::Manifest(_)) | None => name.to_owned(),
    }
}

fn digits(bytes: &[u8; 32]) -> String {
    PackId(*bytes).to_string()
}

/// The manifest of a namespace.
pub fn manifest(namespace: NamespaceId) -> String {
    format!("{MANIFESTS}{}", digits(&namespace.0))
}

/// Before the packs of a namespace.
pub fn packs(namespace: NamespaceId) -> String {
    format!("{PACKS}{}/", digits(&namespace.0))
}

/// Before the indexes of a namespace.
pub fn indexes(namespace: NamespaceId) -> String {
    format!("{INDEXES}{}/", digits(&namespace.0))
}

/// A pack.
pub fn pack(namespace: NamespaceId, pack: PackId) -> String {
    format!("{PACKS}{}/{pack}", digits(&namespace.0))
}

/// The index of a pack.
pub fn index(namespace: NamespaceId, pack: PackId) -> String {
    format!("{INDEXES}{}/{pack}", digits(&namespace.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_what_it_names_in_one_spelling() {
        let (namespace, id) = (NamespaceId([0xab; 32]), PackId([0x5c; 32]));
        assert_eq!(Named::parse(&manifest(namespace)), Some(Named::Manifest(namespace)));
        assert_eq!(Named::parse(&pack(namespace, id)), Some(Named::Pack(namespace, id)));
        assert_eq!(Named::parse(&index(namespace, id)), Some(Named::Index(namespace, id)));
        assert!(pack(namespace, id).starts_with(&packs(namespace)));
        assert!(index(namespace, id).starts_with(&indexes(namespace)));
        let next = NamespaceId({
            let mut next = namespace.0;
            next[31] += 1;
            next
        });
        assert!(pack(namespace, PackId([0xff; 32])) < behind(&pack(namespace, id)));
        assert!(behind(&index(namespace, id)) < index(next, PackId([0; 32])));
        assert_eq!(behind(&manifest(namespace)), manifest(namespace));
        for other in [
            "",
            ROOT,
            &manifest(namespace).to_uppercase(),
            &format!("{}0", manifest(namespace)),
            &packs(namespace),
            &format!("{}/x", pack(namespace, id)),
            &manifest(namespace).replace("ab", "AB"),
        ] {
            assert_eq!(Named::parse(other), None, "{other}");
        }
    }
}
