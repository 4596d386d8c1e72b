//! What `c/include/kvarts.h` declares is what the library defines, what it exports, and what the page for its users names; the example there is the one
//! that is compiled and run.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const PAGE: &str = "docs/c.md";
const EXAMPLE: &str = "c/examples/pages.c";

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap_or_else(|why| panic!("{name}: {why}"))
}

/// The names in a text that this stands behind.
fn names(text: &str, behind: char) -> BTreeSet<String> {
    let name = |rest: &str| {
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')?;
        rest[end..].starts_with(behind).then(|| format!("kvarts_{}", &rest[..end]))
    };
    text.split("kvarts_").skip(1).filter_map(name).collect()
}

fn between<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
    let begin = text.find(begin).map(|at| at + begin.len()).unwrap_or_else(|| panic!("no {begin:?}"));
    &text[begin..begin + text[begin..].find(end).unwrap_or_else(|| panic!("no {end:?}"))]
}

#[test]
fn names_are_found_by_what_stands_behind_them() {
    let found = names("int kvarts_a(void); kvarts_b *kvarts_c_d(kvarts_b *b); `kvarts_e`", '(');
    assert_eq!(found, BTreeSet::from(["kvarts_a".to_owned(), "kvarts_c_d".to_owned()]));
    assert_eq!(names("kvarts_a; kvarts_b`", '`'), BTreeSet::from(["kvarts_b".to_owned()]));
}

#[test]
fn the_header_the_library_its_exports_and_the_page_have_the_same_calls() {
    let declared = names(&read("c/include/kvarts.h"), '(');
    assert!(declared.len() > 50, "{declared:?}");
    let mut defined = BTreeSet::new();
    for source in std::fs::read_dir(path("c/src")).unwrap() {
        let text = std::fs::read_to_string(source.unwrap().path()).unwrap();
        let heads =
            text.split("extern \"C\" fn ").skip(1).filter_map(|rest| rest.split_inclusive('(').next());
        defined.extend(heads.flat_map(|head| names(head, '(')));
    }
    assert_eq!(declared, defined, "header and library");
    assert_eq!(declared, names(&read("c/kvarts.map"), ';'), "header and exports");
    let page = read(PAGE);
    assert_eq!(
        declared,
        names(between(&page, "<!-- calls of kvarts.h -->", "<!-- end -->"), '`'),
        "header and page"
    );
}

/// `KVARTS_BLESS=1` writes it there anew.
#[test]
fn the_page_shows_the_example_that_is_run() {
    let (page, example) = (read(PAGE), read(EXAMPLE));
    let begin = format!("<!-- {EXAMPLE} -->\n```c\n");
    let shown = between(&page, &begin, "```\n<!-- end -->");
    if std::env::var_os("KVARTS_BLESS").is_some() && shown != example {
        std::fs::write(path(PAGE), page.replace(shown, &example)).unwrap();
        return;
    }
    assert!(shown == example, "{PAGE} shows another {EXAMPLE}");
}
