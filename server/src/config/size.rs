//! Sizes as people write them: `512 MiB`, `64GiB`, `4096`.

use super::Complaint;

/// Bytes; refused if it is no number with a known unit, or too many.
pub(super) fn parse(text: &str) -> Result<u64, Complaint> {
    let refuse = || Complaint::new("size", &format!("{text:?} is no size: write 512 MiB, 64 GiB or bytes"));
    let text = text.trim();
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| refuse())?;
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return Err(refuse()),
    };
    number.checked_mul(1 << shift).ok_or_else(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in
            [("4096", 4096), ("512 MiB", 512 << 20), ("64GiB", 64 << 30), (" 1 TiB ", 1 << 40)]
        {
            assert_eq!(parse(text).unwrap(), bytes);
        }
        for wrong in ["", "MiB", "5 MB", "-1", "1.5 GiB", "99999999999 TiB"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
