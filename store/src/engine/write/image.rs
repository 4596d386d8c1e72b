//! A record as it is written at its place.

use std::rc::Rc;

use super::draft::Written;
use crate::engine::volume::segment::Segment;

/// A record's images in the order in which they are written, at its place.
pub(crate) struct Image {
    pub(crate) segment: Rc<Segment>,
    /// Where the headers begin, those of definitions that come with it included.
    pub(crate) offset: u64,
    pub(crate) headers: Vec<u8>,
    pub(crate) written: Written,
}
