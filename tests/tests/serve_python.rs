//! A client in another language that has nothing but the contract in `proto/`.
//!
//! It needs `scripts/python-client` to have been run, as `.ci/run` does. Where it was not, the test says so on standard
//! error and ends; with `KVARTS_PYTHON=required` that is a failure.

use std::path::Path;
use std::process::Command;

use crate::served::Served;

#[test]
fn a_python_client_that_has_only_the_contract_works() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = root.join("target/python-client/bin/python");
    if !python.exists() {
        let required = std::env::var("KVARTS_PYTHON").is_ok_and(|value| value == "required");
        assert!(!required, "run scripts/python-client first");
        eprintln!("NOT RUN: the Python client is not installed; run scripts/python-client");
        return;
    }
    let served = Served::start("python", "");
    let output = Command::new(python)
        .arg(root.join("tests/python/client.py"))
        .arg(served.daemon().grpc().unwrap().to_string())
        .env("PYTHONPATH", root.join("target/python-client/generated"))
        .output()
        .unwrap();
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.trim() == "good", "{said}\n{complained}");
}
