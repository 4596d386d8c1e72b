//! Which blocks of a record, or which layers of a block, are wanted.

use super::PlanError;

/// A strictly increasing choice of numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Pick {
    /// `first .. first + count`.
    Range {
        /// First number.
        first: u32,
        /// How many.
        count: u32,
    },
    /// These, which must strictly increase.
    List(Vec<u32>),
}

impl Pick {
    /// The first `count` numbers.
    pub const fn first(count: u32) -> Self {
        Self::Range { first: 0, count }
    }

    /// How many are chosen.
    pub fn count(&self) -> u32 {
        match self {
            Self::Range { count, .. } => *count,
            Self::List(list) => u32::try_from(list.len()).unwrap_or(u32::MAX),
        }
    }

    /// The chosen number at `position`, counted from zero.
    pub fn get(&self, position: u32) -> Option<u32> {
        match self {
            Self::Range { first, count } => {
                (position < *count).then(|| first.checked_add(position)).flatten()
            }
            Self::List(list) => list.get(usize::try_from(position).ok()?).copied(),
        }
    }

    /// Refuses an empty or unsorted choice and one that reaches `available`.
    pub(super) fn check(&self, available: u32) -> Result<(), PlanError> {
        let last = match self {
            Self::Range { count: 0, .. } => return Err(PlanError::Nothing),
            Self::Range { first, count } => first.saturating_add(count.saturating_sub(1)),
            Self::List(list) if !list.is_sorted_by(|a, b| a < b) => return Err(PlanError::Order),
            Self::List(list) => *list.last().ok_or(PlanError::Nothing)?,
        };
        if last >= available {
            return Err(PlanError::OutOfRange { wanted: last, available });
        }
        Ok(())
    }

    /// Calls `visit(first, position, count)` for every maximal run of consecutive numbers, in order.
    pub(super) fn for_each_run(&self, mut visit: impl FnMut(u32, u32, u32)) {
        match self {
            Self::Range { first, count } => visit(*first, 0, *count),
            Self::List(list) => {
                let mut position = 0u32;
                for run in list.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
                    let count = u32::try_from(run.len()).unwrap_or(u32::MAX);
                    if let Some(&first) = run.first() {
                        visit(first, position, count);
                    }
                    position = position.saturating_add(count);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(pick: &Pick) -> Vec<(u32, u32, u32)> {
        let mut runs = Vec::new();
        pick.for_each_run(|first, position, count| runs.push((first, position, count)));
        runs
    }

    #[test]
    fn a_list_falls_into_its_consecutive_runs() {
        assert_eq!(runs(&Pick::List(vec![0, 2, 3, 4, 9])), [(0, 0, 1), (2, 1, 3), (9, 4, 1)]);
        assert_eq!(runs(&Pick::Range { first: 5, count: 3 }), [(5, 0, 3)]);
    }

    #[test]
    fn a_choice_that_is_empty_unsorted_doubled_or_too_far_is_refused() {
        assert_eq!(Pick::first(0).check(9), Err(PlanError::Nothing));
        assert_eq!(Pick::List(vec![]).check(9), Err(PlanError::Nothing));
        assert_eq!(Pick::List(vec![2, 1]).check(9), Err(PlanError::Order));
        assert_eq!(Pick::List(vec![1, 1]).check(9), Err(PlanError::Order));
        let too_far = Err(PlanError::OutOfRange { wanted: 9, available: 9 });
        assert_eq!(Pick::List(vec![1, 9]).check(9), too_far);
        assert_eq!(Pick::Range { first: 8, count: 2 }.check(9), too_far);
        let overflowing = Pick::Range { first: u32::MAX, count: 2 };
        assert_eq!(
            overflowing.check(u32::MAX),
            Err(PlanError::OutOfRange { wanted: u32::MAX, available: u32::MAX })
        );
        assert_eq!(Pick::Range { first: 7, count: 2 }.check(9), Ok(()));
        assert_eq!(Pick::List(vec![0, 8]).check(9), Ok(()));
    }

    #[test]
    fn a_position_past_the_choice_has_no_number() {
        assert_eq!(Pick::Range { first: 4, count: 2 }.get(1), Some(5));
        assert_eq!(Pick::Range { first: 4, count: 2 }.get(2), None);
        assert_eq!(Pick::List(vec![3, 7]).get(1), Some(7));
        assert_eq!(Pick::List(vec![3, 7]).get(2), None);
    }
}
