//! How much a look-up may look at.

use kvarts_contract::api::MAX_MATCH_ENTRIES;
use kvarts_layout::Requirements;

use super::fault::{Fault, Outcome};

/// Refuses what would look at more than is looked at once.
pub(crate) fn check_entries(keys: usize, requirements: &Requirements) -> Outcome<()> {
    let columns: usize = requirements.groups().iter().map(|group| group.coordinates.len()).sum();
    let (entries, most) = (keys.saturating_mul(columns), MAX_MATCH_ENTRIES);
    if entries > most {
        return Err(Fault::malformed(format!(
            "{keys} keys times {columns} coordinates are {entries} entries, but the limit of a look-up is \
            {most}"
        )));
    }
    Ok(())
}
