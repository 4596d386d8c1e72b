//! Rooms of the store: no circle of imports between them, none too large, and no type that has methods elsewhere.
//!
//! A room is a folder of `store/src/engine`, or another module of the store. An arrow goes from a room to each room
//! that a path in its code names (`crate::`, `super::`; tests and comments do not count). A method that stands in
//! another room than its type would be an arrow that no path shows, so there is none.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::circles::circles;

/// Lines of code of a room, without tests, comments and empty lines.
const ROOM_LINES_MAX: usize = 4000;

/// What a room's code needs of other rooms: from, to, and one file that needs it.
type Arrows = BTreeMap<(String, String), String>;

/// The product code of a file: without tests, comments, and what stands in strings.
fn product(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let mut item = lines.next().unwrap_or_default();
            while item.trim().starts_with("#[") {
                item = lines.next().unwrap_or_default();
            }
            let indent = item.len() - item.trim_start().len();
            let is_over = |line: &str| {
                let line = line.trim_end();
                let depth = line.len() - line.trim_start().len();
                line.ends_with(';') || line.ends_with(',') || (depth == indent && line.ends_with('}'))
            };
            let is_block = item.trim_end().ends_with('{') && !item.contains("use ");
            let ends = |line: &str| {
                if is_block { line == format!("{}}}", " ".repeat(indent)) } else { is_over(line) }
            };
            while !ends(item) {
                let Some(next) = lines.next() else { break };
                item = next;
            }
            continue;
        }
        let line = without_comment(line);
        if !line.trim().is_empty() {
            code.push_str(&line);
            code.push('\n');
        }
    }
    code
}

/// A line without its comment, and with empty strings.
fn without_comment(line: &str) -> String {
    let (mut kept, mut chars, mut quoted) = (String::new(), line.chars().peekable(), false);
    while let Some(one) = chars.next() {
        match (quoted, one) {
            (true, '\\') => drop(chars.next()),
            (_, '"') => quoted = !quoted,
            (true, _) => {}
            (false, '/') if chars.peek() == Some(&'/') => break,
            (false, _) => kept.push(one),
        }
    }
    kept
}

fn is_word(one: char) -> bool {
    one.is_alphanumeric() || one == '_'
}

/// All paths of a tree of uses: `a::{b, c::d}` is `a::b` and `a::c::d`. Says where the tree ends.
fn tree(text: &str, before: &[String], paths: &mut Vec<Vec<String>>) -> usize {
    let mut path = before.to_vec();
    let mut at = 0;
    loop {
        let word: String = text[at..].chars().take_while(|one| is_word(*one)).collect();
        at += word.len();
        if !word.is_empty() {
            path.push(word);
        }
        if !text[at..].starts_with("::") {
            paths.push(path);
            return at;
        }
        at += 2;
        if text[at..].starts_with('{') {
            at += 1;
            loop {
                at += text[at..].len() - text[at..].trim_start_matches([' ', '\n', ',']).len();
                if text[at..].starts_with('}') || at >= text.len() {
                    return at + 1;
                }
                let len = tree(&text[at..], &path, paths);
                at += len + text[at + len..].find([',', '}']).unwrap_or(text.len() - at - len);
            }
        }
    }
}

/// The paths that a file's code names from the crate's root, without `crate`.
fn paths(code: &str, module: &[String]) -> Vec<Vec<String>> {
    let mut named = Vec::new();
    let mut at = 0;
    while let Some(found) = ["crate::", "super::"].iter().filter_map(|start| code[at..].find(start)).min() {
        let start = at + found;
        let is_inside = code[..start].ends_with(|one| is_word(one) || one == ':' || one == '$');
        if is_inside {
            at = start + 5;
            continue;
        }
        at = start + tree(&code[start..], &[], &mut named).max(5);
        at = at.min(code.len());
    }
    let mut paths: Vec<_> = named.iter().filter_map(|path| from_root(path, module)).collect();
    // What a module takes from its own children.
    for line in code.lines() {
        let Some(used) = line.trim_start_matches("pub ").strip_prefix("use ") else { continue };
        let below = tree_of(used).into_iter().map(|path| module.iter().cloned().chain(path).collect());
        paths.extend(below);
    }
    paths
}

fn tree_of(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    tree(text, &[], &mut paths);
    paths
}

fn from_root(path: &[String], module: &[String]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    if first == "crate" {
        return Some(rest.to_vec());
    }
    let ups = path.iter().take_while(|word| *word == "super").count();
    let base = module.get(..module.len().checked_sub(ups)?)?;
    Some(base.iter().chain(&path[ups..]).cloned().collect())
}

/// The room that a path from the crate's root leads to; `rooms` are those that there are.
fn room_of(path: &[String], rooms: &BTreeSet<String>) -> Option<String> {
    let first = path.first()?;
    let inner = path.get(1).map(|second| format!("{first}/{second}"));
    inner.filter(|inner| rooms.contains(inner)).or_else(|| rooms.contains(first).then(|| first.clone()))
}

/// The module of a file, from its path below `src`.
fn module_of(file: &str) -> Vec<String> {
    let mut module: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| last == "mod" || last == "lib") {
        module.pop();
    }
    module
}

/// Rooms, with the product code of their files: folders of `engine`, and top-level modules.
fn rooms(files: &[(String, String)]) -> BTreeSet<String> {
    let mut rooms = BTreeSet::new();
    for (file, _) in files {
        let module = module_of(file);
        let Some(first) = module.first() else { continue };
        rooms.insert(first.clone());
        if let ("engine", Some(second)) = (first.as_str(), module.get(1)) {
            rooms.insert(format!("engine/{second}"));
        }
    }
    rooms
}

fn arrows(files: &[(String, String)], rooms: &BTreeSet<String>) -> Arrows {
    let mut arrows = Arrows::new();
    for (file, code) in files {
        let module = module_of(file);
        let Some(from) = room_of(&module, rooms) else { continue };
        for to in paths(code, &module).iter().filter_map(|path| room_of(path, rooms)) {
            if from != to {
                arrows.entry((from.clone(), to)).or_insert_with(|| file.clone());
            }
        }
    }
    arrows
}

/// Circles as complaints: the rooms, and each arrow between them with a file that needs it.
fn complaints(arrows: &Arrows) -> Vec<String> {
    let mut complaints = Vec::new();
    for circle in circles(arrows) {
        complaints.push(format!("a circle of rooms: {}", Vec::from_iter(circle.clone()).join(", ")));
        for ((from, to), file) in arrows {
            if circle.contains(from) && circle.contains(to) {
                complaints.push(format!("    {from} -> {to}, for one in {file}"));
            }
        }
    }
    complaints
}

/// Methods that stand in another room than their type.
fn methods_elsewhere(files: &[(String, String)], rooms: &BTreeSet<String>) -> Vec<String> {
    let mut homes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut impls = Vec::new();
    let word = |text: &str| text.chars().take_while(|one| is_word(*one)).collect::<String>();
    for (file, code) in files {
        let Some(room) = room_of(&module_of(file), rooms) else { continue };
        for line in code.lines() {
            let bare =
                if line.starts_with("pub") { line.split_once(' ').map_or("", |it| it.1) } else { line };
            for kind in ["struct ", "enum ", "union ", "trait "] {
                if let Some(rest) = bare.strip_prefix(kind) {
                    homes.entry(word(rest)).or_default().insert(room.clone());
                }
            }
            if let Some(rest) = line.strip_prefix("impl").filter(|rest| !rest.contains(" for ")) {
                let rest =
                    if rest.starts_with('<') { rest.split_once("> ").map_or("", |it| it.1) } else { rest };
                impls.push((word(rest.trim()), room.clone(), file.clone()));
            }
        }
    }
    let stray = impls.into_iter().filter_map(|(name, room, file)| {
        let homes = homes.get(&name)?;
        let home = homes.first().filter(|_| !homes.contains(&room))?;
        Some(format!("{file}: methods of {name}, which lives in {home}"))
    });
    stray.collect()
}

/// How many lines of code each room has.
fn lines_of(files: &[(String, String)]) -> BTreeMap<String, usize> {
    let rooms = rooms(files);
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    for (file, code) in files {
        let room = room_of(&module_of(file), &rooms).unwrap_or_default();
        *lines.entry(room).or_default() += code.lines().count();
    }
    lines
}

/// The product code of the store's files.
fn files() -> Vec<(String, String)> {
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../store/src");
    let (mut files, mut folders) = (Vec::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(&root).unwrap().display().to_string();
            let stem = name.trim_end_matches(".rs");
            if ["tests", "test_io", "conformance"].iter().any(|test| stem.ends_with(test)) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") {
                files.push((name, product(&std::fs::read_to_string(&path).unwrap())));
            }
        }
    }
    files.sort();
    assert!(files.len() > 10, "the sources were not found");
    files
}

/// All at once are seen.
fn expect_none(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn rooms_of_the_store_make_no_circle() {
    let files = files();
    let found = arrows(&files, &rooms(&files));
    expect_none(&complaints(&found));
}

#[test]
fn devices_know_nothing_of_the_runtime() {
    let files = files();
    let found = arrows(&files, &rooms(&files));
    let back = found.get(&("io".to_owned(), "rt".to_owned()));
    assert_eq!(back, None, "io uses rt");
}

#[test]
fn methods_stand_in_the_room_of_their_type() {
    let files = files();
    expect_none(&methods_elsewhere(&files, &rooms(&files)));
}

#[test]
fn no_room_is_several_rooms() {
    let lines = lines_of(&files());
    println!("{lines:#?}");
    let large = lines.iter().filter(|(_, lines)| **lines > ROOM_LINES_MAX);
    expect_none(&large.map(|(room, lines)| format!("{room}: {lines} lines of code")).collect::<Vec<_>>());
}

#[test]
fn the_lines_of_a_room_are_those_of_all_its_files() {
    let lines = lines_of(&made_up(&[
        ("engine/log/mod.rs", "//! What it is.\n\nuse std::fs;\n"),
        (
            "engine/log/deep/er.rs",
            "fn a() {\n    // Nothing.\n}\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n",
        ),
        ("engine/mod.rs", "mod log;\n"),
        ("io.rs", ""),
    ]));
    let line = |room: &str, lines| (room.to_owned(), lines);
    assert_eq!(
        lines.into_iter().collect::<Vec<_>>(),
        [line("engine", 1), line("engine/log", 3), line("io", 0)]
    );
}

/// A made-up store.
fn made_up(files: &[(&str, &str)]) -> Vec<(String, String)> {
    files.iter().map(|(file, text)| ((*file).to_owned(), product(text))).collect()
}

fn complaints_of(texts: &[(&str, &str)]) -> Vec<String> {
    let files = made_up(texts);
    complaints(&arrows(&files, &rooms(&files)))
}

#[test]
fn a_circle_is_found_through_any_kind_of_path() {
    let straight = [("engine/log/mod.rs", "use crate::io::Disk;"), ("io.rs", "use std::fs;")];
    assert_eq!(complaints_of(&straight), Vec::<String>::new());
    for back in [
        "use crate::engine::log::Log;",
        "use crate::{engine::{log::{self, Log}}, rt};",
        "use super::engine::log;",
        "fn of(_: &crate::engine::log::Log) {}",
    ] {
        let found = complaints_of(&[straight[0], ("io.rs", back)]);
        let expected = [
            "a circle of rooms: engine/log, io",
            "    engine/log -> io, for one in engine/log/mod.rs",
            "    io -> engine/log, for one in io.rs",
        ];
        assert_eq!(found, expected, "{back}");
    }
}

#[test]
fn what_a_house_shows_of_its_rooms_is_an_arrow_to_them() {
    let found = complaints_of(&[
        ("engine/mod.rs", "mod log;\npub use log::{Log, Room};"),
        ("engine/log/mod.rs", "use crate::engine::Room;"),
    ]);
    assert_eq!(found.first().unwrap(), "a circle of rooms: engine, engine/log");
}

#[test]
fn a_long_circle_is_found_and_what_hangs_on_it_is_not_named() {
    let found = complaints_of(&[
        ("a.rs", "use crate::b::B;\nuse crate::d::D;"),
        ("b/deep/er.rs", "use super::super::super::c::C;"),
        ("b/mod.rs", "mod deep;"),
        ("c.rs", "use crate::{\n    a::A,\n    d::{D, E as F},\n};"),
        ("d.rs", ""),
    ]);
    assert_eq!(found.first().unwrap(), "a circle of rooms: a, b, c");
    assert_eq!(found.len(), 4, "{found:?}");
}

#[test]
fn tests_comments_and_strings_are_no_arrows() {
    let quiet = "/// See [`B`](crate::b::B).\nfn a() -> &'static str { \"crate::b::B\" } // crate::b\n\
        #[cfg(test)]\nuse crate::b::{\n    B,\n};\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\nuse crate::c::C;";
    let texts = [("a.rs", quiet), ("b.rs", "use crate::a::a;"), ("c.rs", "")];
    assert_eq!(complaints_of(&texts), Vec::<String>::new());
    let files = made_up(&texts);
    let named: Vec<_> = arrows(&files, &rooms(&files)).into_keys().collect();
    let arrow = |from: &str, to: &str| (from.to_owned(), to.to_owned());
    assert_eq!(named, [arrow("a", "c"), arrow("b", "a")]);
}

#[test]
fn a_method_in_another_room_is_found() {
    let texts = [
        ("engine/log/mod.rs", "pub(crate) struct Log;\nimpl Log {}"),
        ("engine/space/room.rs", "impl Log {\n}\nimpl<'a> Own<'a> {}\nimpl Drop for Log {}"),
        ("engine/space/mod.rs", "struct Own<'a>(&'a u8);"),
    ];
    let files = made_up(&texts);
    let found = methods_elsewhere(&files, &rooms(&files));
    assert_eq!(found, ["engine/space/room.rs: methods of Log, which lives in engine/log"]);
}
