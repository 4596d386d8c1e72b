//! What the help says of exit codes: `cli.rs` keeps them, the help of each subcommand may name them.

/// What the end of the program says; part of the help.
pub(crate) const EXIT_CODES: &str = "\
Exit codes: 0 success; 1 problems were found, or requested blocks are missing; 2 the command failed, or its \
output could not be written: one line on standard error gives the reason (with --json also an object with \"error\" on standard \
output); 141 the reader of the output closed it before its end.";
