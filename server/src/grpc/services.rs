//! The services: each method hands its message to the one function that serves it.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future;
use kvarts_contract::api::Order;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};
use tower::Service;

use super::admission::answer;
use super::digest::StreamDigest;
use super::fault::{Fault, Outcome};
use super::frame::{self, ReadBody};
use super::messages::Messages;
use super::{admin, limits, listing, models, read, watch};
use crate::calls::call::Call;
use crate::calls::download::Download;
use crate::calls::heavy::{self, heavily};
use crate::calls::{directory, lookups, purge, route, sessions, store};
use kvarts_wire::proto;
use kvarts_wire::proto::{
    admin_server::Admin, directory_server::Directory, models_server::Models, plans_server::Plans,
    sessions_server::Sessions, store_server::Store,
};
use std::sync::Arc;

/// What a method gives.
type Answer<T> = Result<Response<T>, Status>;

/// All services but the reads. Whatever it needs comes with the call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Services;

#[tonic::async_trait]
impl Models for Services {
    async fn register_model(
        &self,
        request: Request<proto::RegisterModelRequest>,
    ) -> Answer<proto::RegisterModelReply> {
        answer(request, models::register).await
    }

    async fn list_models(
        &self,
        request: Request<proto::ListModelsRequest>,
    ) -> Answer<proto::ListModelsReply> {
        answer(request, models::list).await
    }
}

#[tonic::async_trait]
impl Store for Services {
    async fn put(&self, request: Request<Streaming<proto::PutRequest>>) -> Answer<proto::PutReply> {
        drop(request);
        Err(Status::internal("a put reached the wrong handler"))
    }

    async fn r#match(&self, request: Request<proto::MatchRequest>) -> Answer<proto::MatchReply> {
        answer(request, lookups::matched).await
    }

    async fn exists(&self, request: Request<proto::ExistsRequest>) -> Answer<proto::ExistsReply> {
        answer(request, lookups::exists).await
    }

    async fn unlock(&self, request: Request<proto::UnlockRequest>) -> Answer<proto::UnlockReply> {
        answer(request, |call, wire| async move { Ok(store::unlock(&call, &wire)) }).await
    }

    async fn pin(&self, request: Request<proto::PinRequest>) -> Answer<proto::PinReply> {
        answer(request, |call, wire| {
            heavily(call, heavy::of_keys(&wire.keys), move |call| store::pin(call, wire))
        })
        .await
    }

    async fn unpin(&self, request: Request<proto::UnlockRequest>) -> Answer<proto::UnlockReply> {
        answer(request, |call, wire| async move { Ok(store::unlock(&call, &wire)) }).await
    }

    async fn list_pins(&self, request: Request<proto::ListPinsRequest>) -> Answer<proto::ListPinsReply> {
        answer(request, |call, wire| async move { store::list_pins(&call, &wire) }).await
    }

    async fn set_ttl(&self, request: Request<proto::SetTtlRequest>) -> Answer<proto::SetTtlReply> {
        answer(request, |call, wire| async move {
            let held = Arc::clone(&call);
            let mut cold = store::shorten_in_cold(&held, &wire).await;
            let (keys, asked) = (heavy::of_keys(&wire.keys), wire.clone());
            let reply = heavily(call, keys, move |call| store::set_ttl(call, asked)).await?;
            let reply = store::shorten_elsewhere(&held, &wire, reply).await?;
            if let Some(cold) = &mut cold {
                cold.tell(held.left()).await;
                cold.told()?;
            }
            Ok(reply)
        })
        .await
    }

    async fn set_default_ttl(
        &self,
        request: Request<proto::SetDefaultTtlRequest>,
    ) -> Answer<proto::SetDefaultTtlReply> {
        answer(request, |call, wire| async move { store::set_default_ttl(&call, &wire) }).await
    }

    async fn renew(&self, request: Request<proto::RenewRequest>) -> Answer<proto::RenewReply> {
        answer(request, |call, wire| async move { store::renew(&call, &wire) }).await
    }

    async fn delete(&self, request: Request<proto::DeleteRequest>) -> Answer<proto::DeleteReply> {
        answer(request, store::delete).await
    }
}

#[tonic::async_trait]
impl Directory for Services {
    async fn lookup(&self, request: Request<proto::LookupRequest>) -> Answer<proto::LookupReply> {
        answer(request, directory::lookup).await
    }

    async fn chain(&self, request: Request<proto::ChainRequest>) -> Answer<proto::ChainReply> {
        answer(request, directory::chain).await
    }

    async fn replicate(&self, request: Request<proto::ReplicateRequest>) -> Answer<proto::ReplicateReply> {
        answer(request, directory::replicate).await
    }

    async fn status(
        &self,
        request: Request<proto::ClusterStatusRequest>,
    ) -> Answer<proto::ClusterStatusReply> {
        answer(request, |call, _| async move { directory::status(&call) }).await
    }
}

#[tonic::async_trait]
impl Plans for Services {
    async fn route(&self, request: Request<proto::RouteRequest>) -> Answer<proto::RouteReply> {
        answer(request, route::route).await
    }
}

#[tonic::async_trait]
impl Sessions for Services {
    async fn open(&self, request: Request<proto::OpenSessionRequest>) -> Answer<proto::SessionReply> {
        answer(request, sessions::open).await
    }

    async fn fork(&self, request: Request<proto::ForkSessionRequest>) -> Answer<proto::SessionReply> {
        answer(request, sessions::fork).await
    }

    async fn extend(&self, request: Request<proto::ExtendSessionRequest>) -> Answer<proto::SessionReply> {
        answer(request, sessions::extend).await
    }

    async fn renew(&self, request: Request<proto::RenewSessionRequest>) -> Answer<proto::RenewSessionReply> {
        answer(request, |call, wire| async move { sessions::renew(&call, &wire) }).await
    }

    async fn hand_over(
        &self,
        request: Request<proto::HandOverSessionRequest>,
    ) -> Answer<proto::HandOverSessionReply> {
        answer(request, sessions::hand_over).await
    }

    async fn close(&self, request: Request<proto::CloseSessionRequest>) -> Answer<proto::CloseSessionReply> {
        answer(request, sessions::close).await
    }

    async fn list(&self, request: Request<proto::ListSessionsRequest>) -> Answer<proto::ListSessionsReply> {
        answer(request, |call, wire| async move { Ok(sessions::list(&call, &wire)) }).await
    }
}

#[tonic::async_trait]
impl Admin for Services {
    type WatchStream = ReceiverStream<Result<proto::Event, Status>>;

    async fn watch(&self, request: Request<proto::WatchRequest>) -> Answer<Self::WatchStream> {
        answer(request, |call, wire| async move { watch::watch(call, &wire) }).await
    }

    async fn list_blocks(
        &self,
        request: Request<proto::ListBlocksRequest>,
    ) -> Answer<proto::ListBlocksReply> {
        answer(request, listing::list).await
    }

    async fn stats(&self, request: Request<proto::StatsRequest>) -> Answer<proto::StatsReply> {
        answer(request, |call, _| async move { Ok(admin::stats(&call).await) }).await
    }

    async fn checkpoint(&self, request: Request<proto::CheckpointRequest>) -> Answer<proto::CheckpointReply> {
        answer(request, |call, _| async move { admin::checkpoint(&call).await }).await
    }

    async fn resume(&self, request: Request<proto::ResumeRequest>) -> Answer<proto::ResumeReply> {
        answer(request, |call, _| async move { admin::resume(&call).await }).await
    }

    async fn compact(&self, request: Request<proto::CompactRequest>) -> Answer<proto::CompactReply> {
        answer(request, |call, _| async move { admin::compact(&call).await }).await
    }

    async fn cold_push(&self, request: Request<proto::ColdPushRequest>) -> Answer<proto::ColdPushReply> {
        answer(request, |call, wire| async move { admin::cold_push(&call, &wire).await }).await
    }

    async fn scrub(&self, request: Request<proto::ScrubRequest>) -> Answer<proto::ScrubReply> {
        answer(request, |call, _| async move { admin::scrub(&call).await }).await
    }

    async fn drain(&self, request: Request<proto::DrainRequest>) -> Answer<proto::DrainReply> {
        answer(request, |call, _| async move { Ok(admin::drain(&call)) }).await
    }

    async fn set_budget(&self, request: Request<proto::SetBudgetRequest>) -> Answer<proto::SetBudgetReply> {
        answer(request, |call, wire| async move { admin::set_budget(&call, &wire).await }).await
    }

    async fn purge_tenant(
        &self,
        request: Request<proto::PurgeTenantRequest>,
    ) -> Answer<proto::PurgeTenantReply> {
        answer(request, purge::purge).await
    }

    async fn reload(&self, request: Request<proto::ReloadRequest>) -> Answer<proto::ReloadReply> {
        answer(request, |call, _| async move { admin::reload(&call).await }).await
    }
}

/// The reads: a service of its own, because its answers are not copied into messages (see `frame`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Reads;

impl NamedService for Reads {
    const NAME: &'static str = proto::reads_server::SERVICE_NAME;
}

impl Service<http::Request<Body>> for Reads {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let order = match request.uri().path() {
            "/kvarts.v1.Reads/Get" => Some(Order::Blocks),
            "/kvarts.v1.Reads/GetLayers" => Some(Order::Layers),
            _ => None,
        };
        let call = request.extensions_mut().remove::<Arc<Call>>();
        Box::pin(async move {
            let (Some(order), Some(call)) = (order, call) else {
                return Ok(
                    Status::unimplemented("the service has only the methods Get and GetLayers").into_http()
                );
            };
            Ok(start(&call, order, request.into_body()).await.unwrap_or_else(|fault| {
                call.end(fault.code);
                fault.status().into_http()
            }))
        })
    }
}

/// Begins a read: what can be refused is refused before the first byte.
async fn start(call: &Arc<Call>, order: Order, body: Body) -> Outcome<http::Response<Body>> {
    let message = one_message(body).await?;
    let wire = proto::ReadRequest::decode(message)
        .map_err(|error| Fault::malformed(format!("the message is not a valid ReadRequest: {error}")))?;
    let digest = StreamDigest::of_read(order, &wire);
    let download = Download::check(call, order, wire)?;
    let (to, incoming) = mpsc::channel(limits::FRAMES_WAITING);
    let body = ReadBody::new(incoming);
    let mut reading = Box::pin(read::run(Arc::clone(call), download, digest, (to, Arc::clone(body.slot()))));
    // Begun here: what is kept is on its way, and what is not is the executors', before any other task has its turn.
    if future::poll_immediate(&mut reading).await.is_none() {
        tokio::spawn(reading);
    }
    Ok(frame::response(body))
}

/// The one message of a request's body. When it must have come is up to the body.
pub async fn one_message(body: Body) -> Outcome<Bytes> {
    let mut messages = Messages::new(body);
    // ends: the body's own time (`Arriving`)
    let message = messages.message().await?;
    let message = message.ok_or_else(|| Fault::malformed("the request is incomplete"))?;
    match messages.begun().await? {
        None => Ok(message),
        Some(_) => Err(Fault::malformed("the request has more than one message")),
    }
}
