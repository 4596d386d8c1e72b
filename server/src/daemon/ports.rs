//! The ports that a server serves at: taken before its store is made or opened, so that a start that cannot serve leaves
//! nothing behind, and listened at once it can serve. In between clients are refused, as where no server is.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

use crate::config::Config;

/// Connections that the kernel keeps until they are accepted: all that come at once when a network is back.
const BACKLOG: u32 = 4096;

/// A port that this process has and does not listen at yet.
#[derive(Debug)]
pub(super) struct Port {
    socket: TcpSocket,
    address: SocketAddr,
    /// The setting that names it.
    name: &'static str,
}

/// The ports of a configuration, those that it names.
#[derive(Debug)]
pub(super) struct Ports {
    pub(super) grpc: Option<Port>,
    pub(super) metrics: Option<Port>,
    /// For other nodes. Where the members' file names it, it is taken once the store says which node this is.
    pub(super) nodes: Option<Port>,
}

impl Ports {
    /// Takes them all; the error names the one that cannot be had, and says what to do.
    pub(super) fn take(config: &Config) -> Result<Self, String> {
        let take = |address: Option<SocketAddr>, name| address.map(|one| Port::take(one, name)).transpose();
        Ok(Self {
            grpc: take(config.grpc, "listen.grpc")?,
            metrics: take(config.metrics, "listen.metrics")?,
            nodes: take(config.cluster.as_ref().and_then(|cluster| cluster.listen), "cluster.listen")?,
        })
    }
}

impl Port {
    pub(super) fn take(address: SocketAddr, name: &'static str) -> Result<Self, String> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let socket = socket.and_then(|socket| {
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            Ok(socket)
        });
        let socket = socket.map_err(|error| told(name, address, &error))?;
        Ok(Self { socket, address, name })
    }

    /// Listens there.
    pub(super) fn listen(self) -> Result<(TcpListener, SocketAddr), String> {
        let Self { socket, address, name } = self;
        let fault = |error: std::io::Error| told(name, address, &error);
        let listener = socket.listen(BACKLOG).map_err(fault)?;
        let bound = listener.local_addr().map_err(fault)?;
        Ok((listener, bound))
    }
}

/// Why a port cannot be had, and what to do.
fn told(name: &str, address: SocketAddr, error: &std::io::Error) -> String {
    let (ip, port) = (address.ip(), address.port());
    let advice = match error.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            ": port {port} is in use by another program (`ss -ltnp` shows which): stop that program, \
            or use another port (port 0 selects a free one)"
        ),
        std::io::ErrorKind::AddrNotAvailable => format!(": this machine does not have the address {ip}"),
        std::io::ErrorKind::PermissionDenied => {
            format!(": port {port} needs administrator rights: use a port from 1024 on")
        }
        _ => String::new(),
    };
    format!("{name}: {address}: {error}{advice}")
}

/// Listens at a port, if there is one.
pub(super) fn listen(port: Option<Port>) -> Result<(Option<TcpListener>, Option<SocketAddr>), String> {
    Ok(port.map(Port::listen).transpose()?.unzip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_is_taken_from_the_first_moment_and_listened_at_later() {
        let free = "127.0.0.1:0".parse().unwrap();
        let (listener, address) = Port::take(free, "listen.grpc").unwrap().listen().unwrap();
        let refused = Port::take(address, "listen.metrics").unwrap_err();
        let expected = [
            format!("listen.metrics: {address}"),
            format!("port {} is in use by another program", address.port()),
        ];
        assert!(expected.iter().all(|part| refused.contains(part)), "{refused}");
        drop(listener);
        let port = Port::take(address, "listen.grpc").unwrap();
        assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody listens yet");
        let (_listener, _) = port.listen().unwrap();
        tokio::net::TcpStream::connect(address).await.unwrap();
        let away = Port::take("192.0.2.1:7440".parse().unwrap(), "listen.grpc").unwrap_err();
        assert!(away.contains("this machine does not have the address 192.0.2.1"), "{away}");
    }
}
