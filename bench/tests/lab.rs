//! `kvarts-lab` as the program that `kvarts` hands over to: it speaks under that name. What its commands do is tried through
//! `kvarts` (`kvarts/tests/bench_cli.rs`, `sim_cli.rs`).
#![allow(clippy::disallowed_methods, reason = "runs a program")]

use std::process::{Command, Output};

fn lab(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvarts-lab")).args(arguments).output().unwrap()
}

#[test]
fn help_shows_commands_as_they_are_typed() {
    for (arguments, usage) in [
        (["bench", "layers", "--help"], "kvarts bench layers"),
        (["sim", "disk", "--help"], "kvarts sim disk"),
    ] {
        let told = lab(&arguments);
        let text = String::from_utf8(told.stdout).unwrap();
        assert!(told.status.success() && text.contains(&format!("Usage: {usage} ")), "{text}");
    }
}

#[test]
fn what_it_has_not_is_one_line_and_code_two() {
    let told = lab(&["serve"]);
    assert_eq!((told.status.code(), told.stdout.len()), (Some(2), 0));
    let text = String::from_utf8(told.stderr).unwrap();
    assert!(
        text.starts_with("kvarts: unrecognized subcommand 'serve'") && text.lines().count() == 1,
        "{text}"
    );
}
