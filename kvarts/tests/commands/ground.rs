//! A directory in which commands of pages are run by a shell, with the built program first on the path.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::shown::root;
use crate::scratch::Scratch;

/// How long one command may take, in seconds: more than any takes that ends.
const PATIENCE: &str = "1500";

/// What a command that ended has said.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) code: Option<i32>,
    pub(super) out: String,
}

pub(super) struct Ground {
    scratch: Scratch,
    servers: Vec<Child>,
}

impl Drop for Ground {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Ground {
    pub(super) fn new(name: &str) -> Self {
        let name: String = name.chars().map(|one| if one.is_alphanumeric() { one } else { '-' }).collect();
        Self { scratch: Scratch::new(&format!("commands-{name}")), servers: Vec::new() }
    }

    /// Places of a machine that pages name lie in the directory, and the program is the one that was built.
    pub(super) fn here(&self, line: &str) -> String {
        let mut line = line.to_owned();
        for program in ["cargo run --release --quiet -- ", "cargo run --release -- "] {
            line = line.replace(program, "kvarts ");
        }
        for place in ["/mnt/", "/srv/", "/run/", "/etc/", "/nvme/"] {
            for before in [" ", "//", ",", "="] {
                let there = format!("{before}{}{place}", self.scratch.shown());
                line = line.replace(&format!("{before}{place}"), &there);
            }
        }
        line
    }

    fn command(&self, line: &str) -> Command {
        let program = Path::new(env!("CARGO_BIN_EXE_kvarts")).parent().unwrap();
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("timeout");
        command
            .args(["--kill-after=10", PATIENCE, "sh", "-c", line])
            .current_dir(&self.scratch.0)
            .env("PATH", path)
            .env("ROOT", root().canonicalize().unwrap())
            // Other tests have servers of their own: clients find this one by its socket.
            .envs([("KVARTS_LISTEN_GRPC", "127.0.0.1:0"), ("KVARTS_LISTEN_METRICS", "none")])
            .stdin(Stdio::null());
        command
    }

    /// Runs a line until it ends.
    pub(super) fn run(&self, line: &str) -> Said {
        let output = self.command(line).output().unwrap();
        let out = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        Said { code: output.status.code(), out }
    }

    /// Starts a server, which serves until the ground is gone; gives the line that it prints.
    pub(super) fn serve(&mut self, line: &str) -> Said {
        let log = std::fs::File::create(self.scratch.0.join(format!("log-{}", self.servers.len()))).unwrap();
        let mut command = self.command(&format!("exec {line}"));
        let mut server = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut out = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut out).unwrap();
        self.servers.push(server);
        Said { code: None, out }
    }

    /// Ends all servers.
    pub(super) fn stop(&mut self) {
        for mut server in self.servers.drain(..) {
            // `timeout` passes it on; it may have ended already.
            let pid = server.id().to_string();
            let _ = Command::new("kill").arg(&pid).stderr(Stdio::null()).status();
            let _ = server.wait();
        }
    }

    /// What its servers have logged.
    pub(super) fn logs(&self) -> String {
        let logs = (0..self.servers.len()).map(|number| self.scratch.0.join(format!("log-{number}")));
        logs.filter_map(|log| std::fs::read_to_string(log).ok()).collect()
    }
}
