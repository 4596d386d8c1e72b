//! The user's files: small texts are read, never more than a limit; results are written beside their target and renamed, so
//! that a command that fails leaves what was there before. What is wrong is said in the user's words.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

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

/// Writes a file. One that is there is refused, unless it is to be replaced.
pub(crate) fn write_text(path: &Path, text: &str, replace: bool) -> Result<(), Failure> {
    if !replace {
        refuse_existing(path)?;
    }
    let partial = Partial::new(path)?;
    partial.file().write_all(text.as_bytes()).map_err(|error| cannot(path, &error))?;
    partial.finish(replace)
}

/// Refuses a target that exists.
pub(crate) fn refuse_existing(path: &Path) -> Result<(), Failure> {
    match path.symlink_metadata() {
        Ok(_) => Err(Failure::User(format!(
            "{} is there already: choose another name, or remove it",
            path.display()
        ))),
        Err(_) => Ok(()),
    }
}

/// A file that is being written under another name. It is removed unless it is finished.
pub(crate) struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
}

#[allow(clippy::disallowed_methods, reason = "a file of the user's, outside any store")]
impl Partial {
    /// Begins a file beside its target.
    pub(crate) fn new(target: &Path) -> Result<Self, Failure> {
        let mut name = target.as_os_str().to_owned();
        name.push(".partial");
        let path = PathBuf::from(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(|error| cannot(&path, &error))?;
        Ok(Self { file, path, target: target.to_owned() })
    }

    /// Where the bytes go.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Makes the file durable and gives it its name; a file that has the name stays, unless it is to be replaced.
    pub(crate) fn finish(self, replace: bool) -> Result<(), Failure> {
        let named = self.file.sync_all().and_then(|()| match replace {
            true => std::fs::rename(&self.path, &self.target),
            false => std::fs::hard_link(&self.path, &self.target),
        });
        named.map_err(|error| cannot(&self.target, &error))?;
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let synced = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        synced.map_err(|error| cannot(&self.target, &error))
    }
}

#[allow(clippy::disallowed_methods, reason = "a file of the user's, outside any store")]
impl Drop for Partial {
    fn drop(&mut self) {
        // Under its own name it is whole, or was never finished.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn cannot(path: &Path, error: &io::Error) -> Failure {
    Failure::User(format!("{}: {}", path.display(), reason(error)))
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
