//! Rows between a stretch of a device's memory and the slots of an engine's pool.
//!
//! In the stretch slots lie one behind the other; in the pool each lies where its number says. What belongs to a slot are rows of equal
//! length, which lie apart by strides on either side: two nested ones, as a page of tokens has them of which only some heads are wanted, or
//! whose heads and tokens change places. A page that is one piece on both sides is one row.

use super::{Direction, Memory};
use crate::error::DeviceError;

/// How often something is repeated, and how far apart on each side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// How often.
    pub count: u32,
    /// Bytes from one to the next in the stretch.
    pub ring: u64,
    /// Bytes from one to the next in the pool.
    pub pool: u64,
}

impl Rows {
    /// Not repeated.
    pub const ONE: Self = Self { count: 1, ring: 0, pool: 0 };
}

/// Where the rows of a slot lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotShape {
    /// Bytes from one slot to the next in the stretch.
    pub ring_stride: u64,
    /// Where the rows of the first slot begin in the stretch: behind heads that are not wanted, for example.
    pub ring_first: u64,
    /// Where slot zero begins in the pool's memory.
    pub pool_base: u64,
    /// The bytes from one slot to the next.
    pub pool_stride: u64,
    /// Rows within rows.
    pub outer: Rows,
    /// The rows.
    pub inner: Rows,
    /// Bytes of a row.
    pub row_bytes: u64,
}

impl SlotShape {
    /// Slots of this many bytes that are in one piece on both sides.
    pub fn whole(bytes: u64, pool_base: u64, pool_stride: u64) -> Self {
        let (outer, inner) = (Rows::ONE, Rows::ONE);
        Self { ring_stride: bytes, ring_first: 0, pool_base, pool_stride, outer, inner, row_bytes: bytes }
    }

    /// How far the rows of a slot reach behind its beginning, in the stretch and in the pool. None if that cannot be counted.
    pub fn reach(&self) -> Option<(u64, u64)> {
        let of = |stride: fn(&Rows) -> u64| {
            let last = |rows: &Rows| u64::from(rows.count.checked_sub(1)?).checked_mul(stride(rows));
            last(&self.outer)?.checked_add(last(&self.inner)?)?.checked_add(self.row_bytes)
        };
        Some((of(|rows| rows.ring)?.checked_add(self.ring_first)?, of(|rows| rows.pool)?))
    }

    /// Rows of a slot.
    pub fn row_count(&self) -> u64 {
        u64::from(self.outer.count) * u64::from(self.inner.count)
    }

    /// Bytes of a slot's rows.
    pub fn bytes(&self) -> u64 {
        self.row_count().saturating_mul(self.row_bytes)
    }
}

/// What is moved.
#[derive(Clone, Copy, Debug)]
pub struct SlotMove<'a> {
    /// To the pool or from it.
    pub direction: Direction,
    /// The stretch's memory, and where the stretch begins in it.
    pub ring: (&'a Memory, u64),
    /// The pool's.
    pub pool: &'a Memory,
    /// Memory that has the numbers of the slots, each four bytes little-endian, and which of them are meant: where they begin, and how many.
    pub slots: (&'a Memory, u32, u32),
    /// None of these numbers is larger. The caller has looked: a device does not.
    pub largest: u32,
    /// Where their rows lie.
    pub shape: SlotShape,
}

impl SlotMove<'_> {
    /// Refuses what leaves its memory on either side.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        let (slots, first, count) = self.slots;
        let inside = || {
            let (ring, pool) = self.shape.reach()?;
            let last = u64::from(count.checked_sub(1)?);
            let in_ring =
                self.ring.1.checked_add(last.checked_mul(self.shape.ring_stride)?)?.checked_add(ring)?;
            let in_pool = u64::from(self.largest).checked_mul(self.shape.pool_stride)?;
            let in_pool = in_pool.checked_add(self.shape.pool_base)?.checked_add(pool)?;
            let in_slots = (u64::from(first) + u64::from(count)) * 4;
            Some(in_ring <= self.ring.0.len() && in_pool <= self.pool.len() && in_slots <= slots.len())
        };
        if inside() == Some(true) { Ok(()) } else { Err(DeviceError::OutOfBounds) }
    }

    /// Bytes that are moved.
    pub fn bytes(&self) -> u64 {
        self.shape.bytes() * u64::from(self.slots.2)
    }

    /// Each row of one slot after the other: where it lies in the stretch's memory, and in the pool's.
    pub(super) fn rows(&self, ordinal: u32, slot: u32) -> impl Iterator<Item = (u64, u64)> + use<> {
        let SlotShape { ring_stride, ring_first, pool_base, pool_stride, outer, inner, .. } = self.shape;
        let ring = self.ring.1 + ring_first + u64::from(ordinal) * ring_stride;
        let pool = pool_base + u64::from(slot) * pool_stride;
        (0..u64::from(outer.count)).flat_map(move |o| {
            (0..u64::from(inner.count)).map(move |i| {
                (ring + o * outer.ring + i * inner.ring, pool + o * outer.pool + i * inner.pool)
            })
        })
    }
}
