//! Telling systemd what the server does, by the datagrams that `sd_notify` would send.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells the service manager `state` (`READY=1`, `STOPPING=1`), if there is one.
pub fn tell(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&path.to_string_lossy(), state) {
        tracing::warn!(%error, "the service manager could not be notified of {state}");
    }
}

fn send(path: &str, state: &str) -> std::io::Result<()> {
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(path)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_arrives_at_an_abstract_socket() {
        let name = format!("kvarts-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&address).unwrap();
        send(&format!("@{name}"), "READY=1").unwrap();
        let mut bytes = [0; 64];
        let length = listener.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"READY=1");
        assert!(send("/nowhere/at/all", "READY=1").is_err());
    }
}
