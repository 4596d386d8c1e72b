//! How etcd lets a node in: over TLS, by a certificate of the node, by a name and a password, or by nothing.

use std::fmt;
use std::io;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::credentials::certificates;

/// How a node is let in by etcd. Without anything it is asked as it is, in plain words.
#[derive(Clone, Default)]
pub struct EtcdAccess {
    /// With it etcd is asked over TLS alone, and has to be one whom this believes.
    tls: Option<Arc<ClientConfig>>,
    login: Option<(String, String)>,
}

impl fmt::Debug for EtcdAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tls, login) = (self.tls.is_some(), self.login.is_some());
        write!(f, "EtcdAccess(TLS: {tls}, a password: {login})")
    }
}

impl EtcdAccess {
    /// Over TLS, to an etcd whose certificate is of this authority and names the host that is called; `own` is what this node shows:
    /// a certificate chain and its key. Each is PEM. Says in one line what is wrong with them.
    pub fn over_tls(mut self, authority: &[u8], own: Option<(&[u8], &[u8])>) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        for root in certificates(authority, "etcd_authority")? {
            roots.add(root).map_err(|error| format!("etcd_authority: {error}"))?;
        }
        let provider = Arc::new(ring::default_provider());
        let unusable = |error| format!("etcd_certificate and etcd_key cannot be used: {error}");
        let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let client = client.map_err(unusable)?.with_root_certificates(roots);
        let mut client = match own {
            Some((chain, key)) => {
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("etcd_key: {error}"))?;
                client
                    .with_client_auth_cert(certificates(chain, "etcd_certificate")?, key)
                    .map_err(unusable)?
            }
            None => client.with_no_client_auth(),
        };
        client.alpn_protocols = vec![b"h2".to_vec()];
        self.tls = Some(Arc::new(client));
        Ok(self)
    }

    /// With a name and a password, as `NAME:PASSWORD` in one line. Nothing if it is none.
    pub fn with_password(mut self, line: &str) -> Option<Self> {
        let (name, password) = line.trim_end_matches(['\r', '\n']).split_once(':')?;
        let is_good = !name.is_empty() && !password.is_empty() && !password.contains('\n');
        self.login = is_good.then(|| (name.to_owned(), password.to_owned()));
        self.login.is_some().then_some(self)
    }

    /// Whether a password would go over the network in plain words.
    pub fn says_its_password_aloud(&self) -> bool {
        self.login.is_some() && self.tls.is_none()
    }

    pub(super) fn login(&self) -> Option<(String, String)> {
        self.login.clone()
    }

    pub(super) fn tls(&self) -> Option<Arc<ClientConfig>> {
        self.tls.clone()
    }
}

/// A connection to `name`, a host and a port, whose certificate has to name the host.
pub(super) async fn connect(name: &str, tls: Arc<ClientConfig>) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
    let (host, _) = name.rsplit_once(':').ok_or(io::ErrorKind::InvalidInput)?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let host = ServerName::try_from(host).map_err(|_| io::ErrorKind::InvalidInput)?;
    // ends: `TIMEOUT` of the endpoint, around all of connecting
    let stream = TcpStream::connect(name).await?;
    let _ = stream.set_nodelay(true);
    // ends: `TIMEOUT` of the endpoint, around all of connecting
    Ok(TokioIo::new(TlsConnector::from(tls).connect(host, stream).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_a_name_and_something_behind_a_colon_and_is_never_shown() {
        let access = EtcdAccess::default().with_password("kvarts:a:b c\n").unwrap();
        assert_eq!(access.login(), Some(("kvarts".to_owned(), "a:b c".to_owned())));
        assert!(access.says_its_password_aloud());
        assert!(!format!("{access:?}").contains("a:b"));
        for wrong in ["", "kvarts", "kvarts:", ":secret", "\n", "a:b\nc:d"] {
            assert!(EtcdAccess::default().with_password(wrong).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn what_is_no_certificate_is_refused_with_the_name_of_its_setting() {
        let told = EtcdAccess::default().over_tls(b"nothing", None).unwrap_err();
        assert!(told.contains("etcd_authority"), "{told}");
    }
}
