//! After a write or flush has failed: whether the device takes writes again, and where.
//!
//! It is asked where the write failed, with a page that counts nowhere. That says nothing of the segment: it takes no
//! record any more, and its records that were not durable stay so. Where that place fails again, a new file is asked: a device
//! may have a bad region, or take no more than what it has room for already. If that takes a page, what comes next goes
//! elsewhere. Each time that costs a segment, so after a few times in a row in which nothing became durable it is done
//! less and less often. What cannot be written anywhere is told in the store's health.

use std::rc::Rc;
use std::time::Duration;

use kvarts_layout::format::{PAGE, PAGE_BYTES};

use crate::engine::space::Space;
use crate::engine::volume::segment::{Segment, SegmentState, fault};
use crate::io::policy::{Action, Stage, decide};
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::{FileId, IoError, IoErrorKind};
use kvarts_contract::{class::Class, clock::Nanos};

/// How often in a row it is gone on elsewhere at once.
const DETOURS_AT_ONCE: u32 = 4;
/// The next time comes after so long, and each further one after twice as long, but for the last of these.
const DETOUR_AFTER: Duration = Duration::from_secs(1);
const DOUBLED_MAX: u32 = 6;

/// How often in a row it was gone on elsewhere because the place that failed failed again, and when last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Detours {
    count: u32,
    last: Nanos,
}

impl Detours {
    fn may_go_on(self, now: Nanos) -> bool {
        let Some(doubled) = self.count.checked_sub(DETOURS_AT_ONCE) else { return true };
        now >= self.last.plus(DETOUR_AFTER * (1 << doubled.min(DOUBLED_MAX)))
    }
}

impl Space {
    /// Returns when nothing is known to be wrong with the device, or with why nothing may be begun.
    pub(crate) async fn look_for_trouble(&self) -> Result<(), Reason> {
        let failed = self.trouble.borrow().as_ref().map(Rc::clone);
        let failed = failed.filter(|_| !kvarts_layout::planted!("device-not-asked"));
        let is_here = |one: &Rc<Segment>| {
            self.volume.segments.borrow().get(&one.number).is_some_and(|here| Rc::ptr_eq(here, one))
        };
        let still = |one: &Rc<Segment>| one.state.get() == SegmentState::Suspect && is_here(one);
        if let Some(failed) = failed.filter(still)
            && let Err(error) = self.ask(&failed).await
        {
            let reason = match decide(&error, Stage::PutData) {
                Action::LatchReadOnly => self.volume.latch(&error),
                _ => fault(&error),
            };
            // What passes is not the disk's.
            if matches!(reason, Reason::Media(_)) {
                self.volume.shared.set_failing(self.volume.shard, Some(&error));
            }
            return Err(reason);
        }
        self.trouble.take();
        self.volume.shared.set_failing(self.volume.shard, None);
        Ok(())
    }

    /// Notes where a write or flush failed, unless only the disk was full.
    pub(crate) fn note_trouble(&self, segment: &Rc<Segment>) {
        if segment.broken().is_some_and(|reason| !matches!(reason, Reason::NoSpace(_))) {
            *self.trouble.borrow_mut() = Some(Rc::clone(segment));
        }
    }

    /// Something became durable.
    pub(crate) fn wrote_well(&self) {
        if self.detours.get().count > 0 {
            self.detours.set(Detours::default());
        }
    }

    async fn ask(&self, failed: &Segment) -> Result<(), IoError> {
        let Err(error) = well(self.ask_there(failed).await) else { return Ok(()) };
        let (detours, now) = (self.detours.get(), self.volume.shared.clock.now());
        let of_the_place = decide(&error, Stage::PutData) == Action::SealSuspect;
        if !of_the_place || !detours.may_go_on(now) {
            return Err(error);
        }
        self.ask_elsewhere(error).await?;
        self.detours.set(Detours { count: detours.count.saturating_add(1), last: now });
        Ok(())
    }

    /// Writes where the write failed.
    async fn ask_there(&self, failed: &Segment) -> Result<(), IoError> {
        // A recycled segment whose header never came has a sound footer, and what that lists may count after a crash:
        // only the header that was to come may be written.
        if failed.may_come_back().is_some() {
            let Ok(image) = self.volume.header_image(failed) else { return Ok(()) };
            let mut page = self.volume.stage(PAGE).await?;
            page.copy_in(0, &image);
            return self.volume.driver.write(Class::Put, failed.file, 0, page, true).await;
        }
        let at = failed.tail.borrow().next;
        // The footer that it would have had leaves more than that.
        let fits = at + 2 * PAGE_BYTES <= self.volume.shared.segment_bytes;
        if fits { self.write_zeros(failed.file, at).await } else { Ok(()) }
    }

    /// Writes to a new file; `error` is what was met before.
    async fn ask_elsewhere(&self, error: IoError) -> Result<(), IoError> {
        // It is on the disk for a moment, like what is asked for holes, and under the same name.
        let _turn = self.probing.take().await;
        if self.volume.shared.take_checkpoint_budget(PAGE_BYTES).is_err() {
            return Err(error);
        }
        let asked = match self.open_probe().await {
            Ok(file) => {
                let asked = self.write_zeros(file, 0).await;
                self.close_probe(file).await;
                asked
            }
            wrong => wrong.map(drop),
        };
        self.volume.shared.give_checkpoint_budget(PAGE_BYTES);
        well(asked)
    }

    async fn write_zeros(&self, file: FileId, at: u64) -> Result<(), IoError> {
        let Some(page) = self.volume.shared.zeros(PAGE_BYTES) else { return Ok(()) };
        self.volume.driver.write(Class::Put, file, at, page, false).await?;
        self.volume.driver.flush(file).await
    }
}

/// A device that wants room is given some by what follows.
fn well(asked: Result<(), IoError>) -> Result<(), IoError> {
    asked.or_else(|error| if error.kind == IoErrorKind::NoSpace { Ok(()) } else { Err(error) })
}
