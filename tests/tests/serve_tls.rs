//! TLS: who is not trusted gets nothing, on either side.

use std::path::{Path, PathBuf};

use crate::served::Served;
use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::KvStore;
use kvarts_server::config::{Config, Settings};
use kvarts_server::daemon::Daemon;
use kvarts_tests::fixture;
use kvarts_tests::stage::Scratch;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tls").join(name)
}

#[allow(clippy::disallowed_methods, reason = "reads files of the repository")]
fn pem(name: &str) -> Vec<u8> {
    std::fs::read(file(name)).unwrap()
}

fn configuration(clients_too: bool) -> String {
    let line = |key: &str, name: &str| format!("{key} = '{}'\n", file(name).display());
    let authority = if clients_too { line("client_authority", "authority.pem") } else { String::new() };
    let tables =
        ["[tls]\n".to_owned(), line("certificate", "server.pem"), line("key", "server.key"), authority];
    tables.concat()
}

fn server(name: &str, clients_too: bool) -> Served {
    Served::start(name, &configuration(clients_too))
}

fn options(served: &Served) -> ConnectOptions {
    let endpoint = served.endpoint().replace("http:", "https:");
    ConnectOptions { authority: Some(pem("authority.pem")), ..ConnectOptions::to(endpoint) }
}

fn works(options: &ConnectOptions) -> bool {
    let register = |client: Client| client.register(&fixture::identity("tls"), &fixture::geometry());
    Client::connect(options).and_then(register).is_ok()
}

#[test]
fn a_client_that_trusts_the_server_comes_in_and_no_other() {
    let served = server("tls", false);
    let good = options(&served);
    assert!(works(&good));
    assert!(!works(&ConnectOptions { authority: Some(pem("client.pem")), ..good.clone() }));
    assert!(!works(&ConnectOptions { server_name: Some("elsewhere.example".to_owned()), ..good.clone() }));
    assert!(!works(&ConnectOptions::to(served.endpoint())), "plain text is not spoken here");
}

#[test]
fn where_clients_need_certificates_one_without_gets_nothing() {
    let served = server("mtls", true);
    let good = options(&served);
    assert!(!works(&good));
    let identity = Some((pem("client.pem"), pem("client.key")));
    assert!(works(&ConnectOptions { identity, ..good }));
}

#[test]
fn certificates_that_are_read_again_count_for_those_who_come_then() {
    let served = server("tls-again", false);
    let good = options(&served);
    let early = Client::connect(&good).unwrap();
    let register = |client: &Client| client.register(&fixture::identity("tls"), &fixture::geometry());
    register(&early).unwrap();
    served.reload(&configuration(true)).unwrap();
    // Who was there goes, and does not come again without a certificate.
    served.until("who has none is left outside", |_| !works(&good) && register(&early).is_err());
    let identity = Some((pem("client.pem"), pem("client.key")));
    assert!(works(&ConnectOptions { identity, ..good.clone() }));
    // What cannot be used changes nothing.
    let wrong = configuration(false).replace("server.key", "client.key");
    assert!(served.reload(&wrong).unwrap_err().starts_with("tls: "));
    assert!(served.reload("").is_err() && !works(&good));
    served.reload(&configuration(false)).unwrap();
    served.until("and comes in again", |_| works(&good));
    register(&early).unwrap();
}

#[test]
fn a_server_whose_identity_cannot_be_used_does_not_start() {
    let scratch = Scratch::new("tls-bad");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for (certificate, key, authority) in [
        ("server.pem", "client.key", None),
        ("server.key", "server.key", None),
        ("server.pem", "server.pem", None),
        ("server.pem", "server.key", Some("server.key")),
    ] {
        let text = |name: &str| Some(file(name).display().to_string());
        let settings = Settings {
            directories: Some(scratch.below("store").display().to_string()),
            budget: Some("16 MiB".to_owned()),
            segment: Some("256 KiB".to_owned()),
            grpc: Some("127.0.0.1:0".to_owned()),
            metrics: Some("none".to_owned()),
            socket: Some("none".to_owned()),
            certificate: text(certificate),
            key: text(key),
            client_authority: authority.and_then(text),
            ..Settings::default()
        };
        let config = Config::resolve(None, |_| None, &settings).unwrap();
        let error = runtime.block_on(Daemon::start(&config)).expect_err("it starts");
        assert!(error.starts_with("tls: "), "{certificate} {key} {authority:?}: {error}");
    }
}
