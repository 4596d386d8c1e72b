//! A file system with one file, `disk`, served to the kernel over `/dev/fuse`: a loop device over that file is a disk
//! whose every write and flush is seen, in order, before it is acknowledged.
//!
//! Only what a loop device and `mkfs` ask is answered; everything else is `ENOSYS`. One thread serves one request after
//! the other, so the log's order is the order in which the kernel was told.
#![allow(clippy::disallowed_methods, reason = "talks to the kernel, outside any simulation")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::sim::media::errno::{EINVAL, ENOENT};

/// The name of the one file.
pub const DISK: &str = "disk";
/// The most bytes of one write.
const WRITE_MAX: u32 = 1 << 20;
/// What the disk writes wholly or not at all.
pub const SECTOR: usize = 512;
const PAGE: usize = 4096;
const ROOT: u64 = 1;
const FILE: u64 = 2;
const ENOSYS: i32 = 38;
/// Bytes of the header of a request, and of an answer.
const HEADER_IN: usize = 40;
const HEADER_OUT: u32 = 16;

/// Bytes by page; what is missing is zeros. A clone shares them.
#[derive(Clone, Default, Debug)]
pub struct Bytes(BTreeMap<u64, Arc<[u8; PAGE]>>);

impl Bytes {
    /// The bytes of a file, without its zeros.
    pub fn load(path: &Path) -> std::io::Result<Self> {
        let file = File::options().read(true).open(path)?;
        let (mut all, mut chunk, mut at) = (Self::default(), vec![0; 1 << 20], 0);
        loop {
            let read = file.read_at(&mut chunk, at)?;
            if read == 0 {
                return Ok(all);
            }
            for (n, page) in (0u64..).zip(chunk[..read].chunks(PAGE)) {
                if page.iter().any(|byte| *byte != 0) {
                    all.write(at + n * PAGE as u64, page);
                }
            }
            at += read as u64;
        }
    }

    /// Writes them to a new file of `len` bytes.
    pub fn store(&self, path: &Path, len: u64) -> std::io::Result<()> {
        let file = File::options().create(true).truncate(true).write(true).open(path)?;
        file.set_len(len)?;
        for (page, bytes) in &self.0 {
            let at = page * PAGE as u64;
            let within = len.saturating_sub(at).min(PAGE as u64) as usize;
            file.write_all_at(&bytes[..within], at)?;
        }
        Ok(())
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let within = (at % PAGE as u64) as usize;
            let len = (PAGE - within).min(into.len() - done);
            let to = &mut into[done..done + len];
            match self.0.get(&(at / PAGE as u64)) {
                Some(page) => to.copy_from_slice(&page[within..within + len]),
                None => to.fill(0),
            }
            done += len;
        }
    }

    /// Puts bytes down.
    pub fn write(&mut self, offset: u64, from: &[u8]) {
        let mut done = 0;
        while done < from.len() {
            let at = offset + done as u64;
            let within = (at % PAGE as u64) as usize;
            let len = (PAGE - within).min(from.len() - done);
            let page = self.0.entry(at / PAGE as u64).or_insert_with(|| Arc::new([0; PAGE]));
            Arc::make_mut(page)[within..within + len].copy_from_slice(&from[done..done + len]);
            done += len;
        }
    }
}

/// What the disk was asked to do.
#[derive(Clone, Debug)]
pub enum Entry {
    /// Bytes, and where.
    Write(u64, Arc<[u8]>),
    /// Everything before it is durable.
    Flush,
}

/// What was asked of a disk since it began to remember, and what it held then.
#[derive(Clone, Default, Debug)]
pub struct Log {
    /// What it held.
    pub base: Bytes,
    /// What was asked, in order.
    pub entries: Vec<Entry>,
}

impl Log {
    /// What is on the disk if the power fails after the first `upto` entries: all up to the last flush, and of each later
    /// write the sectors that `keep` chooses, by the write's place and the sector.
    pub fn image(&self, upto: usize, mut keep: impl FnMut(usize, usize) -> bool) -> Bytes {
        let seen = &self.entries[..upto.min(self.entries.len())];
        let flushed = seen.iter().rposition(|entry| matches!(entry, Entry::Flush)).unwrap_or(0);
        let mut image = self.base.clone();
        for (at, entry) in seen.iter().enumerate() {
            let Entry::Write(offset, bytes) = entry else { continue };
            for (sector, part) in bytes.chunks(SECTOR).enumerate() {
                if at < flushed || keep(at, sector) {
                    image.write(offset + (sector * SECTOR) as u64, part);
                }
            }
        }
        image
    }

    /// Writes that are not durable after the first `upto` entries.
    pub fn volatile(&self, upto: usize) -> usize {
        let seen = &self.entries[..upto.min(self.entries.len())];
        seen.iter().rev().take_while(|entry| matches!(entry, Entry::Write(..))).count()
    }
}

#[derive(Debug)]
struct Shared {
    current: Bytes,
    len: u64,
    log: Log,
}

/// A disk that is served until it is dropped.
#[derive(Debug)]
pub struct FuseDisk {
    place: PathBuf,
    shared: Arc<Mutex<Shared>>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FuseDisk {
    /// Serves a disk of `len` bytes that holds `bytes`, in a file in the folder `place`.
    pub fn serve(place: &Path, bytes: Bytes, len: u64) -> Result<Self, String> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|error| format!("/dev/fuse cannot be opened: {error}"))?;
        let handle = device.try_clone().map_err(|error| error.to_string())?;
        // The kernel takes the descriptor from the process that mounts: its standard input.
        let options = "fd=0,rootmode=40000,user_id=0,group_id=0,max_read=1048576";
        let mounted = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", options, "kvarts-campaign"])
            .arg(place)
            .stdin(Stdio::from(handle))
            .output()
            .map_err(|error| format!("mount: {error}"))?;
        if !mounted.status.success() {
            return Err(format!("a disk in user space cannot be mounted: {}", words(&mounted.stderr)));
        }
        let log = Log { base: bytes.clone(), entries: Vec::new() };
        let shared = Arc::new(Mutex::new(Shared { current: bytes, len, log }));
        let serving = Arc::clone(&shared);
        // It ends when the kernel has let go of the file system.
        std::thread::spawn(move || serve(device, &serving));
        Ok(Self { place: place.to_owned(), shared })
    }

    /// The file that is the disk.
    pub fn file(&self) -> PathBuf {
        self.place.join(DISK)
    }

    /// Entries so far.
    pub fn entries(&self) -> usize {
        lock(&self.shared).log.entries.len()
    }

    /// The log so far.
    pub fn log(&self) -> Log {
        lock(&self.shared).log.clone()
    }
}

impl Drop for FuseDisk {
    fn drop(&mut self) {
        // The loop device lets go of the file a moment after it was told to: a lazy unmount waits for that.
        let _ = Command::new("umount").arg("-l").arg(&self.place).output();
    }
}

/// A program's complaint as one line.
pub(super) fn words(output: &[u8]) -> String {
    String::from_utf8_lossy(output).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Answers requests until the file system is unmounted.
fn serve(mut device: File, shared: &Mutex<Shared>) {
    let mut request = vec![0; WRITE_MAX as usize + 2 * PAGE];
    loop {
        // ENODEV when it was unmounted; an interrupted request is asked for again.
        let len = match device.read(&mut request) {
            Ok(len) if len >= HEADER_IN => len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) if error.raw_os_error() == Some(ENOENT) => continue,
            _ => return,
        };
        let request = &request[..len];
        let unique = word(request, 8);
        let answer = match answer(request, shared) {
            Ok(Some(body)) => Ok(body),
            Ok(None) => continue,
            Err(errno) => Err(errno),
        };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut out = Out::default();
        out.int(HEADER_OUT + body.len() as u32).int(error.cast_unsigned()).word(unique);
        out.0.extend_from_slice(&body);
        if device.write_all(&out.0).is_err() {
            return;
        }
    }
}

/// Fields of a request and an answer, as the machine has them.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn int(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn word(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn zeros(&mut self, bytes: usize) -> &mut Self {
        self.0.resize(self.0.len() + bytes, 0);
        self
    }

    fn attributes(&mut self, node: u64, len: u64) -> &mut Self {
        let (mode, len) = if node == ROOT { (0o040_755, 0) } else { (0o100_644, len) };
        // Number, size, blocks, three times; nanoseconds, mode, links, user, group, device, block size, flags.
        self.word(node).word(len).word(len / SECTOR as u64).word(0).word(0).word(0);
        self.int(0).int(0).int(0).int(mode).int(1).int(0).int(0).int(0).int(PAGE as u32).int(0)
    }
}

fn int(request: &[u8], at: usize) -> u32 {
    let bytes = request.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u32::from_le_bytes)
}

fn word(request: &[u8], at: usize) -> u64 {
    let bytes = request.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u64::from_le_bytes)
}

/// The body of an answer; `None` where none is expected.
fn answer(request: &[u8], shared: &Mutex<Shared>) -> Result<Option<Vec<u8>>, i32> {
    let (opcode, node, body) = (int(request, 4), word(request, 16), &request[HEADER_IN..]);
    let mut shared = lock(shared);
    let mut out = Out::default();
    match opcode {
        // LOOKUP
        1 => {
            let name = body.split(|byte| *byte == 0).next().unwrap_or_default();
            if name != DISK.as_bytes() {
                return Err(ENOENT);
            }
            out.word(FILE).word(0).word(3600).word(3600).int(0).int(0).attributes(FILE, shared.len);
        }
        // FORGET, BATCH_FORGET, INTERRUPT
        2 | 42 | 36 => return Ok(None),
        // GETATTR, SETATTR: times may be set, nothing else changes.
        3 | 4 => {
            out.word(3600).int(0).int(0).attributes(node, shared.len);
        }
        // OPEN, OPENDIR
        14 | 27 => {
            out.word(0).int(0).int(0);
        }
        // READ
        15 => {
            let (offset, size) = (word(body, 8), int(body, 16).min(WRITE_MAX));
            let len = u64::from(size).min(shared.len.saturating_sub(offset));
            out.0.resize(len as usize, 0);
            shared.current.read(offset, &mut out.0);
        }
        // WRITE
        16 => {
            let (offset, size) = (word(body, 8), int(body, 16));
            let bytes = body.get(40..40 + size as usize).ok_or(EINVAL)?;
            if offset.saturating_add(u64::from(size)) > shared.len {
                return Err(EINVAL);
            }
            shared.current.write(offset, bytes);
            shared.log.entries.push(Entry::Write(offset, bytes.into()));
            out.int(size).int(0);
        }
        // STATFS
        17 => {
            out.zeros(40).int(PAGE as u32).int(255).int(PAGE as u32).zeros(28);
        }
        // FSYNC
        20 => shared.log.entries.push(Entry::Flush),
        // INIT: minor 31, large writes.
        26 => {
            let (big_writes, max_pages) = (1 << 5, 1 << 22);
            out.int(7).int(31).int(int(body, 8)).int(big_writes | max_pages);
            // Background and congestion, write size, grain of times, pages of a request and alignment.
            out.int(12 << 16 | 16).int(WRITE_MAX).int(1).int(WRITE_MAX / PAGE as u32);
            out.zeros(32);
        }
        // RELEASE, RELEASEDIR, ACCESS, DESTROY, READDIR (there is nothing to list)
        18 | 29 | 34 | 38 | 28 => {}
        _ => return Err(ENOSYS),
    }
    Ok(Some(out.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_what_was_flushed_and_of_the_rest_what_is_kept() {
        let sector = |byte: u8| Arc::<[u8]>::from(vec![byte; 2 * SECTOR]);
        let entries = vec![
            Entry::Write(0, sector(1)),
            Entry::Flush,
            Entry::Write(0, sector(2)),
            Entry::Write(4096, sector(3)),
        ];
        let log = Log { base: Bytes::default(), entries };
        let at = |image: &Bytes, offset: u64| {
            let mut byte = [0];
            image.read(offset, &mut byte);
            byte[0]
        };
        let none = log.image(4, |_, _| false);
        assert_eq!((at(&none, 0), at(&none, 512), at(&none, 4096)), (1, 1, 0));
        let torn = log.image(4, |write, sector| (write, sector) == (2, 1));
        assert_eq!((at(&torn, 0), at(&torn, 512), at(&torn, 4096)), (1, 2, 0));
        let early = log.image(1, |_, _| false);
        assert_eq!(at(&early, 0), 0, "nothing was flushed yet");
        assert_eq!((log.volatile(4), log.volatile(2), log.volatile(1)), (2, 0, 1));
    }
}
