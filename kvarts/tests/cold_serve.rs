//! `kvarts serve` with a real S3 server behind it, through a proxy that spoils what it answers: hits are lost, and no byte is wrong.

use std::time::{Duration, Instant};

use crate::proxy::{Fault, Proxy};
use crate::s3;
use crate::scratch::Scratch;
use crate::served::Server;

const FAULTS: [Fault; 11] = [
    Fault::Outage,
    Fault::Busy,
    Fault::TooMany,
    Fault::Slow,
    Fault::Truncated,
    Fault::Shorter,
    Fault::Altered,
    Fault::Missing,
    Fault::Denied,
    Fault::Expired,
    Fault::NoBucket,
];

/// A server with an empty store, and the bucket behind the proxy.
fn node(name: &str, proxy: &Proxy, first: &Server) -> Server {
    let server = Server::start_with(
        Scratch::new(name),
        &["--cold-bucket", "s3://blocks/tier", "--cold-refresh", "1", "--cold-memory", "128M"],
        &environment(proxy.port),
    );
    for file in ["ID.toml", "tokens", "more"] {
        std::fs::copy(first.path(file), server.path(file)).unwrap();
    }
    server
}

fn environment(port: u16) -> Vec<(&'static str, String)> {
    let own = |text: &str| text.to_owned();
    vec![
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ACCESS_KEY_ID", own("some")),
        ("AWS_SECRET_ACCESS_KEY", own("secret")),
        ("AWS_REGION", own("us-east-1")),
    ]
}

/// Reads the ten blocks; gives whether all came. Those that came are what was put.
fn get(server: &Server) -> bool {
    let (code, ..) = server.client(&["get", "--force", "--to", "back"], &["--tokens", "tokens"]);
    let back = std::fs::read(server.path("back")).unwrap_or_default();
    assert!(back.iter().all(|byte| *byte == 7 || *byte == 0), "a wrong byte");
    let is_whole = code == 0 && back == vec![7; 10 * 4096];
    assert!(code != 0 || is_whole, "an answer that says it is whole, and is not");
    is_whole
}

#[test]
fn whatever_the_bucket_answers_hits_are_lost_and_no_byte_is_wrong() {
    let Some(moto) = s3::Server::start() else { return };
    let first = Server::start(Scratch::new("cold-first"), &[]);
    first.store_pages();
    let store = first.path("kvarts-data").display().to_string();
    let push = ["cold", "push", &store, "--live", "--all", "--bucket", "s3://blocks/tier"];
    let (code, out, error) = first.kvarts_with(&push, &environment(moto.port));
    assert_eq!(code, 0, "{out}{error}");
    let proxy = Proxy::start(moto.port);
    let well = node("cold-well", &proxy, &first);
    let (code, out, _) = well.client(&["match", "--json"], &["--tokens", "tokens"]);
    assert!(code == 0 && out.contains("\"cold\"") && out.contains("\"blocks\": 10"), "{out}");
    assert!(get(&well), "nothing is wrong yet");
    // Blocks are given while they are being stored, and counted when they are.
    let begun = Instant::now();
    while !well.metrics().lines().any(|line| line == "kvarts_cold_restored_blocks_total 10") {
        assert!(begun.elapsed() < Duration::from_secs(30), "ten blocks are not stored");
        std::thread::sleep(Duration::from_millis(20));
    }
    for (at, fault) in FAULTS.into_iter().enumerate() {
        for of in ["/manifests/", "/indexes/", "/packs/"] {
            proxy.set(Some((fault, (None, of))));
            let server = node(&format!("cold-fault-{at}-{}", of.len()), &proxy, &first);
            let begun = Instant::now();
            let came = get(&server);
            assert!(came == (fault == Fault::Slow), "{fault:?} of {of}: {came}");
            assert!(begun.elapsed() < Duration::from_secs(50), "{fault:?} of {of}");
            assert!(proxy.asked() < 60, "{fault:?} of {of}: {} requests", proxy.asked());
            // It serves on, puts included.
            server.store_pages();
            assert!(get(&server), "{fault:?} of {of}");
        }
    }
}
