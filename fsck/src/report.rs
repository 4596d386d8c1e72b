//! What a check says: as data for programs, and for people with what it means and what to do.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use kvarts_layout::format::recovery::Severity;
use serde::Serialize;

use crate::check::{Accounting, Checked, Level};
use crate::findings::{self, Finding, Label, Uncounted};
use crate::remedy::{Remedy, advice, remedy};

/// One thing that was found, as `--json` has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Item {
    /// What it is: a label of docs/FORMAT.md.
    pub label: &'static str,
    /// `problem` or `note`.
    pub severity: &'static str,
    /// How it comes about.
    pub cause: &'static str,
    /// The shard, if it is in one.
    pub shard: Option<u32>,
    /// The segment, if it is in one.
    pub segment: Option<u32>,
    /// Bytes from the start of the file.
    pub offset: Option<u64>,
    /// The file, for what lies outside segments.
    pub file: Option<String>,
    /// The first block that it is about.
    pub key: Option<String>,
    /// What should have been there.
    pub expected: Option<String>,
    /// What was.
    pub found: Option<String>,
    /// Blocks that become misses.
    pub blocks: u64,
    /// Of which model.
    pub model: Option<String>,
    /// Not null: the number of lost blocks is not known any more. A checkpoint lists this many live records that are not
    /// found.
    pub uncounted_records: Option<u64>,
}

impl From<&Finding> for Item {
    fn from(finding: &Finding) -> Self {
        Self {
            label: finding.label.name,
            severity: finding.label.severity.label(),
            cause: finding.label.cause,
            shard: finding.place.shard,
            segment: finding.place.segment,
            offset: finding.place.offset,
            file: finding.file.clone(),
            key: finding.key.map(|key| key.to_string()),
            expected: finding.expected.clone(),
            found: finding.found.clone(),
            blocks: finding.blocks,
            model: finding.model.clone(),
            uncounted_records: finding.uncounted.filter(|_| finding.is_problem()),
        }
    }
}

/// The report of a check.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// Whether nothing is damaged.
    pub clean: bool,
    /// `quick`, `full` or `deep`.
    pub level: &'static str,
    /// The store's id, if there is one.
    pub store: Option<String>,
    /// Records that count.
    pub records: u64,
    /// Blocks in them, copies included.
    pub blocks: u64,
    /// Bytes that came from the device.
    pub bytes_scanned: u64,
    /// How long it took.
    pub seconds: f64,
    /// Rate of the whole check.
    pub gib_per_s: f64,
    /// That rate over the bare sequential read of the same run, if it was measured.
    pub device_ratio: Option<f64>,
    /// Rate of that bare read, of a part of the same files by as many threads.
    pub bare_gib_per_s: Option<f64>,
    /// Where the bytes of the segments are.
    pub accounting: Accounting,
    /// How often each label was met, normal ones included.
    pub labels: BTreeMap<&'static str, u64>,
    /// Blocks that become misses, by model.
    pub lost: BTreeMap<String, u64>,
    /// What is lost beside that and cannot be counted.
    pub lost_uncounted: Uncounted,
    /// What a crash or a newer program legally leaves behind.
    pub notes: Vec<Item>,
    /// How many problems there are; `problems` has the first ones.
    pub problem_count: u64,
    /// Damage.
    pub problems: Vec<Item>,
    /// Whether the report follows on what a repair would do: the text advises the repair itself.
    #[serde(skip)]
    pub after_dry_run: bool,
}

/// Gibibyte, as a number to divide by.
const GIB: f64 = (1u64 << 30) as f64;
/// Problems that people are shown.
const SHOWN: usize = 20;

impl Report {
    /// The report of a check that took so long.
    pub fn new(checked: &Checked, level: Level, (bytes_scanned, seconds): (u64, f64)) -> Self {
        let findings = &checked.findings;
        let items = |all: &[Finding]| all.iter().map(Item::from).collect();
        let gib_per_s = if seconds > 0.0 { bytes_scanned as f64 / GIB / seconds } else { 0.0 };
        Self {
            clean: findings.is_clean(),
            level: level.name(),
            store: None,
            records: checked.records,
            blocks: checked.blocks,
            bytes_scanned,
            seconds,
            gib_per_s,
            device_ratio: None,
            bare_gib_per_s: None,
            accounting: checked.accounting,
            labels: findings.counts.clone(),
            lost: findings.lost.clone(),
            lost_uncounted: findings.uncounted,
            notes: items(&findings.notes),
            problem_count: findings.problem_count,
            problems: items(&findings.problems),
            after_dry_run: false,
        }
    }

    /// What was met, by label, with how often and whether it is a problem; without what is normal.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64, Severity)> {
        let all = self.labels.iter().map(|(label, times)| (*label, *times, findings::severity(label)));
        all.filter(|(_, _, severity)| *severity != Severity::Normal)
    }

    /// Notes how fast a part of the same files was read in the same run without looking at it. Of nothing, no ratio.
    pub fn compare(&mut self, bare_bytes: u64, bare_seconds: f64) {
        if bare_bytes > 0 && bare_seconds > 0.0 {
            let bare = bare_bytes as f64 / GIB / bare_seconds;
            (self.bare_gib_per_s, self.device_ratio) = (Some(bare), Some(self.gib_per_s / bare));
        }
    }

    /// The report for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing into a string does not fail.
        let _ = self.write_text(&mut out);
        out
    }

    fn write_text(&self, out: &mut String) -> std::fmt::Result {
        for (list, heading) in [(&self.problems, "Problems"), (&self.notes, "Notes")] {
            if list.is_empty() {
                continue;
            }
            writeln!(out, "{heading}:")?;
            for (label, items) in by_label(list) {
                let Some(first) = items.first() else { continue };
                let times = self.labels.get(label).copied().unwrap_or(items.len() as u64);
                writeln!(out, "  {label} ({times}): {}", first.cause)?;
                let shown = if first.severity == "problem" { SHOWN } else { 2 };
                for item in items.iter().take(shown) {
                    writeln!(out, "    {}", describe(item))?;
                }
                let rest = times.saturating_sub(shown.min(items.len()) as u64);
                if rest > 0 {
                    writeln!(
                        out,
                        "    and {rest} more{}",
                        if items.len() > shown { ": --json lists them" } else { "" }
                    )?;
                }
            }
        }
        let gib = self.bytes_scanned as f64 / GIB;
        write!(out, "{} records, {} blocks; {gib:.2} GiB read", self.records, self.blocks)?;
        writeln!(out, " in {:.1} s ({:.2} GiB/s), {} check", self.seconds, self.gib_per_s, self.level)?;
        if let (Some(ratio), Some(bare)) = (self.device_ratio, self.bare_gib_per_s) {
            writeln!(
                out,
                "speed relative to plain reads of a part of these files: {ratio:.2} (plain reads: {bare:.2} \
                GiB/s)"
            )?;
        }
        self.write_verdict(out)
    }

    fn write_verdict(&self, out: &mut String) -> std::fmt::Result {
        if self.clean {
            let times = |label: Label| self.labels.get(label.name).copied().unwrap_or(0);
            let unjudged = times(findings::LIVE_TAIL_SKIPPED) + times(findings::LIVE_CHANGED);
            let is_quick = self.level == Level::Quick.name();
            match (unjudged, is_quick) {
                (0, false) => writeln!(out, "clean")?,
                (0, true) => writeln!(
                    out,
                    "clean, but payloads were not read: run the check without \
                    --quick to read the payloads"
                )?,
                (segments, _) => {
                    let payloads = if is_quick {
                        "; payloads were not read: run the check without --quick to read the payloads"
                    } else {
                        ""
                    };
                    writeln!(
                        out,
                        "no problem was found, but {segments} segments in use were not checked; `kvarts \
                        scrub` lets the server check the blocks of these segments{payloads}"
                    )?;
                }
            }
            return if self.notes.is_empty() || unjudged > 0 {
                Ok(())
            } else {
                writeln!(
                    out,
                    "all notes are normal after a crash, or after a newer program used the \
                    store: no action is needed"
                )
            };
        }
        writeln!(out, "NOT clean: {} problems", self.problem_count)?;
        self.write_lost(out)?;
        writeln!(out, "Wrong bytes are never served: only damaged blocks are lost.")?;
        let remedies: BTreeSet<Remedy> = self.problems.iter().map(|item| remedy(item.label)).collect();
        for what in remedies.iter().filter_map(|remedy| advice(*remedy)) {
            writeln!(out, "{what}")?;
        }
        if !remedies.contains(&Remedy::Repair) {
            return writeln!(
                out,
                "Next: follow these steps, then check again; a repair does not solve these problems."
            );
        }
        if self.after_dry_run {
            return writeln!(out, "Next: `kvarts fsck --repair DIR` makes these repairs.");
        }
        writeln!(
            out,
            "Next: `kvarts fsck --repair --dry-run` lists the possible repairs, `--repair` makes them."
        )
    }

    /// How many blocks are lost, as far as that is known.
    fn write_lost(&self, out: &mut String) -> std::fmt::Result {
        for (model, blocks) in &self.lost {
            writeln!(
                out,
                "  {blocks} blocks of {model} become misses, so engines compute these blocks again"
            )?;
        }
        let Uncounted { problems, listed_records } = self.lost_uncounted;
        if problems > 0 {
            let more = if self.lost.is_empty() { "" } else { " more" };
            write!(
                out,
                "  the number of{more} lost blocks is not known, because {problems} of the problems prevent \
                a count"
            )?;
            match listed_records {
                0 => writeln!(out)?,
                records => {
                    writeln!(out, "; checkpoints list {records} live records at the damaged positions")?
                }
            }
        } else if self.lost.is_empty() {
            writeln!(out, "  no block is lost")?;
        }
        Ok(())
    }
}

fn by_label(items: &[Item]) -> BTreeMap<&'static str, Vec<&Item>> {
    let mut groups = BTreeMap::<_, Vec<&Item>>::new();
    for item in items {
        groups.entry(item.label).or_default().push(item);
    }
    groups
}

fn describe(item: &Item) -> String {
    let mut parts = Vec::new();
    match (item.shard, item.segment) {
        (Some(shard), Some(segment)) => parts.push(format!("shard {shard} segment {segment}")),
        (Some(shard), None) => parts.push(format!("shard {shard}")),
        _ => {}
    }
    parts.extend(item.file.clone());
    parts.extend(item.offset.map(|offset| format!("offset {offset}")));
    parts.extend(item.key.as_ref().map(|key| format!("key {key}")));
    parts.extend(item.expected.as_ref().map(|expected| format!("expected {expected}")));
    parts.extend(item.found.as_ref().filter(|found| !found.is_empty()).map(|found| format!("found {found}")));
    match item.uncounted_records {
        Some(0) => parts.push("an unknown number of blocks".to_owned()),
        Some(records) => parts.push(format!("an unknown number of blocks in {records} live records")),
        None => {}
    }
    if item.blocks > 0 {
        let model = item.model.as_deref().unwrap_or("unknown model");
        parts.push(format!("{} blocks of {model}", item.blocks));
    }
    // What lies on disk chose some of these bytes: nothing of it may steer a terminal.
    parts.join(", ").chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Place;

    fn text(labels: &[Label]) -> String {
        let mut checked = Checked::default();
        labels.iter().for_each(|label| checked.findings.take(Finding::at(*label, Place::default())));
        Report::new(&checked, Level::Full, (0, 0.0)).text()
    }

    #[test]
    fn a_repair_is_advised_only_where_it_can_do_something() {
        for (label, says) in [
            (findings::MEDIA_ERROR, "smartctl"),
            (findings::DIRECTORY_MISSING, "all directories"),
            (findings::DIRECTORY_BEHIND, "Start the server"),
            (findings::DIRECTORY_REPLACED, "replaced this directory"),
            (findings::FILE_UNREADABLE, "as the user"),
            (findings::SUPERBLOCK_SLOT_NEWER, "newer kvarts"),
        ] {
            let alone = text(&[label]);
            assert!(alone.contains(says) && !alone.contains("--repair"), "{alone}");
            let both = text(&[label, findings::CHECKPOINT_DAMAGED]);
            assert!(both.contains(says) && both.contains("fsck --repair --dry-run"), "{both}");
        }
        let live = text(&[findings::LIVE_TAIL_SKIPPED, findings::PADDING_TORN]);
        let unchecked = "no problem was found, but 1 segments in use were not checked; `kvarts scrub` \
            lets the server check the blocks of these segments\n";
        assert!(live.contains(unchecked), "{live}");
        assert!(!live.contains("nothing to do"), "an unchecked segment counts as sound: {live}");
        let quick = Report::new(&Checked::default(), Level::Quick, (0, 0.0)).text();
        assert!(
            quick.ends_with(
                "clean, but payloads were not read: run the check without --quick to read the payloads\n"
            ),
            "{quick}"
        );
        assert!(text(&[]).ends_with("\nclean\n"), "{}", text(&[]));
        assert!(!text(&[findings::PADDING_TORN]).contains("--repair"), "a note is nothing to repair");
    }
}
