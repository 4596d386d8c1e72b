//! How much longer than its caller a call waits, and how long at most.

use std::time::Duration;

/// How long after its deadline a server may take to say how a read ended.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// A caller may give any timeout: no clock has room for all of it.
pub(super) const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);
