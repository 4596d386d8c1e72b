//! S3, and what speaks like it.

use std::ops::Range;

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
use crate::http::{Connector, Seen};

/// A bucket of S3, used below a prefix.
#[derive(Debug)]
pub struct S3Bucket {
    store: AmazonS3,
    prefix: String,
    connector: Connector,
}

impl S3Bucket {
    /// The bucket with credentials, region and endpoint from the environment. An `http://` endpoint is used as it is.
    pub fn from_env(bucket: &str, prefix: &str) -> Result<Self, BadAddress> {
        let plain = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
            .iter()
            .any(|name| std::env::var(name).is_ok_and(|endpoint| endpoint.starts_with("http://")));
        Self::new(AmazonS3Builder::from_env().with_allow_http(plain), bucket, prefix)
    }

    /// The bucket with whatever else was set.
    pub fn new(builder: AmazonS3Builder, bucket: &str, prefix: &str) -> Result<Self, BadAddress> {
        // Attempts are counted and spaced by the tier, which has a budget of them.
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let connector = Connector::new()?;
        let store = builder
            .with_bucket_name(bucket)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_retry(once)
            .with_http_connector(connector.clone())
            .build();
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(Self { store: store.map_err(|error| BadAddress(error.to_string()))?, prefix, connector })
    }

    fn path(&self, name: &str) -> Path {
        Path::from(format!("{}{name}", self.prefix))
    }

    fn name(&self, path: &Path) -> Option<String> {
        path.as_ref().strip_prefix(self.prefix.as_str()).map(str::to_owned)
    }

    /// Asks for an object or a range of it; gives its pieces as they come, `most` bytes of them at most.
    async fn read(
        &self,
        name: &str,
        range: Option<Range<u64>>,
        most: u64,
    ) -> Result<(impl Stream<Item = Result<Bytes, Fault>> + Send + Unpin, u64, Tag), Fault> {
        let seen = Seen::default();
        let mut options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
        options.extensions.insert(seen.clone());
        let found =
            self.store.get_opts(&self.path(name), options).await.map_err(|error| fault(error, &seen))?;
        let length = found.range.end.saturating_sub(found.range.start);
        if length > most {
            return Err(Fault::Length);
        }
        let (tag, mut left) = (tag(&found.meta), most);
        let pieces = found.into_stream().map(move |piece| {
            let piece = piece.map_err(|error| fault(error, &seen))?;
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

/// What an error means for who asked.
fn fault(error: Error, seen: &Seen) -> Fault {
    let answer = seen.answer();
    match (error, answer.status) {
        (Error::NotFound { .. }, _) => Fault::Missing,
        (Error::AlreadyExists { .. } | Error::Precondition { .. }, _) => Fault::Changed,
        // Two conditional puts at once.
        (_, 409) => Fault::Changed,
        (error @ (Error::PermissionDenied { .. } | Error::Unauthenticated { .. }), _) => {
            Fault::Denied(error.to_string())
        }
        (_, 429 | 503) => Fault::Busy(answer.retry_after),
        (error, 400..=499) => Fault::Refused(error.to_string()),
        (error, 500..=599) => Fault::Failed(error.to_string()),
        (
            error @ (Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::InvalidPath { .. }),
            _,
        ) => Fault::Refused(error.to_string()),
        (error, _) => Fault::Unreachable(error.to_string()),
    }
}

impl Bucket for S3Bucket {
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        Box::pin(async move {
            let (mut pieces, length, tag) = self.read(name, None, most).await?;
            // A buffer that grows would be copied again and again, and be up to twice as long.
            let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
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
            while let Some(piece) = pieces.try_next().await? {
                into.take(came, &piece)?;
                came += piece.len() as u64;
            }
            Ok(came)
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>> {
        Box::pin(async move {
            let meta = self.store.head(&self.path(name)).await;
            let meta = meta.map_err(|error| fault(error, &Seen::default()))?;
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
            let seen = Seen::default();
            let mode = match condition {
                Condition::Any => PutMode::Overwrite,
                Condition::Absent => PutMode::Create,
                Condition::Is(tag) => PutMode::Update(UpdateVersion { e_tag: Some(tag.0), version: None }),
            };
            let mut options = PutOptions { mode, ..PutOptions::default() };
            options.extensions.insert(seen.clone());
            let put = self.store.put_opts(&self.path(name), PutPayload::from_iter(body), options).await;
            put.map(|put| Tag(put.e_tag.unwrap_or_default())).map_err(|error| fault(error, &seen))
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>> {
        Box::pin(async move {
            match self.store.delete(&self.path(name)).await {
                Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(fault(error, &Seen::default())),
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
                listed.take(most).try_collect().await.map_err(|error| fault(error, &Seen::default()))?;
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

    fn answered_ms(&self) -> Option<u64> {
        self.connector.answered_ms()
    }
}
