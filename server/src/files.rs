//! Reads the user's small text files, never more than a limit, and says what is wrong in their words.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::cli::Failure;

/// The text of a file, or of standard input for `-`; refused if it has more than `limit` bytes, which are not
/// read.
pub(crate) fn read_text(path: &Path, limit: usize, what: &str) -> Result<String, Failure> {
    let shown = path.display();
    let fault = |error: &io::Error| Failure::User(format!("{shown}: {}", reason(error)));
    let mut bytes = Vec::new();
    let limit_read = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    if path.as_os_str() == "-" {
        io::stdin().lock().take(limit_read).read_to_end(&mut bytes).map_err(|error| fault(&error))?;
    } else {
        let file = open(path).map_err(|error| fault(&error))?;
        file.take(limit_read).read_to_end(&mut bytes).map_err(|error| fault(&error))?;
    }
    if bytes.len() > limit {
        return Err(Failure::User(format!("{shown}: {what} has at most {limit} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::User(format!("{shown}: not a text: byte {at} is not UTF-8"))
    })
}

/// Writes a file, replacing one that is there.
#[allow(clippy::disallowed_methods, reason = "a file of the user's, outside any store")]
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text)
        .map_err(|error| Failure::User(format!("{}: {}", path.display(), reason(&error))))
}

#[allow(clippy::disallowed_methods, reason = "a file of the user's, outside any store")]
fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".to_owned(),
        io::ErrorKind::IsADirectory => "a directory, not a file".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}
