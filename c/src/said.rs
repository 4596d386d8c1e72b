//! What calls say, and what they are given.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kvarts_contract::error::{Error, Kind, Reason};

/// `kvarts_status`.
#[repr(i32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Ok = 0,
    Miss = 1,
    Retry = 2,
    Refused = 3,
    Invalid = 4,
    Deadline = 5,
    Corrupt = 6,
    ReadOnly = 7,
    Bug = 8,
}

impl From<Kind> for Status {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Miss => Self::Miss,
            Kind::Retry => Self::Retry,
            Kind::Refused => Self::Refused,
            Kind::Invalid => Self::Invalid,
            Kind::Deadline => Self::Deadline,
            Kind::Corrupt => Self::Corrupt,
            Kind::ReadOnly => Self::ReadOnly,
            Kind::Bug => Self::Bug,
        }
    }
}

thread_local! {
    static WHY: RefCell<CString> = RefCell::new(CString::default());
}

/// Carries out a call: no panic leaves it.
pub(crate) fn call(work: impl FnOnce() -> Result<(), Error>) -> Status {
    let ended = catch_unwind(AssertUnwindSafe(work));
    match ended.unwrap_or(Err(Error(Reason::Bug("a thread panicked inside libkvarts")))) {
        Ok(()) => Status::Ok,
        Err(error) => {
            remember(&error);
            error.kind().into()
        }
    }
}

/// What `kvarts_why` says from now on.
pub(crate) fn remember(error: &Error) {
    let text = error.to_string().replace('\0', " ");
    WHY.with(|why| *why.borrow_mut() = CString::new(text).unwrap_or_default());
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_why() -> *const c_char {
    WHY.with(|why| why.borrow().as_ptr())
}

/// An error of what was given.
pub(crate) fn wrong(what: impl Into<String>) -> Error {
    Error(Reason::Config(what.into()))
}

pub(crate) fn null(name: &str) -> Error {
    wrong(format!("{name} is null: the call requires a valid pointer"))
}

/// What a pointer points to.
pub(crate) fn given<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Error> {
    // SAFETY: the header: null, or valid for the call.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(name))
}

/// What a pointer points to, or nothing.
pub(crate) fn perhaps<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: as above.
    unsafe { pointer.as_ref() }
}

/// The `count` values that a pointer points to.
pub(crate) fn several<'a, T>(pointer: *const T, count: usize, name: &str) -> Result<&'a [T], Error> {
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(null(name));
    }
    // SAFETY: the header: `count` of them lie there, for the call.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// A text, or nothing where it is null.
pub(crate) fn text<'a>(pointer: *const c_char, name: &str) -> Result<Option<&'a str>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the header: text that a zero ends, for the call.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| wrong(format!("the text in {name} is not valid UTF-8")))
}

/// Leaves a value where a caller wants it.
pub(crate) fn leave<T>(place: *mut T, value: T, name: &str) -> Result<(), Error> {
    if place.is_null() {
        return Err(null(name));
    }
    // SAFETY: the header: a place for it.
    unsafe { place.write(value) };
    Ok(())
}

/// The same where the caller may not want it.
pub(crate) fn leave_if_wanted<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: as above.
        unsafe { place.write(value) };
    }
}

/// Leaves a handle.
pub(crate) fn hand_over<T>(place: *mut *mut T, handle: T, name: &str) -> Result<(), Error> {
    if place.is_null() {
        return Err(null(name));
    }
    leave(place, Box::into_raw(Box::new(handle)), name)
}

/// Takes a handle back.
pub(crate) fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the header: it came from `hand_over`, and this is the last use of it.
        let handle = unsafe { Box::from_raw(handle) };
        // No panic leaves it.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(handle)));
    }
}

/// Leaves as many as there is room for, and how many there are.
pub(crate) fn leave_several<T: Copy>(
    all: &[T],
    (place, room): (*mut T, usize),
    count: *mut usize,
) -> Result<(), Error> {
    let some = all.len().min(room);
    if some > 0 && place.is_null() {
        return Err(null("the array for the results"));
    }
    if count.is_null() {
        return Err(null("count"));
    }
    if some > 0 {
        // SAFETY: the header: the place has room for `some`, and does not overlap `all`, which is this call's own.
        unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), place, some) };
    }
    leave(count, all.len(), "count")
}

pub(crate) fn milliseconds(time: u64) -> Duration {
    Duration::from_millis(time)
}
