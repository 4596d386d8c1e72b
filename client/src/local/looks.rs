//! What waits so that its caller need not: for a connection that has to be made first, for digests of what is put, and for
//! deadlines, which hold whether a server answers or not.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use kvarts_contract::api::{
    ContainsReply, PutReply, PutRequest, ReadEvent, ReadProgress, ReadRequest, ReadSink,
};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Reply;
use kvarts_layout::{BlockKey, BlockShape};
use kvarts_wire::proto;
use tokio::sync::watch;

use super::deadlines::{LOOK, given_up, late, passed};
use super::link::Link;
use super::reading::{SharedPlaces, Wanted};
use super::{Inner, copied, wire};
use crate::upload;

/// What becomes of an attempt to connect.
type Made = watch::Receiver<Option<Result<Arc<Link>, Reason>>>;
/// The last attempt.
pub(super) type Soon = Option<Made>;

impl Inner {
    /// The connection, if it is here and has not broken.
    pub(super) fn ready(&self) -> Option<Arc<Link>> {
        self.here().filter(|link| !link.is_broken())
    }

    /// Sees to it that deadlines are looked at. After a request was noted that has one.
    pub(super) fn look(&self, deadline: Option<Nanos>) {
        if deadline.is_some()
            && !self.looks.swap(true, Ordering::SeqCst)
            && let Some(me) = self.me.upgrade()
        {
            self.remote.spawn(look_for_late(me));
        }
    }

    /// The connection that is being made: one attempt for all who want it meanwhile.
    fn soon(&self, windows: bool) -> Made {
        let mut soon = self.soon.lock().unwrap_or_else(PoisonError::into_inner);
        let [plain, with_windows] = &mut *soon;
        let soon_made = if windows { with_windows } else { plain };
        if let Some(made) =
            soon_made.as_ref().filter(|made| made.borrow().is_none() && made.has_changed().is_ok())
        {
            return made.clone();
        }
        let (tell, made) = watch::channel(None);
        *soon_made = Some(made.clone());
        drop(soon);
        let me = self.me.clone();
        self.remote.spawn_waiting(move || {
            let make = |me: Arc<Self>| if windows { me.link_with_windows() } else { me.link() };
            let made = me.upgrade().ok_or(wire::GONE).and_then(make);
            // Those who waited may have given up.
            let _ = tell.send(Some(made));
        });
        made
    }

    /// The connection, with windows where they are wanted.
    async fn link_soon(&self, deadline: Option<Nanos>, windows: bool) -> Result<Arc<Link>, Reason> {
        let is_enough = |link: &Arc<Link>| !windows || link.windows.get().is_some();
        if let Some(link) = self.ready().filter(is_enough) {
            return Ok(link);
        }
        let mut soon = self.soon(windows);
        // ends: the thread that connects tells or is gone; the deadline beside it
        let made = async move { soon.wait_for(Option::is_some).await.ok().and_then(|made| made.clone()) };
        tokio::select! {
            // ends: the deadline in the next arm
            made = made => made.unwrap_or(Err(wire::GONE)),
            () = passed(&*self.remote.clock, deadline) => Err(Reason::DeadlinePassed),
        }
    }
}

/// Looks for deadlines that have passed, as long as something has one.
async fn look_for_late(inner: Arc<Inner>) {
    let inner = {
        let weak = Arc::downgrade(&inner);
        drop(inner);
        weak
    };
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(inner) = inner.upgrade() else { return };
        let now = inner.remote.clock.now();
        let more = inner.here().is_some_and(|link| link.late(now));
        if !more {
            inner.looks.store(false, Ordering::SeqCst);
            // What was noted since then has seen that a thread looks.
            let began = inner.here().is_some_and(|link| link.late(now));
            if !began || inner.looks.swap(true, Ordering::SeqCst) {
                return;
            }
        }
    }
}

/// Puts blocks from wherever they lie.
pub(super) async fn put(
    inner: Arc<Inner>,
    request: PutRequest,
    shape: Arc<BlockShape>,
    reply: Reply<Result<PutReply, Error>>,
) {
    let layers = 0..shape.layers().len() as u32;
    let places = inner.places(&request.from, &shape, &layers);
    if places.is_none() && !copied::fits(&shape) {
        return upload::run(Arc::clone(&inner.remote), request, shape, reply).await;
    }
    match (inner.link_soon(request.deadline, places.is_none()).await, places) {
        (Ok(link), Some(places)) => {
            let digests = inner.digests(&request, &shape).await;
            let message = inner.put_message(&request, places.wire, digests);
            // What cannot be sent is answered with why.
            let _ = link.put(&message, request.from, late(request.deadline), reply);
            inner.look(request.deadline);
        }
        (Ok(link), None) => copied::put((inner, link), request, shape, reply).await,
        // A caller that is gone needs no answer.
        (Err(reason), _) => drop(reply.send(Err(Error(reason)))),
    }
}

/// Asks which blocks are here, once there is a connection.
pub(super) async fn look(
    inner: Arc<Inner>,
    message: proto::ExistsRequest,
    (keys, deadline): (Vec<BlockKey>, Option<Nanos>),
    reply: Reply<Result<ContainsReply, Error>>,
) {
    match inner.link_soon(deadline, false).await {
        // What cannot be sent is answered with why.
        Ok(link) => {
            let _ = link.look(&message, &keys, late(deadline), reply);
            inner.look(deadline);
        }
        // A caller that is gone needs no answer.
        Err(reason) => drop(reply.send(Err(Error(reason)))),
    }
}

/// Reads blocks once there is a connection: into their places, or through windows.
pub(super) async fn read(
    inner: Arc<Inner>,
    request: ReadRequest,
    shape: Arc<BlockShape>,
    places: Option<SharedPlaces>,
    sink: ReadSink,
) {
    let link = tokio::select! {
        link = inner.link_soon(request.deadline, places.is_none()) => link,
        () = given_up(|| sink.is_cancelled()) => return,
    };
    match (link, places) {
        (Ok(link), Some(places)) => {
            let (bring, deadline) = (link.bring(), request.deadline);
            let timeouts = (inner.timeout_us(deadline), late(deadline));
            // What cannot be sent is answered with why.
            let _ = link.read(Wanted { request, shape, part: None }, places, timeouts, sink);
            inner.look(deadline);
            // It has no fetcher yet: the link's thread fetches it.
            bring.attend();
        }
        (Ok(link), None) => copied::read((inner, link), request, shape, sink).await,
        (Err(reason), _) => {
            let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
            let progress = ReadProgress::new(request.order, request.keys.len() as u32, layers);
            sink.send(ReadEvent::End(progress.broken(&reason)));
        }
    }
}
