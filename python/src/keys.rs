//! The names of blocks: 32 bytes, or what an engine calls them.

use kvarts_contract::api::MAX_REQUEST_BLOCKS;
use kvarts_layout::BlockKey;
use kvarts_layout::key::{KeyChain, MAX_FOREIGN_KEY_BYTES};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyString, PyTuple};

use crate::buffer;
use crate::error::invalid;

/// What the hashed form of several parts begins with.
const PARTS: [u8; 8] = *b"parts.v1";

/// One key.
fn named(py: Python<'_>, argument: &str, bytes: &[u8]) -> PyResult<BlockKey> {
    BlockKey::from_foreign(bytes).map_err(|error| invalid(py, argument, error))
}

fn one(argument: &str, given: &Bound<'_, PyAny>) -> PyResult<BlockKey> {
    let py = given.py();
    if let Ok(bytes) = given.cast::<PyBytes>() {
        return named(py, argument, bytes.as_bytes());
    }
    if let Ok(text) = given.cast::<PyString>() {
        return named(py, argument, &text.to_cow()?.into_owned().into_bytes());
    }
    Err(invalid(py, argument, format!("the value must be bytes or str, not {}", given.get_type().name()?)))
}

/// The keys of a request.
pub(crate) fn keys(given: &Bound<'_, PyAny>) -> PyResult<Vec<BlockKey>> {
    let py = given.py();
    if given.is_instance_of::<PyBytes>() || given.is_instance_of::<PyString>() {
        return Err(invalid(py, "keys", "the value must be a sequence of keys, not one key"));
    }
    // A length is only a hint of how many there will be.
    let mut found = Vec::with_capacity(given.len().unwrap_or(0).min(MAX_REQUEST_BLOCKS));
    for (at, item) in
        given.try_iter().map_err(|_| invalid(py, "keys", "the value must be a sequence of keys"))?.enumerate()
    {
        if found.len() >= MAX_REQUEST_BLOCKS {
            let why = format!("the list has more than {MAX_REQUEST_BLOCKS} keys: use several batches");
            return Err(invalid(py, "keys", why));
        }
        let item = item?;
        // The common case, without a name for each, and without a copy that can be spared: schedulers ask for thousands.
        let whole = item.cast::<PyBytes>().ok().and_then(|bytes| bytes.as_bytes().try_into().ok());
        found.push(match whole {
            Some(key) => BlockKey(key),
            None => one(&format!("keys[{at}]"), &item)?,
        });
    }
    if found.is_empty() {
        return Err(invalid(py, "keys", "the list is empty"));
    }
    Ok(found)
}

#[doc = stub!("key")]
#[pyfunction]
#[pyo3(signature = (*parts))]
pub(crate) fn key<'py>(parts: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyBytes>> {
    let py = parts.py();
    if parts.is_empty() {
        return Err(invalid(py, "parts", "the list is empty"));
    }
    let key = if parts.len() == 1 && !parts.get_item(0)?.is_instance_of::<PyInt>() {
        one("parts[0]", &parts.get_item(0)?)?
    } else {
        let mut bytes = PARTS.to_vec();
        for (at, part) in parts.iter().enumerate() {
            let (tag, part) = part_bytes(at, &part)?;
            bytes.push(tag);
            // Bounded right below.
            bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&part);
            if bytes.len() > MAX_FOREIGN_KEY_BYTES {
                return Err(invalid(
                    py,
                    "parts",
                    format!("the parts together are longer than {MAX_FOREIGN_KEY_BYTES} bytes"),
                ));
            }
        }
        if bytes.len() == 32 {
            // Thirty-two bytes would be taken as they are; no parts end so.
            bytes.push(0);
        }
        named(py, "parts", &bytes)?
    };
    Ok(PyBytes::new(py, key.as_bytes()))
}

fn part_bytes(at: usize, part: &Bound<'_, PyAny>) -> PyResult<(u8, Vec<u8>)> {
    let argument = format!("parts[{at}]");
    let py = part.py();
    if let Ok(bytes) = part.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        let some = bytes.get(..MAX_FOREIGN_KEY_BYTES.saturating_add(1)).unwrap_or(bytes);
        return Ok((b'b', some.to_vec()));
    }
    if let Ok(text) = part.cast::<PyString>() {
        return Ok((b's', text.to_cow()?.into_owned().into_bytes()));
    }
    if part.is_instance_of::<PyInt>() {
        let number: i128 =
            part.extract().map_err(|_| invalid(py, &argument, "the number must have at most 128 bits"))?;
        return Ok((b'i', number.to_le_bytes().to_vec()));
    }
    Err(invalid(
        py,
        &argument,
        format!("the value must be bytes, str or int, not {}", part.get_type().name()?),
    ))
}

/// The key of the block before, if one is named.
pub(crate) fn parent(py: Python<'_>, bytes: &[u8]) -> PyResult<BlockKey> {
    let key = <[u8; 32]>::try_from(bytes).map_err(|_| invalid(py, "parent", "32 bytes are required"))?;
    Ok(BlockKey(key))
}

#[doc = stub!("chain")]
#[pyfunction]
#[pyo3(signature = (tokens, block_tokens, *, parent=None, extra=None))]
pub(crate) fn chain<'py>(
    tokens: &Bound<'py, PyAny>,
    block_tokens: u32,
    parent: Option<&[u8]>,
    extra: Option<&[u8]>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let py = tokens.py();
    if block_tokens == 0 {
        return Err(invalid(py, "block_tokens", "the value must be at least 1"));
    }
    let numbers: Vec<u32> = match buffer::words(tokens)? {
        Some(words) => words,
        None => tokens.extract().map_err(|_| {
            invalid(
                py,
                "tokens",
                "the value must be a sequence of numbers below 2**32, or a buffer of uint32",
            )
        })?,
    };
    let mut chain = match parent {
        Some(bytes) => KeyChain::after(self::parent(py, bytes)?),
        None => KeyChain::new(),
    };
    let mut keys = Vec::new();
    let extra = extra.unwrap_or_default();
    chain.push_all(&numbers, block_tokens, |_| extra, |key| keys.push(key));
    Ok(keys.iter().map(|key| PyBytes::new(py, key.as_bytes())).collect())
}
