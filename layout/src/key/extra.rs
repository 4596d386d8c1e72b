//! What else than tokens decides the state at a block: images and audio behind placeholder tokens, prompt
//! embeddings, a salt of the request.
//!
//! The encoding is a list of items, `tag: u8 | length: u32 LE | bytes`, sorted by tag and then by bytes,
//! without repeats: what was added, not the order it was added in, decides the key. A block of plain text has
//! no items and encodes to nothing.

use std::collections::BTreeSet;
use std::fmt;

/// The most items one block may have.
pub const MAX_EXTRA_ITEMS: usize = 1024;
/// The most bytes a content name, embedding digest or salt may have.
pub const MAX_EXTRA_ITEM_BYTES: usize = 1024;

const CONTENT: u8 = 1;
const EMBEDDINGS: u8 = 2;
const SALT: u8 = 3;

/// Gathers what else than tokens decides the state at one block.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct BlockExtra {
    items: BTreeSet<(u8, Vec<u8>)>,
}

/// Counts only: an item may be a salt.
impl fmt::Debug for BlockExtra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockExtra({} items)", self.items.len())
    }
}

/// Why something cannot be added to a [`BlockExtra`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtraError {
    /// The name, digest or salt has no bytes.
    Empty,
    /// It is past [`MAX_EXTRA_ITEM_BYTES`].
    TooLong {
        /// The bytes it has.
        bytes: usize,
    },
    /// The block has [`MAX_EXTRA_ITEMS`] items.
    TooMany,
}

impl fmt::Display for ExtraError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "an extra value of a key is empty: leave the value out"),
            Self::TooLong { bytes } => {
                write!(
                    f,
                    "an extra value of a key has {bytes} bytes, but the limit is \
                    {MAX_EXTRA_ITEM_BYTES}: use a digest of the value"
                )
            }
            Self::TooMany => write!(
                f,
                "a block has more than {MAX_EXTRA_ITEMS} extra values: use smaller \
                blocks"
            ),
        }
    }
}

impl std::error::Error for ExtraError {}

impl BlockExtra {
    /// Nothing but tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an image, a sound or a video: `name` is its content digest (or whatever name the engine gives to
    /// equal content only), `at` the index within the block of its first token there. A content that spans
    /// several blocks is added to each, at 0 in those that begin inside it.
    pub fn content(&mut self, at: u32, name: &[u8]) -> Result<&mut Self, ExtraError> {
        self.add(CONTENT, &at.to_le_bytes(), name)
    }

    /// Adds the digest of the prompt embeddings that stand in for this block's tokens.
    pub fn embeddings(&mut self, digest: &[u8]) -> Result<&mut Self, ExtraError> {
        self.add(EMBEDDINGS, &[], digest)
    }

    /// Adds a salt of the request: requests with different salts share no block from here on.
    pub fn salt(&mut self, salt: &[u8]) -> Result<&mut Self, ExtraError> {
        self.add(SALT, &[], salt)
    }

    /// The canonical encoding: the `extra` of [`KeyChain::push`](super::KeyChain::push). Empty if nothing was
    /// added.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (tag, bytes) in &self.items {
            out.push(*tag);
            // Bounded when it was added.
            out.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
            out.extend_from_slice(bytes);
        }
        out
    }

    fn add(&mut self, tag: u8, place: &[u8], bytes: &[u8]) -> Result<&mut Self, ExtraError> {
        if bytes.is_empty() {
            return Err(ExtraError::Empty);
        }
        if bytes.len() > MAX_EXTRA_ITEM_BYTES {
            return Err(ExtraError::TooLong { bytes: bytes.len() });
        }
        let item = (tag, [place, bytes].concat());
        if self.items.len() >= MAX_EXTRA_ITEMS && !self.items.contains(&item) {
            return Err(ExtraError::TooMany);
        }
        self.items.insert(item);
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_has_no_extra() {
        assert_eq!(BlockExtra::new().encode(), b"");
    }

    #[test]
    fn the_order_of_adding_and_repeats_do_not_matter() {
        let mut one = BlockExtra::new();
        one.salt(b"s").unwrap().content(7, b"cat").unwrap().content(0, b"dog").unwrap();
        let mut other = BlockExtra::new();
        other.content(0, b"dog").unwrap().content(7, b"cat").unwrap().salt(b"s").unwrap().salt(b"s").unwrap();
        assert_eq!(one.encode(), other.encode());
        let expected = b"\x01\x07\0\0\0\0\0\0\0dog\x01\x07\0\0\0\x07\0\0\0cat\x03\x01\0\0\0s";
        assert_eq!(one.encode(), expected);
    }

    #[test]
    fn content_place_and_tag_each_change_the_encoding() {
        let encode = |add: fn(&mut BlockExtra) -> Result<&mut BlockExtra, ExtraError>| {
            let mut extra = BlockExtra::new();
            add(&mut extra).unwrap();
            extra.encode()
        };
        let all = [
            encode(|extra| extra.content(0, b"x")),
            encode(|extra| extra.content(1, b"x")),
            encode(|extra| extra.content(0, b"y")),
            encode(|extra| extra.embeddings(b"\0\0\0\0x")),
            encode(|extra| extra.salt(b"\0\0\0\0x")),
            encode(|extra| extra.salt(b"x")),
            encode(|extra| extra.salt(b"x")?.salt(b"y")),
        ];
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn empty_long_and_countless_extras_are_refused() {
        let mut extra = BlockExtra::new();
        assert_eq!(extra.salt(b"").unwrap_err(), ExtraError::Empty);
        let bytes = MAX_EXTRA_ITEM_BYTES + 1;
        assert_eq!(extra.salt(&vec![0; bytes]).unwrap_err(), ExtraError::TooLong { bytes });
        for at in 0..MAX_EXTRA_ITEMS {
            extra.content(at as u32, b"x").unwrap();
        }
        assert_eq!(extra.salt(b"x").unwrap_err(), ExtraError::TooMany);
        assert!(extra.content(0, b"x").is_ok(), "it is there already");
    }

    #[test]
    fn a_salt_is_never_printed() {
        let mut extra = BlockExtra::new();
        extra.salt(b"\xab\xcdsecret").unwrap();
        assert_eq!(format!("{extra:?}"), "BlockExtra(1 items)");
    }
}
