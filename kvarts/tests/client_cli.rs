//! The client commands against a server in another process: files in and out, exit codes, what is printed.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::key::text_keys;
use kvarts_layout::{Geometry, Identity};
use serde_json::Value;

const PAGE: usize = 4096;

/// A directory with a server, an identity, tokens of ten blocks and their bytes.
struct Ground {
    path: PathBuf,
    server: Child,
}

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn identity() -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("pages"),
        revision: text("1"),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: Geometry::opaque(PAGE as u64).unwrap().fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

fn bytes() -> Vec<u8> {
    (0..10 * PAGE as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 17) as u8).collect()
}

impl Ground {
    fn new(name: &str, config: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-client-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("server.toml"), config).unwrap();
        std::fs::write(path.join("identity.json"), serde_json::to_string(&identity()).unwrap()).unwrap();
        let tokens: Vec<u32> = (0..165).collect();
        std::fs::write(path.join("tokens"), serde_json::to_string(&tokens).unwrap()).unwrap();
        std::fs::write(path.join("blocks"), bytes()).unwrap();
        let mut server = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .current_dir(&path)
            .args(["serve", "--config", "server.toml", "--listen-grpc", "127.0.0.1:0"])
            .args(["--listen-metrics", "none", "--budget", "64 MiB", "--segment", "4 MiB"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving "), "{line:?}");
        Self { path, server }
    }

    fn kvarts(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        let output = command.current_dir(&self.path).args(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    /// With the model and, where there are some, the tokens.
    fn of(&self, command: &[&str], more: &[&str]) -> (i32, String, String) {
        let page = PAGE.to_string();
        let model = ["--identity", "identity.json", "--page-bytes", page.as_str()];
        self.kvarts(&[command, &model, more].concat())
    }

    fn put_from(&self, input: std::fs::File, more: &[&str]) -> (i32, String) {
        let page = PAGE.to_string();
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .current_dir(&self.path)
            .args(["put", "-", "--identity", "identity.json", "--page-bytes", page.as_str()])
            .args(TOKENS)
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Through a pipe, which has no length.
        let mut pipe = child.stdin.take().unwrap();
        // A program that knows enough need not take the rest.
        let _ = std::io::copy(&mut { input }, &mut pipe);
        drop(pipe);
        let output = child.wait_with_output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    fn json(&self, command: &[&str], more: &[&str]) -> (i32, Value) {
        let (code, out, err) = self.of(command, &[more, &["--json"]].concat());
        let json = serde_json::from_str(&out);
        (code, json.unwrap_or_else(|error| panic!("{error}: {out:?} {err:?}")))
    }
}

const TOKENS: [&str; 2] = ["--tokens", "tokens"];

#[test]
fn what_is_put_from_a_file_is_matched_got_pinned_watched_and_deleted() {
    let ground = Ground::new("all", "");
    // The server that runs here is found without being named.
    let mut watching = Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .current_dir(&ground.path)
        .args(["watch", "--count", "10", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (code, report) = ground.json(&["match"], &TOKENS);
    assert_eq!((code, &report["longest"]["blocks"]), (1, &Value::from(0)), "a miss");
    let (code, report) = ground.json(&["put", "blocks"], &TOKENS);
    assert_eq!((code, &report["stored"], &report["path"]), (0, &Value::from(10), &Value::from("local")));
    let (code, out, _) = ground.of(&["put", "blocks", "--relaxed"], &TOKENS);
    assert_eq!((code, out.as_str()), (0, "0 blocks stored, 10 were stored before, 0 not stored\n"));
    let (code, out, _) = ground.of(&["match"], &TOKENS);
    assert_eq!((code, out.as_str()), (0, "10 of 10 blocks (160 tokens) can be restored\n"));
    let (code, report) = ground.json(&["get", "--to", "back"], &TOKENS);
    assert_eq!((code, &report["usable_blocks"]), (0, &Value::from(10)));
    assert_eq!(std::fs::read(ground.path.join("back")).unwrap(), bytes());
    let (code, out, _) = ground.kvarts(&["ls"]);
    assert!(code == 0 && out.contains("pages 1, 1 layers, blocks of 16 tokens"), "{out}");
    let (code, pin) = ground.json(&["pin", "--hold", "30m"], &TOKENS);
    assert_eq!((code, &pin["held_blocks"]), (0, &Value::from(10)));
    let name = pin["pin"].as_u64().unwrap().to_string();
    assert_eq!(ground.kvarts(&["pin", "--release", &name]).0, 0);
    assert_eq!(ground.kvarts(&["pin", "--release", &name]).0, 1, "it has ended");
    says_what_it_has_done(&ground);
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let keys = text_keys(&(0..160).collect::<Vec<u32>>(), 16);
    let mut seen: Vec<String> = (0..10)
        .map(|_| {
            let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            assert_eq!((&line["event"], &line["reason"]), (&"stored".into(), &"put".into()));
            line["key"].as_str().unwrap().to_owned()
        })
        .collect();
    seen.sort();
    let mut expected: Vec<String> = keys.iter().map(ToString::to_string).collect();
    expected.sort();
    assert_eq!(seen, expected);
    assert!(watching.wait().unwrap().success());
    std::fs::write(ground.path.join("some"), format!("{}\n\n{}\n", keys[4], keys[7])).unwrap();
    let (code, report) = ground.json(&["delete", "--keys", "some"], &[]);
    assert_eq!((code, &report["deleted_blocks"]), (0, &Value::from(2)));
    let (code, report) = ground.json(&["match"], &TOKENS);
    assert_eq!((code, &report["longest"]["blocks"]), (1, &Value::from(4)), "as of a `get` of them");
    let (code, _, err) = ground.of(&["get", "--to", "back"], &TOKENS);
    assert!(code == 2 && err.contains("back exists already"), "{err}");
    let (code, report) = ground.json(&["get", "--force", "--to", "back"], &TOKENS);
    says_why(&ground, code, &report);
    assert_eq!(std::fs::read(ground.path.join("back")).unwrap(), bytes()[..4 * PAGE]);
    let (code, _, err) = ground.of(&["delete", "--all"], &[]);
    assert!(code == 2 && err.contains("confirm with --yes"), "{err}");
    let (code, report) = ground.json(&["delete", "--all", "--yes"], &[]);
    assert_eq!((code, &report["deleted_blocks"]), (0, &Value::from(8)));
    // What replaces a file is whole before the file goes: nothing came, so nothing went.
    let (code, report) = ground.json(&["get", "--force", "--to", "back"], &TOKENS);
    assert_eq!((code, &report["usable_blocks"]), (1, &Value::from(0)));
    assert_eq!(std::fs::read(ground.path.join("back")).unwrap(), bytes()[..4 * PAGE]);
    assert!(!ground.path.join("back.partial").exists());
}

/// What `stat` says after ten blocks were looked up, put, matched and pinned.
fn says_what_it_has_done(ground: &Ground) {
    let (code, out, _) = ground.kvarts(&["stat", "--json"]);
    let stat: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &stat["counts"]["blocks_stored"]), (0, &Value::from(10)));
    let limit =
        |name: &str| stat["limits"].as_array().unwrap().iter().find(|one| one["name"] == name).cloned();
    let index = limit("limits.index").unwrap();
    assert!(
        index["used"].as_u64() < index["most"].as_u64() && stat["index_bytes"] == index["used"],
        "{index}"
    );
    for name in ["store.budget", "limits.memory", "limits.shared", "limits.connections", "limits.threads"] {
        assert!(limit(name).is_some_and(|one| one["most"].as_u64().is_some()), "{name}: {out}");
    }
    let text = ground.kvarts(&["stat"]).1;
    let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("no {words} in {text}"));
    let order =
        ["blocks looked up and found", "and absent", "blocks stored", "blocks evicted", "limits.connections"];
    assert!(order.windows(2).all(|two| at(two[0]) < at(two[1])), "what is looked for first is first: {text}");
    assert!(text.contains("more counters are 0"), "{text}");
    // Ten were not there before the put; a match and a pin found them after it.
    let counts = &stat["counts"];
    assert_eq!((&counts["lookup_blocks_here"], &counts["lookup_blocks_absent"]), (&20.into(), &10.into()));
    assert!(text.lines().any(|line| line.contains("limits.index") && line.contains(" of ")), "{text}");
}

/// A `get` of which two blocks were deleted tells that.
fn says_why(ground: &Ground, code: i32, report: &Value) {
    assert_eq!((code, &report["usable_blocks"]), (1, &Value::from(4)), "exit code 1: some are missing");
    let missing = &report["missing"];
    assert_eq!(
        (&missing["deleted"], &missing["never_stored"]),
        (&Value::from(2), &Value::from(0)),
        "{report}"
    );
    let (code, out, _) = ground.of(&["get", "--force", "--to", "back"], &TOKENS);
    assert!(code == 1 && out.ends_with("\n  2 deleted\n"), "{out}");
}

/// What the server has of the ten blocks.
fn there(ground: &Ground) -> u64 {
    ground.json(&["match"], &TOKENS).1["longest"]["blocks"].as_u64().unwrap()
}

#[test]
fn nothing_is_stored_of_a_file_that_is_not_exactly_its_blocks() {
    let ground = Ground::new("exact", "");
    std::fs::write(ground.path.join("short"), &bytes()[..PAGE * 9 + 1]).unwrap();
    std::fs::write(ground.path.join("long"), [&bytes()[..], &[0]].concat()).unwrap();
    for (name, what) in [("short", "ends before its 10 blocks"), ("long", "is longer than its 10 blocks")] {
        let (code, _, err) = ground.of(&["put", name], &TOKENS);
        assert!(code == 2 && err.contains(what) && err.contains("No block was stored"), "{err}");
        let piped = std::fs::File::open(ground.path.join(name)).unwrap();
        let (code, err) = ground.put_from(piped, &[]);
        assert!(code == 2 && err.contains(what), "{err}");
        assert_eq!(there(&ground), 0, "some of {name} is stored");
    }
    let piped = std::fs::File::open(ground.path.join("blocks")).unwrap();
    assert_eq!(ground.put_from(piped, &[]).0, 0);
    assert_eq!(there(&ground), 10);
    // The same keys, other bytes in the fourth block.
    let mut other = bytes();
    other[3 * PAGE + 5] ^= 1;
    std::fs::write(ground.path.join("other"), other).unwrap();
    let (code, report) = ground.json(&["put", "other"], &TOKENS);
    assert_eq!((code, &report["already_there"], &report["differing"]), (0, &Value::from(10), &Value::Null));
    let (code, report) = ground.json(&["put", "other", "--verify"], &TOKENS);
    assert_eq!((code, &report["differing"]), (1, &serde_json::json!([3])));
    let (code, out, _) = ground.of(&["put", "other", "--verify"], &TOKENS);
    assert!(code == 1 && out.contains("block 3: the server has other bytes"), "{out}");
    assert_eq!(ground.of(&["put", "blocks", "--verify"], &TOKENS).0, 0);
}

#[test]
fn a_match_of_one_rank_asks_for_what_that_rank_has() {
    let ground = Ground::new("rank", "");
    let fingerprint = |text: &str| text.to_owned();
    let spec = kvarts_layout::spec::shipped::load("llama-3.1-8b").unwrap();
    let ours = Identity {
        spec_fingerprint: spec.geometry().fingerprint(),
        model: fingerprint("llama"),
        ..identity()
    };
    std::fs::write(ground.path.join("llama.json"), serde_json::to_string(&ours).unwrap()).unwrap();
    let half = spec.geometry().coordinate(kvarts_layout::Group(0), 2, 0).unwrap();
    let shape = spec.geometry().shape(kvarts_layout::Group(0), half, 16).unwrap();
    std::fs::write(ground.path.join("half"), vec![7; shape.block_bytes() as usize * 2]).unwrap();
    std::fs::write(ground.path.join("two"), serde_json::to_string(&(0..32).collect::<Vec<u32>>()).unwrap())
        .unwrap();
    let of = |command: &[&str], more: &[&str]| {
        let model = ["--identity", "llama.json", "--model", "llama-3.1-8b", "--tp", "2", "--tokens", "two"];
        let (code, out, err) = ground.kvarts(&[command, &model[..], more].concat());
        assert_eq!(err, "");
        (code, out)
    };
    assert_eq!(of(&["put", "half"], &["--rank", "0"]).0, 0);
    let (code, out) = of(&["match"], &["--rank", "0"]);
    assert!(code == 0 && out.starts_with("2 of 2 blocks"), "{out}");
    for (rank, why) in [(&["--rank", "1"][..], "of another"), (&[], "without a rank, all of them are needed")]
    {
        let (code, out) = of(&["match"], rank);
        assert!(code == 1 && out.starts_with("0 of 2 blocks"), "{why}: {out}");
    }
}

#[test]
fn an_identity_of_another_model_than_the_named_one_is_refused_and_nothing_is_stored() {
    let ground = Ground::new("contradiction", "");
    let (code, written, err) =
        ground.kvarts(&["identity", "--model", "llama-3.1-8b", "--revision", "demo", "--block-tokens", "16"]);
    assert_eq!(code, 0, "{err}");
    // Also where a hub's name says the model.
    let hub = written.replace("\"llama-3.1-8b\"", "\"meta-llama/Llama-3.1-8B\"");
    assert_ne!(hub, written);
    std::fs::write(
        ground.path.join("tokens.json"),
        "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]",
    )
    .unwrap();
    // Blocks of the model that was named, so that nothing else is wrong.
    let block = |model: &str| {
        let spec = kvarts_layout::spec::shipped::load(model).unwrap();
        let coordinate = spec.geometry().coordinate(kvarts_layout::Group(0), 1, 0).unwrap();
        let shape = spec.geometry().shape(kvarts_layout::Group(0), coordinate, 16).unwrap();
        std::fs::write(ground.path.join("block"), vec![7; shape.block_bytes() as usize]).unwrap();
    };
    for text in [&written, &hub] {
        std::fs::write(ground.path.join("ID.toml"), text).unwrap();
        let of = |command: &[&str], model: &str| {
            let rest = ["--identity", "ID.toml", "--model", model, "--tokens", "tokens.json"];
            ground.kvarts(&[command, &rest[..]].concat())
        };
        block("llama-3.1-70b");
        for command in [&["put", "block"][..], &["match"], &["pin"]] {
            let (code, out, err) = of(command, "llama-3.1-70b");
            assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
            assert!(err.contains("llama-3.1-8b") && err.contains("llama-3.1-70b"), "{err}");
        }
        block("llama-3.1-8b");
        let (code, _, err) = of(&["put", "block"], "llama-3.1-8b");
        assert_eq!(code, 0, "{err}");
    }
}

#[test]
fn mistakes_are_told_on_one_line() {
    let ground = Ground::new("mistakes", "");
    let fault = |arguments: &[&str]| {
        let (code, out, err) = ground.kvarts(arguments);
        assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{arguments:?} {err}");
        err
    };
    let page = PAGE.to_string();
    let model = ["--identity", "identity.json", "--page-bytes", page.as_str()];
    let with = |more: &[&'static str]| [more, &model[..]].concat();
    assert!(fault(&with(&["match"])).contains("--tokens FILE or --keys FILE"));
    assert!(fault(&["match", "--tokens", "tokens"]).contains("--identity FILE"));
    assert!(fault(&with(&["put", "nothing", "--tokens", "tokens"])).contains("nothing: "));
    std::fs::write(ground.path.join("short"), &bytes()[..PAGE * 3 + 1]).unwrap();
    let short = fault(&with(&["put", "short", "--tokens", "tokens"]));
    assert!(short.contains("ends before its 10 blocks of 4096 bytes: 40,960 bytes are needed"), "{short}");
    std::fs::write(ground.path.join("words"), "one two").unwrap();
    assert!(fault(&with(&["match", "--tokens", "words"])).contains("\"one\""));
    assert!(fault(&with(&["match", "--keys", "words"])).contains("line 1"));
    assert!(fault(&["stat", "--server", "./no.sock"]).contains("./no.sock"));
    assert!(fault(&["resume", "--server", "./no.sock"]).contains("./no.sock"));
    assert!(
        fault(&["ls", "kvarts-data", "--server", "x"])
            .contains("DIR and the options for a server cannot be combined")
    );
    assert!(fault(&with(&["pin", "--tokens", "tokens", "--hold", "5y"])).contains("is not a unit of time"));
}

#[test]
fn a_store_whose_server_does_not_run_is_not_taken_for_another_server() {
    let mut ground = Ground::new("stopped", "");
    assert_eq!(ground.kvarts(&["ls"]).0, 0);
    ground.server.kill().unwrap();
    ground.server.wait().unwrap();
    let refused = |ground: &Ground| {
        let (code, out, err) = ground.kvarts(&["ls"]);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains("no server runs for the store here (./kvarts-data)"), "{err}");
        assert!(err.contains("`kvarts serve`") && err.contains("--server"), "{err}");
    };
    // The socket of a killed server is left behind; one that was stopped takes its own away.
    refused(&ground);
    let _ = std::fs::remove_file(ground.path.join("kvarts-data").join("kvarts.sock"));
    refused(&ground);
    let named = ground.kvarts(&["ls", "--server", "127.0.0.1:1"]);
    assert!(named.0 == 2 && named.2.contains("127.0.0.1:1"), "{named:?}");
}

#[test]
fn a_latched_store_is_shown_and_takes_writes_again_when_it_is_told_to() {
    let ground = Ground::new("resume", "");
    let (code, out, _) = ground.kvarts(&["resume"]);
    assert_eq!((code, out.as_str()), (0, "the store already accepts writes\n"));
    // The directory of a shard goes: its next segment file cannot be made.
    let shard = |name: &str| ground.path.join("kvarts-data").join(name);
    let names = (0..64).map(kvarts_layout::format::names::shard_name);
    let shards: Vec<String> = names.filter(|name| shard(name).exists()).collect();
    assert!(!shards.is_empty());
    let away = |name: &String| shard(&format!("{name}-away"));
    shards.iter().for_each(|name| std::fs::rename(shard(name), away(name)).unwrap());
    let large: Vec<u32> = (0..16 * 2000).collect();
    std::fs::write(ground.path.join("many"), serde_json::to_string(&large).unwrap()).unwrap();
    std::fs::write(ground.path.join("much"), vec![7; 2000 * PAGE]).unwrap();
    let put = || ground.of(&["put", "much"], &["--tokens", "many"]);
    assert_ne!(put().0, 0, "there is no place for it");
    let (_, out, _) = ground.kvarts(&["stat"]);
    assert!(out.contains("writes    refused: ") && out.contains("kvarts resume"), "{out}");
    let (code, out, err) = ground.kvarts(&["resume"]);
    assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
    assert!(err.contains("still read-only") && err.contains("No such file"), "{err}");
    shards.iter().for_each(|name| std::fs::rename(away(name), shard(name)).unwrap());
    let (code, out, err) = ground.kvarts(&["resume", "--json"]);
    assert_eq!(code, 0, "{err}");
    let resumed: Value = serde_json::from_str(&out).unwrap();
    assert!(
        resumed["resumed"] == true && resumed["before"].as_str().unwrap().contains("No such file"),
        "{out}"
    );
    assert_eq!(put().0, 0, "it takes writes again");
    assert!(!ground.kvarts(&["stat"]).1.contains("refused: "));
}

#[test]
fn a_token_comes_from_a_file_and_decides_what_may_be_done() {
    let hash = kvarts_server::state::auth::TokenHash::of("kvarts_reader");
    let config = format!(
        "[[tenants]]\nname = \"a\"\n[[tokens]]\ntenant = \"a\"\nrights = [\"read\"]\nhash = \"{hash}\"\n"
    );
    let ground = Ground::new("token", &config);
    std::fs::write(ground.path.join("token"), "kvarts_reader\n").unwrap();
    let (code, _, err) = ground.of(&["match"], &TOKENS);
    assert!(code == 2 && err.contains("token"), "{err}");
    let with = [&TOKENS[..], &["--token-file", "token"]].concat();
    assert_eq!(ground.of(&["match"], &with).0, 1, "a miss is an answer");
    let (code, _, err) = ground.of(&["put", "blocks"], &with);
    assert!(code == 2 && err.contains("right `write`"), "{err}");
    assert!(!err.contains("kvarts_reader") && Path::new(&ground.path).exists());
}
