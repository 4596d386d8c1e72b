//! Simulated disk and clock, reference model, fault campaign and end-to-end tests of Kvarts.

pub mod audit;
pub mod block;
pub mod campaign;
pub mod conformance;
pub mod depth;
pub mod fixture;
pub mod flaky;
pub mod golden;
pub mod landed;
pub mod model;
pub mod nodes;
pub mod rows;
pub mod script;
pub mod scripted;
pub mod sim;
pub mod stage;
pub mod witness;
