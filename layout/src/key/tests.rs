//! A key is a function of exactly the tokens and extras of its chain, however they are handed over.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// The chain's definition, one field after the other.
fn plain_key(parent: BlockKey, tokens: &[u32], extra: &[u8]) -> BlockKey {
    let mut message = b"kvarts.block.v1\0".to_vec();
    message.extend_from_slice(&parent.0);
    message.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
    for token in tokens {
        message.extend_from_slice(&token.to_le_bytes());
    }
    message.extend_from_slice(&(extra.len() as u64).to_le_bytes());
    message.extend_from_slice(extra);
    BlockKey(*blake3::hash(&message).as_bytes())
}

#[test]
fn the_root_key_is_the_hash_of_its_domain() {
    assert_eq!(ROOT_KEY.0, *blake3::hash(&ROOT_DOMAIN).as_bytes());
    let domains = [KEY_DOMAIN, ROOT_DOMAIN, FOREIGN_DOMAIN, crate::identity::IDENTITY_DOMAIN];
    assert_eq!(domains.iter().collect::<BTreeSet<_>>().len(), 4);
}

proptest! {
    #[test]
    fn a_chain_follows_its_definition(
        blocks in vec((vec(any::<u32>(), 0..40), vec(any::<u8>(), 0..40)), 1..6),
    ) {
        let mut chain = KeyChain::new();
        let mut parent = ROOT_KEY;
        for (tokens, extra) in &blocks {
            parent = plain_key(parent, tokens, extra);
            prop_assert_eq!(chain.push(tokens, extra), parent);
            prop_assert_eq!(chain.last(), parent);
        }
    }

    #[test]
    fn pushing_a_long_text_at_once_equals_pushing_its_blocks(
        tokens in vec(any::<u32>(), 0..600),
        block_tokens in 1u32..130,
        extras in vec(vec(any::<u8>(), 0..20), 3),
    ) {
        let mut chain = KeyChain::after(BlockKey([9; 32]));
        let mut one_by_one = chain;
        let expected: Vec<BlockKey> = tokens
            .chunks_exact(block_tokens as usize)
            .enumerate()
            .map(|(i, block)| one_by_one.push(block, &extras[i % 3]))
            .collect();
        let mut keys = Vec::new();
        let count = chain.push_all(&tokens, block_tokens, |i| &extras[i % 3], |key| keys.push(key));
        prop_assert_eq!(&keys, &expected);
        prop_assert_eq!(count, expected.len());
        prop_assert_eq!(chain, one_by_one);
    }

    #[test]
    fn an_index_key_survives_its_encoding(namespace: [u8; 32], key: [u8; 32], group: u32, raw: [u16; 3]) {
        let coordinate = Coordinate::heads(raw[0], raw[1], raw[2]).unwrap_or_default();
        let index = IndexKey { namespace: NamespaceId(namespace), key: BlockKey(key), group: Group(group), coordinate };
        prop_assert_eq!(IndexKey::decode(&index.encode()), Some(index));
    }

    #[test]
    fn a_decoded_index_key_encodes_to_the_same_bytes(
        mut bytes in vec(any::<u8>(), 74..79),
        coordinate in prop_oneof![Just(0u64), 0u64..1 << 48, any::<u64>()],
    ) {
        if let Some(tail) = bytes.get_mut(68..76) {
            tail.copy_from_slice(&coordinate.to_le_bytes());
        }
        match IndexKey::decode(&bytes) {
            Some(index) => prop_assert_eq!(index.encode().to_vec(), bytes),
            None => prop_assert!(bytes.len() != IndexKey::BYTES || Coordinate::from_u64(coordinate).is_none()),
        }
    }
}

/// Lengths around each edge of the scratch buffers, where a message is cut into slices.
#[test]
fn messages_around_every_buffer_size_follow_the_definition() {
    let tokens: Vec<u32> = (0..10_000u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let extra: Vec<u8> = (0..40_000u32).map(|i| i as u8).collect();
    for count in [0, 1, 111, 112, 113, 495, 496, 497, 4080, 4081, 4082, 4083, 4084, 8178, 8179, 10_000] {
        for bytes in [0, 1, 3, 1500, 2000, 16_300, 40_000] {
            let (tokens, extra) = (&tokens[..count], &extra[..bytes]);
            assert_eq!(
                KeyChain::new().push(tokens, extra),
                plain_key(ROOT_KEY, tokens, extra),
                "{count} {bytes}"
            );
            let mut keys = Vec::new();
            KeyChain::new().push_all(tokens, count as u32, |_| extra, |key| keys.push(key));
            assert_eq!(keys.len(), usize::from(count > 0));
            assert!(keys.iter().all(|key| *key == plain_key(ROOT_KEY, tokens, extra)), "{count} {bytes}");
        }
    }
}

#[test]
fn what_is_cut_differently_into_blocks_and_extras_has_other_keys() {
    let token = u32::from_le_bytes(*b"abcd");
    let keys = [
        KeyChain::new().push(&[token], b""),
        KeyChain::new().push(&[], b"abcd"),
        KeyChain::new().push(&[], b""),
        KeyChain::new().push(&[token, token], b""),
        KeyChain::new().push(&[token], b"abcd"),
        { KeyChain::after(KeyChain::new().push(&[token], b"")) }.push(&[token], b""),
    ];
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
}

#[test]
fn text_keys_leave_out_the_unfinished_block() {
    let tokens: Vec<u32> = (0..35).collect();
    let keys = text_keys(&tokens, 16);
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[1], plain_key(plain_key(ROOT_KEY, &tokens[..16], b""), &tokens[16..32], b""));
    assert_eq!(text_keys(&tokens, 36), []);
    assert_eq!(text_keys(&tokens, 0), []);
}

#[test]
fn a_foreign_key_of_32_bytes_is_kept_and_all_others_are_mapped() {
    let bytes: Vec<u8> = (0..=255).cycle().take(MAX_FOREIGN_KEY_BYTES + 1).collect();
    assert_eq!(BlockKey::from_foreign(&bytes[..32]).unwrap().0, bytes[..32]);
    let mut seen = BTreeSet::new();
    for length in (1..70).chain([MAX_FOREIGN_KEY_BYTES]) {
        let key = BlockKey::from_foreign(&bytes[..length]).unwrap();
        assert!(seen.insert(key), "{length}");
        if length != 32 {
            let message =
                [&b"kvarts.fkey.v1\0\0"[..], &(length as u32).to_le_bytes(), &bytes[..length]].concat();
            assert_eq!(key.0, *blake3::hash(&message).as_bytes());
        }
    }
    assert_eq!(BlockKey::from_foreign(b""), Err(ForeignKeyError::Empty));
    let bytes_too_long = ForeignKeyError::TooLong { bytes: MAX_FOREIGN_KEY_BYTES + 1 };
    assert_eq!(BlockKey::from_foreign(&bytes), Err(bytes_too_long));
}

#[test]
fn an_offload_key_keeps_its_group_apart() {
    let hash = [5u8; 32];
    for group in [0u32, 1, 0x0102_0304] {
        let bytes = [&hash[..], &group.to_be_bytes()].concat();
        assert_eq!(split_vllm_offload_key(&bytes), Ok((BlockKey(hash), Group(group))));
    }
    let (short, group) = split_vllm_offload_key(b"h\0\0\0\x02").unwrap();
    assert_eq!((short, group), (BlockKey::from_foreign(b"h").unwrap(), Group(2)));
    for bytes in 0..5 {
        assert_eq!(split_vllm_offload_key(&vec![0; bytes]), Err(ForeignKeyError::NoGroup { bytes }));
    }
    let bytes = MAX_FOREIGN_KEY_BYTES + 1;
    assert_eq!(split_vllm_offload_key(&vec![0; bytes + 4]), Err(ForeignKeyError::TooLong { bytes }));
}
