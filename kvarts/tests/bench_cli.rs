//! Runs every `kvarts bench` with sizes that take a moment, and looks at what it says: the fields are there, what was
//! asked for was done, and no figure is missing. How fast anything was is not looked at.

use crate::s3;
use crate::scratch::Scratch;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A model whose blocks are small.
const MODEL: [&str; 2] = ["--model", "deepseek-v4-flash"];

/// Runs one in a directory that must be empty again at the end, and gives the object that it prints.
fn bench(name: &str, arguments: &[&str]) -> Value {
    bench_in(name, arguments, &[])
}

fn bench_in(name: &str, arguments: &[&str], environment: &[(&str, String)]) -> Value {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let scratch = Scratch::new(&format!("{name}-{}", RUNS.fetch_add(1, Ordering::Relaxed)));
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    command.args(["bench", name, "--json", "--dir"]).arg(&scratch.0).args(arguments);
    command.envs(environment.iter().map(|(name, value)| (*name, value.as_str())));
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (code, out, err) = (output.status.code(), text(output.stdout), text(output.stderr));
    assert_eq!((code, err.as_str()), (Some(0), ""), "bench {name}: {out}");
    let left: Vec<_> = std::fs::read_dir(&scratch.0).unwrap().collect();
    assert!(left.is_empty(), "bench {name} leaves {left:?} behind");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["bench"], name);
    assert!(json["notes"].is_array(), "{out}");
    sane(name, &json);
    json
}

/// No figure is missing (a figure that is no number is printed as null), medians lie in their intervals, and ratios
/// are above zero.
fn sane(path: &str, json: &Value) {
    match json {
        // What is not there on purpose.
        Value::Null => {
            let absent = ["crossover_bytes", "bare_over_fio"];
            assert!(absent.iter().any(|name| path.ends_with(name)), "{path} is missing");
        }
        Value::Array(values) => values.iter().for_each(|value| sane(path, value)),
        Value::Object(fields) => {
            for (name, value) in fields {
                sane(&format!("{path}.{name}"), value);
                let interval = fields.get(&format!("{name}_interval"));
                if let (Some(interval), Some(median)) = (interval, value.as_f64()) {
                    let (low, high) = (interval[0].as_f64().unwrap(), interval[1].as_f64().unwrap());
                    assert!(low <= median && median <= high, "{path}.{name}: {low} {median} {high}");
                }
                let is_ratio = name == "ratio" || name.ends_with("_ratio");
                // Processor time is counted in steps that a moment's work may not fill.
                if let (true, Some(ratio)) = (is_ratio && !name.contains("cpu"), value.as_f64()) {
                    assert!(ratio > 0.0, "{path}.{name} is {ratio}");
                }
            }
        }
        _ => {}
    }
}

fn number(json: &Value, field: &str) -> f64 {
    json[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {json:#}"))
}

fn has(json: &Value, fields: &[&str]) {
    for field in fields {
        assert!(json.get(field).is_some(), "{field} is not in {json:#}");
    }
}

#[test]
fn layers() {
    let common = ["--mib", "4", "--record-mib", "2", "--pairs", "3"];
    let json = bench("layers", &[&common[..], &MODEL].concat());
    let fields = ["ratio", "cpu_over_checking", "first_layer_ratio", "control", "quotable", "backend"];
    has(&json, &fields);
    assert_eq!(number(&json, "bytes"), number(&json, "blocks") * number(&json, "block_bytes"));
    assert_eq!(
        (&json["pairs"], &json["fragmented"], &json["verify"]),
        (&3.into(), &false.into(), &"always".into())
    );
    let small = ["--mib", "8", "--record-mib", "8", "--pairs", "3"];
    let json = bench(
        "layers",
        &[&small[..], &MODEL, &["--fragmented", "--compacted", "--layout", "layer-block"]].concat(),
    );
    assert_eq!((&json["record_blocks"], &json["layout"]), (&1.into(), &"layer-block".into()));
    assert!(number(&json, "records_merged") > 0.0, "{json:#}");
}

#[test]
fn put() {
    let json = bench("put", &["--mib", "16", "--segment-mib", "16", "--groups", "1", "--pairs", "3"]);
    has(&json, &["ratio", "fresh_group_4_ratio", "group_1_serial_ratio", "control_fresh", "small_64_kib"]);
    assert_eq!(number(&json, "record_bytes"), 4.0 * f64::from(1 << 20));
    assert!(number(&json, "segments_recycled") >= 2.0, "{json:#}");
    assert_eq!(json["small"].as_array().unwrap().len(), 3);
}

#[test]
fn match_() {
    let json = bench("match", &["--blocks", "4096", "--keys", "64", "--lookups", "4", "--pairs", "3"]);
    has(&json, &["ratio", "match_us", "map_us", "control"]);
    assert_eq!((number(&json, "blocks"), number(&json, "keys")), (4096.0, 64.0));
    assert!(number(&json, "index_bytes_per_block") >= 20.0, "an entry has as many: {json:#}");
}

#[test]
fn open() {
    let json = bench("open", &["--blocks", "4096", "--segment-mib", "1", "--pairs", "3"]);
    has(&json, &["ratio", "clean_ratio", "ratio_above_empty", "control"]);
    assert_eq!(number(&json, "blocks"), 4096.0);
    assert!(
        number(&json, "crash_scanned_bytes") > 0.0 && number(&json, "clean_metadata_bytes") > 0.0,
        "{json:#}"
    );
    assert_eq!(number(&json, "clean_scanned_bytes"), 0.0, "after a clean stop nothing is scanned: {json:#}");
}

#[test]
fn crossover() {
    let json = bench("crossover", &["--mib", "2", "--chunk-kib", "4,16", "--pairs", "3"]);
    has(&json, &["crossover_bytes", "auto_full_block_bytes", "control"]);
    let sizes: Vec<_> =
        json["sizes"].as_array().unwrap().iter().map(|row| number(row, "chunk_bytes")).collect();
    assert_eq!(sizes, [4096.0, 16_384.0]);
}

#[test]
fn mixed() {
    // As many reads as take longer than the first segment is emptied.
    let sizes = ["--mib", "64", "--reads", "600", "--phases", "2", "--block-tokens", "1", "--rate-ms", "200"];
    let json = bench("mixed", &sizes);
    has(
        &json,
        &["p99_ratio", "p99_control", "read_mib_s_idle", "read_mib_s_busy", "put_mib_s", "blocks_moved"],
    );
    assert_eq!(number(&json, "reads"), 600.0);
    assert_eq!(number(&json, "records_failed"), 0.0);
    assert!((0.9..=1.0).contains(&number(&json, "full")), "{json:#}");
    assert!(number(&json, "segments_recycled") > 0.0, "nothing was reclaimed meanwhile: {json:#}");
}

#[test]
fn churn() {
    let json = bench(
        "churn",
        &["--seconds", "3", "--budget-mib", "16", "--segment-mib", "1", "--block-kib", "1", "--samples", "4"],
    );
    has(&json, &["flat", "resident_bytes_trend", "descriptors_trend", "write_amplification"]);
    let series = json["series"].as_array().unwrap();
    assert_eq!(series.len(), 6);
    // Write amplification is between two samples.
    let counts: Vec<_> = series.iter().map(|one| one["values"].as_array().unwrap().len()).collect();
    assert_eq!(counts, [5, 5, 5, 5, 5, 4], "{json:#}");
    assert_eq!(number(&json, "blocks_refused"), 0.0);
    assert!(number(&json, "most_on_disk_by_budget") <= 1.0, "{json:#}");
    assert!(number(&json, "write_amplification") >= 1.0, "{json:#}");
}

/// A trace that is told from a seed, and the engine's hits on it beside the bounds that they must lie between.
#[test]
fn replay() {
    let scratch = Scratch::new("replay-trace");
    let trace = scratch.0.join("trace.jsonl");
    let made = Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .args(["bench", "trace", "zipf", "--requests", "1500"])
        .output()
        .unwrap();
    std::fs::write(&trace, &made.stdout).unwrap();
    let replay = |more: &[&str]| {
        let json = bench("replay", &[&[trace.to_str().unwrap(), "--capacity-blocks", "2048"], more].concat());
        has(&json, &["lru_hit_rate_of_payload", "moved_by_put", "payload_by_budget"]);
        assert_eq!(["requests", "capacity_blocks"].map(|name| number(&json, name)), [1500.0, 2048.0]);
        assert_eq!(number(&json, "blocks_damaged"), 0.0);
        assert_eq!(json["blocks_refused"], json["blocks_not_admitted"], "{json:#}");
        assert!(number(&json, "allocated_by_budget") <= 1.0, "{json:#}");
        assert!(number(&json, "segments") >= 64.0 && number(&json, "blocks_evicted") > 0.0, "{json:#}");
        let [hits, lru, of_payload, ideal] =
            ["hit_rate", "lru_hit_rate", "lru_hit_rate_of_payload", "ideal_hit_rate"]
                .map(|name| number(&json, name));
        assert!(0.0 < hits && hits < ideal && of_payload <= lru && lru < ideal, "{json:#}");
        (json, hits, of_payload)
    };
    for more in [&["--parents", "unknown"][..], &["--policy", "lru"]] {
        let (json, hits, of_payload) = replay(more);
        // Without any sense in what goes there would be half of it.
        assert!(hits > of_payload * 0.8, "{json:#}");
        assert!(number(&json, "write_amplification") > 1.0, "{json:#}");
        assert_eq!(number(&json, "hits_lost_to_non_admission"), 0.0);
    }
    let (few, ..) = replay(&["--endurance-blocks", "2000"]);
    assert!(number(&few, "blocks_not_admitted") > 0.0, "{few:#}");
}

#[test]
fn encoded() {
    let json = bench("encoded", &[&["--mib", "16", "--pairs", "3"][..], &MODEL].concat());
    has(&json, &["speed_ratio", "first_layer_ratio", "raw_mib_s", "encoded_mib_s", "control"]);
    assert!(number(&json, "records_encoded") > 0.0 && number(&json, "size_ratio") > 1.1, "{json:#}");
    assert!(number(&json, "bytes_after") < number(&json, "bytes_before"), "{json:#}");
}

#[test]
fn fsck() {
    let sizes = ["--mib", "16", "--segment-mib", "16", "--threads", "2", "--pairs", "3"];
    let json = bench("fsck", &[&sizes[..], &MODEL].concat());
    has(&json, &["device_ratio", "fsck_gib_per_s", "bare_gib_per_s", "cpu_ratio", "control"]);
    assert_eq!((&json["threads"], &json["level"]), (&2.into(), &"full".into()));
    assert!(number(&json, "blocks") >= 16.0, "{json:#}");
}

#[test]
fn gpu() {
    let sizes = ["--tokens", "1024", "--arena-mib", "16", "--pairs", "3"];
    let json = bench("gpu", &[&sizes[..], &MODEL].concat());
    has(&json, &["pipeline_ratio", "serial_ratio", "quotable"]);
    assert_eq!((&json["device"], &json["pairs"]), (&"emulated".into(), &3.into()));
    let models = json["models"].as_array().unwrap();
    assert_eq!((models.len(), &models[0]["tokens"]), (1, &1024.into()));
    assert!(number(&models[0], "bytes") > 0.0 && number(&models[0], "layers") > 0.0);
    let right = ["bytes_right", "back_right"].map(|what| models[0][what].as_bool());
    assert_eq!(right, [Some(true); 2], "what landed, and what left and landed again: {json:#}");
}

#[test]
fn serve() {
    let json = bench("serve", &["--mib", "8", "--small", "20", "--pairs", "3"]);
    let fields = ["grpc_ratio", "grpc_mib_s", "bare_mib_s", "small_reader_p99_ratio", "control"];
    has(&json, &fields);
    has(&json, &["small_reader_bare_p99_ratio", "local_ratio", "local_overhead_ratio"]);
    let counts = ["mib", "grpc_pairs", "local_pairs"].map(|name| number(&json, name));
    assert_eq!(counts, [8.0, 3.0, 2.0]);
}

/// Against the storage of the benchmark's own, and against a real S3 server where there is one.
#[test]
fn cold() {
    let sizes = [
        "--mib",
        "8",
        "--block-tokens",
        "1",
        "--own-block-tokens",
        "1",
        "--reads",
        "20",
        "--pairs",
        "3",
        "--latency-ms",
        "2",
        "--spill-mib",
        "512",
        "--only",
        "restore,spill,beside",
    ];
    let sane_run = |json: &Value| {
        has(json, &["restore_ratio", "read_ratio", "fetch_ratio", "control", "quotable", "first_layer_ms"]);
        has(
            json,
            &[
                "put_ratio",
                "put_mib_s",
                "restore_cpu_ratio",
                "bare_cpu_s_per_gib",
                "spill_p99_ratio",
                "restoring_p99_ratio",
            ],
        );
        assert_eq!((number(json, "mib"), number(json, "pairs")), (8.0, 3.0));
        assert!((1.0..=1.125).contains(&number(json, "over_read")), "{json:#}");
        assert!(number(json, "read_by_asked") >= 1.0, "{json:#}");
        assert!(number(json, "requests_per_gib") > number(json, "bare_requests_per_gib"), "{json:#}");
        assert!(number(json, "sweeps") >= 3.0 && number(json, "spill_mib_s") > 0.0, "{json:#}");
        let verdicts = json["verdicts"].as_array().unwrap();
        assert!(verdicts.iter().all(|one| !one["what"].as_str().unwrap().is_empty()));
        assert_eq!(verdicts.len(), 8, "{json:#}");
    };
    let json = bench("cold", &sizes);
    assert_eq!((&json["bucket"], number(&json, "latency_ms")), (&"loopback".into(), 2.0));
    sane_run(&json);
    let Some(server) = s3::Server::start() else { return };
    let bucket = format!("s3://{}/below", s3::BUCKET);
    let arguments = [&sizes[..], &["--bucket", &bucket]].concat();
    let json = bench_in("cold", &arguments, &server.environment());
    assert_eq!((&json["bucket"], json.get("latency_ms")), (&"real".into(), None));
    sane_run(&json);
}

#[test]
fn cold_trouble() {
    let sizes = ["--mib", "8", "--block-tokens", "1", "--reads", "20", "--pairs", "3", "--latency-ms", "0"];
    let json = bench("cold", &[&sizes[..], &["--own-block-tokens", "1", "--only", "trouble"]].concat());
    let ways = ["outage", "busy", "slow", "truncated", "altered"].map(|way| format!("{way}_p99_ratio"));
    let worst = ways.iter().map(|way| number(&json, way)).fold(0.0, f64::max);
    // Numbers that are parsed are the printed ones up to their last digit.
    let by_working = number(&json, "trouble_p99_ratio") * number(&json, "working_p99_ratio");
    assert!((by_working / worst - 1.0).abs() < 1e-9, "{json:#}");
    assert_eq!(json["verdicts"].as_array().unwrap().len(), 1, "{json:#}");
}

/// Two nodes that serve, one that reads: the smallest that all its parts together can be, but for those that end a node.
#[test]
fn dual() {
    let sizes = ["--mib", "16", "--rate", "4096", "--pairs", "3", "--announce", "1000", "--limiter", "nodes"];
    let json = bench("dual", &[&sizes[..], &["--only", "peers,directory"]].concat());
    has(&json, &["equal_ratio", "equal_control", "three_to_one_sum_ratio", "lookup_round_trips"]);
    assert_eq!((number(&json, "mib"), number(&json, "announced_blocks")), (16.0, 1000.0));
    assert_eq!(json["limiter"], "nodes");
    let verdicts = json["verdicts"].as_array().unwrap();
    assert_eq!(verdicts.len(), 7, "{json:#}");
    for one in verdicts {
        let [low, high] = [0, 1].map(|end| one["reach"][end].as_f64().unwrap());
        assert!(low <= number(one, "value") && number(one, "value") <= high, "{one:#}");
    }
}

/// A node in a process of its own, which is killed.
#[test]
fn dual_failover() {
    let sizes = ["--mib", "16", "--rate", "64", "--pairs", "3", "--limiter", "nodes", "--only", "trouble"];
    let json = bench("dual", &sizes);
    has(&json, &["collapse_ratio", "own_p99_ratio", "failover_longest_pause_s", "after_failover_s"]);
    assert_eq!((number(&json, "failover_kills"), number(&json, "failover_errors")), (3.0, 0.0));
}

/// Interrupts a bench once it has made files; gives its exit code, and what it printed.
fn interrupted(scratch: &Scratch, arguments: &[&str], signal: Signal) -> (Option<i32>, String) {
    // A shell has its background jobs ignore what a terminal sends, and these tests with them.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT,TERM,HUP").arg(env!("CARGO_BIN_EXE_kvarts"));
    command.arg("bench").args(arguments).arg("--dir").arg(&scratch.0).env("TMPDIR", &scratch.0);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let begun = Instant::now();
    while files(&scratch.0) == 0 && begun.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(pid, signal).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(said).unwrap())
}

/// Plain files below a directory.
fn files(below: &Path) -> usize {
    let entries = std::fs::read_dir(below).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => files(&entry.path()),
            Ok(kind) => usize::from(kind.is_file()),
            Err(_) => 0,
        })
        .sum()
}

/// What each bench is that makes a directory, with more than a moment's work ahead of it.
const LONG: [&[&str]; 15] = [
    &["layers"],
    &["put"],
    &["match"],
    &["open"],
    &["churn"],
    &["scale"],
    &["mixed"],
    &["encoded"],
    &["fsck"],
    &["serve"],
    &["dual"],
    &["cold"],
    &["crossover"],
    &["times"],
    &["gpu"],
];

fn expect_nothing_is_left(benches: &[&[&str]]) {
    for (number, arguments) in benches.iter().enumerate() {
        let scratch = Scratch::new(&format!("interrupted-{}", arguments[0]));
        let (signal, code) = [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)][number % 3];
        assert_eq!(interrupted(&scratch, arguments, signal), (Some(code), String::new()), "{arguments:?}");
        let left: Vec<_> = std::fs::read_dir(&scratch.0).unwrap().collect();
        assert!(left.is_empty(), "bench {} leaves {left:?} behind", arguments[0]);
    }
}

#[test]
fn a_bench_that_is_interrupted_leaves_nothing() {
    expect_nothing_is_left(&[&["layers"], &["serve"], &["cold"]]);
}

/// All of them write for a moment, which takes a while.
#[test]
#[ignore = "nightly: scripts/documented nightly"]
fn none_of_all_benches_leaves_anything_when_it_is_interrupted() {
    let help = Command::new(env!("CARGO_BIN_EXE_kvarts")).args(["bench", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.split("\nCommands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    // What a line had no room for stands further in on the next.
    let name =
        |line: &'_ str| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')).map(str::to_owned);
    let lines: Vec<String> = commands.lines().filter_map(name).collect();
    let names = lines.iter().filter_map(|line| line.split_whitespace().next());
    // A trace makes no directory, and a replay needs a trace.
    let names: BTreeSet<&str> = names.filter(|name| !["trace", "replay", "help"].contains(name)).collect();
    assert_eq!(names, LONG.map(|arguments| arguments[0]).into_iter().collect(), "{help}");
    expect_nothing_is_left(&LONG);
}

/// The server that a bench started ends with it: the directory could not be removed for good otherwise.
#[test]
#[ignore = "nightly: scripts/documented nightly"]
fn a_bench_that_is_interrupted_takes_its_server_with_it() {
    let scratch = Scratch::new("interrupted-server");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    let sizes = ["--mib", "16", "--rate", "64", "--pairs", "3", "--limiter", "nodes", "--only", "trouble"];
    command.args(["bench", "dual", "--dir"]).arg(&scratch.0).args(sizes).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let socket = || {
        let directory = scratch.0.join(format!("kvarts-bench-{}", pid.as_raw_nonzero()));
        directory.join("failover").join("socket")
    };
    while !socket().exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was interrupted");
        std::thread::sleep(Duration::from_millis(5));
    }
    let client = std::os::unix::net::UnixStream::connect(socket());
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0);
    // Its end of the connection is closed.
    let mut client = client.unwrap();
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let end = std::io::Read::read_to_end(&mut client, &mut Vec::new());
    assert!(end.is_ok() || end.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
}

#[test]
fn what_cannot_be_measured_is_refused_on_one_line() {
    let scratch = Scratch::new("refused");
    for arguments in [
        &["bench", "layers", "--model", "no-such-model"][..],
        &["bench", "put", "--groups", "65"],
        &["bench", "crossover", "--chunk-kib", "1024"],
        // One block of each prefix: no segment of them is ever sealed.
        &["bench", "encoded", "--mib", "1", "--pairs", "3", MODEL[0], MODEL[1]],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        let output = command.args(arguments).arg("--dir").arg(&scratch.0).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), told.lines().count()), (Some(2), 1), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert_eq!(
            std::fs::read_dir(&scratch.0).unwrap().count(),
            0,
            "{arguments:?} leaves something behind"
        );
    }
}
