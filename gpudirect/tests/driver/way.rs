//! Over which driver the tests run: the stand-in, or the machine's own. `KVARTS_DRIVER=real` chooses the machine's, which is
//! watched then (`library/watch.c`), so that the tests are the same ones. What only the stand-in can do says so and counts as
//! that, and so does what this machine lacks.
//!
//! Both need libraries that a C compiler makes. On a machine without one `KVARTS_DRIVER_LIBRARIES` names a folder of them,
//! made elsewhere by the test here that is ignored.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::standin::Kit;

const DRIVER: &str = "KVARTS_DRIVER";
const LIBRARIES: &str = "KVARTS_DRIVER_LIBRARIES";
/// How a process ends whose test cannot run over its driver.
const NOT_HERE: i32 = 77;
/// How long a test may take over a driver that no test has run on yet: a test that hangs must not cost the others their time.
const LIMIT: Duration = Duration::from_secs(45);

/// Whether the machine's own driver is tested.
pub(crate) fn is_real() -> bool {
    match std::env::var(DRIVER).as_deref() {
        Err(_) | Ok("stand-in") => false,
        Ok("real") => true,
        Ok(other) => panic!("{DRIVER} is real or stand-in, not `{other}`"),
    }
}

/// How long a test waits for something that must happen: if it takes longer, it hangs.
pub(crate) fn timeout() -> Duration {
    Duration::from_secs(if is_real() { 20 } else { 60 })
}

/// For how long failures are brought about, beyond one round of each kind.
pub(crate) fn soak_seconds() -> u64 {
    std::env::var("KVARTS_SOAK_S").map_or(0, |seconds| seconds.parse().expect("a number of seconds"))
}

/// Libraries that were built elsewhere.
pub(crate) fn libraries() -> Option<PathBuf> {
    std::env::var_os(LIBRARIES).map(PathBuf::from)
}

/// What the libraries of a kit are called, by what they stand for.
pub(crate) fn name(kit: Kit, is_real: bool) -> String {
    format!("{}-{kit:?}", if is_real { "watch" } else { "stand-in" }).to_lowercase()
}

/// Ends this process, the test's own: it cannot run here.
pub(crate) fn not_here(why: &str) -> ! {
    println!("\nnot here: {why}");
    std::process::exit(NOT_HERE)
}

/// Ends this process, the test's own, with success: the driver's books are no longer kept.
pub(crate) fn passed_and_nothing_to_settle() -> ! {
    println!("\n1 passed");
    std::process::exit(0)
}

/// Runs the process of a test, and tells how it ended, in a line for programs too where the driver is the machine's. What it
/// said is the error.
pub(crate) fn run(command: Command, test: &str) -> Result<(), String> {
    let (status, said) = limited(command);
    let why =
        || said.lines().find_map(|line| line.strip_prefix("not here: ")).unwrap_or("it does not say why");
    let passed = status.is_some_and(|status| status.success()) && said.contains("1 passed");
    let skipped = status.is_some_and(|status| status.code() == Some(NOT_HERE));
    // A name that is no test's would run nothing and succeed.
    let figures = said.lines().filter_map(|line| line.split_once("figure\t"));
    figures.for_each(|(_, figure)| println!("figure\t{figure}"));
    let result = match (passed, skipped, status) {
        (true, ..) => Ok(()),
        (_, true, _) if is_real() => {
            println!("driver-test\t{test}\tnot here\t{}", why());
            return Ok(());
        }
        (.., None) => Err(format!("stopped after {LIMIT:?}\n{said}")),
        (.., Some(status)) => Err(format!("{status}\n{said}")),
    };
    if is_real() {
        // Where a test has panicked stands in one line, and why in the next.
        let panic = said.lines().skip_while(|line| !line.contains("panicked at")).take(2);
        let panic = panic.collect::<Vec<_>>().join(" ").replace('\t', " ");
        let (word, why) = match (&result, status) {
            (Ok(()), _) => ("passed", String::new()),
            (Err(_), None) => ("failed", format!("it hung and was stopped after {LIMIT:?} {panic}")),
            (Err(_), Some(status)) => ("failed", format!("{status} {panic}")),
        };
        println!("driver-test\t{test}\t{word}\t{why}");
    }
    result
}

/// What a process said, and how it ended if it did in time. With it ends whatever it has started.
fn limited(mut command: Command) -> (Option<ExitStatus>, String) {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn().unwrap();
    let group = rustix::process::Pid::from_child(&child);
    let limit =
        if is_real() { LIMIT } else { Duration::from_secs(600) } + Duration::from_secs(soak_seconds());
    let (done, ends) = mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        let late = ends.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
        if late {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        late
    });
    let output = child.wait_with_output().unwrap();
    drop(done);
    let late = watch.join().unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ((!late).then_some(output.status), said.join("\n"))
}

/// What runs over a GPU is proven over the stand-in in its place: the watched driver changes nothing.
#[test]
fn the_same_tests_pass_over_a_driver_that_is_watched() {
    if is_real() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let before = std::env::var("LD_LIBRARY_PATH").map(|path| format!(":{path}")).unwrap_or_default();
    let machine = crate::standin::folder(Kit::Whole);
    command.env("LD_LIBRARY_PATH", format!("{}{before}", machine.display())).env(DRIVER, "real");
    let output = command.args(["--nocapture"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let results = |word: &str| {
        let lines = said.lines().filter(|line| line.contains("driver-test\t"));
        lines.filter(|line| line.split('\t').nth(2) == Some(word)).count()
    };
    let counts = ["passed", "not here", "failed"].map(results);
    assert!(output.status.success() && counts[2] == 0, "{counts:?}\n{said}");
    assert!(counts[0] >= 50 && counts[1] <= 17, "{counts:?}: too few can run on a GPU");
}

/// Not a test: makes the libraries of every kit, for a machine that has no compiler.
#[test]
#[ignore = "makes libraries for another machine"]
fn libraries_for_a_machine_without_a_compiler() {
    let folder = libraries().expect("KVARTS_DRIVER_LIBRARIES says where");
    for kit in [Kit::Whole, Kit::Old, Kit::Bare] {
        for is_real in [false, true] {
            let folder = folder.join(name(kit, is_real));
            std::fs::create_dir_all(&folder).unwrap();
            crate::standin::build(kit, is_real, &folder);
        }
    }
}
