//! Stores that earlier programs wrote: clean to the checker, open to the engine, and holding what was put; also when the
//! power fails while they are opened.

use std::collections::BTreeSet;
use std::path::Path;

use kvarts_contract::api::KvStore;
use kvarts_fsck::check::Level;
use kvarts_layout::IndexKey;
use kvarts_store::engine::Store;

use super::pool::{States, caught};
use super::{Ask, Row, Tally, Violation};
use crate::campaign::{Driven, Opened, drive, read_all, reopen};
use crate::golden::{content, folders, load};
use crate::sim::{Crash, Media, Seed, SimWorld, WorldConfig};
use crate::stage;
use crate::witness::{directories, examine, media, problems, small};

fn keys(opened: &Opened) -> Result<BTreeSet<String>, String> {
    let (mut all, mut cursor) = (BTreeSet::new(), None);
    loop {
        let page =
            stage::drive(&opened.world, opened.store.snapshot(cursor)).map_err(|hang| hang.to_string())?;
        let page = page.map_err(|_| "no snapshot")?.map_err(|error| error.to_string())?;
        let line = |key: &IndexKey| {
            format!("{} {} {} {}", key.namespace, key.key, key.group.0, key.coordinate.to_u64())
        };
        all.extend(page.blocks.iter().map(line));
        match page.next {
            Some(next) => cursor = Some(next),
            None => return Ok(all),
        }
    }
}

/// The engine opens an image and reads every block that it holds.
fn opens(seed: Seed, image: Media, expected: &BTreeSet<String>) -> Result<(Media, u64), String> {
    let opened = reopen(seed, &WorldConfig::default(), &small(1), image)?;
    let operations = opened.world.disk().operations().1;
    let found = keys(&opened)?;
    if found != *expected {
        let other: Vec<_> = found.symmetric_difference(expected).take(3).collect();
        return Err(format!("{} blocks where {} were put: {other:?}", found.len(), expected.len()));
    }
    let read = match drive(&opened.world, u64::MAX, read_all(&opened.store)) {
        Driven::Done(found) => found,
        other => return Err(format!("reading ends with {other:?}")),
    };
    let good = read.values().filter(|state| state.is_ok()).count();
    if good != expected.len() {
        return Err(format!("{good} blocks can be read of {}", expected.len()));
    }
    Ok((opened.world.kill(), operations))
}

fn image(folder: &Path, states: &States) -> Result<(), String> {
    let disk = load(folder);
    #[allow(clippy::disallowed_methods, reason = "golden files, outside any store")]
    let text = std::fs::read_to_string(folder.join("content.txt")).map_err(|error| error.to_string())?;
    let checked = examine(std::slice::from_ref(&disk), Level::Deep).map_err(|why| why.to_string())?;
    if !checked.findings.is_clean() {
        return Err(problems(&checked));
    }
    if content(&disk) != text {
        return Err("the checker finds another content than was put".to_owned());
    }
    let line = |line: &str| line.split(' ').take(4).collect::<Vec<_>>().join(" ");
    let expected: BTreeSet<String> = text.lines().map(line).collect();
    let image = media(&[disk]);
    let (left, operations) = opens(Seed(1), image.clone(), &expected)?;
    states.reach(left.digest());
    let after = directories(&left);
    let checked = examine(&after, Level::Deep).map_err(|why| why.to_string())?;
    if !checked.findings.is_clean() || content(&after[0]) != text {
        return Err(format!("the engine has changed what is there: {}", problems(&checked)));
    }
    for cut in 1..operations {
        let world = SimWorld::with_media(cut, &WorldConfig::default(), image.clone());
        let launcher = world.launcher();
        let _ = drive(&world, cut, Store::open(&launcher, &small(1)));
        let state = world.cut_power();
        for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Random(cut)] {
            let image = state.image(crash);
            states.reach(image.digest());
            opens(Seed(cut), image, &expected).map_err(|why| format!("opening cut at {cut}: {why}"))?;
        }
    }
    Ok(())
}

fn run(ask: &Ask) -> Tally {
    let (states, mut violations) = (States::default(), Vec::new());
    let all = folders();
    if all.is_empty() {
        violations.push(Violation { seed: ask.seed, what: "there is no image".to_owned() });
    }
    for folder in &all {
        if let Err(what) = caught(|| image(folder, &states)) {
            violations.push(Violation { seed: ask.seed, what: format!("{}: {what}", folder.display()) });
        }
    }
    let seeds = ask.seed..ask.seed + all.len() as u64;
    Tally { distinct: states.len(), visited: 0, seeds, violations, skipped: None }
}

/// Row R23.
pub(super) fn row() -> Row {
    Row {
        id: "R23",
        what: "stores that every earlier version wrote, opened, read and checked; power cuts while they are opened",
        counts: "images after opening, all there are",
        targets: [1, 1, 1],
        run: |ask, _| run(ask),
    }
}
