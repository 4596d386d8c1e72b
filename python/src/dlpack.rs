//! Memory of tensors that have no buffer protocol (torch), by DLPack: tensors of the CPU, contiguous.

use std::ffi::{CStr, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::error::invalid;
use crate::left::{Leaving, leave};

const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
/// Devices whose memory the CPU reads: the CPU's, and memory that CUDA pinned.
const DEVICES: [i32; 2] = [1, 3];
/// The most dimensions that are believed.
const DIMENSIONS_MAX: usize = 64;

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// A tensor that was handed over, until it is given back.
pub(crate) struct Tensor(*mut Managed);

// SAFETY: the pointer is followed when the tensor is taken and when it is given back, both with the interpreter's lock.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Leaving for Tensor {
    fn release(mut self: Box<Self>, _: Python<'_>) {
        let managed = std::mem::replace(&mut self.0, std::ptr::null_mut());
        // SAFETY: it was taken over with its capsule's new name, and it is given back once.
        unsafe {
            if let Some(deleter) = (!managed.is_null()).then(|| (*managed).deleter).flatten() {
                deleter(managed);
            }
        }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if !self.0.is_null() {
            leave(Box::new(Self(std::mem::replace(&mut self.0, std::ptr::null_mut()))));
        }
    }
}

/// Whether it says that it is a tensor.
pub(crate) fn is_tensor(object: &Bound<'_, PyAny>) -> bool {
    object.hasattr("__dlpack__").unwrap_or(false) && object.hasattr("__dlpack_device__").unwrap_or(false)
}

/// Takes a tensor; gives where its bytes are, too.
pub(crate) fn tensor(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<(Tensor, usize, usize)> {
    let py = object.py();
    let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    if !DEVICES.contains(&device) {
        return Err(invalid(py, argument, "the tensor is not in the memory of the CPU"));
    }
    let capsule = object.call_method0("__dlpack__")?;
    // SAFETY: a capsule of this name has such a tensor; the name is looked at first, by the interpreter.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) }.cast::<Managed>();
    if managed.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: the capsule lives; by this name it says that its consumer gives the tensor back, and this code is the consumer.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let owned = Tensor(managed);
    // SAFETY: it is alive until it is given back.
    let tensor = unsafe { &(*managed).tensor };
    let wrong = |what: &str| Err(invalid(py, argument, what));
    if !DEVICES.contains(&tensor.device_type) {
        return wrong("the tensor is not in the memory of the CPU");
    }
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
    if dimensions > DIMENSIONS_MAX || (dimensions > 0 && tensor.shape.is_null()) {
        return wrong("the shape of the tensor is not known");
    }
    let element = u64::from(tensor.bits) * u64::from(tensor.lanes);
    if !element.is_multiple_of(8) {
        return wrong("the elements of the tensor are not whole bytes");
    }
    let mut bytes = element / 8;
    for at in (0..dimensions).rev() {
        // SAFETY: shape and strides, where there are any, have as many numbers as there are dimensions.
        let (count, stride) = unsafe {
            (
                *tensor.shape.add(at),
                if tensor.strides.is_null() { None } else { Some(*tensor.strides.add(at)) },
            )
        };
        let Ok(count) = u64::try_from(count) else { return wrong("the shape of the tensor is not known") };
        let expected = i64::try_from(bytes * 8 / element.max(1)).ok();
        if count > 1 && stride.is_some() && stride != expected {
            return wrong("the tensor is not contiguous");
        }
        let Some(all) = bytes.checked_mul(count) else {
            return wrong("the shape of the tensor is not known");
        };
        bytes = all;
    }
    let start = tensor.data.addr().checked_add(usize::try_from(tensor.byte_offset).unwrap_or(usize::MAX));
    match (start, usize::try_from(bytes)) {
        (Some(start), Ok(bytes)) => Ok((owned, start, bytes)),
        _ => wrong("the shape of the tensor is not known"),
    }
}
