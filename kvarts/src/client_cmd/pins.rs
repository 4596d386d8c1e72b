//! `kvarts pin`: blocks of a running server are held against eviction; what is held is listed; a pin is ended.

use std::io::Write;
use std::time::Duration;

use clap::Args;
use kvarts_contract::api::{KvStore, LeaseId};
use kvarts_layout::NamespaceId;
use kvarts_layout::spec::shipped::distance;
use serde_json::{Value, json};

use super::subject::{self, Subject};
use super::{KeyArgs, ModelArgs, ServerArgs, print};
use kvarts_client::{Client, Pinned, Via};
use kvarts_server::human::grouped;
use kvarts_terminal::{Align, Failure, Table};
use kvarts_wire::proto::list_pins_reply::Pin;

/// Pins that are named where one does not exist.
const SHOWN: usize = 10;

/// The arguments of `pin`.
#[derive(Args, Debug)]
pub(crate) struct PinArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// Duration of the pin, such as 90s, 30m, 12h; at most a day
    #[arg(long, default_value = "1h", value_parser = subject::duration)]
    hold: Duration,
    /// End this pin instead of creating one
    #[arg(long, value_name = "PIN", conflicts_with_all = ["tokens", "keys"])]
    release: Option<u64>,
    /// List pins, and leases of look-ups, instead of making a pin
    #[arg(long, conflicts_with_all = ["tokens", "keys", "release"])]
    list: bool,
    /// With --list: list the pins of all tenants; requires the right `admin`
    #[arg(long, requires = "list")]
    all_tenants: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `pin`.
pub(crate) fn pin(arguments: &PinArgs, out: &mut dyn Write) -> Result<(), Failure> {
    // A pin of the local path would end with this program.
    let client = arguments.server.connect(Via::Grpc)?;
    if arguments.list {
        let reply = client.pins(arguments.all_tenants).map_err(Failure::user)?;
        return match arguments.server.json {
            true => {
                let pins: Vec<Value> = reply.pins.iter().map(listed).collect();
                print(out, &json!({"pins": pins, "more": reply.more}))
            }
            false => show(&reply.pins, reply.more, out),
        };
    }
    if let Some(pin) = arguments.release {
        return release(&client, pin, arguments.server.json, out);
    }
    let subject = Subject::new(&client, &arguments.model, &arguments.keys)?;
    let column = (subject.group, subject.coordinate);
    let pinned = client.pin(subject.namespace, column, &subject.keys, arguments.hold);
    let Pinned { lease, held, hold } = pinned.map_err(Failure::user)?;
    let pin = lease.map(|lease| lease.0);
    let is_cut = hold.is_some_and(|hold| hold < arguments.hold);
    let hold_ms = hold.map(|hold| u64::try_from(hold.as_millis()).unwrap_or(u64::MAX));
    if arguments.server.json {
        let all = subject.keys.len();
        print(out, &json!({"pin": pin, "held_blocks": held, "asked_blocks": all, "hold_ms": hold_ms}))?;
    } else if let Some(pin) = pin {
        let all = subject.keys.len();
        let long = hold_ms.map_or_else(String::new, |hold| format!(" for {}", span(hold)));
        writeln!(
            out,
            "{held} of {all} blocks are pinned{long}; `kvarts pin --release {pin}` ends the pin sooner"
        )?;
        if is_cut {
            let asked = span(u64::try_from(arguments.hold.as_millis()).unwrap_or(u64::MAX));
            writeln!(
                out,
                "{asked} were requested, but a pin lasts at most a day: pin the blocks again before the pin \
                ends"
            )?;
        }
    } else {
        writeln!(out, "none of the blocks is stored, so no block was pinned")?;
    }
    if held as usize == subject.keys.len() && !is_cut { Ok(()) } else { Err(Failure::Problems) }
}

/// Ends a pin; of one that does not exist it says which there are.
fn release(client: &Client, pin: u64, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let ended = client.unpin(LeaseId(pin));
    let listed = if ended { None } else { Some(client.pins(false).map_err(Failure::user)?) };
    // Leases of the local path have no number that another process could name.
    let pins = listed.iter().flat_map(|reply| &reply.pins).map(|pin| pin.lease).filter(|pin| *pin != 0);
    let pins: Vec<u64> = pins.collect();
    let more = listed.is_some_and(|reply| reply.more);
    if json {
        print(out, &json!({"pin": pin, "ended_now": ended, "pins": pins}))?;
    } else if ended {
        writeln!(out, "the pin has ended")?;
    } else {
        writeln!(out, "{}", absent(pin, &pins, more))?;
    }
    if ended { Ok(()) } else { Err(Failure::Problems) }
}

/// What is said of a pin that does not exist: those that do, and the one that was probably meant.
fn absent(pin: u64, pins: &[u64], more: bool) -> String {
    if pins.is_empty() {
        return format!(
            "the pin {pin} does not exist, and the server has no other pins: a pin ends when it is released \
            or expires"
        );
    }
    let digits = |pin: u64| pin.to_string().chars().collect::<Vec<char>>();
    let near = pins.iter().map(|other| (distance(&digits(pin), &digits(*other)), other));
    let meant = match near.min() {
        Some((..=2, other)) => format!("; did you mean {other}?"),
        _ => String::new(),
    };
    let shown: Vec<String> = pins.iter().take(SHOWN).map(u64::to_string).collect();
    let rest = if more || pins.len() > SHOWN { " and more" } else { "" };
    format!(
        "the pin {pin} does not exist; the pins are {}{rest} (`kvarts pin --list`){meant}",
        shown.join(", ")
    )
}

fn namespace(pin: &Pin) -> String {
    <[u8; 32]>::try_from(&pin.namespace[..]).map(|id| NamespaceId(id).to_string()).unwrap_or_default()
}

fn listed(pin: &Pin) -> Value {
    json!({
        "pin": (pin.lease != 0).then_some(pin.lease), "tenant": pin.tenant, "namespace": namespace(pin),
        "model": pin.model, "blocks": pin.blocks, "ends_in_ms": pin.ends_in_ms, "taken_by": pin.method,
        "path": pin.path,
    })
}

fn show(pins: &[Pin], more: bool, out: &mut dyn Write) -> Result<(), Failure> {
    if pins.is_empty() {
        return Ok(writeln!(out, "no pins exist")?);
    }
    let columns = [
        ("PIN", Align::Left),
        ("TENANT", Align::Left),
        ("BLOCKS", Align::Right),
        ("ENDS IN", Align::Right),
        ("TAKEN BY", Align::Left),
        ("MODEL", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for pin in pins {
        let name = if pin.lease == 0 { "-".to_owned() } else { pin.lease.to_string() };
        let by = format!("{}, {}", pin.method, pin.path);
        let model = format!("{} {}", pin.model.escape_debug(), namespace(pin).get(..8).unwrap_or_default());
        table.row([name, pin.tenant.clone(), grouped(pin.blocks.into()), span(pin.ends_in_ms), by, model]);
    }
    write!(out, "{table}")?;
    match more {
        true => Ok(writeln!(out, "More pins exist; the list shows the pins that end first.")?),
        false => Ok(()),
    }
}

/// A time from now on, as people say it.
pub(super) fn span(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_pin_that_does_not_exist_those_are_told_that_do() {
        let told = absent(124, &[99_000, 1_234], false);
        assert_eq!(
            told,
            "the pin 124 does not exist; the pins are 99000, 1234 (`kvarts pin --list`); did you mean 1234?"
        );
        let told = absent(7, &(100..120).collect::<Vec<u64>>(), false);
        assert!(
            told.contains("100, 101, ") && told.contains("109 and more (") && !told.contains("110"),
            "{told}"
        );
        let told = absent(7, &[], false);
        assert!(told.contains("the pin 7 does not exist, and the server has no other"), "{told}");
    }

    #[test]
    fn times_are_short() {
        let said: Vec<String> = [999, 59_000, 61_000, 3_600_000, 90_000_000].into_iter().map(span).collect();
        assert_eq!(said, ["0 s", "59 s", "1 min", "1 h 0 min", "25 h 0 min"]);
    }
}
