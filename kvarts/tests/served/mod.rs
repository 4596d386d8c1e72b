//! A server in a process of its own, in a directory of its own, with an identity, tokens and blocks to try it with.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::scratch::Scratch;

/// A server; ended with the value.
pub(crate) struct Server {
    child: Child,
    places: String,
    scratch: Scratch,
}

impl Server {
    pub(crate) fn start(scratch: Scratch, more: &[&str]) -> Self {
        Self::start_with(scratch, more, &[])
    }

    /// The same with this environment besides.
    pub(crate) fn start_with(scratch: Scratch, more: &[&str], environment: &[(&str, String)]) -> Self {
        let (child, places) = Self::spawn(&scratch, more, environment);
        Self { child, places, scratch }
    }

    /// Ends the server and starts it again with these arguments.
    pub(crate) fn start_again(&mut self, more: &[&str]) {
        self.start_again_with(more, &[]);
    }

    /// The same with this environment besides.
    pub(crate) fn start_again_with(&mut self, more: &[&str], environment: &[(&str, String)]) {
        // It may have ended already.
        let _ = self.child.kill();
        self.child.wait().unwrap();
        (self.child, self.places) = Self::spawn(&self.scratch, more, environment);
    }

    fn spawn(scratch: &Scratch, more: &[&str], environment: &[(&str, String)]) -> (Child, String) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .current_dir(&scratch.0)
            .args(["serve", "--listen-grpc", "127.0.0.1:0", "--listen-metrics", "127.0.0.1:0"])
            .args(if more.contains(&"--budget") { &[][..] } else { &["--budget", "64M", "--segment", "4M"] })
            .args(more)
            .envs(environment.iter().map(|(name, value)| (*name, value.as_str())))
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(scratch.0.join("log")).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (child, line)
    }

    /// Where it listens, by the name of the place: `grpc`, `metrics`, `socket`.
    pub(crate) fn place(&self, name: &str) -> &str {
        let named = |word| str::strip_prefix(word, name)?.strip_prefix('=');
        let place = self.places.split_whitespace().find_map(named);
        place.unwrap_or_else(|| panic!("no {name} in {:?}", self.places))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.0.join(name)
    }

    pub(crate) fn metrics_address(&self) -> &str {
        self.place("metrics")
    }

    pub(crate) fn metrics(&self) -> String {
        let answer = http(self.metrics_address(), "GET /metrics");
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// Exit code, standard output and standard error of a command, beside the server.
    pub(crate) fn kvarts(&self, arguments: &[&str]) -> (i32, String, String) {
        self.kvarts_with(arguments, &[])
    }

    /// The same with this environment besides.
    pub(crate) fn kvarts_with(
        &self,
        arguments: &[&str],
        environment: &[(&str, String)],
    ) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.envs(environment.iter().map(|(name, value)| (*name, value.as_str())));
        let output =
            command.current_dir(&self.scratch.0).args(arguments).stdin(Stdio::null()).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    /// The same of a command about the blocks here.
    pub(crate) fn client(&self, command: &[&str], more: &[&str]) -> (i32, String, String) {
        self.kvarts(&[command, &["--identity", "ID.toml", "--page-bytes", "4096"], more].concat())
    }

    /// Writes an identity, tokens of ten blocks and of twenty that begin with them, and stores the ten.
    pub(crate) fn store_pages(&self) {
        self.store_pages_of("pages");
    }

    /// The same, of a model of this name.
    pub(crate) fn store_pages_of(&self, model: &str) {
        self.store_pages_with(model, &[]);
    }

    /// The same, with more arguments, such as a token.
    pub(crate) fn store_pages_with(&self, model: &str, more: &[&str]) {
        let (code, identity, error) = self.kvarts(&["identity", "--page-bytes", "4096"]);
        assert_eq!(code, 0, "{error}");
        let filled = |line: &str| match line.split_once(" = ") {
            Some(("model", _)) => format!("model = '{model}'\n"),
            Some((name, value)) if value.starts_with("\"\"") => format!("{name} = \"1\"\n"),
            _ => format!("{line}\n"),
        };
        std::fs::write(self.path("ID.toml"), identity.lines().map(filled).collect::<String>()).unwrap();
        let tokens = |blocks: u32| (0..blocks * 16).map(|token| format!("{token} ")).collect::<String>();
        std::fs::write(self.path("tokens"), tokens(10)).unwrap();
        std::fs::write(self.path("more"), tokens(20)).unwrap();
        std::fs::write(self.path("blocks"), vec![7; 10 * 4096]).unwrap();
        let (code, out, error) = self.client(&["put", "blocks"], &[&["--tokens", "tokens"], more].concat());
        assert_eq!(code, 0, "{out}{error}\n{identity}");
    }

    /// What the server has logged so far, without colours.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    /// Starts a command and kills it after a moment.
    pub(crate) fn killed(&self, arguments: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        let mut child =
            command.current_dir(&self.scratch.0).args(arguments).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// How the server ends by itself, within a minute.
    pub(crate) fn ends(&mut self) -> std::process::ExitStatus {
        for _ in 0..600 {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!("the server did not end")
    }

    /// Sends the server a signal.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Ends the server at once.
    pub(crate) fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A request: its method and path, and more lines of its head, each behind a line's end.
pub(crate) struct Asked<'a>(&'a str, &'a str);

impl<'a> From<&'a str> for Asked<'a> {
    fn from(request: &'a str) -> Self {
        Self(request, "")
    }
}

impl<'a> From<&'a String> for Asked<'a> {
    fn from(request: &'a String) -> Self {
        Self(request, "")
    }
}

impl<'a> From<(&'a String, &'a String)> for Asked<'a> {
    fn from((request, header): (&'a String, &'a String)) -> Self {
        Self(request, header)
    }
}

/// All that is answered to one request, head and body.
pub(crate) fn http<'a>(address: &str, request: impl Into<Asked<'a>>) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let Asked(request, header) = request.into();
    let request = format!("{request} HTTP/1.1\r\nhost: {address}\r\nconnection: close{header}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}
