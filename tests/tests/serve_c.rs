//! `libkvarts` as it is installed, and programs over it with a real server: an engine in C (a scheduler and two workers, processes of their own, whose
//! devices are emulated, and `cuda:0` over the stand-in for NVIDIA's driver), the examples in C and C++, and what is refused.

#![allow(clippy::disallowed_methods, reason = "starts a compiler and processes, outside the simulation")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use kvarts_tests::stage::Scratch;

use crate::elf::exported;
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

fn succeeds(command: &mut Command) -> String {
    let output = command.output().expect("tests need a C and a C++ compiler");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A compiler that takes no warning.
fn compiler(variable: &str, otherwise: &str) -> Command {
    let mut command = Command::new(std::env::var(variable).unwrap_or_else(|_| otherwise.to_owned()));
    command.args(["-O1", "-Wall", "-Wextra", "-Werror"]);
    command
}

fn compile(arguments: &[&str], sources: &[PathBuf], to: &Path) {
    let mut command = compiler("CC", "cc");
    succeeds(command.args(["-std=c11", "-D_GNU_SOURCE"]).args(sources).args(arguments).arg("-o").arg(to));
}

/// Where the shared library is as packages have it, made once from the archive that was built with this test.
fn library() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libkvarts");
        succeeds(Command::new(of_the_house("c/link")).arg(built().join("libkvarts.a")).arg(&folder));
        folder
    })
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
    let (include, made) = (of_the_house("c/include").display().to_string(), library().display().to_string());
    let flags = ["-I", &include, "-L", &made, "-lkvarts", "-ldl"];
    compile(&flags, &[of_the_house("tests/tests/c/engine.c")], &program);
    an_engine("emulated", library(), &program);
    // The driver's double, before any other one on this machine.
    let stand_in = scratch.path().join("stand-in");
    std::fs::create_dir_all(&stand_in).unwrap();
    std::fs::copy(library().join("libkvarts.so.1"), stand_in.join("libkvarts.so.1")).unwrap();
    let sources = ["state.c", "memory.c", "stream.c", "copy.c", "kernel.c"];
    let sources = sources.map(|name| of_the_house("gpudirect/tests/driver/library").join(name));
    let shared = ["-g", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-ldl"];
    compile(&shared, &sources, &stand_in.join("libcuda.so.1"));
    std::fs::copy(stand_in.join("libcuda.so.1"), stand_in.join("libcuda.so")).unwrap();
    an_engine("cuda:0", &stand_in, &program);
}

/// Compiles a program, as strictly as a compiler can be, and runs it over the library with the server.
fn runs(mut compiler: Command, source: &str, scratch: &Path, socket: &str) -> String {
    let program = scratch.join(Path::new(source).file_name().unwrap()).with_extension("program");
    compiler.arg("-pedantic").arg("-I").arg(of_the_house("c/include")).arg(of_the_house(source));
    succeeds(compiler.arg("-L").arg(library()).args(["-lkvarts", "-o"]).arg(&program));
    succeeds(Command::new(&program).arg(socket).env("LD_LIBRARY_PATH", library()))
}

#[test]
fn the_examples_in_c_and_cpp_run_as_they_stand_and_wrong_uses_are_refused() {
    let served = Served::start("c-examples", "");
    let socket = served.daemon().socket().unwrap().display().to_string();
    let scratch = Scratch::new("c-programs");
    std::fs::create_dir_all(scratch.path()).unwrap();
    let c11 = || {
        let mut command = compiler("CC", "cc");
        command.arg("-std=c11");
        command
    };
    let told = runs(c11(), "c/examples/pages.c", scratch.path(), &socket);
    let lines = [
        "put: 8 blocks written",
        "exists: the first 8 blocks are stored",
        "estimate: 8 of 8 blocks are worth loading",
        "get: 8 blocks are complete and verified",
        "delete: 8 blocks were stored and are deleted",
        "exists: 0 blocks are stored; the first key: status 1, ",
    ];
    assert_eq!(told.lines().count(), lines.len(), "{told}");
    assert!(told.lines().zip(lines).all(|(line, expected)| line.starts_with(expected)), "{told}");
    let mut cpp = compiler("CXX", "c++");
    cpp.arg("-std=c++17");
    let told = runs(cpp, "c/examples/pages.cpp", scratch.path(), &socket);
    let lines = [
        "put: 4 pages written",
        "get: 3 of 4 pages; the error of the second page: ",
        "delete: 3 pages",
        "refused: status 4, ",
    ];
    assert_eq!(told.lines().count(), lines.len(), "{told}");
    assert!(told.lines().zip(lines).all(|(line, expected)| line.starts_with(expected)), "{told}");
    runs(c11(), "tests/tests/c/refusals.c", scratch.path(), &socket);
}

/// What loaders see of the installed library: its name, and each call of the header with its version.
#[test]
fn the_shared_library_exports_the_calls_of_the_header_with_versions_and_nothing_else() {
    let found = exported(&std::fs::read(library().join("libkvarts.so.1")).unwrap());
    assert_eq!(found.name, "libkvarts.so.1");
    let header = std::fs::read_to_string(of_the_house("c/include/kvarts.h")).unwrap();
    let declared = header.split("kvarts_").skip(1).filter_map(|text| {
        let name: String =
            text.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
        let is_call = text[name.len()..].starts_with('(');
        is_call.then(|| (format!("kvarts_{name}"), "KVARTS_0.1".to_owned()))
    });
    let declared: std::collections::BTreeSet<_> = declared.collect();
    assert!(declared.len() > 50, "{declared:?}");
    assert_eq!(found.calls, declared);
}
