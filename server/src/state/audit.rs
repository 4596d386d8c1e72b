//! Limits the lines that are written about refused calls: enough to see who is refused, few enough that a client cannot
//! fill the disk with them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvarts_contract::clock::{Clock, Nanos};

/// Lines in one span of time.
const LINES: u32 = 100;
const SPAN: Duration = Duration::from_secs(1);

/// Counts lines.
#[derive(Debug)]
pub struct Audit {
    clock: Arc<dyn Clock>,
    /// Since when, and how many.
    lines: Mutex<(Nanos, u32)>,
}

impl Audit {
    /// Nothing was told yet.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let lines = Mutex::new((clock.now(), 0));
        Self { clock, lines }
    }

    /// Whether one more line may be written now.
    pub fn may_tell(&self) -> bool {
        let now = self.clock.now();
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if now.since(lines.0) >= SPAN {
            *lines = (now, 0);
        }
        lines.1 = lines.1.saturating_add(1);
        lines.1 <= LINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::clock::ManualClock;

    #[test]
    fn a_flood_is_told_of_in_so_many_lines_a_second() {
        let clock = ManualClock::new(0);
        let audit = Audit::new(Arc::clone(&clock) as Arc<dyn Clock>);
        let told = |audit: &Audit| (0..1000).filter(|_| audit.may_tell()).count();
        assert_eq!((told(&audit), told(&audit)), (100, 0));
        clock.advance(Duration::from_secs(1));
        assert_eq!(told(&audit), 100);
    }
}
