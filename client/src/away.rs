//! Why a server could not be reached: it may come yet, it lets this process not in, or nothing can be at such an address.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use kvarts_store::error::Reason;

/// The cause that says most.
pub(super) fn deepest(error: &dyn StdError) -> String {
    let mut error = error;
    while let Some(cause) = error.source() {
        error = cause;
    }
    error.to_string()
}

/// What the system said about reaching `server`. A name that is not known may be that of a server which is being started.
pub(super) fn of_io(server: impl fmt::Display, error: &io::Error) -> Reason {
    use io::ErrorKind as Kind;
    let what = format!("{server}: {error}");
    match error.kind() {
        Kind::PermissionDenied => Reason::Denied(what),
        Kind::InvalidInput
        | Kind::InvalidData
        | Kind::InvalidFilename
        | Kind::NotADirectory
        | Kind::Unsupported => Reason::Config(what),
        _ => Reason::Away(what),
    }
}

/// What the transport said about reaching `server`.
pub(super) fn of_transport(server: &str, error: &(dyn StdError + 'static)) -> Reason {
    let (mut next, mut last) = (Some(error), None);
    while let Some(cause) = next {
        last = cause.downcast_ref::<io::Error>().or(last);
        next = cause.source();
    }
    match last {
        Some(cause) => of_io(server, cause),
        None => Reason::Config(format!("{server} cannot be reached: {}", deepest(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_store::error::Kind;

    #[test]
    fn a_server_may_come_a_right_may_not_and_an_address_that_is_none_never() {
        let kind = |errno: rustix::io::Errno| of_io("there", &errno.into()).kind();
        use rustix::io::Errno;
        for errno in [Errno::NOENT, Errno::CONNREFUSED, Errno::CONNRESET, Errno::TIMEDOUT, Errno::AGAIN] {
            assert_eq!(kind(errno), Kind::Retry, "{errno}");
        }
        assert_eq!((kind(Errno::ACCESS), kind(Errno::NOTDIR)), (Kind::Refused, Kind::Invalid));
        let away = of_io("unix:/run/s", &Errno::NOENT.into()).to_string();
        assert!(away.starts_with("no server answers at unix:/run/s: "), "{away}");
    }
}
