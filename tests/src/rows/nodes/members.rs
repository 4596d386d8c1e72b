//! Members that change, of which each node hears at another time, or not at all.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_cluster::members::Members;
use kvarts_cluster::partition::{Holders, Tag};

use super::Scene;

/// How often users ask about chains while a node is left behind, and the longest pause between: together longer than it takes until
/// a new holder grants what the one before it may have granted.
const ROUNDS: u64 = 50;
const PAUSE_MAX: Duration = Duration::from_secs(4);

impl Scene {
    /// Members that no node was told of yet.
    fn next_epoch(&mut self) -> Members {
        self.epoch += 1;
        let members = self.members();
        self.told.push(members.clone());
        members
    }

    /// One member is taken away, or comes back; who is told of it when is up to chance.
    pub(super) fn change_members(&mut self) {
        if !self.to_tell.is_empty() {
            return;
        }
        let away: Vec<usize> = (0..self.count()).filter(|place| !self.inside.contains(place)).collect();
        match self.rng.pick(&away).copied() {
            Some(place) => drop(self.inside.insert(place)),
            None if self.inside.len() > 2 => {
                let place = self.rng.index(self.count());
                self.inside.remove(&place);
            }
            None => return,
        }
        let members = self.next_epoch();
        self.to_tell = (0..self.count()).map(|place| (place, members.clone())).collect();
    }

    /// Tells a node of new members, or again of old ones, which change nothing.
    pub(super) fn tell(&mut self) -> Result<(), String> {
        if let Some(old) = self.rng.pick(&self.told).cloned() {
            let place = self.rng.index(self.count());
            if let Some(node) = self.town.node(place).cloned() {
                let before = node.members().epoch();
                if old.epoch() <= before {
                    node.change_members(old)?;
                    if node.members().epoch() != before {
                        return Err(format!("node {place} went back from the members of epoch {before}"));
                    }
                }
            }
        }
        if self.to_tell.is_empty() {
            return Ok(());
        }
        let at = self.rng.index(self.to_tell.len());
        let (place, members) = self.to_tell.swap_remove(at);
        if self.inside.contains(&place) { self.tell_one(place, members) } else { Ok(()) }
    }

    fn tell_one(&mut self, place: usize, members: Members) -> Result<(), String> {
        let Some(node) = self.town.node(place).cloned() else { return Ok(()) };
        node.change_members(members)?;
        self.names_members_alone(place)
    }

    /// From the moment at which a node is told of its members, it names no other node as having a block of its own part of
    /// the directory.
    fn names_members_alone(&self, place: usize) -> Result<(), String> {
        let Some(node) = self.town.node(place) else { return Ok(()) };
        let members = node.members();
        let holders = Holders::of(&members);
        let own: Vec<Tag> =
            self.tags().filter(|tag| holders.holder(tag.partition()) == Some(node.id())).collect();
        let mut locating = pin!(node.locate(&own, Duration::from_secs(1)));
        let Poll::Ready(located) = locating.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
            return Err(format!("node {place} asks others for what it holds itself"));
        };
        let named = located.copies.iter().flatten();
        let stranger = named.copied().find(|named| members.get(*named).is_none());
        stranger.map_or(Ok(()), |stranger| {
            Err(format!("node {place} names {stranger}, which is none of the members that it was told of"))
        })
    }

    /// One node is not told of new members, and perhaps reaches no other node at all, while the others go on without it, one of
    /// them perhaps much later than the rest. Their users ask about chains for longer than leases last.
    pub(super) fn leave_behind(&mut self) -> Result<(), String> {
        if self.inside.len() < 3 || !self.to_tell.is_empty() {
            return Ok(());
        }
        let all: Vec<usize> = self.inside.iter().copied().collect();
        let left = all[self.rng.index(all.len())];
        self.heal_network();
        if self.rng.coin() {
            self.cut_off(left);
        }
        self.inside.remove(&left);
        let members = self.next_epoch();
        let late = self.rng.coin().then(|| self.rng.below(ROUNDS));
        let mut told: Vec<usize> = self.inside.iter().copied().collect();
        let last = late.and_then(|_| told.pop());
        self.to_tell = told.into_iter().map(|place| (place, members.clone())).collect();
        for round in 0..ROUNDS {
            for _ in 0..self.rng.between(1, 6) {
                let place = self.rng.index(self.count());
                self.chain(place);
            }
            if let Some(last) = last.filter(|_| late == Some(round)) {
                self.tell_one(last, members.clone())?;
            }
            self.tell()?;
            let pause = self.rng.below(PAUSE_MAX.as_micros() as u64);
            self.town.pass(Duration::from_micros(pause))?;
            self.look()?;
        }
        Ok(())
    }
}
