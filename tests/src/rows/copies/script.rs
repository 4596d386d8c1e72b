//! Each rule, step by step, on nodes that are well.

use std::time::Duration;

use kvarts_contract::clock::Clock;
use kvarts_layout::BlockKey;
use kvarts_peer::node::{Fate, PutPolicy};
use proto::chain_reply::What;
use proto::chain_request::Ask;

use super::{CHAINS, HOLD, LENGTH, Scene, Told, proto};
use crate::conformance::pages;

/// The chain of the script.
const CHAIN: u64 = CHAINS;
/// How long a node that has begun says nothing about chains, and how long others may go by what it was before.
const SILENT: Duration = Duration::from_secs(150);
/// Within this time the directory knows of what happened, and owners have what they were offered.
const SETTLES: Duration = Duration::from_secs(4);
/// And how much later than their time copies are gone everywhere.
const GONE: Duration = Duration::from_secs(20);

impl Scene {
    fn scripted(&self, from: usize, to: usize) -> Vec<BlockKey> {
        let first = (CHAINS * LENGTH) as usize;
        self.keys[first + from..first + to].to_vec()
    }

    /// Asks until the answer is another than to wait.
    fn asks(&mut self, place: usize, ask: Ask) -> Result<What, String> {
        let begun = self.town.clock.now();
        loop {
            let told = Told::default();
            self.chain(place, CHAIN, move |_| ask, &told);
            self.quiet()?;
            match told.take() {
                Some(What::New | What::Unreachable) | None if self.town.clock.now().since(begun) < SILENT => {
                    self.town.pass(Duration::from_secs(1))?;
                }
                what => return what.ok_or_else(|| format!("node {place} gets no answer to {ask:?}")),
            }
        }
    }

    fn owns(&mut self, place: usize, hold: Duration) -> Result<(), String> {
        match self.asks(place, Ask::ClaimMs(hold.as_millis() as u64))? {
            What::Granted => Ok(()),
            what => Err(format!("node {place} claims a chain that is no other node's: {what:?}")),
        }
    }

    /// Puts blocks; the fates of all of them must be these.
    fn puts(
        &mut self,
        what: &str,
        place: usize,
        (keys, parent): (&[BlockKey], Option<BlockKey>),
        expected: &[Fate],
    ) -> Result<(), String> {
        let putting = self.putting(place, keys, parent).ok_or("no node there")?;
        let told = Told::default();
        let tells = told.clone();
        self.spawn(place, async move { tells.set(putting.run().await) });
        self.quiet()?;
        let fates = told.take().ok_or("a put did not end")?;
        if fates == expected { Ok(()) } else { Err(format!("{what}: {fates:?}, not {expected:?}")) }
    }

    fn expect_at(&self, what: &str, place: usize, keys: &[BlockKey], there: bool) -> Result<(), String> {
        match keys.iter().position(|key| self.has(place, key) != there) {
            None => Ok(()),
            Some(at) => {
                let is = if there { "lacks" } else { "has" };
                Err(format!("{what}: node {place} {is} block {at} of {}", keys.len()))
            }
        }
    }

    fn favoured(&self, place: usize, keys: &[BlockKey]) -> Vec<bool> {
        let running = self.town.seats[place].running.as_ref();
        let of = running.and_then(|running| running.store.favoured(self.namespace, pages(), keys).ok());
        of.unwrap_or_default()
    }

    /// All rules.
    pub(super) fn follow_the_rules(&mut self) -> Result<(), String> {
        self.town.pass(SILENT)?;
        let owner = self.rng.index(self.count());
        let other = (owner + self.rng.between(1, self.count() as u64 - 1) as usize) % self.count();
        self.puts_go_by_the_lease(owner, other)?;
        self.copies_of_what_is_hot(owner, other)?;
        self.a_lease_that_is_over(owner, other)?;
        self.answers_that_pass_each_other(owner, other)?;
        self.an_owner_that_dies(owner, other)
    }

    fn puts_go_by_the_lease(&mut self, owner: usize, other: usize) -> Result<(), String> {
        let held = if self.policy == PutPolicy::Single(HOLD) { Fate::Held } else { Fate::Copied(HOLD) };
        let (stored, copied) = (Fate::Stored, Fate::Copied(HOLD));
        let (before, all) = (self.keys[1], self.scripted(0, SCRIPT));
        self.puts("no node owns or has it", other, (&all[7..8], None), &[stored])?;
        self.owns(owner, Duration::from_secs(55))?;
        let first = [&[before][..], &all[..3]].concat();
        let fates = if self.is_anywhere(owner, &before) { None } else { Some([stored; 4]) };
        match fates {
            Some(fates) => self.puts("the owner's put", owner, (&first, None), &fates)?,
            None => self.puts("the owner's put", owner, (&first[1..], None), &[stored; 3])?,
        }
        let put = if fates.is_some() { &first[..] } else { &first[1..] };
        let favoured: Vec<bool> = put.iter().map(|key| *key != before).collect();
        if self.favoured(owner, put) != favoured {
            return Err(format!("favoured is {:?} of an own chain", self.favoured(owner, put)));
        }
        self.town.pass(SETTLES)?;
        let fates = [held, held, held, copied, copied, copied];
        self.puts("another node's put of an owned chain", other, (&all[..6], None), &fates)?;
        self.puts("the same, behind it", other, (&all[6..7], Some(all[5])), &[copied])?;
        self.town.pass(SETTLES)?;
        self.expect_at("what the owner was offered", owner, &all[..7], true)?;
        self.puts("the owner's put of what another node has", owner, (&all[7..8], Some(all[6])), &[stored])?;
        self.expect_at("the owner's put of what another node has", owner, &all[..8], true)?;
        self.puts("a put of what is there", other, (&all[7..8], Some(all[6])), &[stored])?;
        self.town.pass(HOLD + GONE)?;
        self.expect_at("copies whose time is over", other, &all[..7], false)?;
        self.expect_at("what the owner has", owner, &all[..8], true)
    }

    /// Whether a node has a block, or another one that it would be told of.
    fn is_anywhere(&self, _: usize, key: &BlockKey) -> bool {
        (0..self.count()).any(|place| self.has(place, key))
    }

    fn copies_of_what_is_hot(&mut self, owner: usize, other: usize) -> Result<(), String> {
        let all = self.scripted(0, 2);
        let (hot, cold) = (all[..1].to_vec(), all[1..].to_vec());
        let reads = |scene: &mut Self, keys: &[BlockKey]| {
            let told = Told::default();
            scene.read(other, keys.to_vec(), &told);
            scene.quiet()?;
            match told.take() {
                Some(1) => scene.town.pass(Duration::from_millis(100)),
                came => Err(format!("a read of what another node has gives {came:?} blocks")),
            }
        };
        (0..3).try_for_each(|_| reads(self, &cold))?;
        (0..60).try_for_each(|_| reads(self, &hot))?;
        self.town.pass(SETTLES)?;
        self.expect_at("what is read often", other, &hot, true)?;
        self.expect_at("what is read now and then", other, &cold, false)?;
        self.town.pass(HOLD + GONE)?;
        self.expect_at("what is not read any more", other, &hot, false)?;
        self.expect_at("what is not read any more", owner, &all, true)
    }

    fn a_lease_that_is_over(&mut self, owner: usize, other: usize) -> Result<(), String> {
        let all = self.scripted(0, SCRIPT);
        self.owns(owner, Duration::from_secs(3))?;
        self.town.pass(Duration::from_secs(62))?;
        self.owns(other, Duration::from_secs(50))?;
        let fates = [Fate::Copied(HOLD)];
        self.puts("a put of who was the owner", owner, (&all[8..9], Some(all[7])), &fates)?;
        self.puts("a put of who is now", other, (&all[8..10], Some(all[7])), &[Fate::Stored; 2])?;
        self.puts("a put of who is now", other, (&all[..3], None), &[Fate::Stored; 3])?;
        if self.favoured(other, &all[..3]).contains(&false) {
            return Err("blocks of an own chain are not favoured".to_owned());
        }
        // What was decided by a lease is decided again when that is over.
        let Some(node) = self.town.node(other).cloned() else { return Err("no node there".to_owned()) };
        let putting = self.putting(other, &all[10..11], Some(all[9])).ok_or("no node there")?;
        let placed = {
            let mut placing = std::pin::pin!(node.place(putting.column(), putting.parent));
            self.town.drive(&[], |context| placing.as_mut().poll(context))?
        };
        let placed = placed.filter(|placed| node.stands(placed) && placed.own().len() == 1);
        let placed = placed.ok_or("an owner's put does not go by its lease")?;
        self.chain(other, CHAIN, |_| Ask::Release(true), &Told::default());
        // Before any answer to it can have come.
        self.town.pass(Duration::from_micros(20))?;
        if node.stands(&placed) {
            return Err("a put goes by a lease that was given up".to_owned());
        }
        self.quiet()?;
        match self.favoured(other, &all[..3]).contains(&true) {
            true => Err("blocks are favoured whose chain was given up".to_owned()),
            false => Ok(()),
        }
    }

    fn answers_that_pass_each_other(&mut self, owner: usize, other: usize) -> Result<(), String> {
        let all = self.scripted(0, SCRIPT);
        for _ in 0..4 {
            self.heal()?;
            self.owns(owner, Duration::from_secs(20))?;
            // What is said to the owner takes its time, each word another one.
            for way in self.town.ways().into_iter().filter(|(_, to)| *to == owner) {
                self.town.net.change(way, |link| link.delay.1 = Duration::from_millis(60));
            }
            self.chain(owner, CHAIN, |_| Ask::RenewMs(20_000), &Told::default());
            self.town.pass(Duration::from_millis(1))?;
            self.chain(owner, CHAIN, |_| Ask::Release(true), &Told::default());
            self.town.pass(Duration::from_millis(1))?;
            self.chain(other, CHAIN, |_| Ask::ClaimMs(3000), &Told::default());
            for _ in 0..30 {
                if let Some(putting) = self.putting(owner, &all[11..12], Some(all[0])) {
                    self.spawn(owner, putting.decide());
                }
                self.town.pass(Duration::from_millis(3))?;
                self.look()?;
            }
            self.quiet()?;
            self.asks(other, Ask::Release(true))?;
        }
        self.heal()
    }

    fn an_owner_that_dies(&mut self, owner: usize, other: usize) -> Result<(), String> {
        let all = self.scripted(0, SCRIPT);
        self.owns(owner, Duration::from_secs(30))?;
        self.puts("the owner's put", owner, (&all[10..11], None), &[Fate::Stored])?;
        self.town.pass(SETTLES)?;
        if (0..self.count()).any(|place| place != owner && self.has(place, &all[10])) {
            return Ok(());
        }
        self.book.gives_up(None, owner, self.town.clock.now());
        self.town.crash(owner, true, |world| world.kill())?;
        self.town.pass(Duration::from_secs(1))?;
        self.puts("what a node has that is gone", other, (&all[10..11], Some(all[0])), &[Fate::Stored])?;
        if self.count() > 2 && self.rng.coin() {
            self.town.pass(Duration::from_secs(62))?;
            self.takes_over(other)?;
        }
        self.look()
    }

    /// The lease of a node that is gone is over, and another one gets it, if the node that decides is there.
    fn takes_over(&mut self, other: usize) -> Result<(), String> {
        let told = Told::default();
        self.chain(other, CHAIN, |_| Ask::ClaimMs(5000), &told);
        self.quiet()?;
        match told.take() {
            Some(What::Granted | What::Unreachable | What::New) => Ok(()),
            what => Err(format!("a chain whose owner is gone is claimed: {what:?}")),
        }
    }
}

/// Blocks of the script.
const SCRIPT: usize = super::SCRIPTED as usize;
