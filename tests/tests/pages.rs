//! What pages say of the sources, where a script can compare the two: arrows between crates, steps of scripts, how long a
//! build takes, links, and the size of the changelog.
//!
//! Each rule is a function over text that gives complaints, tried on made-up text beside it and then on the pages.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The page that lists the steps of scripts.
const STEPS_PAGE: &str = "CONTRIBUTING.md";
/// Scripts whose steps are listed there.
const SCRIPTS: [&str; 2] = [".ci/run", "scripts/nightly"];
/// The page that says how long a build takes, once.
const TIMES_PAGE: &str = "README.md";
/// Lines of the changelog: a page to read, not a history.
const CHANGELOG_LINES_MAX: usize = 120;

/// Which crates stand on which: of each its dependencies in the house.
type Crates = BTreeMap<String, BTreeSet<String>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
}

/// Names in a folder, below the root.
fn names(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// All pages: of the root, of each crate, of the journal, and of the book.
fn pages() -> Vec<(String, String)> {
    let mut folders = vec![String::new()];
    folders.extend(
        names("")
            .into_iter()
            .filter(|name| !name.starts_with('.') && name != "target" && root().join(name).is_dir()),
    );
    for folder in names("docs") {
        folders.extend(root().join("docs").join(&folder).is_dir().then(|| format!("docs/{folder}")));
    }
    let mut pages = Vec::new();
    for folder in folders {
        for name in names(&folder).into_iter().filter(|name| name.ends_with(".md")) {
            let page = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            let text = read(&page);
            pages.push((page, text));
        }
    }
    assert!(pages.len() > 40, "the pages were not found");
    pages
}

/// Complaints, one a line, as one assertion: all are seen at once.
fn expect_none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// A page's lines outside of its fenced blocks; the lines of these are empty.
fn prose(text: &str) -> String {
    let mut is_fenced = false;
    let mut kept = String::new();
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        if !is_fence && !is_fenced {
            kept.push_str(line);
        }
        is_fenced ^= is_fence;
        kept.push('\n');
    }
    kept
}

/// What stands in a page's single backticks.
fn spans(text: &str) -> Vec<String> {
    prose(text).split("\n\n").flat_map(|part| part.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// The crates of the house that a manifest depends on outside of tests.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut is_inside = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            is_inside = section == "dependencies"
                || (section.starts_with("target.") && section.ends_with(".dependencies"));
            found.extend(section.strip_prefix("dependencies.kvarts-").map(str::to_owned));
        } else if is_inside && let Some(rest) = line.strip_prefix("kvarts-") {
            found.extend(rest.split(['.', ' ', '=']).next().map(str::to_owned));
        }
    }
    found
}

fn crates() -> Crates {
    let has_manifest = |name: &String| root().join(name).join("Cargo.toml").exists();
    let members = names("").into_iter().filter(has_manifest);
    members.map(|name| (name.clone(), dependencies(&read(&format!("{name}/Cargo.toml"))))).collect()
}

/// The arrows of a page: `a, b <- c` is one from each of the left to each of the right.
fn arrows(text: &str) -> Vec<(String, String)> {
    let mut arrows = Vec::new();
    for span in spans(text).iter().filter(|span| span.contains("<-")) {
        let groups: Vec<Vec<&str>> =
            span.split("<-").map(|group| group.split(',').map(str::trim).collect()).collect();
        for pair in groups.windows(2) {
            for below in &pair[0] {
                arrows.extend(pair[1].iter().map(|above| ((*below).to_owned(), (*above).to_owned())));
            }
        }
    }
    arrows
}

fn wrong_arrows(page: &str, text: &str, crates: &Crates) -> Vec<String> {
    let mut complaints = Vec::new();
    for (below, above) in arrows(text) {
        for name in [&below, &above].into_iter().filter(|name| !crates.contains_key(*name)) {
            complaints.push(format!("{page}: `{below} <- {above}`: there is no crate {name}"));
        }
        if crates.contains_key(&below) && crates.get(&above).is_some_and(|known| !known.contains(&below)) {
            complaints.push(format!("{page}: `{below} <- {above}`: {above} does not depend on {below}"));
        }
    }
    complaints
}

/// What of these stands on the engine, directly or through others.
fn on_the_engine(names: &[&str], crates: &Crates) -> Vec<String> {
    let mut found = Vec::new();
    for name in names {
        let (mut behind, mut next) = (BTreeSet::new(), vec![(*name).to_owned()]);
        while let Some(one) = next.pop() {
            let below = crates.get(&one).into_iter().flatten();
            next.extend(below.filter(|below| behind.insert((*below).clone())).cloned());
        }
        if behind.contains("store") {
            found.push(format!("{name} has the engine behind it"));
        }
    }
    found
}

#[test]
fn clients_have_no_engine_behind_them() {
    let of = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let made_up = Crates::from([
        ("client".to_owned(), of(&["wire"])),
        ("wire".to_owned(), of(&["store"])),
        ("cold".to_owned(), of(&["contract"])),
    ]);
    assert_eq!(on_the_engine(&["client", "cold"], &made_up), ["client has the engine behind it"]);
    expect_none(on_the_engine(&["contract", "wire", "client", "cold", "bucket"], &crates()));
}

#[test]
fn an_arrow_that_no_manifest_has_is_found() {
    let manifest = "[package]\nname = \"kvarts-server\"\n[dependencies]\nkvarts-store.workspace = true\nrustix = 1\n\
                    [dev-dependencies]\nkvarts-fsck.workspace = true\n[dependencies.kvarts-wire]\npath = \"../wire\"\n";
    assert_eq!(dependencies(manifest), BTreeSet::from(["store".to_owned(), "wire".to_owned()]));
    let crates = Crates::from([
        ("server".to_owned(), dependencies(manifest)),
        ("store".to_owned(), BTreeSet::new()),
        ("wire".to_owned(), BTreeSet::from(["store".to_owned()])),
        ("fsck".to_owned(), BTreeSet::new()),
    ]);
    let wrong = |text: &str| wrong_arrows("page", text, &crates);
    assert_eq!(wrong("Right: `store <- wire <- server` and `store,\nwire <- server`."), Vec::<String>::new());
    assert_eq!(wrong("`store <- fsck`"), ["page: `store <- fsck`: fsck does not depend on store"]);
    assert_eq!(
        wrong("`store <- wire`, `fsck <- server`"),
        ["page: `fsck <- server`: server does not depend on fsck"]
    );
    assert_eq!(wrong("`store, fsck <- server`"), ["page: `fsck <- server`: server does not depend on fsck"]);
    assert_eq!(wrong("`store <- bakery`"), ["page: `store <- bakery`: there is no crate bakery"]);
    assert_eq!(wrong("```\n`fsck <- server`\n```\n"), Vec::<String>::new());
}

#[test]
fn arrows_in_prose_are_those_of_the_manifests() {
    let crates = crates();
    assert!(crates.len() > 15 && !crates["server"].is_empty(), "the manifests were not read: {crates:?}");
    assert!(arrows(&read("ARCHITECTURE.md")).len() > 15, "ARCHITECTURE.md draws the house no more");
    expect_none(pages().iter().flat_map(|(page, text)| wrong_arrows(page, text, &crates)).collect());
}

/// The names of a script's steps, in order, but for the mark of its end.
fn steps(script: &str) -> Vec<String> {
    let named =
        script.lines().filter_map(|line| line.trim_start().strip_prefix("step \"")?.split('"').next());
    named.filter(|name| *name != "done").map(str::to_owned).collect()
}

/// What begins and what ends the list of a script's steps in a page, and where the list stands between them.
fn list_of_steps(script: &str, page: &str) -> Option<std::ops::Range<usize>> {
    let mark = format!("<!-- steps of {script} -->\n");
    let begin = page.find(&mark)? + mark.len();
    Some(begin..begin + page[begin..].find("<!-- end -->")?)
}

fn as_list(steps: &[String]) -> String {
    steps.iter().map(|step| format!("- {step}\n")).collect()
}

/// What is wrong with the list of a script's steps; of a script that is not there the page must have no list.
fn wrong_steps(name: &str, script: Option<&str>, page: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    match (script.map(steps), list_of_steps(name, page)) {
        (None, None) => {}
        (None, Some(_)) => complaints.push(format!("{STEPS_PAGE} lists steps of {name}, which is not there")),
        (Some(steps), _) if steps.is_empty() => complaints.push(format!("{name} names no steps")),
        (Some(_), None) => {
            complaints.push(format!("{STEPS_PAGE} has no \"<!-- steps of {name} -->\" and \"<!-- end -->\""));
        }
        (Some(steps), Some(at)) => {
            let (listed, meant) = (&page[at], as_list(&steps));
            if listed != meant {
                complaints.push(format!("{STEPS_PAGE} lists of {name}:\n{listed}and it has:\n{meant}"));
            }
        }
    }
    complaints
}

#[test]
fn steps_that_a_page_lists_otherwise_are_found() {
    let script =
        "step() { echo \"$1\"; }\nstep \"format\"\ncargo fmt\n  step \"tests, all\"\nstep \"done\"\n";
    assert_eq!(steps(script), ["format", "tests, all"]);
    let page = |list: &str| format!("Text.\n\n<!-- steps of ci -->\n{list}<!-- end -->\n\n- other\n");
    let is_wrong = |script, page: &str| !wrong_steps("ci", script, page).is_empty();
    assert!(!is_wrong(Some(script), &page("- format\n- tests, all\n")));
    assert!(is_wrong(Some(script), &page("- tests, all\n- format\n")), "another order");
    assert!(is_wrong(Some(script), &page("- format\n")), "one too few");
    assert!(is_wrong(Some(script), &page("- format\n- tests, all\n- book\n")), "one too many");
    assert!(is_wrong(Some(script), "no list"));
    assert!(is_wrong(Some("echo"), &page("")), "a script whose steps cannot be read");
    assert!(is_wrong(None, &page("- format\n")), "a list of a script that is gone");
    assert!(!is_wrong(None, "no list"));
}

#[test]
fn steps_of_scripts_are_listed_as_they_are() {
    let mut page = read(STEPS_PAGE);
    let mut complaints = Vec::new();
    for name in SCRIPTS {
        let script = std::fs::read_to_string(root().join(name)).ok();
        assert!(script.is_some() || name != ".ci/run", "no .ci/run");
        let found = script.as_deref().zip(list_of_steps(name, &page));
        if std::env::var_os("KVARTS_BLESS").is_some()
            && let Some((script, at)) = found
        {
            page.replace_range(at, &as_list(&steps(script)));
            std::fs::write(root().join(STEPS_PAGE), &page).unwrap();
        }
        complaints.extend(wrong_steps(name, script.as_deref(), &page));
    }
    expect_none(complaints);
}

/// The sentences of a page in lower case: parts of it between ends of sentences, cells, list marks, and lines of code.
fn sentences(text: &str) -> Vec<String> {
    let (mut sentences, mut sentence) = (Vec::new(), String::new());
    let mut is_fenced = false;
    for line in text.lines() {
        let begin = line.trim_start();
        is_fenced ^= begin.starts_with("```");
        if is_fenced || begin.is_empty() || begin.starts_with(['-', '|', '#', '*']) {
            sentences.push(std::mem::take(&mut sentence));
        }
        for word in begin.split_whitespace() {
            sentence.push_str(&word.to_ascii_lowercase());
            sentence.push(' ');
            if word.ends_with(['.', ';', '|']) {
                sentences.push(std::mem::take(&mut sentence));
            }
        }
    }
    sentences.push(sentence);
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// Sentences that say how long a build or CI takes.
fn times_of_building(text: &str) -> Vec<String> {
    let is_such = |sentence: &String| {
        let words: Vec<&str> = sentence
            .split(|one: char| !one.is_ascii_alphanumeric())
            .filter(|word| !word.is_empty())
            .collect();
        let has = |some: &[&str]| words.iter().any(|word| some.contains(word));
        let is_build = has(&["build", "builds", "building", "built", "compile", "compiles", "compiling"]);
        let is_ci = sentence.contains(".ci/run") || has(&["ci"]);
        (is_build && has(&["minute", "minutes"])) || (is_ci && has(&["minute", "minutes", "seconds"]))
    };
    sentences(text).into_iter().filter(is_such).collect()
}

#[test]
fn times_of_building_are_found() {
    let count = |text: &str| times_of_building(text).len();
    assert_eq!(count("The first build takes 5 to 10\nminutes on two cores."), 1);
    assert_eq!(count("```\ncargo test    # all; two minutes of building\ncargo run\n```\n"), 1);
    assert_eq!(count("`.ci/run` takes 20 minutes; CI of a page took 30 seconds."), 2);
    assert_eq!(count("Build it. A pin lasts minutes.\n\n- Compile.\n- Ten minutes later it is gone."), 0);
    assert_eq!(count("| a build | 3 cores |\n| a lease | 10 minutes |\n"), 0);
}

#[test]
fn how_long_a_build_takes_stands_once() {
    let mut complaints = Vec::new();
    for (page, text) in pages() {
        // Entries of the journal are dated measurements, also of builds.
        if page.starts_with("journal/") {
            continue;
        }
        let found = times_of_building(&text);
        if page == TIMES_PAGE {
            if found.len() != 1 {
                complaints
                    .push(format!("{page} says it {} times, and once is meant: {found:?}", found.len()));
            }
        } else {
            complaints.extend(found.iter().map(|said| format!("{page}: {TIMES_PAGE} says it: {said}")));
        }
    }
    expect_none(complaints);
}

fn wrong_changelog(text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let lines = text.lines().count();
    if lines > CHANGELOG_LINES_MAX {
        complaints.push(format!("CHANGELOG.md has {lines} lines, at most {CHANGELOG_LINES_MAX}"));
    }
    let prose = prose(text);
    let (mut version, mut seen) = ("", BTreeSet::new());
    for heading in prose.lines().filter(|line| line.starts_with('#')) {
        if heading.starts_with("## ") {
            version = heading;
        }
        if !seen.insert((version, heading)) {
            complaints.push(format!("CHANGELOG.md has \"{heading}\" twice in \"{version}\""));
        }
    }
    complaints
}

#[test]
fn a_changelog_that_grows_or_repeats_itself_is_found() {
    let good = "# Changelog\n\n## 0.2.0\n\n### Changed\n\n## 0.1.0\n\n### Changed\n";
    assert_eq!(wrong_changelog(good), Vec::<String>::new());
    assert_eq!(wrong_changelog(&format!("{good}\n### Changed\n")).len(), 1);
    assert_eq!(wrong_changelog(&format!("{good}\n## 0.1.0\n")).len(), 1);
    assert_eq!(wrong_changelog(&format!("{good}{}", "- more\n".repeat(CHANGELOG_LINES_MAX))).len(), 1);
}

#[test]
fn the_changelog_is_a_page_to_read() {
    expect_none(wrong_changelog(&read("CHANGELOG.md")));
}

/// The anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().chars();
    let kept = kept.filter(|one| one.is_alphanumeric() || [' ', '-', '_'].contains(one));
    kept.map(|one| if one == ' ' { '-' } else { one.to_ascii_lowercase() }).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    prose(text).lines().filter(|line| line.starts_with('#')).map(anchor).collect()
}

/// The targets of a page's links, but for those to other hosts.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let plain: String = prose.split('`').step_by(2).collect::<Vec<_>>().join("``");
    let targets = plain.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// The path that a link from a page leads to, from the root.
fn resolved(page: &str, target: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/').filter(|part| !part.is_empty() && *part != ".") {
        match part {
            ".." => parts.truncate(parts.len().saturating_sub(1)),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// Links of pages that lead nowhere. `is_there` says it of what is no page.
fn broken_links(pages: &[(String, String)], is_there: impl Fn(&str) -> bool) -> Vec<String> {
    let known: BTreeMap<&str, BTreeSet<String>> =
        pages.iter().map(|(page, text)| (page.as_str(), anchors(text))).collect();
    let mut complaints = Vec::new();
    for (page, text) in pages {
        for link in links(text) {
            let (path, part) = link.split_once('#').unwrap_or((&link, ""));
            let to = if path.is_empty() { page.clone() } else { resolved(page, path) };
            let is_right = match known.get(to.as_str()) {
                Some(anchors) => part.is_empty() || anchors.contains(part),
                None => is_there(&to),
            };
            if !is_right {
                complaints.push(format!("{page}: ({link}) leads nowhere"));
            }
        }
    }
    complaints
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let pages = [
        (
            "docs/a.md",
            "# A page\n[b](../b.md#how-to-do-it-twice) [c](c.md) [here](#a-page) [x](https://x/y)\n",
        ),
        (
            "b.md",
            "## How to do it, `twice`\n[a](docs/a.md#b) [x](src/lib.rs) `[no](link.md)` [y](docs/z.md)\n",
        ),
    ];
    let pages = pages.map(|(page, text)| (page.to_owned(), text.to_owned()));
    let broken = broken_links(&pages, |path| path == "src/lib.rs");
    assert_eq!(
        broken,
        [
            "docs/a.md: (c.md) leads nowhere",
            "b.md: (docs/a.md#b) leads nowhere",
            "b.md: (docs/z.md) leads nowhere"
        ]
    );
}

#[test]
fn links_lead_somewhere() {
    let pages = pages();
    assert!(pages.iter().map(|(_, text)| links(text).len()).sum::<usize>() > 200, "the links were not read");
    expect_none(broken_links(&pages, |path| root().join(path).exists()));
}

/// A page that no table of contents names would not be in the book, an entry that none names not be found.
#[test]
fn tables_of_contents_are_whole() {
    let pages = pages();
    let mut complaints = Vec::new();
    for (contents, folder) in [("docs/SUMMARY.md", "docs/"), ("journal/README.md", "journal/")] {
        let (_, text) = pages.iter().find(|(page, _)| page == contents).expect(contents);
        let listed: BTreeSet<String> = links(text).iter().map(|link| resolved(contents, link)).collect();
        let meant = pages.iter().filter(|(page, _)| page.starts_with(folder) && page != contents);
        let absent = meant.filter(|(page, _)| !listed.contains(page));
        complaints.extend(absent.map(|(page, _)| format!("{contents} does not name {page}")));
    }
    expect_none(complaints);
}
