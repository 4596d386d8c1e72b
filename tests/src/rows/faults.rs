//! Faults of the device: every operation in turn fails, lies, ends short or never; then the power is cut.

use std::collections::BTreeSet;
use std::time::Duration;

use kvarts_contract::error::{DeleteCause, Reason};

use super::pool::{States, until};
use super::scene::{Ran, Stage, config, mix, options, run_work};
use super::{Ask, Row, Tally, Tier};
use crate::campaign::{Judge, Work, defects, verify};
use crate::sim::media::errno::{EAGAIN, EBUSY, ECANCELED, EINTR, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC};
use crate::sim::{Crash, Effect, OpKind, Rule, Seed, When, Which};

/// Operations of a workload.
const OPS: usize = 10;

/// One kind of trouble.
struct Trouble {
    which: Which,
    effect: Effect,
    /// Once, or from then on.
    persistent: bool,
}

/// What a row puts its workloads through, and how strictly they are judged.
struct Plan {
    troubles: Vec<Trouble>,
    judge: Judge,
    /// The deadline of every operation, where the disk may never answer.
    timeout: Option<Duration>,
    /// Whether it says nothing of the disk: then it latches nothing, and nothing is left of it when it is over.
    passes: bool,
}

fn once(kind: OpKind, effect: Effect) -> Trouble {
    Trouble { which: Which::Kind(kind), effect, persistent: false }
}

fn both(which: Which, effect: Effect) -> [Trouble; 2] {
    [false, true].map(|persistent| Trouble { which, effect, persistent })
}

fn lies() -> Plan {
    let effects = [Effect::Lost, Effect::Misdirect, Effect::FlipBit];
    let mut troubles: Vec<_> = effects.map(|effect| once(OpKind::Write, effect)).into();
    troubles.push(once(OpKind::Flush, Effect::Lost));
    troubles.push(once(OpKind::Read, Effect::FlipBit));
    Plan { troubles, judge: Judge::BytesOnly, timeout: None, passes: false }
}

fn errors() -> Plan {
    let kinds = [
        OpKind::Read,
        OpKind::Write,
        OpKind::Flush,
        OpKind::Open,
        OpKind::Allocate,
        OpKind::Truncate,
        OpKind::Rename,
        OpKind::Remove,
        OpKind::MakeDir,
        OpKind::SyncDir,
        OpKind::List,
        OpKind::Stat,
    ];
    let mut troubles: Vec<_> =
        kinds.into_iter().flat_map(|kind| both(Which::Kind(kind), Effect::Errno(EIO))).collect();
    troubles.extend(both(Which::Kind(OpKind::Write), Effect::Torn(EIO)));
    Plan { troubles, judge: Judge::Strict, timeout: None, passes: false }
}

/// What kernels say that lack something else than disk, or were interrupted. The seed decides which.
const PASSING: [i32; 6] = [EINTR, EAGAIN, ENOMEM, EBUSY, ENFILE, EMFILE];

fn shortages(seed: Seed) -> Plan {
    let errno = PASSING[seed.child("errno").rng().index(PASSING.len())];
    let troubles =
        OpKind::ALL.into_iter().flat_map(|kind| both(Which::Kind(kind), Effect::Errno(errno))).collect();
    Plan { troubles, judge: Judge::Strict, timeout: None, passes: true }
}

fn flushes() -> Plan {
    let flush = Which::Kind(OpKind::Flush);
    let troubles = [both(flush, Effect::DropDirty), both(flush, Effect::Errno(EIO))];
    Plan {
        troubles: troubles.into_iter().flatten().collect(),
        judge: Judge::Strict,
        timeout: None,
        passes: false,
    }
}

fn odd() -> Plan {
    let effects = [
        Effect::Short,
        Effect::Zero,
        Effect::Twice,
        Effect::Errno(EINTR),
        Effect::Errno(EAGAIN),
        Effect::Errno(ECANCELED),
    ];
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush];
    let of = |kind| effects.map(|effect| once(kind, effect));
    let sensible = |one: &Trouble| {
        let moves = !matches!(one.which, Which::Kind(OpKind::Flush));
        moves || !matches!(one.effect, Effect::Short | Effect::Zero)
    };
    Plan {
        troubles: kinds.into_iter().flat_map(of).filter(sensible).collect(),
        judge: Judge::Strict,
        timeout: None,
        passes: false,
    }
}

fn full() -> Plan {
    let which = [Which::Allocating, Which::Kind(OpKind::Allocate)];
    let troubles = which.into_iter().flat_map(|which| both(which, Effect::Errno(ENOSPC))).collect();
    Plan { troubles, judge: Judge::Strict, timeout: None, passes: false }
}

fn stuck() -> Plan {
    let slow = Effect::Delay(Duration::from_secs(40));
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush];
    let of = |kind| [once(kind, Effect::Stuck), once(kind, slow)];
    Plan {
        troubles: kinds.into_iter().flat_map(of).collect(),
        judge: Judge::Strict,
        timeout: Some(Duration::from_secs(20)),
        passes: false,
    }
}

/// At the merge tier one operation in this many is struck, from a first one that the seed decides: so this many seeds in a
/// row strike every operation. At the other tiers every seed strikes every operation.
const STRIDE: u64 = 8;

/// Strikes the nth operation that a trouble applies to, for n = 1.. until none is struck any more.
fn strike(tier: Tier, seed: Seed, plan: &Plan, states: &States) -> Result<(), String> {
    let (first, step) = if tier == Tier::Merge { (1 + seed.0 % STRIDE, STRIDE) } else { (1, 1) };
    for trouble in &plan.troubles {
        for n in (first..).step_by(step as usize) {
            let when = if trouble.persistent { When::From(n) } else { When::Nth(n) };
            let rule = Rule::new(trouble.which, when, trouble.effect);
            let work = Work { timeout: plan.timeout, passes: plan.passes, ..Work::new(OPS, mix(seed)) };
            let ran = run_work(seed, work, &[rule], false);
            if ran.struck == 0 {
                break;
            }
            let note = |what: String| format!("{rule:?}: {what}");
            ended(&ran, trouble.effect).map_err(note)?;
            if let Some(reason) = defects(&ran.last.ledger).first() {
                return Err(note(format!("a caller was told: {reason}")));
            }
            // Of a prefix, where a segment could not be opened over and over.
            let latched = |one: &&Reason| {
                matches!(one, Reason::Latched(_) | Reason::NotDeleted(DeleteCause::TooFew { .. }))
            };
            if plan.passes
                && let Some(reason) = ran.last.ledger.refusals.iter().find(latched)
            {
                return Err(note(format!("a caller was told: {reason}")));
            }
            if let Some(left) = &ran.left {
                return Err(note(format!("when it was over: {left}")));
            }
            for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Random(seed.nth(n).0)] {
                let image = ran.last.state.image(crash);
                states.reach(image.digest());
                let ledger = (&ran.last.ledger, plan.judge);
                match verify(seed.nth(n), &config(seed), &options(seed), image, ledger) {
                    Ok(_) => {}
                    Err(why) if may_refuse(trouble.effect, &ran.files, &why) => {}
                    Err(why) => return Err(note(format!("{crash:?}: {why}"))),
                }
            }
        }
    }
    Ok(())
}

/// Whatever the disk does, the workload comes to its end. Only opening has no deadline: no caller was promised anything
/// yet, and opening waits for as long as the disk takes.
fn ended(ran: &Ran, effect: Effect) -> Result<(), String> {
    match &ran.hang {
        None => Ok(()),
        Some(_) if effect == Effect::Stuck && ran.stage == Stage::Opening => Ok(()),
        Some(hang) => {
            Err(format!("it hangs, {:?}, waits for {}: {hang}", ran.stage, ran.last.ledger.waits_for))
        }
    }
}

/// What a store says that cannot be opened because no slot of a superblock is sound.
const REFUSALS: [&str; 3] =
    ["neither superblock slot is valid", "slots contradict each other", "has no superblock any more"];

/// When a store may refuse to open: its disk has lied about where it wrote, and wrote over a superblock. A single lost or
/// changed write leaves the other slot sound, and damage anywhere else costs blocks, never the store.
fn may_refuse(effect: Effect, files: &BTreeSet<String>, why: &str) -> bool {
    effect == Effect::Misdirect
        && files.iter().any(|file| file.ends_with("/superblock"))
        && why.starts_with("it does not open")
        && REFUSALS.iter().any(|refusal| why.contains(refusal))
}

fn plan_row(ask: &Ask, target: u64, plan: &Plan) -> Tally {
    until(ask, target, |seed, states| strike(ask.tier, seed, plan, states))
}

/// The rows of this file.
pub(super) fn rows() -> Vec<Row> {
    let row = |id, what, targets, run| Row { id, what, counts: "images after a fault", targets, run };
    vec![
        row(
            "R8",
            "writes lost, misdirected or changed, flushes that do nothing",
            [300, 10_000, 200_000],
            |a, t| plan_row(a, t, &lies()),
        ),
        row(
            "R9",
            "an error at every operation of each kind, once and from then on",
            [600, 10_000, 400_000],
            |a, t| plan_row(a, t, &errors()),
        ),
        row("R10", "a flush that fails and forgets, and the next succeeds", [200, 5_000, 50_000], |a, t| {
            plan_row(a, t, &flushes())
        }),
        row("R11", "short, empty, doubled, interrupted completions", [300, 20_000, 200_000], |a, t| {
            plan_row(a, t, &odd())
        }),
        row(
            "R29",
            "what is not the disk's (no descriptor, no memory, an interruption) at every operation",
            [300, 10_000, 200_000],
            |a, t| until(a, t, |seed, states| strike(a.tier, seed, &shortages(seed), states)),
        ),
        row("R12", "no space at every allocation", [200, 5_000, 100_000], |a, t| plan_row(a, t, &full())),
        row("R13", "operations that never end or take forty seconds", [200, 6_000, 100_000], |a, t| {
            plan_row(a, t, &stuck())
        }),
    ]
}
