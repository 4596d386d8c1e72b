//! What the help says of exit codes: `cli.rs` keeps them, the help of each subcommand may name them.

/// What the end of the program says; part of the help.
pub(crate) const EXIT_CODES: &str = "\
Exit codes: 0 done, nothing wrong was found; 1 problems were found; 2 it could not be done, or its answer could not be \
written, one line on standard error says why (with --json an object with \"error\" on standard output too); 141 whoever \
read the output went away before its end.";
