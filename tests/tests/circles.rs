//! No circle of files in any crate of the house: a file uses only files that do not use it, at once or through others.
//!
//! An arrow goes from a file to the file that defines what a path in its code names; a name that a module only shows on
//! (`pub use`) leads to the file that defines it. Tests and comments do not count.
//!
//! A module and the modules inside it are one thing in several files, and may use each other. So a circle is one that
//! stands with only one direction of those arrows: down to what a module is made of, or up to what it is a part of.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Circles that there are, each with the reason why it stays.
const KNOWN: [(&[&str], &str); 1] = [(
    &[
        "simulator/src/cluster/batch.rs",
        "simulator/src/cluster/hits.rs",
        "simulator/src/cluster/moves.rs",
        "simulator/src/cluster/oracle.rs",
        "simulator/src/cluster/router.rs",
        "simulator/src/cluster/run.rs",
        "simulator/src/cluster/swap.rs",
    ],
    "one state machine: the simulation has what each of its events keeps, and each event changes the simulation",
)];

const _: () = assert!(KNOWN.len() <= 3, "a file that needs itself through others is a room of its own");

/// What a module's names mean: a path from the crate's root, or all that is in one.
#[derive(Default)]
struct Module {
    file: String,
    children: BTreeSet<String>,
    items: BTreeSet<String>,
    uses: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
    /// Paths in its code, as they are written.
    named: Vec<Vec<String>>,
}

/// A crate's modules by their path from its root.
type Modules = BTreeMap<Vec<String>, Module>;

/// From a file to a file, with one path that needs it.
type Arrows = BTreeMap<(String, String), String>;

/// Words, strings with one quote in front, `::`, and single signs; no comments.
fn tokens(text: &str) -> Vec<String> {
    let (mut tokens, mut at) = (Vec::new(), 0);
    while let Some(one) = text[at..].chars().next() {
        let rest = &text[at..];
        let raw = rest.trim_start_matches(['b', 'r']).trim_start_matches('#');
        let raw_head = &rest[..rest.len() - raw.len()];
        if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with("/*") {
            at += rest.find("*/").map_or(rest.len(), |end| end + 2);
        } else if raw.starts_with('"') && raw_head.contains('r') {
            let end = format!("\"{}", "#".repeat(raw_head.matches('#').count()));
            let len = raw[1..].find(&end).unwrap_or(raw.len() - 1);
            tokens.push(raw[..=len].to_owned());
            at += (raw_head.len() + 1 + len + end.len()).min(rest.len());
        } else if one == '"' {
            let mut escaped = false;
            let len = rest[1..].find(|one| {
                let ends = one == '"' && !escaped;
                escaped = one == '\\' && !escaped;
                ends
            });
            let len = len.unwrap_or(rest.len() - 1);
            tokens.push(rest[..=len].to_owned());
            at += (len + 2).min(rest.len());
        } else if one == '\'' {
            at += quoted_char(rest).unwrap_or(1);
        } else if is_word(one) {
            let len = rest.find(|one| !is_word(one)).unwrap_or(rest.len());
            tokens.push(rest[..len].to_owned());
            at += len;
        } else if rest.starts_with("::") {
            tokens.push("::".to_owned());
            at += 2;
        } else {
            if !one.is_whitespace() {
                tokens.push(one.to_string());
            }
            at += one.len_utf8();
        }
    }
    tokens
}

fn is_word(one: char) -> bool {
    one.is_alphanumeric() || one == '_'
}

/// How long a character in quotes is; none for a lifetime.
fn quoted_char(rest: &str) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first != '\\' {
        return chars.next().filter(|(_, one)| *one == '\'').map(|(at, _)| at + 1);
    }
    chars.next();
    chars.find(|(_, one)| *one == '\'').map(|(at, _)| at + 1)
}

/// Tokens without what only tests are built with.
fn product(tokens: &[String]) -> Vec<String> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        if is_for_tests(&tokens[at..]) {
            at = after_item(tokens, at);
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

fn begins(tokens: &[String], with: &[&str]) -> bool {
    tokens.len() >= with.len() && tokens.iter().zip(with).all(|(token, with)| token == with)
}

fn is_for_tests(tokens: &[String]) -> bool {
    let cfg = ["#", "[", "cfg", "("];
    begins(tokens, &cfg)
        && (begins(&tokens[4..], &["test", ")"])
            || begins(&tokens[4..], &["any", "(", "test"])
            || begins(&tokens[4..], &["all", "(", "test"]))
}

/// Where the code after the item that begins here, with its attributes, goes on.
fn after_item(tokens: &[String], mut at: usize) -> usize {
    while begins(&tokens[at..], &["#", "["]) {
        at = after_brackets(tokens, at + 1);
    }
    let words = tokens[at..].iter().take(8).map(String::as_str);
    let head = words.take_while(|word| !["=", "{", ";", ":", "::"].contains(word)).collect::<Vec<_>>();
    let has = |words: &[&str]| head.iter().any(|word| words.contains(word));
    let is_block = has(&["fn", "mod", "struct", "enum", "union", "trait", "impl", "macro_rules"]);
    let is_statement = !is_block && has(&["use", "let", "static", "const", "type"]);
    while at < tokens.len() {
        match tokens[at].as_str() {
            ")" | "]" | "}" => return at,
            ";" => return at + 1,
            "," if !is_block && !is_statement => return at + 1,
            open @ ("(" | "[" | "{") => {
                let is_end = open == "{" && !is_statement;
                at = after_brackets(tokens, at);
                if is_end {
                    return at + usize::from(tokens.get(at).is_some_and(|next| next == ","));
                }
            }
            _ => at += 1,
        }
    }
    at
}

fn after_brackets(tokens: &[String], mut at: usize) -> usize {
    let mut depth = 0;
    while at < tokens.len() {
        match tokens[at].as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// A crate's modules: those of its root's code, and those that stand in files of their own.
struct Crate<'a> {
    modules: Modules,
    /// Texts of files.
    read: &'a dyn Fn(&str) -> Option<String>,
}

impl Crate<'_> {
    /// Takes a file in, and the files of its children. They lie in `folder`.
    fn file(&mut self, file: &str, folder: &str, module: Vec<String>, text: &str) {
        let code = product(&tokens(text));
        self.code(&code, file, folder, module);
    }

    fn code(&mut self, code: &[String], file: &str, folder: &str, module: Vec<String>) {
        let mut here = Module { file: file.to_owned(), ..Module::default() };
        let (mut at, mut depth) = (0, 0_usize);
        while at < code.len() {
            let word = code[at].as_str();
            let next = code.get(at + 1).map_or("", String::as_str);
            let before = at.checked_sub(1).map_or("", |at| code[at].as_str());
            match word {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                "mod" if depth == 0 => {
                    here.children.insert(next.to_owned());
                    let child: Vec<_> = module.iter().cloned().chain([next.to_owned()]).collect();
                    let folder_of_child = format!("{folder}/{next}");
                    if code[at + 2] == "{" {
                        let end = after_brackets(code, at + 2);
                        self.code(&code[at + 3..end - 1], file, &folder_of_child, child);
                        at = end;
                    } else {
                        let named = path_attribute(&code[..at]).map(|path| beside(file, path));
                        self.child_file(named, &folder_of_child, child, file);
                        at += 3;
                    }
                    continue;
                }
                "macro_rules" if depth == 0 => drop(here.items.insert(code[at + 2].clone())),
                "struct" | "enum" | "union" | "trait" | "fn" | "const" | "static" | "type"
                    if depth == 0 && !["fn", "mut"].contains(&next) =>
                {
                    here.items.insert(next.to_owned());
                }
                "use" => {
                    at += 1;
                    at += usize::from(code[at] == "::");
                    at = here.tree(code, at, &[]);
                    continue;
                }
                _ if is_path(word, before, next) => {
                    let mut path = vec![word.to_owned()];
                    while begins(&code[at + 1..], &["::"])
                        && code.get(at + 2).is_some_and(|word| word.chars().all(is_word))
                    {
                        path.push(code[at + 2].clone());
                        at += 2;
                    }
                    here.named.push(path);
                }
                _ => {}
            }
            at += 1;
        }
        self.modules.insert(module, here);
    }

    /// `named`: by a path attribute in `from`.
    fn child_file(&mut self, named: Option<String>, place: &str, module: Vec<String>, from: &str) {
        for file in named.into_iter().chain([format!("{place}.rs"), format!("{place}/mod.rs")]) {
            if let Some(text) = (self.read)(&file) {
                let folder =
                    file.strip_suffix("/mod.rs").unwrap_or_else(|| file.trim_end_matches(".rs")).to_owned();
                return self.file(&file, &folder, module, &text);
            }
        }
        panic!("{from}: no file for its module {}", module.join("::"));
    }

    /// The file that defines what a path from the crate's root names; none for a module as a whole.
    fn definer(&self, path: &[String], hops: usize) -> Option<&str> {
        let mut module: Vec<String> = Vec::new();
        for (at, word) in path.iter().enumerate() {
            let here = &self.modules[&module];
            let is_last = at + 1 == path.len();
            if is_last && here.items.contains(word) {
                return Some(&here.file);
            }
            if here.children.contains(word) {
                module.push(word.clone());
                continue;
            }
            if here.items.contains(word) {
                return Some(&here.file);
            }
            let behind = &path[at + 1..];
            if let Some(used) = here.uses.get(word).filter(|_| hops > 0) {
                return match self.rooted(used, &module) {
                    Some(used) => self.definer(&[&used, behind].concat(), hops - 1),
                    // From another crate: the file that shows it is what is needed.
                    None => Some(&here.file),
                };
            }
            let through = here.globs.iter().filter(|_| hops > 0).find_map(|glob| {
                let glob = self.rooted(glob, &module)?;
                let inner = self.modules.get(&glob)?;
                let has = inner.items.contains(word) || inner.uses.contains_key(word);
                let path = [&glob, &path[at..]].concat();
                (has || inner.children.contains(word)).then(|| self.definer(&path, hops - 1))
            });
            return through.unwrap_or(Some(&here.file));
        }
        None
    }

    /// A path as it is written in a module, from the crate's root; none if it leads out of the crate.
    fn rooted(&self, path: &[String], module: &[String]) -> Option<Vec<String>> {
        let (first, rest) = path.split_first()?;
        let here = &self.modules[module];
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([module, rest].concat()),
            "super" => {
                let ups = path.iter().take_while(|word| *word == "super").count();
                let base = &module[..module.len().checked_sub(ups)?];
                Some([base, &path[ups..]].concat())
            }
            _ if here.children.contains(first) => Some([module, path].concat()),
            _ if here.items.contains(first) => Some([module, path].concat()),
            // Not by a use of the same name, which names another crate: `use zstd::zstd`.
            _ => {
                let used = here.uses.get(first).filter(|used| used.first() != Some(first))?;
                Some([&self.rooted(used, module)?, rest].concat())
            }
        }
    }

    fn arrows(&self) -> Arrows {
        let mut arrows = Arrows::new();
        for (path, module) in &self.modules {
            let names = module.named.iter().chain(module.uses.values()).map(|named| (named, false));
            for (named, is_all) in names.chain(module.globs.iter().map(|named| (named, true))) {
                let Some(whole) = self.rooted(named, path) else { continue };
                let all_of = self.modules.get(&whole).filter(|_| is_all).map(|module| module.file.as_str());
                if let Some(to) = all_of.or_else(|| self.definer(&whole, 8)).filter(|to| *to != module.file) {
                    arrows.entry((module.file.clone(), to.to_owned())).or_insert_with(|| named.join("::"));
                }
            }
        }
        arrows
    }

    /// Arrows but those that lead to a module `below` the one that they come from, or above it.
    fn one_way(&self, below: bool) -> Arrows {
        let mut places: BTreeMap<&str, &[String]> = BTreeMap::new();
        for (path, module) in &self.modules {
            let place = places.entry(&module.file).or_insert(path);
            *place = if path.len() < place.len() { path } else { place };
        }
        let mut arrows = self.arrows();
        arrows.retain(|(from, to), _| {
            let (from, to) = (places[from.as_str()], places[to.as_str()]);
            if below { !to.starts_with(from) } else { !from.starts_with(to) }
        });
        arrows
    }
}

/// Whether a path of several words begins here.
fn is_path(word: &str, before: &str, next: &str) -> bool {
    next == "::" && before != "::" && before != "." && word.chars().all(is_word)
}

/// The path of the attribute that ends here, if it gives one.
fn path_attribute(before: &[String]) -> Option<&str> {
    let before = before.strip_suffix(&["pub".to_owned()]).unwrap_or(before);
    let at = before.len().checked_sub(6)?;
    let is_path = begins(&before[at..], &["#", "[", "path", "="]) && before[at + 5] == "]";
    is_path.then(|| before[at + 4].trim_start_matches('"'))
}

/// A path that is written in a file, from the repository's root.
fn beside(file: &str, path: &str) -> String {
    let mut parts: Vec<_> = file.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts.join("/")
}

impl Module {
    /// Takes in the tree of a use, from behind `before`. Says where it ends.
    fn tree(&mut self, code: &[String], mut at: usize, before: &[String]) -> usize {
        let mut path = before.to_vec();
        loop {
            match code[at].as_str() {
                "{" => {
                    let end = after_brackets(code, at);
                    at += 1;
                    while at < end - 1 {
                        at = self.tree(code, at, &path);
                        at += usize::from(code[at] == ",");
                    }
                    return end;
                }
                "*" => {
                    self.globs.push(path);
                    return at + 1;
                }
                "self" if !path.is_empty() => {}
                word => path.push(word.to_owned()),
            }
            at += 1;
            if code[at] != "::" {
                break;
            }
            at += 1;
        }
        let mut name = path.last().cloned().unwrap_or_default();
        if code[at] == "as" {
            name = code[at + 1].clone();
            at += 2;
        }
        // Names that are no names do not hide each other.
        if name == "_" {
            name = format!("_{}", self.uses.len());
        }
        // A type and a function, or a module and what it is named after, may have one name.
        match self.uses.entry(name) {
            Entry::Occupied(_) => self.named.push(path),
            Entry::Vacant(free) => {
                free.insert(path);
            }
        }
        at
    }
}

/// Sets of places each of which leads to each other.
pub(super) fn circles(arrows: &Arrows) -> BTreeSet<BTreeSet<String>> {
    let mut next: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (from, to) in arrows.keys() {
        next.entry(from).or_default().push(to);
    }
    let reach = |from: &str| {
        let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(place) = open.pop() {
            let behind = next.get(place).into_iter().flatten().copied();
            open.extend(behind.filter(|place| reached.insert(*place)).collect::<Vec<_>>());
        }
        reached
    };
    let all: BTreeMap<&str, BTreeSet<&str>> = next.keys().map(|from| (*from, reach(from))).collect();
    let mut circles = BTreeSet::new();
    for (place, reached) in all.iter().filter(|(place, reached)| reached.contains(*place)) {
        let back = |other: &&&str| all.get(**other).is_some_and(|reached| reached.contains(place));
        circles.insert(reached.iter().filter(back).map(|place| (*place).to_owned()).collect());
    }
    circles
}

/// Without those that are a part of another.
fn largest(circles: BTreeSet<BTreeSet<String>>) -> Vec<BTreeSet<String>> {
    let is_part = |circle: &&BTreeSet<String>| {
        circles.iter().any(|other| other != *circle && other.is_superset(circle))
    };
    circles.iter().filter(|circle| !is_part(circle)).cloned().collect()
}

/// A circle as a complaint: what is in it, and each arrow between those with what needs it.
fn complaint(circle: &BTreeSet<String>, arrows: &Arrows) -> String {
    let mut lines = format!("a circle of files: {}", Vec::from_iter(circle.clone()).join(", "));
    for ((from, to), path) in arrows {
        if circle.contains(from) && circle.contains(to) {
            lines += &format!("\n    {from} -> {to}, for one by {path}");
        }
    }
    lines
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The roots of the house's crates: libraries, and programs that are a crate beside one.
fn roots() -> Vec<String> {
    let workspace = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, members) = workspace.split_once("members = [").unwrap();
    let (members, _) = members.split_once(']').unwrap();
    let mut roots = Vec::new();
    for member in members.split('"').skip(1).step_by(2) {
        let mut files = vec![format!("{member}/src/lib.rs"), format!("{member}/src/main.rs")];
        for entry in std::fs::read_dir(root().join(member).join("src/bin")).into_iter().flatten() {
            let path = format!("{member}/src/bin/{}", entry.unwrap().file_name().display());
            files.extend([format!("{path}/main.rs"), path]);
        }
        let before = roots.len();
        roots.extend(files.into_iter().filter(|file| root().join(file).is_file()));
        assert!(roots.len() > before, "{member}: no root of a crate");
    }
    roots
}

fn read_crate<'a>(file: &str, read: &'a dyn Fn(&str) -> Option<String>) -> Crate<'a> {
    let mut found = Crate { modules: Modules::new(), read };
    let (folder, _) = file.rsplit_once('/').unwrap();
    found.file(file, folder, Vec::new(), &read(file).unwrap());
    found
}

fn read(file: &str) -> Option<String> {
    std::fs::read_to_string(root().join(file)).ok()
}

/// Arrows between the folders of a crate, each with one between files; a module without a folder counts as one.
fn between_folders(arrows: &Arrows, root: &str) -> Arrows {
    let folder = |file: &str| {
        let below = file.strip_prefix(root)?;
        Some(below.split_once('/').map_or(below.trim_end_matches(".rs"), |(folder, _)| folder).to_owned())
    };
    let mut between = Arrows::new();
    for (from, to) in arrows.keys() {
        if let (Some(one), Some(other)) = (folder(from), folder(to))
            && one != other
        {
            between.entry((one, other)).or_insert_with(|| format!("{from} -> {to}"));
        }
    }
    between
}

#[test]
fn rooms_of_the_server_make_no_circle() {
    let arrows = between_folders(&read_crate("server/src/lib.rs", &read).arrows(), "server/src/");
    let complaints: Vec<_> = circles(&arrows).iter().map(|circle| complaint(circle, &arrows)).collect();
    assert!(arrows.len() > 10 && complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn files_make_no_circle() {
    let (mut files, mut found, mut complaints) = (0, BTreeSet::new(), Vec::new());
    for file in roots() {
        let of = read_crate(&file, &read);
        files += of.modules.len();
        let circles: BTreeSet<_> = [true, false].iter().flat_map(|way| circles(&of.one_way(*way))).collect();
        let arrows = of.arrows();
        for circle in largest(circles) {
            let is_known = KNOWN.iter().any(|(files, _)| circle.iter().eq(*files));
            if found.insert(circle.clone()) && !is_known {
                complaints.push(complaint(&circle, &arrows));
            }
        }
    }
    assert!(files > 600, "{files} modules: the sources were not found");
    for (files, reason) in KNOWN.iter().filter(|(files, _)| !found.iter().any(|it| it.iter().eq(*files))) {
        complaints.push(format!("a circle that there is no more: {} ({reason})", files.join(", ")));
    }
    assert!(complaints.is_empty(), "\n{} circles\n{}", found.len(), complaints.join("\n"));
}

/// Circles of a made-up crate, without `src/` and `.rs`.
fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let texts: BTreeMap<String, &str> =
        files.iter().map(|(file, text)| (format!("src/{file}.rs"), *text)).collect();
    let read = |file: &str| texts.get(file).map(|text| (*text).to_owned());
    let of = read_crate("src/lib.rs", &read);
    let circles: BTreeSet<_> = [true, false].iter().flat_map(|way| circles(&of.one_way(*way))).collect();
    let short = |file: &String| file.trim_start_matches("src/").trim_end_matches(".rs").to_owned();
    largest(circles).iter().map(|circle| circle.iter().map(short).collect()).collect()
}

#[test]
fn a_circle_of_two_files_is_found_through_any_kind_of_path() {
    let there = "use crate::b::B;\npub struct A;\npub fn make() {}";
    for back in [
        "use crate::a::A;\npub struct B;",
        "use super::{a::{self, A}};\npub struct B;",
        "use crate::a;\npub struct B;\nfn of() { a::make(); }",
        "pub struct B;\nfn of(_: &crate::a::A) {}",
        "use crate::a as other;\npub struct B;\nfn of(_: Vec<other::A>) {}",
        "use crate::a::*;\npub struct B;",
        "pub struct B;\nmacro_rules! of { () => { $crate::a::make() } }",
        "pub struct B;\nconst ONE: char = '\"'; fn of<'a>(_: &'a crate::a::A) {}",
        "pub struct B;\nconst TWO: &str = \"\\\"\"; fn of(_: &crate::a::A) {}",
        "pub enum B { #[cfg(test)] One(u8), Other(crate::a::A) }",
        "#[cfg(test)]\nstruct One {}\npub struct B { #[cfg(test)] one: u8, other: crate::a::A }",
        "pub struct B;\nmod inner { use super::super::a::A; }",
    ] {
        let circles = found(&[("lib", "mod a;\nmod b;"), ("a", there), ("b", back)]);
        assert_eq!(circles, [["a", "b"]], "{back}");
    }
}

#[test]
fn what_a_face_shows_leads_to_the_file_that_defines_it() {
    // Both name only the face; one of them is shown under another name, through a glob.
    let face = "mod b;\nmod c;\npub use b::*;\npub use c::C as D;";
    let files = [
        ("lib", "mod a;"),
        ("a/mod", face),
        ("a/b", "pub struct B;"),
        ("a/c", "use super::B;\npub struct C;"),
    ];
    assert_eq!(found(&files), Vec::<Vec<String>>::new());
    let mut files = files;
    files[2].1 = "use crate::a::D;\npub struct B;";
    assert_eq!(found(&files), [["a/b", "a/c"]]);
}

#[test]
fn a_module_and_what_is_in_it_may_use_each_other() {
    let files = [
        ("lib", "mod a;\nmod d;"),
        ("a", "mod b;\nmod c;\nuse b::B;\npub struct A;\nfn of() { c::of(); }"),
        ("a/b", "use super::A;\npub struct B;"),
        ("a/c", "use super::A;\npub fn of() {}"),
        ("d", "pub struct D;"),
    ];
    assert_eq!(found(&files), Vec::<Vec<String>>::new());
    // Its parts among each other are no exception, nor are they to the outside, up or down.
    let mut parts = files;
    parts[3].1 = "use super::b::B;\npub fn of() {}";
    parts[2].1 = "pub struct B;\nfn of() { super::c::of(); }";
    assert_eq!(found(&parts), [["a/b", "a/c"]]);
    let mut down = files;
    (down[1].1, down[3].1) =
        ("mod b;\nmod c;\npub struct A;\nfn of() { c::of(); }", "use crate::d::D;\npub fn of() {}");
    down[4].1 = "use crate::a::A;\npub struct D;";
    assert_eq!(found(&down), [["a", "a/c", "d"]]);
    let mut up = files;
    (up[1].1, up[4].1) =
        ("mod b;\nmod c;\nuse crate::d::D;\npub struct A;", "use crate::a::b::B;\npub struct D;");
    assert_eq!(found(&up), [["a", "a/b", "d"]]);
}

#[test]
fn a_circle_that_is_a_part_of_another_is_not_told_twice() {
    let of = |files: &[&str]| files.iter().map(|file| (*file).to_owned()).collect::<BTreeSet<_>>();
    let all = [of(&["a", "b"]), of(&["a", "b", "c"]), of(&["c", "d"])];
    assert_eq!(largest(all.clone().into()), all[1..]);
}

#[test]
fn what_is_only_for_tests_and_what_only_looks_like_a_path_is_no_arrow() {
    let quiet = "/// See [`B`](crate::b::B). /* \npub struct A; // crate::b::B\n/* crate::b::B */\n\
        const TEXT: &str = r#\"crate::b::B \" crate::b::B\"#; const MORE: &str = \"a\n crate::b::B\";\n\
        #[cfg(test)]\nuse crate::b::{B, C};\n#[cfg(any(test, feature = \"x\"))]\nfn of() -> crate::b::B { B {} }\n\
        enum E { #[cfg(test)] Of(crate::b::B), Other }\n#[cfg(test)]\nmod tests { use crate::b::B; }\n\
        #[cfg(test)]\nmod apart;";
    let files = [("lib", "mod a;\nmod b;"), ("a", quiet), ("b", "use crate::a::A;\npub struct B;")];
    assert_eq!(found(&files), Vec::<Vec<String>>::new());
    let loud = "use crate::b::B;\npub struct A;";
    assert_eq!(found(&[files[0], ("a", loud), files[2]]), [["a", "b"]]);
}

#[test]
fn a_long_circle_is_found_and_what_hangs_on_it_is_not_named() {
    let files = [
        ("lib", "mod a;\nmod b;\n#[path = \"elsewhere/c.rs\"]\nmod c;\nmod d;"),
        ("a", "use crate::b::B;\nuse crate::d::D;\npub struct A;"),
        ("b/mod", "mod deep;\npub struct B;"),
        ("b/deep", "use super::super::c::C;"),
        ("elsewhere/c", "use crate::a::A;\nuse crate::d::D;\npub struct C;"),
        ("d", "pub struct D;"),
    ];
    assert_eq!(found(&files), Vec::<Vec<String>>::new(), "no file of b leads on to a part of it");
    let mut files = files;
    files[2].1 = "mod deep;\npub struct B;\nfn of() { deep::of(); }";
    files[3].1 = "use super::super::c::C;\npub fn of() {}";
    assert_eq!(found(&files), [["a", "b/deep", "b/mod", "elsewhere/c"]]);
}
