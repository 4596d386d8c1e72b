//! One connection as its server hears it: who calls, which namespaces it knows, what it asks for.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::clock::Nanos;

use super::asked::{Asked, Namespaces};
use super::bell::Bell;
use super::connection::Connection;
use super::frame::{Head, Incoming, Kind};
use super::limits::{DOUBT_EVERY, DOUBTS_MAX, IDENTITY_BYTES_MAX, PIECES_MAX, REQUEST_BYTES_MAX, STALL};
use super::sender::Sender;
use super::serving::Place;
use super::wire::{Broken, Ready};

/// How long a thread that waits for nothing in particular sleeps at once.
const LONG: Duration = Duration::from_secs(3600);

/// How many blocks may still be read again because they did not match at the receiver, which can say so of any.
#[derive(Debug)]
struct Doubts {
    left: u32,
    at: Nanos,
}

impl Doubts {
    fn may(&mut self, now: Nanos) -> bool {
        let more = now.since(self.at).as_nanos() / DOUBT_EVERY.as_nanos();
        if more > 0 {
            let more = u32::try_from(more).unwrap_or(u32::MAX);
            (self.left, self.at) = (self.left.saturating_add(more).min(DOUBTS_MAX), now);
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

/// Serves a connection until it ends.
pub(super) fn run(place: Place) {
    let Place { serving, wire, .. } = &place;
    let told = match serving.member.answer(&**wire) {
        Err(broken) => broken,
        Ok(node) => match serving.admit(place.number, node) {
            Err(why) => Broken::Refused(why),
            Ok(()) => {
                serving.counters.let_in.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(%node, "a peer connected to read from this node");
                serve(&place)
            }
        },
    };
    if told != Broken::Gone && !serving.is_stopping() {
        serving.counters.cut.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(reason = %told, "the connection of a peer was cut");
    }
}

fn serve(place: &Place) -> Broken {
    let Place { serving, wire, .. } = place;
    let Ok(bell) = Bell::new() else { return Broken::Gone };
    let connection = Arc::new(Connection { heard: Mutex::default(), bell });
    let sender = Sender::new(Arc::clone(serving), Arc::clone(wire), Arc::clone(&connection));
    let said = Arc::new(Mutex::new(Broken::Gone));
    let says = Arc::clone(&said);
    let body = move || *says.lock().unwrap_or_else(PoisonError::into_inner) = sender.run();
    let Ok(ended) = serving.member.host.thread("kvarts-lane-out", Box::new(body)) else {
        return Broken::Gone;
    };
    let clock = &serving.member.clock;
    let doubts = Doubts { left: DOUBTS_MAX, at: clock.now() };
    let mut hearing = Hearing { place, connection: &connection, namespaces: Namespaces::default(), doubts };
    let broken = hearing.run();
    connection.end();
    wire.close();
    ended();
    let said = *said.lock().unwrap_or_else(PoisonError::into_inner);
    // Who broke off first knows why.
    if broken == Broken::Gone { said } else { broken }
}

struct Hearing<'a> {
    place: &'a Place,
    connection: &'a Connection,
    namespaces: Namespaces,
    doubts: Doubts,
}

/// How long the body of a frame may be.
fn limit(head: &Head) -> Option<usize> {
    match head.kind {
        Kind::Open => Some(IDENTITY_BYTES_MAX),
        Kind::Read | Kind::Doubt => Some(REQUEST_BYTES_MAX),
        Kind::Cancel | Kind::Ping => Some(0),
        _ => None,
    }
}

impl Hearing<'_> {
    /// Takes frames until there are no more.
    fn run(&mut self) -> Broken {
        let Place { serving, wire, .. } = self.place;
        let (mut incoming, mut begun) = (Incoming::default(), None);
        loop {
            match incoming.next(&**wire, limit) {
                Err(broken) => return broken,
                Ok(Some((head, body))) => {
                    begun = None;
                    if let Err(broken) = self.take(head, body) {
                        return broken;
                    }
                    continue;
                }
                Ok(None) => {}
            }
            let now = serving.member.clock.now();
            if !incoming.has_begun() {
                serving.member.host.sleep(None, Some((&**wire, Ready::ToReceive)), Some(LONG));
                continue;
            }
            let due = begun.get_or_insert(now).plus(STALL);
            if now >= due {
                return Broken::Silent;
            }
            serving.member.host.sleep(None, Some((&**wire, Ready::ToReceive)), Some(due.since(now)));
        }
    }

    fn take(&mut self, head: Head, body: Bytes) -> Result<(), Broken> {
        match head.kind {
            Kind::Open => return self.namespaces.open(body),
            Kind::Read => {
                let asked = self.parse(body)?;
                let mut heard = self.connection.lock();
                if heard.open.len() >= PIECES_MAX || !heard.open.insert(head.number) {
                    return Err(Broken::Protocol("the request has too many pieces, or the same piece twice"));
                }
                heard.pieces.push_back((head.number, asked));
            }
            Kind::Doubt => self.doubt(body)?,
            Kind::Cancel => {
                let mut heard = self.connection.lock();
                // One that was answered meanwhile is of no interest.
                if heard.open.contains(&head.number) && !heard.cancelled.contains(&head.number) {
                    heard.cancelled.push(head.number);
                }
            }
            Kind::Ping => {
                let mut heard = self.connection.lock();
                heard.pings = heard.pings.saturating_add(1).min(2);
            }
            _ => return Err(Broken::Protocol("a frame arrived out of order")),
        }
        self.connection.bell.ring();
        Ok(())
    }

    fn parse(&self, body: Bytes) -> Result<Asked, Broken> {
        let serving = &self.place.serving;
        Asked::parse(body, &self.namespaces, &*serving.served, serving.member.clock.now())
    }

    /// Has blocks read again, as many as may be, so that the store takes those out of service that do not match here either.
    fn doubt(&mut self, body: Bytes) -> Result<(), Broken> {
        let mut asked = self.parse(body)?;
        let now = self.place.serving.member.clock.now();
        let may = asked.request.keys.iter().take_while(|_| self.doubts.may(now)).count();
        asked.request.keys.truncate(may);
        asked.origins.truncate(may);
        if may > 0 {
            self.place.serving.counters.doubts.fetch_add(may as u64, Ordering::Relaxed);
            self.connection.lock().doubts.push_back(asked);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_as_many_blocks_read_again_as_it_may() {
        let mut doubts = Doubts { left: DOUBTS_MAX, at: Nanos(0) };
        let mut many = |now: Duration| (0..1000).filter(|_| doubts.may(Nanos(0).plus(now))).count() as u32;
        assert_eq!((many(Duration::ZERO), many(Duration::ZERO)), (DOUBTS_MAX, 0));
        assert_eq!(many(DOUBT_EVERY * 3), 3);
        assert_eq!(many(Duration::from_secs(1 << 30)), DOUBTS_MAX);
    }
}
