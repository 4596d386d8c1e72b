//! Calls to one other node.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvarts_cluster::deletes::Known;
use kvarts_cluster::members::{Member, NodeId};
use kvarts_wire::proto;
use kvarts_wire::proto::nodes_client::NodesClient;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use super::network::{Calls, Footing};
use super::questions::Questions;
use crate::read::{Runner, in_time};

/// Look-ups that wait to be sent.
const WAITING: usize = 32;

/// One other node, as this node sees it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) member: Member,
    client: NodesClient<Calls>,
    runner: Arc<dyn Runner>,
    questions: Arc<Questions>,
    /// Wakes the task that sends it this node's changes.
    pub(super) news: Notify,
    /// How far it has said that it has what was deleted; nothing before it has. Held by who tells it.
    pub(super) told: tokio::sync::Mutex<Option<Known>>,
    /// It did not say in time that it has what was deleted, and has not since: no delete waits for it.
    pub(super) is_late: AtomicBool,
    /// A task tells it what it lacks.
    pub(super) tells_later: AtomicBool,
    state: Mutex<State>,
}

/// What is known of the other node.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// It takes this node's changes.
    pub(super) is_connected: bool,
    /// Why it does not.
    pub(super) trouble: String,
}

impl Link {
    /// Connects when it is first used.
    pub(super) fn new(member: Member, footing: &Footing) -> Result<Arc<Self>, String> {
        let client = NodesClient::new(footing.network.calls(&member)?);
        let client = client.max_decoding_message_size(super::MESSAGE_BYTES_MAX);
        let runner = Arc::clone(&footing.runner);
        Ok(Arc::new(Self {
            member,
            client,
            runner,
            questions: Arc::default(),
            news: Notify::new(),
            told: tokio::sync::Mutex::default(),
            is_late: AtomicBool::new(false),
            tells_later: AtomicBool::new(false),
            state: Mutex::default(),
        }))
    }

    pub(super) fn id(&self) -> NodeId {
        self.member.id
    }

    pub(super) fn state(&self) -> State {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It was tried and cannot be reached.
    pub(super) fn is_away(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        !state.is_connected && !state.trouble.is_empty()
    }

    pub(super) fn set_state(&self, state: State) {
        let old =
            std::mem::replace(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner), state.clone());
        let Member { id: node, address, .. } = &self.member;
        match (old.is_connected, state.is_connected) {
            (false, true) if !old.trouble.is_empty() => {
                tracing::warn!(%node, %address, "a node of the cluster can be reached again");
            }
            (true, false) => {
                tracing::warn!(%node, %address, reason = %state.trouble, "the connection to a node of the \
                    cluster was lost");
            }
            (false, false) if old.trouble != state.trouble => {
                tracing::warn!(%node, %address, reason = %state.trouble, "a node of the cluster cannot be reached");
            }
            _ => {}
        }
    }

    pub(super) async fn join(
        &self,
        wire: proto::JoinRequest,
        timeout: Duration,
    ) -> Result<proto::JoinReply, Status> {
        Ok(self.in_time(timeout, self.client.clone().join(Request::new(wire))).await?.into_inner())
    }

    pub(super) async fn feed(
        &self,
        messages: impl tokio_stream::Stream<Item = proto::FeedMessage> + Send + 'static,
    ) -> Result<tonic::Streaming<proto::FeedReply>, Status> {
        // ends: the connection, which keep-alive ends (`KEEP_ALIVE`)
        Ok(self.client.clone().feed(Request::new(messages)).await?.into_inner())
    }

    pub(super) async fn locate(
        &self,
        asked: proto::LocateRequest,
        timeout: Duration,
    ) -> Result<proto::LocateReply, Status> {
        let answer = self.questions.ask(asked, || self.look_ups());
        let broken = || Status::unavailable("the connection is broken");
        self.in_time(timeout, async { answer.await.ok_or_else(broken) }).await
    }

    /// Begins the call over which look-ups go; it ends with its connection, or when no question can come any more.
    fn look_ups(&self) -> mpsc::Sender<proto::LocateRequest> {
        let (to, questions) = mpsc::channel(WAITING);
        let (mut client, request) = (self.client.clone(), Request::new(ReceiverStream::new(questions)));
        let (asked, of) = (Arc::downgrade(&self.questions), to.downgrade());
        self.runner.spawn(Box::pin(async move {
            // ends: the connection, which keep-alive ends (`KEEP_ALIVE`), or no question can come any more
            if let Ok(reply) = client.locate(request).await {
                let mut answers = reply.into_inner();
                // ends: the connection, which keep-alive ends (`KEEP_ALIVE`), or no question can come any more
                while let Ok(Some(answer)) = answers.message().await {
                    let Some(asked) = asked.upgrade() else { return };
                    asked.answer(answer);
                }
            }
            if let Some((asked, of)) = asked.upgrade().zip(of.upgrade()) {
                asked.end(&of);
            }
        }));
        to
    }

    pub(super) async fn offer(
        &self,
        wire: proto::OfferRequest,
        timeout: Duration,
    ) -> Result<proto::OfferReply, Status> {
        Ok(self.in_time(timeout, self.client.clone().offer(Request::new(wire))).await?.into_inner())
    }

    pub(super) async fn chain(
        &self,
        wire: proto::ChainRequest,
        timeout: Duration,
    ) -> Result<proto::ChainReply, Status> {
        Ok(self.in_time(timeout, self.client.clone().chain(Request::new(wire))).await?.into_inner())
    }

    pub(super) async fn deletes(
        &self,
        wire: proto::DeletesRequest,
        timeout: Duration,
    ) -> Result<proto::DeletesReply, Status> {
        Ok(self.in_time(timeout, self.client.clone().deletes(Request::new(wire))).await?.into_inner())
    }

    async fn in_time<T>(
        &self,
        timeout: Duration,
        answer: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let late = || {
            let (Member { id, address, .. }, seconds) = (&self.member, timeout.as_secs_f64());
            Status::deadline_exceeded(format!(
                "node {id} at {address} has not responded within {seconds:.1} s"
            ))
        };
        in_time(&*self.runner, timeout, answer).await.unwrap_or_else(|| Err(late()))
    }
}

/// What an answer that is none says, to its deepest reason.
pub(super) fn told(status: &Status) -> String {
    let mut deepest: &dyn std::error::Error = status;
    while let Some(deeper) = deepest.source() {
        deepest = deeper;
    }
    match std::ptr::eq(std::ptr::from_ref(deepest).cast::<()>(), std::ptr::from_ref(status).cast::<()>()) {
        true => status.message().to_owned(),
        false => deepest.to_string(),
    }
}
