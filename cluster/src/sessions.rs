//! Sessions: who goes on from which blocks, and for how long they are held for it.
//!
//! A session is a conversation of one client: opened at the block at which it begins, extended turn by turn, forked where several go
//! on from the same blocks, closed. It ends with its lease, whatever became of its client. A fork refers to its parent and holds what
//! is its own alone, so that what is shared is held and counted once. What a session has of others' work, a store's leases
//! ([`Grant`]), is handed back in [`Ended`], each exactly once.
//!
//! - A session whose client has closed it, or whose lease has ended, is found no more. As long as forks stand on it, it is a *rest*:
//!   it holds the grants that begin before the last fork's place, and nothing behind. Rests count as sessions in every limit.
//! - No counter says how often a session is referred to: forks stand in an ordered set by parent, so nothing can be counted twice.
//! - A session is its tenant's: another tenant gets the answer for a session that does not exist.
//! - Of the room for sessions and grants a half is set aside for tenants in equal parts; the rest is for the first that comes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvarts_layout::{BlockKey, NamespaceId, planted};

/// Sessions and rests that one node has.
pub const SESSIONS_MAX: usize = 100_000;
/// Leases of a store that they have together.
pub const GRANTS_MAX: usize = 1 << 20;
/// Leases of a store that one session has: then it is extended from its beginning once, which puts one into the place of all.
pub const GRANTS_OF_ONE: usize = 1024;
/// Sessions on which a session stands, one forked from the other.
pub const DEPTH_MAX: usize = 64;
/// The longest lease of a session.
pub const SESSION_LEASE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// A session: the tenant's number, and a number that was sent to this tenant only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Name {
    /// Whose it is.
    pub tenant: u32,
    /// Which of the tenant's.
    pub id: u64,
}

/// A lease of the store on some of a session's blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Grant {
    /// The store's number of it.
    pub lease: u64,
    /// Blocks `from .. to` of the session.
    pub from: u32,
    /// See `from`.
    pub to: u32,
}

/// The chain on which a session stands: where it begins.
pub type ChainName = (NamespaceId, BlockKey);

/// What a session is of, as it is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stand {
    /// Of which model.
    pub namespace: NamespaceId,
    /// Its first block.
    pub head: BlockKey,
    /// Its last block.
    pub tip: BlockKey,
    /// How many there are.
    pub blocks: u32,
}

/// What a listing shows of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// What it is of.
    pub stand: Stand,
    /// The session on which it stands, and how many blocks of it.
    pub parent: Option<(u64, u32)>,
    /// Forks that stand on it.
    pub forks: usize,
    /// Leases of the store that it has.
    pub grants: usize,
    /// How long its lease goes on.
    pub left: Duration,
    /// Whether it was handed over: it only waits for its end.
    pub is_handed_over: bool,
}

/// Why something is not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// There is no such session: it never was, is another tenant's, was closed, or its lease has ended.
    Unknown,
    /// It was handed over: its client asks the other node.
    HandedOver,
    /// The blocks do not follow on those that it has: its own are `from .. blocks`.
    OutOfOrder {
        /// The first that is its own.
        from: u32,
        /// How many it has.
        blocks: u32,
    },
    /// Another block than the one that is given stands at its end: fork it instead.
    Diverged,
    /// A fork would share no block of its parent, or more blocks than the parent has.
    Beyond {
        /// How many the parent has.
        blocks: u32,
    },
    /// A fork would share all blocks of its parent, but the given key is not the key of the parent's last block.
    OtherTip,
    /// A session is opened again with fewer blocks than it has.
    Fewer {
        /// How many it has.
        blocks: u32,
    },
    /// The name belongs to an open session, or to a session of another namespace or chain.
    Taken,
    /// It has as many leases of the store as it may: extend it from its own beginning, with all its own blocks.
    Grants,
    /// Too many sessions stand one on the other.
    Depth,
    /// The tenant has as many sessions or grants as it may.
    Full,
}

/// What is over, for the caller to give back.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ended {
    /// Leases of the store that no session needs any more.
    pub leases: Vec<u64>,
    /// Chains on which no session stands any more.
    pub chains: Vec<(u32, ChainName)>,
    /// Sessions that ended with their lease.
    pub expired: usize,
}

/// How a session is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    Open,
    /// It holds what it did, and goes on elsewhere.
    HandedOver,
    /// Its forks hold what they need of it.
    Rest,
}

#[derive(Clone, Debug)]
struct Session {
    stand: Stand,
    parent: Option<(u64, u32)>,
    /// The first block that is its own: behind those of its parent, unless it came back from another node, where it had none.
    from: u32,
    is: Is,
    /// When it ends.
    until: Duration,
    /// Until when the store was asked to keep its grants.
    held_until: Duration,
    grants: Vec<Grant>,
}

/// What is counted for each tenant, of what all share.
#[derive(Clone, Debug)]
struct Shared {
    most: usize,
    of: BTreeMap<u32, usize>,
}

impl Shared {
    fn new(most: usize) -> Self {
        Self { most, of: BTreeMap::new() }
    }

    fn sum(&self) -> usize {
        self.of.values().sum()
    }

    /// Whether a tenant, one of `tenants`, may have that much more: of its own part, or of what is set aside for none.
    fn has_room(&self, tenant: u32, more: usize, tenants: usize) -> bool {
        let each = self.most / 2 / tenants.max(1);
        let beyond = |count: usize| count.saturating_sub(each);
        let own = self.of.get(&tenant).copied().unwrap_or(0);
        let others: usize =
            self.of.iter().filter(|(of, _)| **of != tenant).map(|(_, count)| beyond(*count)).sum();
        let is_within = self.sum() + more <= self.most;
        is_within && others + beyond(own + more) <= self.most - each * tenants.max(1)
    }

    fn add(&mut self, tenant: u32, more: usize) {
        *self.of.entry(tenant).or_default() += more;
    }

    fn take(&mut self, tenant: u32, less: usize) {
        let left = self.of.get(&tenant).map_or(0, |count| count.saturating_sub(less));
        match left {
            0 => drop(self.of.remove(&tenant)),
            left => drop(self.of.insert(tenant, left)),
        }
    }
}

/// The sessions of one node.
#[derive(Clone, Debug)]
pub struct Sessions {
    all: BTreeMap<Name, Session>,
    /// Sessions that are no rests, soonest end first.
    ends: BTreeSet<(Duration, Name)>,
    /// Forks: the parent, how many blocks of it they stand on, and the fork.
    forks: BTreeSet<(Name, u32, u64)>,
    /// Sessions of this node on each chain.
    chains: BTreeMap<(u32, ChainName), u32>,
    sessions: Shared,
    grants: Shared,
    tenants: usize,
}

impl Default for Sessions {
    fn default() -> Self {
        Self::new(SESSIONS_MAX, GRANTS_MAX)
    }
}

impl Sessions {
    /// Room for these.
    pub fn new(sessions_max: usize, grants_max: usize) -> Self {
        Self {
            all: BTreeMap::new(),
            ends: BTreeSet::new(),
            forks: BTreeSet::new(),
            chains: BTreeMap::new(),
            sessions: Shared::new(sessions_max),
            grants: Shared::new(grants_max),
            tenants: 1,
        }
    }

    /// How many tenants share the room from now on.
    pub fn share_among(&mut self, tenants: usize) {
        self.tenants = tenants.max(1);
    }

    /// Whether a tenant may open one more session with this number of grants.
    pub fn has_room(&self, tenant: u32, grants: usize) -> bool {
        self.sessions.has_room(tenant, 1, self.tenants) && self.grants.has_room(tenant, grants, self.tenants)
    }

    /// Opens a session. One of that name that was handed over, or is a rest, is opened again if it is of the same chain and has no more
    /// blocks: it comes back from another node. Where it is refused nothing of `grants` is kept.
    pub fn open(
        &mut self,
        name: Name,
        stand: Stand,
        grants: Vec<Grant>,
        hold: Duration,
        now: Duration,
    ) -> Result<(), Refused> {
        if !self.has_room(name.tenant, grants.len()) {
            return Err(Refused::Full);
        }
        let until = now + hold.min(SESSION_LEASE_MAX);
        if let Some(known) = self.all.get(&name) {
            let was = known.stand;
            if known.is == Is::Open || was.namespace != stand.namespace || was.head != stand.head {
                return Err(Refused::Taken);
            }
            if stand.blocks < was.blocks {
                return Err(Refused::Fewer { blocks: was.blocks });
            }
            self.settle(name, until, Is::Open);
            self.grants.add(name.tenant, grants.len());
            if let Some(known) = self.all.get_mut(&name) {
                (known.stand, known.from) = (stand, 0);
                known.held_until = known.held_until.max(until);
                known.grants.extend(grants);
            }
            return Ok(());
        }
        let new = Session { stand, parent: None, from: 0, is: Is::Open, until, held_until: until, grants };
        self.insert(name, new);
        Ok(())
    }

    /// Opens a session that goes on from the first `at` blocks of another one, of which `tip` is the last. Gives the leases of the store
    /// that must last as long as its own.
    pub fn fork(
        &mut self,
        name: Name,
        of: u64,
        (at, tip): (u32, BlockKey),
        hold: Duration,
        now: Duration,
    ) -> Result<Vec<u64>, Refused> {
        let mut parent = Name { id: of, ..name };
        let known = self.open_one(parent, now)?;
        let mut stand = known.stand;
        if at == 0 || at > stand.blocks {
            return Err(Refused::Beyond { blocks: stand.blocks });
        }
        if self.all.contains_key(&name) {
            return Err(Refused::Taken);
        }
        if at == stand.blocks && tip != stand.tip {
            return Err(Refused::OtherTip);
        }
        if !self.has_room(name.tenant, 0) {
            return Err(Refused::Full);
        }
        // Of a parent of which it takes no block it is no fork.
        while let Some(one) = self.all.get(&parent).filter(|one| at <= one.from) {
            let Some((above, _)) = one.parent else { break };
            parent.id = above;
        }
        if self.depth(parent) >= DEPTH_MAX {
            return Err(Refused::Depth);
        }
        (stand.blocks, stand.tip) = (at, tip);
        let (until, parent) = (now + hold.min(SESSION_LEASE_MAX), Some((parent.id, at)));
        self.insert(
            name,
            Session { stand, parent, from: at, is: Is::Open, until, held_until: now, grants: Vec::new() },
        );
        Ok(self.hold(name, until))
    }

    /// The blocks from `first` on are the session's, `tip` being the last of the `count`. What is given again is no error: an answer
    /// may have been lost. `grants` take the places of those that they cover, which are given back.
    pub fn extend(
        &mut self,
        name: Name,
        (first, count, tip): (u32, u32, BlockKey),
        grants: Vec<Grant>,
        now: Duration,
    ) -> Result<Vec<u64>, Refused> {
        self.may_extend(name, (first, count, tip), grants.len(), now)?;
        let known = self.all.get_mut(&name).ok_or(Refused::Unknown)?;
        let end = first.saturating_add(count);
        if end > known.stand.blocks {
            (known.stand.blocks, known.stand.tip) = (end, tip);
        }
        let is_covered = |one: &Grant| one.from >= first && one.to <= end;
        let over: Vec<u64> = known.grants.iter().filter(|one| is_covered(one)).map(|one| one.lease).collect();
        known.grants.retain(|one| !is_covered(one));
        self.grants.add(name.tenant, grants.len());
        // Room by small steps: most sessions have few.
        known.grants.reserve_exact(grants.len().max(known.grants.len() / 4));
        known.grants.extend(grants);
        self.grants.take(name.tenant, over.len());
        Ok(over)
    }

    /// Whether [`Sessions::extend`] would be done with this number of grants.
    pub fn may_extend(
        &self,
        name: Name,
        (first, count, tip): (u32, u32, BlockKey),
        grants: usize,
        now: Duration,
    ) -> Result<(), Refused> {
        let known = self.open_one(name, now)?;
        let (from, blocks) = (known.from, known.stand.blocks);
        let end = first.checked_add(count).ok_or(Refused::OutOfOrder { from, blocks })?;
        if count == 0 || first < from || first > blocks {
            return Err(Refused::OutOfOrder { from, blocks });
        }
        if end == blocks && tip != known.stand.tip {
            return Err(Refused::Diverged);
        }
        let covered = known.grants.iter().filter(|one| one.from >= first && one.to <= end).count();
        if known.grants.len() - covered + grants > GRANTS_OF_ONE {
            return Err(Refused::Grants);
        }
        // For a moment there are both.
        if self.grants.has_room(name.tenant, grants, self.tenants) { Ok(()) } else { Err(Refused::Full) }
    }

    /// Makes its lease end `hold` from now. Gives the leases of the store that must last as long: its own, and those of what it stands on.
    pub fn renew(&mut self, name: Name, hold: Duration, now: Duration) -> Result<Vec<u64>, Refused> {
        self.open_one(name, now)?;
        let until = now + hold.min(SESSION_LEASE_MAX);
        self.settle(name, until, Is::Open);
        Ok(self.hold(name, until))
    }

    /// The session goes on at another node: here it is neither extended nor forked nor renewed, and holds its blocks until it is closed
    /// or its lease ends. Gives what it is of, and whether this was the last session on its chain: then the chain is free for the other
    /// node.
    pub fn hand_over(&mut self, name: Name, now: Duration) -> Result<(Stand, bool), Refused> {
        let known = self.open_one(name, now)?;
        let (stand, until) = (known.stand, known.until);
        self.settle(name, until, Is::HandedOver);
        Ok((stand, !self.chains.contains_key(&(name.tenant, (stand.namespace, stand.head)))))
    }

    /// Ends a session; none where there is none of that name.
    pub fn close(&mut self, name: Name, now: Duration) -> Option<Ended> {
        let known = self.all.get(&name).filter(|known| known.is != Is::Rest && now < known.until)?;
        let until = known.until;
        let mut ended = Ended::default();
        self.end(name, until, &mut ended);
        self.keep_free(&mut ended);
        Some(ended)
    }

    /// Ends the sessions whose leases have ended.
    pub fn expire(&mut self, now: Duration) -> Ended {
        let mut ended = Ended::default();
        while let Some(&(until, name)) = self.ends.first().filter(|(until, _)| *until <= now) {
            ended.expired += 1;
            self.end(name, until, &mut ended);
        }
        self.keep_free(&mut ended);
        ended
    }

    /// Ends all sessions of tenants that are gone.
    pub fn forget(&mut self, tenants: &[u32]) -> Ended {
        let mut ended = Ended::default();
        for &(until, name) in &self.ends.clone() {
            if tenants.contains(&name.tenant) {
                self.end(name, until, &mut ended);
            }
        }
        self.keep_free(&mut ended);
        ended
    }

    /// What a session is; none where there is none of that name.
    pub fn see(&self, name: Name, now: Duration) -> Option<Seen> {
        let known = self.all.get(&name).filter(|known| known.is != Is::Rest && now < known.until)?;
        Some(self.seen(name, known, now))
    }

    /// A tenant's sessions from this number on, at most `most`.
    pub fn list(&self, from: Name, most: usize, now: Duration) -> Vec<(u64, Seen)> {
        let last = Name { id: u64::MAX, ..from };
        let is_found = |known: &Session| known.is != Is::Rest && now < known.until;
        let found = self.all.range(from..=last).filter(|(_, known)| is_found(known));
        found.take(most).map(|(name, known)| (name.id, self.seen(*name, known, now))).collect()
    }

    /// How long the store must keep what is granted to a session now.
    pub fn left(&self, name: Name, now: Duration) -> Result<Duration, Refused> {
        let known = self.open_one(name, now)?;
        Ok(known.held_until.max(known.until).saturating_sub(now))
    }

    /// Whether a session, or what it stands on, has a lease of the store now.
    pub fn has(&self, name: Name, lease: u64) -> bool {
        let above = |one: &(Name, &Session)| {
            let name = Name { id: one.1.parent?.0, ..one.0 };
            Some((name, self.all.get(&name)?))
        };
        let first = self.all.get(&name).map(|known| (name, known));
        std::iter::successors(first, above)
            .any(|(_, one)| one.grants.iter().any(|grant| grant.lease == lease))
    }

    /// Whether an open session of this tenant stands on a chain.
    pub fn stands_on(&self, chain: &(u32, ChainName)) -> bool {
        self.chains.contains_key(chain)
    }

    /// Sessions that are open or were handed over, rests, and grants.
    pub fn count(&self) -> (usize, usize, usize) {
        (self.ends.len(), self.all.len() - self.ends.len(), self.grants.sum())
    }

    fn open_one(&self, name: Name, now: Duration) -> Result<&Session, Refused> {
        match self.all.get(&name) {
            Some(known) if known.is == Is::Open && now < known.until => Ok(known),
            Some(known) if known.is == Is::HandedOver && now < known.until => Err(Refused::HandedOver),
            _ => Err(Refused::Unknown),
        }
    }

    fn seen(&self, name: Name, known: &Session, now: Duration) -> Seen {
        Seen {
            stand: known.stand,
            parent: known.parent,
            forks: self.forks_of(name).count(),
            grants: known.grants.len(),
            left: known.until.saturating_sub(now),
            is_handed_over: known.is == Is::HandedOver,
        }
    }

    fn forks_of(&self, name: Name) -> impl DoubleEndedIterator<Item = &(Name, u32, u64)> {
        self.forks.range((name, 0, 0)..=(name, u32::MAX, u64::MAX))
    }

    fn depth(&self, name: Name) -> usize {
        let above = |one: &Name| Some(Name { id: self.all.get(one)?.parent?.0, ..*one });
        std::iter::successors(Some(name), above).take(DEPTH_MAX).count()
    }

    fn insert(&mut self, name: Name, new: Session) {
        self.sessions.add(name.tenant, 1);
        self.grants.add(name.tenant, new.grants.len());
        self.ends.insert((new.until, name));
        self.count_on(name.tenant, &new.stand, true);
        if let Some((parent, at)) = new.parent {
            self.forks.insert((Name { id: parent, ..name }, at, name.id));
        }
        self.all.insert(name, new);
    }

    /// Notes what a session is from now on, and when it ends.
    fn settle(&mut self, name: Name, until: Duration, is: Is) {
        let Some(known) = self.all.get_mut(&name) else { return };
        self.ends.remove(&(known.until, name));
        let (was, stand) = (std::mem::replace(&mut known.is, is), known.stand);
        known.until = until;
        if is != Is::Rest {
            self.ends.insert((until, name));
        }
        if (was == Is::Open) != (is == Is::Open) {
            self.count_on(name.tenant, &stand, is == Is::Open);
        }
    }

    /// One more open session stands on a chain, or one less.
    fn count_on(&mut self, tenant: u32, stand: &Stand, more: bool) {
        let chain = (tenant, (stand.namespace, stand.head));
        let count = self.chains.get(&chain).copied().unwrap_or(0);
        match if more { count.saturating_add(1) } else { count.saturating_sub(1) } {
            0 => drop(self.chains.remove(&chain)),
            count => drop(self.chains.insert(chain, count)),
        }
    }

    /// The leases of a session, and of what it stands on, that do not last until then; they are asked to.
    fn hold(&mut self, name: Name, until: Duration) -> Vec<u64> {
        let (mut leases, mut next) = (Vec::new(), Some(name.id));
        while let Some(known) = next.and_then(|id| self.all.get_mut(&Name { id, ..name })) {
            if known.held_until < until {
                // What is granted from now on lasts as long.
                known.held_until = until;
                leases.extend(known.grants.iter().map(|one| one.lease));
            }
            next = known.parent.map(|(above, _)| above);
        }
        leases
    }

    /// Ends a session: what forks stand on is left as a rest, and rests on which none stands any more go as well.
    fn end(&mut self, name: Name, until: Duration, ended: &mut Ended) {
        let Some(known) = self.all.get(&name) else { return };
        ended.chains.push((name.tenant, (known.stand.namespace, known.stand.head)));
        self.settle(name, until, Is::Rest);
        let mut next = Some(name);
        while let Some(name) = next.take() {
            let needed = self.forks_of(name).next_back().map(|(_, at, _)| *at);
            let Some(known) = self.all.get_mut(&name).filter(|known| known.is == Is::Rest) else { break };
            let before = known.grants.len();
            let is_over = |one: &Grant| needed.is_none_or(|needed| one.from >= needed);
            ended.leases.extend(known.grants.iter().filter(|one| is_over(one)).map(|one| one.lease));
            known.grants.retain(|one| !is_over(one));
            known.grants.shrink_to_fit();
            let (parent, over) = (known.parent, before - known.grants.len());
            self.grants.take(name.tenant, over);
            if needed.is_none() {
                self.all.remove(&name);
                self.sessions.take(name.tenant, 1);
                if let Some((above, at)) = parent {
                    let above = Name { id: above, ..name };
                    self.forks.remove(&(above, at, name.id));
                    next = Some(above).filter(|_| !planted!("rests-stay"));
                }
            }
        }
    }

    /// Of chains on which ended sessions stood, keeps those on which none stands now, each once.
    fn keep_free(&self, ended: &mut Ended) {
        ended.chains.sort_unstable();
        ended.chains.dedup();
        ended.chains.retain(|chain| !self.chains.contains_key(chain));
    }
}

#[cfg(test)]
mod tests;
