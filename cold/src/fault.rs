//! Why a bucket did not do what was asked.

use std::fmt;
use std::time::Duration;

/// Why a bucket did not do what was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// There is no such object.
    Missing,
    /// There is no such bucket.
    NoBucket,
    /// The condition of a put does not hold.
    Changed,
    /// Asked too often (429, 503): not before this time has passed, where it says so.
    Busy(Option<Duration>),
    /// Not reached, or broken off: whether it happened is not known.
    Unreachable(String),
    /// The server failed: whether it happened is not known.
    Failed(String),
    /// The credentials are refused.
    Denied(String),
    /// This object is refused to these credentials, and others may not be. S3 says it of a missing object, too, to who may not list.
    Forbidden(String),
    /// The answer is not as long as it must be.
    Length,
    /// Refused for good.
    Refused(String),
}

impl Fault {
    /// Whether the same request can succeed later.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Unreachable(_) | Self::Failed(_) | Self::Length)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the object does not exist"),
            Self::NoBucket => f.write_str("the bucket does not exist"),
            Self::Changed => f.write_str("the object was changed by another writer"),
            Self::Busy(_) => f.write_str("the bucket limits the rate of requests"),
            Self::Unreachable(why) => write!(f, "the bucket cannot be reached: {why}"),
            Self::Failed(why) => {
                write!(
                    f,
                    "the bucket's server could not execute the request ({why}): if this failure \
                    repeats, read the log of that server"
                )
            }
            Self::Denied(why) => {
                write!(
                    f,
                    "the bucket refused the credentials ({why}): check the credentials and the local \
                    clock"
                )
            }
            Self::Forbidden(why) => write!(
                f,
                "the bucket refused access to this object: {why}; grant the rights to get, put and \
                delete objects, and the right to list the bucket (without the right to list, the \
                bucket also refuses access to objects that do not exist)"
            ),
            Self::Length => f.write_str("the answer of the bucket has the wrong length"),
            Self::Refused(why) => write!(f, "the bucket refused the request: {why}"),
        }
    }
}

impl std::error::Error for Fault {}
