//! Buckets that the cold tier can use: S3 and what speaks like it, through `object_store`; and a directory.
//!
//! What is heavy about object storage (HTTP, XML, signatures) stands behind this crate, so that nothing else is built with it.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]
#![allow(
    clippy::disallowed_methods,
    reason = "buckets are not simulated: the crate of the cold tier has the interfaces for a simulation"
)]

#[cfg(feature = "s3")]
mod causes;
#[cfg(feature = "s3")]
pub mod credentials;
pub mod directory;
#[cfg(feature = "s3")]
pub mod http;
#[cfg(feature = "s3")]
pub mod s3;
pub mod time;

use std::fmt;
use std::sync::Arc;

use kvarts_cold::Bucket;

/// Why an address is no bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadAddress(pub String);

impl fmt::Display for BadAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadAddress {}

/// The bucket at an address: `s3://BUCKET[/PREFIX]`, with credentials, region and endpoint as the environment and files have them
/// for other S3 programs (`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_ENDPOINT_URL`, ...); or `file:///DIRECTORY`.
pub fn open(address: &str) -> Result<Arc<dyn Bucket>, BadAddress> {
    if let Some(rest) = address.strip_prefix("s3://") {
        return open_s3(rest);
    }
    if let Some(path) = address.strip_prefix("file://").filter(|path| path.starts_with('/')) {
        return Ok(Arc::new(directory::Directory::new(path)));
    }
    Err(BadAddress(format!(
        "the address {address} is not valid: use s3://BUCKET/PREFIX or file:///DIRECTORY"
    )))
}

/// What to say and do where the bucket at an address is not there.
pub fn absent(address: &str) -> String {
    match address.strip_prefix("file://") {
        Some(path) => {
            format!(
                "{address}: the directory does not exist: mount the disk of the directory (`findmnt` \
                lists mounted disks), or create the directory with `mkdir -p {path}`"
            )
        }
        None => format!(
            "{address}: the bucket does not exist: check its name, AWS_REGION and AWS_ENDPOINT_URL, or \
            create the bucket"
        ),
    }
}

#[cfg(feature = "s3")]
fn open_s3(rest: &str) -> Result<Arc<dyn Bucket>, BadAddress> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    Ok(Arc::new(s3::S3Bucket::from_env(bucket, prefix)?))
}

#[cfg(not(feature = "s3"))]
fn open_s3(rest: &str) -> Result<Arc<dyn Bucket>, BadAddress> {
    Err(BadAddress(format!("s3://{rest}: this program was built without S3: build it with `--features s3`")))
}
