//! Every request to the bucket goes through here: it is counted against the budgets of the day, repeated a few times where
//! that can help, and hardly made while the bucket answers nothing useful (`outage`). A bucket that asks for fewer requests is in no outage: half as
//! many ranges are read at once (`turns`). Manifests are asked for and changed all the same, so that deletes go on.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};

use crate::bucket::{Bucket, Condition, Facts, Listed, Tag};
use crate::error::ColdError;
use crate::fault::Fault;
use crate::format::names::{INDEXES, MANIFESTS, PACKS};
use crate::outage::{Bounds, Outage};
use crate::places::Places;
use crate::time::{BoxFuture, Time};
use crate::turns::{Turn, Turns};

const DAY_MS: u64 = 86_400_000;
/// This part of each budget is not for blocks: when those have spent the rest, manifests can still be changed, so that deletes reach the
/// bucket.
const KEPT_BACK: u64 = 16;

/// What a request takes from the budgets of the day, beside itself.
#[derive(Clone, Copy, Debug, Default)]
struct Takes {
    written: u64,
    /// `None` if it reads no object. What is longer than was known before is counted when it has come.
    read: Option<u64>,
    /// It is about a pack or an index, so part of each budget is not for it.
    is_for_blocks: bool,
    /// It has a turn of those that ranges have.
    has_turn: bool,
}

/// How much may be asked of a bucket.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests a day, repeated ones included.
    pub requests_a_day: u64,
    /// Bytes written a day.
    pub written_bytes_a_day: u64,
    /// Bytes read a day.
    pub read_bytes_a_day: u64,
    /// How often one request is made at most.
    pub attempts: u32,
    /// The wait before the second attempt; each further one is twice as long.
    pub first_wait: Duration,
    /// The longest wait, also where the bucket asks for a longer one.
    pub longest_wait: Duration,
    /// How long one attempt may take, beside the time for its bytes.
    pub patience: Duration,
    /// The slowest rate that is put up with, in bytes a second.
    pub slowest_rate: u64,
    /// Ranges of packs that are read at once. More at once come later each: what is stored, and given to reads, while the rest is on its way
    /// becomes less.
    pub ranges_at_once: usize,
    /// After this number of failures...
    pub failures_before_pause: u32,
    /// ...over this time without any useful answer the bucket is left alone.
    pub silence_before_pause: Duration,
    /// While it is, one request is let through at least this often.
    pub pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests_a_day: 1_000_000,
            written_bytes_a_day: 1 << 40,
            read_bytes_a_day: 4 << 40,
            attempts: 4,
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_secs(10),
            patience: Duration::from_secs(10),
            slowest_rate: 1 << 20,
            ranges_at_once: 16,
            failures_before_pause: 8,
            silence_before_pause: Duration::from_secs(3),
            pause: Duration::from_secs(30),
        }
    }
}

/// What was asked of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Spent {
    /// Requests.
    pub requests: u64,
    /// Of these, repeated ones.
    pub retries: u64,
    /// Of these, ranges that were asked for a second time because they were late.
    pub hedges: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    day: u64,
    today: Spent,
    total: Spent,
    outage: Outage,
    /// The bucket asked for no request for blocks before.
    not_before: Duration,
    random: u64,
}

/// The way to a bucket.
pub struct Access {
    bucket: Arc<dyn Bucket>,
    time: Arc<dyn Time>,
    limits: Limits,
    state: Mutex<State>,
    turns: Turns,
}

impl Takes {
    fn about(name: &str) -> Self {
        Self { is_for_blocks: name.starts_with(PACKS) || name.starts_with(INDEXES), ..Self::default() }
    }
}

/// The part of a budget that is for blocks.
fn for_blocks(limit: u64) -> u64 {
    limit - limit / KEPT_BACK
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Access {
    /// A way to `bucket`. The seed spreads the waits of several nodes.
    pub fn new(bucket: Arc<dyn Bucket>, time: Arc<dyn Time>, limits: Limits, seed: u64) -> Self {
        let state = State { random: seed, ..State::default() };
        let turns = Turns::new(limits.ranges_at_once);
        Self { bucket, time, limits, state: Mutex::new(state), turns }
    }

    /// A turn to read a range, until it is dropped.
    pub(crate) async fn turn(&self) -> Turn<'_> {
        self.turns.take().await
    }

    /// Ranges of packs that may be read at once now.
    pub fn ranges_at_once(&self) -> usize {
        self.turns.allowed()
    }

    fn bounds(&self) -> Bounds {
        let Limits { failures_before_pause, silence_before_pause, pause, .. } = self.limits;
        Bounds { failures: failures_before_pause, time: silence_before_pause, pause }
    }

    /// Its clocks.
    pub fn time(&self) -> &Arc<dyn Time> {
        &self.time
    }

    /// What was asked since the start.
    pub fn spent(&self) -> Spent {
        self.lock().total
    }

    /// What was asked today (UTC).
    pub fn today(&self) -> Spent {
        let day = self.time.wall_ms() / DAY_MS;
        let state = self.lock();
        if state.day == day { state.today } else { Spent::default() }
    }

    /// How much may be asked.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Counters only: each change is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Bucket::answered_ms`].
    pub fn answered_ms(&self) -> Option<u64> {
        self.bucket.answered_ms()
    }

    /// As [`Bucket::keeps_versions`].
    pub fn keeps_versions(&self) -> bool {
        self.bucket.keeps_versions()
    }

    /// Whether the bucket is left alone now.
    pub fn is_paused(&self) -> bool {
        self.lock().outage.is_on()
    }

    /// Bytes of packs that may still be read today; none while the bucket is left alone or no request is left.
    pub fn readable(&self) -> u64 {
        let today = self.today();
        if self.is_paused() || today.requests >= for_blocks(self.limits.requests_a_day) {
            return 0;
        }
        for_blocks(self.limits.read_bytes_a_day).saturating_sub(today.read_bytes)
    }

    /// Takes one request, and bytes, from the budgets of the day. What it does not use does not stop it.
    fn take(&self, takes: Takes, is_retry: bool) -> Result<(), ColdError> {
        let (now, day) = (self.time.now(), self.time.wall_ms() / DAY_MS);
        let mut state = self.lock();
        if takes.is_for_blocks && !state.outage.lets_through(now, self.bounds()) {
            return Err(ColdError::Paused);
        }
        if state.day != day {
            (state.day, state.today) = (day, Spent::default());
        }
        let (today, limits) = (state.today, &self.limits);
        let own = |limit| if takes.is_for_blocks { for_blocks(limit) } else { limit };
        let (written, read) = (takes.written, takes.read.unwrap_or(0));
        if today.requests >= own(limits.requests_a_day) {
            return Err(ColdError::Budget("requests"));
        }
        if written > 0 && today.written_bytes.saturating_add(written) > own(limits.written_bytes_a_day) {
            return Err(ColdError::Budget("bytes written"));
        }
        let reads_at_least = takes.read.map_or(0, |read| read.max(1));
        if reads_at_least > 0
            && today.read_bytes.saturating_add(reads_at_least) > own(limits.read_bytes_a_day)
        {
            return Err(ColdError::Budget("bytes read"));
        }
        let State { today, total, .. } = &mut *state;
        for spent in [today, total] {
            spent.requests += 1;
            spent.retries += u64::from(is_retry);
            spent.written_bytes = spent.written_bytes.saturating_add(written);
            spent.read_bytes = spent.read_bytes.saturating_add(read);
        }
        Ok(())
    }

    /// Counts what was read beyond what a request had taken before.
    fn took(&self, read: u64) {
        let mut state = self.lock();
        let State { today, total, .. } = &mut *state;
        for spent in [today, total] {
            spent.read_bytes = spent.read_bytes.saturating_add(read);
        }
    }

    /// Whether a late range may be asked for once more: at most one request in ten is.
    pub(crate) fn may_hedge(&self) -> bool {
        let mut state = self.lock();
        let may = state.total.hedges.saturating_mul(10) <= state.total.requests;
        state.total.hedges += u64::from(may);
        state.today.hedges += u64::from(may);
        may
    }

    /// Notes what came of a request that was made at `begun`.
    fn answered(&self, outcome: Option<&Fault>, begun: Duration, takes: Takes) {
        let now = self.time.now();
        let mut state = self.lock();
        let is_failure =
            |fault: &Fault| fault.is_passing() || matches!(fault, Fault::Denied(_) | Fault::NoBucket);
        if !outcome.is_some_and(is_failure) {
            state.outage.ends();
            if takes.has_turn {
                self.turns.grow();
            }
            return;
        }
        state.total.failures += 1;
        state.today.failures += 1;
        let Some(Fault::Busy(asked)) = outcome else { return state.outage.failed(now, self.bounds()) };
        let wait = asked.unwrap_or_default().min(self.limits.longest_wait);
        state.not_before = state.not_before.max(now.saturating_add(wait));
        // Requests that were made at once are one sign of trouble.
        if self.turns.halve(begun, now) {
            state.outage.failed(now, self.bounds());
        }
    }

    fn is_time_to_look(&self) -> bool {
        let now = self.time.now();
        let mut state = self.lock();
        state.outage.is_on() && state.outage.lets_through(now, self.bounds())
    }

    /// Whether a bucket that is left alone answers again, if it is time to look.
    pub async fn look(&self) {
        if self.is_time_to_look() {
            // What came of it is noted.
            let _ = self.list(MANIFESTS, None, 1).await;
        }
    }

    /// How long to wait before the next attempt: at least what the bucket asks for, within the longest wait; between half and
    /// all of a time that doubles.
    fn wait(&self, attempt: u32, asked: Option<Duration>) -> Duration {
        let doubled = self.limits.first_wait.saturating_mul(1 << attempt.min(16));
        let longest = doubled.min(self.limits.longest_wait);
        let mut state = self.lock();
        // An LCG's upper bits: it only has to differ between nodes.
        state.random =
            state.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let part = (state.random >> 40) as f64 / (1u64 << 24) as f64;
        let own = longest.mul_f64(0.5 + part / 2.0);
        own.max(asked.unwrap_or_default()).min(self.limits.longest_wait)
    }

    /// Waits as a writer does that has lost a race for an object, before the next one.
    pub(crate) async fn wait_for_turn(&self, attempt: u32) {
        self.time.sleep(self.wait(attempt.min(5), None) / 4).await;
    }

    /// Makes a request until it succeeds, cannot succeed, or was made often enough.
    async fn asked<'a, T>(
        &'a self,
        name: &str,
        takes: Takes,
        ask: impl Fn() -> BoxFuture<'a, Result<T, Fault>>,
    ) -> Result<T, ColdError> {
        let bytes = takes.written.saturating_add(takes.read.unwrap_or(0));
        let long = Duration::from_secs(bytes.checked_div(self.limits.slowest_rate).unwrap_or(0));
        let patience = self.limits.patience.saturating_add(long);
        let mut attempt = 0;
        loop {
            self.wait_as_asked(takes).await;
            self.take(takes, attempt > 0)?;
            let begun = self.time.now();
            let outcome = match select(ask(), self.time.sleep(patience)).await {
                Either::Left((outcome, _)) => outcome,
                Either::Right(_) => {
                    let seconds = patience.as_secs_f64();
                    Err(Fault::Unreachable(format!("the bucket has not responded within {seconds:.1} s")))
                }
            };
            self.answered(outcome.as_ref().err(), begun, takes);
            let fault = match outcome {
                Ok(value) => return Ok(value),
                Err(fault) => fault,
            };
            attempt += 1;
            // While the bucket is left alone one attempt tells as much as several.
            if !fault.is_passing() || attempt >= self.limits.attempts || self.is_paused() {
                return Err(ColdError::Bucket(name.to_owned(), fault));
            }
            let asked = if let Fault::Busy(asked) = fault { asked } else { None };
            let wait = self.time.sleep(self.wait(attempt - 1, asked));
            if takes.has_turn {
                self.turns.step_aside(wait).await;
            } else {
                // ends: `longest_wait`, of which the sleep is made
                wait.await;
            }
        }
    }

    /// Waits as long as the bucket asked for no requests, with one for blocks.
    async fn wait_as_asked(&self, takes: Takes) {
        let left = self.lock().not_before.saturating_sub(self.time.now());
        if takes.is_for_blocks && !left.is_zero() {
            self.time.sleep(left).await;
        }
    }

    /// As [`Bucket::get`], of an object of which it is not known how long it is.
    pub async fn get(&self, name: &str, most: u64) -> Result<(Bytes, Tag), ColdError> {
        self.get_known(name, 0, most).await
    }

    /// The same of one that has `bytes` bytes as far as is known: it has the time that those take, and they count if it does not come, too.
    pub async fn get_known(&self, name: &str, bytes: u64, most: u64) -> Result<(Bytes, Tag), ColdError> {
        let takes = Takes { read: Some(bytes.min(most)), ..Takes::about(name) };
        let (came, tag) = self.asked(name, takes, || self.bucket_get(name, most)).await?;
        self.took((came.len() as u64).saturating_sub(bytes));
        Ok((came, tag))
    }

    fn bucket_get<'a>(&'a self, name: &str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        let name = name.to_owned();
        Box::pin(async move {
            let (bytes, tag) = self.bucket.get(&name, most).await?;
            if bytes.len() as u64 > most { Err(Fault::Length) } else { Ok((bytes, tag)) }
        })
    }

    /// As [`Bucket::get_range`], for a caller that has a turn.
    pub async fn get_range(&self, name: &str, range: Range<u64>, into: &Places) -> Result<(), ColdError> {
        let wanted = range.end.saturating_sub(range.start);
        let ask = || -> BoxFuture<'_, Result<(), Fault>> {
            let (name, range, into) = (name.to_owned(), range.clone(), into.clone());
            Box::pin(async move {
                let came = self.bucket.get_range(&name, range, &into).await?;
                if came == wanted { Ok(()) } else { Err(Fault::Length) }
            })
        };
        let takes = Takes { read: Some(wanted), has_turn: true, ..Takes::about(name) };
        self.asked(name, takes, ask).await
    }

    /// As [`Bucket::head`].
    pub async fn head(&self, name: &str) -> Result<Facts, ColdError> {
        let ask = || -> BoxFuture<'_, Result<Facts, Fault>> {
            let name = name.to_owned();
            Box::pin(async move { self.bucket.head(&name).await })
        };
        self.asked(name, Takes::default(), ask).await
    }

    /// As [`Bucket::put`]. A conditional put that is repeated may meet its own first attempt: who gets
    /// [`Fault::Changed`] looks again.
    pub async fn put(&self, name: &str, body: &[Bytes], condition: Condition) -> Result<Tag, ColdError> {
        let len = body.iter().map(|piece| piece.len() as u64).fold(0, u64::saturating_add);
        let ask = || -> BoxFuture<'_, Result<Tag, Fault>> {
            let (name, body, condition) = (name.to_owned(), body.to_vec(), condition.clone());
            Box::pin(async move { self.bucket.put(&name, body, condition).await })
        };
        self.asked(name, Takes { written: len, ..Takes::about(name) }, ask).await
    }

    /// As [`Bucket::delete`].
    pub async fn delete(&self, name: &str) -> Result<(), ColdError> {
        let ask = || -> BoxFuture<'_, Result<(), Fault>> {
            let name = name.to_owned();
            Box::pin(async move { self.bucket.delete(&name).await })
        };
        self.asked(name, Takes::default(), ask).await
    }

    /// As [`Bucket::list`].
    pub async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        most: usize,
    ) -> Result<Vec<Listed>, ColdError> {
        let ask = || -> BoxFuture<'_, Result<Vec<Listed>, Fault>> {
            let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
            Box::pin(async move { self.bucket.list(&prefix, after.as_deref(), most).await })
        };
        self.asked(prefix, Takes::default(), ask).await
    }

    /// As [`Bucket::tidy`], of what is older than `age`.
    pub async fn tidy(&self, age: Duration, dry_run: bool) -> Result<u64, ColdError> {
        let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let before_ms = self.time.wall_ms().saturating_sub(age_ms);
        let tidied = self.bucket.tidy(before_ms, dry_run).await;
        tidied.map_err(|fault| ColdError::Bucket("the deletion of incomplete files".to_owned(), fault))
    }
}
