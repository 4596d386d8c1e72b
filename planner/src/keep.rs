//! What a stored byte is worth: how much computing it spares. Stores choose by it what they evict and what they let in, and
//! so does the simulator.
//!
//! Computing a token again takes about as long whatever is kept of it, and its state is read for what its bytes are: so a
//! byte of a model that keeps few bytes of a token spares more. It is told as a power of two against a usual model.

/// Bytes of a token of blocks that are worth as much as usual.
const USUAL_BYTES_A_TOKEN: u64 = 64 << 10;
/// Askings, this one among them, with which a block of usual worth is let in where little may be written.
const ASKINGS: u8 = 2;

/// What each byte of a block is worth, from the block's bytes and tokens: a value higher by one is worth twice as much. 0
/// is usual.
pub fn worth(block_bytes: u64, block_tokens: u32) -> i8 {
    let each = (block_bytes / u64::from(block_tokens).max(1)).max(1);
    USUAL_BYTES_A_TOKEN.ilog2() as i8 - each.ilog2() as i8
}

/// How often a block must have been asked for, this time among them, to be let in where little may be written: once more if
/// its bytes are worth less than half of what others ask for, once less if they are worth more than twice as much. In a
/// store of one model all are equal.
pub fn askings(worth: i8, of_others: f64) -> u8 {
    match f64::from(worth) - of_others {
        more if more > 1.0 => ASKINGS - 1,
        less if less < -1.0 => ASKINGS + 1,
        _ => ASKINGS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_worth_more_the_fewer_of_them_a_token_has() {
        assert_eq!(worth(64 << 10, 1), 0);
        // 5 KiB and 320 KiB of a token.
        assert_eq!((worth(256 * 5031, 256), worth(256 * 327_680, 256)), (4, -2));
        assert!(worth(0, 0) > worth(u64::MAX, 1));
        assert_eq!((worth(1, u32::MAX), worth(u64::MAX, 0)), (16, -47));
    }

    #[test]
    fn blocks_of_one_model_are_let_in_alike_and_those_of_less_worth_later() {
        for worth in [-3, 0, 4] {
            assert_eq!(askings(worth, f64::from(worth)), ASKINGS);
        }
        assert!(askings(4, 0.0) < ASKINGS && askings(-2, 1.0) > ASKINGS);
    }
}
