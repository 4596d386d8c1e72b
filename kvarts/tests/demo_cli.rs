//! Runs the real `kvarts demo`: everything that it tells happened, and nothing of it is left.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

#[test]
fn the_demonstration_holds_what_it_says_and_leaves_nothing() {
    let below = std::env::temp_dir().join(format!("kvarts-demo-cli-{}", std::process::id()));
    std::fs::create_dir_all(&below).unwrap();
    let demo = |json: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.args(["demo", "--tokens", "1024", "--dir"]).arg(&below);
        let output = if json { command.arg("--json").output() } else { command.output() }.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (out, err) = (text(output.stdout), text(output.stderr));
        assert_eq!((output.status.code(), err.as_str()), (Some(0), ""), "{out}");
        out
    };
    let story: Value = serde_json::from_str(&demo(true)).unwrap();
    let number = |name: &str| story[name].as_f64().unwrap_or_else(|| panic!("{name} in {story}"));
    assert_eq!((number("tokens"), number("prefix_blocks"), number("layers")), (1024.0, 16.0, 32.0));
    assert_eq!((number("session_blocks_matched"), number("session_blocks_stored")), (64.0, 8.0));
    assert_eq!((number("blocks_recovered"), number("blocks_matched")), (24.0, 16.0));
    assert_eq!((number("bytes_differing"), number("fsck_exit")), (0.0, 1.0));
    assert_eq!((&story["path"], &story["fsck_names_it"]), (&Value::from("local"), &Value::from(true)));
    let damage = &story["damage"];
    assert_eq!((&damage["block"], &damage["usable_blocks"]), (&Value::from(10), &Value::from(10)));
    assert_eq!(damage["blocks_matched_afterwards"], 10);
    let layers = story["timeline"].as_array().unwrap();
    assert_eq!(layers.len(), 32);
    // Each layer is used when it has arrived and the one before was used.
    let at = |layer: &Value, name: &str| layer[name].as_f64().unwrap();
    assert!(layers.iter().all(|layer| at(layer, "arrived") <= at(layer, "began")));
    assert!(layers.windows(2).all(|pair| at(&pair[0], "ended") <= at(&pair[1], "began")));
    let text = demo(false);
    assert!(text.contains("killed (SIGKILL)") && text.contains("   layer 0 ms"), "{text}");
    assert_eq!(std::fs::read_dir(&below).unwrap().count(), 0, "nothing is left");
    std::fs::remove_dir(&below).unwrap();
}

/// Processes that were started with this path in an argument.
fn started_with(path: &Path) -> usize {
    let named = |entry: std::fs::DirEntry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&path.display().to_string())
    };
    std::fs::read_dir("/proc").unwrap().filter_map(Result::ok).map(named).filter(|is| *is).count()
}

#[test]
fn interrupted_it_leaves_nothing_either() {
    for more in [&[][..], &["--cluster"]] {
        let below =
            std::env::temp_dir().join(format!("kvarts-demo-cut-{}-{}", std::process::id(), more.len()));
        std::fs::create_dir_all(&below).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.args(["demo", "--tokens", "1024", "--dir"]).arg(&below).args(more);
        let mut demo = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        // Itself and a server.
        while started_with(&below) < 2 {
            assert!(begun.elapsed() < Duration::from_secs(60), "no server was started");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Who starts this in the background may have it ignore SIGINT.
        kill_process(Pid::from_child(&demo), Signal::TERM).unwrap();
        let code = demo.wait().unwrap().code();
        let said = std::io::read_to_string(demo.stderr.take().unwrap()).unwrap();
        assert_eq!((code, said.as_str()), (Some(143), ""));
        assert_eq!((std::fs::read_dir(&below).unwrap().count(), started_with(&below)), (0, 0));
        std::fs::remove_dir(&below).unwrap();
    }
}
