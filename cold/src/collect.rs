//! Takes out of a bucket what is not to be kept, in two steps that are a grace apart.
//!
//! Guarantee: a pack that a manifest names is never deleted. What is to go is first moved from the packs that count to those that are
//! condemned, in one change of the manifest; its objects are deleted when the grace is over. A reader with an older manifest has a
//! miss then, and nothing else. Any number of collectors may run beside pushes and each other: to condemn is a compare-and-set, to
//! delete twice is to delete once, and a name that was condemned is not used again.
//!
//! Clocks: a collector whose clock is not the bucket's changes nothing. What is too old is so by the clock of who pushed it and by the
//! bucket's, so that a pusher whose clock is slow loses nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use kvarts_layout::NamespaceId;

use crate::check::lying;
use crate::error::ColdError;
use crate::format::manifest::{CONDEMNED_MAX, Manifest};
use crate::format::{PackId, names};
use crate::tier::Tier;

/// The shortest grace: far above the time after which a push gives a name up, and above what clocks may differ by.
pub const GRACE_LEAST: Duration = Duration::from_secs(3600);

/// How far the clock here and the bucket's may be apart: far below the grace.
pub const CLOCKS_APART: Duration = Duration::from_secs(900);

/// What is kept.
#[derive(Clone, Debug)]
pub struct Retention {
    /// Packs that were added longer ago go.
    pub age: Option<Duration>,
    /// The packs of a namespace take at most this number of bytes: those that were added first go.
    pub stored_bytes: Option<u64>,
    /// Between the decision and the deletion; at least [`GRACE_LEAST`].
    pub grace: Duration,
    /// Nothing is changed, and what would be is told.
    pub dry_run: bool,
}

impl Default for Retention {
    fn default() -> Self {
        Self { age: None, stored_bytes: None, grace: Duration::from_secs(24 * 3600), dry_run: false }
    }
}

/// What a collection of a namespace came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Collected {
    /// Packs that count no longer since all their blocks expired.
    pub expired: u64,
    /// Since they are too old.
    pub aged: u64,
    /// Since the namespace takes too much.
    pub over_budget: u64,
    /// Packs without a manifest that names them, left by pushes that did not end.
    pub orphans: u64,
    /// Packs that were deleted, their grace being over.
    pub deleted: u64,
    /// Bytes of the objects that were deleted.
    pub deleted_bytes: u64,
    /// Packs that wait for their deletion.
    pub waiting: u64,
}

/// Collects what is not to be kept of a namespace.
pub async fn collect(
    tier: &Tier,
    namespace: NamespaceId,
    retention: &Retention,
) -> Result<Collected, ColdError> {
    let grace_ms = millis(retention.grace.max(GRACE_LEAST));
    // The listing first: what is named by then is no orphan, and what is put after it is not listed.
    let [packs, indexes] = lying(tier, namespace).await?;
    let now_ms = tier.access().time().wall_ms();
    let apart_ms = tier.access().answered_ms().map_or(0, |theirs| theirs.abs_diff(now_ms));
    if apart_ms > millis(CLOCKS_APART) {
        return Err(ColdError::Clocks(apart_ms));
    }
    let old_ms = now_ms.saturating_sub(grace_ms);
    let lost: Vec<PackId> = packs
        .iter()
        .chain(&indexes)
        .filter(|(_, listed)| listed.modified_ms <= old_ms)
        .map(|(pack, _)| *pack)
        .collect();
    let aged_ms = retention.age.map(|age| now_ms.saturating_sub(millis(age)));
    let aged = |pack: &PackId| {
        let listed = packs.get(pack).map(|listed| listed.modified_ms);
        aged_ms.is_some_and(|aged_ms| listed.is_some_and(|modified_ms| modified_ms <= aged_ms))
    };
    let lists = Lists { lost: &lost, aged: packs.keys().filter(|pack| aged(pack)).copied().collect() };
    let mut collected = Collected::default();
    let manifest = if retention.dry_run {
        let mut manifest = tier.read_manifest(namespace).await?.manifest.clone();
        condemn(&mut manifest, &lists, retention, now_ms, &mut collected);
        manifest
    } else {
        tier.change(namespace, |manifest| {
            // Another writer was faster: from the beginning.
            collected = Collected::default();
            Ok(condemn(manifest, &lists, retention, now_ms, &mut collected).then_some(()))
        })
        .await?;
        tier.read_manifest(namespace).await?.manifest.clone()
    };
    let over: Vec<PackId> =
        manifest.condemned.iter().filter(|(_, at)| **at <= old_ms).map(|(pack, _)| *pack).collect();
    for pack in &over {
        if !retention.dry_run {
            // The index first: without one no reader asks for the pack.
            tier.access().delete(&names::index(namespace, *pack)).await?;
            tier.access().delete(&names::pack(namespace, *pack)).await?;
        }
        let bytes = [&packs, &indexes].map(|lying| lying.get(pack).map_or(0, |listed| listed.bytes));
        collected.deleted += 1;
        collected.deleted_bytes += bytes.iter().sum::<u64>();
    }
    collected.waiting = manifest.condemned.len().saturating_sub(over.len()) as u64;
    if !over.is_empty() && !retention.dry_run {
        tier.change(namespace, |manifest| {
            let before = manifest.condemned.len();
            manifest.condemned.retain(|pack, _| !over.contains(pack));
            Ok((manifest.condemned.len() < before).then_some(()))
        })
        .await?;
    }
    Ok(collected)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What the bucket's listing says of packs.
struct Lists<'a> {
    /// Those that no manifest named for so long that no push can be under way.
    lost: &'a [PackId],
    /// Those that are too old by the bucket's clock.
    aged: BTreeSet<PackId>,
}

/// Moves what is to go to the condemned. Whether anything was.
fn condemn(
    manifest: &mut Manifest,
    Lists { lost, aged: old }: &Lists<'_>,
    retention: &Retention,
    now_ms: u64,
    collected: &mut Collected,
) -> bool {
    let room = |manifest: &Manifest| CONDEMNED_MAX.saturating_sub(manifest.condemned.len());
    let aged = retention.age.map(|age| now_ms.saturating_sub(millis(age)));
    let mut packs: Vec<_> =
        manifest.packs.iter().map(|(pack, entry)| (entry.added_ms, *pack, entry)).collect();
    packs.sort_unstable_by_key(|(added_ms, pack, _)| (*added_ms, *pack));
    let mut stored = manifest.stored_bytes();
    let (mut going, mut left) = (Vec::new(), room(manifest));
    // Those whose time is over first: what they took is no reason to let others go.
    for is_over_budget in [false, true] {
        for (added_ms, pack, entry) in &packs {
            let is_expired = entry.expires_ms != 0 && entry.expires_ms <= now_ms;
            let is_aged = aged.is_some_and(|aged| *added_ms <= aged) && old.contains(pack);
            let goes = match is_over_budget {
                false => is_expired || is_aged,
                true => !(is_expired || is_aged) && retention.stored_bytes.is_some_and(|most| stored > most),
            };
            if !goes || left == 0 {
                continue;
            }
            let count = match (is_over_budget, is_expired) {
                (true, _) => &mut collected.over_budget,
                (false, true) => &mut collected.expired,
                (false, false) => &mut collected.aged,
            };
            *count += 1;
            left -= 1;
            stored = stored.saturating_sub(entry.stored_bytes());
            going.push(*pack);
        }
    }
    for pack in &going {
        manifest.packs.remove(pack);
        manifest.condemned.insert(*pack, now_ms);
    }
    let mut changed = !going.is_empty();
    for pack in *lost {
        let is_known = manifest.packs.contains_key(pack) || manifest.condemned.contains_key(pack);
        if !is_known && room(manifest) > 0 {
            manifest.condemned.insert(*pack, now_ms);
            collected.orphans += 1;
            changed = true;
        }
    }
    changed
}
