//! Writes, deletions and listings of a real S3 server that go wrong: an acknowledged one has happened, a spoilt answer is an error, and
//! the same can be done afterwards.
#![allow(clippy::disallowed_methods, reason = "a real server, and its real clock")]

use std::sync::Arc;
use std::time::Duration;

use crate::proxy::{Fault, Proxy};
use crate::s3;
use kvarts_bucket::s3::S3Bucket;
use kvarts_bucket::time::TokioTime;
use kvarts_cold::check::{Level, check, namespaces};
use kvarts_cold::collect::{GRACE_LEAST, Retention, collect};
use kvarts_cold::restore::{FetchOptions, fetch, plan};
use kvarts_cold::testing::{bytes_of, key, namespace, namespace_id, run};
use kvarts_cold::withdraw::{Deleted, withdraw};
use kvarts_cold::{
    Access, Bucket, ColdError, Fault as Said, Limits, PushOptions, Pushed, Pusher, Tier, TierOptions,
};
use object_store::aws::AmazonS3Builder;
use tokio::runtime::Runtime;

const BLOCKS: u32 = 6;

/// What goes wrong with a request that changes something.
const OF_WRITES: [Fault; 9] = [
    Fault::Outage,
    Fault::Unanswered,
    Fault::Busy,
    Fault::TooMany,
    Fault::Failed,
    Fault::Slow,
    Fault::Denied,
    Fault::Expired,
    Fault::NoBucket,
];

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn limits() -> Limits {
    Limits {
        first_wait: Duration::from_millis(1),
        longest_wait: Duration::from_millis(5),
        patience: Duration::from_secs(5),
        failures_before_pause: 1000,
        ..Limits::default()
    }
}

fn bucket(port: u16, name: &str, prefix: &str) -> S3Bucket {
    let builder = AmazonS3Builder::new()
        .with_endpoint(format!("http://127.0.0.1:{port}"))
        .with_region("us-east-1")
        .with_access_key_id("some")
        .with_secret_access_key("secret")
        .with_allow_http(true);
    S3Bucket::new(builder, name, prefix).unwrap()
}

fn tier(port: u16, prefix: &str) -> Tier {
    let bucket: Arc<dyn Bucket> = Arc::new(bucket(port, s3::BUCKET, prefix));
    Tier::new(Access::new(bucket, Arc::new(TokioTime::start()), limits(), 1), TierOptions::default())
}

async fn push(tier: &Tier, prefix: u8) -> Result<Pushed, ColdError> {
    let mut pusher = Pusher::new(tier, PushOptions::default());
    let (run, payload) = run("r1", prefix, 0, BLOCKS);
    pusher.add(&namespace("r1"), &run, &payload).await?;
    pusher.finish().await
}

/// How many blocks of a prefix a reader gets that remembers nothing. Each of them is what was put.
async fn good(port: u16, below: &str, prefix: u8) -> usize {
    let tier = tier(port, below);
    let (run, _) = run("r1", prefix, 0, BLOCKS);
    let keys: Vec<_> = (0..BLOCKS).map(|block| key(prefix, block)).collect();
    let found = tier.locate(namespace_id("r1"), (run.group, run.coordinate), &keys).await.unwrap();
    let wanted: Vec<_> =
        found.into_iter().enumerate().filter_map(|(ordinal, found)| Some((ordinal, found?))).collect();
    let (options, mut came) = (FetchOptions::default(), 0);
    let fetching = fetch(&tier, plan(&wanted, None, &options), &options, |arrived| {
        let Ok(memory) = arrived.bytes else { return };
        assert_eq!(memory.to_vec(), bytes_of(prefix, arrived.part.ordinal as u32), "a wrong byte");
        came += 1;
    });
    fetching.await;
    came
}

/// The bucket as it is without the proxy: nothing is wrong in it.
async fn expect_sound(port: u16, below: &str) {
    let checked = check(&tier(port, below), namespace_id("r1"), Level::Full, false).await.unwrap();
    assert!(checked.found.is_empty(), "{checked:?}");
}

/// The server, the proxy before it, and a place of its own for a case.
struct Stage {
    port: u16,
    proxy: Proxy,
    below: String,
}

impl Stage {
    fn new(server: &s3::Server, below: String) -> Self {
        Self { port: server.port, proxy: Proxy::start(server.port), below }
    }

    fn through(&self) -> Tier {
        tier(self.proxy.port, &self.below)
    }

    /// No error says what a server quoted, and no request is made for ever.
    fn expect_bounded<T: std::fmt::Debug>(&self, outcome: &Result<T, ColdError>, case: &str) {
        let said = format!("{outcome:?}");
        assert!(!said.contains("quoted"), "{case}: {said}");
        assert!(self.proxy.asked() < 60, "{case}: {} requests", self.proxy.asked());
        if case.starts_with("NoBucket") {
            assert!(matches!(outcome, Err(ColdError::Bucket(_, Said::NoBucket))), "{case}: {said}");
        }
        if case.starts_with("Expired") || case.starts_with("Denied") {
            assert!(matches!(outcome, Err(ColdError::Bucket(_, Said::Denied(_)))), "{case}: {said}");
        }
        self.proxy.set(None);
    }
}

#[test]
fn a_push_whose_puts_go_wrong_leaves_nothing_that_is_wrong_and_can_be_made_again() {
    let Some(server) = s3::Server::start() else { return };
    let runtime = runtime();
    for (at, fault) in OF_WRITES.into_iter().enumerate() {
        for of in ["/packs/", "/indexes/", "/manifests/"] {
            let case = format!("{fault:?} of a put to {of}");
            let stage = Stage::new(&server, format!("put-{at}-{}", of.trim_matches('/')));
            let (port, below) = (stage.port, stage.below.as_str());
            runtime.block_on(async {
                push(&tier(port, below), 1).await.unwrap();
                stage.proxy.set(Some((fault, (Some("PUT"), of))));
                let tier = stage.through();
                let outcome = push(&tier, 2).await;
                // A manifest that was put is found to be there.
                let is_done = fault == Fault::Slow || fault == Fault::Unanswered && of == "/manifests/";
                assert_eq!(outcome.is_ok(), is_done, "{case}: {outcome:?}");
                stage.expect_bounded(&outcome, &case);
                let there = if is_done { BLOCKS as usize } else { 0 };
                assert_eq!(good(port, below, 2).await, there, "{case}");
                assert_eq!(good(port, below, 1).await, BLOCKS as usize, "{case}");
                expect_sound(port, below).await;
                push(&tier, 2).await.unwrap();
                assert_eq!(good(port, below, 2).await, BLOCKS as usize, "{case}");
                expect_sound(port, below).await;
            });
        }
    }
}

#[test]
fn a_delete_is_acknowledged_if_the_manifest_was_changed_and_not_otherwise() {
    let Some(server) = s3::Server::start() else { return };
    let runtime = runtime();
    for (at, fault) in OF_WRITES.into_iter().enumerate() {
        let case = format!("{fault:?} of a manifest");
        let stage = Stage::new(&server, format!("withdraw-{at}"));
        let (port, below) = (stage.port, stage.below.as_str());
        runtime.block_on(async {
            push(&tier(port, below), 1).await.unwrap();
            push(&tier(port, below), 2).await.unwrap();
            stage.proxy.set(Some((fault, (Some("PUT"), "/manifests/"))));
            let (tier, keys) = (stage.through(), Deleted::Keys(vec![key(1, 2)]));
            let outcome = withdraw(&tier, namespace_id("r1"), std::slice::from_ref(&keys)).await;
            let is_done = matches!(fault, Fault::Slow | Fault::Unanswered);
            assert_eq!(outcome.is_ok(), is_done, "{case}: {outcome:?}");
            stage.expect_bounded(&outcome, &case);
            let there = if is_done { 0 } else { BLOCKS as usize };
            assert_eq!(good(port, below, 1).await, there, "{case}");
            withdraw(&tier, namespace_id("r1"), std::slice::from_ref(&keys)).await.unwrap();
            assert_eq!(good(port, below, 1).await, 0, "{case}");
            assert_eq!(good(port, below, 2).await, BLOCKS as usize, "{case}");
            expect_sound(port, below).await;
        });
    }
}

fn hourly() -> Retention {
    Retention { grace: GRACE_LEAST, ..Retention::default() }
}

/// Every pack of the namespace has waited for its deletion long enough.
async fn condemn_all(tier: &Tier) {
    let then_ms = tier.access().time().wall_ms() - 2 * 3_600_000;
    let change = |manifest: &mut kvarts_cold::format::Manifest| {
        let packs = std::mem::take(&mut manifest.packs);
        manifest.condemned.extend(packs.into_keys().map(|pack| (pack, then_ms)));
        Ok(Some(()))
    };
    tier.change(namespace_id("r1"), change).await.unwrap();
}

#[test]
fn a_collection_whose_deletions_go_wrong_is_made_again() {
    let Some(server) = s3::Server::start() else { return };
    let runtime = runtime();
    for (at, fault) in OF_WRITES.into_iter().enumerate() {
        for of in ["/packs/", "/indexes/"] {
            let case = format!("{fault:?} of a deletion in {of}");
            let stage = Stage::new(&server, format!("delete-{at}-{}", of.trim_matches('/')));
            let (port, below) = (stage.port, stage.below.as_str());
            runtime.block_on(async {
                push(&tier(port, below), 1).await.unwrap();
                condemn_all(&tier(port, below)).await;
                push(&tier(port, below), 2).await.unwrap();
                stage.proxy.set(Some((fault, (Some("DELETE"), of))));
                let tier = stage.through();
                let outcome = collect(&tier, namespace_id("r1"), &hourly()).await;
                assert_eq!(outcome.is_ok(), fault == Fault::Slow, "{case}: {outcome:?}");
                stage.expect_bounded(&outcome, &case);
                assert_eq!(good(port, below, 2).await, BLOCKS as usize, "{case}");
                let checked = check(&tier, namespace_id("r1"), Level::Full, false).await.unwrap();
                assert_eq!((checked.condemned, checked.orphans), (u64::from(outcome.is_err()), 0), "{case}");
                let again = collect(&tier, namespace_id("r1"), &hourly()).await.unwrap();
                assert_eq!(again.deleted, u64::from(outcome.is_err()), "{case}");
                let checked = check(&tier, namespace_id("r1"), Level::Full, false).await.unwrap();
                assert_eq!((checked.packs, checked.condemned, checked.orphans), (1, 0, 0), "{case}");
                assert!(checked.found.is_empty(), "{case}: {checked:?}");
            });
        }
    }
}

#[test]
fn a_listing_that_goes_wrong_or_is_old_takes_nothing_and_reports_no_damage() {
    let Some(server) = s3::Server::start() else { return };
    let runtime = runtime();
    let others = [Fault::Truncated, Fault::Shorter, Fault::Stale];
    for (at, fault) in OF_WRITES.into_iter().chain(others).enumerate() {
        let case = format!("{fault:?} of a listing");
        let stage = Stage::new(&server, format!("list-{at}"));
        let (port, below) = (stage.port, stage.below.as_str());
        runtime.block_on(async {
            push(&tier(port, below), 1).await.unwrap();
            let faulty = Some((fault, (Some("GET"), "list-type=2")));
            let is_done = matches!(fault, Fault::Slow | Fault::Stale);
            let tier = stage.through();
            stage.proxy.set(faulty);
            let checked = check(&tier, namespace_id("r1"), Level::Full, true).await;
            assert_eq!(checked.is_ok(), is_done, "{case}: {checked:?}");
            assert!(checked.as_ref().map_or(true, |checked| checked.found.is_empty()), "{case}: {checked:?}");
            stage.expect_bounded(&checked, &case);
            stage.proxy.set(faulty);
            // Whatever is old goes, and nothing is known to be.
            let all_old = Retention { age: Some(Duration::ZERO), ..hourly() };
            let collected = collect(&tier, namespace_id("r1"), &all_old).await;
            assert_eq!(collected.is_ok(), is_done, "{case}: {collected:?}");
            if fault == Fault::Stale {
                assert_eq!(collected.as_ref().map(|collected| collected.aged), Ok(0), "{case}");
            }
            stage.expect_bounded(&collected, &case);
            stage.proxy.set(faulty);
            let named = namespaces(&tier).await;
            assert_eq!(named.is_ok(), is_done, "{case}: {named:?}");
            stage.expect_bounded(&named, &case);
            if fault != Fault::Slow {
                assert_eq!(good(port, below, 1).await, BLOCKS as usize, "{case}");
                expect_sound(port, below).await;
            }
            assert_eq!(namespaces(&tier).await.unwrap(), [namespace_id("r1")], "{case}");
        });
    }
}

#[test]
fn a_bucket_that_is_not_there_is_not_an_empty_one() {
    let Some(server) = s3::Server::start() else { return };
    let gone: Arc<dyn Bucket> = Arc::new(bucket(server.port, "never-made", "tier"));
    let limits = Limits { failures_before_pause: 8, silence_before_pause: Duration::ZERO, ..limits() };
    let tier = Tier::new(Access::new(gone, Arc::new(TokioTime::start()), limits, 1), TierOptions::default());
    runtime().block_on(async {
        let is_said =
            |error: ColdError| assert!(matches!(error, ColdError::Bucket(_, Said::NoBucket)), "{error}");
        is_said(tier.read_manifest(namespace_id("r1")).await.unwrap_err());
        is_said(namespaces(&tier).await.unwrap_err());
        is_said(push(&tier, 1).await.unwrap_err());
        is_said(withdraw(&tier, namespace_id("r1"), &[Deleted::Namespace]).await.unwrap_err());
        for _ in 0..8 {
            is_said(tier.read_manifest(namespace_id("r1")).await.unwrap_err());
        }
        assert!(tier.access().is_paused(), "it is asked again and again");
    });
}
