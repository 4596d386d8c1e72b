//! When this side stops waiting for a server on its own host.

use std::time::Duration;

use kvarts_contract::clock::{Clock, Nanos};

use crate::timeouts::{GRACE, LONGEST};

/// How often it is looked for what has become late, or is not wanted any more.
pub(super) const LOOK: Duration = Duration::from_millis(25);

/// When a request with this deadline is answered at the latest, by this side.
pub(super) fn late(deadline: Option<Nanos>) -> Option<Nanos> {
    Some(deadline?.plus(GRACE))
}

/// Ends when the server should have answered, and does not.
pub(super) async fn passed(clock: &dyn Clock, deadline: Option<Nanos>) {
    let left = deadline.map_or(LONGEST, |deadline| deadline.since(clock.now()).min(LONGEST));
    tokio::time::sleep(left + GRACE).await;
}

/// Ends soon after it is not wanted any more.
pub(super) async fn given_up(is: impl Fn() -> bool) {
    while !is() {
        tokio::time::sleep(LOOK).await;
    }
}
