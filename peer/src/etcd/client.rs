//! Calls to etcd: each has a time limit, and the first of several endpoints that answers is used.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_wire::etcd::auth_client::AuthClient;
use kvarts_wire::etcd::compare::{CompareResult, CompareTarget, TargetUnion};
use kvarts_wire::etcd::kv_client::KvClient;
use kvarts_wire::etcd::lease_client::LeaseClient;
use kvarts_wire::etcd::request_op::Request as Op;
use kvarts_wire::etcd::watch_client::WatchClient;
use kvarts_wire::etcd::watch_request::RequestUnion;
use kvarts_wire::etcd::{
    AuthenticateRequest, Compare, DeleteRangeRequest, KeyValue, LeaseGrantRequest, LeaseKeepAliveRequest,
    PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest, WatchRequest, WatchResponse,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status, Streaming};

use super::access::{self, EtcdAccess};

/// How long etcd may take for one answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The header that shows etcd who asks.
const TOKEN: &str = "token";

/// One endpoint of etcd.
pub(super) struct Etcd {
    channel: Channel,
    /// What etcd gave for a name and a password, for each call.
    token: Option<MetadataValue<Ascii>>,
}

/// Changes of keys as they come.
pub(super) struct Changes {
    messages: Streaming<WatchResponse>,
    /// Ends the watching when it is dropped.
    _asks: mpsc::Sender<WatchRequest>,
}

/// Waits for an answer as long as it may take.
async fn answered<T>(asked: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, String> {
    match tokio::time::timeout(TIMEOUT, asked).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(status.message().to_owned()),
        Err(_) => Err("etcd does not respond".to_owned()),
    }
}

/// The end of the range of all keys that begin so.
fn behind(prefix: &str) -> Bytes {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end.into();
        }
    }
    // All keys that are not less.
    Bytes::from_static(&[0])
}

fn put(key: &str, value: &str, lease: i64) -> PutRequest {
    PutRequest { key: key.to_owned().into(), value: value.to_owned().into(), lease }
}

/// The deepest reason of an error.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(deeper) = deepest.source() {
        deepest = deeper;
    }
    deepest.to_string()
}

impl Etcd {
    /// The first endpoint that answers and lets this node in, from `first` on; gives which one it is.
    pub(super) async fn connect(
        endpoints: &[String],
        access: &EtcdAccess,
        first: usize,
    ) -> Result<(Self, usize), String> {
        let mut told = "the list of endpoints is empty".to_owned();
        for at in (0..endpoints.len()).map(|place| (first + place) % endpoints.len()) {
            let Some(name) = endpoints.get(at) else { continue };
            let endpoint = Endpoint::from_shared(format!("http://{name}"));
            let endpoint = endpoint.map_err(|error| format!("{name}: {error}"))?.connect_timeout(TIMEOUT);
            let connected = match access.tls() {
                // ends: `TIMEOUT` of the endpoint; there is no TLS here
                None => endpoint.connect().await,
                Some(tls) => {
                    let of = name.clone();
                    let connector = tower::service_fn(move |_| {
                        let (name, tls) = (of.clone(), Arc::clone(&tls));
                        async move { access::connect(&name, tls).await }
                    });
                    endpoint.connect_with_connector(connector).await
                }
            };
            match connected {
                Ok(channel) => match (Self { channel, token: None }).log_in(access).await {
                    Ok(etcd) => return Ok((etcd, at)),
                    Err(error) => told = format!("{name}: {error}"),
                },
                Err(error) => told = format!("{name}: {}", deepest(&error)),
            }
        }
        Err(told)
    }

    /// Shows a name and a password, if this node has some.
    async fn log_in(mut self, access: &EtcdAccess) -> Result<Self, String> {
        let Some((name, password)) = access.login() else { return Ok(self) };
        let asked = AuthenticateRequest { name, password };
        let answer = answered(AuthClient::new(self.channel.clone()).authenticate(asked)).await?;
        let token = answer.token.parse().map_err(|_| "etcd sent an invalid token".to_owned())?;
        self.token = Some(token);
        Ok(self)
    }

    /// A message with who asks.
    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert(TOKEN, token.clone());
        }
        request
    }

    /// A lease of this many seconds.
    pub(super) async fn grant(&self, seconds: i64) -> Result<i64, String> {
        let asked = LeaseGrantRequest { ttl: seconds, id: 0 };
        let granted =
            answered(LeaseClient::new(self.channel.clone()).lease_grant(self.request(asked))).await?;
        if granted.error.is_empty() { Ok(granted.id) } else { Err(granted.error) }
    }

    /// Renews a lease. False if it has run out.
    pub(super) async fn keep(&self, lease: i64) -> Result<bool, String> {
        let mut client = LeaseClient::new(self.channel.clone());
        let asked = tokio_stream::once(LeaseKeepAliveRequest { id: lease });
        let mut answers = answered(client.lease_keep_alive(self.request(asked))).await?;
        let message = async { answers.message().await.map(Response::new) };
        let kept = answered(message).await?.ok_or("etcd ended the call")?;
        Ok(kept.ttl > 0)
    }

    pub(super) async fn put(&self, key: &str, value: &str, lease: i64) -> Result<(), String> {
        answered(KvClient::new(self.channel.clone()).put(self.request(put(key, value, lease))))
            .await
            .map(drop)
    }

    /// All keys that begin so, and the revision of this.
    pub(super) async fn all(&self, prefix: &str, most: usize) -> Result<(Vec<KeyValue>, i64), String> {
        let limit = i64::try_from(most).unwrap_or(i64::MAX);
        let asked = RangeRequest { key: prefix.to_owned().into(), range_end: behind(prefix), limit };
        let found = answered(KvClient::new(self.channel.clone()).range(self.request(asked))).await?;
        if found.more {
            return Err(format!("more than {most} keys exist below {prefix}"));
        }
        Ok((found.kvs, found.header.unwrap_or_default().revision))
    }

    /// Writes a key that was written last at this revision, or never for 0. Gives the new revision, or nothing if it was otherwise.
    pub(super) async fn swap(&self, key: &str, value: &str, revision: i64) -> Result<Option<i64>, String> {
        let written = [(key, revision)].map(last_written);
        self.change(&written, Op::RequestPut(put(key, value, 0))).await
    }

    /// Removes a key if others were written last at these revisions, or are not there for 0. Says whether they were.
    pub(super) async fn remove(&self, key: &str, others: [(&str, i64); 2]) -> Result<bool, String> {
        let remove = DeleteRangeRequest { key: key.to_owned().into(), range_end: Bytes::new() };
        self.change(&others.map(last_written), Op::RequestDeleteRange(remove))
            .await
            .map(|done| done.is_some())
    }

    /// Makes a change where all of this holds. Gives the new revision, or nothing if it did not.
    async fn change(&self, hold: &[Compare], change: Op) -> Result<Option<i64>, String> {
        let success = vec![RequestOp { request: Some(change) }];
        let asked = TxnRequest { compare: hold.to_vec(), success, failure: Vec::new() };
        let done = answered(KvClient::new(self.channel.clone()).txn(self.request(asked))).await?;
        Ok(done.succeeded.then(|| done.header.unwrap_or_default().revision))
    }

    /// Changes of all keys that begin so, from a revision on.
    pub(super) async fn watch(&self, prefix: &str, from: i64) -> Result<Changes, String> {
        let create = WatchCreateRequest {
            key: prefix.to_owned().into(),
            range_end: behind(prefix),
            start_revision: from,
        };
        let (asks, asked) = mpsc::channel(1);
        let ask = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        asks.try_send(ask).map_err(|error| error.to_string())?;
        let mut request = self.request(ReceiverStream::new(asked));
        // One that has lost the others says so instead of staying silent.
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        let messages = answered(WatchClient::new(self.channel.clone()).watch(request)).await?;
        Ok(Changes { messages, _asks: asks })
    }
}

/// A key was written last at this revision, or is not there for 0.
fn last_written((key, revision): (&str, i64)) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Mod.into(),
        key: key.to_owned().into(),
        target_union: Some(TargetUnion::ModRevision(revision)),
    }
}

impl Changes {
    /// The next changes: for each key its value, or nothing if it is gone, and the revision.
    pub(super) async fn next(&mut self) -> Result<Vec<(KeyValue, bool)>, String> {
        // ends: the renewal of the lease beside it fails, once etcd is silent
        let message = self.messages.message().await.map_err(|status| status.message().to_owned())?;
        let message = message.ok_or("etcd ended the call")?;
        if message.canceled {
            return Err(format!("the watch has ended: {}", message.cancel_reason));
        }
        let change = |event: kvarts_wire::etcd::Event| {
            let is_there = event.r#type() == kvarts_wire::etcd::event::EventType::Put;
            Some((event.kv?, is_there))
        };
        Ok(message.events.into_iter().filter_map(change).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_a_prefix_ends_behind_all_of_its_keys() {
        assert_eq!(&behind("a/")[..], b"a0");
        assert_eq!(&behind("")[..], &[0]);
    }
}
