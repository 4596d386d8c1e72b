//! S3, and what speaks like it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt};
use kvarts_cold::time::BoxFuture;
use kvarts_cold::{Bucket, Condition, Facts, Fault, Listed, Places, Tag};
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    RetryConfig, UpdateVersion,
};

use crate::BadAddress;
use crate::causes::{cause, why};
use crate::credentials::{self, NoCredentials, Told};
use crate::http::{Connector, Refusal};

/// A bucket of S3, used below a prefix.
#[derive(Debug)]
pub struct S3Bucket {
    store: AmazonS3,
    prefix: Path,
    connector: Connector,
    has_versions: AtomicBool,
}

/// What the environment and the files say of credentials, region and endpoint. An `http://` endpoint is used as it is.
pub fn environment() -> Result<AmazonS3Builder, BadAddress> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let plain = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
        .iter()
        .any(|name| variable(name).is_some_and(|endpoint| endpoint.starts_with("http://")));
    credentials::from_files(AmazonS3Builder::from_env().with_allow_http(plain), &variable)
}

impl S3Bucket {
    /// The bucket with credentials, region and endpoint as the environment and the files have them for other programs.
    pub fn from_env(bucket: &str, prefix: &str) -> Result<Self, BadAddress> {
        Self::new(environment()?, bucket, prefix)
    }

    /// The bucket with whatever else was set.
    pub fn new(builder: AmazonS3Builder, bucket: &str, prefix: &str) -> Result<Self, BadAddress> {
        let bad = |error: Error| BadAddress(error.to_string());
        // Attempts are counted and spaced by the tier, which has a budget of them.
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let connector = Connector::new()?;
        let builder = builder
            .with_bucket_name(bucket)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_disable_bulk_delete(true)
            .with_retry(once)
            .with_http_connector(connector.clone());
        let source = Arc::clone(builder.clone().build().map_err(bad)?.credentials());
        let store = builder.with_credentials(Arc::new(Told(source))).build().map_err(bad)?;
        Ok(Self { store, prefix: Path::from(prefix), connector, has_versions: AtomicBool::new(false) })
    }

    /// Notes the version that an answer gives of an object.
    fn saw_version(&self, version: Option<&str>) {
        // What was put while a bucket keeps none has this one afterwards.
        if version.is_some_and(|version| version != "null") {
            self.has_versions.store(true, Ordering::Relaxed);
        }
    }

    fn path(&self, name: &str) -> Path {
        // The prefix is encoded once: its `%` would be encoded again.
        self.prefix.parts().chain(Path::from(name).parts()).collect()
    }

    fn name(&self, path: &Path) -> Option<String> {
        let own = path.as_ref().strip_prefix(self.prefix.as_ref())?;
        let own = if self.prefix.as_ref().is_empty() { Some(own) } else { own.strip_prefix('/') };
        own.map(str::to_owned)
    }

    /// Asks for an object or a range of it; gives its pieces as they come, `most` bytes of them at most.
    async fn read(
        &self,
        name: &str,
        range: Option<Range<u64>>,
        most: u64,
    ) -> Result<(impl Stream<Item = Result<Bytes, Fault>> + Send + Unpin, u64, Tag), Fault> {
        let options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
        // ends: the time of the request (`patience`)
        let found = self.store.get_opts(&self.path(name), options).await.map_err(|error| fault(&error))?;
        let length = found.range.end.saturating_sub(found.range.start);
        if length > most {
            return Err(Fault::Length);
        }
        self.saw_version(found.meta.version.as_deref());
        let (tag, mut left) = (tag(&found.meta), most);
        let pieces = found.into_stream().map(move |piece| {
            let piece = piece.map_err(|error| fault(&error))?;
            left = left.checked_sub(piece.len() as u64).ok_or(Fault::Length)?;
            Ok(piece)
        });
        Ok((pieces, length, tag))
    }
}

fn tag(meta: &ObjectMeta) -> Tag {
    Tag(meta.e_tag.clone().unwrap_or_default())
}

fn modified_ms(meta: &ObjectMeta) -> u64 {
    u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0)
}

/// What an error means for the caller. Whatever it is goes to logs: no text in it is from a server, beside a code.
fn fault(error: &Error) -> Fault {
    if let Some(NoCredentials { is_refused, why }) = cause(error) {
        let why = format!("no credentials could be obtained: {why}");
        return if *is_refused { Fault::Denied(why) } else { Fault::Unreachable(why) };
    }
    match (cause::<Refusal>(error), error) {
        (Some(refusal), _) => refused(refusal),
        (None, Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::InvalidPath { .. }) => {
            Fault::Refused(why(error))
        }
        (None, _) => Fault::Unreachable(why(error)),
    }
}

fn refused(refusal: &Refusal) -> Fault {
    let said = refusal.to_string();
    match (refusal.status.as_u16(), refusal.code.as_str()) {
        (404, "NoSuchBucket") => Fault::NoBucket,
        (404, _) => Fault::Missing,
        // 409: two conditional puts at once.
        (304 | 409 | 412, _) => Fault::Changed,
        // What it does not know it will not know later either.
        (501, _) => Fault::Refused(said),
        (429 | 503, _) | (_, "SlowDown") => Fault::Busy(refusal.retry_after),
        // The server did not see the end of the request in time.
        (408, _) | (_, "RequestTimeout") => Fault::Unreachable(said),
        (403, "AccessDenied") => Fault::Forbidden(said),
        (401 | 403, _) => Fault::Denied(said),
        // S3 says of a session that ran out that the request is a bad one.
        (
            400,
            "ExpiredToken"
            | "InvalidToken"
            | "TokenRefreshRequired"
            | "InvalidAccessKeyId"
            | "AuthorizationHeaderMalformed",
        ) => Fault::Denied(said),
        (500..=599, _) => Fault::Failed(said),
        _ => Fault::Refused(said),
    }
}

impl Bucket for S3Bucket {
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        Box::pin(async move {
            let (mut pieces, length, tag) = self.read(name, None, most).await?;
            // A buffer that grows would be copied again and again, and be up to twice as long.
            let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
            // ends: the time of the request, by its length (`patience`)
            while let Some(piece) = pieces.try_next().await? {
                bytes.extend_from_slice(&piece);
            }
            Ok((bytes.into(), tag))
        })
    }

    fn get_range<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        into: &'a Places,
    ) -> BoxFuture<'a, Result<u64, Fault>> {
        let most = range.end.saturating_sub(range.start);
        Box::pin(async move {
            let (mut pieces, ..) = self.read(name, Some(range), most).await?;
            let mut came = 0;
            // ends: the time of the request, by its length (`patience`)
            while let Some(piece) = pieces.try_next().await? {
                into.take(came, &piece)?;
                came += piece.len() as u64;
            }
            Ok(came)
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>> {
        Box::pin(async move {
            // ends: the time of the request (`patience`)
            let meta = self.store.head(&self.path(name)).await.map_err(|error| fault(&error))?;
            Ok(Facts { bytes: meta.size, tag: tag(&meta), modified_ms: modified_ms(&meta) })
        })
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Vec<Bytes>,
        condition: Condition,
    ) -> BoxFuture<'a, Result<Tag, Fault>> {
        Box::pin(async move {
            let mode = match condition {
                Condition::Any => PutMode::Overwrite,
                Condition::Absent => PutMode::Create,
                Condition::Is(tag) => PutMode::Update(UpdateVersion { e_tag: Some(tag.0), version: None }),
            };
            let options = PutOptions { mode, ..PutOptions::default() };
            // ends: the time of the request, by its length (`patience`)
            let put = self.store.put_opts(&self.path(name), PutPayload::from_iter(body), options).await;
            let put = put.map_err(|error| fault(&error))?;
            self.saw_version(put.version.as_deref());
            Ok(Tag(put.e_tag.unwrap_or_default()))
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>> {
        Box::pin(async move {
            // ends: the time of the request (`patience`)
            match self.store.delete(&self.path(name)).await.map_err(|error| fault(&error)) {
                Ok(()) | Err(Fault::Missing) => Ok(()),
                Err(fault) => Err(fault),
            }
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: usize,
    ) -> BoxFuture<'a, Result<Vec<Listed>, Fault>> {
        Box::pin(async move {
            // What is asked for are folders.
            let folder = self.path(prefix);
            let listed = match after {
                Some(after) => self.store.list_with_offset(Some(&folder), &self.path(after)),
                None => self.store.list(Some(&folder)),
            };
            let found: Vec<ObjectMeta> =
                // ends: the time of the request (`patience`)
                listed.take(most).try_collect().await.map_err(|error| fault(&error))?;
            let mut found: Vec<Listed> = found
                .iter()
                .filter_map(|meta| {
                    let name = self.name(&meta.location)?;
                    Some(Listed { name, bytes: meta.size, modified_ms: modified_ms(meta) })
                })
                .collect();
            found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            Ok(found)
        })
    }

    fn keeps_versions(&self) -> bool {
        self.has_versions.load(Ordering::Relaxed)
    }

    fn answered_ms(&self) -> Option<u64> {
        self.connector.answered_ms()
    }
}
