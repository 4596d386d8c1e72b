//! What a record's header proves: that this is the record that was looked up, that its blocks are the ones that were asked
//! for, where its chunks lie and what their digests are. Reads and loans prove in the same way.

use std::rc::Rc;

use kvarts_layout::format::body::layout_code;
use kvarts_layout::format::record::{self, Body};
use kvarts_layout::{BlockKey, OriginId};

use super::decode::Stored;
use super::header_cache::Header;
use super::wanted::Wanted;
use crate::engine::read::Reads;
use crate::engine::volume::segment::{RecordPlace, Segment};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Reason;

fn place_of(segment: &Segment, offset: u64) -> RecordPlace {
    RecordPlace { segment: segment.number, generation: segment.generation.get(), offset }
}

/// The header of a record, if it was opened before.
pub(crate) fn known(reads: &Reads, segment: &Segment, wanted: &Wanted) -> Option<Rc<Header>> {
    reads.headers.get(place_of(segment, wanted.offset))
}

/// Opens the header of a record as it was read, and keeps it.
pub(crate) fn open(
    reads: &Reads,
    segment: &Segment,
    wanted: &Wanted,
    bytes: &SharedBuf,
) -> Result<Rc<Header>, Reason> {
    let position = reads.volume.position(segment, wanted.offset);
    let header = open_header(&bytes.to_vec(), &position, &reads.volume.shared.secret, (segment, wanted))?;
    let header = Rc::new(header);
    reads.headers.insert(place_of(segment, wanted.offset), &header);
    Ok(header)
}

/// Compares a header with what was asked for of its record. Another record at this place means that the blocks have left
/// since they were looked up: then nothing is proved. Of single blocks `gone` is told that are others than those of
/// `keys`, or of which `admits` does not admit the production.
pub(crate) fn run(
    header: &Header,
    wanted: &Wanted,
    keys: &[BlockKey],
    admits: impl Fn(u32, Option<OriginId>, u64) -> bool,
    mut gone: impl FnMut(u32),
) -> bool {
    if !header.is_arranged_as(&wanted.class, wanted.record_blocks) {
        wanted.run.clone().for_each(gone);
        return false;
    }
    for ordinal in wanted.run.clone() {
        let block = wanted.block_of(ordinal);
        let key = keys.get(ordinal as usize);
        let is_it = key.is_some_and(|key| header.is_block(block, key, &wanted.class))
            || kvarts_layout::planted!("key-not-compared");
        if !is_it || !admits(ordinal, header.origin(block), header.created_ms()) {
            gone(ordinal);
        }
    }
    true
}

/// What a record's header says, if it is the one of this place and holds together.
fn open_header(
    bytes: &[u8],
    position: &kvarts_layout::format::Position,
    secret: &kvarts_layout::format::Secret,
    (segment, wanted): (&Segment, &Wanted),
) -> Result<Header, Reason> {
    let (shard, number, offset) = (position.shard, position.segment, position.offset);
    let wrong = |what: String| Reason::Header { shard, segment: number, offset, what };
    let record = record::open(bytes, position, secret).map_err(|unsound| wrong(unsound.to_string()))?;
    match record.body().map_err(|unsound| wrong(unsound.to_string()))? {
        Body::Blocks(mut blocks) => {
            blocks.namespace = segment.local(blocks.namespace);
            let layout = wanted.class.layout_of(u32::from(wanted.record_blocks))?;
            // Of another record the comparison with the class tells.
            let same = blocks.encoding == wanted.class.encoding
                && blocks.layout == layout_code(wanted.class.layout)
                && blocks.blocks.len() == usize::from(wanted.record_blocks);
            let stored = match same {
                true => Stored::of(&blocks, &layout).map_err(|what| wrong(what.to_owned()))?,
                false => None,
            };
            let expected = stored.as_ref().map_or(layout.payload_bytes(), |one| one.places.payload_bytes());
            if same && expected != record.prefix.payload_bytes {
                return Err(wrong(
                    "the length of the payload does not match the chunks of the record".to_owned(),
                ));
            }
            Ok(Header::new(blocks, record.digests().collect(), stored))
        }
        _ => Err(wrong("the record and its record class have different kinds".to_owned())),
    }
}
