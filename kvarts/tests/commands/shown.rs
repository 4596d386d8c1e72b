//! The commands that pages show: those behind a prompt, and lines of blocks of a shell that have none.

use std::path::{Path, PathBuf};

/// With these words a block without a language begins whose lines are commands; others are outputs.
const PROGRAMS: [&str; 7] = ["kvarts ", "cargo ", "scripts/", "openssl ", "mv ", "tar ", "bash "];

/// A command, and the page and the line where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    pub(crate) place: String,
    pub(crate) command: String,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The commands of README.md, of the Python module's, and of everything in docs/ but the journal, which says what was run when.
pub(crate) fn shown() -> Vec<Shown> {
    let mut pages = vec!["README.md".to_owned(), "python/README.md".to_owned()];
    below("docs", &mut pages);
    pages.sort();
    let text = |page: &String| std::fs::read_to_string(root().join(page)).unwrap();
    pages.iter().flat_map(|page| of_page(page, &text(page))).collect()
}

fn below(folder: &str, pages: &mut Vec<String>) {
    for entry in std::fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        match entry.file_type().unwrap().is_dir() {
            true if name != "docs/journal" => below(&name, pages),
            false if name.ends_with(".md") => pages.push(name),
            _ => {}
        }
    }
}

/// Those of one page.
fn of_page(page: &str, text: &str) -> Vec<Shown> {
    let mut all: Vec<Shown> = Vec::new();
    let mut lines = text.lines().zip(1..);
    while let Some((line, _)) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else { continue };
        let block: Vec<(&str, u32)> =
            lines.by_ref().take_while(|(line, _)| !line.trim_start().starts_with("```")).collect();
        let has_prompts = block.iter().any(|(line, _)| line.starts_with("$ "));
        let is_of_shell = language.is_empty()
            && block.first().is_some_and(|(line, _)| PROGRAMS.iter().any(|word| line.starts_with(word)));
        assert!(has_prompts || language != "console", "{page}: a console without a command");
        // Of a command that goes on in the next line.
        let mut begun: Option<Shown> = None;
        for (line, number) in block {
            let text = match &mut begun {
                Some(shown) => format!("{}\n{line}", shown.command),
                None if has_prompts => match line.strip_prefix("$ ") {
                    Some(command) => command.to_owned(),
                    None => continue,
                },
                None if is_of_shell => line.to_owned(),
                None => continue,
            };
            let place = begun.take().map_or(format!("{page}:{number}"), |shown| shown.place);
            let shown = Shown { place, command: text };
            match goes_on(&shown.command) {
                true => begun = Some(shown),
                false => all.push(Shown { command: bare(&shown.command), ..shown }),
            }
        }
        assert!(begun.is_none(), "{begun:?} has no end");
    }
    all
}

/// What a shell reads of a line, and whether a quote is open at its end.
fn without_remark(text: &str) -> (String, bool) {
    let (mut kept, mut open) = (String::new(), None);
    for here in text.chars() {
        match (open, here) {
            (None, '#') if kept.is_empty() || kept.ends_with(' ') => break,
            (None, '\'' | '"') => open = Some(here),
            (Some(sign), here) if sign == here => open = None,
            _ => {}
        }
        kept.push(here);
    }
    (kept, open.is_some())
}

fn goes_on(text: &str) -> bool {
    let (kept, is_open) = without_remark(text);
    is_open || kept.ends_with('\\')
}

/// Without the remark behind it, on one line, with single spaces.
pub(crate) fn bare(text: &str) -> String {
    without_remark(text).0.replace("\\\n", " ").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn commands_are_found_with_what_goes_on_and_without_remarks() {
    let page = "text\n```console\n$ kvarts a  # what's a remark\noutput\n$ kvarts b '{\"x\":\n   \"#1\"}'\n$ kvarts c \\\n   d\n```\n\
                ```\noutput: kvarts e\n```\n```\nkvarts f   # one\nid=1\n```\n```toml\nkvarts = 1\n```\n```\n$ seq 1\n1\n```\n";
    let found: Vec<_> = of_page("P", page).into_iter().map(|one| (one.place, one.command)).collect();
    let expected = [
        ("P:3", "kvarts a"),
        ("P:5", "kvarts b '{\"x\": \"#1\"}'"),
        ("P:7", "kvarts c d"),
        ("P:14", "kvarts f"),
        ("P:15", "id=1"),
        ("P:21", "seq 1"),
    ];
    assert_eq!(found, expected.map(|(place, command)| (place.to_owned(), command.to_owned())));
}
