//! Clients that wait for an answer before they ask again: the requests of a trace in its order, and not at its times.
//!
//! Real agents do not ask at times: the next turn comes when the one before it was answered, and as many requests are under way as there are
//! clients. What a trace says of conversations (`chat_id`, `parent_chat_id`) is kept: no request begins before the one was answered from which
//! it goes on.

use super::work::{Arrival, Work};
use crate::trace::{Request, TraceError};

/// The most requests: all of them are in memory.
pub const REQUESTS_MAX: usize = 1_000_000;
/// How many requests a client looks at, for each client: one whose conversation waits does not hold up what comes behind it.
const AHEAD: usize = 4;

#[derive(Debug)]
struct One {
    /// Until a client takes it.
    request: Option<Request>,
    /// The place of the request from which it goes on.
    after: Option<usize>,
    answered: bool,
}

/// Clients, and the requests of a trace.
#[derive(Debug)]
pub struct ClientWork {
    all: Vec<One>,
    /// Every request before this place was taken.
    from: usize,
    /// What each client waits for.
    under_way: Vec<Option<usize>>,
    ahead: usize,
}

impl ClientWork {
    /// This many clients, at least one, for the requests of a trace. A request goes on from the last one before it with the `chat_id` of its
    /// `parent_chat_id`.
    pub fn new(
        requests: impl Iterator<Item = Result<Request, TraceError>>,
        clients: u32,
    ) -> Result<Self, TraceError> {
        let mut chats = crate::ids::IdMap::<usize>::default();
        let mut all = Vec::new();
        for request in requests {
            let request = request?;
            if all.len() == REQUESTS_MAX {
                let what = format!("the trace has more than {REQUESTS_MAX} requests, the limit with clients");
                return Err(TraceError { line: 0, what });
            }
            let after = request.parent.and_then(|parent| chats.get(&parent).copied());
            if let Some(chat) = request.chat {
                chats.insert(chat, all.len());
            }
            all.push(One { request: Some(request), after, answered: false });
        }
        let under_way = vec![None; clients.max(1) as usize];
        let ahead = AHEAD.saturating_mul(under_way.len());
        Ok(Self { all, from: 0, under_way, ahead })
    }

    /// The first request that may begin, for a client that has none.
    fn take(&mut self, now_ms: f64) -> Option<Arrival> {
        let client = self.under_way.iter().position(Option::is_none)?;
        while self.all.get(self.from).is_some_and(|one| one.request.is_none()) {
            self.from += 1;
        }
        let waits = |place: &usize| self.all[*place].request.is_some();
        let may_begin = |place: &usize| self.all[*place].after.is_none_or(|after| self.all[after].answered);
        let place = (self.from..self.all.len()).filter(waits).take(self.ahead).find(may_begin)?;
        let request = self.all[place].request.take()?;
        self.under_way[client] = Some(place);
        let session = Some((u32::try_from(client).ok()?, false));
        Some(Arrival { at_ms: now_ms, session, ..Arrival::of(request) })
    }
}

impl Work for ClientWork {
    fn next(&mut self) -> Result<Option<Arrival>, TraceError> {
        // Once it has given none it is not asked again.
        Ok(self.take(0.0))
    }

    fn ended(&mut self, client: u32, now_ms: f64) -> Option<Arrival> {
        let answered = self.under_way.get_mut(client as usize)?.take()?;
        self.all[answered].answered = true;
        self.take(now_ms)
    }

    fn another(&mut self, now_ms: f64) -> Option<Arrival> {
        self.take(now_ms)
    }

    fn refused(&mut self, client: u32, now_ms: f64) -> Option<Arrival> {
        self.ended(client, now_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(chat: u64, parent: Option<u64>) -> Result<Request, TraceError> {
        Ok(Request { input_tokens: chat, chat: Some(chat), parent, ..Request::default() })
    }

    fn work(of: &[(u64, Option<u64>)], clients: u32) -> ClientWork {
        ClientWork::new(of.iter().map(|(chat, parent)| request(*chat, *parent)), clients).unwrap()
    }

    /// The chat of what comes, and the client.
    fn came(arrival: Option<Arrival>) -> Option<(u64, u32)> {
        arrival.map(|arrival| (arrival.input_tokens, arrival.session.unwrap().0))
    }

    #[test]
    fn a_client_asks_when_it_is_answered_and_a_turn_waits_for_the_one_before_it() {
        let mut work = work(&[(1, None), (2, Some(1)), (3, Some(1)), (4, Some(9)), (5, None)], 3);
        let mut begins = || came(work.next().unwrap());
        assert_eq!([begins(), begins(), begins()], [Some((1, 0)), Some((4, 1)), Some((5, 2))]);
        assert_eq!(came(work.ended(1, 5.0)), None, "both that are left go on from the first");
        assert_eq!(came(work.another(5.0)), None);
        // The end of the first makes two possible, and two clients have nothing to do.
        assert_eq!(came(work.ended(0, 7.0)), Some((2, 0)));
        let next = work.another(7.0).unwrap();
        assert_eq!((next.at_ms, next.session, next.input_tokens), (7.0, Some((1, false)), 3));
        assert_eq!(came(work.another(7.0)), None);
        for client in 0..3 {
            assert_eq!(came(work.ended(client, 9.0)), None);
            assert_eq!(came(work.ended(client, 9.0)), None, "it has nothing under way");
        }
    }

    #[test]
    fn a_client_looks_a_bounded_number_of_requests_ahead_and_a_refusal_is_an_answer() {
        let turns: Vec<_> = (1..=8).map(|chat| (chat, Some(chat - 1))).collect();
        let mut work = work(&[&turns[..], &[(20, None)]].concat(), 2);
        assert_eq!(came(work.next().unwrap()), Some((1, 0)));
        assert_eq!(came(work.next().unwrap()), Some((20, 1)), "eight are looked at");
        assert_eq!(came(work.refused(0, 1.0)), Some((2, 0)));
        let mut work = super::ClientWork::new(
            turns.iter().map(|(chat, parent)| request(*chat, *parent)).chain([request(20, None)]),
            1,
        )
        .unwrap();
        assert_eq!(came(work.next().unwrap()), Some((1, 0)));
        assert_eq!(came(work.next().unwrap()), None, "the only client is busy");
    }
}
