//! How the tasks of an executor wait for one another and give others their turn.

pub(crate) mod fair_turn;
pub(crate) mod notify;
pub(crate) mod steps;
pub(crate) mod write_barrier;
