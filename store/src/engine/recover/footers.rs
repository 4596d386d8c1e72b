//! Footers on their way into the index: several are read at a time, and decoded on other threads while the executor takes in those before.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use kvarts_layout::format::footer::{self, Footer};
use kvarts_layout::format::trailer::Trailer;

use super::found_holes;
use super::observe::Ends;
use crate::engine::volume::Volume;
use crate::engine::volume::pages::{CLASS, memory};
use crate::engine::volume::segment::Segment;
use crate::io::MetaOp;
use kvarts_contract::error::Reason;

/// What a segment lists, unless its footer is lost; and the bytes of its records that its file has not, unless that is unknown.
pub(super) type Found = (Option<Footer>, Result<Option<Vec<(u64, u64)>>, Reason>);

/// Footers in the order in which they were begun.
#[derive(Default)]
pub(super) struct Ahead<'a>(VecDeque<Coming<'a>>);

enum Coming<'a> {
    OnItsWay(Pin<Box<dyn Future<Output = Found> + 'a>>),
    Here(Found),
}

impl<'a> Ahead<'a> {
    pub(super) fn begin(&mut self, footer: impl Future<Output = Found> + 'a) {
        self.0.push_back(Coming::OnItsWay(Box::pin(footer)));
    }

    /// The first of them, which was begun. Those behind it go on, too: what was read is decoded meanwhile.
    pub(super) async fn next(&mut self) -> Found {
        let first = poll_fn(|context| {
            for one in &mut self.0 {
                if let Coming::OnItsWay(footer) = one
                    && let Poll::Ready(found) = footer.as_mut().poll(context)
                {
                    *one = Coming::Here(found);
                }
            }
            match self.0.pop_front() {
                Some(Coming::OnItsWay(footer)) => {
                    self.0.push_front(Coming::OnItsWay(footer));
                    Poll::Pending
                }
                Some(Coming::Here(found)) => Poll::Ready(Some(found)),
                None => Poll::Ready(None),
            }
        });
        first.await.unwrap_or((None, Err(Reason::Bug("the read of a footer was not started"))))
    }
}

/// Begins to read a footer.
pub(super) fn find<'a>(
    volume: &'a Volume,
    segment: &Segment,
    (ends, trailer): (&Ends, Trailer),
) -> Result<impl Future<Output = Found> + 'a, Reason> {
    let (file, offset, bytes) = (segment.file, trailer.footer_offset, trailer.footer_bytes as usize);
    let read = volume.driver.read_into(CLASS, file, offset, memory(volume, bytes)?);
    // Bytes behind the records belong to none, and are mostly one hole that was never written.
    let holes = volume.driver.meta(MetaOp::Holes { file, upto: trailer.log_end });
    let (position, shared) = (ends.trailer_position.at(offset), Arc::clone(&volume.shared));
    Ok(async move {
        let footer = match read.await {
            Err(_) => None,
            Ok(image) => {
                let decode = move || {
                    // Decoded where it lies: there are tens of megabytes of footers for a million blocks.
                    let decode = |image: &[u8]| {
                        let is_named = footer::tag_of(image) == Some(trailer.footer_tag);
                        Footer::decode(image, &position, &shared.secret).ok().filter(|_| is_named)
                    };
                    image.digest(0, image.len(), decode)
                };
                volume.driver.compute(volume.dir, bytes, decode).await.ok().flatten()
            }
        };
        (footer, found_holes(holes.await))
    })
}
