//! Certificates of nodes, made when they are needed.
#![allow(dead_code, unreachable_pub, reason = "shared by several tests")]

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};

/// An authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its key.
pub struct Made {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate that names this; one that has expired if it is so.
    pub fn make(&self, name: &str, expired: bool) -> Made {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        if expired {
            (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
        }
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Made { certificate, key: key.serialize_pem() }
    }
}
