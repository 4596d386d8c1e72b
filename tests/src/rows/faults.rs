//! Faults of the device: every operation in turn fails, lies, ends short or never; then the power is cut.

use super::cuts::{config, options, run};
use super::pool::{States, until};
use super::{Ask, Row, Tally};
use crate::campaign::{Judge, defects, verify};
use crate::sim::media::errno::{EAGAIN, ECANCELED, EINTR, EIO, ENOSPC};
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
    Plan { troubles, judge: Judge::BytesOnly }
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
    Plan { troubles, judge: Judge::Strict }
}

fn flushes() -> Plan {
    let flush = Which::Kind(OpKind::Flush);
    let troubles = [both(flush, Effect::DropDirty), both(flush, Effect::Errno(EIO))];
    Plan { troubles: troubles.into_iter().flatten().collect(), judge: Judge::Strict }
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
    Plan { troubles: kinds.into_iter().flat_map(of).filter(sensible).collect(), judge: Judge::Strict }
}

fn full() -> Plan {
    let which = [Which::Allocating, Which::Kind(OpKind::Allocate)];
    let troubles = which.into_iter().flat_map(|which| both(which, Effect::Errno(ENOSPC))).collect();
    Plan { troubles, judge: Judge::Strict }
}

fn stuck() -> Plan {
    let slow = Effect::Delay(std::time::Duration::from_secs(40));
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush];
    let of = |kind| [once(kind, Effect::Stuck), once(kind, slow)];
    Plan { troubles: kinds.into_iter().flat_map(of).collect(), judge: Judge::Strict }
}

/// Strikes the nth operation that a trouble applies to, for n = 1.. until none is struck any more.
fn strike(seed: Seed, plan: &Plan, states: &States) -> Result<(), String> {
    for trouble in &plan.troubles {
        let mut n = 1;
        loop {
            let when = if trouble.persistent { When::From(n) } else { When::Nth(n) };
            let rule = Rule::new(trouble.which, when, trouble.effect);
            let ran = run(seed, OPS, &[rule], false);
            if ran.struck == 0 {
                break;
            }
            let note = |what: String| format!("{rule:?}: {what}");
            if !ran.done && trouble.effect != Effect::Stuck {
                return Err(note("it hangs".to_owned()));
            }
            if let Some(reason) = defects(&ran.last.ledger).first() {
                return Err(note(format!("a caller was told: {reason}")));
            }
            for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Random(seed.nth(n).0)] {
                let image = ran.last.state.image(crash);
                states.reach(image.digest());
                judge(seed.nth(n), seed, image, &ran.last.ledger, plan.judge)
                    .map_err(|why| note(format!("{crash:?}: {why}")))?;
            }
            // The first are those of opening; later ones are much like each other. The rows say so.
            n += if n < 12 { 1 } else { 5 };
        }
    }
    Ok(())
}

fn judge(
    seed: Seed,
    settings: Seed,
    image: crate::sim::Media,
    ledger: &crate::campaign::Ledger,
    judge: Judge,
) -> Result<(), String> {
    match verify(seed, &config(settings), &options(settings), image, (ledger, judge)) {
        Ok(_) => Ok(()),
        // A disk that lied about a superblock leaves a store that says so and serves nothing.
        Err(why) if judge == Judge::BytesOnly && why.starts_with("it does not open") => Ok(()),
        Err(why) => Err(why),
    }
}

fn plan_row(ask: &Ask, target: u64, plan: &Plan) -> Tally {
    until(ask, target, |seed, states| strike(seed, plan, states))
}

/// The rows of this file.
pub(super) fn rows() -> Vec<Row> {
    let row = |id, what, targets, run| Row { id, what, counts: "images after a fault", targets, run };
    vec![
        row(
            "R8",
            "writes lost, misdirected or changed, flushes that do nothing",
            [300, 20_000, 200_000],
            |a, t| plan_row(a, t, &lies()),
        ),
        row(
            "R9",
            "an error at the first twelve operations of each kind and at every fifth after, once and from then on",
            [600, 40_000, 400_000],
            |a, t| plan_row(a, t, &errors()),
        ),
        row("R10", "a flush that fails and forgets, and the next succeeds", [200, 5_000, 50_000], |a, t| {
            plan_row(a, t, &flushes())
        }),
        row("R11", "short, empty, doubled, interrupted completions", [300, 20_000, 200_000], |a, t| {
            plan_row(a, t, &odd())
        }),
        row(
            "R12",
            "no space at the first twelve allocations and at every fifth after",
            [200, 10_000, 100_000],
            |a, t| plan_row(a, t, &full()),
        ),
        row("R13", "operations that never end or take forty seconds", [200, 10_000, 100_000], |a, t| {
            plan_row(a, t, &stuck())
        }),
    ]
}
