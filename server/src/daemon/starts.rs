//! How often a store has started as a node of a cluster, in a file in each of its directories.
//!
//! The number grows with every start: it distinguishes leases and deletes of this start from those of earlier ones. If a directory is out of
//! use, the number of the last start may have been written there alone, and is not known. The start then takes the seconds of the clock,
//! which no count of starts reaches. It does the same if the directories have different numbers, or some have none.

use std::fs::File;
use std::io::Write;
use std::path::Path;

/// The file.
pub(super) const FILE: &str = "cluster-starts";

/// The most bytes of it.
const BYTES_MAX: u64 = 32;
/// 2020-01-01: seconds since then fit into the number for a century.
const SECONDS_FROM: u64 = 1_577_836_800;

/// The number as it stands in the file: with a digest, since one that came out less would let old leases stand.
fn encode(starts: u32) -> String {
    let digits = starts.to_string();
    format!("{digits} {:08x}\n", crc32fast::hash(digits.as_bytes()))
}

/// The number, if this is how it is written.
fn decode(text: &str) -> Option<u32> {
    let (digits, _) = text.split_once(' ')?;
    digits.parse().ok().filter(|starts| encode(*starts) == text)
}

/// What a directory has; `None` if it has no number.
fn read(directory: &Path) -> Result<Option<u32>, String> {
    let path = directory.join(FILE);
    let told = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let damaged = "the file is damaged: wait until this node has been stopped for 69 s (its leases may \
        be valid for this time), then remove the file";
    match std::fs::metadata(&path).map(|found| found.len()) {
        Ok(1..=BYTES_MAX) => {
            let text = std::fs::read_to_string(&path).map_err(|error| told(&error))?;
            decode(&text).map(Some).ok_or_else(|| told(&damaged))
        }
        Ok(_) => Err(told(&damaged)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(told(&error)),
    }
}

/// Durable when it returns.
fn write(directory: &Path, starts: u32) -> Result<(), String> {
    let (path, new) = (directory.join(FILE), directory.join(format!("{FILE}.new")));
    let write = || {
        let mut file = File::create(&new)?;
        file.write_all(encode(starts).as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
        File::open(directory)?.sync_all()
    };
    write().map_err(|error: std::io::Error| format!("{}: {error}", path.display()))
}

/// Counts this start in the directories that are in use: a number that is greater than those of all starts before. What was lost with all
/// of them begins again at one. `are_some_out`: the store has other directories, too. `now_s`: seconds since 1970.
pub(super) fn count(in_use: &[&Path], are_some_out: bool, now_s: u64) -> Result<u64, String> {
    let found: Vec<_> = in_use.iter().map(|directory| read(directory)).collect();
    let known = found.iter().filter_map(|one| one.as_ref().ok().copied().flatten()).max();
    // A damaged one is written again from the others, if there are any.
    let damaged = found.iter().find_map(|one| one.as_ref().err());
    if let (None, Some(why)) = (known, damaged) {
        return Err(why.clone());
    }
    let next = known.unwrap_or(0).checked_add(1);
    let next = next.ok_or("cluster-starts: the number of starts of this node has reached its limit")?;
    let is_whole = !are_some_out && found.iter().all(|one| matches!(one, Ok(found) if *found == known));
    let seconds = u32::try_from(now_s.saturating_sub(SECONDS_FROM)).unwrap_or(u32::MAX - 1);
    if are_some_out && seconds == 0 {
        let why = "the clock of this machine is before 2020, and a directory of the store is out of use. The server then computes the number of this start from the clock: set the clock, and start again";
        return Err(format!("cluster-starts: {why}"));
    }
    let now = if is_whole { next } else { next.max(seconds) };
    let written: Vec<_> = in_use.iter().map(|directory| write(directory, now)).collect();
    // A directory in which the write failed has another number: the next start sees that, and takes the seconds.
    match written.iter().any(Result::is_ok) {
        true => Ok(u64::from(now)),
        false => Err(written.into_iter().find_map(Result::err).unwrap_or_else(|| "no directory".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_starts_with_any_bit_flipped_or_cut_off_is_no_count() {
        for starts in [0, 1, 9, 10, 12, 299, u32::MAX] {
            let text = encode(starts);
            assert!(text.len() as u64 <= BYTES_MAX);
            assert_eq!(decode(&text), Some(starts));
            for bit in 0..text.len() * 8 {
                let mut bytes = text.clone().into_bytes();
                bytes[bit / 8] ^= 1 << (bit % 8);
                let flipped = String::from_utf8(bytes).ok();
                assert_eq!(flipped.and_then(|text| decode(&text)), None, "bit {bit} of {text:?}");
            }
            for cut in 0..text.len() {
                assert_eq!(decode(&text[..cut]), None, "cut at {cut}");
            }
        }
        for text in ["", " ", "1", "1\n", "01 83dcefb7\n", "+1 83dcefb7\n", "4294967296 00000000\n", "-1 0\n"]
        {
            assert_eq!(decode(text), None, "{text:?}");
        }
    }

    /// Directories of a store that is a node, and the second that a clock tells.
    struct Directories(Vec<std::path::PathBuf>, u64);

    impl Directories {
        fn new(name: &str) -> Self {
            let base = std::env::temp_dir().join(format!("kvarts-starts-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&base);
            let all: Vec<_> = (0..3).map(|at| base.join(at.to_string())).collect();
            all.iter().for_each(|one| std::fs::create_dir_all(one).unwrap());
            Self(all, SECONDS_FROM + 200_000_000)
        }

        /// A start with these of them, a second later than the one before.
        fn start(&mut self, these: &[usize]) -> Result<u64, String> {
            self.1 += 1;
            let in_use: Vec<&Path> = these.iter().map(|&at| self.0[at].as_path()).collect();
            count(&in_use, these.len() < self.0.len(), self.1)
        }
    }

    impl Drop for Directories {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(self.0[0].parent().unwrap());
        }
    }

    #[test]
    fn a_start_without_some_directories_has_a_greater_number_than_all_before() {
        let mut node = Directories::new("without");
        assert_eq!((node.start(&[0, 1, 2]), node.start(&[0, 1, 2])), (Ok(1), Ok(2)));
        let mut before = 2;
        // Also where what the last start wrote is not there; then all are there again, and one is new.
        for these in [&[1, 2][..], &[0], &[2], &[0, 1, 2], &[0, 1], &[2], &[0, 1, 2], &[0, 1, 2]] {
            let now = node.start(these).unwrap();
            assert!(now > before, "{these:?}: {now} after {before}");
            before = now;
        }
        for replaced in [1, 0] {
            std::fs::remove_file(node.0[replaced].join(FILE)).unwrap();
            let now = node.start(&[0, 1, 2]).unwrap();
            assert!(now > before, "{now} after {before}");
            before = now;
        }
        assert_eq!(node.start(&[0, 1, 2]), Ok(before + 1), "all have the same number again");
    }

    #[test]
    fn a_damaged_number_is_written_again_from_another_directory_and_is_an_error_without_one() {
        let mut node = Directories::new("damaged");
        let first = node.start(&[0, 1, 2]).unwrap();
        std::fs::write(node.0[1].join(FILE), "7").unwrap();
        let second = node.start(&[0, 1, 2]).unwrap();
        assert!(second > first);
        assert_eq!(read(&node.0[1]), Ok(u32::try_from(second).ok()));
        node.1 = 0;
        assert!(
            node.start(&[1]).unwrap_err().contains("set the clock"),
            "a number that may be known already"
        );
        node.0.iter().for_each(|one| std::fs::write(one.join(FILE), "7").unwrap());
        assert!(node.start(&[0, 1, 2]).unwrap_err().contains("damaged"));
    }

    #[test]
    fn a_directory_that_cannot_be_written_does_not_keep_a_node_from_starting() {
        let mut node = Directories::new("unwritable");
        let first = node.start(&[0, 1, 2]).unwrap();
        std::fs::create_dir(node.0[0].join(format!("{FILE}.new"))).unwrap();
        let second = node.start(&[0, 1, 2]).unwrap();
        std::fs::remove_dir(node.0[0].join(format!("{FILE}.new"))).unwrap();
        let third = node.start(&[0]).unwrap();
        assert!(first < second && second < third, "{first}, {second}, {third}");
    }
}
