//! Sizes as people write them: `512 MiB`, `64GiB`, `5G`, `5GB`, `1.5 TiB`, `4096`.
//!
//! As in the tools of coreutils a letter alone, or with `iB`, is a power of 1,024 and with `B` a power of 1,000: 5G is
//! 5 GiB, 5GB is 5,000,000,000 bytes.

use super::Complaint;

/// Digits behind a point that count.
const DECIMALS_MAX: usize = 9;

/// Bytes; refused if it is no number with a known unit, or too many. A part of a byte is cut off.
pub fn parse(text: &str) -> Result<u64, Complaint> {
    let refuse = || {
        let syntax = "write bytes, or a number with a unit: 512 MiB, 64G (as 64 GiB), 5GB (as 5 * 1000^3)";
        Complaint::new("size", &format!("{text:?} is not a size: {syntax}"))
    };
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
    let unit = unit.trim_start();
    let (is_point_alone, is_fraction) = (decimals.is_empty() || decimals.contains('.'), number.contains('.'));
    if is_point_alone || decimals.len() > DECIMALS_MAX || (is_fraction && matches!(unit, "" | "B")) {
        return Err(refuse());
    }
    let whole: u64 = whole.parse().map_err(|_| refuse())?;
    let each = factor(unit).ok_or_else(refuse)?;
    let decimal: u128 = decimals.parse().map_err(|_| refuse())?;
    let digits = u32::try_from(decimals.len()).map_err(|_| refuse())?;
    // Below one unit, whose factor is less than 2^64: no product passes 2^128.
    let rest = decimal.saturating_mul(u128::from(each)) / 10u128.pow(digits);
    let rest = u64::try_from(rest).map_err(|_| refuse())?;
    whole.checked_mul(each).and_then(|bytes| bytes.checked_add(rest)).ok_or_else(refuse)
}

/// Bytes of a unit.
fn factor(unit: &str) -> Option<u64> {
    let mut letters = unit.chars();
    let Some(letter) = letters.next() else { return Some(1) };
    let power = match letter.to_ascii_uppercase() {
        'B' => return letters.next().is_none().then_some(1),
        'K' => 1,
        'M' => 2,
        'G' => 3,
        'T' => 4,
        'P' => 5,
        _ => return None,
    };
    match letters.as_str() {
        "" | "iB" | "ib" => 1024u64.checked_pow(power),
        "B" | "b" => 1000u64.checked_pow(power),
        _ => None,
    }
}

/// A part of something, such as `80%`; nothing if the text has no per cent sign.
pub fn percent(text: &str) -> Option<Result<u32, Complaint>> {
    let number = text.trim().strip_suffix('%')?.trim_end();
    let read = number.parse().ok().filter(|part| (1..=100).contains(part));
    Some(
        read.ok_or_else(|| {
            Complaint::new("size", &format!("{text:?} is not a percentage: write 1% to 100%"))
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4096B", 4096),
            ("512 MiB", 512 << 20),
            ("64GiB", 64 << 30),
            (" 1 TiB ", 1 << 40),
            ("5G", 5 << 30),
            ("5g", 5 << 30),
            ("5GB", 5_000_000_000),
            ("5 MB", 5_000_000),
            ("1.5 GiB", 3 << 29),
            ("0.25K", 256),
        ] {
            assert_eq!(parse(text).unwrap(), bytes, "{text}");
        }
        let wrong = [
            "",
            "MiB",
            "-1",
            "1.5",
            "1.5B",
            "1..5G",
            "1.G",
            ".5G",
            "5GX",
            "5 G i B",
            "99999999999 TiB",
            "1e9",
        ];
        for wrong in wrong {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn parts_are_whole_per_cents_of_something() {
        assert_eq!(percent("50%").map(Result::unwrap), Some(50));
        assert_eq!(percent(" 100 %").map(Result::unwrap), Some(100));
        assert!(percent("50").is_none());
        for wrong in ["0%", "101%", "%", "1.5%", "-1%"] {
            assert!(percent(wrong).unwrap().is_err(), "{wrong}");
        }
    }
}
