//! Chooses the way to the disks: the ring, and threads where it is forbidden.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::Io;
use super::features::Features;
use super::pool::Pool;
use super::ring::{Ring, RingError};

/// Which way to the disks is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IoChoice {
    /// The ring if it can be had, else threads, with one warning that says why.
    #[default]
    Auto,
    /// The ring or nothing.
    Ring,
    /// Threads.
    Pool,
}

impl FromStr for IoChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "ring" => Ok(Self::Ring),
            "pool" => Ok(Self::Pool),
            _ => Err(format!("the kind of I/O {name:?} does not exist: use auto, ring or pool")),
        }
    }
}

/// Why there is no way to the disks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OpenError {
    /// A directory cannot be opened, or the process cannot have another descriptor or thread.
    Environment(String),
    /// The ring was demanded and cannot be had.
    RingForbidden(String),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment(why) => f.write_str(why),
            Self::RingForbidden(why) => write!(f, "io_uring was requested, but {why}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// Opens a way to the disks for the calling thread, which alone may use it; `dirs` are what
/// [`DirId`](super::DirId) counts.
pub fn open_io(choice: IoChoice, dirs: &[PathBuf], features: &Features) -> Result<Box<dyn Io>, OpenError> {
    choose(choice, || Ring::new(dirs, features), dirs, features)
}

fn choose(
    choice: IoChoice,
    ring: impl FnOnce() -> Result<Ring, RingError>,
    dirs: &[PathBuf],
    features: &Features,
) -> Result<Box<dyn Io>, OpenError> {
    let pool = |warning| match Pool::new(dirs, features, warning) {
        Ok(pool) => Ok(Box::new(pool) as Box<dyn Io>),
        Err(why) => Err(OpenError::Environment(why)),
    };
    if choice == IoChoice::Pool {
        return pool(None);
    }
    match ring() {
        Ok(ring) => Ok(Box::new(ring)),
        Err(RingError::Environment(why)) => Err(OpenError::Environment(why)),
        Err(RingError::Forbidden(why)) if choice == IoChoice::Ring => Err(OpenError::RingForbidden(why)),
        Err(RingError::Forbidden(why)) => pool(Some(why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::scratch::Scratch;

    #[test]
    fn threads_are_had_on_demand_and_warn_of_nothing() {
        let scratch = Scratch::on_disk();
        let io = open_io(IoChoice::Pool, &[scratch.path().to_owned()], &Features::default()).unwrap();
        assert_eq!(io.facts().backend, "pool");
        assert_eq!(io.facts().warnings, Vec::<String>::new());
    }

    #[test]
    fn a_pool_in_place_of_a_forbidden_ring_warns_in_one_line() {
        let scratch = Scratch::on_disk();
        let dirs = [scratch.path().to_owned()];
        let forbidden = || Err(RingError::Forbidden("no ring here".to_owned()));
        let io = choose(IoChoice::Auto, forbidden, &dirs, &Features::default()).unwrap();
        assert_eq!((io.facts().backend, io.facts().warnings), ("pool", vec!["no ring here".to_owned()]));
        let error = choose(IoChoice::Ring, forbidden, &dirs, &Features::default()).err().unwrap();
        assert_eq!(error, OpenError::RingForbidden("no ring here".to_owned()));
    }

    #[test]
    fn whatever_is_chosen_a_directory_that_is_absent_is_an_error_that_names_it() {
        let scratch = Scratch::on_disk();
        let dirs = [scratch.path().join("absent")];
        for choice in [IoChoice::Auto, IoChoice::Pool] {
            let error = open_io(choice, &dirs, &Features::default()).err().unwrap();
            assert!(matches!(&error, OpenError::Environment(why) if why.contains("absent")), "{error}");
        }
    }

    #[test]
    fn the_kinds_have_names() {
        assert_eq!("pool".parse(), Ok(IoChoice::Pool));
        assert!("uring".parse::<IoChoice>().unwrap_err().contains("auto, ring or pool"));
    }
}
