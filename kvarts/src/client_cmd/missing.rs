//! Why blocks cannot be restored, in words and for programs.

use std::io::Write;

use kvarts_client::Client;
use kvarts_contract::api::{ContainsRequest, KvStore, MAX_REQUEST_BLOCKS, Missing};
use kvarts_layout::BlockKey;
use kvarts_server::human::grouped;
use kvarts_terminal::Failure;
use serde_json::{Value, json};

use super::subject::Subject;

/// Why blocks are not there, as far as the server can say. What it refuses to say is left out.
pub(super) fn of(client: &Client, subject: &Subject, keys: &[BlockKey]) -> Missing {
    let Subject { namespace, group, coordinate, .. } = *subject;
    let mut all = Missing::default();
    for keys in keys.chunks(MAX_REQUEST_BLOCKS) {
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
        let Ok(found) = client.contains(&request) else { break };
        all += found.missing;
    }
    all
}

/// For a program.
pub(super) fn report(missing: &Missing) -> Value {
    let Missing { evicted, expired, deleted, out_of_service, never_stored, cut_off } = *missing;
    json!({
        "evicted": evicted, "expired": expired, "deleted": deleted, "out_of_service": out_of_service,
        "never_stored": never_stored, "cut_off": cut_off,
    })
}

/// For a person: a line for each reason.
pub(super) fn show(missing: &Missing, out: &mut dyn Write) -> Result<(), Failure> {
    for (blocks, why) in missing.told() {
        writeln!(out, "  {} {why}", grouped(blocks))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_told_once_and_only_if_there_is_one() {
        let mut out = Vec::new();
        show(&Missing::default(), &mut out).unwrap();
        assert!(out.is_empty());
        let missing = Missing { evicted: 1234, never_stored: 2, ..Missing::default() };
        show(&missing, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "  1,234 evicted: the space was needed for other blocks",
                "  2 never stored, according to this server's records"
            ]
        );
        assert_eq!(report(&missing)["evicted"], 1234);
    }
}
