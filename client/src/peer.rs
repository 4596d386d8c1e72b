//! The other end of a unix socket: reaching it in bounded time, and whose process it is. A token is shown only to the server's user.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvarts_contract::clock::{Clock, SystemClock};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::timeouts::LONGEST;

/// Connects. A server that stands still takes no connection, and once as many wait there as its queue has room for, the kernel lets the
/// next one wait at most `within`. What is sent on the connection has that time as well.
pub(super) fn connect(path: &Path, within: Duration) -> io::Result<UnixStream> {
    // No time at all would be for ever.
    let within = within.clamp(Duration::from_micros(1), LONGEST);
    let (clock, address) = (SystemClock::new(), SocketAddrUnix::new(path)?);
    let until = clock.now().plus(within);
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    loop {
        let left = until.since(clock.now()).max(Duration::from_micros(1));
        set_socket_timeout(&socket, Timeout::Send, Some(left))?;
        // ends: `within`, by the socket's own time to send
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            // A signal: what is left of the time goes on.
            Err(Errno::INTR) if until > clock.now() => {}
            Err(Errno::AGAIN | Errno::INTR) => {
                let seconds = within.as_secs_f64();
                let what = format!(
                    "the server has accepted no connection for {seconds} s, so its process is stopped or \
                    hangs: read the log of the server"
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            Err(error) => return Err(error.into()),
        }
    }
    set_socket_timeout(&socket, Timeout::Send, Some(within))?;
    Ok(socket.into())
}

/// Refuses another end that is neither the administrator's, nor of this process's own user, nor of the one that was said to
/// be the server's.
pub(super) fn check(socket: impl AsFd, server_uid: Option<u32>) -> io::Result<()> {
    let uid = rustix::net::sockopt::socket_peercred(socket)?.uid;
    let own = rustix::process::geteuid();
    if uid.is_root() || uid == own || server_uid == Some(uid.as_raw()) {
        return Ok(());
    }
    let what = format!(
        "the socket belongs to a process of user {uid}, but a token is sent only to a trusted server: if \
        user {uid} runs the server, name the user (--server-uid {uid}, KVARTS_SERVER_UID={uid}, or `server_uid` of \
        a connection)",
        uid = uid.as_raw()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{bind, listen};

    #[test]
    fn ones_own_user_is_trusted() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(check(&one, None).is_ok());
    }
    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test makes the socket, and removes it")]
    fn a_server_that_takes_no_connection_costs_its_time_and_is_named() {
        let path = std::env::temp_dir().join(format!("kvarts-full-{}.sock", std::process::id()));
        let server =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&server, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        // One waits; there is room for no second.
        listen(&server, 0).unwrap();
        let minute = Duration::from_secs(60);
        let first = connect(&path, minute).unwrap();
        assert_eq!(first.write_timeout().unwrap(), Some(minute));
        let full = connect(&path, Duration::from_millis(20)).unwrap_err();
        let told = crate::away::of_io(path.display(), &full).to_string();
        let parts = [&*path.display().to_string(), "has accepted no connection for 0.02 s"];
        assert!(parts.iter().all(|part| told.contains(part)), "{told}");
        drop(server);
        assert_eq!(connect(&path, minute).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        std::fs::remove_file(&path).unwrap();
    }
}
