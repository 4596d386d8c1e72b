//! Sealing a segment: footer and trailer.

use std::rc::Rc;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::footer::{self, Entry, Footer};
use kvarts_layout::format::trailer::{self, SealReason, Trailer};

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
        let listed = Footer { records: segment.tail.borrow().entries.clone() };
        let (footer, trailer) = self.seal_images(segment, &listed, end, reason)?;
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
        segment.tail.borrow_mut().entries = Vec::new();
        segment.sealed_at(end, footer_at, reason);
        // One that is full lacks less than a record: it keeps that, and is recycled as it is.
        if self.closing.get() || reason == SealReason::Recovery {
            self.space.give_rest_back(segment, &listed.records).await;
        }
        segment.state.set(SegmentState::Sealed);
        Ok(())
    }

    /// The footer and the trailer, as they are written.
    fn seal_images(
        &self,
        segment: &Segment,
        footer: &Footer,
        log_end: u64,
        reason: SealReason,
    ) -> Result<(Vec<u8>, Vec<u8>), Reason> {
        let bug = |_| Reason::Bug("a footer that cannot be encoded");
        let secret = &self.volume.shared.secret;
        let trailer_at = self.volume.shared.segment_bytes - PAGE_BYTES;
        // The footer ends where the trailer begins, so its length must be known before its position.
        let probe = footer.encode(&self.volume.position(segment, trailer_at), secret).map_err(bug)?;
        let footer_offset = trailer_at - probe.len() as u64;
        let image = footer.encode(&self.volume.position(segment, footer_offset), secret).map_err(bug)?;
        let footer_bytes = u32::try_from(image.len()).map_err(|_| Reason::Bug("a footer of 4 GiB"))?;
        let sequence =
            |entry: Option<&Entry>| entry.map_or(segment.first_sequence.get(), |entry| entry.sequence);
        let trailer = Trailer {
            footer_offset,
            footer_tag: footer::tag_of(&image).ok_or(Reason::Bug("a footer without a tag"))?,
            footer_bytes,
            record_count: footer.records.len() as u32,
            first_sequence: sequence(footer.records.first()),
            last_sequence: sequence(footer.records.last()),
            log_end,
            reason,
        };
        let position = trailer::position(&self.volume.position(segment, 0), self.volume.shared.segment_bytes);
        let trailer = trailer.encode(&position, secret).map_err(bug)?;
        Ok((image, trailer))
    }
}
