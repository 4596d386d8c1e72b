//! The list of deletes in a file: a few bytes that say what it is, then one frame for each entry. New ones are appended; when the
//! list becomes shorter the file is written anew.
//!
//! What follows a frame that is not whole is not read: a power cut may leave that at the end. Each entry that was acknowledged is
//! with other nodes as well, which tell it again.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_cluster::deletes::{Entry, Log, Name};
use kvarts_wire::proto;
use prost::Message;

use super::wire;

/// The first bytes of the file.
const MAGIC: &[u8; 8] = b"KVARTSD1";
/// The bytes of a frame before its entry: how long it is, and its CRC-32, both little-endian.
const HEAD_BYTES: usize = 8;
/// The longest entry.
const ENTRY_BYTES_MAX: usize = 4 << 20;
/// The most that is read of a file: longer than the list ever is.
pub const FILE_BYTES_MAX: u64 = 128 << 20;

/// Something that is written.
pub type Written<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + Send + 'a>>;

/// Where a node keeps its list of deletes.
pub trait Kept: Send + Sync + fmt::Debug {
    /// Each copy of it; an empty one where there was none. It is asked for once, at the start.
    fn load(&self) -> io::Result<Vec<Vec<u8>>>;
    /// Puts bytes at the end, durably.
    fn append(&self, bytes: Vec<u8>) -> Written<'_>;
    /// Puts bytes in the place of all that there are, durably; a crash leaves the old ones or the new ones.
    fn replace(&self, bytes: Vec<u8>) -> Written<'_>;
}

/// A list that lasts as long as its owner: for tests.
#[derive(Clone, Debug, Default)]
pub struct InMemory(Arc<Mutex<Vec<u8>>>);

impl InMemory {
    /// The bytes.
    pub fn bytes(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept for InMemory {
    fn load(&self) -> io::Result<Vec<Vec<u8>>> {
        Ok(vec![self.bytes().clone()])
    }

    fn append(&self, bytes: Vec<u8>) -> Written<'_> {
        self.bytes().extend(bytes);
        Box::pin(std::future::ready(Ok(())))
    }

    fn replace(&self, bytes: Vec<u8>) -> Written<'_> {
        *self.bytes() = bytes;
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The frame of an entry.
pub(super) fn frame(name: &Name, entry: &Entry) -> Vec<u8> {
    let body = wire::wire_entry(name, name.1.saturating_sub(1), entry).encode_to_vec();
    let mut frame = Vec::with_capacity(HEAD_BYTES + body.len());
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    frame.extend_from_slice(&body);
    frame
}

/// A file with all that a list has.
pub(super) fn image(log: &Log) -> Vec<u8> {
    let mut image = MAGIC.to_vec();
    log.entries().for_each(|(name, entry)| image.extend(frame(name, entry)));
    image
}

/// An entry and its name.
type Listed = (Name, Arc<Entry>);

/// What a file says, and whether all of it could be read.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) entries: Vec<Listed>,
    pub(super) is_whole: bool,
}

/// Reads a file.
pub(super) fn read(image: &[u8]) -> Found {
    let Some(mut left) = image.strip_prefix(MAGIC) else {
        return Found { entries: Vec::new(), is_whole: image.is_empty() };
    };
    let mut entries = Vec::new();
    while let Some((entry, rest)) = next(left) {
        entries.push(entry);
        left = rest;
    }
    Found { entries, is_whole: left.is_empty() }
}

/// What copies say together, and whether they are equal: one that was not written for a while lacks entries that another has. Of each node
/// in the order of its entries, by which others know how far they have come.
pub(super) fn read_all(images: &[Vec<u8>]) -> (Found, bool) {
    let mut copies: Vec<Found> = images.iter().map(|image| read(image)).collect();
    let is_whole = copies.iter().all(|copy| copy.is_whole);
    if images.windows(2).all(|two| two.first() == two.last()) {
        let entries = copies.pop().map_or_else(Vec::new, |copy| copy.entries);
        return (Found { entries, is_whole }, true);
    }
    let all: BTreeMap<_, _> = copies.into_iter().flat_map(|copy| copy.entries).collect();
    (Found { entries: all.into_iter().collect(), is_whole }, false)
}

fn next(bytes: &[u8]) -> Option<(Listed, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (digest, rest) = rest.split_first_chunk::<4>()?;
    let length =
        usize::try_from(u32::from_le_bytes(*length)).ok().filter(|length| *length <= ENTRY_BYTES_MAX)?;
    let (body, rest) = rest.split_at_checked(length)?;
    if crc32fast::hash(body) != u32::from_le_bytes(*digest) {
        return None;
    }
    let told = wire::entry(&proto::DeleteEntry::decode(body).ok()?).ok()?;
    Some(((told.name, told.entry), rest))
}

#[cfg(test)]
mod tests {
    use super::super::wire::tests::some;
    use super::*;
    use proptest::prelude::*;

    fn written(entries: &[(Name, Arc<Entry>)]) -> (Vec<u8>, Vec<usize>) {
        let (mut image, mut ends) = (MAGIC.to_vec(), Vec::new());
        for (name, entry) in entries {
            image.extend(frame(name, entry));
            ends.push(image.len());
        }
        (image, ends)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn of_a_file_that_is_cut_or_flipped_what_stands_before_is_read_and_nothing_else(
            entries in prop::collection::vec(some(), 1..5)
        ) {
            let (image, ends) = written(&entries);
            let whole = read(&image);
            prop_assert!(whole.is_whole);
            prop_assert_eq!(&whole.entries, &entries);
            for cut in 0..image.len() {
                let found = read(&image[..cut]);
                let before = ends.iter().filter(|end| **end <= cut).count();
                prop_assert_eq!(&found.entries[..], &entries[..before]);
                prop_assert_eq!(found.is_whole, cut == 0 || cut == MAGIC.len() || ends.contains(&cut));
            }
            let mut flipped = image.clone();
            for bit in 0..image.len() * 8 {
                flipped[bit / 8] ^= 1 << (bit % 8);
                let found = read(&flipped);
                let before = if bit / 8 < MAGIC.len() { 0 } else { ends.iter().filter(|end| **end <= bit / 8).count() };
                prop_assert_eq!(&found.entries[..], &entries[..before], "bit {}", bit);
                prop_assert!(!found.is_whole, "bit {}", bit);
                flipped[bit / 8] ^= 1 << (bit % 8);
            }
        }

        #[test]
        fn of_copies_of_which_some_were_not_written_for_a_while_nothing_is_missing_and_nothing_is_twice(
            entries in prop::collection::vec(some(), 1..6), first in 0..6usize, torn in 0..40usize
        ) {
            let all: BTreeMap<_, _> = entries.into_iter().collect();
            let all: Vec<_> = all.into_iter().collect();
            let first = first.min(all.len());
            let ((early, _), (late, _), (whole, _)) = (written(&all[..first]), written(&all[first..]), written(&all));
            for images in [vec![early.clone(), late.clone()], vec![late, early.clone()], vec![Vec::new(), whole.clone()]] {
                let (found, are_equal) = read_all(&images);
                prop_assert_eq!((&found.entries, found.is_whole), (&all, true));
                prop_assert!(!are_equal);
            }
            let (found, are_equal) = read_all(&[whole.clone(), whole.clone()]);
            prop_assert_eq!((&found.entries, found.is_whole, are_equal), (&all, true, true));
            let cut = whole[..whole.len() - 1 - torn % (whole.len() - MAGIC.len())].to_vec();
            let (found, are_equal) = read_all(&[cut, whole]);
            prop_assert_eq!((&found.entries, are_equal), (&all, false));
        }

        #[test]
        fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
            let _ = read(&[MAGIC, &bytes[..]].concat());
        }
    }

    #[test]
    fn a_list_that_was_never_written_is_whole() {
        assert!(read(&[]).is_whole && read(&image(&Log::default())).is_whole);
    }
}
