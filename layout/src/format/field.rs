//! Where a fixed-width field lies: an offset derived by addition, never written down twice.
//!
//! A structure declares its fields as a chain of [`Field`]s and lists them in a `FIELDS` table; docs/FORMAT.md
//! repeats the table and a test compares the two. All integers are little-endian.

use super::unsound::{Damage, Unsound};

/// One fixed-width field of an on-disk structure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Field {
    /// The field's name in docs/FORMAT.md.
    pub name: &'static str,
    /// Bytes from the start of the structure.
    pub offset: usize,
    /// Width in bytes.
    pub bytes: usize,
}

impl Field {
    pub(super) const fn first(name: &'static str, bytes: usize) -> Self {
        Self { name, offset: 0, bytes }
    }

    /// The field right behind this one.
    pub(super) const fn then(self, name: &'static str, bytes: usize) -> Self {
        Self { name, offset: self.end(), bytes }
    }

    /// The first byte behind the field.
    pub const fn end(self) -> usize {
        self.offset.saturating_add(self.bytes)
    }

    /// Writes `value` into `image`. The widths agree in every call; the golden files would show a call
    /// where they do not.
    pub(super) fn put<const N: usize>(self, image: &mut [u8], value: [u8; N]) {
        if let Some(place) = image.get_mut(self.offset..self.end())
            && let Some(place) = place.as_mut_array::<N>()
        {
            *place = value;
        }
    }

    /// The field's bytes.
    pub(super) fn get<const N: usize>(self, image: &[u8]) -> Result<[u8; N], Unsound> {
        image
            .get(self.offset..self.end())
            .and_then(|place| place.as_array::<N>())
            .copied()
            .ok_or(Unsound::Damaged { what: Damage::Length })
    }

    pub(super) fn get_u8(self, image: &[u8]) -> Result<u8, Unsound> {
        self.get(image).map(|[byte]| byte)
    }

    pub(super) fn get_u16(self, image: &[u8]) -> Result<u16, Unsound> {
        self.get(image).map(u16::from_le_bytes)
    }

    pub(super) fn get_u32(self, image: &[u8]) -> Result<u32, Unsound> {
        self.get(image).map(u32::from_le_bytes)
    }

    pub(super) fn get_u64(self, image: &[u8]) -> Result<u64, Unsound> {
        self.get(image).map(u64::from_le_bytes)
    }
}
