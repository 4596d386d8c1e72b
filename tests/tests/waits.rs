//! No wait without an end: each place where a thread or a task can wait says what ends it.
//!
//! A wait has a deadline by what it is called with (`timeout`, `in_time`, `wait_timeout`), in its line or one of the two above; or a comment
//! `// ends: ` in its line or right above it (in Python `# ends: `) names the deadline or the owner that ends it. Names in backticks
//! are those of the code. What a wait is, [`WAITS`] says: where code first stands still, and not the functions that pass it on.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::path::{Path, PathBuf};

/// Whose sources are looked at.
const FOLDERS: [&str; 7] =
    ["server/src", "peer/src", "cold/src", "bucket/src", "client/src", "python/src", "python/kvarts"];
/// Whose limits end some of their waits.
const BELOW: [&str; 3] = ["store/src", "contract/src", "wire/src"];
/// What waits, wherever it stands.
const WAITS: [&str; 28] = [
    ".recv()",
    ".blocking_recv(",
    ".blocking_send(",
    ".wait(",
    ".wait_while(",
    ".join()",
    ".join_next()",
    ".notified()",
    ".changed()",
    ".wait_for(",
    ".closed()",
    ".acquire()",
    ".acquire_owned()",
    ".acquire_many",
    ".accept()",
    ".reserve()",
    ".readable()",
    ".writable()",
    "Stream::connect(",
    "net::connect(",
    "lookup_host(",
    "spawn_blocking(",
    "poll_fn(",
    "future::pending()",
    "block_on(",
    "serve_with_incoming",
    ".collect().await",
    ".try_collect().await",
];
/// What waits where it is awaited in the same line.
const AWAITED: [&str; 22] = [
    ".lock()",
    ".read()",
    ".write()",
    ".read(&mut ",
    ".read_exact(",
    ".read_to_end(",
    ".write_all(",
    ".flush()",
    ".shutdown()",
    ".message()",
    ".next()",
    ".try_next()",
    ".send(",
    ".connect(",
    ".ready()",
    ".unary(",
    "client.",
    "client.clone()",
    "reads().",
    "store.",
    "store().",
    "(request)",
];
/// What only begins a wait where it is given a name: that name is awaited later.
const BEGUN: [&str; 6] =
    [".notified()", ".changed()", ".wait_for(", ".closed()", "spawn_blocking(", "poll_fn("];
/// What looks like a wait and is none: calls that answer at once.
const NO_WAITS: [&str; 5] = [
    // How long the next attempt is put off.
    "self.wait(attempt",
    // Takes a place among those that wait.
    "self.wait(tenant, ",
    "self.tiles.wait(",
    // How many bytes may be read now.
    "access().readable()",
    // The answer for vLLM.
    "job.result()",
];
/// What waits in Python.
const IN_PYTHON: [&str; 10] = [
    ".wait(",
    ".result(",
    ".get()",
    ".join()",
    ".acquire(",
    "await asyncio.",
    "run_in_executor(",
    "time.sleep(",
    ".synchronize(",
    ".shutdown(wait=True",
];
/// What has a deadline by how it is called.
const LIMITED: [&str; 7] =
    ["timeout(", "timeout_at(", "in_time(", "wait_timeout", "answered(", ".ask(", "ask_again("];

/// A source, as far as it is no test.
struct Source {
    name: String,
    lines: Vec<String>,
}

impl Source {
    fn new(name: &str, text: &str) -> Self {
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        Self { name: name.to_owned(), lines: text.lines().map(str::to_owned).collect() }
    }

    fn is_python(&self) -> bool {
        self.name.ends_with(".py")
    }

    /// A line's code and its comment.
    fn parts(&self, at: usize) -> (&str, &str) {
        let line = self.lines[at].as_str();
        let (begins, sign) = if self.is_python() { ("# ", '#') } else { ("// ", '/') };
        match line.trim_start().starts_with(sign) {
            true => ("", line.trim_start()),
            false => line.find(begins).map_or((line, ""), |begin| line.split_at(begin)),
        }
    }

    /// What the comment of a line says of the end of a wait.
    fn mark(&self, at: usize) -> Option<&str> {
        let sign = if self.is_python() { "# ends: " } else { "// ends: " };
        self.parts(at).1.strip_prefix(sign)
    }

    /// The line with the mark of a wait: its own, or one of the comment right above it.
    fn marked_at(&self, at: usize) -> Option<usize> {
        let above = (0..at)
            .rev()
            .take_while(|above| self.parts(*above).0.trim().is_empty() && !self.parts(*above).1.is_empty());
        std::iter::once(at).chain(above).find(|at| self.mark(*at).is_some())
    }

    fn waits(&self, at: usize) -> bool {
        let code = self.parts(at).0;
        let has = |some: &[&str]| some.iter().any(|wait| code.contains(wait));
        if has(&NO_WAITS) || code.trim_start().starts_with("def ") {
            return false;
        }
        if self.is_python() {
            return has(&IN_PYTHON);
        }
        let is_awaited = code.contains(".await");
        let is_begun = code.trim_start().starts_with("let ") && !is_awaited && has(&BEGUN);
        has(&WAITS) && !is_begun
            || is_awaited && has(&AWAITED)
            || awaits_a_name(code)
            || selects_a_name(code)
            || polls_descriptors(code)
    }

    fn has_limit(&self, at: usize) -> bool {
        let is_limited = |at: usize| LIMITED.iter().any(|limit| self.parts(at).0.contains(limit));
        !self.is_python() && (at.saturating_sub(2)..=at).any(is_limited)
    }

    /// What is wrong with its waits and their marks.
    fn complaints(&self) -> Vec<String> {
        let (mut found, mut used) = (Vec::new(), Vec::new());
        let mut complain = |at: usize, what: &str| {
            found.push(format!("{}:{}: {what}: {}", self.name, at + 1, self.lines[at].trim()))
        };
        for at in (0..self.lines.len()).filter(|at| self.waits(*at)) {
            match self.marked_at(at) {
                Some(mark) => used.push(mark),
                None if self.has_limit(at) => {}
                None => complain(at, "a wait that does not say what ends it (`ends: `)"),
            }
        }
        for at in 0..self.lines.len() {
            match self.mark(at) {
                Some(_) if !used.contains(&at) => complain(at, "there is no wait here"),
                Some(mark) if mark.split_whitespace().count() < 3 => {
                    complain(at, "who or what ends it, and when")
                }
                _ => {}
            }
        }
        found
    }

    /// Names in backticks in its marks.
    fn named(&self) -> Vec<String> {
        let marks = (0..self.lines.len()).filter_map(|at| self.mark(at));
        marks.flat_map(|mark| mark.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
    }
}

/// Whether a line awaits what an earlier one has begun.
fn awaits_a_name(code: &str) -> bool {
    code.match_indices(".await").any(|(at, _)| is_a_name(&code[..at]))
}

/// Whether a line is the arm of a `select!` that does.
fn selects_a_name(code: &str) -> bool {
    let arm = code.split_once(" => ").map(|(arm, _)| arm.split(", if ").next().unwrap_or_default());
    let awaited = arm.and_then(|arm| arm.split_once(" = ")).map(|(_, awaited)| awaited);
    awaited
        .is_some_and(|awaited| !awaited.contains(' ') && is_a_name(awaited) || awaited.starts_with("&mut "))
}

/// Whether code ends with a name, and not with a call.
fn is_a_name(code: &str) -> bool {
    let mutable = code.strip_suffix(')').and_then(|code| code.rsplit_once("(&mut "));
    let code = match mutable {
        Some((before, name)) if !before.ends_with(|last: char| last.is_alphanumeric() || last == '_') => name,
        _ => code,
    };
    let name = code.rsplit(|one: char| !one.is_alphanumeric() && one != '_' && one != '.').next();
    name.is_some_and(|name| name.starts_with(|first: char| first.is_alphabetic()))
}

/// Whether a line waits for descriptors in the kernel.
fn polls_descriptors(code: &str) -> bool {
    code.match_indices("poll(&mut ").any(|(at, _)| {
        let before = &code[..at];
        !before.ends_with("fn ") && !before.ends_with(['.', '_'])
    })
}

fn sources(of: &[&str]) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders: Vec<PathBuf> = of.iter().map(|folder| root.join(folder)).collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(&root).unwrap().display().to_string();
            let is_source = [".rs", ".py"].iter().any(|end| name.ends_with(end));
            if path.is_dir() {
                folders.push(path);
            } else if is_source && !is_of_tests(&name) {
                found.push(Source::new(&name, &std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(found.len() > 20, "the sources were not found");
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

/// Doubles and scenes of tests that are files of their own.
fn is_of_tests(name: &str) -> bool {
    ["/tests/", "/testing/", "tests.rs", "/scenes.rs"].iter().any(|part| name.contains(part))
}

#[test]
fn each_wait_has_an_end() {
    let sources = sources(&FOLDERS);
    let complaints: Vec<String> = sources.iter().flat_map(Source::complaints).collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn what_ends_a_wait_is_there() {
    let (sources, others) = (sources(&FOLDERS), sources(&BELOW));
    let is_there = |name: &str| {
        sources
            .iter()
            .chain(&others)
            .any(|source| (0..source.lines.len()).any(|at| source.parts(at).0.contains(name)))
    };
    let gone: Vec<String> = sources
        .iter()
        .flat_map(|source| source.named().into_iter().map(|name| (source.name.clone(), name)))
        .filter(|(_, name)| !is_there(name))
        .map(|(source, name)| format!("{source}: `{name}` ends a wait there, and is nowhere"))
        .collect();
    assert!(gone.is_empty(), "\n{}", gone.join("\n"));
}

#[test]
fn a_bare_wait_is_found_and_one_with_an_end_is_not() {
    let complaints = |name: &str, text: &str| Source::new(name, text).complaints().len();
    let bare = [
        "    let event = events.recv().await;",
        "    state = changed.wait(state).unwrap();",
        "    let done = tokio::task::spawn_blocking(work).await;",
        "    let stream = UnixStream::connect(path)?;",
        "    let turn = self.turn.lock().await;",
        "    while let Some(one) = stream.next().await {",
        "    answer.await.ok()",
        "    (&mut part).await.ok()",
        "    let _ = poll(&mut [PollFd::new(stream, PollFlags::IN)], None);",
        "    thread.join().unwrap();",
        "    room = to.reserve() => room,",
        "    served = &mut serving => served?,",
        "    () = late, if is_late => return,",
        "    Ok(self.client.clone().feed(Request::new(messages)).await?.into_inner())",
    ];
    for wait in bare {
        assert_eq!(complaints("a.rs", wait), 1, "{wait}");
        assert_eq!(complaints("a.rs", &format!("{wait} // ends: its sender is dropped")), 0, "{wait}");
        assert_eq!(complaints("a.rs", &format!("// ends: its sender is dropped\n{wait}")), 0, "{wait}");
        assert_eq!(complaints("a.rs", &format!("// ends: its sender is\n// dropped\n{wait}")), 0, "{wait}");
        assert_eq!(complaints("a.rs", &format!("// ends: its sender is dropped\n\n{wait}")), 2, "{wait}");
        assert_eq!(complaints("a.rs", &format!("{wait} // ends: soon")), 1, "{wait}");
    }
    for fine in [
        "    let event = tokio::time::timeout(LIMIT, events.recv()).await;",
        "    let answer =\n        in_time(runner, LIMIT, answer).await;",
        "    let waited = changed.wait_timeout(state, LIMIT);",
        "    let mut state = self.state.lock().unwrap();",
        "    pub fn poll(&mut self) {}",
        "    let answer = self.answer(asked).await;",
        "    let changed = self.changed.notified();",
        "    let wait = self.wait(attempt);",
        "    future::poll_immediate(&mut reading).await",
        "    // It waits: events.recv().await",
        "#[cfg(test)]\nmod tests {\n    events.recv().await",
    ] {
        assert_eq!(complaints("a.rs", fine), 0, "{fine}");
    }
    for wait in
        ["    self.over.wait(left)", "    return self._work.get()", "    return await asyncio.shield(asked)"]
    {
        assert_eq!(complaints("a.py", wait), 1, "{wait}");
        assert_eq!(complaints("a.py", &format!("{wait}  # ends: `close` puts the last item")), 0, "{wait}");
    }
    assert_eq!(
        complaints("a.rs", "// ends: its sender is dropped\nlet one = 1;"),
        1,
        "a mark without a wait"
    );
    assert_eq!(Source::new("a.rs", "a.recv(); // ends: 5 s, `LOOK`").named(), ["LOOK"]);
}
