//! An engine beside which a server is to run: whether it has what Kvarts' connectors use of it, as the module's own probe says.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::{Finding, Verdict};

/// What `python -m kvarts.probe ENGINE --json` prints.
#[derive(Deserialize)]
struct Probed {
    engine: String,
    version: Option<String>,
    tried: Vec<String>,
    is_tried: bool,
    verdict: Verdict,
    connectors: Vec<Connector>,
}

#[derive(Deserialize)]
struct Connector {
    connector: String,
    findings: Vec<Hook>,
}

#[derive(Deserialize)]
struct Hook {
    how: String,
    name: String,
}

/// How long the probe may take. It reads some dozens of files.
const LONGEST: Duration = Duration::from_secs(60);

/// Asks the module that this Python has.
pub(super) fn look(engine: &str, python: &Path) -> Finding {
    // It reads sources, and neither imports nor starts the engine.
    let mut probe = Command::new(python);
    probe.args(["-m", "kvarts.probe", engine, "--json"]);
    judge(engine, python, output_within(&mut probe, LONGEST))
}

/// The output of a program, which is killed if it runs for longer.
#[allow(
    clippy::disallowed_methods,
    reason = "starts a program of this machine and waits for it, in a command run by a user"
)]
fn output_within(program: &mut Command, longest: Duration) -> io::Result<Output> {
    let mut child = program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pipes: [Option<Box<dyn Read + Send>>; 2] = [
        child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
        child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
    ];
    let (tell, told) = mpsc::channel();
    for (number, pipe) in pipes.into_iter().enumerate() {
        let tell = tell.clone();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = pipe.map_or(Ok(0), |mut pipe| pipe.read_to_end(&mut bytes));
            // A receiver that is gone has waited for too long.
            tell.send((number, read.map(|_| bytes))).ok();
        });
    }
    let output = gathered(&mut child, &told, Instant::now() + longest);
    if output.is_err() {
        child.kill()?;
        child.wait()?; // ends: it was killed
    }
    output
}

/// What a program has said once it has ended.
#[allow(
    clippy::disallowed_methods,
    reason = "starts a program of this machine and waits for it, in a command run by a user"
)]
fn gathered(
    child: &mut Child,
    told: &mpsc::Receiver<(usize, io::Result<Vec<u8>>)>,
    deadline: Instant,
) -> io::Result<Output> {
    let late = || io::Error::new(io::ErrorKind::TimedOut, "the Python program did not end in time");
    let mut outputs = [Vec::new(), Vec::new()];
    for _ in 0..2 {
        let left = deadline.saturating_duration_since(Instant::now());
        let (number, read) = told.recv_timeout(left).map_err(|_| late())?;
        if let Some(output) = outputs.get_mut(number) {
            *output = read?;
        }
    }
    let [stdout, stderr] = outputs;
    // It may go on without outputs.
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Output { status, stdout, stderr });
        }
        if Instant::now() >= deadline {
            return Err(late());
        }
        // ends: at once; the loop, at `deadline`
        thread::sleep(Duration::from_millis(5));
    }
}

fn judge(engine: &str, python: &Path, output: io::Result<Output>) -> Finding {
    let (check, python) = (format!("engine {engine}"), python.display());
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            let advice = "give the Python of the engine with --python";
            return Finding::bad(check, format!("{python}: {error}"), advice);
        }
    };
    let Ok(probed) = serde_json::from_slice::<Probed>(&output.stdout) else {
        let told = String::from_utf8_lossy(&output.stderr);
        let last = told.lines().last().unwrap_or("the Python program printed nothing").to_owned();
        let advice = format!(
            "install the wheel of Kvarts (scripts/wheel) for {python}, which must be the engine's \
                Python"
        );
        return Finding::bad(check, last, advice);
    };
    let Some(version) = &probed.version else {
        let advice = "give the Python of the engine with --python";
        return Finding::bad(check, format!("{} is not installed for {python}", probed.engine), advice);
    };
    let mut found = format!("{} {version}", probed.engine);
    if !probed.is_tried {
        found = format!("{found}, which is not a tested version (tested: {})", probed.tried.join(", "));
    }
    for connector in &probed.connectors {
        for hook in &connector.findings {
            found = format!("{found}; {}: {}: {}", connector.connector, hook.how, hook.name);
        }
    }
    match probed.verdict {
        Verdict::Good => Finding::good(check, found),
        Verdict::Better => Finding::better(
            check,
            found,
            "test this engine version with your model before production: the engine has new interfaces that \
            Kvarts may not support yet",
        ),
        Verdict::Bad => {
            Finding::bad(check, found, "use a tested version, or a release of Kvarts as recent as the engine")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn judged(stdout: &str, stderr: &str) -> Finding {
        let (stdout, stderr) = (stdout.as_bytes().to_vec(), stderr.as_bytes().to_vec());
        judge("vllm", Path::new("python3"), Ok(Output { status: ExitStatus::from_raw(0), stdout, stderr }))
    }

    fn probed(version: &str, is_tried: bool, verdict: &str, connectors: &str) -> Finding {
        let said = format!(
            r#"{{"engine": "vllm", "version": {version}, "tried": ["0.32.0"], "is_tried": {is_tried}, "verdict": "{verdict}", "connectors": [{connectors}]}}"#
        );
        judged(&said, "")
    }

    #[test]
    fn an_engine_is_judged_by_what_its_connectors_find() {
        let good = probed("\"0.32.0\"", true, "good", "");
        assert_eq!((good.verdict, good.found.as_str()), (Verdict::Good, "vllm 0.32.0"));
        let later = probed("\"0.33.0\"", false, "improve", "");
        assert_eq!(later.verdict, Verdict::Better);
        assert!(
            later.found.ends_with("0.33.0, which is not a tested version (tested: 0.32.0)"),
            "{}",
            later.found
        );
        let lacks = r#"{"connector": "kvarts.vllm", "findings": [{"how": "missing", "name": "vllm.a:B"}]}"#;
        let bad = probed("\"0.26.0\"", false, "bad", lacks);
        assert_eq!(bad.verdict, Verdict::Bad);
        assert!(bad.found.ends_with("; kvarts.vllm: missing: vllm.a:B"), "{}", bad.found);
        let absent = probed("null", false, "bad", "");
        assert!(absent.found.contains("not installed for python3"), "{}", absent.found);
        assert_eq!(absent.verdict, Verdict::Bad);
    }

    #[test]
    fn a_probe_that_hangs_is_killed() {
        for script in ["echo begun; exec sleep 1000", "exec >&- 2>&-; exec sleep 1000"] {
            let mut hung = Command::new("sh");
            hung.args(["-c", script]);
            let found = output_within(&mut hung, Duration::from_millis(50));
            assert_eq!(found.unwrap_err().kind(), io::ErrorKind::TimedOut, "{script}");
        }
        let mut both = Command::new("sh");
        both.args(["-c", "head -c 300000 /dev/zero; echo over >&2; exit 3"]);
        let found = output_within(&mut both, LONGEST).unwrap();
        let expected = (300_000, b"over\n".to_vec(), Some(3));
        assert_eq!((found.stdout.len(), found.stderr, found.status.code()), expected);
    }

    #[test]
    fn a_python_that_cannot_answer_is_told_with_what_to_do() {
        let none = judge("vllm", Path::new("/absent/python"), Err(io::Error::from(io::ErrorKind::NotFound)));
        assert_eq!(none.verdict, Verdict::Bad);
        assert!(none.found.starts_with("/absent/python: ") && none.advice.unwrap().contains("--python"));
        let without = judged("", "Traceback\nModuleNotFoundError: No module named 'kvarts'\n");
        assert_eq!(without.verdict, Verdict::Bad);
        assert_eq!(without.found, "ModuleNotFoundError: No module named 'kvarts'");
        assert!(without.advice.unwrap().contains("scripts/wheel"));
        assert_eq!(judged("{}", "").verdict, Verdict::Bad);
    }
}
