//! The `kvarts` program: one binary, every subcommand.

fn main() {}
