//! Sealing a segment: footer and trailer.

use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::format::footer::{self, Entry, Footer};
use kvarts_layout::format::trailer::{self, SealReason, Trailer};
use kvarts_layout::format::{EncodeError, PAGE_BYTES, Position};

use super::log::Log;
use crate::engine::volume::segment::{Segment, SegmentState, fault};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::IoError;

impl Log {
    pub(crate) fn seal_in_background(self: &Rc<Self>, segment: Rc<Segment>) {
        segment.state.set(SegmentState::Sealing);
        self.sealing.set(self.sealing.get() + 1);
        let log = Rc::clone(self);
        self.volume.spawn(Box::pin(async move {
            // A segment that could not be sealed is scanned by recovery: nothing is lost by it.
            if let Err(reason) = log.seal(&segment, SealReason::Normal).await {
                segment.break_off(reason);
            }
            log.sealing.set(log.sealing.get() - 1);
            log.volume.changed.wake_all();
        }));
    }

    /// Writes the footer and the trailer, durably. Everything they list is durable before they are written.
    pub(crate) async fn seal(&self, segment: &Rc<Segment>, reason: SealReason) -> Result<(), Reason> {
        segment.quiet().await;
        let end = segment.tail.borrow().next;
        if !kvarts_layout::planted!("seal-before-flush") {
            segment.durable(&self.volume.driver, end).await?;
        }
        // Listed in memory until the footer can be read.
        let listed = Arc::new(Footer { records: std::mem::take(&mut segment.tail.borrow_mut().entries) });
        segment.tail.borrow_mut().sealing = Some(Arc::clone(&listed));
        let written = self.write_seal(segment, &listed, (end, reason)).await;
        segment.tail.borrow_mut().sealing = None;
        let footer_at = match written {
            Ok(footer_at) => footer_at,
            Err(reason) => {
                segment.tail.borrow_mut().entries = Arc::unwrap_or_clone(listed).records;
                return Err(reason);
            }
        };
        let version = self.volume.tombstones.borrow().version();
        segment.sealed_at((end, Some(version)), footer_at, reason);
        // One that is full lacks less than a record: it keeps that, and is recycled as it is.
        if self.closing.get() || reason == SealReason::Recovery {
            self.space.give_rest_back(segment, &listed.records).await;
        }
        segment.state.set(SegmentState::Sealed);
        Ok(())
    }

    /// Writes the two, and gives where the footer lies.
    async fn write_seal(
        &self,
        segment: &Rc<Segment>,
        listed: &Arc<Footer>,
        (end, reason): (u64, SealReason),
    ) -> Result<(u64, u32), Reason> {
        let (footer, trailer) = self.seal_images(segment, listed, end, reason).await?;
        // The footer is durable before the trailer that names it: a trailer without its footer is always damage.
        let trailer_at = self.volume.shared.segment_bytes - PAGE_BYTES;
        let footer_at = (trailer_at - footer.len() as u64, footer.len() as u32);
        let mut images = [(footer_at.0, footer), (trailer_at, trailer)];
        if kvarts_layout::planted!("trailer-before-footer") {
            images.reverse();
        }
        for (at, image) in images {
            let fault = |error: IoError| fault(&error);
            let mut staging = self.volume.stage(image.len()).await.map_err(fault)?;
            staging.copy_in(0, &image);
            let driver = &self.volume.driver;
            driver.write(Class::Background, segment.file, at, staging, true).await.map_err(fault)?;
        }
        Ok(footer_at)
    }

    /// The footer and the trailer, as they are written. That takes a millisecond for each few thousand records.
    async fn seal_images(
        &self,
        segment: &Segment,
        footer: &Arc<Footer>,
        log_end: u64,
        reason: SealReason,
    ) -> Result<(Vec<u8>, Vec<u8>), Reason> {
        let (footer, shared, driver) =
            (Arc::clone(footer), Arc::clone(&self.volume.shared), &self.volume.driver);
        let (position, first_sequence) = (self.volume.position(segment, 0), segment.first_sequence.get());
        let bytes = footer.records.iter().map(|entry| entry.bytes()).sum();
        let images = move || {
            let (secret, trailer_at) = (&shared.secret, shared.segment_bytes - PAGE_BYTES);
            // The footer ends where the trailer begins.
            let draft = footer.draft()?;
            let offset = trailer_at.checked_sub(draft.bytes() as u64).ok_or(EncodeError::TooLarge)?;
            let image = draft.seal(&Position { offset, ..position }, secret)?;
            let sequence = |entry: Option<&Entry>| entry.map_or(first_sequence, |entry| entry.sequence);
            let trailer = Trailer {
                footer_offset: offset,
                footer_tag: footer::tag_of(&image).ok_or(EncodeError::TooLarge)?,
                footer_bytes: u32::try_from(image.len()).map_err(|_| EncodeError::TooLarge)?,
                record_count: footer.records.len() as u32,
                first_sequence: sequence(footer.records.first()),
                last_sequence: sequence(footer.records.last()),
                log_end,
                reason,
            };
            let position = trailer::position(&position, shared.segment_bytes);
            Ok::<_, EncodeError>((image, trailer.encode(&position, secret)?))
        };
        let images = driver.compute(self.volume.dir, bytes, images).await.map_err(|error| fault(&error))?;
        images.map_err(|_| Reason::Bug("a footer cannot be encoded"))
    }
}
