//! Own reads while clients want what is in the bucket and the bucket fails, in one way after the other, beside the same reads
//! alone. `working` is the same with a bucket that does not fail.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use kvarts_cold::promote::restore_into;
use kvarts_cold::restore::FetchOptions;
use kvarts_layout::BlockKey;
use kvarts_server::cold::ColdTier;
use kvarts_terminal::Failure;

use super::ColdArgs;
use super::beside::{Reader, phases};
use super::objects::Trouble;
use super::restores::{forget, restored, wanted};
use super::stage::{Stage, config};
use crate::pairs::Summary;
use crate::report::Report;
use crate::setup::key;

/// The series of keys of what own reads want, and of what is spilled.
const OWN: u64 = 15;
const SPILLED: u64 = 16;
/// Where the packs lie that cannot be had.
const BELOW: &str = "trouble";
/// Restores at once, and how often.
const RESTORES: usize = 8;
const ROUND: Duration = Duration::from_millis(500);
/// How long after each other sweeps begin, as a server's do; after one that failed, a server's wait longer.
const SWEEPS: Duration = Duration::from_secs(5);

/// Measures all troubles. A real bucket does not fail when it is asked to.
pub(super) fn measure(stage: &Stage, arguments: &ColdArgs, report: &mut Report) -> Result<(), Failure> {
    let Some(objects) = &stage.objects else {
        report.note("trouble: SKIPPED, because failures cannot be injected into a real bucket");
        return Ok(());
    };
    let reader = Reader::new(stage, OWN, arguments.mib << 20)?;
    let keys = stage.keys(arguments.mib.min(64));
    let tier = stage.tier(stage.bucket(BELOW)?);
    stage.push(&tier, &keys)?;
    let spilled: Vec<BlockKey> = (0..8).map(|block| key(SPILLED, block)).collect();
    stage.subject.fill(stage.store(), &spilled, 4, None)?;
    let options = FetchOptions::default();
    // The manifest and the indexes are known, as to a server at work.
    restored(stage, &tier, &keys, &options)?;
    forget(stage, &keys)?;
    let (mut worst, mut working) = (None::<Summary>, None);
    let troubles = Trouble::ALL.map(|(name, trouble)| (name, Some(trouble)));
    for (number, (name, trouble)) in (0..).zip([("working", None)].into_iter().chain(troubles)) {
        let before = objects.troubled();
        objects.set(trouble);
        let bucket = stage.bucket(&format!("{BELOW}-{name}"))?;
        let _inside = stage.runtime.enter();
        let cold = ColdTier::over(bucket, &config(arguments.spill_rate()), stage.store(), None, number);
        let cold = cold.map_err(Failure::User)?;
        let swept = Mutex::new(None::<Instant>);
        let is_time = || {
            let mut swept = swept.lock().unwrap_or_else(PoisonError::into_inner);
            let is_time = swept.is_none_or(|last| last.elapsed() >= SWEEPS);
            *swept = if is_time { Some(Instant::now()) } else { *swept };
            is_time
        };
        let work = || {
            let begun = Instant::now();
            stage.runtime.block_on(async {
                let each = keys.len().div_ceil(RESTORES);
                let restores = keys.chunks(each).map(|some| {
                    let wanted = wanted(stage, some);
                    let (tier, store, options) = (&tier, stage.store(), &options);
                    // What fails is what is measured.
                    async move { restore_into(tier, store, &wanted, options).await.is_ok() }
                });
                let sweep = async {
                    if is_time() {
                        drop(cold.sweep().await)
                    }
                };
                let (_, ()) = tokio::join!(join_all(restores), sweep);
            });
            std::thread::sleep(ROUND.saturating_sub(begun.elapsed()));
            // Some came, late.
            forget(stage, &keys)?;
            Ok(0)
        };
        let measured = phases(&reader, arguments, &work);
        objects.set(None);
        stage.runtime.block_on(cold.stop());
        let measured = measured?;
        if trouble.is_some() && objects.troubled() == before {
            return Err(Failure::User(format!("no request reached the bucket during the failure {name}")));
        }
        match trouble {
            Some(_) => {
                worst = worst.filter(|worst| worst.median > measured.ratio.median).or(Some(measured.ratio))
            }
            None => working = Some(measured.ratio),
        }
        measured.tell(report, name);
        stage.clean(&format!("{BELOW}-{name}"))?;
    }
    if let (Some(worst), Some(working)) = (worst, working) {
        report.median("trouble_p99_ratio", worst.by(&working));
    }
    stage.clean(BELOW)
}
