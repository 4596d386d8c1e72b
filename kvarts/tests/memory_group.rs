//! A client that keeps the pages which the server made in its sparse files: the server's control group is charged for them, and the server sees it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{BlockOutcome, KvStore, Order, Placed, PutRequest, ReadRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::identity::Arrangement;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};

use crate::raw::PAGE;
use crate::scratch::Scratch;

/// Blocks of a read: one MiB.
const BLOCKS: usize = 16;
/// What one session shares at a time.
const SHARED: usize = 32 << 20;
/// What clients may share together, and with it what the server may make for them.
const MOST: usize = (80 << 20) / 4 * 5;

/// A control group of version 1 or 2 with a limit of memory, below that of the test.
struct Limited(PathBuf);

impl Limited {
    fn make() -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let made = groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, own) = (fields.next()?, fields.next()?.trim_start_matches('/'));
            let (around, limit) = match controllers {
                "memory" => (Path::new("/sys/fs/cgroup/memory").join(own), "memory.limit_in_bytes"),
                "" => (with_memory(&Path::new("/sys/fs/cgroup").join(own))?, "memory.max"),
                _ => return None,
            };
            let group = Self(around.join(format!("kvarts-test-{}", std::process::id())));
            fs::create_dir(&group.0).ok()?;
            fs::write(group.0.join(limit), (1u64 << 30).to_string()).ok()?;
            Some(group)
        });
        if made.is_none() {
            eprintln!(
                "SKIPPED: a control group with a limit of memory needs root and the controller of memory"
            );
        }
        made
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// In version 2: the group nearest around this one that controls the memory of groups in it.
fn with_memory(own: &Path) -> Option<PathBuf> {
    let controls = |group: &&Path| {
        fs::read_to_string(group.join("cgroup.subtree_control")).is_ok_and(|list| list.contains("memory"))
    };
    own.ancestors().find(controls).map(Path::to_owned)
}

/// A server in such a group; it ends before the group does.
struct Server<'a>(Child, &'a Limited);

impl<'a> Server<'a> {
    fn start((scratch, disk): (&Scratch, &Path), group: &'a Limited) -> Self {
        let mut command = Command::new("sh");
        let join = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        command
            .args(["-c", join])
            .arg(&group.0)
            .arg(env!("CARGO_BIN_EXE_kvarts"))
            .args(["serve", "--dir"])
            .arg(disk);
        command.args(["--listen-grpc", "none", "--listen-metrics", "none", "--listen-socket", "socket"]);
        command.args([
            "--budget",
            "32 MiB",
            "--segment",
            "1 MiB",
            "--memory",
            "64 MiB",
            "--shared",
            "80 MiB",
        ]);
        let mut child =
            command.current_dir(&scratch.0).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving "), "{line:?}");
        Self(child, group)
    }

    fn charged(&self) -> usize {
        let statistics = fs::read_to_string(self.1.0.join("memory.stat")).unwrap();
        statistics.lines().find_map(|line| line.strip_prefix("shmem ")?.parse().ok()).unwrap()
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn keys() -> Vec<BlockKey> {
    (0..BLOCKS as u64).map(|block| BlockKey(crate::raw::key(block))).collect()
}

fn placed(region: &std::sync::Arc<Region>, at: usize) -> Placed {
    let buf = SharedBuf::new(region, at, PAGE * BLOCKS).unwrap();
    Placed::blocks(&BlockShape::opaque(PAGE as u64).unwrap(), buf, BLOCKS as u32).unwrap()
}

fn connected(scratch: &Scratch) -> (Client, NamespaceId) {
    let client =
        Client::connect(&ConnectOptions::to(format!("unix:{}", scratch.path("socket").display()))).unwrap();
    let geometry = Geometry::opaque(PAGE as u64).unwrap();
    let identity = Identity::new("pages", "1", "bf16", Arrangement::new("test", "flat", "1"), &geometry, 16);
    let namespace = client.register(&identity, &geometry).unwrap();
    (client, namespace)
}

/// One session: a file without pages is shared, and blocks are read into all of it. Gives the file.
fn filled(scratch: &Scratch) -> Result<std::os::fd::OwnedFd, String> {
    let (client, namespace) = connected(scratch);
    let file = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, SHARED as u64).unwrap();
    let kept = file.try_clone().unwrap();
    let region = client.adopt(file, SHARED as u64).map_err(|error| error.to_string())?;
    for at in (0..SHARED).step_by(PAGE * BLOCKS) {
        let request = ReadRequest {
            order: Order::Blocks,
            ..ReadRequest::new(namespace, Group(0), Coordinate::Replicated, keys(), placed(&region, at))
        };
        let stream = client.read(request).unwrap();
        let end = block_on(std::future::poll_fn(|context| stream.poll_end(context))).unwrap();
        assert_eq!(end.usable_blocks, BLOCKS as u32, "{end:?}");
    }
    Ok(kept)
}

#[test]
fn pages_that_a_client_keeps_of_files_it_shared_once_do_not_fill_the_servers_memory_group() {
    let scratch = Scratch::new("memory-group");
    let Some(group) = Limited::make() else { return };
    // A store in memory is charged as well, and the rule is off there.
    let disk = Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory-group");
    let _ = fs::remove_dir_all(&disk);
    let server = Server::start((&scratch, &disk), &group);
    {
        let (client, namespace) = connected(&scratch);
        let region = Region::anonymous(PAGE * BLOCKS).unwrap();
        let put = PutRequest::new(namespace, Group(0), Coordinate::Replicated, keys(), placed(&region, 0));
        let reply = block_on(client.put(put)).unwrap().unwrap();
        assert!(reply.outcomes.iter().all(|one| *one == BlockOutcome::Stored), "{:?}", reply.outcomes);
    }
    let mut kept = Vec::new();
    let refused = (0..8).find_map(|_| match filled(&scratch) {
        Ok(file) => {
            kept.push(file);
            None
        }
        Err(why) => Some(why),
    });
    let refused =
        refused.unwrap_or_else(|| panic!("{} MiB are charged to the server", server.charged() >> 20));
    assert!(refused.contains("keep too many files that they shared before"), "{refused}");
    let charged = server.charged();
    assert!(charged > MOST && charged <= MOST + SHARED, "{} files, {charged}", kept.len());
    kept.clear();
    // The pages are gone with their files, once the server has let go of the last one.
    let end = Instant::now() + Duration::from_secs(60);
    while let Err(why) = filled(&scratch) {
        assert!(Instant::now() < end, "{why}");
    }
    drop(server);
    let _ = fs::remove_dir_all(&disk);
}
