//! The `kvarts` program: one binary, every subcommand. All of it is in the library of this package.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvarts_server::main()
}
