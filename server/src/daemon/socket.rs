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
    refuse_other(path)?;
    std::fs::remove_file(path)
}

/// Refuses a path at which something else than a socket is.
fn refuse_other(path: &Path) -> std::io::Result<()> {
    match std::fs::symlink_metadata(path)?.file_type().is_socket() {
        true => Ok(()),
        false => Err(std::io::Error::other("the path exists and is not a socket: choose another path")),
    }
}

/// Refuses a path at which this process can make no socket, without making one.
pub(super) fn refuse_unusable(path: &Path) -> Result<(), String> {
    let fault = |error: std::io::Error| format!("listen.socket: {}: {error}", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        let shown = folder.display();
        let what = format!(
            "the directory {shown} does not exist: run `mkdir -p {shown}`; under systemd use \
                RuntimeDirectory="
        );
        return Err(fault(std::io::Error::other(what)));
    }
    kvarts_store::home::writable(folder).map_err(fault)?;
    if path.symlink_metadata().is_ok() { refuse_other(path).map_err(fault) } else { Ok(()) }
}

/// Where the kernel says what this process may do.
const STATUS: &str = "/proc/self/status";

/// Whether this process may give its files to a group that it is not in.
fn may_give_away(status: &str) -> bool {
    let of = |line: &str| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok();
    // CAP_CHOWN.
    status.lines().find_map(of).is_some_and(|rights| rights & 1 != 0)
}

/// The group of a name, or of a number, to which this process may give a socket.
pub(super) fn group(name: &str) -> Result<Gid, String> {
    let known = std::fs::read_to_string(GROUPS).unwrap_or_default();
    let number = name.parse().ok().or_else(|| number(&known, name));
    let number = number.filter(|number| *number != u32::MAX);
    let group = number.map(Gid::from_raw).ok_or_else(|| {
        format!("listen.socket_group: the group {name:?} is not in {GROUPS}: `groupadd {name}` adds it")
    })?;
    let own = rustix::process::getgroups().unwrap_or_default();
    let is_own = rustix::process::getegid() == group || own.contains(&group);
    let status = std::fs::read_to_string(STATUS).unwrap_or_default();
    if is_own || may_give_away(&status) {
        return Ok(group);
    }
    let user = rustix::process::geteuid().as_raw();
    Err(format!(
        "listen.socket_group: the user of the server ({user}) is not in the group {name:?}: `usermod \
        -aG {name} USER`, or add SupplementaryGroups={name} to the systemd unit of the server"
    ))
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
            "listen.socket: another server listens on {}: stop that server, or use another path \
            with --listen-socket",
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
        let own = rustix::process::getegid().as_raw();
        assert_eq!(group(&own.to_string()).unwrap().as_raw(), own);
        let told = group("no such group").unwrap_err();
        assert!(told.contains("listen.socket_group: the group") && told.contains("groupadd"), "{told}");
        let status = |rights: &str| format!("Name:\tkvarts\nCapPrm:\t00000000000001ff\nCapEff:\t{rights}\n");
        assert!(may_give_away(&status("00000000000001ff")) && !may_give_away(&status("00000000000001fe")));
        assert!(!may_give_away(""));
    }
}
