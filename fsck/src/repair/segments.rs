//! Puts one segment right: its length, its definitions, its padding, its header, its footer and trailer.

use std::io;

use kvarts_layout::format::Position;
use kvarts_layout::format::body::Definition;
use kvarts_layout::format::checkpoint::SegmentState;
use kvarts_layout::format::footer::{self, Entry, Footer};
use kvarts_layout::format::names::{segment_name, shard_name};
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::trailer::{self, SealReason, Trailer};

use super::{Action, Knowledge, Site, defined, quarantine};
use crate::check::{Level, Outcome, SegmentReport, Subject, check_segment};
use crate::disk::{Aligned, DiskWriter};
use crate::findings;
use crate::holes::inside;
use crate::store::{Shard, Store};
use crate::walk::{Met, Payload, entry};
use crate::window::Tally;

/// One damaged segment.
pub(super) struct Case<'a> {
    pub(super) site: &'a Site,
    pub(super) store: &'a Store,
    pub(super) shard: &'a Shard,
    pub(super) segment: u32,
    pub(super) known: Option<&'a SegmentState>,
    pub(super) knowledge: &'a Knowledge,
}

/// What became of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fixed {
    /// It was not touched: what it holds is not certain.
    Left,
    /// It is where it was.
    InPlace,
    /// Its file was moved away.
    Moved,
}

/// What a segment is to hold from now on.
struct Seal<'a> {
    generation: u64,
    entries: Vec<Entry>,
    log_end: u64,
    /// Where its sequences begin if it lists nothing.
    first_sequence: u64,
    /// Where the footer must not be written if that can be helped.
    avoid: Option<u64>,
    records: Vec<&'a Met>,
}

impl Case<'_> {
    fn path(&self) -> String {
        format!("{}/{}", shard_name(self.shard.number), segment_name(self.segment))
    }

    fn look(&self, tally: &Tally) -> Option<SegmentReport> {
        let subject = Subject {
            keyring: &self.store.keyring,
            shard: self.shard.number,
            segment: self.segment,
            known: self.known,
            listed: 0,
            level: Level::Full,
        };
        let file = self.site.disk.open(&self.path()).ok()?;
        Some(check_segment(&*file, &subject, tally))
    }

    /// What two readings agree on; `None`, and said, if they do not or nothing can be read. Bytes are given up on the word
    /// of what was read, and a fault on the way from the device looks like damage.
    fn look_twice(&self, tally: &Tally, log: &mut Vec<Action>) -> Option<SegmentReport> {
        let path = self.path();
        let Some(first) = self.look(tally) else {
            self.site.cannot(log, &path, "the file cannot be opened");
            return None;
        };
        if first.findings.times(findings::MEDIA_ERROR.name) > 0 {
            // What cannot be read now may be read tomorrow, or from the device's copy: it stays listed.
            let why = "reads of some pages fail on the device: copy the store to another device and \
                repair the copy there";
            self.site.cannot(log, &path, why);
            return None;
        }
        if kvarts_layout::planted!("repair-believes-one-reading") {
            return Some(first);
        }
        let again = self.look(tally).filter(|again| is_alike(&first, again));
        if again.is_none() {
            self.site.cannot(log, &path, super::DIFFERS);
        }
        again
    }

    /// Does what can be done.
    pub(super) fn fix(&self, tally: &Tally, log: &mut Vec<Action>) -> Fixed {
        let path = self.path();
        let Some(mut report) = self.look_twice(tally, log) else { return Fixed::Left };
        let whole = self.store.keyring.segment_bytes;
        if report.findings.times(findings::SEGMENT_TRUNCATED.name) > 0 {
            self.site.act(log, (&path, "is extended to its full length with zeros".to_owned()), |writer| {
                writer.set_len(&path, whole)?;
                writer.sync(&path)
            });
        }
        if self.definitions(&report, log) && self.site.writer.is_some() {
            match self.look_twice(tally, log) {
                Some(again) => report = again,
                None => return Fixed::Left,
            }
        }
        self.padding(&report, log);
        self.damaged_blocks(&report, log);
        if self.seal(&report, log) { Fixed::Moved } else { Fixed::InPlace }
    }

    /// Whether the checkpoint knows a later generation than the segment proves: the writes of that one were lost, and
    /// what the checkpoint says of it is about nothing any more.
    pub(super) fn is_behind(&self, tally: &Tally) -> bool {
        let own = self.look(tally).and_then(|report| report.ends?.generation());
        own.zip(self.known).is_some_and(|(own, known)| own < known.generation)
    }

    /// Writes listed definitions that are damaged from their copies in other segments.
    fn definitions(&self, report: &SegmentReport, log: &mut Vec<Action>) -> bool {
        let Outcome::Sealed { footer, good, generation, .. } = &report.outcome else { return false };
        let mut wrote = false;
        for entry in &footer.records {
            let Some((is_spec, local, id)) = defined(&entry.content) else { continue };
            if good.iter().any(|met| met.offset == entry.offset) {
                continue;
            }
            let Some(canonical) = self.knowledge.definitions.get(&id) else { continue };
            let definition = Definition { local, id, canonical: canonical.clone() };
            let body = if is_spec { Body::Spec(definition) } else { Body::Identity(definition) };
            let fields = Fields { sequence: entry.sequence, durable_upto: 0, payload_bytes: 0 };
            let position = self.position(*generation).at(entry.offset);
            let image = record::encode(&position, &self.store.keyring.secret, &fields, &body, &[]);
            let Ok(image) = image else { continue };
            if image.len() != entry.header_bytes as usize {
                continue;
            }
            let what =
                format!("the definition at {} is restored from its copy in another segment", entry.offset);
            wrote |= self.write(log, what, &[(entry.offset, image)]);
        }
        wrote
    }

    /// Zeroes padding.
    fn padding(&self, report: &SegmentReport, log: &mut Vec<Action>) {
        if report.findings.times(findings::PADDING_NOT_ZERO.name) == 0 {
            return;
        }
        let records: &[Met] = match &report.outcome {
            Outcome::Sealed { good, .. } => good,
            Outcome::Walked { scanned, .. } => &scanned.adopted,
            _ => &[],
        };
        for met in records {
            let Payload::Read(verified) = &met.payload else { continue };
            for &(from, to) in &verified.padding {
                let zeros = vec![0u8; usize::try_from(to.saturating_sub(from)).unwrap_or(0)];
                self.write(log, format!("padding at {from} is zeroed"), &[(from, zeros)]);
            }
        }
    }

    /// Takes blocks that are damaged out of records whose other blocks are sound: by holes, which say to every reader
    /// that they were evicted. The bytes are wrong, and every read of them would be a miss. One that shares every page with
    /// sound blocks stays: a miss costs less than they would.
    fn damaged_blocks(&self, report: &SegmentReport, log: &mut Vec<Action>) {
        let records: &[Met] = match &report.outcome {
            Outcome::Sealed { good, .. } => good,
            Outcome::Walked { scanned, .. } => &scanned.adopted,
            _ => return,
        };
        let path = self.path();
        for met in records {
            let Payload::Read(verified) = &met.payload else { continue };
            let damaged = verified.damaged_blocks();
            if damaged == 0 || kvarts_layout::planted!("repair-keeps-damaged") {
                continue;
            }
            if verified.entwined > 0 {
                let why = format!(
                    "{} damaged blocks of the record at {} share all of their pages with intact blocks and \
                    cannot be removed alone: reads of the damaged blocks are misses until the blocks are put \
                    again",
                    verified.entwined, met.offset
                );
                self.site.cannot(log, &path, &why);
            }
            let apart = damaged.saturating_sub(verified.entwined);
            if apart == 0 {
                continue;
            }
            let what = format!("{apart} damaged blocks of the record at {} are removed", met.offset);
            self.site.act(log, (&path, what), |writer| {
                verified.apart.iter().try_for_each(|(at, len)| self.punch(writer, *at, *len))?;
                writer.sync(&path)
            });
        }
    }

    /// Makes a hole, or leaves the bytes as they were: a file system whose units are larger than a page writes zeros where a
    /// hole is asked for and calls it done, and sound blocks may share these pages.
    fn punch(&self, writer: &dyn DiskWriter, at: u64, len: u64) -> io::Result<()> {
        let path = self.path();
        let mut before = Aligned::new(usize::try_from(len).map_err(io::Error::other)?);
        if self.site.disk.open(&path)?.read_at(before.bytes_mut(), at)? < before.bytes().len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        writer.punch(&path, at, len)?;
        if inside(&self.site.disk.open(&path)?.holes(), at, len) == len {
            return Ok(());
        }
        writer.write_at(&path, at, before.bytes())?;
        writer.sync(&path)?;
        let why = "the file system cannot punch single pages, so the damaged blocks stay on disk and reads \
            of these blocks are misses";
        Err(io::Error::other(why))
    }

    /// Writes header, footer and trailer where they do not say what counts; true if the file was moved away.
    fn seal(&self, report: &SegmentReport, log: &mut Vec<Action>) -> bool {
        let Some(ends) = &report.ends else { return false };
        let header = ends.header.as_ref().ok().map(|header| header.position.generation);
        match &report.outcome {
            Outcome::Quarantined => self.set_aside(report, log),
            Outcome::Walked { scanned, .. } if !scanned.is_worth_sealing() && header.is_none() => {
                let why = "no page of the file belongs to a segment of this store";
                quarantine::set_aside(self.site, &self.path(), why, log)
            }
            Outcome::Walked { scanned, .. } => {
                let seal = Seal {
                    generation: scanned.generation,
                    entries: scanned.entries(),
                    log_end: scanned.log_end,
                    first_sequence: scanned.last_sequence,
                    avoid: None,
                    records: scanned.adopted.iter().collect(),
                };
                self.header(header, &seal, log);
                self.footer(&seal, log);
                false
            }
            Outcome::Sealed { generation, trailer, footer, good, unlisted } => {
                let mut records: Vec<&Met> = good.iter().chain(unlisted).collect();
                records.sort_by_key(|met| met.offset);
                let mut entries: Vec<Entry> = records.iter().filter_map(|met| kept(met, footer)).collect();
                entries.dedup_by_key(|entry| entry.offset);
                if kvarts_layout::planted!("repair-keeps-damaged") {
                    entries.clone_from(&footer.records);
                }
                if kvarts_layout::planted!("repair-drops-good") {
                    entries.truncate(entries.len().div_ceil(2));
                }
                let changed = entries != footer.records;
                let disagrees = report.findings.times(findings::TRAILER_DISAGREES.name) > 0;
                let log_end = trailer.log_end.max(records.last().map_or(0, |met| end_of(met)));
                let avoid = Some(trailer.footer_offset);
                let first_sequence = trailer.first_sequence;
                let seal = Seal { generation: *generation, entries, log_end, first_sequence, avoid, records };
                self.header(header, &seal, log);
                if changed || disagrees {
                    self.footer(&seal, log);
                }
                false
            }
            Outcome::Free | Outcome::Unseen => false,
        }
    }

    fn set_aside(&self, report: &SegmentReport, log: &mut Vec<Action>) -> bool {
        let newer = ["segment-newer", "trailer-newer"];
        if newer.iter().any(|label| report.findings.times(label) > 0) {
            self.site.cannot(
                log,
                &self.path(),
                "a newer program wrote the segment: repair the store with that program",
            );
            return false;
        }
        quarantine::set_aside(self.site, &self.path(), "the segment belongs to another store", log)
    }

    fn position(&self, generation: u64) -> Position {
        self.store.keyring.position(self.shard.number, self.segment).under(generation)
    }

    /// Writes the header if there is none of this generation.
    fn header(&self, found: Option<u64>, seal: &Seal<'_>, log: &mut Vec<Action>) {
        if found == Some(seal.generation) {
            return;
        }
        let created = |met: &&Met| match &met.body {
            Some(Body::Blocks(blocks)) => Some(blocks.created_ms),
            _ => None,
        };
        let header = SegmentHeader {
            position: self.position(seal.generation),
            secret: self.store.keyring.secret.clone(),
            created_ms: seal.records.iter().filter_map(created).min().unwrap_or(0),
            segment_bytes: self.store.keyring.segment_bytes,
            first_sequence: seal.entries.first().map_or(seal.first_sequence, |entry| entry.sequence),
        };
        match header.encode() {
            Ok(image) => drop(self.write(log, "the header is rewritten".to_owned(), &[(0, image)])),
            Err(error) => self.site.cannot(log, &self.path(), &error.to_string()),
        }
    }

    /// Writes a footer that lists what counts, and then the trailer that names it.
    fn footer(&self, seal: &Seal<'_>, log: &mut Vec<Action>) {
        let keyring = &self.store.keyring;
        let position = self.position(seal.generation);
        let images = || -> Result<(u64, Vec<u8>, Vec<u8>), String> {
            let records = seal.entries.clone();
            let footer = Footer { records };
            let trailer_at = keyring.trailer_at();
            // A footer's length does not depend on where it lies.
            let probe =
                footer.encode(&position.at(trailer_at), &keyring.secret).map_err(|e| e.to_string())?;
            let len = probe.len() as u64;
            let last = trailer_at.saturating_sub(len);
            let below = seal.avoid.and_then(|old| old.checked_sub(len)).filter(|at| *at >= seal.log_end);
            let at = below.unwrap_or(last);
            if at < seal.log_end {
                return Err(
                    "the segment has no space for a footer: the store scans the segment at each start"
                        .to_owned(),
                );
            }
            let image = footer.encode(&position.at(at), &keyring.secret).map_err(|e| e.to_string())?;
            let tag = footer::tag_of(&image).ok_or("a footer has no tag")?;
            let sequence = |entry: Option<&Entry>| entry.map_or(0, |entry| entry.sequence);
            let trailer = Trailer {
                footer_offset: at,
                footer_tag: tag,
                footer_bytes: u32::try_from(len).map_err(|_| "a footer is larger than 4 GiB")?,
                record_count: u32::try_from(footer.records.len()).map_err(|_| {
                    "the segment has too many \
                    records for a footer"
                })?,
                first_sequence: sequence(footer.records.first()),
                last_sequence: sequence(footer.records.last()),
                log_end: seal.log_end,
                reason: SealReason::Recovery,
            };
            let place = trailer::position(&position, keyring.segment_bytes);
            let trailer = trailer.encode(&place, &keyring.secret).map_err(|e| e.to_string())?;
            Ok((at, image, trailer))
        };
        match images() {
            Ok((at, image, trailer)) => {
                let what = format!("is sealed again with its {} valid records", seal.entries.len());
                self.write(log, what, &[(at, image), (keyring.trailer_at(), trailer)]);
            }
            Err(why) => self.site.cannot(log, &self.path(), &why),
        }
    }

    /// Writes images in order, each durable before the next.
    fn write(&self, log: &mut Vec<Action>, what: String, images: &[(u64, Vec<u8>)]) -> bool {
        let path = self.path();
        self.site.act(log, (&path, what), |writer| {
            let together = kvarts_layout::planted!("repair-syncs-last");
            images.iter().try_for_each(|(at, image)| -> io::Result<()> {
                writer.write_at(&path, *at, image)?;
                if together { Ok(()) } else { writer.sync(&path) }
            })?;
            if together { writer.sync(&path) } else { Ok(()) }
        })
    }
}

/// Whether two readings of a segment say the same.
fn is_alike(first: &SegmentReport, again: &SegmentReport) -> bool {
    let generation = |report: &SegmentReport| report.ends.as_ref().and_then(|ends| ends.generation());
    first.findings == again.findings
        && generation(first) == generation(again)
        && first.outcome.records().eq(again.outcome.records())
}

/// A record as the footer lists it, or as it says itself if the footer leaves it out or cannot be believed.
fn kept(met: &Met, footer: &Footer) -> Option<Entry> {
    let listed = footer.records.iter().find(|entry| entry.offset == met.offset);
    match entry(met) {
        Some(own) => Some(own),
        // Of a newer version, or with an extension that is not known: proven, and kept as it is listed.
        None => listed.cloned(),
    }
}

fn end_of(met: &Met) -> u64 {
    met.offset.saturating_add(met.prefix.record_bytes())
}
