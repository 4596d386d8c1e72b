//! How many records hang on each of an account's: so the ends of its chains are found without a look at their blocks.

use std::collections::BTreeMap;

use crate::index::RecordId;

/// Records of which the counts are allocated together.
const PAGE: u32 = 4096;
/// This many, or more: such a count does not change any more.
const MANY: u8 = u8::MAX;

/// A byte for each record, where any is not zero.
#[derive(Debug, Default)]
pub(super) struct Hanging(BTreeMap<u32, Box<[u8; PAGE as usize]>>);

impl Hanging {
    /// One more hangs on a record.
    pub(super) fn add(&mut self, id: RecordId) {
        let page = self.0.entry(id.0 / PAGE).or_insert_with(|| Box::new([0; PAGE as usize]));
        if let Some(count) = page.get_mut((id.0 % PAGE) as usize) {
            *count = count.saturating_add(1);
        }
    }

    /// One of them has gone; true if it was the last.
    pub(super) fn remove(&mut self, id: RecordId) -> bool {
        let page = self.0.get_mut(&(id.0 / PAGE));
        let Some(count) = page.and_then(|page| page.get_mut((id.0 % PAGE) as usize)) else { return false };
        if matches!(*count, 0 | MANY) {
            return false;
        }
        *count -= 1;
        *count == 0
    }

    /// Whether this many hang on a record.
    pub(super) fn is_on(&self, id: RecordId, count: u8) -> bool {
        let page = self.0.get(&(id.0 / PAGE));
        page.and_then(|page| page.get((id.0 % PAGE) as usize)).copied().unwrap_or(0) == count
    }

    /// Whether nothing does.
    pub(super) fn is_end(&self, id: RecordId) -> bool {
        self.is_on(id, 0)
    }

    /// Forgets some of the counts; false if there are none left.
    pub(super) fn forget_some(&mut self) -> bool {
        self.0.pop_first().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_an_end_once_the_last_that_hung_on_it_has_gone() {
        let mut hanging = Hanging::default();
        let (one, other) = (RecordId(5 * PAGE - 1), RecordId(5 * PAGE));
        assert!(hanging.is_end(one) && !hanging.remove(one));
        hanging.add(one);
        hanging.add(one);
        hanging.add(other);
        assert!(!hanging.is_end(one) && !hanging.remove(one) && hanging.remove(one) && hanging.is_end(one));
        assert!(!hanging.is_end(other) && !hanging.remove(RecordId(5 * PAGE + 1)));
        (0..300).for_each(|_| hanging.add(one));
        (0..300).for_each(|_| assert!(!hanging.remove(one), "how many are left is not known"));
        assert!(
            !hanging.is_end(one) && hanging.forget_some() && hanging.forget_some() && !hanging.forget_some()
        );
    }
}
