//! What a server tells of itself over HTTP: metrics that Prometheus reads without a complaint, rules and a dashboard that name
//! what there is, and the status page.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::scratch::Scratch;
use crate::served::{Server, http};
use serde_json::Value;

const ALERTS: &str = include_str!("../../packaging/prometheus/alerts.yml");
const DASHBOARD: &str = include_str!("../../packaging/prometheus/grafana.json");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A program that Prometheus brings, if `scripts/prometheus` did; it must be there where `KVARTS_PROMETHEUS=required`.
fn tool(name: &str) -> Option<PathBuf> {
    let path = root().join("target/tools/prometheus").join(name);
    if path.exists() {
        return Some(path);
    }
    assert_ne!(std::env::var("KVARTS_PROMETHEUS").as_deref(), Ok("required"), "run scripts/prometheus");
    eprintln!("not tried: there is no {name} (scripts/prometheus brings it)");
    None
}

/// A server that was asked for this and that by the commands of a person.
fn used(name: &str) -> Server {
    let server = Server::start(Scratch::new(name), &["--index-memory", "64M"]);
    server.store_pages();
    assert_eq!(server.client(&["match"], &["--tokens", "tokens"]).0, 0);
    assert_eq!(server.client(&["get", "--to", "back"], &["--tokens", "tokens"]).0, 0);
    // Half of these are not here.
    assert_eq!(server.client(&["match"], &["--tokens", "more"]).0, 1);
    server
}

/// One family as the text has it.
struct Family<'a> {
    help: &'a str,
    kind: &'a str,
    /// Names of series and their labels.
    series: Vec<(&'a str, BTreeMap<String, String>)>,
}

/// Reads the text as strictly as the format is written down: a head before each family, all of it together, each series once.
fn families(text: &str) -> BTreeMap<&str, Family<'_>> {
    let mut all: BTreeMap<&str, Family<'_>> = BTreeMap::new();
    let (mut now, mut seen) = ("", BTreeSet::new());
    assert!(text.ends_with('\n'));
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            let kind =
                lines.next().unwrap().strip_prefix("# TYPE ").unwrap().strip_prefix(name).unwrap().trim();
            now = name;
            assert!(all.insert(name, Family { help, kind, series: Vec::new() }).is_none(), "{name} twice");
            continue;
        }
        assert!(seen.insert(line.rsplit_once(' ').unwrap().0), "{line} twice");
        let (name, labels) = series(line);
        let family = all.get_mut(now).unwrap();
        let base = match family.kind {
            "histogram" => ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)),
            _ => Some(name),
        };
        assert_eq!(base, Some(now), "{line} stands below another family");
        family.series.push((name, labels));
    }
    all
}

fn series(line: &str) -> (&str, BTreeMap<String, String>) {
    let end = line.find(['{', ' ']).unwrap();
    let (name, mut rest) = line.split_at(end);
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    assert!(is_name(name), "{line}");
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"").unwrap();
            assert!(is_name(label) && !label.starts_with("__"), "{line}");
            let mut value = String::new();
            let mut letters = after.char_indices();
            let end = loop {
                match letters.next().unwrap() {
                    (_, '\\') => match letters.next().unwrap().1 {
                        'n' => value.push('\n'),
                        escaped @ ('\\' | '"') => value.push(escaped),
                        other => panic!("\\{other} in {line}"),
                    },
                    (at, '"') => break at + 1,
                    (_, other) => value.push(other),
                }
            };
            assert!(labels.insert(label.to_owned(), value).is_none(), "{line}");
            rest = after[end..].strip_prefix(',').unwrap_or(&after[end..]);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').unwrap();
    assert!(value.parse::<f64>().is_ok() && !value.contains(' '), "{line}");
    (name, labels)
}

#[test]
fn metrics_keep_the_conventions_of_prometheus() {
    let server = used("conventions");
    let text = server.metrics();
    let told = families(&text);
    for (name, Family { help, kind, series }) in &told {
        assert!(name.starts_with("kvarts_") || name.starts_with("process_"), "{name}");
        assert!(help.ends_with('.') && help.len() >= 15, "{name}: {help}");
        assert!(["counter", "gauge", "histogram"].contains(kind), "{name}: {kind}");
        assert_eq!(name.ends_with("_total"), *kind == "counter", "{name} is a {kind}");
        for unit in ["_ms", "_millis", "_micros", "_kib", "_mib", "_percent"] {
            assert!(!name.contains(unit), "{name}: base units only");
        }
        for end in ["_bucket", "_sum", "_count"] {
            assert!(!name.ends_with(end), "{name}: {end} is of histograms");
        }
        // Few enough of each family for two requests of one tenant, buckets aside.
        let labels = series.iter().filter(|(_, labels)| !labels.contains_key("le"));
        assert!(labels.count() <= 64, "{name}: too many series");
    }
    // The sum of a family is of like things: no limit stands beside what it limits.
    for name in ["kvarts_request_memory_bytes", "kvarts_tenant_disk_bytes", "kvarts_large_requests_bytes"] {
        assert!(told[name].series.iter().all(|(_, labels)| !labels.contains_key("what")), "{name}");
    }
    for line in [
        "kvarts_lookup_blocks_total{tenant=\"default\",model=\"pages\",found=\"here\"} 20",
        "kvarts_lookup_blocks_total{tenant=\"default\",model=\"pages\",found=\"never_stored\"} 10",
        "kvarts_blocks_delivered_total{tenant=\"default\",model=\"pages\"} 10",
    ] {
        assert!(text.lines().any(|told| told == line), "{line} is not in\n{text}");
    }
    assert!(text.contains("method=\"match\",class=\"none\",tenant=\"default\",code=\"OK\"} "), "{text}");
    for name in ["cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds"] {
        assert_eq!(told[format!("process_{name}").as_str()].series.len(), 1, "{name}");
    }
    let head = http(server.metrics_address(), "HEAD /metrics");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(http(server.metrics_address(), "POST /metrics").starts_with("HTTP/1.1 405 "));
    let Some(promtool) = tool("promtool") else { return };
    let mut checking = Command::new(promtool);
    checking.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut checking = checking.spawn().unwrap();
    let text = text + &kvarts_server::metrics::told_besides();
    checking.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let said = checking.wait_with_output().unwrap();
    assert!(said.status.success() && said.stderr.is_empty(), "{}", String::from_utf8_lossy(&said.stderr));
}

/// The page has each metric as a server tells it. `KVARTS_BLESS=1` writes its tables anew.
#[test]
fn the_reference_of_metrics_is_what_a_server_tells() {
    let server = Server::start(Scratch::new("reference"), &["--index-memory", "64M"]);
    let text = server.metrics() + &kvarts_server::metrics::told_besides();
    let told = families(&text);
    let mut expected = String::new();
    for (title, is_of) in [
        (
            "Server",
            (|name| {
                let of_others = ["kvarts_cluster_", "kvarts_cold_"];
                name.starts_with("kvarts_") && !of_others.iter().any(|of| name.starts_with(of))
            }) as fn(&str) -> bool,
        ),
        ("A node of a cluster", |name| name.starts_with("kvarts_cluster_")),
        ("A cold tier", |name| name.starts_with("kvarts_cold_")),
        ("Process", |name| name.starts_with("process_")),
    ] {
        expected += &format!("\n## {title}\n\n| Metric | Type | Meaning |\n|---|---|---|\n");
        for (name, Family { help, kind, .. }) in told.iter().filter(|(name, _)| is_of(name)) {
            expected += &format!("| `{name}` | {kind} | {help} |\n");
        }
    }
    let path = root().join("docs/reference/metrics.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (words, tables) = page.split_once("\n## Server").unwrap();
    if std::env::var_os("KVARTS_BLESS").is_some() {
        std::fs::write(path, format!("{words}{expected}")).unwrap();
        return;
    }
    assert_eq!(format!("\n## Server{tables}"), expected, "KVARTS_BLESS=1 writes {} anew", path.display());
}

/// Names of metrics in an expression.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_ours = |word: &&str| {
        (word.starts_with("kvarts_") || word.starts_with("process_"))
            && !word.ends_with('_')
            && word.len() > 8
    };
    words.filter(is_ours).map(str::to_owned).collect()
}

fn expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let mut all: Vec<String> = targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    assert!(all.len() > 20);
    all.extend(ALERTS.lines().filter_map(|line| Some(line.trim().strip_prefix("expr: ")?.to_owned())));
    all.iter().map(|one| one.replace("$__rate_interval", "1m").replace("$instance", ".*")).collect()
}

#[test]
fn rules_dashboard_and_pages_name_metrics_that_there_are() {
    let server = used("names");
    let text = server.metrics() + &kvarts_server::metrics::told_besides();
    let told = families(&text);
    let is_told = |name: &str| {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        told.contains_key(name)
            || base.is_some_and(|base| told.get(base).is_some_and(|one| one.kind == "histogram"))
    };
    let mut texts: Vec<(String, String)> =
        expressions().into_iter().map(|one| ("an expression".to_owned(), one)).collect();
    for page in ["operating", "runbook", "SERVER", "CLUSTER", "security", "upgrade", "GPU"] {
        let page = format!("docs/{page}.md");
        texts.push((page.clone(), std::fs::read_to_string(root().join(page)).unwrap()));
    }
    for (place, text) in texts {
        // Names of crates and of test fixtures are no metrics.
        let crates = ["kvarts_server", "kvarts_client", "kvarts_store", "kvarts_layout", "kvarts_gpudirect"];
        for name in names(&text).iter().filter(|name| !crates.contains(&name.as_str())) {
            assert!(is_told(name), "{place} names {name}, which no server tells");
        }
    }
    let alerts = ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let operating = std::fs::read_to_string(root().join("docs/operating.md")).unwrap();
    for alert in alerts {
        assert!(
            operating.contains(&format!("`{alert}`")),
            "docs/operating.md does not say what to do on {alert}"
        );
    }
}

/// What stands behind `name` in a file of Kubernetes, without quotes.
fn said<'a>(text: &'a str, name: &str) -> &'a str {
    let at = text.find(name).unwrap_or_else(|| panic!("no {name} in {text}")) + name.len();
    text[at..].split([',', '}', '\n']).next().unwrap().trim().trim_matches('"')
}

#[test]
fn pods_of_the_daemon_set_show_their_metrics_where_they_say() {
    let pods = std::fs::read_to_string(root().join("packaging/kubernetes/daemonset.yaml")).unwrap();
    let port = said(&pods, "- {name: metrics, containerPort: ");
    assert_eq!(said(&pods, "prometheus.io/port: "), port);
    assert_eq!(said(&pods, "prometheus.io/path: "), "/metrics");
    let settings: Vec<(&str, &str)> = pods
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- {name: KVARTS_"))
        .map(|line| (line.split(',').next().unwrap(), said(line, "value: ")))
        // Tokens are in a Secret; `scripts/kubernetes check` tries a server that has them.
        .filter(|(name, _)| *name != "CONFIG")
        .collect();
    assert!(settings.contains(&("LISTEN_METRICS", &format!("0.0.0.0:{port}"))), "{settings:?}");
    // A server that is given all of it shows them; only places and the port are this test's.
    let scratch = Scratch::new("pods");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    command.args(["serve", "--budget", "64M", "--segment", "4M", "--listen-grpc", "none"]);
    for (name, value) in settings {
        let value = match name {
            "STORE_DIRECTORIES" => "kvarts".to_owned(),
            "LISTEN_SOCKET" => "kvarts.sock".to_owned(),
            _ => value.replace(&format!(":{port}"), ":0"),
        };
        command.env(format!("KVARTS_{name}"), value);
    }
    let mut child = command.current_dir(&scratch.0).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split_whitespace().find_map(|word| word.strip_prefix("metrics=0.0.0.0:"));
    let answer = address.map(|port| http(&format!("127.0.0.1:{port}"), "GET /metrics"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(answer.is_some_and(|text| text.contains("kvarts_build_info")), "{line:?}");
}

#[test]
fn alert_rules_fire_when_they_should() {
    let Some(promtool) = tool("promtool") else { return };
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]] {
        let mut command = Command::new(&promtool);
        let said = command.current_dir(root().join("packaging/prometheus")).args(arguments).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&[said.stdout, said.stderr].concat()));
    }
}

/// A Prometheus that scrapes a server; ended with the value.
struct Prometheus(Child, String);

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Prometheus {
    fn start(program: &Path, server: &Server) -> Self {
        let directory = server.path("prometheus");
        std::fs::create_dir(&directory).unwrap();
        let text = std::fs::read_to_string(root().join("packaging/prometheus/prometheus.yml")).unwrap();
        let text = text.replace("127.0.0.1:7441", server.metrics_address()).replace("15s", "1s");
        std::fs::write(directory.join("prometheus.yml"), text).unwrap();
        std::fs::write(directory.join("alerts.yml"), ALERTS).unwrap();
        // No program can be asked to take any free port and say which: this one was free a moment ago.
        for _ in 0..10 {
            let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
            let child = Command::new(program)
                .current_dir(&directory)
                .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
                .arg(format!("--web.listen-address={free}"))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut started = Self(child, free);
            while started.0.try_wait().unwrap().is_none() {
                if started.query("up").is_some() {
                    return started;
                }
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
        panic!("Prometheus does not start");
    }

    /// What an expression is now; none while it does not answer.
    fn query(&self, expression: &str) -> Option<Value> {
        let quoted: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer =
            std::panic::catch_unwind(|| http(&self.1, &format!("GET /api/v1/query?query={quoted}"))).ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        // The body may come in chunks.
        let body = &body[body.find('{')?..=body.rfind('}')?];
        serde_json::from_str(body).ok()
    }
}

#[test]
fn prometheus_scrapes_a_server_and_makes_its_hit_ratio() {
    let Some(program) = tool("prometheus") else { return };
    let server = used("scraped");
    let prometheus = Prometheus::start(&program, &server);
    let scraped =
        || prometheus.query("kvarts_lookup_blocks_total")?["data"]["result"].as_array().map(Vec::len);
    while scraped().is_none_or(|series| series == 0) {
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    let ratio = "sum by (tenant, model) (kvarts_lookup_blocks_total{found=\"here\"}) \
                 / sum by (tenant, model) (kvarts_lookup_blocks_total)";
    let found = prometheus.query(ratio).unwrap();
    let one = &found["data"]["result"][0];
    assert_eq!((&one["metric"]["model"], &one["metric"]["tenant"]), (&"pages".into(), &"default".into()));
    let ratio: f64 = one["value"][1].as_str().unwrap().parse().unwrap();
    assert!((ratio - 2.0 / 3.0).abs() < 1e-9, "{found}");
    for expression in expressions() {
        let said = prometheus.query(&expression).unwrap();
        assert_eq!(said["status"], "success", "{expression}: {said}");
    }
    assert_eq!(prometheus.query("ALERTS").unwrap()["data"]["result"], Value::Array(Vec::new()));
}
