//! The names of things: fixed-size identifiers, each its own type so that no two can be confused.
//!
//! All of them are plain bytes with a hexadecimal text form; none carries meaning that needs decoding.

use std::fmt;
use std::str::FromStr;

/// Why a text is not an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParseIdError {
    /// How many hexadecimal digits were expected.
    pub expected_digits: usize,
}

impl fmt::Display for ParseIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {} hexadecimal digits", self.expected_digits)
    }
}

impl std::error::Error for ParseIdError {}

fn parse_hex<const N: usize>(text: &str) -> Result<[u8; N], ParseIdError> {
    let error = ParseIdError { expected_digits: N.saturating_mul(2) };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return Err(error);
    }
    let mut bytes = [0u8; N];
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        let [high, low] = pair.map(|digit| char::from(digit).to_digit(16));
        let (Some(high), Some(low)) = (high, low) else { return Err(error) };
        *byte = u8::try_from(high << 4 | low).map_err(|_| error)?;
    }
    Ok(bytes)
}

macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident, $bytes:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub [u8; $bytes]);

        impl $name {
            /// The number of bytes.
            pub const BYTES: usize = $bytes;
            /// The raw bytes.
            pub const fn as_bytes(&self) -> &[u8; $bytes] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;
            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                parse_hex(text).map(Self)
            }
        }
    };
}

identifier!(
    /// Names one token block and everything before it. To the store it is opaque.
    BlockKey,
    32
);
identifier!(
    /// BLAKE3 of an identity's canonical encoding: two identities that differ anywhere never share bytes.
    NamespaceId,
    32
);
identifier!(
    /// Names one production of a block's bytes; kept by compaction, peers and export.
    OriginId,
    16
);
identifier!(
    /// BLAKE3 over a block's uncompressed bytes in canonical (layer, part) order.
    ContentId,
    32
);
identifier!(
    /// Names one store on disk, drawn at random when it is made.
    StoreId,
    16
);
identifier!(
    /// BLAKE3 over what moves bytes in a model spec: order, kinds, sizes, alignment. Never names or costs.
    Fingerprint,
    32
);

/// A KV cache group of an engine: a field of its own in the index key, never hashed into the block key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct Group(pub u32);

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_survives_its_text_form() {
        let key = BlockKey(std::array::from_fn(|i| i as u8 * 7));
        assert_eq!(key.to_string().parse::<BlockKey>(), Ok(key));
    }

    #[test]
    fn text_of_the_wrong_length_or_alphabet_is_refused() {
        let expected = ParseIdError { expected_digits: 32 };
        for text in ["", "00", &"0".repeat(31), &"0".repeat(33), &"g".repeat(32), "0\u{e9}"] {
            assert_eq!(text.parse::<StoreId>(), Err(expected), "{text:?}");
        }
    }
}
