//! How long a thread of this process waited for a processor: what the scheduler makes a read wait is not the engine's.

use std::fs::File;
use std::os::unix::fs::FileExt;

use kvarts_terminal::Failure;

/// The account of one thread in the kernel.
pub(super) struct Waiting(File);

impl Waiting {
    /// Of the thread that calls this.
    pub(super) fn own() -> Result<Self, Failure> {
        Self::at("/proc/thread-self/schedstat")
    }

    /// Of the thread with this name.
    pub(super) fn of(name: &str) -> Result<Self, Failure> {
        let tasks = std::fs::read_dir("/proc/self/task").map_err(Failure::user)?;
        let is_named = |task: &std::path::PathBuf| {
            std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        let task = tasks.flatten().map(|task| task.path()).find(is_named);
        let task = task.ok_or_else(|| Failure::user(format!("no thread of this process is named {name}")))?;
        Self::at(&task.join("schedstat").display().to_string())
    }

    fn at(path: &str) -> Result<Self, Failure> {
        File::open(path).map(Self).map_err(|error| Failure::user(format!("{path}: {error}")))
    }

    /// Seconds that the thread could have run and had no processor, since it began.
    pub(super) fn seconds(&self) -> f64 {
        let mut text = [0; 96];
        let bytes = self.0.read_at(&mut text, 0).unwrap_or(0);
        let text = std::str::from_utf8(text.get(..bytes).unwrap_or_default()).unwrap_or_default();
        text.split_whitespace().nth(1).and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
    }
}
