//! The user's files: small texts are read, never more than a limit; results are written into a file without a name and get
//! it when they are whole, so that a command that fails or is interrupted leaves what was there before, and nothing else.
//! Where a file system has no files without a name, they have a random one meanwhile. What is wrong is said in the user's
//! words.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use kvarts_contract::clock::Entropy;
use kvarts_contract::clock::OsEntropy;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use kvarts_terminal::Failure;

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
        return Err(Failure::User(format!("{shown}: {what} can have at most {limit} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::User(format!("{shown}: the file is not text: byte {at} is not UTF-8"))
    })
}

/// Writes a file. One that is there is refused, unless it is to be replaced.
pub(crate) fn write_text(path: &Path, text: &str, replace: bool) -> Result<(), Failure> {
    if !replace {
        refuse_existing(path, true)?;
    }
    let partial = Partial::new(path)?;
    partial.file().write_all(text.as_bytes()).map_err(|error| cannot(path, &error))?;
    partial.finish(replace)
}

/// Refuses a target that exists; `may_replace` where the command has `--force`.
pub(crate) fn refuse_existing(path: &Path, may_replace: bool) -> Result<(), Failure> {
    let advice = if may_replace { "replace it with --force" } else { "remove it" };
    match path.symlink_metadata() {
        Ok(_) => {
            Err(Failure::User(format!("{} exists already: choose another name, or {advice}", path.display())))
        }
        Err(_) => Ok(()),
    }
}

/// Where a process finds its own files.
const OWN_FILES: &str = "/proc/self/fd";

/// A file that is being written. It has another name, or none, until it is finished.
pub(crate) struct Partial {
    file: File,
    /// Its name meanwhile, which is removed in the end.
    path: Option<PathBuf>,
    target: PathBuf,
}

#[allow(clippy::disallowed_methods, reason = "the file belongs to the user and is outside every store")]
impl Partial {
    /// Begins a file beside its target.
    pub(crate) fn new(target: &Path) -> Result<Self, Failure> {
        let (path, target) = (None, target.to_owned());
        match without_name(folder_of(&target), OFlags::WRONLY) {
            Ok(file) if Path::new(OWN_FILES).exists() => Ok(Self { file, path, target }),
            _ => Self::named(&target),
        }
    }

    /// The same under a name that no other file has.
    fn named(target: &Path) -> Result<Self, Failure> {
        let path = beside(target);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(|error| cannot(target, &error))?;
        Ok(Self { file, path: Some(path), target: target.to_owned() })
    }

    /// Where the bytes go.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Makes the file durable and gives it its name; a file that has the name stays, unless it is to be replaced.
    pub(crate) fn finish(mut self, replace: bool) -> Result<(), Failure> {
        let named = self.file.sync_all().and_then(|()| self.name(replace));
        named.map_err(|error| cannot(&self.target, &error))?;
        let synced = File::open(folder_of(&self.target)).and_then(|folder| folder.sync_all());
        synced.map_err(|error| cannot(&self.target, &error))
    }

    fn name(&mut self, replace: bool) -> io::Result<()> {
        let own = format!("{OWN_FILES}/{}", self.file.as_raw_fd());
        let link = |to: &Path| rustix::fs::linkat(CWD, &own, CWD, to, AtFlags::SYMLINK_FOLLOW);
        match (&self.path, replace) {
            (Some(path), true) => std::fs::rename(path, &self.target),
            (Some(path), false) => std::fs::hard_link(path, &self.target),
            (None, false) => Ok(link(&self.target)?),
            // Only what has a name can take another's place.
            (None, true) => {
                let path = beside(&self.target);
                link(&path)?;
                std::fs::rename(self.path.insert(path), &self.target)
            }
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "the file belongs to the user and is outside every store")]
impl Drop for Partial {
    fn drop(&mut self) {
        // Under its own name it is whole, or was never finished.
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A file for bytes that no other process sees and that go with it, in the folder for temporary files.
#[allow(clippy::disallowed_methods, reason = "the file belongs to the user and is outside every store")]
pub(crate) fn temporary() -> Result<File, Failure> {
    let folder = std::env::temp_dir();
    let file = without_name(&folder, OFlags::RDWR).or_else(|_| removed(&folder));
    file.map_err(|error| {
        let (folder, why) = (folder.display(), reason(&error));
        Failure::User(format!(
            "a temporary file in {folder} could not be created: {why}; set TMPDIR to \
            another folder"
        ))
    })
}

/// The same where a file system has no files without a name.
#[allow(clippy::disallowed_methods, reason = "the file belongs to the user and is outside every store")]
fn removed(folder: &Path) -> io::Result<File> {
    let path = beside(&folder.join("kvarts"));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn without_name(folder: &Path, access: OFlags) -> io::Result<File> {
    let mode = Mode::from_raw_mode(if access == OFlags::RDWR { 0o600 } else { 0o666 });
    Ok(File::from(rustix::fs::open(folder, OFlags::TMPFILE | OFlags::CLOEXEC | access, mode)?))
}

/// A name beside this one that no other file has.
fn beside(target: &Path) -> PathBuf {
    let mut random = [0; 8];
    OsEntropy::new().fill(&mut random);
    let mut name = target.as_os_str().to_owned();
    name.push(format!(".{:016x}.partial", u64::from_le_bytes(random)));
    PathBuf::from(name)
}

fn folder_of(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn cannot(path: &Path, error: &io::Error) -> Failure {
    Failure::User(format!("{}: {}", path.display(), reason(error)))
}

#[allow(clippy::disallowed_methods, reason = "the file belongs to the user and is outside every store")]
fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".to_owned(),
        io::ErrorKind::IsADirectory => "the path is a directory, not a file".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "the files belong to the user and are outside every store")]
mod tests {
    use super::*;

    /// A process that was killed drops nothing.
    #[test]
    fn whatever_an_interrupted_command_left_the_next_one_works() {
        let folder = std::env::temp_dir().join(format!("kvarts-files-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let target = folder.join("model");
        let has_nameless = without_name(&folder, OFlags::WRONLY).is_ok();
        let _killed = std::mem::ManuallyDrop::new(Partial::new(&target).map_err(drop).unwrap());
        let left = std::fs::read_dir(&folder).unwrap().count();
        assert_eq!(left, usize::from(!has_nameless));
        std::fs::write(folder.join("model.partial"), "of an older program").unwrap();
        let _killed = std::mem::ManuallyDrop::new(Partial::named(&target).map_err(drop).unwrap());
        for (text, replace) in [("one", false), ("two", true)] {
            assert!(write_text(&target, text, replace).is_ok());
            assert_eq!(std::fs::read_to_string(&target).unwrap(), text);
            let partial = Partial::named(&target).map_err(drop).unwrap();
            partial.file().write_all(b"three").unwrap();
            assert!(partial.finish(false).is_err(), "what is there stays");
            assert_eq!(std::fs::read_to_string(&target).unwrap(), text);
        }
        let partial = Partial::new(&target).map_err(drop).unwrap();
        assert!(partial.finish(false).is_err(), "what is there stays");
        let partial = Partial::named(&target).map_err(drop).unwrap();
        partial.file().write_all(b"four").unwrap();
        assert!(partial.finish(true).is_ok());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "four");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), left + 3);
        let before = std::fs::read_dir(&folder).unwrap().count();
        let mut file = removed(&folder).unwrap();
        assert!(file.write_all(b"bytes").is_ok());
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), before);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
