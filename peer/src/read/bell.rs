//! What wakes a read: an event of one of its requests, memory that was let go, a path that is gone.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

/// What there is to look at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum News {
    /// Something came for this request.
    Came(u64),
    /// The memory of this request has been let go of.
    Released(u64),
    /// A path was taken away.
    Changed,
}

#[derive(Debug, Default)]
struct State {
    news: VecDeque<News>,
    waker: Option<Waker>,
}

/// The news of one read.
#[derive(Debug, Default)]
pub(super) struct Bell(Mutex<State>);

impl Bell {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step: a panic elsewhere leaves the list whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the read.
    pub(super) fn ring(&self, news: News) {
        let waker = {
            let mut state = self.lock();
            state.news.push_back(news);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Who is woken by the next news.
    pub(super) fn listen(&self, waker: &Waker) {
        self.lock().waker = Some(waker.clone());
    }

    /// The oldest news.
    pub(super) fn take(&self) -> Option<News> {
        self.lock().news.pop_front()
    }
}

/// Wakes a read for one of its requests.
#[derive(Debug)]
pub(super) struct ForRequest {
    pub(super) bell: Arc<Bell>,
    pub(super) number: u64,
}

impl Wake for ForRequest {
    fn wake(self: Arc<Self>) {
        self.bell.ring(News::Came(self.number));
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.bell.ring(News::Came(self.number));
    }
}
