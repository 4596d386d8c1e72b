//! What stands behind an error of `object_store`.

use std::error::Error as StdError;

use object_store::Error;

/// The first cause of this kind.
pub(crate) fn cause<T: StdError + 'static>(error: &Error) -> Option<&T> {
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// The last cause: what the network, or the reader of an answer, has to say.
pub(crate) fn why(error: &Error) -> String {
    let mut last: &(dyn StdError + 'static) = error;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
}
