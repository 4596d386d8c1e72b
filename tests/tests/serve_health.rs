//! A server that is not well says so, to everybody who asks, with the reason; and a latch is lifted by a call.
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::served;
use crate::served::ClientStage;
use kvarts_contract::error::Kind;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::stage::Stage;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// The status and body at the address that supervisors of processes ask for health.
fn health(served: &served::Served) -> (u16, String) {
    probe(served, "/health")
}

fn probe(served: &served::Served, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(served.daemon().metrics().unwrap()).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// What is said over gRPC of the server and of its services, if it is the same of all.
fn serving(served: &served::Served) -> Option<ServingStatus> {
    let endpoint = served.endpoint();
    let services = ["Store", "Reads", "Models", "Admin", "Directory", "Sessions", "Plans"];
    let names = services.iter().map(|name| format!("kvarts.v1.{name}")).chain([String::new()]);
    let said: Vec<_> = names
        .map(|name| {
            // One connection lets in only a few calls without a token.
            served.runtime.block_on(async {
                let endpoint = tonic::transport::Endpoint::from_shared(endpoint.clone()).unwrap();
                let mut client = HealthClient::new(endpoint.connect().await.unwrap());
                let request = HealthCheckRequest { service: name };
                client.check(request).await.unwrap().into_inner().status()
            })
        })
        .collect();
    said.iter().all(|one| *one == said[0]).then_some(said[0])
}

#[test]
fn a_latched_store_is_told_of_wherever_somebody_asks_until_it_resumes() {
    let stage = ClientStage::open("health");
    let served = &stage.served;
    let desk = Desk::new(&stage, "latched");
    assert_eq!(health(served), (200, "ok\n".to_owned()));
    assert_eq!(serving(served), Some(ServingStatus::Serving));
    assert!(served.metrics().contains("kvarts_read_only{reason=\"\"} 0\n"));
    // The directory of a shard goes: its next segment file cannot be made.
    let shard = served.scratch.path().join(kvarts_layout::format::names::shard_name(0));
    let away = served.scratch.path().join("away");
    std::fs::rename(&shard, &away).unwrap();
    let refused = (0..200).find_map(|n| {
        let request = desk.request(pages(), &desk.keys(n..n + 1), 1);
        stage.put(request).err().filter(|error| error.kind() == Kind::ReadOnly)
    });
    let refused = refused.expect("it is latched").to_string();
    assert!(refused.contains("No such file"), "{refused}");
    let (status, why) = health(served);
    assert!(status == 503 && why.contains("the store is read-only") && why.contains("No such file"), "{why}");
    // A restart would not bring the directory back, and supervisors make none.
    assert_eq!(probe(served, "/alive"), (200, "ok\n".to_owned()));
    served.until("gRPC says so", |_| serving(served) == Some(ServingStatus::NotServing));
    let metrics = served.metrics();
    let line = metrics.lines().find(|line| line.starts_with("kvarts_read_only{")).unwrap();
    assert!(line.contains("No such file") && line.ends_with("} 1"), "{line}");
    // What is here is read all the same.
    let first = desk.keys(0..1);
    desk.expect(pages(), &first, 1);
    stage.client.resume().expect_err("the directory is gone");
    std::fs::rename(&away, &shard).unwrap();
    assert!(stage.client.resume().unwrap().reason.contains("No such file"));
    assert_eq!(health(served), (200, "ok\n".to_owned()));
    served.until("gRPC says so", |_| serving(served) == Some(ServingStatus::Serving));
    for n in 300..340 {
        stage.put(desk.request(pages(), &desk.keys(n..n + 1), 1)).expect("it takes writes again");
    }
}

#[test]
fn a_lame_duck_says_so_and_serves_who_still_comes() {
    let stage = ClientStage::open("lame");
    let (served, desk) = (&stage.served, Desk::new(&stage, "lame"));
    served.daemon().state().start_leaving();
    assert_eq!(health(served), (503, "the server is stopping\n".to_owned()));
    served.until("gRPC says so", |_| serving(served) == Some(ServingStatus::NotServing));
    stage.put(desk.request(pages(), &desk.keys(0..1), 1)).expect("calls are accepted");
    desk.expect(pages(), &desk.keys(0..1), 1);
}

#[test]
fn a_server_that_drains_says_so() {
    let stage = ClientStage::open("draining");
    stage.served.daemon().state().start_drain();
    let (status, why) = health(&stage.served);
    assert_eq!((status, why.as_str()), (503, "the server is stopping\n"));
    assert_eq!(probe(&stage.served, "/alive").0, 200, "a stop is not to be ended by a supervisor");
}

/// A page in a browser of this host can give 127.0.0.1 a name of its own (DNS rebinding).
#[test]
fn a_page_of_another_name_reads_health_and_nothing_else() {
    let served = served::Served::start("rebound", "");
    let asked = |path: &str, host: &str| {
        let mut stream = TcpStream::connect(served.daemon().metrics().unwrap()).unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    for path in ["/", "/metrics", "/history", "/prefixes", "/reads", "/segments"] {
        assert_eq!(asked(path, "rebound.example:7441"), 421, "{path}");
        for own in ["127.0.0.1:7441", "localhost"] {
            assert_eq!(asked(path, own), 200, "{path} as {own}");
        }
    }
    for probe in ["/health", "/alive"] {
        assert_eq!(asked(probe, "rebound.example:7441"), 200, "{probe}");
    }
}

/// Connections that say nothing, more than there are places for them: each that comes takes the place of the one that is silent longest.
#[test]
fn silent_connections_keep_nobody_from_the_status_and_from_the_local_socket() {
    const SILENT: usize = 150;
    /// Less than a silent client is waited for.
    const SOON: Duration = Duration::from_secs(3);
    let served = served::Served::start("silent", "");
    let metrics = served.daemon().metrics().unwrap();
    let mut silent: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(metrics).unwrap()).collect();
    silent[0].set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(silent[0].read(&mut [0]).unwrap(), 0, "the first has lost its place to a later one");
    assert_eq!(health(&served), (200, "ok\n".to_owned()));
    assert!(served.metrics().contains("kvarts_executors_silent 0\n"));
    drop(silent);
    let socket = served.daemon().socket().unwrap().to_owned();
    let mut silent: Vec<UnixStream> =
        (0..2 * SILENT).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    silent[0].set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(silent[0].read(&mut [0]).unwrap(), 0, "the first has lost its place to a later one");
    assert!(served.local(None).models().unwrap().models.is_empty());
}
