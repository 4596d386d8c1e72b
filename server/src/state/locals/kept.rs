//! Pages of clients' files that the kernel charges to this server, and that clients keep.
//!
//! If a page of a client's file is missing, the write of the server or of a device makes it, and the kernel charges it to the control group of
//! the server until the file is gone, whatever became of the session. A client that shares one sparse file after the other would fill the
//! group without end. So the group's own figure is compared with what clients may have of it, and where it is larger, the tenants whose files
//! grew while they were shared get no more memory; the others do.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The control group that the server is charged in.
#[derive(Clone, Debug)]
pub struct Group {
    /// Where its statistics and its list of processes are.
    pub path: PathBuf,
}

impl Group {
    /// Bytes of files in memory that are charged to it; none where it does not say, or other processes are in it and may be the ones that are
    /// charged.
    fn charged(&self) -> Option<u64> {
        let read = |name| std::fs::read_to_string(self.path.join(name)).ok();
        let of = |line: &str| line.strip_prefix("shmem ")?.trim().parse().ok();
        let bytes = read("memory.stat")?.lines().find_map(of)?;
        let me = std::process::id().to_string();
        read("cgroup.procs")?.lines().all(|process| process == me).then_some(bytes)
    }
}

/// What tenants' files grew by, and the group that may be charged for it.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    group: Option<Group>,
    /// Bytes that may be charged for all tenants together.
    most: u64,
    grown: Mutex<BTreeMap<u32, u64>>,
}

impl Kept {
    /// Without a group no tenant is refused.
    pub(crate) fn new(group: Option<Group>, most: u64) -> Arc<Self> {
        Arc::new(Self { group, most, grown: Mutex::default() })
    }

    /// Whether there is a group whose figure counts.
    pub(crate) fn is_limited(&self) -> bool {
        self.group.is_some()
    }

    fn grown(&self) -> MutexGuard<'_, BTreeMap<u32, u64>> {
        // Each change is one step.
        self.grown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether more is charged than may be, and the files of a tenant grew by more than its `part` of it.
    pub(crate) fn is_refused(&self, tenant: u32, part: u64) -> bool {
        let Some(charged) = self.group.as_ref().and_then(Group::charged) else { return false };
        let mut grown = self.grown();
        if charged <= self.most / 2 {
            // What had grown is mostly gone.
            grown.clear();
        }
        charged > self.most && grown.get(&tenant).is_some_and(|bytes| *bytes > part)
    }
}

/// A client's file for as long as it is shared: what it grows by meanwhile counts as its tenant's.
#[derive(Debug)]
pub(crate) struct Watched {
    file: OwnedFd,
    before: u64,
    tenant: u32,
    kept: Arc<Kept>,
}

impl Watched {
    pub(crate) fn new(kept: &Arc<Kept>, tenant: u32, file: OwnedFd) -> Self {
        Self { before: pages(&file), file, tenant, kept: Arc::clone(kept) }
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let grown = pages(&self.file).saturating_sub(self.before);
        if grown > 0 {
            let mut all = self.kept.grown();
            let sum = all.entry(self.tenant).or_default();
            *sum = sum.saturating_add(grown);
        }
    }
}

/// Bytes of the pages that a file in memory has.
fn pages(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::buffers::shared;

    /// A control group as the kernel shows it.
    struct Shown(PathBuf);

    impl Shown {
        fn new(name: &str) -> (Self, Group) {
            let path = std::env::temp_dir().join(format!("kvarts-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            let shown = Self(path.clone());
            shown.write("cgroup.procs", &format!("{}\n", std::process::id()));
            (shown, Group { path })
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.0.join(name), text).unwrap();
        }
    }

    impl Drop for Shown {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A tenant's file that grows by this many pages while it is shared; it is gone afterwards, and counts all the same.
    fn grow(kept: &Arc<Kept>, tenant: u32, count: usize) {
        let file = shared::sealed(1 << 20).unwrap();
        let watched = Watched::new(kept, tenant, file.try_clone().unwrap());
        assert_eq!(rustix::io::pwrite(&file, &vec![1; count * 4096], 0), Ok(count * 4096));
        drop(watched);
    }

    #[test]
    fn the_tenant_whose_files_grew_is_refused_and_no_other() {
        let (shown, group) = Shown::new("group-tenants");
        let kept = Kept::new(Some(group), 100 << 10);
        grow(&kept, 1, 13);
        grow(&kept, 2, 12);
        let part = 50 << 10;
        shown.write("memory.stat", "anon 99999999\nshmem 102400\n");
        assert!(!kept.is_refused(1, part), "the bound");
        shown.write("memory.stat", "cache 1\nshmem 102401\nmapped_file 0\n");
        assert!(kept.is_refused(1, part));
        assert!(!kept.is_refused(2, part) && !kept.is_refused(3, part), "others have not had their parts");
        grow(&kept, 2, 1);
        assert!(kept.is_refused(2, part), "more than its part in two files");
        assert!(!kept.is_refused(1, 2 * part), "it may have more now");
    }

    #[test]
    fn what_had_grown_counts_until_half_of_it_is_free_again() {
        let (shown, group) = Shown::new("group-half");
        let kept = Kept::new(Some(group), 40 << 10);
        grow(&kept, 1, 11);
        for (bytes, is_refused) in
            [(40_961, true), (20_481, false), (40_961, true), (20_480, false), (40_961, false)]
        {
            shown.write("memory.stat", &format!("shmem {bytes}\n"));
            assert_eq!(kept.is_refused(1, 40 << 10), is_refused, "{bytes}");
        }
    }

    #[test]
    fn a_group_that_says_nothing_or_has_other_processes_refuses_no_tenant() {
        let (shown, group) = Shown::new("group-others");
        let kept = Kept::new(Some(group), 4096);
        grow(&kept, 1, 2);
        assert!(!kept.is_refused(1, 4096), "no statistics");
        shown.write("memory.stat", "shmem_thp 99999999\n");
        assert!(!kept.is_refused(1, 4096), "no line of it");
        shown.write("memory.stat", "shmem 99999999\n");
        assert!(kept.is_refused(1, 4096));
        shown.write("cgroup.procs", &format!("1\n{}\n", std::process::id()));
        assert!(!kept.is_refused(1, 4096), "another process may be charged");
        let none = Kept::new(None, 0);
        grow(&none, 1, 2);
        assert!(!none.is_refused(1, 0));
    }

    #[test]
    fn a_file_whose_pages_were_there_does_not_count() {
        let (shown, group) = Shown::new("group-full");
        shown.write("memory.stat", "shmem 99999999\n");
        let kept = Kept::new(Some(group), 4096);
        let file = shared::sealed(64 << 10).unwrap();
        rustix::io::pwrite(&file, &[1; 64 << 10], 0).unwrap();
        let watched = Watched::new(&kept, 1, file.try_clone().unwrap());
        rustix::io::pwrite(&file, &[2; 64 << 10], 0).unwrap();
        drop(watched);
        assert!(!kept.is_refused(1, 4096));
    }
}
