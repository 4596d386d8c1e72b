//! A bucket whose requests fail, from a seed or by a plan: what the tier must bear.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;

use crate::bucket::{Bucket, Condition, Facts, Listed, Tag};
use crate::fault::Fault;
use crate::places::Places;
use crate::time::{BoxFuture, Time};

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Op {
    /// A whole object.
    Get,
    /// A range.
    Range,
    /// Facts.
    Head,
    /// A put without a condition.
    Put,
    /// A put with one.
    Swap,
    /// A delete.
    Delete,
    /// A listing.
    List,
}

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// No connection: nothing happened.
    Outage,
    /// The connection breaks behind the request: it happened, and the caller is not told.
    Lost,
    /// 429 or 503, with this Retry-After.
    Busy(Option<Duration>),
    /// The answer takes this long, and what was asked for happens at its end.
    Slow(Duration),
    /// The same for a whole object or a put, and what was asked for happens at its beginning.
    Late(Duration),
    /// A put is given up at once, and happens so long afterwards.
    Afterwards(Duration),
    /// A range comes in eight pieces, with so long before each.
    Trickle(Duration),
    /// No answer, ever.
    Silent,
    /// A shorter answer, as if it were whole.
    Truncated,
    /// A longer answer.
    Longer,
    /// One bit of the answer is another one.
    Altered,
    /// What there is is not found.
    Missing,
    /// A put claims that the object changed, and wrote nothing.
    Changed,
    /// A listing without its last objects.
    Stale,
    /// A listing as it was before [`Faulty::remember_listings`].
    Old,
    /// Credentials that ran out.
    Denied,
    /// Credentials that may not have this object.
    Forbidden,
}

/// When what goes wrong.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Of a thousand requests this many fail, in a way that the seed draws from these.
    pub thousandths: u32,
    /// What can be drawn.
    pub kinds: Vec<Kind>,
    /// The next requests of a kind, in turn: `None` goes well.
    pub next: BTreeMap<Op, Vec<Option<Kind>>>,
    /// All requests from now on.
    pub all: Option<Kind>,
    /// All requests after this number of them, which go well.
    pub after: Option<(u64, Kind)>,
}

/// What a bucket does with conditions of puts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Conditional {
    /// It keeps them.
    #[default]
    Kept,
    /// It puts whatever they say, as servers do that do not know the headers.
    Ignored,
    /// It puts whatever `If-Match` says, and keeps `If-None-Match`.
    MatchIgnored,
    /// It refuses puts with a condition (501).
    Refused,
}

struct State {
    plan: Plan,
    conditional: Conditional,
    random: u64,
    asked: BTreeMap<Op, u64>,
    /// Every object, as listings were to be remembered.
    listed: Vec<Listed>,
    /// Puts that were given up, and when they happen.
    given_up: Vec<(Duration, GivenUp)>,
}

type GivenUp = (String, Vec<Bytes>, Condition);

/// A bucket with faults before another one.
pub struct Faulty {
    inner: Arc<dyn Bucket>,
    time: Arc<dyn Time>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faulty").finish_non_exhaustive()
    }
}

impl Faulty {
    /// A bucket without faults so far.
    pub fn new(inner: Arc<dyn Bucket>, time: Arc<dyn Time>, seed: u64) -> Arc<Self> {
        let state = State {
            plan: Plan::default(),
            conditional: Conditional::default(),
            random: seed | 1,
            asked: BTreeMap::new(),
            listed: Vec::new(),
            given_up: Vec::new(),
        };
        Arc::new(Self { inner, time, state: Mutex::new(state) })
    }

    /// Sets what goes wrong from now on.
    pub fn plan(&self, plan: Plan) {
        self.state.lock().unwrap().plan = plan;
    }

    /// Sets what becomes of conditions of puts.
    pub fn conditional(&self, conditional: Conditional) {
        self.state.lock().unwrap().conditional = conditional;
    }

    /// The condition that is kept of this one.
    fn kept(&self, condition: Condition) -> Result<Condition, Fault> {
        match (self.state.lock().unwrap().conditional, condition) {
            (Conditional::Kept, condition)
            | (Conditional::MatchIgnored, condition @ Condition::Absent)
            | (_, condition @ Condition::Any) => Ok(condition),
            (Conditional::Ignored | Conditional::MatchIgnored, _) => Ok(Condition::Any),
            (Conditional::Refused, _) => Err(Fault::Refused("501 Not Implemented".to_owned())),
        }
    }

    /// Everything goes wrong in this way, or nothing does.
    pub fn all(&self, kind: Option<Kind>) {
        self.plan(Plan { all: kind, ..Plan::default() });
    }

    /// The next request of a kind goes wrong, and no other.
    pub fn next(&self, op: Op, kinds: &[Option<Kind>]) {
        self.plan(Plan { next: BTreeMap::from([(op, kinds.to_vec())]), ..Plan::default() });
    }

    /// The next `well` requests go well, and every later one goes wrong.
    pub fn fail_from(&self, well: u64, kind: Kind) {
        self.plan(Plan { after: Some((well, kind)), ..Plan::default() });
    }

    /// Listings that are [`Kind::Old`] are from now on what they are now.
    pub async fn remember_listings(&self) {
        let listed = self.inner.list("", None, usize::MAX).await.unwrap();
        self.state.lock().unwrap().listed = listed;
    }

    /// How often something was asked for.
    pub fn asked(&self, op: Op) -> u64 {
        self.state.lock().unwrap().asked.get(&op).copied().unwrap_or(0)
    }

    /// How often anything was.
    pub fn asked_in_all(&self) -> u64 {
        self.state.lock().unwrap().asked.values().sum()
    }

    /// A number below `below`.
    fn draw(&self, below: u64) -> u64 {
        let mut state = self.state.lock().unwrap();
        // Xorshift: the seed decides, and it is never zero.
        state.random ^= state.random << 13;
        state.random ^= state.random >> 7;
        state.random ^= state.random << 17;
        (state.random >> 11) % below.max(1)
    }

    fn drawn(&self, op: Op) -> Option<Kind> {
        let dice = (self.draw(1000), self.draw(1 << 20));
        let mut state = self.state.lock().unwrap();
        *state.asked.entry(op).or_default() += 1;
        if state.plan.all.is_some() {
            return state.plan.all;
        }
        if let Some((well, kind)) = &mut state.plan.after {
            let goes_well = *well > 0;
            *well = well.saturating_sub(1);
            return (!goes_well).then_some(*kind);
        }
        if let Some(next) = state.plan.next.get_mut(&op).filter(|next| !next.is_empty()) {
            return next.remove(0);
        }
        let kinds = &state.plan.kinds;
        let fails = dice.0 < u64::from(state.plan.thousandths) && !kinds.is_empty();
        fails.then(|| kinds[dice.1 as usize % kinds.len()])
    }

    /// Has happen what was given up, if its time has come.
    async fn happen(&self) {
        let now = self.time.now();
        let mut due: Vec<_> =
            self.state.lock().unwrap().given_up.extract_if(.., |(at, _)| *at <= now).collect();
        due.sort_by_key(|(at, _)| *at);
        for (_, (name, body, condition)) in due {
            // There is no one to hear what came of it.
            let _ = self.inner.put(&name, body, condition).await;
        }
    }

    /// An answer that comes late.
    async fn behind<T>(&self, kind: Option<Kind>, answer: T) -> T {
        if let Some(Kind::Late(long)) = kind {
            self.time.sleep(long).await;
        }
        answer
    }

    /// What goes wrong before the request is made; what goes wrong behind it comes back.
    async fn before(&self, op: Op) -> Result<Option<Kind>, Fault> {
        self.happen().await;
        let kind = self.drawn(op);
        match kind {
            Some(Kind::Outage) => Err(Fault::Unreachable("outage".to_owned())),
            Some(Kind::Busy(after)) => Err(Fault::Busy(after)),
            Some(Kind::Denied) => Err(Fault::Denied("expired".to_owned())),
            Some(Kind::Forbidden) => Err(Fault::Forbidden("not for you".to_owned())),
            Some(Kind::Missing) if matches!(op, Op::Get | Op::Range | Op::Head) => Err(Fault::Missing),
            Some(Kind::Changed) if op == Op::Swap => Err(Fault::Changed),
            Some(Kind::Slow(long)) => {
                self.time.sleep(long).await;
                self.happen().await;
                Ok(None)
            }
            Some(Kind::Silent) => {
                std::future::pending::<()>().await;
                Ok(None)
            }
            other => Ok(other),
        }
    }

    fn spoilt(&self, kind: Option<Kind>, bytes: Bytes) -> Result<Bytes, Fault> {
        let len = bytes.len() as u64;
        Ok(match kind {
            Some(Kind::Truncated) => bytes.slice(..self.draw(len) as usize),
            Some(Kind::Longer) => [bytes.as_ref(), &[7]].concat().into(),
            Some(Kind::Altered) if len > 0 => {
                let mut altered = bytes.to_vec();
                altered[self.draw(len) as usize] ^= 1 << self.draw(8);
                altered.into()
            }
            Some(Kind::Lost) => return Err(Fault::Unreachable("lost".to_owned())),
            _ => bytes,
        })
    }
}

fn lost<T>(kind: Option<Kind>, value: T) -> Result<T, Fault> {
    if kind == Some(Kind::Lost) { Err(Fault::Unreachable("lost".to_owned())) } else { Ok(value) }
}

impl Bucket for Faulty {
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        Box::pin(async move {
            let kind = self.before(Op::Get).await?;
            let (bytes, tag) = self.behind(kind, self.inner.get(name, most).await).await?;
            Ok((self.spoilt(kind, bytes)?, tag))
        })
    }

    fn get_range<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        into: &'a Places,
    ) -> BoxFuture<'a, Result<u64, Fault>> {
        Box::pin(async move {
            let kind = self.before(Op::Range).await?;
            let (own, memory) = Places::of_own(range.end - range.start)?;
            let came = self.inner.get_range(name, range, &own).await?;
            let mut bytes = memory.to_vec();
            bytes.truncate(came as usize);
            let spoilt = self.spoilt(kind, bytes.into())?;
            let Some(Kind::Trickle(long)) = kind else {
                into.take(0, &spoilt)?;
                return Ok(spoilt.len() as u64);
            };
            let each = spoilt.len().div_ceil(8).max(1);
            for (at, piece) in (0u64..).step_by(each).zip(spoilt.chunks(each)) {
                self.time.sleep(long).await;
                into.take(at, piece)?;
            }
            Ok(spoilt.len() as u64)
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>> {
        Box::pin(async move {
            let kind = self.before(Op::Head).await?;
            lost(kind, self.inner.head(name).await?)
        })
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Vec<Bytes>,
        condition: Condition,
    ) -> BoxFuture<'a, Result<Tag, Fault>> {
        Box::pin(async move {
            let op = if condition == Condition::Any { Op::Put } else { Op::Swap };
            let kind = self.before(op).await?;
            let condition = self.kept(condition)?;
            if let Some(Kind::Afterwards(long)) = kind {
                let at = self.time.now() + long;
                self.state.lock().unwrap().given_up.push((at, (name.to_owned(), body, condition)));
                return Err(Fault::Unreachable("given up".to_owned()));
            }
            lost(kind, self.behind(kind, self.inner.put(name, body, condition).await).await?)
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>> {
        Box::pin(async move {
            let kind = self.before(Op::Delete).await?;
            lost(kind, self.inner.delete(name).await?)
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: usize,
    ) -> BoxFuture<'a, Result<Vec<Listed>, Fault>> {
        Box::pin(async move {
            let kind = self.before(Op::List).await?;
            if kind == Some(Kind::Old) {
                let listed = self.state.lock().unwrap().listed.clone();
                let is_of = |one: &Listed| {
                    one.name.starts_with(prefix) && after.is_none_or(|after| one.name.as_str() > after)
                };
                return Ok(listed.into_iter().filter(is_of).take(most).collect());
            }
            let mut listed = lost(kind, self.inner.list(prefix, after, most).await?)?;
            if kind == Some(Kind::Stale) {
                let kept = self.draw(listed.len() as u64 + 1) as usize;
                listed.truncate(kept);
            }
            Ok(listed)
        })
    }

    fn answered_ms(&self) -> Option<u64> {
        self.inner.answered_ms()
    }
}
