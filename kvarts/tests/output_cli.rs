//! Runs the real `kvarts` where its output cannot be written: a full device, a pipe that was closed. It says so, or ends as
//! a closed pipe ends a program, and never claims that a store is clean.

use crate::fsck_cli::store;
use crate::scratch::Scratch;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

fn kvarts(arguments: &[&str], out: impl Into<Stdio>) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .args(arguments)
        .stdout(out)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

fn full() -> std::fs::File {
    std::fs::File::options().write(true).open("/dev/full").unwrap()
}

/// The writing end of a pipe whose reading end is closed.
fn closed() -> std::io::PipeWriter {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer
}

/// What prints without a server; all of it succeeds on this store.
fn printing(store: &str) -> Vec<Vec<&str>> {
    vec![
        vec!["fsck", store],
        vec!["fsck", store, "--json"],
        vec!["fsck", store, "--deep"],
        vec!["fsck", store, "--repair"],
        vec!["fsck", store, "--repair", "--dry-run", "--json"],
        vec!["inspect", store],
        vec!["inspect", store, "--json"],
        vec!["ls", store],
        vec!["ls", store, "--json"],
        vec!["model", "list"],
        vec!["model", "show", "kimi-k2"],
        vec!["model", "show", "kimi-k2", "--json"],
        vec!["--help"],
        vec!["fsck", "--help"],
        vec!["--version"],
    ]
}

#[test]
fn an_answer_that_cannot_be_written_ends_with_code_2_and_one_line() {
    let store = store("full");
    for arguments in printing(store.shown()) {
        assert_eq!(kvarts(&arguments, Stdio::null()), (0, String::new()), "{arguments:?}");
        let (code, err) = kvarts(&arguments, full());
        assert_eq!((code, err.lines().count()), (2, 1), "{arguments:?}: {err}");
        assert!(err.contains("the output could not be written: No space left"), "{arguments:?}: {err}");
    }
}

#[test]
fn a_pipe_that_was_closed_ends_every_command_quietly_and_as_a_shell_knows_it() {
    let store = store("closed");
    for arguments in printing(store.shown()) {
        assert_eq!(kvarts(&arguments, closed()), (141, String::new()), "{arguments:?}");
    }
}

#[test]
fn problems_that_were_found_stay_found_where_nobody_reads_of_them() {
    let store = store("problems");
    let path = store.0.join("superblock");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4200] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    for arguments in [&["fsck", store.shown()][..], &["fsck", store.shown(), "--json"]] {
        assert_eq!(kvarts(arguments, closed()), (1, String::new()), "{arguments:?}");
        let (code, err) = kvarts(arguments, full());
        assert_eq!((code, err.lines().count()), (2, 1), "{arguments:?}: {err}");
    }
}

/// The object that stands on standard output beside the line on standard error.
fn refusal(arguments: &[&str]) -> (Value, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts")).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!((output.status.code(), err.lines().count()), (Some(2), 1), "{arguments:?}: {err}");
    let said: Value = serde_json::from_str(&out).unwrap_or_else(|why| panic!("{arguments:?}: {why}: {out}"));
    for field in ["kind", "message", "advice"] {
        assert!(said["error"].get(field).is_some(), "{field} in {out}");
    }
    assert!(err.contains(said["error"]["message"].as_str().unwrap()), "{err} and {out}");
    (said["error"].clone(), err)
}

#[test]
fn what_cannot_be_run_is_an_object_on_standard_output_where_json_was_asked_for() {
    let empty = Scratch::new("empty");
    for command in ["fsck", "inspect", "ls", "compact"] {
        let (said, err) = refusal(&[command, empty.shown(), "--json"]);
        assert_eq!(said["kind"], "no-store", "{command}");
        assert!(err.contains(said["advice"].as_str().unwrap()), "{err}");
    }
    assert_eq!(refusal(&["fsck", "--json", "--repair", empty.shown()]).0["kind"], "no-store");
    let absent = format!("{}/absent", empty.shown());
    assert_eq!(refusal(&["fsck", "--json", &absent]).0["kind"], "refused");
    assert_eq!(refusal(&["fsck", "--json", "--quick", "--deep", empty.shown()]).0["kind"], "invalid");
    assert_eq!(refusal(&["model", "show", "no such model", "--json"]).0["kind"], "invalid");
    let store = store("in-use");
    let lock = std::fs::File::create(store.0.join("lock")).unwrap();
    lock.lock().unwrap();
    let (said, _) = refusal(&["fsck", "--json", store.shown()]);
    assert!(said["kind"] == "in-use" && said["advice"].as_str().unwrap().contains("--live"), "{said}");
    assert_eq!(std::fs::read_dir(Path::new(empty.shown())).unwrap().count(), 0, "something was left there");
}
