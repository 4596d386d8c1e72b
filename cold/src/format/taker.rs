//! Fields one after the other out of bytes that may end anywhere.

use super::FormatError;

/// Takes fields from the front of bytes.
pub(super) struct Taker<'a>(pub(super) &'a [u8]);

impl Taker<'_> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(FormatError::Damaged)?;
        self.0 = rest;
        Ok(*field)
    }

    pub(super) fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn count(&mut self) -> Result<usize, FormatError> {
        self.u32().map(|count| count as usize)
    }
}
