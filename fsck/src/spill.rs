//! A sort of more than memory holds: rows of a fixed length, of which sorted runs go to temporary files.
//!
//! The files have no name and are gone with the process. Rows are compared as bytes, so that their order is the sort's and a
//! file of them needs no decoding.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Runs that are merged at once at most: each has a buffer and a descriptor.
const RUNS_MAX: usize = 512;
/// Rows that are kept in memory whatever was asked for.
const ROWS_MIN: usize = 1024;

/// Rows on their way into an order.
#[derive(Debug)]
pub(crate) struct Sorter<const N: usize> {
    rows: Vec<[u8; N]>,
    runs: Vec<File>,
    most: usize,
    below: PathBuf,
}

impl<const N: usize> Sorter<N> {
    /// Keeps about this much in memory; the rest goes to files below a folder.
    pub(crate) fn new(memory_bytes: usize, below: &Path) -> Self {
        let most = memory_bytes.checked_div(N).unwrap_or(0).max(ROWS_MIN);
        Self { rows: Vec::new(), runs: Vec::new(), most, below: below.to_owned() }
    }

    /// Keeps this many rows in memory.
    #[cfg(test)]
    pub(crate) fn of_rows(most: usize) -> Self {
        Self { most, ..Self::new(0, &std::env::temp_dir()) }
    }

    /// Takes rows in.
    pub(crate) fn take(&mut self, rows: impl IntoIterator<Item = [u8; N]>) -> io::Result<()> {
        for row in rows {
            if self.rows.len() == self.rows.capacity() {
                // No more than is asked for, ever.
                let more = self.rows.len().max(ROWS_MIN).min(self.most.saturating_sub(self.rows.len()));
                self.rows.reserve_exact(more);
            }
            self.rows.push(row);
            if self.rows.len() >= self.most {
                if self.runs.len() >= RUNS_MAX {
                    return Err(io::Error::other(
                        "the memory of the check is too small for a store of this size: raise \
                        --memory-mib",
                    ));
                }
                let run = write_run(&mut self.rows, &self.below)?;
                self.runs.push(run);
                self.rows.clear();
            }
        }
        Ok(())
    }

    /// Hands out all rows in their order.
    pub(crate) fn finish(self, mut each: impl FnMut(&[u8; N])) -> io::Result<()> {
        let Self { mut rows, runs, .. } = self;
        rows.sort_unstable();
        let mut runs: Vec<Run<N>> = runs.into_iter().map(|file| Run::File(BufReader::new(file))).collect();
        runs.push(Run::Memory(rows.into_iter()));
        let mut heads = BinaryHeap::new();
        for (number, run) in runs.iter_mut().enumerate() {
            heads.extend(run.next()?.map(|row| Reverse((row, number))));
        }
        while let Some(Reverse((row, number))) = heads.pop() {
            if let Some(run) = runs.get_mut(number) {
                heads.extend(run.next()?.map(|row| Reverse((row, number))));
            }
            each(&row);
        }
        Ok(())
    }
}

/// Sorts and writes a run into a file that has no name.
#[allow(clippy::disallowed_methods, reason = "the file is temporary and outside every store")]
fn write_run<const N: usize>(rows: &mut [[u8; N]], below: &Path) -> io::Result<File> {
    rows.sort_unstable();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::CLOEXEC;
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let file = File::from(rustix::fs::open(below, flags, mode)?);
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    for row in rows.iter() {
        writer.write_all(row)?;
    }
    let mut file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

/// Rows in order.
enum Run<const N: usize> {
    Memory(std::vec::IntoIter<[u8; N]>),
    File(BufReader<File>),
}

impl<const N: usize> Run<N> {
    fn next(&mut self) -> io::Result<Option<[u8; N]>> {
        match self {
            Self::Memory(rows) => Ok(rows.next()),
            Self::File(file) => {
                let mut bytes = [0u8; N];
                match file.read_exact(&mut bytes) {
                    Ok(()) => Ok(Some(bytes)),
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
                    Err(error) => Err(error),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_in_order_whether_or_not_they_fit() {
        let row = |n: u64| ((n * 7919) % 10_007).to_be_bytes();
        for memory in [0, 1 << 20] {
            let mut sorter = Sorter::<8>::new(memory, &std::env::temp_dir());
            for some in 0..100u64 {
                sorter.take((0..50).map(|n| row(some * 50 + n))).unwrap();
            }
            assert_eq!(sorter.runs.is_empty(), memory > 0);
            let mut expected: Vec<[u8; 8]> = (0..5000).map(row).collect();
            expected.sort_unstable();
            let mut seen = Vec::new();
            sorter.finish(|row| seen.push(*row)).unwrap();
            assert_eq!(seen, expected, "{memory} bytes");
        }
    }
}
