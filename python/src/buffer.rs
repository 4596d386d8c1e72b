//! Memory of Python objects: the buffer protocol, looked at and kept.
//!
//! The functions and the structure are those of the stable ABI from Python 3.11 on; 3.10 has the same ones.
//!
//! A kept buffer is given back by a thread that has the interpreter's lock. The thread that drops it, perhaps one of a
//! device, only puts it into a list ([`crate::left`]).

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use kvarts_contract::buffers::Region;
use kvarts_contract::buffers::region::PAGE;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi::PyObject;
use pyo3::prelude::*;

use crate::dlpack::{self, Tensor};
use crate::error::invalid;
use crate::left::{Leaving, leave};

/// `Py_buffer`.
#[repr(C)]
struct View {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

/// `PyBUF_FULL_RO`: whatever it is, we look.
const FULL_RO: c_int = 0x0100 | 0x0010 | 0x0008 | 0x0004;

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut View);
    fn PyBuffer_IsContiguous(view: *const View, order: c_char) -> c_int;
}

/// What keeps an object's memory where it is, until it is dropped.
#[allow(dead_code, reason = "the value is never read, and its drop releases the memory")]
pub(crate) enum Held {
    /// A view by the buffer protocol.
    View(Lent),
    /// A tensor by DLPack.
    Tensor(Tensor),
}

/// A view, until it is released.
pub(crate) struct Lent(Option<Box<View>>);

// SAFETY: the view is looked at when it is made, and released by a thread that has the interpreter's lock; no other thread does
// more than pass it on.
unsafe impl Send for Lent {}
// SAFETY: as above; no code does anything with a reference to it.
unsafe impl Sync for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(view) = self.0.take() {
            leave(Box::new(Self(Some(view))));
        }
    }
}

impl Leaving for Lent {
    fn release(mut self: Box<Self>, _: Python<'_>) {
        if let Some(mut view) = self.0.take() {
            // SAFETY: `PyObject_GetBuffer` filled it, it lies where it lay then, it is released once, and this thread has the
            // interpreter's lock.
            unsafe { PyBuffer_Release(&raw mut *view) };
        }
    }
}

/// Memory of an object, and what keeps it.
pub(crate) struct Given {
    pub(crate) address: usize,
    pub(crate) len: usize,
    pub(crate) held: Held,
}

/// The memory of an object: contiguous, and writable if it is to be written to.
pub(crate) fn given(argument: &str, object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Given> {
    let py = object.py();
    let (given, readonly) = match viewed(object) {
        Ok(lent) => {
            let Some(view) = lent.0.as_ref() else {
                return Err(PyBufferError::new_err("the buffer has no view of the requested kind"));
            };
            // SAFETY: the view was filled by `PyObject_GetBuffer`.
            let whole = view.suboffsets.is_null()
                && unsafe { PyBuffer_IsContiguous(&raw const **view, b'A' as c_char) } == 1;
            if !whole {
                return Err(invalid(py, argument, "the buffer is not contiguous"));
            }
            let len = usize::try_from(view.len).unwrap_or(0);
            let (address, readonly) = (view.buf.addr(), view.readonly != 0);
            (Given { address, len, held: Held::View(lent) }, readonly)
        }
        Err(refused) if dlpack::is_tensor(object) => {
            let _ = refused;
            let (tensor, address, len) = dlpack::tensor(argument, object)?;
            (Given { address, len, held: Held::Tensor(tensor) }, false)
        }
        Err(refused) => {
            let what = format!("the object has no buffer: {}", refused.value(py));
            return Err(invalid(py, argument, what));
        }
    };
    if writable && readonly {
        return Err(invalid(py, argument, "the buffer is read-only, but a read needs a writable buffer"));
    }
    Ok(given)
}

fn viewed(object: &Bound<'_, PyAny>) -> PyResult<Lent> {
    let mut view = Box::new(View {
        buf: std::ptr::null_mut(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 0,
        ndim: 0,
        format: std::ptr::null_mut(),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        suboffsets: std::ptr::null_mut(),
        internal: std::ptr::null_mut(),
    });
    // SAFETY: the object lives, this thread has the interpreter's lock, and the view stays in its box until it is released.
    let got = unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, FULL_RO) };
    if got == 0 { Ok(Lent(Some(view))) } else { Err(PyErr::fetch(object.py())) }
}

/// Numbers of a buffer of uint32; nothing if it is not one.
pub(crate) fn words(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u32>>> {
    let Ok(lent) = viewed(object) else { return Ok(None) };
    let Some(view) = lent.0.as_ref() else { return Ok(None) };
    let format = match view.format.is_null() {
        true => "B",
        // SAFETY: the view was filled by `PyObject_GetBuffer`: its format is a C string.
        false => unsafe { std::ffi::CStr::from_ptr(view.format) }.to_str().unwrap_or("?"),
    };
    // SAFETY: as above.
    let whole =
        view.suboffsets.is_null() && unsafe { PyBuffer_IsContiguous(&raw const **view, b'C' as c_char) } == 1;
    let is_words =
        whole && view.itemsize == 4 && matches!(format.trim_start_matches(['@', '=', '<']), "I" | "L");
    if !is_words {
        return Ok(None);
    }
    let count = usize::try_from(view.len).unwrap_or(0) / 4;
    let mut numbers = vec![0u32; count];
    // SAFETY: the view has `count` numbers of four bytes; the copy does not rely on their alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(view.buf.cast::<u8>(), numbers.as_mut_ptr().cast::<u8>(), count * 4)
    };
    Ok(Some(numbers))
}

/// A region of the pages that have these bytes, which `held` keep where they are; and where in it `address` is.
pub(crate) fn region(address: usize, len: usize, held: Vec<Held>) -> (Arc<Region>, usize) {
    let base = address / PAGE * PAGE;
    let end = address.saturating_add(len).div_ceil(PAGE).saturating_mul(PAGE);
    let keeper = Box::new(held);
    // SAFETY: whatever is made of this region are ranges of the memory that `held` keep mapped, or that the caller of `adopt`
    // promised to; a page of which some bytes are mapped is mapped whole. Between them there may be pages of others or none:
    // nothing touches a region but by its ranges.
    let region = unsafe { Region::adopt(std::ptr::with_exposed_provenance_mut(base), end - base, keeper) };
    (region, address - base)
}
