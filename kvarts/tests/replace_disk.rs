//! How to replace a disk, as the operating page says it: its commands are run on a store in two directories.

use std::process::{Command, Stdio};

use crate::scratch::Scratch;
use crate::served::Server;

const PAGE: &str = include_str!("../../docs/operating.md");

/// The commands of the section, one list for each of its consoles.
fn consoles() -> Vec<Vec<&'static str>> {
    let section = PAGE.split("## How to replace a disk\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let blocks = section.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.map(|block| block.lines().filter_map(|line| line.strip_prefix("$ ")).collect()).collect()
}

/// A store on two disks of which each has some blocks, and a third disk.
struct Disks(Server);

impl Disks {
    const SERVE: [&'static str; 6] =
        ["--dir", "mnt/nvme0/kvarts,mnt/nvme1/kvarts", "--listen-socket", "kvarts.sock", "--shards", "1"];

    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        for disk in ["nvme0", "nvme1", "new"] {
            std::fs::create_dir_all(scratch.0.join("mnt").join(disk)).unwrap();
        }
        let server = Server::start(scratch, &Self::SERVE);
        server.store_pages_with("pages", &["--server", "kvarts.sock"]);
        // One run of blocks lies on one disk: these are many runs.
        for first in 0..20 {
            let tokens: String = (0..32).map(|token| format!("{} ", (first + 1) * 100_000 + token)).collect();
            std::fs::write(server.path("run"), tokens).unwrap();
            // Half of them are zeros, which some ways to copy files turn into holes.
            std::fs::write(server.path("two"), vec![first as u8 / 10; 2 * 4096]).unwrap();
            let (code, out, error) =
                server.client(&["put", "two"], &["--tokens", "run", "--server", "kvarts.sock"]);
            assert_eq!(code, 0, "{out}{error}");
        }
        Self(server)
    }

    /// Runs a line of the page, on disks of its own; gives whether it went well, and what it said.
    fn run(&self, line: &str) -> (bool, String) {
        let program = std::path::Path::new(env!("CARGO_BIN_EXE_kvarts")).parent().unwrap();
        let output = Command::new("sh")
            .args(["-c", &line.replace("/mnt/", "mnt/")])
            .current_dir(self.0.path("."))
            .env("PATH", format!("{}:{}", program.display(), std::env::var("PATH").unwrap()))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    }

    fn all(&self, lines: &[&str]) -> String {
        let said = lines.iter().map(|line| {
            let (went, said) = self.run(line);
            assert!(went, "{line}: {said}");
            said
        });
        said.collect()
    }

    /// Blocks that the server has.
    fn blocks(&self) -> u64 {
        let (code, out, error) = self.0.kvarts(&["ls", "--json", "--server", "kvarts.sock"]);
        assert_eq!(code, 0, "{out}{error}");
        let models: serde_json::Value = serde_json::from_str(&out).unwrap();
        let models = models["models"].as_array().unwrap().iter();
        models.map(|model| model["live_blocks"].as_u64().unwrap()).sum()
    }
}

#[test]
fn a_disk_that_can_be_read_is_copied_and_nothing_is_lost() {
    let mut disks = Disks::new("copied-disk");
    let before = disks.blocks();
    disks.0.signal("-TERM");
    assert!(disks.0.ends().success());
    let consoles = consoles();
    let [copied, _] = &consoles[..] else { panic!("{consoles:?}") };
    let said = disks.all(copied);
    assert!(said.contains("clean") && !said.contains("NOT clean"), "{said}");
    std::fs::remove_dir_all(disks.0.path("mnt/nvme1")).unwrap();
    let new = Disks::SERVE.map(|argument| argument.replace("nvme1", "new"));
    disks.0.start_again(&new.each_ref().map(String::as_str));
    assert_eq!(disks.blocks(), before);
}

#[test]
fn a_server_goes_on_without_a_dead_disk_and_an_empty_one_takes_its_place() {
    let mut disks = Disks::new("dead-disk");
    let before = disks.blocks();
    disks.0.end();
    std::fs::remove_dir_all(disks.0.path("mnt/nvme1/kvarts")).unwrap();
    let (went, said) = disks.run("kvarts fsck mnt/nvme0/kvarts");
    assert!(!went && said.contains("directory-missing") && said.contains("kvarts replace"), "{said}");
    // With half of its directories it serves, and what is deleted could come back with the other half.
    disks.0.start_again(&Disks::SERVE);
    let left = disks.blocks();
    assert!(0 < left && left < before, "{left} of {before}");
    let (code, said, error) = disks.0.kvarts(&["stat", "--server", "kvarts.sock"]);
    let line =
        "mnt/nvme1/kvarts is out of use: the directory mnt/nvme1/kvarts does not exist: mount its disk";
    assert!(code == 0 && said.contains(line), "{said}{error}");
    let (code, said, error) = disks.0.kvarts(&["health", "--metrics", disks.0.metrics_address()]);
    assert!(code == 0 && said.starts_with("well\n") && said.contains(line), "{said}{error}");
    let (code, said, error) = disks.0.kvarts(&["health", "--json", "--metrics", disks.0.metrics_address()]);
    assert!(code == 0 && said.contains("\"directories_out\":[\"directory "), "{said}{error}");
    disks.0.store_pages_with("more", &["--server", "kvarts.sock"]);
    let (code, _, error) =
        disks.0.client(&["delete", "--yes"], &["--tokens", "run", "--server", "kvarts.sock"]);
    assert!(code != 0 && error.contains("1 of 2 directories are in use"), "{error}");
    let left = disks.blocks();
    assert!(!disks.0.path("mnt/nvme1/kvarts").exists(), "nothing is made where the disk is not mounted");
    disks.0.signal("-TERM");
    assert!(disks.0.ends().success());

    let consoles = consoles();
    let [_, replaced] = &consoles[..] else { panic!("{consoles:?}") };
    let said = disks.all(replaced);
    assert!(said.contains("is now part of the store"), "{said}");
    assert!(said.contains("clean") && !said.contains("NOT clean"), "{said}");
    disks.0.start_again(&Disks::SERVE);
    assert_eq!(disks.blocks(), left);
    let (code, said, error) = disks.0.kvarts(&["stat", "--server", "kvarts.sock"]);
    assert!(code == 0 && !said.contains("is out"), "{said}{error}");
    let (code, out, error) =
        disks.0.client(&["delete", "--yes"], &["--tokens", "run", "--server", "kvarts.sock"]);
    assert_eq!(code, 0, "{out}{error}");
}

/// A node of a cluster counts its starts in each of its directories, and has its list of deletes in each of them.
#[test]
fn a_cluster_node_goes_on_without_its_first_disk() {
    const SOCKET: [&str; 2] = ["--server", "kvarts.sock"];
    let alone = ["--dir", "a,b,c", "--listen-socket", "kvarts.sock", "--shards", "1"];
    let mut server = Server::start(Scratch::new("first-disk"), &alone);
    server.store_pages_with("pages", &SOCKET);
    let (code, said, error) = server.kvarts(&["stat", "--json", "--server", "kvarts.sock"]);
    assert_eq!(code, 0, "{error}");
    let told: serde_json::Value = serde_json::from_str(&said).unwrap();
    let id = told["store"].as_str().unwrap();
    let [.., high, low] = std::process::id().to_be_bytes();
    let members = format!("epoch = 1\n[[node]]\nid = \"{id}\"\naddress = \"127.239.{high}.{low}:7440\"\n");
    std::fs::write(server.path("members.toml"), members).unwrap();
    let node = [&alone[..], &["--cluster", "members.toml"]].concat();
    let number = |server: &Server, directory: &str| -> u64 {
        let text = std::fs::read_to_string(server.path(directory).join("cluster-starts")).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    };
    server.start_again(&node);
    assert_eq!(["a", "b", "c"].map(|directory| number(&server, directory)), [1; 3]);
    std::fs::rename(server.path("a"), server.path("away")).unwrap();
    server.start_again(&node);
    let (code, said, error) = server.kvarts(&["health", "--metrics", server.metrics_address()]);
    assert!(code == 0 && said.contains("a is out"), "{said}{error}");
    let (code, said, error) =
        server.client(&["delete", "--yes"], &[&["--tokens", "tokens"], &SOCKET[..]].concat());
    assert_eq!(code, 0, "{said}{error}");
    let list = |server: &Server, directory: &str| {
        std::fs::read(server.path(directory).join("cluster-deletes")).unwrap_or_default()
    };
    assert!(!list(&server, "b").is_empty() && list(&server, "b") == list(&server, "c"));
    let without = number(&server, "b");
    assert!(without > 1 << 20, "the last start may have been counted in the directory that is out alone");
    std::fs::rename(server.path("away"), server.path("a")).unwrap();
    server.start_again(&node);
    assert!(number(&server, "a") > without && number(&server, "a") == number(&server, "c"));
    let (code, said, error) = server.client(&["match"], &[&["--tokens", "tokens"], &SOCKET[..]].concat());
    assert_eq!(code, 1, "what was deleted is back: {said}{error}");
    // The directory that was away has no list, or an earlier one: the next delete is written behind what the others have.
    let before = list(&server, "b").len();
    let (code, said, error) =
        server.client(&["delete", "--yes"], &[&["--tokens", "more"], &SOCKET[..]].concat());
    assert_eq!(code, 0, "{said}{error}");
    assert!(list(&server, "a").len() > before && list(&server, "a") == list(&server, "b"));
}
