//! Runs the real `kvarts cold` on real stores, with a bucket in a directory, and with a real S3 server where there is one.

use std::path::PathBuf;
use std::process::Command;

use crate::sample::*;
use crate::scratch::Scratch;
use crate::served::Server;
use crate::{s3, sample};
use serde_json::Value;

/// Runs the program with the environment that a bucket wants.
struct Cold {
    url: String,
    environment: Vec<(&'static str, String)>,
}

impl Cold {
    fn in_directory(scratch: &Scratch) -> Self {
        std::fs::create_dir_all(scratch.path("bucket")).unwrap();
        Self { url: format!("file://{}", scratch.path("bucket").display()), environment: Vec::new() }
    }

    fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.arg("cold").args(arguments).args(["--bucket", &self.url]);
        command.envs(self.environment.iter().map(|(name, value)| (*name, value.as_str())));
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    fn json(&self, arguments: &[&str]) -> (i32, Value) {
        let (code, out, err) = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(err, "", "{arguments:?}");
        (code, serde_json::from_str(&out).unwrap())
    }

    fn good(&self, arguments: &[&str]) -> Value {
        let (code, value) = self.json(arguments);
        assert_eq!(code, 0, "{arguments:?}: {value}");
        value
    }
}

/// Pushes, looks, loses the store, restores into a new one.
fn round(cold: &Cold, scratch: &Scratch) {
    let (store, file) = filled(scratch);
    let nothing = cold.run(&["ls"]);
    assert!(nothing.0 == 0 && nothing.1 == "This bucket is empty.\n", "{nothing:?}");
    let pushed = cold.good(&["push", &store, "--all"]);
    assert_eq!(
        (&pushed["blocks"], &pushed["packs"], &pushed["complete"]),
        (&9.into(), &2.into(), &true.into())
    );
    let again = cold.good(&["push", &store, "--all"]);
    assert_eq!((&again["blocks"], &again["already_there"]), (&0.into(), &9.into()));
    let listed = cold.good(&["ls"]);
    let namespaces = listed["namespaces"].as_array().unwrap();
    let blocks: u64 = namespaces.iter().map(|one| one["blocks"].as_u64().unwrap()).sum();
    assert_eq!((namespaces.len(), blocks, &namespaces[0]["model"]), (2, 9, &"small".into()), "{listed}");
    let namespace = namespaces[0]["namespace"].as_str().unwrap();
    let stat = cold.good(&["stat", "--namespace", namespace]);
    assert_eq!((&stat["namespace"], stat["packs"].as_array().unwrap().len()), (&namespace.into(), 1));
    assert!(cold.good(&["fsck"])["clean"].as_bool().unwrap());
    // The node and its disks are gone; a new one begins with what the bucket has.
    std::fs::remove_dir_all(&store).unwrap();
    let new = scratch.path("new").display().to_string();
    let into = ["--into", &new, "--create", "--segment-mib", "1"];
    let restored = cold.good(&[&["restore", "--all"][..], &into].concat());
    assert_eq!((&restored["stored"], &restored["lost"]), (&9.into(), &0.into()), "{restored}");
    let exported = scratch.path("exported");
    good(&["export", &new, "--all", "--to", &exported.display().to_string()]);
    assert_eq!(
        sample::blocks(&exported),
        sample::blocks(&file),
        "what came back is what was put, with its origins"
    );
    let again = cold.good(&["restore", "--all", "--into", &new]);
    assert_eq!((&again["stored"], &again["already_there"]), (&0.into(), &9.into()));
}

#[test]
fn a_new_node_begins_with_what_a_lost_one_pushed() {
    let scratch = Scratch::new("cold-round");
    round(&Cold::in_directory(&scratch), &scratch);
}

#[test]
fn the_same_over_a_real_s3_server() {
    let Some(server) = s3::Server::start() else { return };
    let scratch = Scratch::new("cold-s3");
    let cold = Cold { url: format!("s3://{}/some/prefix", s3::BUCKET), environment: server.environment() };
    round(&cold, &scratch);
}

#[test]
fn the_same_over_a_server_that_keeps_objects_in_files() {
    let Some(server) = s3::Server::start_s3s_fs("cold-cli") else { return };
    let scratch = Scratch::new("cold-s3s-fs");
    let mut cold = Cold { url: format!("s3://{}", s3::BUCKET), environment: server.environment() };
    round(&cold, &scratch);
    assert!(cold.good(&["fsck"])["clean"].as_bool().unwrap());
    cold.good(&["gc", "--older", "30d"]);
    // One file name is made of the names of bucket and object: with this prefix it is too long.
    cold.url += "/some/prefix";
    let (code, _, error) = cold.run(&["push", &scratch.path("new").display().to_string(), "--all"]);
    assert!(
        code == 2 && error.contains("read the log of that server") && error.contains("500"),
        "{code}: {error}"
    );
}

fn objects(scratch: &Scratch, kind: &str) -> Vec<PathBuf> {
    let root = scratch.path("bucket").join("kvarts-cold-1").join(kind);
    let namespaces = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = namespaces
        .flat_map(|namespace| std::fs::read_dir(namespace).unwrap().map(|entry| entry.unwrap().path()))
        .collect();
    found.sort();
    found
}

#[test]
fn fsck_finds_damage_repairs_indexes_and_says_what_is_left() {
    let scratch = Scratch::new("cold-fsck");
    let cold = Cold::in_directory(&scratch);
    let (store, _) = filled(&scratch);
    cold.good(&["push", &store, "--all"]);
    let index = objects(&scratch, "indexes").remove(0);
    let good = std::fs::read(&index).unwrap();
    std::fs::remove_file(&index).unwrap();
    let (code, found) = cold.json(&["fsck", "--quick"]);
    assert!(code == 1 && found["problems"][0]["what"].as_str().unwrap().contains("has no index"), "{found}");
    let repaired = cold.good(&["fsck", "--quick", "--repair"]);
    assert_eq!((&repaired["problems"][0]["repaired"], std::fs::read(&index).unwrap()), (&true.into(), good));
    // A byte of a block: the check that reads finds it, and a restore leaves that block out and no other.
    let pack = objects(&scratch, "packs").remove(0);
    let mut bytes = std::fs::read(&pack).unwrap();
    let at = bytes.len() - 64 - 1000;
    bytes[at] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    assert!(cold.good(&["fsck", "--quick"])["clean"].as_bool().unwrap());
    let (code, out, _) = cold.run(&["fsck"]);
    assert!(code == 1 && out.contains("is damaged") && out.contains("1 problems"), "{out}");
    let new = scratch.path("new").display().to_string();
    let (code, restored) = cold.json(&["restore", "--all", "--into", &new, "--create", "--segment-mib", "1"]);
    assert_eq!((code, &restored["stored"], &restored["lost"]), (1, &8.into(), &1.into()), "{restored}");
}

fn manifests(scratch: &Scratch) -> Vec<PathBuf> {
    let root = scratch.path("bucket").join("kvarts-cold-1/manifests");
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

#[test]
fn a_manifest_that_cannot_be_read_keeps_no_other_namespace_from_what_was_asked_for() {
    let scratch = Scratch::new("cold-unread");
    let cold = Cold::in_directory(&scratch);
    let (store, _) = filled(&scratch);
    cold.good(&["push", &store, "--all"]);
    for (name, says) in [("damaged", "damaged"), ("newer", "newer kvarts")] {
        let manifest = manifests(&scratch).remove(0);
        let mut bytes = std::fs::read(&manifest).unwrap();
        if name == "newer" {
            bytes[8] = 3;
        } else {
            bytes[50] ^= 1;
        }
        let sound = std::fs::read(&manifest).unwrap();
        std::fs::write(&manifest, bytes).unwrap();
        let its_own = manifest.file_name().unwrap().to_str().unwrap().to_owned();
        let expect = |found: &Value| {
            let problems = found["problems"].as_array().unwrap();
            assert_eq!((problems.len(), &problems[0]["namespace"]), (1, &its_own.as_str().into()), "{found}");
            assert!(problems[0]["what"].as_str().unwrap().contains(says), "{found}");
        };
        let (code, listed) = cold.json(&["ls"]);
        assert_eq!((code, listed["namespaces"].as_array().unwrap().len()), (1, 1), "{listed}");
        expect(&listed);
        let (code, out, _) = cold.run(&["ls"]);
        assert!(code == 1 && out.contains("small") && out.contains(says), "{out}");
        let (code, checked) = cold.json(&["fsck"]);
        assert_eq!((code, &checked["packs"]), (1, &1.into()), "{checked}");
        expect(&checked);
        let new = scratch.path(name).display().to_string();
        let (code, restored) =
            cold.json(&["restore", "--all", "--into", &new, "--create", "--segment-mib", "1"]);
        assert!(code == 1 && restored["stored"].as_u64().unwrap() > 0, "{restored}");
        expect(&restored);
        let (code, would) = cold.json(&["gc", "--most", "1", "--dry-run"]);
        assert_eq!((code, &would["over_budget"]), (1, &1.into()), "{would}");
        expect(&would);
        let (code, _, error) = cold.run(&["gc", "--namespace", &its_own]);
        assert!(code == 1 || code == 2 && error.contains(says), "{code} {error}");
        std::fs::write(&manifest, sound).unwrap();
    }
    assert!(cold.good(&["fsck"])["clean"].as_bool().unwrap());
}

#[test]
fn a_namespace_without_a_manifest_is_listed_and_collected() {
    let scratch = Scratch::new("cold-lost");
    let cold = Cold::in_directory(&scratch);
    let (store, _) = filled(&scratch);
    cold.good(&["push", &store, "--all"]);
    let manifest = manifests(&scratch).remove(0);
    let namespace = manifest.file_name().unwrap().to_str().unwrap().to_owned();
    std::fs::remove_file(&manifest).unwrap();
    let listed = cold.good(&["ls"]);
    let without: Vec<&Value> = listed["namespaces"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["has_manifest"] == Value::Bool(false))
        .collect();
    assert!(without.len() == 1 && without[0]["namespace"] == namespace.as_str(), "{listed}");
    let (code, _, error) = cold.run(&["stat", "--namespace", &namespace]);
    assert!(code == 2 && error.contains("has no manifest"), "{error}");
    assert_eq!(cold.good(&["fsck", "--namespace", &namespace])["orphans"], 2);
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(30 * 3600);
    for path in objects(&scratch, "packs").into_iter().chain(objects(&scratch, "indexes")) {
        std::fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    let half = scratch.path("bucket").join("kvarts-cold-1/packs/.partial-1-1");
    std::fs::File::create(&half).unwrap().set_modified(old).unwrap();
    let did = cold.good(&["gc"]);
    assert_eq!(
        (&did["orphans"], &did["waiting"], &did["partial"]),
        (&1.into(), &1.into(), &1.into()),
        "{did}"
    );
    assert!(!half.exists());
    let stat = cold.good(&["stat", "--namespace", &namespace]);
    assert_eq!(stat["condemned"].as_array().unwrap().len(), 1, "{stat}");
}

#[test]
fn gc_says_what_it_would_do_and_deletes_nothing_before_its_grace() {
    let scratch = Scratch::new("cold-gc");
    let cold = Cold::in_directory(&scratch);
    let (store, _) = filled(&scratch);
    cold.good(&["push", &store, "--all"]);
    let there = objects(&scratch, "packs");
    let (code, _, err) = cold.run(&["gc", "--grace", "5m"]);
    assert!(code == 2 && err.contains("at least 1h"), "{err}");
    let none = cold.good(&["gc", "--older", "1h"]);
    assert_eq!((&none["aged"], &none["waiting"]), (&0.into(), &0.into()), "{none}");
    let would = cold.good(&["gc", "--most", "1", "--dry-run"]);
    assert_eq!((&would["over_budget"], &would["waiting"]), (&2.into(), &2.into()), "{would}");
    assert_eq!(cold.good(&["fsck"])["packs"], 2);
    let did = cold.good(&["gc", "--most", "1"]);
    assert_eq!((&did["over_budget"], &did["deleted"], &did["waiting"]), (&2.into(), &0.into(), &2.into()));
    assert_eq!((&cold.good(&["fsck"])["packs"], objects(&scratch, "packs")), (&0.into(), there));
}

#[test]
fn a_store_in_use_is_pushed_by_its_server_and_its_files_are_read_only_where_that_is_asked_for() {
    let buckets = Scratch::new("cold-by-server-buckets");
    let [own, other] = ["own", "other"].map(|name| {
        std::fs::create_dir_all(buckets.path(name)).unwrap();
        format!("file://{}", buckets.path(name).display())
    });
    let server = Server::start(Scratch::new("cold-by-server"), &["--cold-bucket", &own]);
    server.store_pages();
    let json = |arguments: &[&str]| -> Value {
        let (code, out, error) = server.kvarts(&[&["cold"], arguments, &["--json"]].concat());
        assert_eq!(code, 0, "{arguments:?}: {out}{error}");
        serde_json::from_str(&out).unwrap()
    };
    let (code, _, error) = server.kvarts(&["cold", "push", "kvarts-data", "--all", "--bucket", &other]);
    assert!(code == 2 && error.contains("is in use") && error.contains("without DIR"), "{error}");
    let live = json(&["push", "kvarts-data", "--live", "--all", "--bucket", &other]);
    assert_eq!((&live["blocks"], &live["deletes_may_be_missing"]), (&10.into(), &true.into()), "{live}");
    let pushed = json(&["push", "--all"]);
    assert_eq!((&pushed["blocks"], &pushed["complete"]), (&10.into(), &true.into()), "{pushed}");
    assert_eq!((&pushed["deletes_may_be_missing"], &pushed["asked"]), (&false.into(), &Value::Null));
    let again = json(&["push", "--all"]);
    assert_eq!((&again["blocks"], &again["already_there"]), (&0.into(), &10.into()));
    assert_eq!(server.client(&["delete", "--all", "--yes"], &[]).0, 0);
    let packs = |bucket: &str| json(&["ls", "--bucket", bucket])["namespaces"][0]["packs"].clone();
    assert_eq!((packs(&own), packs(&other)), (0.into(), 1.into()), "the other one was not told");
    let checked = json(&["fsck", "--bucket", &own]);
    assert_eq!((&checked["clean"], &checked["condemned"]), (&true.into(), &1.into()), "{checked}");
    let (code, _, error) = server.kvarts(&["cold", "push", "--prefix", &"ab".repeat(32)]);
    assert!(code == 2 && error.contains("--prefix needs DIR"), "{error}");
    let without = Server::start(Scratch::new("cold-by-none"), &[]);
    let (code, _, error) = without.kvarts(&["cold", "push", "--all"]);
    assert!(code == 2 && error.contains("no cold tier"), "{error}");
}

#[test]
fn what_was_deleted_while_a_store_was_away_is_not_pushed_out_of_its_files() {
    let scratch = Scratch::new("cold-deleted-away");
    let bucket = Cold::in_directory(&scratch).url;
    let mut server = Server::start(Scratch::new("cold-away"), &[]);
    server.store_pages();
    assert_eq!(server.kvarts(&["drain", "--yes"]).0, 0);
    assert!(server.ends().success());
    // Another node deletes everything of the same model, of which it has nothing, and tells the bucket.
    let other = Server::start(Scratch::new("cold-deletes"), &["--cold-bucket", &bucket]);
    std::fs::copy(server.path("ID.toml"), other.path("ID.toml")).unwrap();
    assert_eq!(other.client(&["delete", "--all", "--yes"], &[]).0, 0);
    let push = ["cold", "push", "kvarts-data", "--all", "--bucket", &bucket, "--json"];
    let (code, out, error) = server.kvarts(&push);
    assert_eq!(code, 0, "{out}{error}");
    let pushed: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&pushed["blocks"], &pushed["deleted"]), (&0.into(), &10.into()), "{pushed}");
}

/// Every command over this bucket fails with exit code 2 and one line that names it, and `new` is not made.
fn expect_no_bucket(cold: &Cold, scratch: &Scratch, does: &str) {
    let (store, new) = (scratch.path("store").display().to_string(), scratch.path("new"));
    let into = new.display().to_string();
    for arguments in [
        vec!["ls"],
        vec!["stat", "--namespace", &"ab".repeat(32)],
        vec!["fsck"],
        vec!["gc"],
        vec!["restore", "--all", "--into", &into, "--create", "--segment-mib", "1"],
        vec!["push", &store, "--all"],
    ] {
        let (code, out, err) = cold.run(&arguments);
        let says = err.contains(&cold.url) && err.contains(does) && err.lines().count() == 1;
        assert!(code == 2 && out.is_empty() && says, "{arguments:?}: {code} {out}{err}");
    }
    assert!(!new.exists(), "a store was made of nothing");
}

#[test]
fn a_bucket_that_is_not_there_is_an_error_of_every_command_and_is_not_made() {
    let scratch = Scratch::new("cold-no-bucket");
    filled(&scratch);
    let url = format!("file://{}", scratch.path("typo").display());
    expect_no_bucket(&Cold { url: url.clone(), environment: Vec::new() }, &scratch, "mkdir -p");
    assert!(!scratch.path("typo").exists(), "a bucket was made in the place of a mount");
    let server = Server::start(Scratch::new("cold-no-bucket-served"), &["--cold-bucket", &url]);
    let log = server.log();
    let warned =
        log.lines().any(|line| line.contains(" WARN ") && line.contains(&url) && line.contains("mkdir -p"));
    assert!(warned && !scratch.path("typo").exists(), "{log}");
    // One that is there and empty is no error, and nothing to restore from.
    let empty = Cold::in_directory(&scratch);
    assert_eq!(empty.run(&["ls"]).0, 0);
    let into = scratch.path("new").display().to_string();
    let (code, _, err) = empty.run(&["restore", "--all", "--into", &into, "--create", "--segment-mib", "1"]);
    assert!(code == 2 && err.contains("no block was restored") && !scratch.path("new").exists(), "{err}");
    let Some(server) = s3::Server::start() else { return };
    let environment = server.environment();
    let away = Cold { url: "s3://no-such-bucket/here".to_owned(), environment };
    expect_no_bucket(&away, &scratch, "the bucket does not exist");
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    let scratch = Scratch::new("cold-refusals");
    let cold = Cold::in_directory(&scratch);
    let (store, _) = filled(&scratch);
    let other = "ab".repeat(32);
    for (arguments, says) in [
        (vec!["push", store.as_str()], "the blocks to push are not given"),
        (vec!["push", &store, "--namespace", &other], "the store has no matching blocks"),
        (vec!["stat", "--namespace", &other], "no namespace"),
        (vec!["push", "/nowhere", "--all"], "/nowhere"),
    ] {
        let (code, out, err) = cold.run(&arguments);
        assert!(code == 2 && out.is_empty() && err.contains(says) && err.lines().count() == 1, "{err}");
    }
    let wrong = Cold { url: "http://somewhere".to_owned(), environment: Vec::new() };
    let (code, _, err) = wrong.run(&["ls"]);
    assert!(code == 2 && err.contains("s3://BUCKET/PREFIX"), "{err}");
    // No server answers at that address.
    let environment = [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_ACCESS_KEY_ID", "some"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ];
    let environment = environment.map(|(name, value)| (name, value.to_owned())).to_vec();
    let away = Cold { url: "s3://bucket/x".to_owned(), environment };
    let (code, _, err) = away.run(&["ls"]);
    assert!(code == 2 && err.contains("cannot be reached") && !err.contains("secret"), "{err}");
}
