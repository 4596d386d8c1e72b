//! Who is calling, and what they may do.
//!
//! A token is a secret of 256 random bits. The server keeps its hash; what a caller presents is hashed and compared
//! with every token's hash, each in constant time, so that neither the time nor the answer tells how close a guess
//! was. Tokens are never logged and never shown by `Debug`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use kvarts_contract::clock::Clock;
use tokio::sync::Notify;

use super::tenant::Tenant;

/// What every token begins with, so that people and scanners know one when they see it.
pub const TOKEN_PREFIX: &str = "kvarts_";
/// The most bytes of a token that are looked at.
const TOKEN_BYTES_MAX: usize = 512;

/// Seconds after which it is looked whether a token has ended, if nothing says so before.
const LOOKED_AFTER_S: u64 = 60;

/// Something that a caller may or may not do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Right {
    /// Finding and reading blocks, registering models, holding leases for a short while.
    Read,
    /// Putting, setting times.
    Write,
    /// Holding blocks for long.
    Pin,
    /// Deleting.
    Delete,
    /// Running the server.
    Admin,
}

impl Right {
    /// All of them, in the order in which they are told.
    pub const EACH: [Self; 5] = [Self::Read, Self::Write, Self::Pin, Self::Delete, Self::Admin];
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Pin => "pin",
            Self::Delete => "delete",
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
    /// See [`Right::Pin`].
    pub pin: bool,
    /// See [`Right::Delete`].
    pub delete: bool,
    /// See [`Right::Admin`].
    pub admin: bool,
}

impl Rights {
    /// All of them.
    pub const ALL: Self = Self { read: true, write: true, pin: true, delete: true, admin: true };

    /// Whether this one is among them.
    pub fn has(self, right: Right) -> bool {
        match right {
            Right::Read => self.read,
            Right::Write => self.write,
            Right::Pin => self.pin,
            Right::Delete => self.delete,
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
                "pin" => rights.pin = true,
                "delete" => rights.delete = true,
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
        blake3::Hash::from_hex(text).map(Self).map_err(|_| {
            "the hash of a token must have 64 hexadecimal \
            digits"
        })
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
    /// The token that admitted it; none where none is asked for.
    token: Option<TokenHash>,
}

/// Why a caller is refused.
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
            Self::Missing => {
                "a token is required: use --token-file FILE, KVARTS_TOKEN_FILE, or the header \
                `authorization: Bearer TOKEN`"
            }
            Self::Unknown => "the token is not valid on this server: get a new one from its administrator",
        }
    }
}

/// Lets callers in.
#[derive(Clone, Debug)]
pub enum Gate {
    /// Everyone is admitted, as one tenant with every right.
    Open(Arc<Tenant>),
    /// Those with one of these tokens.
    Tokens(Vec<Token>),
}

impl Gate {
    /// The caller behind an `authorization` header, at a time in seconds since 1970.
    pub fn caller(&self, header: Option<&[u8]>, unix_seconds: u64) -> Result<Caller, Refusal> {
        let tokens = match self {
            Self::Open(tenant) => {
                return Ok(Caller { tenant: Arc::clone(tenant), rights: Rights::ALL, token: None });
            }
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
        Ok(Caller { tenant: Arc::clone(&found.tenant), rights: found.rights, token: Some(found.hash) })
    }

    /// For how many seconds it would still let this caller in, with the right.
    fn lets_in_for(&self, caller: &Caller, right: Right, unix_seconds: u64) -> u64 {
        match (self, caller.token) {
            (Self::Open(_), _) => u64::MAX,
            (Self::Tokens(_), None) => 0,
            (Self::Tokens(tokens), Some(hash)) => {
                let known = tokens.iter().find(|known| known.hash == hash && known.rights.has(right));
                let end = known.map_or(0, |known| known.expires.unwrap_or(u64::MAX));
                end.saturating_sub(unix_seconds)
            }
        }
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

    /// Whether it admits everyone.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }
}

/// A gate that can be changed while callers come in. Callers admitted before are checked again at the next call.
#[derive(Debug)]
pub struct Gatekeeper {
    gate: RwLock<Gate>,
    /// The last number that a tenant was given: none is given twice, so that what was counted for one that is gone is
    /// never another's.
    last_number: AtomicU32,
    changed: Notify,
}

/// What is about to become of a gate, and what became of it.
#[derive(Debug, Default)]
pub struct Changed {
    /// Tenants that were not there before.
    pub new: Vec<Arc<Tenant>>,
    /// Tenants that are not there any more: they have no token.
    pub gone: Vec<Arc<Tenant>>,
    /// What an operator should know, a sentence each.
    pub notes: Vec<String>,
}

impl Gatekeeper {
    /// Lets in whom this gate does.
    pub fn new(gate: Gate) -> Self {
        let last_number = gate.tenants().iter().map(|tenant| tenant.number).max().unwrap_or(0);
        Self { gate: RwLock::new(gate), last_number: AtomicU32::new(last_number), changed: Notify::new() }
    }

    /// See [`Gate::caller`].
    pub fn caller(&self, header: Option<&[u8]>, unix_seconds: u64) -> Result<Caller, Refusal> {
        self.read().caller(header, unix_seconds)
    }

    /// See [`Gate::tenants`].
    pub fn tenants(&self) -> Vec<Arc<Tenant>> {
        self.read().tenants().into_iter().map(Arc::clone).collect()
    }

    /// See [`Gate::is_open`].
    pub fn is_open(&self) -> bool {
        self.read().is_open()
    }

    /// Why another gate cannot take this one's place, if so. Nothing changes.
    pub fn check(&self, to: &Gate) -> Result<(), String> {
        let gate = self.read();
        match (&*gate, to) {
            (Gate::Open(_), Gate::Open(_)) => return Ok(()),
            (Gate::Tokens(_), Gate::Tokens(_)) => {}
            _ => {
                return Err("tokens can be switched on or off only at a start: restart the server".to_owned());
            }
        }
        let old = gate.tenants();
        for Tenant { name, salt, .. } in to.tenants().into_iter().map(|tenant| &**tenant) {
            if old.iter().any(|known| known.name == *name && known.salt != *salt) {
                return Err(format!(
                    "tenants: {name}: the salt cannot be changed, because it identifies the tenant's data"
                ));
            }
        }
        Ok(())
    }

    /// Lets in whom another gate does from now on. Tenants of the same name stay who they are, with what they have under
    /// way and their limits. Refused are changes of who callers are: tokens where there were none, none where there were some, another salt.
    pub fn change(&self, to: &Gate) -> Result<Changed, String> {
        self.check(to)?;
        let mut gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let Gate::Tokens(tokens) = to else { return Ok(Changed::default()) };
        let mut old: BTreeMap<String, Arc<Tenant>> =
            gate.tenants().into_iter().map(|tenant| (tenant.name.clone(), Arc::clone(tenant))).collect();
        let (mut all, mut changed) = (BTreeMap::new(), Changed::default());
        for tenant in to.tenants() {
            let name = &tenant.name;
            let known = match old.remove(name) {
                Some(known) => {
                    if known.limits != tenant.limits {
                        changed
                            .notes
                            .push(format!("tenants: {name}: changed limits apply at the next start"));
                    }
                    known
                }
                None => {
                    let number = self.last_number.fetch_add(1, Ordering::Relaxed) + 1;
                    let tenant =
                        Tenant::new(name, number, Some(tenant.salt.0.clone()), tenant.limits.clone());
                    changed.new.push(Arc::clone(&tenant));
                    tenant
                }
            };
            all.insert(name.clone(), known);
        }
        changed.gone = old.into_values().collect();
        let token = |token: &Token| {
            let tenant = all.get(&token.tenant.name).unwrap_or(&token.tenant);
            Token { tenant: Arc::clone(tenant), ..token.clone() }
        };
        *gate = Gate::Tokens(tokens.iter().map(token).collect());
        drop(gate);
        self.changed.notify_waiters();
        Ok(changed)
    }

    /// Returns when a caller that was let in would not be let in any more: its token has ended, or it or this right of it
    /// was taken away.
    pub async fn taken_away(&self, caller: &Caller, right: Right, clock: &dyn Clock) {
        loop {
            // Made before the look, so that a change in between is heard.
            let changed = self.changed.notified();
            let left = self.read().lets_in_for(caller, right, clock.unix_millis() / 1000);
            if left == 0 {
                return;
            }
            // A wall clock may be set meanwhile.
            let _ = tokio::time::timeout(Duration::from_secs(left.min(LOOKED_AFTER_S)), changed).await;
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Gate> {
        // A change is one step.
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tenant::TenantLimits;
    use kvarts_contract::clock::ManualClock;
    use std::collections::BTreeSet;

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
    fn whoever_was_let_in_stays_until_the_token_ends() {
        let keeper = Gatekeeper::new(gate());
        let caller = keeper.caller(Some(b"Bearer kvarts_b"), 990).unwrap();
        let left = |right, now| keeper.read().lets_in_for(&caller, right, now);
        assert_eq!((left(Right::Read, 990), left(Right::Read, 999), left(Right::Read, 1000)), (10, 1, 0));
        assert_eq!(left(Right::Write, 990), 0, "a right that it never had");
        let forever = keeper.caller(Some(b"Bearer kvarts_a"), 990).unwrap();
        assert!(keeper.read().lets_in_for(&forever, Right::Read, u64::MAX - 1) > 0);
        let ended = ManualClock::new(1_000_000);
        kvarts_contract::blocking::block_on(keeper.taken_away(&caller, Right::Read, &*ended));
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
    fn a_token_that_is_taken_away_ends_at_once_and_tenants_stay_who_they_are() {
        let keeper = Gatekeeper::new(gate());
        let enters = |token: &str| {
            let caller = keeper.caller(Some(format!("Bearer kvarts_{token}").as_bytes()), 0);
            caller.ok().map(|caller| (caller.tenant.name.clone(), caller.tenant.number, caller.tenant.turn()))
        };
        let before = keeper.tenants();
        // Another order, one token less, one tenant more, and numbers that are another's here.
        let token = |name: &str, number, secret: &str| Token {
            hash: TokenHash::of(&format!("{TOKEN_PREFIX}{secret}")),
            tenant: Tenant::new(name, number, None, TenantLimits::default()),
            rights: Rights { read: true, ..Rights::default() },
            expires: None,
        };
        let changed =
            keeper.change(&Gate::Tokens(vec![token("c", 1, "c"), token("b", 2, "b2"), token("a", 3, "a")]));
        let changed = changed.unwrap();
        assert_eq!(changed.new.iter().map(|tenant| tenant.number).collect::<Vec<_>>(), [3]);
        assert!(enters("b").is_none(), "it was taken away");
        assert_eq!(enters("b2").map(|caller| (caller.0, caller.1)), Some(("b".to_owned(), 2)));
        assert_eq!(enters("c").map(|caller| (caller.0, caller.1)), Some(("c".to_owned(), 3)));
        assert!(Arc::ptr_eq(&before[0], &keeper.tenants()[0]), "what it has under way goes on to count");
        // What would make others of all tenants is refused, and nothing changes.
        assert!(keeper.change(&Gate::Open(Tenant::only())).is_err());
        let salted = Token {
            tenant: Tenant::new("a", 1, Some(vec![1]), TenantLimits::default()),
            ..token("a", 1, "x")
        };
        assert!(keeper.change(&Gate::Tokens(vec![salted])).is_err());
        assert!(enters("a").is_some());
    }

    #[test]
    fn the_number_of_a_tenant_that_is_gone_is_never_another_ones() {
        let token = |name: &str| Token {
            hash: TokenHash::of(&format!("{TOKEN_PREFIX}{name}")),
            // As each reading of the configuration counts anew.
            tenant: Tenant::new(name, 1, None, TenantLimits::default()),
            rights: Rights { read: true, ..Rights::default() },
            expires: None,
        };
        let numbered = |names: &[&str]| {
            let with = |(number, name): (u32, &&str)| Token {
                tenant: Tenant::new(name, number, None, TenantLimits::default()),
                ..token(name)
            };
            Gate::Tokens((1..).zip(names).map(with).collect())
        };
        let keeper = Gatekeeper::new(numbered(&["a", "b", "c"]));
        let mut given = BTreeSet::from([1, 2, 3]);
        let gone = keeper.change(&numbered(&["a", "b"])).unwrap().gone;
        assert_eq!(gone.iter().map(|tenant| tenant.number).collect::<Vec<_>>(), [3]);
        for names in [&["a", "b", "d"][..], &["d"], &["c", "d"], &["a", "c"], &["a", "b", "e", "c"]] {
            for tenant in keeper.change(&numbered(names)).unwrap().new {
                assert!(given.insert(tenant.number), "{} has a number that was another's", tenant.name);
            }
            let numbers: BTreeSet<u32> = keeper.tenants().iter().map(|tenant| tenant.number).collect();
            assert_eq!(numbers.len(), names.len());
        }
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
