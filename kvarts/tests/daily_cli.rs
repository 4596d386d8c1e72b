//! What an operator runs day by day, with the built program: `doctor`, `top`, `health`, `completions`, `man`, and help that fits a terminal.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use crate::scratch::Scratch;
use serde_json::Value;

fn kvarts(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvarts")).args(arguments).output().unwrap()
}

fn told(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A server that has a metrics address of its own; ended with the value.
struct Server(Child, String);

impl Server {
    fn start(scratch: &Scratch) -> Self {
        let directory = scratch.0.join("store");
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .args(["serve", "--budget", "64M", "--segment", "1M", "--listen-grpc", "none"])
            .args(["--listen-metrics", "127.0.0.1:0", "--dir", directory.to_str().unwrap()])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let metrics =
            line.split_whitespace().find_map(|word| word.strip_prefix("metrics=")).unwrap().to_owned();
        Self(child, metrics)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_doctor_says_a_verdict_on_each_check_and_one_in_all() {
    let scratch = Scratch::new("doctor");
    let output = kvarts(&["doctor", scratch.shown(), "--probe", "16M", "--json"]);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let worst = findings.iter().any(|finding| finding["verdict"] == "bad");
    assert_eq!((output.status.code(), report["verdict"] == "bad"), (Some(i32::from(worst)), worst));
    for check in ["kernel", "io_uring", "locked memory", "open files", "huge pages", "memory", "clock", "GPU"]
    {
        assert!(findings.iter().any(|finding| finding["check"] == check), "{check}: {report}");
    }
    for finding in findings {
        assert_eq!(finding["verdict"] == "good", finding["advice"].is_null(), "{finding}");
    }
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0, "it leaves nothing behind");
    let engine = kvarts(&[
        "doctor",
        scratch.shown(),
        "--probe",
        "0",
        "--engine",
        "vllm",
        "--python",
        "/absent/python",
        "--json",
    ]);
    let report: Value = serde_json::from_slice(&engine.stdout).unwrap();
    let told = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|finding| finding["check"] == "engine vllm")
        .unwrap();
    assert_eq!((engine.status.code(), told["verdict"].as_str()), (Some(1), Some("bad")), "{report}");
    assert!(told["found"].as_str().unwrap().starts_with("/absent/python: "), "{told}");
    assert_eq!(kvarts(&["doctor", "--engine", "other"]).status.code(), Some(2));
    let absent = kvarts(&["doctor", "/absent/directory"]);
    assert_eq!(absent.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&absent.stdout).contains("a file cannot be created"));
}

#[test]
fn top_shows_a_running_server_once_for_people_and_for_programs() {
    let scratch = Scratch::new("top");
    let server = Server::start(&scratch);
    let text = told(&kvarts(&["top", "--once", "--interval", "1", "--metrics", &server.1]));
    assert_eq!(text.lines().next(), Some(format!("http://{}/metrics", server.1).as_str()));
    for part in
        [concat!("kvarts ", env!("CARGO_PKG_VERSION"), "  well"), "none looked up", "free of 64 MiB", "CALLS"]
    {
        assert!(text.contains(part), "{part} in:\n{text}");
    }
    let json = told(&kvarts(&["top", "--json", "--interval", "1", "--metrics", &server.1]));
    let figures: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(figures["disk"]["budget_bytes"], 67_108_864.0);
    assert!(figures["requests"]["memory_total_bytes"].as_f64().unwrap() > 0.0, "{figures}");
    assert!(figures["seconds"].as_f64().unwrap() > 0.0, "{figures}");
}

#[test]
fn top_without_a_server_says_where_it_looked() {
    let output = kvarts(&["top", "--once", "--metrics", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(2));
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(line.contains("127.0.0.1:1") && line.contains("--listen-metrics"), "{line}");
}

/// Gives an answer to one connection, at the address that it returns.
fn answers(text: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
    });
    address
}

#[test]
fn health_is_told_by_the_exit_code_with_the_reason() {
    let scratch = Scratch::new("health");
    let server = Server::start(&scratch);
    for more in [vec![], vec!["--alive"]] {
        let arguments = [vec!["health", "--metrics", &server.1], more].concat();
        assert_eq!(told(&kvarts(&arguments)), "well\n");
    }
    let unwell = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 26\r\n\r\nthe store is read-only: x\n";
    let output = kvarts(&["health", "--metrics", &answers(unwell)]);
    assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b"the store is read-only: x\n"[..]));
    let output = kvarts(&["health", "--json", "--metrics", &answers(unwell)]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said, serde_json::json!({ "well": false, "reason": "the store is read-only: x" }));
    // Another program at that address is no answer, and neither is none.
    for other in ["HTTP/1.1 404 Not Found\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n<html>", "SSH-2.0-x\r\n"] {
        let output = kvarts(&["health", "--metrics", &answers(other)]);
        assert_eq!(output.status.code(), Some(2), "{other}: {output:?}");
    }
    assert_eq!(kvarts(&["health", "--metrics", "127.0.0.1:1"]).status.code(), Some(2));
}

#[test]
fn completions_and_manual_pages_are_made_of_all_subcommands() {
    for shell in ["bash", "zsh", "fish"] {
        let text = told(&kvarts(&["completions", shell]));
        assert!(text.contains("fsck") && text.contains("doctor"), "{shell}");
    }
    let scratch = Scratch::new("man");
    told(&kvarts(&["man", scratch.shown()]));
    for page in ["kvarts.1", "kvarts-serve.1", "kvarts-cluster-status.1"] {
        let text = std::fs::read_to_string(scratch.0.join(page)).unwrap();
        assert!(text.contains(".TH kvarts"), "{page}");
    }
    assert_eq!(kvarts(&["man", "/absent/directory"]).status.code(), Some(2));
}

#[test]
fn help_fits_a_terminal_of_80_columns_and_names_each_setting() {
    let commands =
        [vec!["--help"], vec!["serve", "--help"], vec!["put", "--help"], vec!["bench", "serve", "--help"]];
    for arguments in commands {
        let text = told(&kvarts(&arguments));
        for line in text.lines() {
            // A word that is longer than a line is not broken.
            let is_one_word = line.split_whitespace().count() <= 2;
            assert!(line.chars().count() <= 80 || is_one_word, "{arguments:?}: {line}");
        }
    }
    let words = told(&kvarts(&["serve", "--help"])).split_whitespace().collect::<Vec<_>>().join(" ");
    for name in [
        "--budget <SIZE|PERCENT>",
        "[default: 80% of the free space; file: store.budget; environment: KVARTS_STORE_BUDGET]",
    ] {
        assert!(words.contains(name), "{name} in {words}");
    }
}

/// The page has each setting as the program knows it. `KVARTS_BLESS=1` writes the tables anew.
#[test]
fn the_reference_of_the_configuration_is_what_the_program_knows() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/configuration.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (words, tables) = page.split_once("\n## [").unwrap();
    let expected = kvarts_server::config::reference();
    if std::env::var_os("KVARTS_BLESS").is_some() {
        std::fs::write(path, format!("{words}{expected}")).unwrap();
        return;
    }
    assert_eq!(format!("\n## [{tables}"), expected, "KVARTS_BLESS=1 writes {path} anew");
}

#[test]
fn near_misses_are_answered_with_what_was_probably_meant() {
    let scratch = Scratch::new("near");
    let said = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_kvarts")).current_dir(&scratch.0).args(arguments).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    std::fs::write(scratch.0.join("config.json"), "{\"num_hidden_layers\": 32}").unwrap();
    let imported = said(&["model", "show", "config.json"]);
    assert!(imported.contains("kvarts model import config.json"), "{imported}");
    let named = said(&["model", "show", "qwen3"]);
    assert!(named.contains("did you mean `qwen3-"), "{named}");
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .args(["config", "check"])
        .env("KVARTS_STORE_BUDGT", "5G")
        .output()
        .unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && line.contains("KVARTS_STORE_BUDGET"), "{line}");
    for (wrong, meant) in [("fsk", "fsck"), ("checkpont", "checkpoint"), ("stats", "stat")] {
        let line = said(&[wrong]);
        assert!(line.contains(&format!("'{meant}'")), "{line}");
    }
}
