//! Own reads while the bucket fails in one way after the other, beside the same reads alone.

use std::time::Duration;

use futures_util::future::join_all;
use kvarts_cold::promote::restore_into;
use kvarts_cold::restore::FetchOptions;
use kvarts_layout::BlockKey;
use kvarts_server::cold::ColdTier;
use kvarts_terminal::Failure;

use super::ColdArgs;
use super::beside::{Reader, config, phases};
use super::objects::Trouble;
use super::restores::{forget, wanted};
use super::stage::Stage;
use crate::report::Report;
use crate::setup::key;

/// The series of keys of what own reads want, and of what is spilled.
const OWN: u64 = 15;
const SPILLED: u64 = 16;
/// Where the packs lie that cannot be had.
const BELOW: &str = "trouble";
/// Restores at once.
const RESTORES: usize = 8;
/// The pause after restores that failed at once.
const PACE: Duration = Duration::from_millis(20);

/// Measures all troubles. A real bucket does not fail when it is asked to.
pub(super) fn measure(stage: &Stage, arguments: &ColdArgs, report: &mut Report) -> Result<(), Failure> {
    let Some(objects) = &stage.objects else {
        report.note("trouble: SKIPPED, a real bucket does not fail when it is asked to");
        return Ok(());
    };
    let reader = Reader::new(stage, OWN, arguments.mib << 20)?;
    let keys = stage.keys(arguments.mib.min(64));
    let tier = stage.restless_tier(stage.bucket(BELOW)?);
    stage.push(&tier, &keys)?;
    let spilled: Vec<BlockKey> = (0..8).map(|block| key(SPILLED, block)).collect();
    stage.subject.fill(stage.store(), &spilled, 4, None)?;
    let options = FetchOptions::default();
    // The manifest and the indexes are known, as to a server at work.
    stage.wait(restore_into(&tier, stage.store(), &wanted(stage, &keys), &options))?;
    forget(stage, &keys)?;
    let mut worst = 0.0_f64;
    for (number, (name, trouble)) in (0..).zip(Trouble::ALL) {
        let before = objects.troubled();
        objects.set(Some(trouble));
        let bucket = stage.bucket(&format!("{BELOW}-{name}"))?;
        // It is as a server's: after some failures it leaves the bucket alone.
        let _inside = stage.runtime.enter();
        let cold = ColdTier::over(bucket, &config(u64::MAX), stage.store(), None, number);
        let cold = cold.map_err(Failure::User)?;
        let work = || {
            stage.runtime.block_on(async {
                let each = keys.len().div_ceil(RESTORES);
                let restores = keys.chunks(each).map(|some| {
                    let wanted = wanted(stage, some);
                    let (tier, store, options) = (&tier, stage.store(), &options);
                    // What fails is what is measured.
                    async move { restore_into(tier, store, &wanted, options).await.is_ok() }
                });
                let (_, _) = tokio::join!(join_all(restores), cold.sweep());
                tokio::time::sleep(PACE).await;
            });
            // Some came, late.
            forget(stage, &keys)?;
            Ok(0)
        };
        let measured = phases(&reader, arguments, &work);
        objects.set(None);
        stage.runtime.block_on(cold.stop());
        let ([ratio, quiet, loud], _) = measured?;
        if objects.troubled() == before {
            return Err(Failure::User(format!("the bucket was asked nothing while it should fail: {name}")));
        }
        worst = worst.max(ratio.median);
        report.median(&format!("{name}_p99_ratio"), ratio);
        report.median(&format!("{name}_p99_ms_alone"), quiet);
        report.median(&format!("{name}_p99_ms"), loud);
        stage.clean(&format!("{BELOW}-{name}"))?;
    }
    report.number("trouble_p99_ratio", worst);
    stage.clean(BELOW)
}
