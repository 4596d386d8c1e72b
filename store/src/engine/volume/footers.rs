//! Footers of sealed segments, read back.

use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::format::footer::Footer;
use kvarts_layout::format::trailer::{self, Trailer};
use kvarts_layout::format::{PAGE, PAGE_BYTES};

use super::Volume;
use super::segment::Segment;
use kvarts_contract::buffers::{Buf, BufMut};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;

impl Volume {
    /// The footer of a sealed segment, from disk, for work of this class.
    pub(crate) async fn read_footer(&self, segment: &Segment, class: Class) -> Result<Footer, Reason> {
        self.shared.work.footers.add(1);
        let shard = self.shard;
        let damaged = |what: String| Reason::Header { shard, segment: segment.number, offset: 0, what };
        let trailer_at = self.shared.segment_bytes - PAGE_BYTES;
        let page = self.stage(PAGE).await?;
        let read = self.driver.read_into(class, segment.file, trailer_at, page);
        let page = read.await?;
        let position = trailer::position(&self.position(segment, 0), self.shared.segment_bytes);
        let trailer = Trailer::decode(&page.to_vec(), &position, &self.shared.secret)
            .map_err(|unsound| damaged(unsound.to_string()))?;
        let buf = self.stage(trailer.footer_bytes as usize).await?;
        let read = self.driver.read_into(class, segment.file, trailer.footer_offset, buf);
        self.decode_footer(segment, trailer.footer_offset, read.await?.freeze()).await
    }

    /// What a footer's bytes say. That takes a millisecond for each few thousand records.
    async fn decode_footer(&self, segment: &Segment, offset: u64, buf: Buf) -> Result<Footer, Reason> {
        let (position, shared, bytes) = (self.position(segment, offset), Arc::clone(&self.shared), buf.len());
        let decode = move || Footer::decode(&buf.to_vec(), &position, &shared.secret);
        let decoded = self.driver.compute(self.dir, bytes, decode).await?;
        decoded.map_err(|unsound| Reason::Header {
            shard: self.shard,
            segment: segment.number,
            offset,
            what: unsound.to_string(),
        })
    }

    /// The footers of sealed segments, read beside each other where it is known where they lie.
    pub(crate) async fn read_footers(
        &self,
        segments: &[Rc<Segment>],
        class: Class,
    ) -> Vec<Result<Footer, Reason>> {
        let mut ahead = Vec::with_capacity(segments.len());
        for segment in segments {
            let read = segment.footer_at.get().and_then(|(offset, bytes)| {
                let buf = BufMut::zeroed(bytes as usize).ok()?;
                Some((offset, self.driver.read_into(class, segment.file, offset, buf)))
            });
            ahead.push(read);
        }
        let mut footers = Vec::with_capacity(segments.len());
        for (segment, read) in segments.iter().zip(ahead) {
            footers.push(match read {
                None => self.read_footer(segment, class).await,
                Some((offset, read)) => match read.await {
                    Err(error) => Err(error.into()),
                    Ok(buf) => self.decode_footer(segment, offset, buf.freeze()).await,
                },
            });
        }
        footers
    }
}
