//! Whether a server that takes a connection answers at all.
//!
//! A process that is stopped, or waits for a disk, still has its connections accepted by the kernel: only an answer shows that it runs.

use std::time::Duration;

use http::uri::PathAndQuery;
use kvarts_contract::error::Reason;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

/// The question of gRPC's own health service that every server answers without a token; another one refuses it, which is an
/// answer as well.
const CHECK: PathAndQuery = PathAndQuery::from_static("/grpc.health.v1.Health/Check");

/// Waits for any answer; [`Reason::DeadlinePassed`] if none comes within `time`.
pub(super) async fn anything(channel: Channel, time: Duration) -> Result<(), Reason> {
    let asked = async move {
        let mut service = tonic::client::Grpc::new(channel);
        // ends: `time`, around all of it
        service.ready().await.map_err(|error| Status::unknown(error.to_string()))?;
        // Neither message has a field that is needed here.
        // ends: `time`, around all of it
        service.unary(Request::new(()), CHECK, ProstCodec::<(), ()>::default()).await
    };
    match tokio::time::timeout(time, asked).await {
        // What a refusal or a lost connection means, the call says that comes next.
        Ok(_) => Ok(()),
        Err(_) => Err(Reason::DeadlinePassed),
    }
}
