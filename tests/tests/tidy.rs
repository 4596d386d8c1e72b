//! House rules that a script can check, so that reviews need not.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::path::{Path, PathBuf};

/// Rooms whose sources are held to the rules.
const ROOMS: [&str; 22] = [
    "layout",
    "contract",
    "store",
    "gpudirect",
    "wire",
    "client",
    "server",
    "terminal",
    "bench",
    "kvarts",
    "fsck",
    "planner",
    "cluster",
    "peer",
    "cold",
    "bucket",
    "simulator",
    "schedules",
    "tests",
    "python",
    "c",
    "fuzz",
];
/// Words that stand where a comment should name who or what is meant, or how many.
const VAGUE: [&[&str]; 7] = [
    &["whoever"],
    &["nobody"],
    &["somebody"],
    &["anybody"],
    &["so", "many"],
    &["whose", "ever"],
    &["what", "was", "not"],
];
/// The same in texts for users, and verbs of people where a machine does something.
const VAGUE_TEXTS: [&[&str]; 4] =
    [&["ask", "again"], &["broken", "off"], &["would", "not", "give"], &["stands", "twice"]];
/// Rooms whose string literals are texts for users: errors, logs, metrics, outputs.
const TEXT_ROOMS: [&str; 11] =
    ["bucket", "c", "client", "cold", "contract", "kvarts", "peer", "server", "store", "terminal", "wire"];
/// Pages of the book, but for one that names a test by one of these words.
const USER_PAGES: [&str; 34] = [
    "README.md",
    "docs/CLUSTER.md",
    "docs/COLD.md",
    "docs/EVENTS.md",
    "docs/EXPORT.md",
    "docs/FAULT_MODEL.md",
    "docs/FORMAT.md",
    "docs/GLOSSARY.md",
    "docs/GPU.md",
    "docs/LOCAL.md",
    "docs/SERVER.md",
    "docs/c.md",
    "docs/comparison.md",
    "docs/concepts.md",
    "docs/engines.md",
    "docs/grpc.md",
    "docs/guides/cold.md",
    "docs/guides/kubernetes.md",
    "docs/guides/one-node.md",
    "docs/guides/planning.md",
    "docs/introduction.md",
    "docs/models.md",
    "docs/operating.md",
    "docs/quickstart.md",
    "docs/reference/commands.md",
    "docs/reference/configuration.md",
    "docs/reference/errors.md",
    "docs/reference/json.md",
    "docs/reference/metrics.md",
    "docs/runbook.md",
    "docs/security.md",
    "docs/upgrade.md",
    "docs/using.md",
    "python/README.md",
];
/// Lines of a source file, its tests included. Past it a file is several rooms.
const FILE_LINES_MAX: usize = 1000;
/// Lines of a function, from its `fn` to its closing brace.
const FUNCTION_LINES_MAX: usize = 75;
/// The only places that may hold `unsafe`: each fences one thing that Rust cannot see.
const UNSAFE_FILES: &[&str] = &[
    // Looks at memory that a C program points to, and takes handles back, by what the header promises.
    "c/src/said.rs",
    // Regions over memory of a C program, and a descriptor that it lends for one call.
    "c/src/memory.rs",
    // Regions over the memory in which a C program's emulated device has its pages.
    "c/src/gpu.rs",
    // Count what a test allocates, and pass every call on.
    "cluster/tests/session_memory.rs",
    "fsck/tests/memory.rs",
    "tests/tests/read_allocations.rs",
    // The CUDA driver's entry points, looked up by name.
    "gpudirect/src/device/cuda/calls.rs",
    // Calls into the CUDA driver, whose handles live exactly as long as their owners.
    "gpudirect/src/device/cuda/sys.rs",
    "gpudirect/src/device/cuda/sys/events.rs",
    // Calls into libcufile, loaded here, whose handles live exactly as long as their owners.
    "gpudirect/src/device/cuda/files.rs",
    // Maps descriptors that it owns: the emulated device's memory.
    "gpudirect/src/device/emulated/memory.rs",
    // Calls the driver by name, as short as can be: what our copies are measured against.
    "gpudirect/tests/driver/bare.rs",
    // Calls what the stand-in for NVIDIA's libraries exports.
    "gpudirect/tests/driver/standin.rs",
    // Looks at Python's buffers by their C structure, and makes regions of memory that they keep.
    "python/src/buffer.rs",
    // A descriptor that was duplicated in the line before.
    "python/src/client.rs",
    // Looks at tensors by DLPack's C structure.
    "python/src/dlpack.rs",
    // Filled memory of a request as bytes to send, to which no code writes any more.
    "server/src/state/memory.rs",
    // A socket option that the safe interface does not have.
    "server/src/local/foreign.rs",
    // Registers sockets that it owns.
    "server/src/local/line.rs",
    // Makes that promise for a window of a read that the engine has announced.
    "server/src/grpc/read.rs",
    // Maps files in memory at addresses that it reserved itself.
    "contract/src/buffers/aligned.rs",
    // Every access to memory that the kernel writes behind the compiler's back.
    "contract/src/buffers/buf.rs",
    // Memory that the kernel writes behind the compiler's back.
    "contract/src/buffers/region.rs",
    // Slices of checked ranges as the vectors that preadv and pwritev take.
    "store/src/io/pool.rs",
    // Pushing entries whose buffers the slot table owns, and waiting in `enter`.
    "store/src/io/ring.rs",
    // Registering a region that lives as long as its place in the kernel's table.
    "store/src/io/ring_buffers.rs",
    // Checked ranges as the vectors that recvmsg and sendmsg take.
    "contract/src/buffers/stream.rs",
    // Reads and writes another process's memory by its file.
    "contract/src/buffers/foreign.rs",
    // Maps a file in memory that cannot be shortened.
    "contract/src/buffers/shared.rs",
    // One view between two names of the same C structure.
    "store/src/io/ring_setup.rs",
    // Reads an entry's bytes to see which flags it carries.
    "store/src/io/ring_tests.rs",
    // A ring that is told of pages of a region which lives as long as it does.
    "tests/tests/serve_local_late.rs",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = ROOMS.iter().map(|room| root().join(room)).collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    assert!(found.len() > 10, "the sources were not found");
    found
}

/// Complaints, one a line, as one assertion: all are seen at once.
fn expect_none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn every_file_says_what_it_is_for() {
    expect_none(
        sources()
            .iter()
            .filter(|(_, text)| !text.starts_with("//! "))
            .map(|(name, _)| format!("{name}: begins without a module comment"))
            .collect(),
    );
}

#[test]
fn no_file_is_several_rooms() {
    expect_none(
        sources()
            .iter()
            .map(|(name, text)| (name, text.lines().count()))
            .filter(|&(_, lines)| lines > FILE_LINES_MAX)
            .map(|(name, lines)| format!("{name}: {lines} lines, at most {FILE_LINES_MAX}"))
            .collect(),
    );
}

#[test]
fn no_function_is_longer_than_a_screen() {
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        let mut open: Option<(usize, usize, String)> = None;
        for (number, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let head = line.trim_start();
            let is_function = [
                "fn ",
                "pub fn ",
                "pub(crate) fn ",
                "pub(super) fn ",
                "async fn ",
                "pub async fn ",
                "extern \"C\" fn ",
            ]
            .iter()
            .any(|start| head.starts_with(start));
            match &open {
                None if is_function && !head.ends_with(';') && !head.ends_with('}') => {
                    open = Some((number, indent, head.to_owned()));
                }
                Some((start, depth, signature)) if indent == *depth && head.starts_with('}') => {
                    let lines = number + 1 - start;
                    if lines > FUNCTION_LINES_MAX {
                        complaints.push(format!("{name}:{}: {lines} lines: {signature}", start + 1));
                    }
                    open = None;
                }
                _ => {}
            }
        }
    }
    expect_none(complaints);
}

#[test]
fn nothing_is_left_half_done() {
    let marks =
        ["TO".to_owned() + "DO", "FIX".to_owned() + "ME", "XX".to_owned() + "X:", "HA".to_owned() + "CK"];
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            for mark in marks.iter().filter(|mark| line.contains(mark.as_str())) {
                complaints.push(format!("{name}:{}: {mark}", number + 1));
            }
        }
    }
    expect_none(complaints);
}

#[test]
fn comments_name_their_subjects() {
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        // Those of the comment so far: a phrase may go on in the next line.
        let mut words: Vec<String> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else {
                words.clear();
                continue;
            };
            let before = words.len();
            let here =
                comment.split(|one: char| !one.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
            words.extend(here.map(str::to_ascii_lowercase));
            for phrase in VAGUE {
                let first = before.saturating_sub(phrase.len() - 1);
                if words[first..].windows(phrase.len()).any(|some| some == phrase) {
                    complaints.push(format!("{name}:{}: \"{}\"", number + 1, phrase.join(" ")));
                }
            }
        }
    }
    expect_none(complaints);
}

/// The string literals of a source's own part: not in its comments, not in its tests.
fn literals(source: &str) -> Vec<String> {
    let own = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let code: Vec<&str> = own.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n").replace("\\\"", "'").replace("'\"'", "");
    code.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The phrases in a text that a text for users must not have.
fn vague(text: &str) -> Vec<String> {
    let here = text.split(|one: char| !one.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let words: Vec<String> = here.map(str::to_ascii_lowercase).collect();
    let phrases = VAGUE.iter().chain(&VAGUE_TEXTS);
    let found = phrases.filter(|phrase| words.windows(phrase.len()).any(|some| some == **phrase));
    found.map(|phrase| phrase.join(" ")).collect()
}

#[test]
fn a_text_without_a_subject_is_found() {
    let source = "// \"nobody\"\nfn f() { say(\"the server: ask \\\n     again\", '\"', \"a \\\"b\\\"\"); }\n#[cfg(test)]\nmod tests { \"whoever\" }\n";
    let found = literals(source);
    assert_eq!(found, ["the server: ask \\\n     again", "a 'b'"]);
    assert_eq!(vague(&found[0]), ["ask again"]);
    assert_eq!(vague("Whoever reads so\nmany pages"), ["whoever", "so many"]);
    assert_eq!(vague("the read failed: retry"), Vec::<String>::new());
}

#[test]
fn texts_for_users_name_their_subjects() {
    let mut complaints = Vec::new();
    let mut seen = 0;
    for (name, text) in sources() {
        let room = name.split('/').next().unwrap_or_default();
        if !TEXT_ROOMS.contains(&room) || !name.contains("/src/") || name.contains("test") {
            continue;
        }
        for literal in literals(&text) {
            seen += 1;
            complaints
                .extend(vague(&literal).iter().map(|phrase| format!("{name}: \"{phrase}\" in {literal:?}")));
        }
    }
    assert!(seen > 4000, "the texts were not found: {seen}");
    for page in USER_PAGES {
        let text = std::fs::read_to_string(root().join(page)).unwrap_or_else(|why| panic!("{page}: {why}"));
        for part in text.split("\n\n") {
            let begin: String = part.chars().take(80).collect();
            complaints.extend(vague(part).iter().map(|phrase| format!("{page}: \"{phrase}\" in {begin:?}")));
        }
    }
    expect_none(complaints);
}

#[test]
fn unsafe_stays_inside_its_fences() {
    let word = "uns".to_owned() + "afe ";
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        if UNSAFE_FILES.contains(&name.as_str()) || name.contains("/benches/") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if [format!("{word}{{"), format!("{word}fn"), format!("{word}impl")]
                .iter()
                .any(|use_| code.contains(use_))
            {
                complaints.push(format!("{name}:{}: unsafe outside its fence", number + 1));
            }
        }
    }
    expect_none(complaints);
}

#[test]
fn sources_are_plain_ascii() {
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_ascii()) {
            complaints.push(format!("{name}:{}: {}", number + 1, line.trim()));
        }
    }
    expect_none(complaints);
}

/// A file that is no module of a target would be compiled by nothing, and its tests would not run.
#[test]
fn every_file_of_tests_is_a_part_of_a_target() {
    let mut complaints = Vec::new();
    for room in ["tests", "kvarts", "peer", "bucket", "simulator"] {
        let manifest = std::fs::read_to_string(root().join(room).join("Cargo.toml")).unwrap();
        let folder = root().join(room).join("tests");
        let (mut names, mut text) = (Vec::new(), String::new());
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let is_source = path.extension().is_some_and(|extension| extension == "rs");
            if is_source || path.join("mod.rs").exists() {
                names.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
            }
            if is_source {
                text.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
        assert!(names.len() >= 5, "the tests of {room} were not found");
        for name in names {
            let declared = text.lines().any(|line| line == format!("mod {name};"));
            if !declared && !manifest.contains(&format!("path = \"tests/{name}.rs\"")) {
                complaints.push(format!("{room}/tests: `{name}` is in no target of {room}/Cargo.toml"));
            }
        }
    }
    expect_none(complaints);
}

/// rustdoc reads a whole crate to find that it has no example to try: where that was left out, there must be none.
#[test]
fn no_example_in_documentation_goes_untried() {
    let tried = |room: &str| {
        let manifest = std::fs::read_to_string(root().join(room).join("Cargo.toml")).unwrap();
        !manifest.contains("doctest = false")
    };
    let untried: Vec<&str> = ROOMS.into_iter().filter(|room| !tried(room)).collect();
    assert!(untried.len() > 10, "the manifests were not found");
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        if !untried.iter().any(|room| name.starts_with(&format!("{room}/src/"))) {
            continue;
        }
        let mut is_open = false;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim_start();
            let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            let Some(kind) = comment.and_then(|comment| comment.trim_start().strip_prefix("```")) else {
                continue;
            };
            let is_prose = ["text", "toml", "console", "json"].contains(&kind);
            if !is_open && !is_prose {
                complaints
                    .push(format!("{name}:{}: an example, and the crate has `doctest = false`", number + 1));
            }
            is_open = !is_open;
        }
    }
    expect_none(complaints);
}
