//! Pages of clients' files that the kernel charges to this server.
//!
//! If a page of a client's file is missing, it is made when the server or a device writes to it, and charged to the control group of the one that
//! wrote. It stays charged for as long as the client has the file, whatever became of the session. So a client that shares one sparse file after
//! the other would make the server's group grow without end: what counts is not what is shared now, but the group's own figure.

use std::path::PathBuf;

/// The control group of the server: its statistics, if there are any and its memory is limited. Without a limit no process is killed for them.
#[derive(Debug, Default)]
pub struct Group(pub Option<PathBuf>);

impl Group {
    /// Bytes of files in memory that are charged to it, as far as it says.
    pub(crate) fn charged_bytes(&self) -> u64 {
        let text = self.0.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        let of = |line: &str| line.strip_prefix("shmem ")?.trim().parse().ok();
        text.and_then(|text| text.lines().find_map(of)).unwrap_or(0)
    }
}
