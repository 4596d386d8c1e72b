//! The names of files and folders in a store's directory: one spelling each, parsed strictly, so that a stray
//! file is never taken for data.
//!
//! `DIR/superblock`, `DIR/shard-0003/segment-00000012`, `DIR/shard-0003/checkpoint-0` and `checkpoint-1`.

/// The file that holds both superblock slots of a directory.
pub const SUPERBLOCK: &str = "superblock";

/// What stands in a directory that a store is being copied into, until all of the copy is durable. With it and without a
/// superblock a directory holds no store, whatever else is in it.
pub const UNFINISHED_COPY: &str = "unfinished-copy";

const SHARD_PREFIX: &str = "shard-";
const SHARD_DIGITS: usize = 4;
const SEGMENT_PREFIX: &str = "segment-";
const SEGMENT_DIGITS: usize = 8;
const CHECKPOINT_PREFIX: &str = "checkpoint-";

/// What an entry of a store's directory, or of a shard's folder, is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileName {
    /// The superblock of a directory.
    Superblock,
    /// A shard's folder.
    Shard(u32),
    /// A segment of a shard.
    Segment(u32),
    /// One of a shard's two checkpoint files: 0 or 1.
    Checkpoint(u32),
}

/// The name of a shard's folder.
pub fn shard_name(shard: u32) -> String {
    format!("{SHARD_PREFIX}{shard:0SHARD_DIGITS$}")
}

/// The name of a segment's file.
pub fn segment_name(segment: u32) -> String {
    format!("{SEGMENT_PREFIX}{segment:0SEGMENT_DIGITS$}")
}

/// The name of a checkpoint's file; only the lowest bit of `slot` counts.
pub fn checkpoint_name(slot: u32) -> String {
    format!("{CHECKPOINT_PREFIX}{}", slot & 1)
}

impl FileName {
    /// The one meaning of a name, or `None` for every name that the functions above do not make.
    pub fn parse(name: &str) -> Option<Self> {
        let number = |prefix, digits| number(name.strip_prefix(prefix)?, digits);
        if name == SUPERBLOCK {
            return Some(Self::Superblock);
        }
        None.or_else(|| number(SHARD_PREFIX, SHARD_DIGITS).map(Self::Shard))
            .or_else(|| number(SEGMENT_PREFIX, SEGMENT_DIGITS).map(Self::Segment))
            .or_else(|| number(CHECKPOINT_PREFIX, 1).filter(|slot| *slot < 2).map(Self::Checkpoint))
    }
}

/// At least `digits` decimal digits, more only where the number needs them.
fn number(text: &str, digits: usize) -> Option<u32> {
    let all_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let canonical = text.len() == digits || (text.len() > digits && !text.starts_with('0'));
    if all_digits && canonical { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_spelled_as_the_format_says() {
        assert_eq!(shard_name(3), "shard-0003");
        assert_eq!(segment_name(12), "segment-00000012");
        assert_eq!(checkpoint_name(1), "checkpoint-1");
    }

    #[test]
    fn stray_files_have_no_meaning() {
        for name in [
            "",
            "superblock~",
            UNFINISHED_COPY,
            "shard-3",
            "shard-00003",
            "shard-+003",
            "shard--001",
            "segment-12",
            "segment-00000012.bak",
            "segment-4294967296",
            "checkpoint-2",
            "checkpoint-",
            "checkpoint-01",
            "lost+found",
        ] {
            assert_eq!(FileName::parse(name), None, "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn every_name_means_what_it_was_made_from(number: u32) {
            prop_assert_eq!(FileName::parse(&shard_name(number)), Some(FileName::Shard(number)));
            prop_assert_eq!(FileName::parse(&segment_name(number)), Some(FileName::Segment(number)));
            prop_assert_eq!(FileName::parse(&checkpoint_name(number)), Some(FileName::Checkpoint(number & 1)));
        }

        #[test]
        fn a_text_that_means_something_is_the_name_of_it(name in "(shard|segment|checkpoint)-[0-9]{0,11}") {
            let made = match FileName::parse(&name) {
                None => return Ok(()),
                Some(FileName::Superblock) => SUPERBLOCK.to_owned(),
                Some(FileName::Shard(number)) => shard_name(number),
                Some(FileName::Segment(number)) => segment_name(number),
                Some(FileName::Checkpoint(slot)) => checkpoint_name(slot),
            };
            prop_assert_eq!(made, name);
        }
    }
}
