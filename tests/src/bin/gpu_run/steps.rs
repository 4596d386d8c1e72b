//! The steps: what is run, for how long at most, and what came of it.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Asked;

/// Time that is kept for what comes behind the last step.
const SPARE: Duration = Duration::from_secs(5);
/// Less is not worth a start.
const LEAST: Duration = Duration::from_secs(3);
/// Bytes of one step's output that are kept: of more, the end.
const LOG_BYTES_MAX: usize = 512 << 10;
/// Where a machine may keep NVIDIA's libraries without telling the loader.
const LIBRARIES: [&str; 5] = [
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/wsl/lib",
];
/// The models whose layers are moved, and the ranks that share each.
pub(crate) const SHAPES: [(&str, u16); 5] = [
    ("llama-3.1-8b", 1),
    ("deepseek-v4-pro", 1),
    ("llama-3.1-70b", 8),
    ("deepseek-v3.2", 1),
    ("llama-3.1-70b", 1),
];

/// Numbers of hardware queues that engines are run with.
pub(crate) const CONNECTIONS: [u32; 3] = [8, 1, 32];

/// What is run.
pub(crate) struct Step {
    pub(crate) name: String,
    limit: Duration,
    program: &'static str,
    arguments: Vec<String>,
    env: Vec<(&'static str, String)>,
    /// Goes on until the time is over.
    takes_the_rest: bool,
}

/// What came of it.
pub(crate) struct Outcome {
    pub(crate) name: String,
    pub(crate) seconds: f64,
    /// Why it failed, or could not run; nothing if all was well.
    pub(crate) failed: Option<String>,
    pub(crate) not_run: Option<String>,
    /// Figures that it told, one object each.
    pub(crate) figures: Vec<Value>,
    /// Tests: name, result, and why.
    pub(crate) tests: Vec<[String; 3]>,
}

impl Step {
    fn new(name: &str, limit_s: u64, program: &'static str, words: &str) -> Self {
        let arguments = words.split_whitespace().map(str::to_owned).collect();
        let limit = Duration::from_secs(limit_s);
        Self { name: name.to_owned(), limit, program, arguments, env: Vec::new(), takes_the_rest: false }
    }

    fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.env.push((name, value.to_string()));
        self
    }
}

/// All of them, what is worth most first.
pub(crate) fn all(asked: &Asked) -> Vec<Step> {
    // The stand-in digests a bit at a time.
    let [copied, digested] = if asked.small { [16, 2] } else { [256, 256] };
    let (pairs, tokens) = if asked.small { (3, " --tokens 256") } else { (5, "") };
    let bench = |model: &str, tp: u16, cufile: &str| {
        format!(
            "bench gpu --json --device cuda:0 --model {model} --tp {tp} --cufile {cufile} --pairs {pairs}{tokens}"
        )
    };
    let tests = Step::new("device tests", 180, "driver", "--nocapture --test-threads 4");
    let figure = |name: &str, test: &str, mib: u64| {
        let words = format!("--ignored --exact --nocapture --test-threads 1 figures::{test}");
        Step::new(name, 90, "driver", &words).with("KVARTS_FIGURES_MIB", mib)
    };
    let mut all = vec![
        Step::new("probe", 60, "kvarts", "gpu probe --device cuda:0 --json --mib 64"),
        tests.with("KVARTS_DRIVER", "real"),
        figure("copies by size of pieces", "copies_by_size_of_pieces", copied),
        figure("landing beside the bare copy", "landing_beside_the_bare_copy", copied),
        figure("digests on the device", "digests_beside_the_copy", digested),
    ];
    for connections in CONNECTIONS {
        let name = format!("an engine's step beside a landing, {connections} queues");
        let step = figure(&name, "an_engines_step_while_a_request_lands", copied);
        all.push(step.with("CUDA_DEVICE_MAX_CONNECTIONS", connections));
    }
    for (model, tp) in SHAPES {
        all.push(Step::new(&format!("layers {model} tp{tp}"), 75, "kvarts", &bench(model, tp, "staging")));
    }
    for way in ["direct", "compatibility"] {
        all.push(Step::new(&format!("layers by cuFile {way}"), 60, "kvarts", &bench(SHAPES[0].0, 1, way)));
    }
    let failing = "a_device_that_fails_in_every_way_gives_right_bytes_or_a_reason_and_keeps_nothing";
    let words = format!("--exact --nocapture --test-threads 1 devices::{failing}");
    let mut soak = Step::new("R25 on the device", 600, "driver", &words).with("KVARTS_DRIVER", "real");
    soak.takes_the_rest = true;
    if asked.small {
        soak.limit = Duration::from_secs(20);
    }
    all.push(soak);
    all
}

impl Step {
    pub(crate) fn run(&self, asked: &Asked, left: Duration) -> Outcome {
        let mut outcome = Outcome {
            name: self.name.clone(),
            seconds: 0.0,
            failed: None,
            not_run: None,
            figures: Vec::new(),
            tests: Vec::new(),
        };
        let limit = self.limit.min(left.saturating_sub(SPARE));
        if limit < LEAST {
            outcome.not_run = Some("no time was left".to_owned());
            return outcome;
        }
        let begin = Instant::now();
        let ended = self.start(asked, limit).map(|mut child| collect(&mut child, limit));
        outcome.seconds = begin.elapsed().as_secs_f64();
        match ended {
            Err(error) => outcome.not_run = Some(format!("{}: {error}", self.program)),
            Ok(status) => {
                let [out, err] = ["out", "err"].map(|name| tail(&asked.scratch.join(name)));
                self.read(&mut outcome, status, limit, &out, &err);
            }
        }
        // A log that cannot be written is missed by people, not by the report.
        let _ = log(asked, &outcome, self.text());
        outcome
    }

    /// As it is typed.
    fn text(&self) -> String {
        let env: Vec<String> = self.env.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        format!("{}{} {}", env.concat(), self.program, self.arguments.join(" "))
    }

    fn start(&self, asked: &Asked, limit: Duration) -> std::io::Result<Child> {
        let mut command = Command::new(asked.here.join(self.program));
        command.args(&self.arguments).current_dir(&asked.scratch);
        command.env("TMPDIR", &asked.scratch).env("KVARTS_DRIVER_LIBRARIES", asked.here.join("lib"));
        command.env("LD_LIBRARY_PATH", libraries(asked)).env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
        command.env("RUST_BACKTRACE", "1").envs(self.env.iter().map(|(name, value)| (name, value)));
        if self.takes_the_rest {
            let seconds = limit.as_secs().saturating_sub(if asked.small { 15 } else { 30 });
            command.env("KVARTS_SOAK_S", seconds.to_string());
        }
        let out = std::fs::File::create(asked.scratch.join("out"))?;
        let err = std::fs::File::create(asked.scratch.join("err"))?;
        command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0).spawn()
    }

    /// Makes a result of what it said.
    fn read(&self, outcome: &mut Outcome, status: Option<ExitStatus>, limit: Duration, out: &str, err: &str) {
        for line in out.lines() {
            if let Some((_, figure)) = line.split_once("figure\t") {
                outcome.figures.extend(serde_json::from_str::<Value>(figure).ok());
            }
            if let Some((_, test)) = line.split_once("driver-test\t") {
                let mut words = test.splitn(3, '\t').map(str::to_owned);
                outcome.tests.push(std::array::from_fn(|_| words.next().unwrap_or_default()));
            }
        }
        if let (true, Some(at)) = (self.program == "kvarts", out.find('{')) {
            outcome.figures.extend(serde_json::from_str::<Value>(&out[at..]).ok());
        }
        let last = |text: &str| text.lines().rev().find(|line| !line.trim().is_empty()).map(str::to_owned);
        let message = |value: &Value| value["message"].as_str().map(str::to_owned);
        let said = outcome.figures.first().and_then(message);
        let why = said.or_else(|| last(err)).or_else(|| last(out)).unwrap_or_default();
        match status {
            None => outcome.failed = Some(format!("stopped after {} s", limit.as_secs())),
            Some(status) if status.success() => {}
            // The program's word for what it was asked for and cannot do here.
            Some(status) if status.code() == Some(2) => outcome.not_run = Some(why),
            Some(status) => {
                let bad = outcome.tests.iter().filter(|test| test[1] == "failed").count();
                outcome.failed =
                    Some(if bad > 0 { format!("{bad} tests failed") } else { format!("{status}: {why}") });
            }
        }
        if outcome.failed.is_none() && outcome.not_run.is_none() && !outcome.tests.is_empty() {
            let here = outcome.tests.iter().filter(|test| test[1] == "passed").count();
            if here == 0 {
                outcome.not_run = outcome.tests.first().map(|test| test[2].clone());
            }
        }
    }
}

/// Where the loader looks beside its own folders.
fn libraries(asked: &Asked) -> String {
    let before = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let has =
        |folder: &Path| ["libcuda.so.1", "libcufile.so.0"].iter().any(|name| folder.join(name).exists());
    let known = LIBRARIES.iter().map(PathBuf::from).filter(|folder| has(folder));
    let mut all: Vec<String> = before.split(':').filter(|part| !part.is_empty()).map(str::to_owned).collect();
    all.extend(
        asked.libraries.iter().cloned().chain(known).chain(packaged()).map(|path| path.display().to_string()),
    );
    all.join(":")
}

/// The folder of a libcufile that came with a Python package: not far below where such are kept.
fn packaged() -> Option<PathBuf> {
    let (mut looked, mut folders) =
        (0, vec![(PathBuf::from("/opt"), 0), (PathBuf::from("/usr/local/lib"), 0)]);
    while let Some((folder, depth)) = folders.pop() {
        if folder.join("libcufile.so.0").exists() {
            return Some(folder);
        }
        let entries = std::fs::read_dir(&folder).ok().into_iter().flatten().flatten();
        // Packages have many files that are none of ours: only folders on the way to NVIDIA's.
        let on_the_way = |name: &str| {
            depth < 4
                || ["lib", "site-packages", "dist-packages", "nvidia", "cufile", "cu12", "cu13"]
                    .contains(&name)
                || name.starts_with("python3")
        };
        for entry in entries {
            looked += 1;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && depth < 9 && looked < 100_000 && on_the_way(&name) {
                folders.push((entry.path(), depth + 1));
            }
        }
    }
    None
}

/// Waits for a process, but no longer than that.
fn collect(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if begin.elapsed() < limit => std::thread::sleep(Duration::from_millis(20)),
            _ => break None,
        }
    };
    if status.is_none() {
        // With whatever it has started: it leads a group of its own.
        let group = rustix::process::Pid::from_child(child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = child.wait();
    }
    status
}

/// The end of a file, as text.
fn tail(path: &Path) -> String {
    let mut bytes = Vec::new();
    let _ = std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
    let from = bytes.len().saturating_sub(LOG_BYTES_MAX);
    String::from_utf8_lossy(bytes.get(from..).unwrap_or_default()).into_owned()
}

fn log(asked: &Asked, outcome: &Outcome, command: String) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(asked.out.join("log.txt"))?;
    writeln!(file, "==== {}: {}\n$ {command}", outcome.name, outcome.line())?;
    for name in ["out", "err"] {
        writeln!(file, "---- {name}\n{}", tail(&asked.scratch.join(name)))?;
    }
    Ok(())
}

impl Outcome {
    pub(crate) fn failed(&self) -> bool {
        self.failed.is_some()
    }

    /// In words.
    pub(crate) fn line(&self) -> String {
        match (&self.failed, &self.not_run) {
            (Some(why), _) => format!("FAILED: {why}"),
            (_, Some(why)) => format!("did not run: {why}"),
            _ if self.tests.is_empty() => "done".to_owned(),
            _ => {
                let count = |word: &str| self.tests.iter().filter(|test| test[1] == word).count();
                let only =
                    |test: &&[String; 3]| test[1] == "not here" && test[2].starts_with("stand-in only");
                let only = self.tests.iter().filter(only).count();
                format!(
                    "{} passed, {only} stand-in only, {} not on this machine",
                    count("passed"),
                    count("not here") - only
                )
            }
        }
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "step": self.name,
            "seconds": (self.seconds * 10.0).round() / 10.0,
            "result": self.line(),
            "figures": self.figures,
            "tests": self.tests,
        })
    }
}

/// What the machine is.
pub(crate) fn facts() -> Value {
    let file = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).ok();
    let smi = Command::new("nvidia-smi")
        .args(["--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,ecc.mode.current", "--format=csv,noheader"])
        .output();
    let smi = smi.ok().filter(|output| output.status.success());
    let cpu = file("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|line| line.trim_start_matches([' ', '\t', ':']).to_owned());
    json!({
        "gpu": smi.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        "driver": file("/proc/driver/nvidia/version"),
        "nvidia_fs": file("/proc/driver/nvidia-fs/version"),
        "kernel": file("/proc/sys/kernel/osrelease"),
        "processor": model,
        "cores": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
    })
}
