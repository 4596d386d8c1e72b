//! Where each layer of a read lies in a ring of host memory, and which layers must have left before it may come.
//!
//! Layers differ in size. Each lies in one stretch; where the end of the ring is too near, it begins at the front.
//! All of it is arithmetic done once, when a stream begins: the read path allocates nothing and decides nothing.
//! Layers leave in the order in which they came, so one number says when a layer may come: how many have left.

/// Alignment of layers in the ring: what direct I/O asks for.
pub const ALIGN: u64 = 4096;

/// The place of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingPlace {
    /// Where it begins in the ring.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// How many leading layers must have left before it may come.
    pub after: u32,
}

/// The places of all layers in a ring of `capacity` bytes; `None` if one does not fit at all.
pub fn places(layers: &[u64], capacity: u64) -> Option<Vec<RingPlace>> {
    let mut places: Vec<RingPlace> = Vec::with_capacity(layers.len());
    let mut next = 0u64;
    for &bytes in layers {
        let room = bytes.checked_next_multiple_of(ALIGN)?.max(ALIGN);
        if room > capacity {
            return None;
        }
        if next.checked_add(room)? > capacity {
            next = 0;
        }
        let (offset, end) = (next, next + room);
        // The latest layer that lies in the way; all before it must have left too, since they leave in order.
        let in_the_way = places.iter().rposition(|place| {
            place.offset < end && offset < place.offset + place.bytes.next_multiple_of(ALIGN).max(ALIGN)
        });
        let after = in_the_way.map_or(0, |at| at as u32 + 1);
        let after = after.max(places.last().map_or(0, |place| place.after));
        places.push(RingPlace { offset, bytes, after });
        next = end;
    }
    Some(places)
}

/// How many layers may come when `left` have left. `places` as [`places`] made them.
pub fn open_after(places: &[RingPlace], left: u32) -> u32 {
    places.partition_point(|place| place.after <= left) as u32
}

/// As long as fewer bytes than these are being read, one more layer is begun: twice what a shard's disk has at once. Each
/// layer is a read of its own, so with many of them those that are wanted last would take the disks' pace, and the store's
/// staging memory, from those that are wanted first.
pub const BYTES_UNDER_WAY: u64 = 32 << 20;

/// How many layers may have been begun when `left` have left and `arrived` have been read. The first has the disks to itself:
/// the engine stands still until it is there.
pub fn begun_after(places: &[RingPlace], left: u32, arrived: u32) -> u32 {
    if arrived == 0 {
        return 1.min(places.len() as u32);
    }
    let mut under_way = 0;
    let busy = places.iter().skip(arrived as usize).take_while(|place| {
        let more = under_way < BYTES_UNDER_WAY;
        under_way += place.bytes;
        more
    });
    open_after(places, left).min(arrived.saturating_add(busy.count() as u32))
}

/// How far ahead this ring always is: the least number of layers that have a place besides those that have left,
/// until the last.
pub fn layers_ahead(places: &[RingPlace]) -> u32 {
    let count = places.len() as u32;
    (0..count).map(|left| open_after(places, left) - left).zip((1..=count).rev()).fold(
        u32::MAX,
        // Near the end there are fewer layers than places.
        |least, (ahead, remain)| if ahead < remain { least.min(ahead) } else { least },
    )
}

/// The least bytes of a ring in which these layers are always at least `ahead` ahead.
pub fn bytes_needed(layers: &[u64], ahead: u32) -> u64 {
    let rooms: Vec<u64> = layers.iter().map(|bytes| bytes.next_multiple_of(ALIGN).max(ALIGN)).collect();
    let total: u64 = rooms.iter().sum();
    let largest = rooms.iter().copied().max().unwrap_or(ALIGN);
    let window = rooms.windows(ahead.max(1) as usize).map(|window| window.iter().sum::<u64>()).max();
    // Between the largest run of layers and that plus one more, an odd end may cost up to one layer.
    let least = window.unwrap_or(total).min(total);
    let most = least.saturating_add(largest).min(total);
    let fits =
        |capacity: u64| places(layers, capacity).is_some_and(|places| layers_ahead(&places) >= ahead.max(1));
    (0..=8u64)
        .map(|eighth| (least + (most - least) / 8 * eighth).next_multiple_of(ALIGN))
        .find(|&capacity| fits(capacity))
        .unwrap_or(most.max(total.min(least.saturating_add(largest.saturating_mul(2)))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_layers_alternate() {
        let places = places(&[8192; 5], 16384).unwrap();
        let found: Vec<_> = places.iter().map(|place| (place.offset, place.after)).collect();
        assert_eq!(found, [(0, 0), (8192, 0), (0, 1), (8192, 2), (0, 3)]);
        assert_eq!([0, 1, 2, 5].map(|left| open_after(&places, left)), [2, 3, 4, 5]);
        assert_eq!(layers_ahead(&places), 2);
        assert!(super::places(&[8193], 8192).is_none());
    }

    #[test]
    fn the_first_layer_is_read_alone_and_then_as_many_as_keep_the_disks_busy() {
        let begun = |layer_bytes: u64, layers: usize, left, arrived| {
            let ring = places(&vec![layer_bytes; layers], layer_bytes * layers as u64).unwrap();
            begun_after(&ring, left, arrived)
        };
        let mib = 1 << 20;
        assert_eq!([0, 1, 2, 60].map(|arrived| begun(6 * mib, 61, 0, arrived)), [1, 7, 8, 61]);
        // The last that is begun may be larger than what is left of the bound.
        assert_eq!([1, 5].map(|arrived| begun(100 * mib, 8, 0, arrived)), [2, 6]);
        assert_eq!(begun(4096, 8, 0, 1), 8, "small layers");
        // Never more than the ring has places for.
        let ring = places(&[6 * mib; 61], 12 * mib).unwrap();
        assert_eq!(
            [(0, 0), (0, 1), (1, 1), (2, 2)].map(|(left, arrived)| begun_after(&ring, left, arrived)),
            [1, 2, 3, 4]
        );
        assert_eq!(begun_after(&[], 0, 0), 0);
    }

    #[test]
    fn what_two_layers_ahead_need_is_two_layers_where_all_are_equal() {
        assert_eq!(bytes_needed(&[1 << 20; 32], 2), 2 << 20);
        assert_eq!(bytes_needed(&[5000], 2), 8192);
        assert_eq!(bytes_needed(&[4096, 4096], 2), 8192);
    }

    proptest! {
        #[test]
        fn no_layer_comes_onto_one_that_has_not_left(
            layers in prop::collection::vec(1u64..60_000, 1..40),
            capacity in 60_000u64..300_000,
        ) {
            let places = places(&layers, capacity.next_multiple_of(ALIGN)).unwrap();
            let end = |place: &RingPlace| place.offset + place.bytes;
            for left in 0..=layers.len() {
                let open = open_after(&places, left as u32) as usize;
                prop_assert!(open >= left.min(layers.len()));
                let there = &places[left.min(open)..open];
                for (at, place) in there.iter().enumerate() {
                    prop_assert!(end(place) <= capacity.next_multiple_of(ALIGN));
                    for other in &there[at + 1..] {
                        prop_assert!(end(place) <= other.offset || end(other) <= place.offset);
                    }
                }
            }
            // When all earlier layers have left, the next one always has its place.
            for left in 0..layers.len() {
                prop_assert!(open_after(&places, left as u32) as usize > left);
            }
        }

        #[test]
        fn what_is_said_to_be_needed_is_enough(
            layers in prop::collection::vec(1u64..60_000, 1..40),
            ahead in 1u32..4,
        ) {
            let places = places(&layers, bytes_needed(&layers, ahead)).unwrap();
            prop_assert!(layers_ahead(&places) >= ahead.min(layers.len() as u32));
        }
    }
}
