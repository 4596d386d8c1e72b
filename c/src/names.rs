//! The names of blocks, as every other client makes them; and the library's own version.

use std::ffi::{CStr, c_char};

use kvarts_layout::BlockKey;
use kvarts_layout::key::KeyChain;

use crate::blocks::keys;
use crate::said::{Status, call, leave_several, perhaps, several, wrong};

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version without a zero in it"),
};

#[unsafe(no_mangle)]
extern "C" fn kvarts_version() -> *const c_char {
    VERSION.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_key(name: *const u8, nbytes: usize, key: *mut u8) -> Status {
    call(|| {
        let name = BlockKey::from_foreign(several(name, nbytes, "name")?);
        let name = name.map_err(|error| wrong(format!("name: {error}")))?;
        leave_several(name.as_bytes(), (key, 32), &mut 0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_chain(
    tokens: *const u32,
    token_count: usize,
    block_tokens: u32,
    parent: *const u8,
    chain: *mut u8,
    room: usize,
    count: *mut usize,
) -> Status {
    call(|| {
        if block_tokens == 0 {
            return Err(wrong("block_tokens: the value must be at least 1"));
        }
        let mut chained = match perhaps(parent) {
            None => KeyChain::new(),
            Some(_) => keys(parent, 1)?.pop().map_or_else(KeyChain::new, KeyChain::after),
        };
        let mut found = Vec::new();
        let tokens = several(tokens, token_count, "tokens")?;
        chained.push_all(tokens, block_tokens, |_| &[], |key| found.push(*key.as_bytes()));
        leave_several(&found, (chain.cast::<[u8; 32]>(), room), count)
    })
}
