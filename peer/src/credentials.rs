//! Certificates of nodes: what a node shows to others, and whom it believes.
//!
//! A certificate of the cluster's authority names one node, as `kvarts-` and its id, and counts for that node alone, whichever
//! side it calls from. TLS 1.3 is spoken and nothing older; nothing is resumed and no early data is taken, so that no
//! connection's words are good for another one, and a certificate that was taken back ends with the next connection.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use kvarts_cluster::members::NodeId;
use tokio_rustls::rustls::client::{Resumption, verify_server_name};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{CertificateError, ClientConfig, Error, RootCertStore, ServerConfig};

/// A certificate chain, its key, and the authorities whose certificates count, each PEM.
#[derive(Clone)]
pub struct Pem {
    /// This node's certificate, and those between it and an authority.
    pub certificate: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
    /// The authorities of the cluster.
    pub authority: Vec<u8>,
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pem(redacted)")
    }
}

/// What a connection is for: one that is meant for the other thing is refused before anything is said over it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Calls between nodes.
    Calls,
    /// Bytes of blocks.
    Lane,
}

/// How connections are begun and answered.
#[derive(Clone)]
struct Sides {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// What a node shows to others, and whom it believes. It can be replaced; connections that are there stay.
pub struct Credentials {
    node: NodeId,
    calls: RwLock<Sides>,
    lane: RwLock<Sides>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({})", name(self.node))
    }
}

/// What the certificate of a node must name, as a DNS name among its subject alternative names.
pub fn name(node: NodeId) -> String {
    format!("kvarts-{node}")
}

pub(crate) fn server_name(node: NodeId) -> Option<ServerName<'static>> {
    ServerName::try_from(name(node)).ok()
}

/// Whether a certificate names this node. Who signed it is not looked at here.
pub(crate) fn names(certificate: &CertificateDer<'_>, node: NodeId) -> bool {
    let parsed = ParsedCertificate::try_from(certificate);
    let (Ok(parsed), Some(name)) = (parsed, server_name(node)) else { return false };
    verify_server_name(&parsed, &name).is_ok()
}

impl Credentials {
    /// Says in one line what is wrong with them on any node: whether they name one is not looked at.
    pub fn check(pem: &Pem) -> Result<(), String> {
        sides(None, pem, Purpose::Calls).map(drop)
    }

    /// Those of a node. Says in one line what is wrong with them.
    pub fn new(node: NodeId, pem: &Pem) -> Result<Arc<Self>, String> {
        let calls = sides(Some(node), pem, Purpose::Calls)?;
        let lane = sides(Some(node), pem, Purpose::Lane)?;
        Ok(Arc::new(Self { node, calls: RwLock::new(calls), lane: RwLock::new(lane) }))
    }

    /// Why others could not take their place, if so. Nothing changes.
    pub fn check_replacement(&self, pem: &Pem) -> Result<(), String> {
        [Purpose::Calls, Purpose::Lane]
            .into_iter()
            .try_for_each(|purpose| sides(Some(self.node), pem, purpose).map(drop))
    }

    /// Others, for connections from now on. What cannot be used changes nothing.
    pub fn replace(&self, pem: &Pem) -> Result<(), String> {
        let calls = sides(Some(self.node), pem, Purpose::Calls)?;
        let lane = sides(Some(self.node), pem, Purpose::Lane)?;
        *self.calls.write().unwrap_or_else(PoisonError::into_inner) = calls;
        *self.lane.write().unwrap_or_else(PoisonError::into_inner) = lane;
        Ok(())
    }

    fn sides(&self, purpose: Purpose) -> Sides {
        let sides = match purpose {
            Purpose::Calls => &self.calls,
            Purpose::Lane => &self.lane,
        };
        sides.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn client(&self, purpose: Purpose) -> Arc<ClientConfig> {
        self.sides(purpose).client
    }

    pub(crate) fn server(&self, purpose: Purpose) -> Arc<ServerConfig> {
        self.sides(purpose).server
    }
}

pub(crate) fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{what}: the file has no certificate")),
        Err(error) => Err(format!("{what}: {error}")),
    }
}

/// Both sides of connections; those of a node if one is given.
fn sides(node: Option<NodeId>, pem: &Pem, purpose: Purpose) -> Result<Sides, String> {
    let chain = certificates(&pem.certificate, "certificate")?;
    if let Some(node) = node
        && !chain.first().is_some_and(|own| names(own, node))
    {
        return Err(format!(
            "certificate: the certificate is for another node: use a certificate with the DNS name {}",
            name(node)
        ));
    }
    let key = || PrivateKeyDer::from_pem_slice(&pem.key).map_err(|error| format!("key: {error}"));
    let mut roots = RootCertStore::empty();
    for root in certificates(&pem.authority, "authority")? {
        roots.add(root).map_err(|error| format!("authority: {error}"))?;
    }
    let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
    let unusable = |error: Error| format!("certificate and key cannot be used: {error}");
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let clients = clients.build().map_err(|error| format!("authority: {error}"))?;
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(&[&TLS13]);
    let server = server.map_err(unusable)?.with_client_cert_verifier(clients);
    let mut server = server.with_single_cert(chain.clone(), key()?).map_err(unusable)?;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    server.max_early_data_size = 0;
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
    let client = client.map_err(unusable)?.with_root_certificates(roots);
    let mut client = client.with_client_auth_cert(chain, key()?).map_err(unusable)?;
    client.resumption = Resumption::disabled();
    client.enable_early_data = false;
    let spoken: &[u8] = match purpose {
        Purpose::Calls => b"h2",
        Purpose::Lane => b"kvarts-lane",
    };
    server.alpn_protocols = vec![spoken.to_vec()];
    client.alpn_protocols = vec![spoken.to_vec()];
    Ok(Sides { client: Arc::new(client), server: Arc::new(server) })
}

/// What is wrong with the other side, in an operator's words.
pub(crate) fn told(error: &Error) -> &'static str {
    match error {
        Error::InvalidCertificate(wrong) => match wrong {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the certificate of the other node has expired: renew the certificate"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the certificate of the other node is not valid yet: compare the clocks of both nodes"
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "the certificate of the other node is for another name: check cluster.certificate of that \
                node"
            }
            // One authority may have the name of another one, and not its key.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "the certificate of the other node is from another authority: use one cluster.authority on \
                all nodes"
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                "the certificate of the other node does not allow authentication as both server and \
                client: issue a certificate with both usages"
            }
            _ => "the certificate of the other node is not valid",
        },
        Error::NoCertificatesPresented => {
            "the other node sent no certificate: set cluster.certificate on that node"
        }
        Error::AlertReceived(_) => {
            "the other node refused the certificate of this node, or does not support TLS 1.3: check \
            cluster.certificate of this node"
        }
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => {
            "the other node does not use TLS: set cluster.certificate on that node"
        }
        _ => "TLS between the nodes failed",
    }
}
