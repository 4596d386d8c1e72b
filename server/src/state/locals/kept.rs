//! Files of clients that stay after they were shared, with pages that the kernel charges to this server.
//!
//! If a page of a client's file is missing, the write of the server or of a device makes it, and the kernel charges it to the control group of
//! the server until the file is gone, whatever became of the session. A client that shares one sparse file after the other, and keeps them,
//! would fill the group without end. So the server notes each file that stays, with its pages, until the kernel says that it is gone or it is
//! shared again. A tenant whose files keep more than its part of what may be shared gets no more memory while the group has more than all
//! clients may have; others do.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// Files of a tenant that are watched. Of more than these only the bytes are noted, until the group has room again.
const WATCHED_MAX: usize = 256;

/// The control group that the server is charged in.
#[derive(Clone, Debug)]
pub struct Group {
    /// The file with its statistics.
    pub statistics: PathBuf,
}

impl Group {
    /// Bytes of files in memory that are charged to it, if it says so.
    fn charged(&self) -> Option<u64> {
        let text = std::fs::read_to_string(&self.statistics).ok()?;
        text.lines().find_map(|line| line.strip_prefix("shmem ")?.trim().parse().ok())
    }
}

/// A file among all of the machine: of two that are there at a time the numbers differ.
type Name = (u64, u64);

/// A file that is not shared now.
#[derive(Debug)]
struct File {
    tenant: u32,
    bytes: u64,
    watch: i32,
}

#[derive(Debug, Default)]
struct Noted {
    files: BTreeMap<Name, File>,
    names: BTreeMap<i32, Name>,
    /// What files of a tenant had that could not be watched.
    unwatched: BTreeMap<u32, u64>,
}

impl Noted {
    fn forget(&mut self, name: Name) -> Option<File> {
        let file = self.files.remove(&name)?;
        self.names.remove(&file.watch);
        Some(file)
    }

    fn of(&self, tenant: u32) -> u64 {
        let own = self.files.values().filter(|file| file.tenant == tenant).map(|file| file.bytes);
        own.chain(self.unwatched.get(&tenant).copied()).fold(0, u64::saturating_add)
    }
}

/// The files that stay, and the group that may be charged for them.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    group: Option<Group>,
    /// Bytes that may be charged for all tenants together.
    most: u64,
    /// What says that a file is gone.
    watches: Option<OwnedFd>,
    noted: Mutex<Noted>,
}

impl Kept {
    /// Without a group no tenant is refused.
    pub(crate) fn new(group: Option<Group>, most: u64) -> Arc<Self> {
        let init = || inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        let watches = group.as_ref().and_then(|_| init());
        Arc::new(Self { group, most, watches, noted: Mutex::default() })
    }

    /// Whether there is a group whose figure counts.
    pub(crate) fn is_limited(&self) -> bool {
        self.group.is_some()
    }

    /// What is noted, without the files that are gone.
    fn noted(&self) -> MutexGuard<'_, Noted> {
        // Each change is one step.
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let Some(watches) = &self.watches else { return noted };
        let mut reader = Reader::new(watches, &mut buffer);
        // As many as wait: reading does not wait for more.
        while let Ok(event) = reader.next() {
            if event.events().intersects(ReadFlags::DELETE_SELF | ReadFlags::IGNORED)
                && let Some(name) = noted.names.get(&event.wd()).copied()
            {
                noted.forget(name);
            }
        }
        noted
    }

    /// Whether more is charged than may be, and files that this tenant's clients keep have more than its `part` of it.
    pub(crate) fn is_refused(&self, tenant: u32, part: u64) -> bool {
        let Some(group) = &self.group else { return false };
        // The group is asked only about a tenant that would be refused.
        if self.noted().of(tenant) <= part {
            return false;
        }
        let Some(charged) = group.charged() else { return false };
        if charged <= self.most / 2 {
            self.noted().unwatched.clear();
        }
        charged > self.most
    }

    /// The first `shared` bytes of a file are shared, perhaps again. A file that has more stays noted: `limits.shared` counts only these bytes.
    fn begin(&self, file: &OwnedFd, shared: u64) {
        let Some((name, _)) = look(file).filter(|(_, bytes)| *bytes <= shared) else { return };
        let mut noted = self.noted();
        if let (Some(file), Some(watches)) = (noted.forget(name), &self.watches) {
            // It may be gone by itself.
            let _ = inotify::remove_watch(watches, file.watch);
        }
    }

    /// A file is not shared any more; it is still there.
    fn end(&self, tenant: u32, file: &OwnedFd) {
        let Some((name, bytes)) = look(file) else { return };
        let mut noted = self.noted();
        if bytes == 0 || !self.is_limited() {
            return;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let own = noted.files.values().filter(|file| file.tenant == tenant).count();
        let watches = self.watches.as_ref().filter(|_| own < WATCHED_MAX);
        match watches.and_then(|watches| inotify::add_watch(watches, path, WatchFlags::DELETE_SELF).ok()) {
            Some(watch) => {
                noted.names.insert(watch, name);
                noted.files.insert(name, File { tenant, bytes, watch });
            }
            None => {
                let sum = noted.unwatched.entry(tenant).or_default();
                *sum = sum.saturating_add(bytes);
            }
        }
    }
}

/// Which file it is, and the bytes of its pages.
fn look(file: &OwnedFd) -> Option<(Name, u64)> {
    let stat = rustix::fs::fstat(file).ok()?;
    let bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    Some(((stat.st_dev, stat.st_ino), bytes))
}

/// A client's file for as long as it is shared. Afterwards it is noted for as long as it stays.
#[derive(Debug)]
pub(crate) struct Watched {
    file: OwnedFd,
    tenant: u32,
    kept: Arc<Kept>,
}

impl Watched {
    pub(crate) fn new(kept: &Arc<Kept>, tenant: u32, (file, shared): (OwnedFd, u64)) -> Self {
        kept.begin(&file, shared);
        Self { file, tenant, kept: Arc::clone(kept) }
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.kept.end(self.tenant, &self.file);
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a file that stands for one of the kernel")]
mod tests {
    use super::*;
    use kvarts_contract::buffers::shared;
    use rustix::fs::FallocateFlags;

    /// The statistics of a control group as the kernel shows them.
    struct Shown(PathBuf);

    impl Shown {
        fn new(name: &str, text: &str) -> (Self, Group) {
            let statistics = std::env::temp_dir().join(format!("kvarts-{name}-{}", std::process::id()));
            let shown = Self(statistics.clone());
            shown.write(text);
            (shown, Group { statistics })
        }

        fn write(&self, text: &str) {
            std::fs::write(&self.0, text).unwrap();
        }
    }

    impl Drop for Shown {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    const OVER: &str = "cache 1\nshmem 102401\nmapped_file 0\n";
    const MOST: u64 = 100 << 10;

    /// A file of this many pages that a tenant shared once, and keeps.
    fn kept_file(kept: &Arc<Kept>, tenant: u32, pages: usize) -> OwnedFd {
        let file = shared::sealed(1 << 20).unwrap();
        let watched = Watched::new(kept, tenant, (file.try_clone().unwrap(), 1 << 20));
        assert_eq!(rustix::io::pwrite(&file, &vec![1; pages * 4096], 0), Ok(pages * 4096));
        drop(watched);
        file
    }

    #[test]
    fn the_tenant_whose_clients_keep_more_than_its_part_is_refused_and_no_other() {
        let (shown, group) = Shown::new("kept-tenants", "anon 99999999\nshmem 102400\n");
        let (kept, part) = (Kept::new(Some(group), MOST), 50 << 10);
        let _of_one = kept_file(&kept, 1, 13);
        let _of_two = kept_file(&kept, 2, 12);
        assert!(!kept.is_refused(1, part), "the bound");
        shown.write(OVER);
        assert!(kept.is_refused(1, part));
        assert!(!kept.is_refused(2, part) && !kept.is_refused(3, part), "others have not had their parts");
        let _another = kept_file(&kept, 2, 1);
        assert!(kept.is_refused(2, part), "more than its part in two files");
        assert!(!kept.is_refused(1, 2 * part), "it may have more now");
        shown.write("shmem_thp 99999999\n");
        assert!(!kept.is_refused(1, part), "a group that says nothing");
    }

    #[test]
    fn a_file_counts_until_it_is_gone_or_shared_again() {
        let (_shown, group) = Shown::new("kept-gone", OVER);
        let kept = Kept::new(Some(group), MOST);
        let (first, second) = (kept_file(&kept, 1, 4), kept_file(&kept, 1, 4));
        assert!(kept.is_refused(1, 7 * 4096));
        let copy = first.try_clone().unwrap();
        drop(first);
        assert!(kept.is_refused(1, 7 * 4096), "another process may have it");
        drop(copy);
        assert!(!kept.is_refused(1, 7 * 4096) && kept.is_refused(1, 3 * 4096), "one is gone");
        let again = Watched::new(&kept, 1, (second.try_clone().unwrap(), 1 << 20));
        assert!(!kept.is_refused(1, 0), "what is shared is limited otherwise");
        drop(again);
        assert!(kept.is_refused(1, 3 * 4096));
        drop(second);
        assert!(!kept.is_refused(1, 0));
        assert!(kept.noted().names.is_empty());
    }

    #[test]
    fn a_file_of_which_a_part_is_shared_again_counts_on() {
        let (_shown, group) = Shown::new("kept-part", OVER);
        let kept = Kept::new(Some(group), MOST);
        let file = kept_file(&kept, 1, 4);
        let part = Watched::new(&kept, 1, (file.try_clone().unwrap(), 4096));
        assert!(kept.is_refused(1, 3 * 4096), "one of four pages is shared");
        drop(part);
        assert!(kept.is_refused(1, 4 * 4096 - 1) && !kept.is_refused(1, 4 * 4096), "it counts once");
    }

    #[test]
    fn a_tenant_with_many_files_leaves_the_watches_of_others() {
        let (_shown, group) = Shown::new("kept-many", OVER);
        let kept = Kept::new(Some(group), MOST);
        let _many: Vec<OwnedFd> = (0..WATCHED_MAX + 1).map(|_| kept_file(&kept, 1, 1)).collect();
        assert!(kept.is_refused(1, WATCHED_MAX as u64 * 4096), "the last one counts, too");
        drop(kept_file(&kept, 2, 4));
        assert!(!kept.is_refused(2, 0), "it is gone");
    }

    #[test]
    fn pages_that_a_client_had_before_and_took_away_do_not_hide_those_that_the_server_made() {
        let (_shown, group) = Shown::new("kept-punched", OVER);
        let kept = Kept::new(Some(group), MOST);
        let file = shared::sealed(64 << 10).unwrap();
        rustix::io::pwrite(&file, &[1; 64 << 10], 0).unwrap();
        let watched = Watched::new(&kept, 1, (file.try_clone().unwrap(), 64 << 10));
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, punch, 0, 64 << 10).unwrap();
        rustix::io::pwrite(&file, &[2; 64 << 10], 0).unwrap();
        drop(watched);
        assert!(kept.is_refused(1, (64 << 10) - 1) && !kept.is_refused(1, 64 << 10));
    }

    #[test]
    fn what_cannot_be_watched_counts_until_half_of_the_group_is_free() {
        let (shown, group) = Shown::new("kept-unwatched", OVER);
        let kept = Kept { group: Some(group), most: MOST, ..Kept::default() };
        let kept = Arc::new(kept);
        drop(kept_file(&kept, 1, 2));
        assert!(kept.is_refused(1, 4096));
        for (text, is_refused) in
            [("shmem 51201\n", false), (OVER, true), ("shmem 51200\n", false), (OVER, false)]
        {
            shown.write(text);
            assert_eq!(kept.is_refused(1, 4096), is_refused, "{text}");
        }
        let none = Kept::new(None, 0);
        let _file = kept_file(&none, 1, 2);
        assert!(!none.is_refused(1, 0));
    }
}
