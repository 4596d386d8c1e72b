//! `kvarts cold`: the cold tier in a bucket, looked at and changed by hand.
#![allow(
    clippy::disallowed_methods,
    reason = "offline commands on real files, a real bucket and the real clock"
)]

mod check;
mod collect;
mod push;
mod restore;
mod show;

use std::io::Write;
use std::sync::Arc;

use clap::{Args, Subcommand};
use kvarts_bucket::time::TokioTime;
use kvarts_cold::check::namespaces;
use kvarts_cold::{Access, ColdError, Conditions, Fault, Limits, Spent, Tier, TierOptions};
use kvarts_layout::NamespaceId;
use kvarts_terminal::Failure;
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::offline::now_ms;

/// The arguments of `cold`.
#[derive(Args, Debug)]
pub(crate) struct ColdArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Upload blocks of a store to the bucket
    Push(push::PushArgs),
    /// Restore blocks of the bucket into a store
    Restore(restore::RestoreArgs),
    /// List the namespaces of the bucket
    Ls(show::LsArgs),
    /// Show the packs of a namespace
    Stat(show::StatArgs),
    /// Check the bucket, and repair it with --repair
    Fsck(check::FsckArgs),
    /// Delete old and unused packs
    Gc(collect::GcArgs),
}

/// Which bucket.
#[derive(Args, Debug)]
struct BucketArgs {
    /// s3://BUCKET/PREFIX, with the usual AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL; or
    /// file:///DIRECTORY
    #[arg(long, value_name = "URL")]
    bucket: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was asked of the bucket.
#[derive(Serialize)]
struct Asked {
    requests: u64,
    retries: u64,
    written_bytes: u64,
    read_bytes: u64,
}

impl From<Spent> for Asked {
    fn from(spent: Spent) -> Self {
        let Spent { requests, retries, written_bytes, read_bytes, .. } = spent;
        Self { requests, retries, written_bytes, read_bytes }
    }
}

/// Why nothing was done for a namespace.
#[derive(Serialize)]
struct Trouble {
    namespace: String,
    what: String,
}

/// Whether the next namespace fares no better: the bucket, the budgets, the clocks, the store.
fn ends_all(error: &ColdError) -> bool {
    match error {
        ColdError::Bucket(_, fault) => {
            fault.is_passing() || matches!(fault, Fault::Denied(_) | Fault::NoBucket)
        }
        ColdError::Paused | ColdError::Budget(_) | ColdError::Clocks(_) | ColdError::Store(_) => true,
        _ => false,
    }
}

/// A bucket, and what runs the requests to it.
struct Bucket {
    address: String,
    tier: Tier,
    runtime: Runtime,
}

impl BucketArgs {
    fn open(&self) -> Result<Bucket, Failure> {
        let bucket = kvarts_bucket::open(&self.bucket).map_err(Failure::user)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(|error| {
            Failure::User(format!(
                "the threads for requests could not be \
            started: {error}"
            ))
        })?;
        // Waits of several programs that were refused at once are spread.
        let seed = now_ms() ^ (u64::from(std::process::id()) << 32);
        let access = Access::new(bucket, Arc::new(TokioTime::start()), Limits::default(), seed);
        let address = self.bucket.clone();
        Ok(Bucket { address, tier: Tier::new(access, TierOptions::default()), runtime })
    }
}

/// What the bucket at an address does with conditions of puts, and whether it keeps versions of objects.
pub(crate) fn tried(address: &str) -> Result<(Conditions, bool), String> {
    let arguments = BucketArgs { bucket: address.to_owned(), json: false };
    let bucket = arguments.open().map_err(|failure| match failure {
        Failure::User(why) => why,
        _ => "the bucket cannot be opened".to_owned(),
    })?;
    let tried = bucket.runtime.block_on(bucket.tier.conditions()).map_err(|error| bucket.told(&error))?;
    Ok((tried, bucket.tier.access().keeps_versions()))
}

impl Bucket {
    fn wait<T>(&self, asked: impl Future<Output = Result<T, ColdError>>) -> Result<T, Failure> {
        self.runtime.block_on(asked).map_err(|error| Failure::User(self.told(&error)))
    }

    /// What went wrong, and what to do about it where that depends on the address.
    fn told(&self, error: &ColdError) -> String {
        match error {
            ColdError::Bucket(_, Fault::NoBucket) => kvarts_bucket::absent(&self.address),
            error => error.to_string(),
        }
    }

    /// Does something for each of these namespaces. What is wrong with one of them does not keep the others from it. An error where nothing
    /// was done.
    fn each(
        &self,
        namespaces: &[NamespaceId],
        mut one: impl FnMut(NamespaceId) -> Result<(), ColdError>,
    ) -> Result<Vec<Trouble>, Failure> {
        let mut troubles = Vec::new();
        for (done, namespace) in namespaces.iter().enumerate() {
            let Err(error) = one(*namespace) else { continue };
            let is_last = ends_all(&error);
            if is_last && done == 0 {
                return Err(Failure::User(self.told(&error)));
            }
            let left = namespaces.len() - done - 1;
            let told = self.told(&error);
            let what = match (is_last, left) {
                (false, _) | (true, 0) => told,
                (true, left) => format!("{told}; {left} other namespaces were not changed"),
            };
            troubles.push(Trouble { namespace: namespace.to_string(), what });
            if is_last {
                break;
            }
        }
        Ok(troubles)
    }

    /// The namespace that was named, or all.
    fn namespaces(&self, named: Option<NamespaceId>) -> Result<Vec<NamespaceId>, Failure> {
        let all = self.wait(namespaces(&self.tier))?;
        match named {
            None => Ok(all),
            Some(named) if all.contains(&named) => Ok(vec![named]),
            Some(named) => Err(Failure::User(format!(
                "the bucket has no namespace {named}: `kvarts cold ls` lists its \
                    namespaces"
            ))),
        }
    }

    fn asked(&self) -> Asked {
        self.tier.access().spent().into()
    }
}

/// A line for each trouble.
fn tell(troubles: &[Trouble], out: &mut dyn Write) -> Result<(), Failure> {
    for Trouble { namespace, what } in troubles {
        writeln!(out, "namespace {namespace}: {what}")?;
    }
    Ok(())
}

/// Exit code 1 where something was not done.
fn verdict(troubles: &[Trouble]) -> Result<(), Failure> {
    if troubles.is_empty() { Ok(()) } else { Err(Failure::Problems) }
}

/// How long ago that was, in the unit that fits.
fn age(at_ms: u64) -> String {
    let seconds = now_ms().saturating_sub(at_ms) / 1000;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &ColdArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.what {
        What::Push(arguments) => push::run(arguments, out),
        What::Restore(arguments) => restore::run(arguments, out),
        What::Ls(arguments) => show::list(arguments, out),
        What::Stat(arguments) => show::stat(arguments, out),
        What::Fsck(arguments) => check::run(arguments, out),
        What::Gc(arguments) => collect::run(arguments, out),
    }
}
