//! The local socket: its permissions are set before any client can connect.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};

/// Where names of groups stand.
const GROUPS: &str = "/etc/group";

/// Where a server listens, and which socket it made there.
#[derive(Debug)]
pub(super) struct Bound {
    path: PathBuf,
    /// The socket's file. As long as it is open no other file gets its number.
    file: OwnedFd,
}

impl Bound {
    fn at(path: &Path) -> std::io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self { path: path.to_owned(), file: rustix::fs::open(path, flags, Mode::empty())? })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the socket, if it is still this one: another server may have replaced it, who is not to lose his.
    pub(super) fn remove(&self) {
        let (own, there) = (rustix::fs::fstat(&self.file), rustix::fs::lstat(&self.path));
        let same = |(own, there): (rustix::fs::Stat, rustix::fs::Stat)| {
            (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
        };
        if own.ok().zip(there.ok()).is_some_and(same) {
            // A stale one is removed at the next start.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket. Any other file at its path stays.
fn remove(path: &Path) -> std::io::Result<()> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(std::io::Error::other("the path exists and is no socket: choose another path"));
    }
    std::fs::remove_file(path)
}

/// The group of a name, or of a number.
pub(super) fn group(name: &str) -> Result<Gid, String> {
    let known = std::fs::read_to_string(GROUPS).unwrap_or_default();
    let number = name.parse().ok().or_else(|| number(&known, name));
    let number = number.filter(|number| *number != u32::MAX);
    number
        .map(Gid::from_raw)
        .ok_or_else(|| format!("listen.socket_group: there is no group {name:?} in {GROUPS}"))
}

/// The number of a group in a list of them.
fn number(known: &str, name: &str) -> Option<u32> {
    let mut fields = known.lines().map(|line| line.split(':')).find_map(|mut fields| {
        let found = fields.next() == Some(name);
        found.then_some(fields)
    })?;
    fields.nth(1)?.parse().ok()
}

/// Refuses a path at which another server answers.
pub(super) async fn refuse_taken(path: &Path) -> Result<(), String> {
    // ends: at once: the socket does not block, and a full queue is an error
    if path.symlink_metadata().is_ok() && UnixStream::connect(path).await.is_ok() {
        return Err(format!(
            "listen.socket: {}: another server answers there: stop it, or name another path with --listen-socket",
            path.display()
        ));
    }
    Ok(())
}

/// Listens at a path: for this user, and a group if there is one. A socket without a listener was left by an earlier server, and is replaced.
pub(super) async fn listen(path: &Path, group: Option<Gid>) -> Result<(UnixListener, Bound), String> {
    let fault = |error: std::io::Error| format!("listen.socket: {}: {error}", path.display());
    refuse_taken(path).await?;
    if path.symlink_metadata().is_ok() {
        remove(path).map_err(fault)?;
    }
    // With its rights from the first moment on; whatever else is made meanwhile has fewer, not more.
    let before = rustix::process::umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound.map_err(fault)?;
    let bound = Bound::at(path).map_err(fault)?;
    if let Some(group) = group {
        rustix::fs::chown(path, None, Some(group)).map_err(|error| fault(error.into()))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660)).map_err(fault)?;
    }
    Ok((listener, bound))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[tokio::test]
    async fn nobody_but_the_servers_user_and_a_named_group_may_connect() {
        let folder = std::env::temp_dir().join(format!("kvarts-socket-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let own = rustix::process::getegid();
        for (group, mode) in [(None, 0o600), (Some(own), 0o660)] {
            let path = folder.join("kvarts.sock");
            let (_listener, bound) = listen(&path, group).await.unwrap();
            let data = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!(data.mode() & 0o777, mode, "{group:?}");
            assert_eq!(data.gid(), own.as_raw());
            bound.remove();
            assert!(!path.exists());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[tokio::test]
    async fn a_server_that_stops_leaves_the_socket_of_another_one() {
        let folder = std::env::temp_dir().join(format!("kvarts-sockets-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("kvarts.sock");
        let (first, bound) = listen(&path, None).await.unwrap();
        // It does not answer any more, and has not gone yet.
        drop(first);
        let (_second, of_another) = listen(&path, None).await.unwrap();
        bound.remove();
        assert!(UnixStream::connect(&path).await.is_ok(), "the other server's socket is gone");
        of_another.remove();
        assert!(!path.exists());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn groups_are_known_by_name_and_number() {
        let known = "root:x:0:\nengines:x:1234:vllm,sglang\nbroken\n";
        assert_eq!((number(known, "engines"), number(known, "root")), (Some(1234), Some(0)));
        assert_eq!((number(known, "engine"), number(known, "broken")), (None, None));
        assert_eq!(group("4321").unwrap().as_raw(), 4321);
        assert!(group("no such group").unwrap_err().contains("listen.socket_group"));
    }
}
