//! Who is calling, and what they may do.
//!
//! A token is a secret of 256 random bits. The server keeps its hash; what a caller presents is hashed and compared
//! with every token's hash, each in constant time, so that neither the time nor the answer tells how close a guess
//! was. Tokens are never logged and never shown by `Debug`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::tenant::Tenant;

/// What every token begins with, so that people and scanners know one when they see it.
pub const TOKEN_PREFIX: &str = "kvarts_";
/// The most bytes of a token that are looked at.
const TOKEN_BYTES_MAX: usize = 512;

/// Something that a caller may or may not do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Right {
    /// Finding and reading blocks, registering models, holding leases.
    Read,
    /// Putting, deleting, setting times.
    Write,
    /// Running the server.
    Admin,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        })
    }
}

/// The rights of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rights {
    /// See [`Right::Read`].
    pub read: bool,
    /// See [`Right::Write`].
    pub write: bool,
    /// See [`Right::Admin`].
    pub admin: bool,
}

impl Rights {
    /// All of them.
    pub const ALL: Self = Self { read: true, write: true, admin: true };

    /// Whether this one is among them.
    pub fn has(self, right: Right) -> bool {
        match right {
            Right::Read => self.read,
            Right::Write => self.write,
            Right::Admin => self.admin,
        }
    }

    /// Rights by their names; none for a name that is no right, or no name at all.
    pub fn named<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut rights = Self::default();
        for name in names {
            match name {
                "read" => rights.read = true,
                "write" => rights.write = true,
                "admin" => rights.admin = true,
                _ => return None,
            }
        }
        (rights != Self::default()).then_some(rights)
    }
}

/// The hash of a token, which is all that a server keeps of it.
#[derive(Clone, Copy)]
pub struct TokenHash(blake3::Hash);

impl TokenHash {
    /// The hash of a token.
    pub fn of(token: &str) -> Self {
        Self(blake3::derive_key("kvarts 2026 bearer token v1", token.as_bytes()).into())
    }
}

impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        // blake3 compares in constant time.
        self.0 == other.0
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(redacted)")
    }
}

impl FromStr for TokenHash {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        blake3::Hash::from_hex(text).map(Self).map_err(|_| "a token's hash has 64 hexadecimal digits")
    }
}

/// A token as the server knows it.
#[derive(Clone, Debug)]
pub struct Token {
    /// Its hash.
    pub hash: TokenHash,
    /// Whose it is.
    pub tenant: Arc<Tenant>,
    /// What it allows.
    pub rights: Rights,
    /// When it ends, in seconds since 1970.
    pub expires: Option<u64>,
}

/// Who is calling.
#[derive(Clone, Debug)]
pub struct Caller {
    /// For whom.
    pub tenant: Arc<Tenant>,
    /// What it may do.
    pub rights: Rights,
}

/// Why somebody is not let in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// No token was given.
    Missing,
    /// What was given is no token of this server, or one that has ended.
    Unknown,
}

impl Refusal {
    /// What the caller is told.
    pub fn text(self) -> &'static str {
        match self {
            Self::Missing => "a token is needed: send `authorization: Bearer TOKEN`",
            Self::Unknown => "the token is not valid here: ask for a new one",
        }
    }
}

/// Lets callers in.
#[derive(Clone, Debug)]
pub enum Gate {
    /// Everybody, as one tenant with every right.
    Open(Arc<Tenant>),
    /// Those with one of these tokens.
    Tokens(Vec<Token>),
}

impl Gate {
    /// The caller behind an `authorization` header, at a time in seconds since 1970.
    pub fn caller(&self, header: Option<&[u8]>, unix_seconds: u64) -> Result<Caller, Refusal> {
        let tokens = match self {
            Self::Open(tenant) => return Ok(Caller { tenant: Arc::clone(tenant), rights: Rights::ALL }),
            Self::Tokens(tokens) => tokens,
        };
        let text = std::str::from_utf8(header.ok_or(Refusal::Missing)?).map_err(|_| Refusal::Unknown)?;
        let (scheme, token) = text.split_once(' ').ok_or(Refusal::Unknown)?;
        if !scheme.eq_ignore_ascii_case("bearer") || token.len() > TOKEN_BYTES_MAX {
            return Err(Refusal::Unknown);
        }
        let hash = TokenHash::of(token.trim());
        // Every token is looked at, so that the time does not tell which one matched.
        let mut found = None;
        for known in tokens {
            if known.hash == hash {
                found = Some(known);
            }
        }
        let found = found.filter(|token| token.expires.is_none_or(|end| unix_seconds < end));
        let found = found.ok_or(Refusal::Unknown)?;
        Ok(Caller { tenant: Arc::clone(&found.tenant), rights: found.rights })
    }

    /// Everyone for whom it lets callers in, each once.
    pub fn tenants(&self) -> Vec<&Arc<Tenant>> {
        let mut tenants: Vec<&Arc<Tenant>> = match self {
            Self::Open(tenant) => vec![tenant],
            Self::Tokens(tokens) => tokens.iter().map(|token| &token.tenant).collect(),
        };
        tenants.sort_unstable_by_key(|tenant| tenant.number);
        tenants.dedup_by_key(|tenant| tenant.number);
        tenants
    }

    /// Whether it lets everybody in.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::tenant::TenantLimits;

    fn gate() -> Gate {
        let token = |name: &str, number, expires| Token {
            hash: TokenHash::of(&format!("{TOKEN_PREFIX}{name}")),
            tenant: Tenant::new(name, number, None, TenantLimits::default()),
            rights: Rights { read: true, ..Rights::default() },
            expires,
        };
        Gate::Tokens(vec![token("a", 1, None), token("b", 2, Some(1000))])
    }

    #[test]
    fn a_token_is_its_tenants_until_it_ends() {
        let caller = gate().caller(Some(b"Bearer kvarts_b"), 999).unwrap();
        assert_eq!((caller.tenant.name.as_str(), caller.rights.has(Right::Write)), ("b", false));
        assert_eq!(gate().caller(Some(b"Bearer kvarts_b"), 1000).unwrap_err(), Refusal::Unknown);
        assert_eq!(gate().caller(Some(b"bearer kvarts_a"), 5000).unwrap().tenant.name, "a");
    }

    #[test]
    fn whatever_is_no_token_is_refused() {
        assert_eq!(gate().caller(None, 0).unwrap_err(), Refusal::Missing);
        let long = format!("Bearer {}", "a".repeat(600));
        for header in ["", "Bearer", "Bearer ", "Bearer kvarts_", "Basic kvarts_a", "kvarts_a", long.as_str()]
        {
            assert_eq!(gate().caller(Some(header.as_bytes()), 0).unwrap_err(), Refusal::Unknown, "{header}");
        }
        assert_eq!(gate().caller(Some(&[0xff, 0xfe]), 0).unwrap_err(), Refusal::Unknown);
    }

    #[test]
    fn neither_tokens_nor_hashes_are_shown() {
        let shown = format!("{:?}", gate());
        assert!(
            !shown.contains("kvarts_") && !shown.contains(&TokenHash::of("kvarts_a").to_string()),
            "{shown}"
        );
        assert!(TokenHash::of("x").to_string().parse::<TokenHash>().unwrap() == TokenHash::of("x"));
    }
}
