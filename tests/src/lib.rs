//! Simulated disk and clock, reference model, fault campaign and end-to-end tests of Kvarts.

pub mod sim;
