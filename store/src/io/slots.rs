//! A table of things under way, addressed by keys that are never reused.
//!
//! A key carries the generation of its place, so that a key of something that is gone finds nothing: a second
//! completion of one operation, or one that was not asked for, cannot touch the operation that has the place now.

/// Names one entry of one [`Slots`] for ever.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Key {
    /// The place in the table.
    pub(crate) index: u32,
    /// How many entries the place had before.
    generation: u32,
}

impl Key {
    /// The key in one word.
    pub(crate) fn pack(self) -> u64 {
        (u64::from(self.generation) << 32) | u64::from(self.index)
    }

    /// What [`Key::pack`] packed; any word is some key, of nothing perhaps.
    pub(crate) fn unpack(word: u64) -> Self {
        Self { index: (word & u64::from(u32::MAX)) as u32, generation: (word >> 32) as u32 }
    }
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    value: Option<T>,
}

/// The table. It grows as needed and never shrinks; after it has grown, nothing here allocates.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
    len: usize,
    /// A place whose generation reaches this is retired.
    last_generation: u32,
}

/// Keys whose generation would pass this are not given out: the word with all bits set is no key.
const LAST_GENERATION: u32 = u32::MAX - 1;

impl<T> Slots<T> {
    pub(crate) fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new(), len: 0, last_generation: LAST_GENERATION }
    }

    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// How many places there are, free ones included.
    pub(crate) fn places(&self) -> usize {
        self.places.len()
    }

    /// Puts `value` in a free place.
    pub(crate) fn insert(&mut self, value: T) -> Key {
        self.len += 1;
        if let Some(index) = self.free.pop() {
            let place = &mut self.places[index as usize];
            place.value = Some(value);
            return Key { index, generation: place.generation };
        }
        let index = u32::try_from(self.places.len()).unwrap_or(u32::MAX);
        assert!(index < u32::MAX, "more than four billion operations are under way");
        self.places.push(Place { generation: 0, value: Some(value) });
        Key { index, generation: 0 }
    }

    /// The entry, if it is still there.
    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let place = self.places.get(key.index as usize)?;
        if place.generation == key.generation { place.value.as_ref() } else { None }
    }

    /// The entry, if it is still there.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let place = self.places.get_mut(key.index as usize)?;
        if place.generation == key.generation { place.value.as_mut() } else { None }
    }

    /// The entry in a place, whatever its generation.
    pub(crate) fn at(&mut self, index: u32) -> Option<&mut T> {
        self.places.get_mut(index as usize)?.value.as_mut()
    }

    /// The key of the entry in a place.
    pub(crate) fn key_at(&self, index: u32) -> Option<Key> {
        let place = self.places.get(index as usize)?;
        place.value.as_ref().map(|_| Key { index, generation: place.generation })
    }

    /// Takes the entry out; its key finds nothing from now on.
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let place = self.places.get_mut(key.index as usize)?;
        if place.generation != key.generation {
            return None;
        }
        let value = place.value.take()?;
        self.len -= 1;
        if place.generation < self.last_generation {
            place.generation += 1;
            self.free.push(key.index);
        }
        Some(value)
    }

    /// All entries with their keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        (0_u32..).zip(&self.places).filter_map(|(index, place)| {
            let value = place.value.as_ref()?;
            Some((Key { index, generation: place.generation }, value))
        })
    }

    /// Takes all entries out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        self.len = 0;
        self.places.drain(..).filter_map(|place| place.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_something_gone_finds_nothing() {
        let mut slots = Slots::new();
        let first = slots.insert('a');
        assert_eq!(slots.remove(first), Some('a'));
        assert_eq!(slots.remove(first), None);
        let second = slots.insert('b');
        assert_eq!(second.index, first.index);
        assert_eq!(slots.get(first), None);
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.get(second), Some(&'b'));
        assert_eq!(slots.key_at(second.index), Some(second));
    }

    #[test]
    fn any_word_is_a_key_of_something_or_of_nothing() {
        let mut slots = Slots::new();
        let key = slots.insert(1);
        assert_eq!(Key::unpack(key.pack()), key);
        for word in [u64::MAX, 1 << 32, 7] {
            assert_eq!(slots.get(Key::unpack(word)), None);
        }
    }

    #[test]
    fn a_place_that_ran_out_of_generations_is_retired() {
        let mut slots = Slots { last_generation: 1, ..Slots::new() };
        let first = slots.insert(1);
        slots.remove(first);
        let second = slots.insert(2);
        assert_eq!((first.index, second.index), (0, 0));
        slots.remove(second);
        assert_eq!(slots.insert(3).index, 1);
    }
}
