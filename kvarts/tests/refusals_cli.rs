//! What commands say when they are refused, or are not answered: the bound that was met, and what to do about it.

use std::collections::BTreeMap;

use crate::scratch::Scratch;
use crate::served::Server;
use serde_json::Value;

/// Writes the tokens of some blocks, from a number on.
fn tokens(server: &Server, name: &str, first: u32, blocks: u32) {
    let text: String = (first..first + blocks * 16).map(|token| format!("{token} ")).collect();
    std::fs::write(server.path(name), text).unwrap();
}

#[test]
fn a_put_into_a_full_store_names_the_bound_its_value_and_what_to_do() {
    let arguments = ["--budget", "64M", "--segment", "1M", "--shards", "1", "--executors", "1"];
    let server = Server::start(Scratch::new("full"), &arguments);
    server.store_pages();
    // As much as may be pinned, and then a budget that is less.
    let held = 3900;
    tokens(&server, "held", 100_000, held);
    std::fs::write(server.path("bytes"), vec![9; held as usize * 4096]).unwrap();
    assert_eq!(server.client(&["put", "bytes"], &["--tokens", "held"]).0, 0);
    assert_eq!(server.client(&["pin"], &["--tokens", "held"]).0, 0);
    assert_eq!(server.kvarts(&["budget", "8M", "--yes"]).0, 0);
    let (blocks, mut refused) = (100, BTreeMap::new());
    std::fs::write(server.path("bytes"), vec![9; blocks as usize * 4096]).unwrap();
    // The first of them may find what is not pinned, and take its place.
    for first in 1..100 {
        let place = ["grpc", "socket"][first as usize % 2];
        tokens(&server, "some", first * 1_000_000, blocks);
        let at = ["--tokens", "some", "--server", server.place(place), "--json"];
        let (_, out, error) = server.client(&["put", "bytes"], &at);
        let report: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"));
        if let Some(why) = report["not_stored"][0]["why"].as_str() {
            refused.insert(report["path"].as_str().unwrap().to_owned(), why.to_owned());
        }
        if refused.len() == 2 {
            break;
        }
    }
    assert_eq!(refused.keys().collect::<Vec<_>>(), ["grpc", "local"]);
    for (path, why) in refused {
        let expected = [
            "no room: the store's budget of 8 MiB is full",
            "raise --budget",
            "`kvarts pin --list`",
            "`kvarts pin --release PIN`",
        ];
        assert!(expected.iter().all(|part| why.contains(part)), "{path}: {why}");
    }
    assert!(server.log().contains("puts are refused, reads continue: no room: the store's budget of 8 MiB"));
}

#[test]
fn of_a_pin_that_does_not_exist_those_are_named_that_do() {
    let server = Server::start(Scratch::new("pins"), &[]);
    server.store_pages();
    let (code, out, _) = server.kvarts(&["pin", "--release", "7"]);
    assert!(code == 1 && out.contains("the pin 7 does not exist, and the server has no other"), "{out}");
    let (code, out, error) = server.client(&["pin", "--json"], &["--tokens", "tokens"]);
    assert_eq!(code, 0, "{out}{error}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let pin = report["pin"].as_u64().unwrap();
    // The last digit is another one.
    let wrong = (pin ^ 1).to_string();
    let (code, out, _) = server.kvarts(&["pin", "--release", &wrong]);
    let expected =
        [format!("the pin {wrong} does not exist; the pins are {pin} "), format!("did you mean {pin}?")];
    assert!(code == 1 && expected.iter().all(|part| out.contains(part)), "{out}");
    let (_, out, _) = server.kvarts(&["pin", "--release", &wrong, "--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["pins"], serde_json::json!([pin]));
    let (code, out, _) = server.kvarts(&["pin", "--release", &pin.to_string()]);
    assert!(code == 0 && out == "the pin has ended\n", "{out}");
}

#[test]
fn a_server_that_accepts_and_does_not_answer_is_told_apart_from_one_that_is_away() {
    let server = Server::start(Scratch::new("hung"), &[]);
    server.store_pages();
    server.signal("-STOP");
    let grpc = server.place("grpc").to_owned();
    let metrics = server.metrics_address().to_owned();
    let commands: [&[&str]; 5] = [
        &["ls"],
        &["stat", "--server", &grpc],
        &["match", "--identity", "ID.toml", "--page-bytes", "4096", "--tokens", "tokens"],
        &["cluster", "status", "--server", &grpc],
        &["top", "--once", "--metrics", &metrics],
    ];
    std::thread::scope(|scope| {
        let asked = commands.map(|command| (command, scope.spawn(|| server.kvarts(command))));
        for (command, asked) in asked {
            let (code, out, error) = asked.join().unwrap();
            assert_eq!(code, 2, "{command:?}: {out}{error}");
            let expected =
                ["accepts connections but has sent no answer for", "its process is stopped", "`dmesg`"];
            assert!(expected.iter().all(|part| error.contains(part)), "{command:?}: {error}");
        }
    });
    // It is the server that was told of, not the command.
    server.signal("-CONT");
    let (code, out, error) = server.kvarts(&["stat"]);
    assert_eq!(code, 0, "{out}{error}");
}
