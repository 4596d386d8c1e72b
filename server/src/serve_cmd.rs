//! `kvarts serve`: says what there is until the daemon exists.

use clap::Args;

use crate::cli::Failure;

/// The daemon takes no arguments yet.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {}

/// Always a refusal: the daemon is not built yet.
pub(crate) fn run(_arguments: &ServeArgs) -> Result<(), Failure> {
    Err(Failure::user(
        "the server is not built yet; what runs today: `kvarts model list`, `kvarts model show NAME`, \
         `kvarts model import CONFIG`, `kvarts model check FILE`, `kvarts bench layers`",
    ))
}
