//! What the driver keeps of each device: a lane for each directory.
//!
//! Devices share an executor and nothing else here. What a lane has at its device, what waits for it, and what its device never
//! answered takes no room from another lane, and the places for operations are counted for each lane, too. So a drive that
//! hangs costs its own transfers: they end at their deadlines, their memory stays with the device, and once too much of it is
//! stuck the lane refuses transfers at once, until the device answers.

use std::time::Duration;

use super::schedule::Schedule;
use super::{Devices, DriveLoad, Limits, URGENT};
use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::class::Class;
use kvarts_contract::clock::{Clock, Nanos};

/// What transfers may have at the device that are less urgent than some reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beside {
    pub(super) urgent: Class,
    /// Bytes that they may have there, have there, and may ask for in one submission.
    most: u64,
    others: u64,
    pub(super) piece: u64,
}

impl Beside {
    fn lets(&self, class: Class, cost: u64) -> bool {
        class <= self.urgent
            || self.others == 0
            || self.others.saturating_add(cost.min(self.piece)) <= self.most
    }
}

/// The urgent reads of one class, as the last dispatch saw them.
#[derive(Clone, Copy, Debug)]
struct Remembered {
    /// How many there had been.
    count: u64,
    /// Bytes of less urgent transfers for which the last of them is still remembered.
    bytes: u64,
}

/// One device.
#[derive(Debug)]
pub(super) struct Lane {
    /// What waits for it.
    pub(super) schedule: Schedule,
    /// Places for operations that it has.
    pub(super) slots: usize,
    /// Bytes of each class at the device, and of all.
    at_device: [u64; Class::ALL.len()],
    in_flight: u64,
    /// Bytes past their deadline that the device may still move, and those of them that still count as in flight.
    stuck: u64,
    stuck_in_flight: u64,
    remembered: [Remembered; URGENT.len()],
    /// When it was last looked for what is at the device for too long.
    looked: Nanos,
    /// Operations that the device has, and whether it has answered, or been given the first, since others were told of it.
    pub(super) at_work: usize,
    pub(super) has_answered: bool,
    pub(super) has_begun: bool,
}

/// How often that is looked for, at most.
const LOOK: Duration = Duration::from_secs(1);

impl Lane {
    pub(super) fn new(number: usize, devices: &Devices) -> Self {
        Self {
            schedule: Schedule::new(),
            slots: 0,
            at_device: [0; Class::ALL.len()],
            in_flight: 0,
            stuck: 0,
            stuck_in_flight: 0,
            remembered: URGENT
                .map(|class| Remembered { count: devices.urgent_reads(number, class), bytes: 0 }),
            looked: Nanos(0),
            at_work: 0,
            has_answered: false,
            has_begun: false,
        }
    }

    /// What it has and what waits.
    pub(super) fn load(&self) -> DriveLoad {
        let (in_flight_bytes, stuck_bytes) = (self.in_flight, self.stuck);
        DriveLoad {
            in_flight_bytes,
            waiting: self.schedule.len() as u64,
            stuck_bytes,
            ..DriveLoad::default()
        }
    }

    /// Tells the other executors whether the device answers, if there is news.
    pub(super) fn tell(&mut self, number: usize, devices: &Devices, clock: &dyn Clock) {
        if self.has_answered || self.has_begun {
            devices.note_answers(number, clock.now(), (self.has_answered, self.at_work > 0));
            (self.has_answered, self.has_begun) = (false, false);
        }
    }

    /// Bytes that less urgent transfers may ask for in one submission beside urgent reads; `piece` is what they ask for otherwise.
    fn small_piece(limits: &Limits, piece: u64) -> u64 {
        let page = PAGE as u64;
        (limits.beside_urgent / 4 / page * page).clamp(page, piece.max(page))
    }

    /// Remembers the urgent reads that came since it last looked, of classes behind which something waits.
    pub(super) fn look_at_urgent(&mut self, number: usize, devices: &Devices, limits: &Limits) {
        for (urgent, remembered) in URGENT.into_iter().zip(&mut self.remembered) {
            if self.schedule.has_behind(urgent) {
                let count = devices.urgent_reads(number, urgent);
                if count != remembered.count {
                    *remembered = Remembered { count, bytes: limits.urgent_remembered };
                }
            }
        }
    }

    /// What less urgent transfers may have at the device beside each class of urgent reads that is remembered.
    pub(super) fn beside_urgent(&self, limits: &Limits, piece: u64) -> [Option<Beside>; URGENT.len()] {
        let piece = Self::small_piece(limits, piece);
        let mut beside = [None; URGENT.len()];
        for ((urgent, remembered), beside) in URGENT.into_iter().zip(&self.remembered).zip(&mut beside) {
            if remembered.bytes > 0 {
                let (urgent_bytes, others) = self.at_device.split_at(urgent as usize + 1);
                let most = limits.beside_urgent.max(urgent_bytes.iter().sum());
                *beside = Some(Beside { urgent, most, others: others.iter().sum(), piece });
            }
        }
        beside
    }

    /// The next that may go, if one may.
    pub(super) fn next(&mut self, limits: &Limits, beside: &[Option<Beside>; URGENT.len()]) -> Option<u32> {
        let in_flight = self.in_flight;
        let fits = |class: Class, cost: u64| {
            let reserved = if URGENT.contains(&class) { 0 } else { limits.foreground_reserve };
            let room = limits.max_bytes_in_flight.saturating_sub(reserved);
            // Limits that leave no room at all still let one go at a time.
            beside.iter().flatten().all(|beside| beside.lets(class, cost))
                && (in_flight == 0 || in_flight.saturating_add(cost) <= room)
        };
        self.schedule.next(fits)
    }

    /// A transfer of `len` bytes goes to the device and counts as `charged` of them there.
    pub(super) fn charge(&mut self, class: Class, charged: u64, len: u64) {
        self.in_flight += charged;
        self.at_device[class as usize] += charged;
        for (urgent, remembered) in URGENT.into_iter().zip(&mut self.remembered) {
            if urgent < class {
                remembered.bytes = remembered.bytes.saturating_sub(len);
            }
        }
    }

    /// Takes back what a transfer was charged.
    pub(super) fn uncharge(&mut self, class: Class, charged: u64) {
        self.in_flight -= charged;
        self.at_device[class as usize] -= charged;
    }

    /// A transfer of `len` bytes, of which `charged` count as in flight, is past its deadline; whether they count so no more: up to a
    /// limit, so that the device may show that it answers others.
    pub(super) fn stick(&mut self, len: u64, charged: u64, limits: &Limits) -> bool {
        let is_let_off = self.stuck.saturating_add(len) <= limits.max_stuck_bytes;
        self.stuck += len;
        if !is_let_off {
            self.stuck_in_flight += charged;
        }
        is_let_off
    }

    /// The device has answered after all.
    pub(super) fn unstick(&mut self, len: u64, charged: u64) {
        self.stuck -= len;
        self.stuck_in_flight -= charged;
    }

    /// Whether it is time to look for what has been at the device for too long, where something waits.
    pub(super) fn may_look(&mut self, now: Nanos) -> bool {
        let may = self.in_flight > self.stuck_in_flight && now.since(self.looked) >= LOOK;
        if may {
            self.looked = now;
        }
        may
    }

    /// Whether what is stuck leaves no room for any more: a transfer could only wait for its deadline.
    pub(super) fn is_out(&self, limits: &Limits) -> bool {
        self.stuck_in_flight > 0 && self.stuck_in_flight >= limits.max_bytes_in_flight
    }
}
