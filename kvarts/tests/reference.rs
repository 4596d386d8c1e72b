//! Pages that say what the program says: JSON outputs field by field, labels of the checker, lines of the log, alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use kvarts_fsck::findings::LABELS;
use kvarts_fsck::remedy::{Remedy, remedy};
use kvarts_layout::format::recovery::{RECORD_ROWS, Row, SEGMENT_ROWS, Severity};
use serde_json::Value;

use crate::documented::{Compared, Tables, documented};
use crate::scratch::Scratch;
use crate::served::Server;
use crate::session_cli::two_sessions;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

#[test]
fn each_field_of_a_json_output_is_on_its_page_and_each_on_the_page_is_in_the_output() {
    let [documented, _] = documented();
    let mut compared = Compared::default();
    let server = Server::start(Scratch::new("json"), &["--index-memory", "64M"]);
    server.store_pages();
    let json = |arguments: &[&str]| -> Value {
        let (code, out, error) = server.kvarts(&[arguments, &["--json"]].concat());
        assert!(code < 2, "{arguments:?}: {out}{error}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {out}"))
    };
    let model = ["--identity", "ID.toml", "--page-bytes", "4096"];
    let of = |command: &[&str], more: &[&str]| json(&[command, &model, more].concat());
    let tokens = ["--tokens", "tokens"];
    compared.take(&documented, "put", &of(&["put", "blocks"], &tokens));
    compared.take(&documented, "match", &of(&["match"], &tokens));
    compared.take(&documented, "get", &of(&["get", "--to", "back"], &tokens));
    let pin = of(&["pin"], &tokens);
    compared.take(&documented, "pin", &pin);
    compared.take(&documented, "pin --list", &json(&["pin", "--list"]));
    let name = pin["pin"].as_u64().unwrap().to_string();
    compared.take(&documented, "pin --release", &json(&["pin", "--release", &name]));
    let _sessions = two_sessions(&server);
    compared.take(&documented, "session list", &json(&["session", "list"]));
    let metrics = server.metrics_address().to_owned();
    for (command, arguments) in [
        ("ls", vec!["ls"]),
        ("stat", vec!["stat"]),
        ("scrub", vec!["scrub"]),
        ("checkpoint", vec!["checkpoint"]),
        ("compact", vec!["compact"]),
        ("budget", vec!["budget"]),
        ("reload", vec!["reload"]),
        ("tenant purge", vec!["tenant", "purge", "default", "--dry-run"]),
        ("resume", vec!["resume"]),
        ("top", vec!["top", "--once", "--interval", "1", "--metrics", &metrics]),
        ("health", vec!["health", "--metrics", &metrics]),
        ("ls DIR", vec!["ls", "kvarts-data", "--live"]),
        ("doctor", vec!["doctor", ".", "--probe", "1M"]),
        ("config show", vec!["config", "show"]),
        ("config check", vec!["config", "check"]),
        ("config token", vec!["config", "token"]),
        ("init", vec!["init", "node", "--budget", "256M"]),
        ("model list", vec!["model", "list"]),
        ("model show", vec!["model", "show", "llama-3.1-8b"]),
        (
            "plan restore",
            vec!["plan", "restore", "--model", "llama-3.1-8b", "--device", "h100", "--disk", "12"],
        ),
        ("plan break-even", vec!["plan", "break-even"]),
    ] {
        compared.take(&documented, command, &json(&arguments));
    }
    std::fs::write(server.path("one"), (0..16).map(|token| format!("{token} ")).collect::<String>()).unwrap();
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| json(&["watch", "--count", "1"]));
        // The watcher must be there before something happens.
        std::thread::sleep(std::time::Duration::from_secs(2));
        compared.take(&documented, "delete", &of(&["delete"], &["--tokens", "one"]));
        compared.take(&documented, "watch", &watching.join().unwrap());
    });
    compared.take(&documented, "drain", &json(&["drain", "--yes"]));
    let mut server = server;
    assert!(server.ends().success());
    take_offline(&server, &documented, &mut compared);
    compared.expect_all(documented);
}

/// What is read of the files of a store whose server has ended.
fn take_offline(server: &Server, documented: &Tables, compared: &mut Compared) {
    let json = |arguments: &[&str]| -> Value {
        let (code, out, error) = server.kvarts(&[arguments, &["--json"]].concat());
        assert!(code < 2, "{arguments:?}: {out}{error}");
        serde_json::from_str(&out).unwrap()
    };
    for (command, arguments) in [
        ("fsck", vec!["fsck", "kvarts-data"]),
        ("inspect", vec!["inspect", "kvarts-data"]),
        ("export", vec!["export", "kvarts-data", "--all", "--to", "file"]),
        ("import", vec!["import", "file", "--into", "kvarts-data"]),
        ("compact DIR", vec!["compact", "kvarts-data"]),
    ] {
        compared.take(documented, command, &json(&arguments));
    }
    let (code, _, error) = server.kvarts(&[
        "import",
        "file",
        "--into",
        "disk1",
        "--into",
        "disk2",
        "--create",
        "--segment-mib",
        "4",
    ]);
    assert_eq!(code, 0, "{error}");
    std::fs::remove_dir_all(server.path("disk2")).unwrap();
    compared.take(documented, "replace", &json(&["replace", "disk2", "--dir", "disk1,disk2"]));
    // A repair tells what it did beside all that a check tells.
    let mut of_repair = documented["fsck"].clone();
    of_repair.extend(documented["fsck --repair"].clone());
    let of_repair = [("fsck --repair".to_owned(), of_repair)].into();
    compared.take(&of_repair, "fsck --repair", &json(&["fsck", "kvarts-data", "--repair"]));
}

#[test]
fn the_same_of_nodes_buckets_and_measurements() {
    let [_, documented] = documented();
    let mut compared = Compared::default();
    let server = Server::start(Scratch::new("json-apart"), &["--index-memory", "64M"]);
    server.store_pages();
    let stat = server.kvarts(&["stat", "--json"]).1;
    let store: Value = serde_json::from_str(&stat).unwrap();
    assert_eq!(server.kvarts(&["drain", "--yes"]).0, 0);
    let mut server = server;
    assert!(server.ends().success());
    let scratch = Scratch::new("json-buckets");
    std::fs::create_dir(scratch.0.join("bucket")).unwrap();
    let bucket = format!("file://{}", scratch.0.join("bucket").display());
    let json = |arguments: &[&str]| -> Value {
        let (code, out, error) = server.kvarts(&[arguments, &["--json"]].concat());
        assert!(code < 2, "{arguments:?}: {out}{error}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {out}"))
    };
    let cold = |arguments: &[&str]| json(&[&["cold"], arguments, &["--bucket", &bucket]].concat());
    compared.take(&documented, "cold push", &cold(&["push", "kvarts-data", "--all"]));
    let listed = cold(&["ls"]);
    compared.take(&documented, "cold ls", &listed);
    let namespace = listed["namespaces"][0]["namespace"].as_str().unwrap().to_owned();
    compared.take(&documented, "cold stat", &cold(&["stat", "--namespace", &namespace]));
    compared.take(&documented, "cold fsck", &cold(&["fsck"]));
    compared.take(&documented, "cold gc", &cold(&["gc", "--dry-run"]));
    let restored = cold(&["restore", "--all", "--into", "new", "--create", "--segment-mib", "1"]);
    compared.take(&documented, "cold restore", &restored);
    compared.take(&documented, "gpu probe", &json(&["gpu", "probe", "--device", "emulated", "--mib", "1"]));
    let few = ["--blocks", "4096", "--keys", "64", "--lookups", "4", "--pairs", "3", "--dir", "."];
    compared.take(&documented, "bench", &json(&[&["bench", "match"][..], &few].concat()));
    // A node that is alone in its cluster.
    let node = store["store"].as_str().unwrap();
    let [.., high, low] = std::process::id().to_be_bytes();
    let members = format!("epoch = 1\n[[node]]\nid = \"{node}\"\naddress = \"127.230.{high}.{low}:7440\"\n");
    let file = scratch.0.join("members.toml");
    std::fs::write(&file, members).unwrap();
    server.start_again(&["--index-memory", "64M", "--cluster", file.to_str().unwrap()]);
    let (code, out, error) = server.kvarts(&["cluster", "status", "--json"]);
    assert_eq!(code, 0, "{out}{error}");
    compared.take(&documented, "cluster status", &serde_json::from_str(&out).unwrap());
    compared.expect_all(documented);
}

fn do_about(label: &str, severity: Severity) -> &'static str {
    match (severity, remedy(label)) {
        (Severity::Normal | Severity::Note, _) => "nothing",
        (_, Remedy::Repair) => "`kvarts fsck --repair --dry-run`, then `--repair`",
        (_, Remedy::Device) => "check the device (`dmesg`, `smartctl`), then replace it",
        (_, Remedy::Directories) => "name every directory of the store in the command",
        (_, Remedy::Start) => "start the server with all directories",
        (_, Remedy::TakeOut) => "name the directory that replaced this directory",
        (_, Remedy::Access) => "run `kvarts fsck` as the store's user; check `dmesg`",
        (_, Remedy::Newer) => "use a newer kvarts",
    }
}

/// The page has each label as the checker knows it. `KVARTS_BLESS=1` writes its table anew.
#[test]
fn every_label_of_the_checker_is_in_the_runbook_with_what_to_do() {
    let rows: Vec<&Row> =
        RECORD_ROWS.iter().map(|one| &one.row).chain(SEGMENT_ROWS.iter().map(|one| &one.row)).collect();
    let mut labels = BTreeMap::new();
    for row in rows {
        labels.insert(row.label, (row.severity, row.cause));
    }
    for label in LABELS {
        labels.insert(label.name, (label.severity, label.cause));
    }
    labels.retain(|_, (severity, _)| *severity != Severity::Normal);
    let mut table = "| Label | Severity | What it means | Do |\n|---|---|---|---|\n".to_owned();
    for wanted in [Severity::Problem, Severity::Note] {
        for (label, (severity, cause)) in labels.iter().filter(|(_, (severity, _))| *severity == wanted) {
            let (word, what) = (severity.label(), do_about(label, *severity));
            table += &format!("| `{label}` | {word} | {cause} | {what} |\n");
        }
    }
    let text = page("docs/runbook.md");
    let (before, after) = text.split_once("<!-- labels -->\n").unwrap();
    if std::env::var_os("KVARTS_BLESS").is_some() {
        std::fs::write(root().join("docs/runbook.md"), format!("{before}<!-- labels -->\n{table}")).unwrap();
        return;
    }
    assert_eq!(after, table, "KVARTS_BLESS=1 writes docs/runbook.md anew");
}

fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
            all.push(path);
        }
    }
}

/// The fixed words that a line of the log begins with, of each warning and error in a source.
fn loud(source: &str) -> Vec<String> {
    let mut all = Vec::new();
    for level in ["tracing::warn!(", "tracing::error!("] {
        for call in source.split(level).skip(1) {
            // The text is the longest literal: values of fields and the target are words.
            let end = [call.find(");"), call.find("\")").map(|at| at + 1)].into_iter().flatten().min();
            let call = end.map_or(call, |end| &call[..end]);
            let text = call.split('"').skip(1).step_by(2).max_by_key(|text| text.len()).unwrap_or_default();
            let text = text.split(';').next().unwrap_or_default();
            // What is between braces is put in; a break of the line and signs end the words that are looked for.
            let outside = text.split('{').map(|part| part.split_once('}').map_or(part, |(_, after)| after));
            let words = outside.flat_map(|part| part.split(['\\', ':', ',', '(']));
            let words: Vec<&str> = words.map(str::trim).collect();
            let first = words.iter().find(|part| part.len() >= 12);
            let longest = first.or(words.iter().max_by_key(|part| part.len())).copied().unwrap_or_default();
            // A text that is all put in is that of another place: what recovery met, or why serving ended.
            if !longest.is_empty() {
                all.push(longest.to_owned());
            }
        }
    }
    all
}

#[test]
fn every_warning_and_error_of_a_server_is_in_the_runbook() {
    let runbook = page("docs/runbook.md");
    let mut files = Vec::new();
    for folder in ["server/src", "peer/src", "store/src", "cluster/src"] {
        sources(&root().join(folder), &mut files);
    }
    files.push(root().join("kvarts/src/serve_cmd.rs"));
    let mut seen = 0;
    let mut missing = BTreeSet::new();
    for file in files {
        for words in loud(&std::fs::read_to_string(&file).unwrap()) {
            seen += 1;
            if words.len() < 8 || !runbook.contains(&words) {
                missing.insert(format!("{}: {words:?}", file.display()));
            }
        }
    }
    assert!(seen > 20, "{seen}");
    assert!(missing.is_empty(), "lines of the log that docs/runbook.md does not explain: {missing:#?}");
}

/// A source with the parts of each literal joined that a backslash divides at the end of a line.
fn joined(source: &str) -> String {
    let mut parts = source.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}

/// The fixed words of the texts in the first column of the tables below a heading: signs and `...` end them.
fn quoted(page: &str, heading: &str) -> Vec<String> {
    let section = page.split_once(&format!("## {heading}\n")).unwrap().1.split("\n## ").next().unwrap();
    // The first row is the head of the table.
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")).skip(1);
    let first = rows.filter_map(|row| row.split(" | ").next());
    let parts = first.flat_map(|text| text.split("..."));
    let words = parts.flat_map(|part| part.split([',', ';', ':', '(', ')']));
    words.map(str::trim).filter(|words| words.len() >= 8 && !words.contains('`')).map(str::to_owned).collect()
}

#[test]
fn every_text_that_the_runbook_quotes_is_in_a_source() {
    let runbook = page("docs/runbook.md");
    let mut files = Vec::new();
    for folder in std::fs::read_dir(root()).unwrap() {
        let folder = folder.unwrap().path().join("src");
        if folder.is_dir() {
            sources(&folder, &mut files);
        }
    }
    let texts: Vec<String> =
        files.iter().map(|file| joined(&std::fs::read_to_string(file).unwrap())).collect();
    let mut seen = 0;
    let mut missing = BTreeSet::new();
    for heading in ["Puts are refused for want of space", "The server does not start", "Lines of the log"] {
        for words in quoted(&runbook, heading) {
            seen += 1;
            if !texts.iter().any(|text| text.contains(&words)) {
                missing.insert(format!("{heading}: {words:?}"));
            }
        }
    }
    assert!(seen > 80, "{seen}");
    assert!(missing.is_empty(), "docs/runbook.md quotes texts that no source has: {missing:#?}");
}

#[test]
fn every_alert_is_explained_where_it_points_to() {
    let (operating, runbook) = (page("docs/operating.md"), page("docs/runbook.md"));
    let headings: BTreeSet<String> = runbook
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .map(|heading| heading.to_lowercase().replace(' ', "-"))
        .collect();
    let links: Vec<&str> =
        operating.split("(runbook.md#").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(links.len() >= 3, "{links:?}");
    for link in links {
        assert!(headings.contains(link), "docs/runbook.md has no {link}: {headings:?}");
    }
}

/// As zlib's, bit by bit: what another language would have.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 * (crc & 1)))
    })
}

/// The vectors by which an author of another client finds what is wrong with theirs.
#[test]
fn the_vectors_for_other_languages_are_what_the_program_makes() {
    use kvarts_wire::digest::StreamDigest;
    use kvarts_wire::proto;
    use proto::put_request::Part as PutPart;
    use proto::read_reply::Part as ReadPart;
    let page = page("docs/grpc.md");
    let keys = kvarts_layout::key::text_keys(&(0..32).collect::<Vec<u32>>(), 16);
    assert_eq!(keys.len(), 2);
    for key in keys {
        assert!(page.contains(&format!("`{key}`")), "{key}");
    }
    let number = |n: u64| n.to_le_bytes().to_vec();
    let request: Vec<u8> =
        [[2, 32].map(number).concat(), vec![1; 32], vec![0; 7 * 8], number(32), vec![2; 32]].concat();
    let announced = [request.clone(), [2, 0, 1].map(number).concat()].concat();
    let wire =
        proto::ReadRequest { namespace: vec![1; 32].into(), keys: vec![2; 32].into(), ..Default::default() };
    let mut read = StreamDigest::of_read(kvarts_contract::api::Order::Layers, &wire);
    let layer = proto::LayerReady { layer: 0, blocks: 1 };
    assert_eq!(read.read(&ReadPart::Layer(layer)), crc32(&announced));
    let header =
        proto::PutHeader { namespace: vec![1; 32].into(), keys: vec![2; 32].into(), ..Default::default() };
    let put = StreamDigest::of_put().put(&PutPart::Header(header));
    for crc in [crc32(&request), crc32(&announced), put] {
        assert!(page.contains(&format!("`{crc:08x}`")), "{crc:08x}");
    }
}

/// Commands that a page quotes: what stands in backticks, and lines of consoles.
fn commands(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut is_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if is_code {
            let line = line.trim().trim_start_matches("$ ");
            let line = line.split_once(" -- ").filter(|(cargo, _)| cargo.starts_with("cargo run")).map_or(
                line.to_owned(),
                |(cargo, rest)| {
                    if cargo.contains("-p ") { String::new() } else { format!("kvarts {rest}") }
                },
            );
            // Behind a sign of the shell, or a remark, stands something else.
            let end = line.find([';', '#', '>', '&']).unwrap_or(line.len());
            all.push(line[..end].to_owned());
        } else {
            all.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    all.retain(|one| one.starts_with("kvarts ") && !one.contains(": "));
    all
}

/// The help of a command, by its words; empty where there is none.
fn help(known: &mut BTreeMap<String, String>, words: &str) -> String {
    let make = || {
        let arguments: Vec<&str> = words.split_whitespace().chain(["--help"]).collect();
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_kvarts")).args(arguments).output().unwrap();
        if output.status.success() { String::from_utf8(output.stdout).unwrap() } else { String::new() }
    };
    known.entry(words.to_owned()).or_insert_with(make).clone()
}

#[test]
fn every_command_that_a_page_quotes_is_there_with_its_flags() {
    let mut files =
        vec![root().join("README.md"), root().join("python/README.md"), root().join("CONTRIBUTING.md")];
    for (folder, end) in
        [("docs", "md"), ("docs/guides", "md"), ("docs/reference", "md"), ("proto/kvarts/v1", "proto")]
    {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        files.extend(entries.filter(|path| path.extension().is_some_and(|one| one == end)));
    }
    let (mut known, mut wrong, mut seen) = (BTreeMap::new(), Vec::new(), 0);
    // Names that are hashed begin as commands do.
    files.retain(|file| !file.ends_with("FORMAT.md"));
    for file in files {
        for command in commands(&std::fs::read_to_string(&file).unwrap()) {
            seen += 1;
            let mut words = command.split_whitespace().skip(1).peekable();
            let is_name = |word: &str| {
                word.chars().all(|one| one.is_ascii_lowercase() || "-|".contains(one))
                    && !word.starts_with('-')
            };
            let names = |word: &str| -> Vec<String> {
                word.split('|').filter(|one| !one.is_empty()).map(str::to_owned).collect()
            };
            let Some(first) = words.next().filter(|word| is_name(word)) else { continue };
            let mut paths = names(first);
            while words.next_if_eq(&"|").is_some() {
                paths.extend(words.next().map(str::to_owned));
            }
            if let Some(second) = words.peek().copied().filter(|word| is_name(word))
                && paths.iter().all(|path| help(&mut known, path).contains("\nCommands:\n"))
            {
                paths = paths
                    .iter()
                    .flat_map(|path| names(second).into_iter().map(move |name| format!("{path} {name}")))
                    .collect();
            }
            let texts: Vec<String> = paths.iter().map(|path| help(&mut known, path)).collect();
            if texts.iter().any(String::is_empty) {
                wrong.push(format!("{}: `{command}`: no such command", file.display()));
                continue;
            }
            for flag in words.filter(|word| word.starts_with("--") && word.len() > 2) {
                let flag: String = flag
                    .chars()
                    .take_while(|one| one.is_ascii_lowercase() || *one == '-' || one.is_ascii_digit())
                    .collect();
                let has = |text: &String| {
                    text.split(|one: char| !(one.is_alphanumeric() || one == '-')).any(|word| word == flag)
                };
                if !texts.iter().any(has) {
                    wrong.push(format!("{}: `{command}`: no {flag}", file.display()));
                }
            }
        }
    }
    assert!(seen > 150, "{seen}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
