//! `kvarts gpu`, and what a server says of devices, from outside: what a user without a GPU sees.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};

fn kvarts(arguments: &[&str]) -> Output {
    // Whatever this machine has: none of its devices is seen.
    Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .args(arguments)
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap()
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

fn serve(directory: &std::path::Path, cufile: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    command.current_dir(directory).args(["serve", "--cufile", cufile, "--listen-grpc", "127.0.0.1:0"]);
    command.args(["--listen-metrics", "127.0.0.1:0", "--budget", "32 MiB", "--segment", "256 KiB"]);
    command.args(["--memory", "64 MiB"]).env("CUDA_VISIBLE_DEVICES", "");
    command
}

#[test]
fn a_server_says_at_its_start_and_in_its_metrics_how_files_reach_devices_and_why() {
    let directory = std::env::temp_dir().join(format!("kvarts-gpu-serve-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    let log = directory.join("log");
    let mut child = serve(&directory, "staging")
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let place = line.split_whitespace().find_map(|word| word.strip_prefix("metrics=")).map(str::to_owned);
    let metrics = place.map(|place| {
        let mut stream = TcpStream::connect(place).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let told = std::fs::read_to_string(&log).unwrap();
    let _ = std::fs::remove_dir_all(&directory);
    let metrics = metrics.unwrap_or_else(|| panic!("no place of metrics in {line:?}: {told}"));
    let line = metrics.lines().find(|line| line.starts_with("kvarts_device_path{"));
    let line = line.unwrap_or_else(|| panic!("{metrics}"));
    assert!(line.starts_with("kvarts_device_path{mode=\"staging\",offered=\""), "{line}");
    assert!(line.ends_with(",reason=\"requested\"} 1"), "{line}");
    assert!(told.contains("device.cufile = staging (flag)"), "{told}");
    assert!(told.contains("the mode of reads into device memory is staging (requested"), "{told}");
}

/// A driver that hangs cannot be left again: the store's lock would stay with the process.
#[test]
fn a_server_calls_no_driver() {
    let directory = std::env::temp_dir().join(format!("kvarts-gpu-driver-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    // A process that starts this driver ends.
    let source = directory.join("driver.c");
    std::fs::write(
        &source,
        "void _exit(int);\nint cuInit(unsigned flags) { _exit((int)flags + 77); return 0; }\n",
    )
    .unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut build = Command::new(compiler);
    build.args(["-shared", "-fPIC", "-o"]).arg(directory.join("libcuda.so.1")).arg(&source);
    assert!(build.status().unwrap().success());
    std::fs::copy(directory.join("libcuda.so.1"), directory.join("libcuda.so")).unwrap();
    for cufile in ["staging", "auto"] {
        let mut command = serve(&directory, cufile);
        command.env("LD_LIBRARY_PATH", &directory).env_remove("CUDA_VISIBLE_DEVICES");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let _ = child.kill();
        let ended = child.wait().unwrap();
        assert!(line.contains("metrics="), "{cufile}: {line:?}, {ended}");
    }
    let _ = std::fs::remove_dir_all(&directory);
}

#[test]
fn a_server_that_is_asked_for_a_way_that_cannot_be_used_says_so_before_it_makes_a_store() {
    let directory = std::env::temp_dir().join(format!("kvarts-gpu-refused-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    let mut child =
        serve(&directory, "direct").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A server that started says so; one that refuses ends.
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    if !line.is_empty() {
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(line, "", "it started");
    let left = std::fs::read_dir(&directory).unwrap().count();
    let _ = std::fs::remove_dir_all(&directory);
    let told = String::from_utf8(output.stderr).unwrap();
    let refusal = "device.cufile: reads in the mode direct cannot be used";
    assert!(output.status.code() == Some(2) && told.contains(refusal), "{:?}: {told}", output.status);
    assert_eq!(left, 0);
}
