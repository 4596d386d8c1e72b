//! The superblock: what a directory is part of. One file of two slots, written in turn.
//!
//! Invariants:
//! - Everything but padding lies in the first sector of a slot, so a slot is written whole or not at all.
//! - A new state goes, with the next sequence, into the slot that does not hold the current one, and is flushed
//!   before it counts. So at every moment one slot is sound.
//! - The secret lies in the slot that it seals: the tag of a slot proves that it is whole, not who wrote it.
//!   A user who can write the superblock owns the store.

use super::field::Field;
use super::members::{COUNTED, Member, Membership};
use super::position::Position;
use super::seal::{Draft, OFFSET, Secret, Structure, claimed_position, prove_page, require_zero};
use super::unsound::{Damage, EncodeError, Unsound};
use super::{PAGE, PAGE_BYTES, SECTOR, VERSION, is_segment_size};
use crate::ids::StoreId;

/// The most shards one directory may hold: their numbers fit in the slot's first sector.
pub const MAX_SHARDS_PER_DIRECTORY: usize = 64;
/// The most shards and directories a whole store may have.
pub const MAX_SHARDS: u32 = 4096;
/// Bytes of the superblock's file.
pub const FILE_BYTES: usize = 2 * PAGE;

/// The key of all tags: without it every tenant could forge records.
pub const SECRET: Field = OFFSET.then("secret", 32);
/// When the store was made, in milliseconds since 1970: names the store for people.
pub const CREATED_MS: Field = SECRET.then("created_ms", 8);
/// Size of every segment file: a scan must know where a segment ends.
pub const SEGMENT_BYTES: Field = CREATED_MS.then("segment_bytes", 8);
/// The oldest version that may open the store: keeps an old program from writing into what it half knows.
pub const MIN_READER: Field = SEGMENT_BYTES.then("min_reader", 2);
/// Bit 0: closed cleanly. Other bits are zero.
pub const FLAGS: Field = MIN_READER.then("flags", 2);
/// Number of directories the store spans: a missing device is noticed.
pub const DIRECTORIES: Field = FLAGS.then("directories", 4);
/// Shards of the whole store: keys are spread over all of them.
pub const SHARDS_TOTAL: Field = DIRECTORIES.then("shards_total", 4);
/// Shards in this directory: a missing shard folder is noticed.
pub const SHARDS_HERE: Field = SHARDS_TOTAL.then("shards_here", 4);
/// Their numbers, ascending; unused places are zero.
pub const SHARDS: Field = SHARDS_HERE.then("shards", MAX_SHARDS_PER_DIRECTORY * 4);
/// The term that this directory takes part in: one with a lower term than another missed deletes.
pub const TERM: Field = SHARDS.then("term", 4);
/// The highest term that was ever proposed to it: no two sets of directories begin the same one.
pub const PROPOSED: Field = TERM.then("proposed", 4);
/// Directories that take part in the term; zero for all: with fewer than that another set may have begun it.
pub const IN_USE: Field = PROPOSED.then("in_use", 4);
/// For each of the first directories the term from which on what it holds counts: a replaced one does not come back.
pub const COUNTS_FROM: Field = IN_USE.then("counts_from", COUNTED * 4);

/// The fields behind the preamble.
pub const FIELDS: &[Field] = &[
    SECRET,
    CREATED_MS,
    SEGMENT_BYTES,
    MIN_READER,
    FLAGS,
    DIRECTORIES,
    SHARDS_TOTAL,
    SHARDS_HERE,
    SHARDS,
    TERM,
    PROPOSED,
    IN_USE,
    COUNTS_FROM,
];

const _: () = assert!(COUNTS_FROM.end() <= SECTOR, "a slot must not need more than one sector");

const CLEAN: u16 = 1;

/// What a directory is part of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// The store.
    pub store: StoreId,
    /// Which of the store's directories this is.
    pub directory: u32,
    /// Counts the states of this superblock; the higher one counts.
    pub sequence: u64,
    /// The key of the store's tags.
    pub secret: Secret,
    /// When the store was made.
    pub created_ms: u64,
    /// Size of every segment.
    pub segment_bytes: u64,
    /// The oldest version that may open the store.
    pub min_reader: u16,
    /// Whether the store was closed cleanly after its last write.
    pub clean: bool,
    /// Directories of the whole store.
    pub directories: u32,
    /// Shards of the whole store.
    pub shards_total: u32,
    /// The shards in this directory, ascending.
    pub shards: Vec<u32>,
    /// Which of the store's directories are in use, as this one knows it.
    pub membership: Membership,
}

/// Why a superblock file cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PairUnsound {
    /// Neither slot is sound: what each of them is.
    Both(Unsound, Unsound),
    /// Both slots are sound and carry one sequence, but differ: something other than this program wrote here.
    Conflict,
}

/// The slot that counts, and what the other one was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// The current state.
    pub superblock: Superblock,
    /// The slot it lies in, 0 or 1. The next state goes into the other.
    pub slot: u32,
    /// The other slot's sequence, or why it is not sound. After a legal crash both are sound, or the other is
    /// empty because only one state was ever written.
    pub other: Result<u64, Unsound>,
}

/// Where a slot of the superblock stands.
pub fn position(store: StoreId, directory: u32, sequence: u64, slot: u32) -> Position {
    Position {
        store,
        shard: directory,
        segment: 0,
        generation: sequence,
        offset: PAGE_BYTES.saturating_mul(u64::from(slot)),
    }
}

impl Superblock {
    /// The directory, as it is compared with others of its store.
    pub fn member(&self) -> Member {
        Member { directory: self.directory, membership: self.membership }
    }

    fn check(&self) -> Result<(), &'static str> {
        let ascending = self.shards.is_sorted_by(|a, b| a < b);
        let limits = [
            (is_segment_size(self.segment_bytes), SEGMENT_BYTES),
            (self.directories <= MAX_SHARDS && self.directory < self.directories, DIRECTORIES),
            ((1..=MAX_SHARDS).contains(&self.shards_total), SHARDS_TOTAL),
            (self.shards.len() <= MAX_SHARDS_PER_DIRECTORY, SHARDS_HERE),
            (ascending && self.shards.iter().all(|shard| *shard < self.shards_total), SHARDS),
            (self.membership.term <= self.membership.proposed, PROPOSED),
            (self.membership.in_use <= self.directories, IN_USE),
        ];
        limits.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, field)| Err(field.name))
    }

    /// The image of this state for a slot. Writing it is atomic where a sector is.
    pub fn encode(&self, slot: u32) -> Result<Vec<u8>, EncodeError> {
        self.check().map_err(EncodeError::Field)?;
        if slot > 1 {
            return Err(EncodeError::Field("slot"));
        }
        let here = u32::try_from(self.shards.len()).map_err(|_| EncodeError::TooLarge)?;
        let mut shards = [0u8; SHARDS.bytes];
        for (place, shard) in shards.as_chunks_mut::<4>().0.iter_mut().zip(&self.shards) {
            *place = shard.to_le_bytes();
        }
        let mut draft = Draft::page(Structure::Superblock);
        draft.put(SECRET, self.secret.expose());
        draft.put(CREATED_MS, self.created_ms.to_le_bytes());
        draft.put(SEGMENT_BYTES, self.segment_bytes.to_le_bytes());
        draft.put(MIN_READER, self.min_reader.to_le_bytes());
        draft.put(FLAGS, (if self.clean { CLEAN } else { 0 }).to_le_bytes());
        draft.put(DIRECTORIES, self.directories.to_le_bytes());
        draft.put(SHARDS_TOTAL, self.shards_total.to_le_bytes());
        draft.put(SHARDS_HERE, here.to_le_bytes());
        draft.put(SHARDS, shards);
        let Membership { term, proposed, in_use, counts_from } = self.membership;
        draft.put(TERM, term.to_le_bytes());
        draft.put(PROPOSED, proposed.to_le_bytes());
        draft.put(IN_USE, in_use.to_le_bytes());
        let mut counted = [0u8; COUNTS_FROM.bytes];
        for (place, from) in counted.as_chunks_mut::<4>().0.iter_mut().zip(counts_from) {
            *place = from.to_le_bytes();
        }
        draft.put(COUNTS_FROM, counted);
        let position = position(self.store, self.directory, self.sequence, slot);
        Ok(draft.seal(&position, &self.secret))
    }

    /// The state in one slot's page. `store`, where the caller knows it, tells a foreign superblock.
    pub fn decode(page: &[u8], slot: u32, store: Option<StoreId>) -> Result<Self, Unsound> {
        let length = Unsound::Damaged { what: Damage::Length };
        let page = page.get(..PAGE).ok_or(length)?;
        let claimed = claimed_position(page).ok_or(length)?;
        let secret = Secret::new(SECRET.get(page)?);
        let expected = position(store.unwrap_or(claimed.store), claimed.shard, claimed.generation, slot);
        prove_page(Structure::Superblock, page, &expected, &secret)?;
        require_zero(page.get(COUNTS_FROM.end()..).unwrap_or_default())?;
        super::seal::require_kind_zero(page)?;

        let field = |field: Field| Unsound::Damaged { what: Damage::Field(field.name) };
        let min_reader = MIN_READER.get_u16(page)?;
        if min_reader > VERSION {
            return Err(Unsound::Newer { version: min_reader });
        }
        let flags = FLAGS.get_u16(page)?;
        if flags & !CLEAN != 0 {
            return Err(field(FLAGS));
        }
        let here = usize::try_from(SHARDS_HERE.get_u32(page)?).map_err(|_| field(SHARDS_HERE))?;
        let all = SHARDS.get::<{ SHARDS.bytes }>(page)?;
        let (used, unused) = all.as_chunks::<4>().0.split_at_checked(here).ok_or(field(SHARDS_HERE))?;
        require_zero(unused.as_flattened())?;
        let counted = COUNTS_FROM.get::<{ COUNTS_FROM.bytes }>(page)?;
        let mut counts_from = [0; COUNTED];
        for (from, bytes) in counts_from.iter_mut().zip(counted.as_chunks::<4>().0) {
            *from = u32::from_le_bytes(*bytes);
        }
        let superblock = Self {
            store: claimed.store,
            directory: claimed.shard,
            sequence: claimed.generation,
            secret,
            created_ms: CREATED_MS.get_u64(page)?,
            segment_bytes: SEGMENT_BYTES.get_u64(page)?,
            min_reader,
            clean: flags & CLEAN != 0,
            directories: DIRECTORIES.get_u32(page)?,
            shards_total: SHARDS_TOTAL.get_u32(page)?,
            shards: used.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
            membership: Membership {
                term: TERM.get_u32(page)?,
                proposed: PROPOSED.get_u32(page)?,
                in_use: IN_USE.get_u32(page)?,
                counts_from,
            },
        };
        superblock.check().map_err(|name| Unsound::Damaged { what: Damage::Field(name) })?;
        Ok(superblock)
    }

    /// The current state out of both slots: the sound one, or the one with the higher sequence. A file that is
    /// shorter than two pages has an unsound slot 1.
    pub fn decode_pair(file: &[u8], store: Option<StoreId>) -> Result<Chosen, PairUnsound> {
        let first = Self::decode(file, 0, store);
        let second = Self::decode(file.get(PAGE..).unwrap_or_default(), 1, store);
        match (first, second) {
            (Err(first), Err(second)) => Err(PairUnsound::Both(first, second)),
            (Ok(superblock), Err(other)) => Ok(Chosen { superblock, slot: 0, other: Err(other) }),
            (Err(other), Ok(superblock)) => Ok(Chosen { superblock, slot: 1, other: Err(other) }),
            (Ok(first), Ok(second)) => {
                let one_store = first.store == second.store
                    && first.secret == second.secret
                    && first.directory == second.directory;
                if !one_store || (first.sequence == second.sequence && first != second) {
                    return Err(PairUnsound::Conflict);
                }
                let (superblock, slot, other) = if first.sequence >= second.sequence {
                    (first, 0, second.sequence)
                } else {
                    let other = first.sequence;
                    (second, 1, other)
                };
                Ok(Chosen { superblock, slot, other: Ok(other) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn pair(first: &[u8], second: &[u8]) -> Result<Chosen, PairUnsound> {
        Superblock::decode_pair(&[first, second].concat(), Some(samples::STORE))
    }

    #[test]
    fn the_slot_with_the_higher_sequence_counts() {
        let old = samples::superblock();
        let new = Superblock { sequence: old.sequence + 1, clean: false, ..old.clone() };
        let chosen = pair(&old.encode(0).unwrap(), &new.encode(1).unwrap()).unwrap();
        assert_eq!((chosen.superblock, chosen.slot, chosen.other), (new.clone(), 1, Ok(old.sequence)));
        let chosen = pair(&new.encode(0).unwrap(), &old.encode(1).unwrap()).unwrap();
        assert_eq!((chosen.superblock, chosen.slot), (new, 0));
    }

    #[test]
    fn one_damaged_slot_leaves_the_other() {
        let state = samples::superblock();
        let mut damaged = state.encode(0).unwrap();
        damaged[CREATED_MS.offset] ^= 1;
        let chosen = pair(&damaged, &state.encode(1).unwrap()).unwrap();
        assert_eq!(chosen.other, Err(Unsound::Damaged { what: Damage::Crc }));
        assert_eq!(pair(&state.encode(0).unwrap(), &[]).unwrap().superblock, state);
        assert!(matches!(pair(&damaged, &[]), Err(PairUnsound::Both(..))));
    }

    #[test]
    fn two_states_under_one_sequence_are_a_conflict() {
        let state = samples::superblock();
        let other = Superblock { clean: !state.clean, ..state.clone() };
        assert_eq!(pair(&state.encode(0).unwrap(), &other.encode(1).unwrap()), Err(PairUnsound::Conflict));
        assert!(pair(&state.encode(0).unwrap(), &state.encode(1).unwrap()).is_ok());
    }

    #[test]
    fn slots_of_two_stores_are_a_conflict() {
        let state = samples::superblock();
        let other = Superblock { store: StoreId([9; 16]), sequence: 99, ..state.clone() };
        let file = [state.encode(0).unwrap(), other.encode(1).unwrap()].concat();
        assert_eq!(Superblock::decode_pair(&file, None), Err(PairUnsound::Conflict));
        let chosen = Superblock::decode_pair(&file, Some(samples::STORE)).unwrap();
        assert_eq!(chosen.other, Err(Unsound::Foreign { store: StoreId([9; 16]) }));
    }

    #[test]
    fn a_slot_in_the_other_place_is_misdirected() {
        let page = samples::superblock().encode(1).unwrap();
        assert!(matches!(Superblock::decode(&page, 0, None), Err(Unsound::Misdirected { .. })));
    }

    #[test]
    fn what_would_not_decode_is_not_encoded() {
        let good = samples::superblock();
        for bad in [
            Superblock { segment_bytes: 4096, ..good.clone() },
            Superblock { segment_bytes: (64 << 10) + 1, ..good.clone() },
            Superblock { directory: 7, directories: 7, ..good.clone() },
            Superblock { shards: vec![1, 1], ..good.clone() },
            Superblock { shards: vec![good.shards_total], ..good.clone() },
            Superblock { shards_total: 0, shards: vec![], ..good.clone() },
            Superblock { shards_total: 4096, shards: (0..65).collect(), ..good.clone() },
            Superblock { membership: Membership { term: 1, ..Membership::default() }, ..good.clone() },
            Superblock { membership: Membership { in_use: 3, ..Membership::default() }, ..good.clone() },
        ] {
            assert!(matches!(bad.encode(0), Err(EncodeError::Field(_))), "{bad:?}");
        }
    }

    #[test]
    fn a_store_that_needs_a_newer_reader_is_refused() {
        let page = Superblock { min_reader: VERSION + 1, ..samples::superblock() }.encode(0).unwrap();
        assert_eq!(Superblock::decode(&page, 0, None), Err(Unsound::Newer { version: VERSION + 1 }));
    }

    #[test]
    fn a_slot_that_breaks_a_rule_behind_a_valid_tag_is_refused() {
        let image = samples::superblock().encode(0).unwrap();
        let page = |image: &[u8]| Superblock::decode(image, 0, None).unwrap_err();
        let damaged = |what| Unsound::Damaged { what };
        let flags = samples::altered(Structure::Superblock, &image, FLAGS, [2, 0]);
        assert_eq!(page(&flags), damaged(Damage::Field("flags")));
        let many = samples::altered(Structure::Superblock, &image, SHARDS_HERE, 65u32.to_le_bytes());
        assert_eq!(page(&many), damaged(Damage::Field("shards_here")));
        let fewer = samples::altered(Structure::Superblock, &image, SHARDS_HERE, 3u32.to_le_bytes());
        assert_eq!(page(&fewer), damaged(Damage::Padding));
        let more = samples::altered(Structure::Superblock, &image, SHARDS_HERE, 5u32.to_le_bytes());
        assert_eq!(page(&more), damaged(Damage::Field("shards")));
    }
}
