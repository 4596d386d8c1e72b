//! The tier over a bucket in memory whose requests fail, in virtual time.

mod budgets;
mod busy;
mod check;
mod clocks;
mod collect;
mod conditions;
mod deleted;
mod fixture;
mod late;
mod push;
mod restore;
mod store;
mod storms;
mod withdraw;
