//! Whose process is at the other end of a unix socket: a token is shown only to the server's user.

use std::io;
use std::os::fd::AsFd;

/// Refuses another end that is neither the administrator's, nor of this process's own user, nor of the one that was said to
/// be the server's.
pub(super) fn check(socket: impl AsFd, server_uid: Option<u32>) -> io::Result<()> {
    let uid = rustix::net::sockopt::socket_peercred(socket)?.uid;
    let own = rustix::process::geteuid();
    if uid.is_root() || uid == own || server_uid == Some(uid.as_raw()) {
        return Ok(());
    }
    let what = format!(
        "a process of user {uid} answers there, which gets no token: if that is the server's user, say so \
         (--server-uid {uid}, KVARTS_SERVER_UID={uid}, or `server_uid` of a connection)",
        uid = uid.as_raw()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn ones_own_user_is_trusted() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(check(&one, None).is_ok());
    }
}
