//! What a command leaves on the machine, and how that goes: when the command ends, when it fails, and when it is interrupted.
//!
//! What would outlast the process (a directory, a socket elsewhere, a server, a network) is an [`Undo`]: it is undone when the value is
//! dropped. SIGINT, SIGTERM and SIGHUP undo all that is there, the newest first, and end the process with 128 and the signal's
//! number as its exit code, as a shell says it of a program that a signal ended. Only a SIGKILL leaves something behind.
#![allow(clippy::disallowed_methods, reason = "commands remove their unfinished files on the real machine")]

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// How often a directory is removed again in which a thread of the engine made a file meanwhile.
const REMOVALS: u32 = 50;
const BETWEEN: Duration = Duration::from_millis(20);

type Work = Box<dyn FnOnce() + Send>;

/// What is to be undone, in the order in which it was made.
static LEFT: Mutex<BTreeMap<u64, Work>> = Mutex::new(BTreeMap::new());
/// Whether a signal is undoing it.
static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn left() -> MutexGuard<'static, BTreeMap<u64, Work>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something that was made, and is undone when this is dropped.
#[derive(Debug)]
pub struct Undo(u64);

impl Undo {
    /// Makes it. No signal comes between its making and the note of how it is undone.
    pub fn of<T>(
        make: impl FnOnce() -> Result<T, String>,
        undo: impl FnOnce() + Send + 'static,
    ) -> Result<(Self, T), String> {
        watch()?;
        let mut left = left();
        if IS_INTERRUPTED.load(Ordering::Acquire) {
            // What is made from now on would stay behind: what it stands in may be undone already.
            drop(left);
            last_word();
            return Err("interrupted".to_owned());
        }
        let made = make()?;
        let number = left.last_key_value().map_or(0, |(last, _)| last + 1);
        left.insert(number, Box::new(undo));
        Ok((Self(number), made))
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        // None where a signal has taken it.
        let work = left().remove(&self.0);
        if let Some(work) = work {
            work();
        }
    }
}

/// Removes a directory in which the engine may still be at work, or says that it stays.
pub fn remove(path: &Path) {
    let mut last = None;
    for _ in 0..REMOVALS {
        match std::fs::remove_dir_all(path) {
            Ok(()) => return,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.exists() => return,
            Err(error) => last = Some(error),
        }
        std::thread::sleep(BETWEEN);
    }
    if let Some(error) = last {
        // A terminal that is gone misses nothing.
        let _ = writeln!(std::io::stderr(), "kvarts: {} could not be removed: {error}", path.display());
    }
}

/// Lets a run that was interrupted say nothing more: what it meets while its ground is taken away is no failure of its own.
pub fn last_word() {
    while IS_INTERRUPTED.load(Ordering::Acquire) {
        std::thread::park();
    }
}

/// Waits for signals from now on, on a thread of its own.
fn watch() -> Result<(), String> {
    static WATCHED: OnceLock<Result<(), String>> = OnceLock::new();
    let begin = || {
        let (told, is_told) = sync_channel(1);
        let thread = std::thread::Builder::new().name("kvarts-signals".to_owned());
        thread.spawn(move || watching(&told)).map_err(|error| error.to_string())?;
        is_told.recv().unwrap_or_else(|_| Err("the program cannot wait for signals".to_owned()))
    };
    WATCHED.get_or_init(begin).clone()
}

/// The signals that end a run, but for those that this process was started to ignore (`nohup`).
fn signals() -> std::io::Result<Vec<(i32, Signal)>> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let kinds = kinds.into_iter().filter(|kind| ignored >> (kind.as_raw_value() - 1) & 1 == 0);
    kinds.map(|kind| Ok((kind.as_raw_value(), signal(kind)?))).collect()
}

fn watching(told: &SyncSender<Result<(), String>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        // Who asked may be gone.
        Err(error) => return drop(told.send(Err(error.to_string()))),
    };
    let number = runtime.block_on(async {
        let mut signals = match signals() {
            Ok(signals) => signals,
            Err(error) => {
                drop(told.send(Err(error.to_string())));
                return None;
            }
        };
        drop(told.send(Ok(())));
        let first = std::future::poll_fn(|context| {
            for (number, signal) in &mut signals {
                if signal.poll_recv(context).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        });
        Some(first.await)
    });
    let Some(number) = number else { return };
    IS_INTERRUPTED.store(true, Ordering::Release);
    loop {
        // One at a time: undoing one may drop another.
        let Some((_, work)) = left().pop_last() else { break };
        work();
    }
    if std::io::stderr().is_terminal() {
        // No line of progress stays; a terminal that is gone misses nothing.
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    std::process::exit(128 + number);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_is_undone_when_it_is_dropped_and_what_was_not_made_is_not() {
        let (sender, undone) = std::sync::mpsc::channel();
        let of = |name: &'static str, made: bool| {
            let sender = sender.clone();
            let make = move || if made { Ok(name) } else { Err("no".to_owned()) };
            Undo::of(make, move || sender.send(name).unwrap())
        };
        let (first, name) = of("first", true).unwrap();
        assert_eq!(name, "first");
        assert!(of("never", false).is_err());
        let second = of("second", true).unwrap();
        drop(first);
        assert_eq!(undone.try_iter().collect::<Vec<_>>(), ["first"]);
        drop(second);
        assert_eq!(undone.try_iter().collect::<Vec<_>>(), ["second"]);
    }
}
