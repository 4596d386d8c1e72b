//! Why a server could not be reached: it may come yet, it lets this process not in, or nothing can be at such an address.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kvarts_contract::error::Reason;

/// The cause that says most.
pub(super) fn deepest(error: &dyn StdError) -> String {
    let mut error = error;
    while let Some(cause) = error.source() {
        error = cause;
    }
    error.to_string()
}

/// What the system said about reaching `server`. A name that is not known may be that of a server which is being started.
pub(super) fn of_io(server: impl fmt::Display, error: &io::Error) -> Reason {
    use io::ErrorKind as Kind;
    let server = server.to_string();
    let what = format!("{server}: {error}");
    match error.kind() {
        // What the kernel refuses; this crate's own refusals say what to do themselves.
        Kind::PermissionDenied if error.raw_os_error().is_some() && !server.contains("://") => {
            let path = server.strip_prefix("unix:").unwrap_or(&server);
            Reason::Denied(format!("{what}: {}", how_to_get_in(Path::new(path))))
        }
        Kind::PermissionDenied => Reason::Denied(what),
        Kind::InvalidInput
        | Kind::InvalidData
        | Kind::InvalidFilename
        | Kind::NotADirectory
        | Kind::Unsupported => Reason::Config(what),
        _ => Reason::Away(what),
    }
}

/// What lets this process connect to a socket that it may not write to.
#[allow(
    clippy::disallowed_methods,
    reason = "looks up the owner of a socket after the kernel refused access to the socket"
)]
fn how_to_get_in(socket: &Path) -> String {
    let Ok(found) = std::fs::symlink_metadata(socket) else {
        return "this user cannot enter a directory on the path of the socket: allow this user to enter it \
            (chmod +x), or create the socket elsewhere (--listen-socket PATH of the server)"
            .to_owned();
    };
    let (uid, gid, mode) = (found.uid(), found.gid(), found.mode() & 0o777);
    let (user, group) = (named("/etc/passwd", uid), named("/etc/group", gid));
    let join = match mode & 0o020 {
        0 => {
            "start the server with --socket-group GROUP (listen.socket_group) and join that group".to_owned()
        }
        _ => format!("join the group {group}"),
    };
    format!("the socket belongs to user {user}, mode {mode:04o}: use that user, or {join}")
}

/// A user or group by its name and number, as far as the file of them knows it.
#[allow(
    clippy::disallowed_methods,
    reason = "reads the names of users and groups after the kernel refused access to a socket"
)]
fn named(file: &str, number: u32) -> String {
    let known = std::fs::read_to_string(file).unwrap_or_default();
    let mut fields = known.lines().map(|line| line.split(':'));
    let is_it = |fields: &std::str::Split<'_, char>| {
        fields.clone().nth(2).is_some_and(|field| field.parse() == Ok(number))
    };
    match fields.find(is_it).and_then(|mut fields| fields.next()) {
        Some(name) => format!("{name} ({number})"),
        None => number.to_string(),
    }
}

/// What the transport said about reaching `server`.
pub(super) fn of_transport(server: &str, error: &(dyn StdError + 'static)) -> Reason {
    let (mut next, mut last) = (Some(error), None);
    while let Some(cause) = next {
        last = cause.downcast_ref::<io::Error>().or(last);
        next = cause.source();
    }
    match last {
        Some(cause) => of_io(server, cause),
        None => Reason::Config(format!("{server} cannot be reached: {}", deepest(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::error::Kind;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test makes the socket that it may not use")]
    fn a_socket_of_another_user_is_told_with_its_owner_and_what_lets_in() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("kvarts-away-{}.sock", std::process::id()));
        let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let refused = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            of_io(format!("unix:{}", path.display()), &rustix::io::Errno::ACCESS.into()).to_string()
        };
        let own = rustix::process::geteuid().as_raw();
        let alone = refused(0o600);
        let parts = ["Permission denied", "mode 0600", "--socket-group GROUP", &format!("{own}")];
        assert!(parts.iter().all(|part| alone.contains(part)), "{alone}");
        let grouped = refused(0o660);
        assert!(grouped.contains("mode 0660") && grouped.contains("join the group "), "{grouped}");
        drop(socket);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(named("/etc/passwd", 0), "root (0)");
        assert_eq!(named("/absent", 7), "7");
    }

    #[test]
    fn a_server_may_come_a_right_may_not_and_an_address_that_is_none_never() {
        let kind = |errno: rustix::io::Errno| of_io("there", &errno.into()).kind();
        use rustix::io::Errno;
        for errno in [Errno::NOENT, Errno::CONNREFUSED, Errno::CONNRESET, Errno::TIMEDOUT, Errno::AGAIN] {
            assert_eq!(kind(errno), Kind::Retry, "{errno}");
        }
        assert_eq!((kind(Errno::ACCESS), kind(Errno::NOTDIR)), (Kind::Refused, Kind::Invalid));
        let refused = of_io("unix:/proc/self/absent", &Errno::ACCESS.into()).to_string();
        assert!(
            refused.contains("this user cannot enter a directory on the path of the socket"),
            "{refused}"
        );
        let away = of_io("unix:/run/s", &Errno::NOENT.into()).to_string();
        assert!(away.starts_with("unavailable: unix:/run/s: "), "{away}");
    }
}
