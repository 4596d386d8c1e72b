//! What a shared library says to a loader: its name, and the symbols that it exports with their versions. Of libraries of this machine's own kind
//! (64 bits, little-endian), by section headers.

use std::collections::BTreeSet;

/// Kinds of sections.
const DYNAMIC: u32 = 6;
const DYNSYM: u32 = 11;
const VERDEF: u32 = 0x6fff_fffd;
const VERSYM: u32 = 0x6fff_ffff;
/// The entry of the dynamic section that has the name.
const SONAME: u64 = 14;

/// What a library exports.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    pub(crate) name: String,
    /// Each symbol and its version; without one, an empty text.
    pub(crate) calls: BTreeSet<(String, String)>,
}

fn number<const N: usize>(file: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..N].copy_from_slice(&file[at..at + N]);
    u64::from_le_bytes(bytes)
}

/// Where a section of a file lies.
#[derive(Clone, Copy, Debug)]
struct Section {
    kind: u32,
    at: usize,
    bytes: usize,
    /// The section that has its texts, or symbols.
    link: usize,
}

fn sections(file: &[u8]) -> Vec<Section> {
    assert_eq!(&file[..6], b"\x7fELF\x02\x01", "of another kind");
    let (first, size, count) = (number::<8>(file, 0x28), number::<2>(file, 0x3a), number::<2>(file, 0x3c));
    let section = |index| {
        let head = (first + index * size) as usize;
        let word = |at| number::<8>(file, head + at) as usize;
        let link = number::<4>(file, head + 0x28) as usize;
        Section { kind: number::<4>(file, head + 4) as u32, at: word(0x18), bytes: word(0x20), link }
    };
    (0..count).map(section).collect()
}

fn text(file: &[u8], texts: Section, at: u64) -> String {
    let rest = &file[texts.at + at as usize..texts.at + texts.bytes];
    String::from_utf8(rest.iter().copied().take_while(|byte| *byte != 0).collect()).unwrap()
}

/// The names of the versions that a library defines, by their numbers.
fn versions(file: &[u8], sections: &[Section]) -> Vec<(u64, String)> {
    let Some(defined) = sections.iter().find(|section| section.kind == VERDEF) else { return Vec::new() };
    let (mut at, mut found) = (defined.at, Vec::new());
    loop {
        let name = at + number::<4>(file, at + 12) as usize;
        found.push((number::<2>(file, at + 4), text(file, sections[defined.link], number::<4>(file, name))));
        match number::<4>(file, at + 16) {
            0 => return found,
            next => at += next as usize,
        }
    }
}

/// What this library exports.
pub(crate) fn exported(file: &[u8]) -> Exported {
    let sections = sections(file);
    let of = |kind| sections.iter().copied().find(|section| section.kind == kind);
    let dynamic = of(DYNAMIC).expect("a shared library");
    let entries = (0..dynamic.bytes / 16).map(|entry| dynamic.at + entry * 16);
    let name = entries.map(|at| (number::<8>(file, at), number::<8>(file, at + 8)));
    let mut name =
        name.filter(|(tag, _)| *tag == SONAME).map(|(_, at)| text(file, sections[dynamic.link], at));
    let (symbols, versions) = (of(DYNSYM).expect("symbols"), versions(file, &sections));
    let mut calls = BTreeSet::new();
    for symbol in 1..symbols.bytes / 24 {
        let at = symbols.at + symbol * 24;
        let (kind, section, value) = (file[at + 4], number::<2>(file, at + 6), number::<8>(file, at + 8));
        // Undefined ones are what it needs; absolute ones without a value name the versions themselves.
        if section == 0 || (section == 0xfff1 && value == 0 && kind & 15 == 1) {
            continue;
        }
        let version = of(VERSYM).map_or(0, |table| number::<2>(file, table.at + symbol * 2) & 0x7fff);
        let version = versions.iter().find(|(number, _)| *number == version && version > 1);
        let version = version.map(|(_, name)| name.clone()).unwrap_or_default();
        calls.insert((text(file, sections[symbols.link], number::<4>(file, at)), version));
    }
    Exported { name: name.next().unwrap_or_default(), calls }
}
