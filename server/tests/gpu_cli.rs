//! `kvarts gpu` from outside: what a user without a GPU sees.

use std::process::{Command, Output};

fn kvarts(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvarts")).args(arguments).output().unwrap()
}

#[test]
fn a_probe_of_the_emulated_device_gives_a_curve_and_a_decision() {
    let output = kvarts(&["gpu", "probe", "--device", "emulated", "--mib", "4", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["device"], "emulated");
    assert_eq!(found["files"]["mode"], "staging");
    assert_eq!(found["curve"].as_array().unwrap().len(), 24);
    let text = kvarts(&["gpu", "probe", "--device", "emulated", "--mib", "1"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("no device was measured") && text.contains("PIECE BYTES"), "{text}");
}

#[test]
fn a_device_that_is_not_there_and_a_way_that_cannot_be_used_are_told_on_one_line() {
    for arguments in [
        ["gpu", "probe", "--device", "cuda:4096"],
        ["gpu", "probe", "--device", "gpu0"],
        ["gpu", "probe", "--cufile", "direct"],
        ["bench", "gpu", "--device", "cuda:4096"],
    ] {
        let output = kvarts(&arguments);
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), told.lines().count()), (Some(2), 1), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}
