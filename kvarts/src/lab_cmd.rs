//! `kvarts bench` and `kvarts sim`: handed over to `kvarts-lab`, the program that measures.
//!
//! They are apart so that what serves does not carry them: neither while it is built nor in what is installed.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use kvarts_terminal::{Failure, Refusal};

/// The program's name.
const PROGRAM: &str = "kvarts-lab";

/// Arguments that are not ours to read, `--help` among them.
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct HandedOver {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Becomes that program. Comes back only where it cannot be started.
pub(crate) fn run(command: &str, handed: &HandedOver) -> Result<(), Failure> {
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent);
    let Some(program) = found(beside, std::env::var_os("PATH")) else {
        let place = beside.map_or_else(String::new, |beside| format!(" in {} and", beside.display()));
        return Err(Failure::Refused(Refusal::new(
            "no_lab",
            format!("`kvarts {command}` needs the program {PROGRAM}, which was not found{place} in PATH"),
            "in a checkout `cargo build --release -p kvarts-bench` builds the program, `cargo install --path \
            bench` installs it",
        )));
    };
    match become_program(&program, command, handed) {
        Ok(never) => match never {},
        Err(error) => Err(Failure::user(format!("{}: {error}", program.display()))),
    }
}

fn become_program(program: &Path, command: &str, handed: &HandedOver) -> std::io::Result<Infallible> {
    Err(Command::new(program).arg(command).args(&handed.arguments).exec())
}

/// The one beside this program, which is of the same build, before one in the search path.
fn found(beside: Option<&Path>, search: Option<OsString>) -> Option<PathBuf> {
    let search = search.map(|paths| std::env::split_paths(&paths).collect::<Vec<_>>()).unwrap_or_default();
    let places = beside.map(Path::to_path_buf).into_iter().chain(search);
    places.map(|place| place.join(PROGRAM)).find(|path| path.is_file())
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "the files belong to a program, not to a store")]
mod tests {
    use super::*;

    #[test]
    fn the_one_beside_is_found_first_and_the_search_path_after_it() {
        let root = std::env::temp_dir().join(format!("kvarts-lab-found-{}", std::process::id()));
        let (beside, other) = (root.join("beside"), root.join("other"));
        for place in [&beside, &other] {
            std::fs::create_dir_all(place).unwrap();
        }
        let search = || Some(OsString::from(format!("/nowhere:{}", other.display())));
        assert_eq!(found(Some(&beside), search()), None);
        std::fs::write(other.join(PROGRAM), "").unwrap();
        assert_eq!(found(Some(&beside), search()), Some(other.join(PROGRAM)));
        std::fs::write(beside.join(PROGRAM), "").unwrap();
        assert_eq!(found(Some(&beside), search()), Some(beside.join(PROGRAM)));
        assert_eq!((found(None, None), found(Some(&beside), None)), (None, Some(beside.join(PROGRAM))));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
