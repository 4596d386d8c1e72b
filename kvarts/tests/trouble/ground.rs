//! Three nodes of a cluster with a bucket, each a program, and what may go wrong with them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvarts_client::{Client, ConnectOptions};
use kvarts_server::state::auth::TokenHash;

use super::{GREEN, HOSTILE};
use crate::served::http;

const OPERATOR: &str = "kvarts_operator_secret_of_this_test";
/// Memory of requests of each node.
pub(super) const MEMORY: usize = 64 << 20;
/// How long anything may take that is waited for.
const TIMEOUT: Duration = Duration::from_secs(90);

/// A node in a process of its own; ended with the value.
pub(super) struct Node {
    child: Child,
    places: String,
    directory: PathBuf,
}

fn configuration() -> String {
    let tenant = |(tenant, token, rights): (&str, &str, &str)| {
        let hash = TokenHash::of(token);
        format!(
            "[[tenants]]\nname = '{tenant}'\ncalls = 4096\n[[tokens]]\ntenant = '{tenant}'\nrights = {rights}\nhash = '{hash}'\n"
        )
    };
    let hostile = HOSTILE.map(|(name, token)| (name, token, "['read', 'write']"));
    let good = [("green", GREEN, "['read', 'write']"), ("operators", OPERATOR, "['admin']")];
    hostile.into_iter().chain(good).map(tenant).collect()
}

impl Node {
    fn start(directory: &Path, more: &[String], environment: &[(&str, String)]) -> Self {
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("kvarts.toml"), configuration()).unwrap();
        fs::write(directory.join("token"), OPERATOR).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .current_dir(directory)
            .args(["serve", "--config", "kvarts.toml", "--listen-grpc", "127.0.0.1:0"])
            .args(["--listen-metrics", "127.0.0.1:0", "--budget", "256 MiB", "--segment", "1 MiB"])
            .args(["--memory", &MEMORY.to_string(), "--cache", "0"])
            .args(more)
            .envs(environment.iter().map(|(name, value)| (*name, value.as_str())))
            .stdout(Stdio::piped())
            .stderr(fs::File::create(directory.join("log")).unwrap())
            .spawn()
            .unwrap();
        let mut places = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut places).unwrap();
        Self { child, places, directory: directory.to_owned() }
    }

    /// Where it listens: `grpc`, `metrics`, `socket`.
    pub(super) fn place(&self, name: &str) -> &str {
        let named = |word| str::strip_prefix(word, name)?.strip_prefix('=');
        let place = self.places.split_whitespace().find_map(named);
        place.unwrap_or_else(|| panic!("no {name} in {:?}: {}", self.places, self.log()))
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join(self.place("socket"))
    }

    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap()
    }

    pub(super) fn client(&self, token: &str) -> Client {
        let to = format!("http://{}", self.place("grpc"));
        Client::connect(&ConnectOptions { token: Some(token.to_owned()), ..ConnectOptions::to(to) }).unwrap()
    }

    pub(super) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// An operator's command to it, which has to be answered: 1 says that something is wrong with the cluster.
    pub(super) fn operator(&self, command: &[&str]) -> Output {
        let done = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .current_dir(&self.directory)
            .args(command)
            .args(["--server", self.place("socket"), "--token-file", "token"])
            .output()
            .unwrap();
        let is_answered = matches!(done.status.code(), Some(0 | 1)) && !done.stdout.is_empty();
        assert!(is_answered, "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
        done
    }

    pub(super) fn metrics(&self) -> BTreeMap<String, f64> {
        let answer = http(self.place("metrics"), "GET /metrics");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no metrics: {answer}"));
        let value = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        body.lines().filter(|line| !line.starts_with('#')).filter_map(value).collect()
    }

    pub(super) fn until(&self, what: &str, wanted: impl Fn(&BTreeMap<String, f64>) -> bool) {
        let begun = Instant::now();
        while !wanted(&self.metrics()) {
            assert!(begun.elapsed() < TIMEOUT, "{what}: {:#?}", self.metrics());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Bytes of memory that it has.
    pub(super) fn resident(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
    }

    fn open(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap();
        all.flatten().filter_map(|one| fs::read_link(one.path()).ok()).collect()
    }

    pub(super) fn descriptors(&self) -> usize {
        self.open().len()
    }

    /// Waits until it has no more descriptors than this.
    pub(super) fn until_few(&self, most: usize) {
        let begun = Instant::now();
        while self.descriptors() > most {
            assert!(
                begun.elapsed() < TIMEOUT,
                "{} descriptors of {most}: {:?}",
                self.descriptors(),
                self.open()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn id(&self) -> String {
        let told = self.operator(&["stat", "--json"]);
        let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
        told["store"].as_str().unwrap_or_else(|| panic!("no store in {told}")).to_owned()
    }

    fn end(mut self) {
        self.signal("-TERM");
        self.child.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Three nodes that reach each other; the first has a bucket at this port.
pub(super) fn cluster(ground: &Path, bucket: u16) -> [Node; 3] {
    let directories = [1, 2, 3].map(|number| ground.join(number.to_string()));
    let mut members = "epoch = 1\n".to_owned();
    for (number, directory) in (1..).zip(&directories) {
        let alone = Node::start(directory, &[], &[]);
        let id = alone.id();
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = format!("127.{}.{high}.{low}:7440", 230 + number);
        members += &format!("[[node]]\nid = \"{id}\"\naddress = \"{address}\"\n");
        alone.end();
    }
    let (file, secret) = (ground.join("members.toml"), ground.join("secret"));
    fs::write(&file, &members).unwrap();
    fs::write(&secret, "a secret of this test, of thirty-two bytes").unwrap();
    let own = |text: &str| text.to_owned();
    let of_cluster =
        [own("--cluster"), file.display().to_string(), own("--cluster-secret"), secret.display().to_string()];
    let of_bucket = ["--cold-bucket", "s3://blocks/tier", "--cold-memory", "128M"].map(own);
    let environment = [
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{bucket}")),
        ("AWS_ACCESS_KEY_ID", own("some")),
        ("AWS_SECRET_ACCESS_KEY", own("secret")),
        ("AWS_REGION", own("us-east-1")),
    ];
    let mut is_first = true;
    let nodes = directories.map(|directory| {
        let more = if is_first { [&of_cluster[..], &of_bucket].concat() } else { of_cluster.to_vec() };
        is_first = false;
        Node::start(&directory, &more, &environment)
    });
    for node in &nodes {
        node.until("all nodes are reached", |metrics| {
            metrics.get("kvarts_cluster_nodes{state=\"away\"}") == Some(&0.0)
        });
    }
    nodes
}

/// Where nodes are reached by each other: the port for calls of this one.
pub(super) fn peers_address(ground: &Path, number: usize) -> String {
    let members = fs::read_to_string(ground.join("members.toml")).unwrap();
    let addresses = members.lines().filter_map(|line| line.strip_prefix("address = "));
    addresses.map(|address| address.trim_matches('"').to_owned()).nth(number - 1).unwrap()
}

/// The executors of a node stand still, as they do over a disk that answers nothing; the rest of the program goes on. A control group in which
/// they are frozen: to limit what they read instead would stand in the way of everything that is on the same file system.
pub(super) struct HungDisk(PathBuf);

impl HungDisk {
    const GROUPS: &'static str = "/sys/fs/cgroup/freezer";

    /// None, and a word about it, where there are no such groups or this process may not make one.
    pub(super) fn of(node: &Node) -> Option<Self> {
        let hung = Self(Path::new(Self::GROUPS).join(format!("kvarts-trouble-{}", node.child.id())));
        let made = fs::create_dir(&hung.0).and_then(|()| {
            let threads = Path::new("/proc").join(node.child.id().to_string()).join("task");
            for thread in fs::read_dir(threads)?.flatten() {
                let name = fs::read_to_string(thread.path().join("comm"))?;
                let number = name.trim().strip_prefix("kvarts-").map(str::parse::<u32>);
                if matches!(number, Some(Ok(_))) {
                    fs::write(hung.0.join("tasks"), thread.file_name().as_encoded_bytes())?;
                }
            }
            assert!(!fs::read_to_string(hung.0.join("tasks"))?.is_empty(), "there are executors");
            hung.set("FROZEN")
        });
        match made {
            Ok(()) => Some(hung),
            Err(why) => {
                eprintln!("SKIPPED: a disk that hangs needs root and the freezer of cgroup version 1: {why}");
                None
            }
        }
    }

    fn set(&self, state: &str) -> std::io::Result<()> {
        fs::write(self.0.join("freezer.state"), state)
    }
}

impl Drop for HungDisk {
    fn drop(&mut self) {
        // What has ended meanwhile is in no group any more; a group that is not empty stays behind.
        let _ = self.set("THAWED");
        for thread in fs::read_to_string(self.0.join("tasks")).unwrap_or_default().lines() {
            let _ = fs::write(Path::new(Self::GROUPS).join("tasks"), thread);
        }
        let _ = fs::remove_dir(&self.0);
    }
}
