//! Where the local socket is: the kernel takes no path of more than 107 bytes for one.

use std::path::{Path, PathBuf};

/// The most bytes of a socket's path.
pub(super) const PATH_BYTES_MAX: usize = 107;

/// Whether a socket can be at this path.
pub(super) fn fits(path: &Path) -> bool {
    path.as_os_str().len() <= PATH_BYTES_MAX
}

/// The socket of a store whose first directory this is, unless somebody says otherwise: in it, or, where that path is
/// too long, in the directory for such things under a name that follows from it. So clients find it the same way.
pub(super) fn of(directory: &Path, variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    let inside = directory.join("kvarts.sock");
    if fits(&inside) {
        return inside;
    }
    let runtime = variable("XDG_RUNTIME_DIR").filter(|path| path.starts_with('/'));
    let below = runtime.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let name = blake3::hash(directory.as_os_str().as_encoded_bytes()).to_hex();
    below.join(format!("kvarts-{}.sock", name.get(..16).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_in_its_directory_or_under_a_short_name_that_follows_from_it() {
        let none = |_: &str| None;
        let run = |name: &str| (name == "XDG_RUNTIME_DIR").then(|| "/run/user/7".to_owned());
        assert_eq!(of(Path::new("/data"), run), PathBuf::from("/data/kvarts.sock"));
        let deep = PathBuf::from(format!("/{}", "deep/".repeat(30)));
        let (short, other) = (of(&deep, run), of(&deep.join("x"), run));
        assert!(short.starts_with("/run/user/7") && fits(&short) && short != other, "{short:?}");
        assert_eq!(of(&deep, run), short);
        assert!(of(&deep, none).starts_with("/tmp"));
        assert!(!fits(&deep.join("kvarts.sock")));
    }
}
