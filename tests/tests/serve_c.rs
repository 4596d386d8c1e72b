//! An engine in C: a scheduler and two workers, processes of their own, over `libkvarts` and a real server. Its workers' devices are emulated, and
//! `cuda:0` over the stand-in for NVIDIA's driver.

#![allow(clippy::disallowed_methods, reason = "starts a compiler and processes, outside the simulation")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvarts_tests::stage::Scratch;

use crate::served::Served;

// Cargo builds the library for that.
use kvarts as _;

fn of_the_house(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

/// Where this test and the library were built.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn compile(arguments: &[&str], sources: &[PathBuf], to: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]).args(sources);
    let output = command.args(arguments).arg("-o").arg(to).output().expect("tests need a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A process of the engine.
struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Process {
    fn start(program: &Path, words: &[&str], libraries: &Path) -> Self {
        let mut command = Command::new(program);
        command.args(words).env("LD_LIBRARY_PATH", libraries);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// What follows these words on the next line that it says.
    fn expect(&mut self, words: &str) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        let rest = line.strip_prefix(words);
        rest.unwrap_or_else(|| panic!("{line:?} where {words:?} is expected")).trim().to_owned()
    }

    fn end(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

fn an_engine(device: &str, libraries: &Path, program: &Path) {
    let served = Served::start(&format!("c-{}", device.replace(':', "")), "");
    let socket = served.daemon().socket().unwrap().display().to_string();
    let mut scheduler = Process::start(program, &["scheduler", &socket], libraries);
    let name = scheduler.expect("pool ");
    let mut workers: Vec<Process> = ["0", "1"]
        .iter()
        .map(|rank| Process::start(program, &["worker", &socket, rank, device], libraries))
        .collect();
    for (rank, worker) in workers.iter_mut().enumerate() {
        worker.tell(&name);
        worker.tell(&scheduler.expect(&format!("draft {rank} ")));
    }
    workers.iter_mut().for_each(|worker| drop(worker.expect("saved")));
    scheduler.tell("saved");
    for (rank, worker) in workers.iter_mut().enumerate() {
        worker.tell(&scheduler.expect(&format!("staged {rank} ")));
    }
    workers.iter_mut().for_each(|worker| drop(worker.expect("landed")));
    scheduler.tell("landed");
    workers.into_iter().chain([scheduler]).for_each(Process::end);
}

#[test]
fn an_engine_in_c_saves_puts_stages_and_lands_in_two_workers_on_each_device() {
    let scratch = Scratch::new("c-engine");
    std::fs::create_dir_all(scratch.path()).unwrap();
    let program = scratch.path().join("engine");
    let (include, library) = (of_the_house("c/include").display().to_string(), built().display().to_string());
    let flags = ["-I", &include, "-L", &library, "-lkvarts", "-ldl"];
    compile(&flags, &[of_the_house("tests/tests/c/engine.c")], &program);
    an_engine("emulated", &built(), &program);
    // The driver's double, before any other one on this machine.
    let stand_in = scratch.path().join("stand-in");
    std::fs::create_dir_all(&stand_in).unwrap();
    std::fs::copy(built().join("libkvarts.so"), stand_in.join("libkvarts.so")).unwrap();
    let sources = ["state.c", "memory.c", "stream.c", "copy.c", "kernel.c"];
    let sources = sources.map(|name| of_the_house("gpudirect/tests/driver/library").join(name));
    let shared = ["-g", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-ldl"];
    compile(&shared, &sources, &stand_in.join("libcuda.so.1"));
    std::fs::copy(stand_in.join("libcuda.so.1"), stand_in.join("libcuda.so")).unwrap();
    an_engine("cuda:0", &stand_in, &program);
}

/// What the header declares and what the library has are the same calls.
#[test]
fn the_header_has_each_call_of_the_library_and_no_other() {
    let header = std::fs::read_to_string(of_the_house("c/include/kvarts.h")).unwrap();
    let word = |text: &str| {
        let name: String =
            text.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
        Some(format!("kvarts_{name}")).filter(|_| text[name.len()..].starts_with('('))
    };
    let declared: std::collections::BTreeSet<String> =
        header.split("kvarts_").skip(1).filter_map(word).collect();
    let mut made = std::collections::BTreeSet::new();
    for source in std::fs::read_dir(of_the_house("c/src")).unwrap() {
        let text = std::fs::read_to_string(source.unwrap().path()).unwrap();
        made.extend(text.split("extern \"C\" fn kvarts_").skip(1).filter_map(word));
    }
    assert_eq!(declared, made);
    assert!(made.len() > 30, "{made:?}");
}
