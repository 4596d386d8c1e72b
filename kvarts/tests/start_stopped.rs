//! A signal during a start: the server ends as at a stop, logs this, and leaves no half-made file.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode};
use rustix::process::{Pid, Signal, kill_process};

use crate::scratch::Scratch;
use crate::served::Server;

/// A server that starts; killed when dropped.
struct Starting(Child);

impl Starting {
    fn begin(directory: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.current_dir(directory).args(["serve", "--listen-grpc", "127.0.0.1:0"]);
        command.args(["--listen-metrics", "none", "--budget", "32 MiB", "--memory", "64 MiB"]);
        command.args(["--segment", "256 KiB"]).args(arguments);
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Waits for what it does, as long as it runs.
    fn until<T>(&mut self, mut is_so: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(so) = is_so() {
                return so;
            }
            assert!(self.0.try_wait().unwrap().is_none(), "it has ended by itself");
            std::thread::yield_now();
        }
    }

    /// Returns when it has a thread that asks a directory.
    fn until_it_asks(&mut self) {
        let threads = Path::new("/proc").join(self.0.id().to_string()).join("task");
        let hangs = || {
            let threads = std::fs::read_dir(&threads).into_iter().flatten().flatten();
            let mut names = threads.map(|thread| std::fs::read_to_string(thread.path().join("comm")));
            names.any(|name| name.is_ok_and(|name| name.trim() == "directory"))
        };
        self.until(|| hangs().then_some(()));
    }

    /// Its exit code after a signal, what it wrote, and its log.
    fn end(mut self, signal: Signal) -> (Option<i32>, String, String) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
        let (mut out, mut log) = (String::new(), String::new());
        self.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        self.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        (self.0.wait().unwrap().code(), out, log)
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory whose superblock cannot be opened: who opens it waits for one who writes into it, as on a drive that hangs.
fn hung(directory: &Path) {
    std::fs::create_dir_all(directory).unwrap();
    let (path, mode) = (directory.join("superblock"), Mode::RUSR | Mode::WUSR);
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, mode, 0).unwrap();
}

#[test]
fn a_start_that_waits_for_a_directory_that_hangs_ends_when_it_is_told_to() {
    let scratch = Scratch::new("stopped-hung");
    let (hanging, good) = (scratch.0.join("hanging"), scratch.0.join("good"));
    hung(&hanging);
    let directories = format!("{},{}", hanging.display(), good.display());
    let mut starting = Starting::begin(&scratch.0, &["--dir", &directories]);
    starting.until_it_asks();
    let (code, out, log) = starting.end(Signal::TERM);
    assert!(code == Some(0) && out.is_empty(), "{code:?} {out} {log}");
    assert!(log.contains("a signal to stop was received during the start"), "{log}");
    assert!(log.contains("stopped before serving"), "{log}");
    assert!(!good.exists(), "a directory was made for a store that is not");
}

#[test]
fn a_start_that_joins_a_cluster_ends_when_it_is_told_to_and_takes_its_store_back() {
    let scratch = Scratch::new("stopped-joining");
    // An etcd that takes connections and says nothing.
    let etcd = TcpListener::bind("127.0.0.1:0").unwrap();
    let members = format!("etcd://{}/c", etcd.local_addr().unwrap());
    let own = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let store = scratch.0.join("store");
    let directory = store.display().to_string();
    let mut starting =
        Starting::begin(&scratch.0, &["--dir", &directory, "--cluster", &members, "--cluster-address", &own]);
    etcd.set_nonblocking(true).unwrap();
    let _asked: TcpStream = starting.until(|| etcd.accept().ok()).0;
    assert!(store.join("superblock").exists(), "it has a store by now");
    let (code, out, log) = starting.end(Signal::INT);
    assert!(code == Some(0) && out.is_empty(), "{code:?} {out} {log}");
    assert!(log.contains("interrupted during the start"), "{log}");
    assert!(!store.exists(), "a store was left that nothing was served from: {log}");
    let left: Vec<_> = std::fs::read_dir(&scratch.0).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// At one stage of a start after the other, as far as its threads show them: it ends in time, and the next start finds all that was stored.
#[test]
fn a_start_that_is_told_to_stop_at_any_stage_damages_nothing() {
    let mut server = Server::start(Scratch::new("stopped-stages"), &[]);
    server.store_pages();
    // Killed, so that each start has something to recover.
    server.end();
    let folder = server.path(".");
    let (mut before_serving, mut stages) = (0, 0);
    for threads in 1..=16 {
        let mut starting = Starting::begin(&folder, &["--dir", "kvarts-data"]);
        let task = Path::new("/proc").join(starting.0.id().to_string()).join("task");
        let many = || std::fs::read_dir(&task).map_or(0, Iterator::count) >= threads;
        let begun = Instant::now();
        // A machine may have fewer.
        starting.until(|| (many() || begun.elapsed() > Duration::from_secs(1)).then_some(()));
        let told = Instant::now();
        let (code, out, log) = starting.end(Signal::TERM);
        assert!(told.elapsed() < Duration::from_secs(20), "{threads}: {:?} {log}", told.elapsed());
        // Before it hears signals one ends it; then nothing was opened.
        assert!(code == Some(0) || (code.is_none() && log.is_empty()), "{threads}: {code:?} {out} {log}");
        before_serving += usize::from(log.contains("stopped before serving"));
        stages += 1;
        let (code, out, error) = server.kvarts(&["fsck", "kvarts-data"]);
        assert_eq!(code, 0, "{threads}: {out}{error}");
        let (code, out, error) = server.kvarts(&["ls", "kvarts-data", "--json"]);
        assert!(code == 0 && out.contains("\"blocks\": 10"), "{threads}: {out}{error}");
    }
    assert!(before_serving > 0, "none of {stages} was stopped during its start");
}
