//! Numbers as people read them.

/// A whole number with its digits in threes: `1,048,576`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Bytes in the largest binary unit that leaves a number of at least one, with up to two decimals: `4.35 MiB`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    let text = format!("{value:.2}");
    format!("{} {unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Bytes as people read them, with the exact number where the short one hides it.
pub fn exact_bytes(count: u64) -> String {
    if count < 1024 { bytes(count) } else { format!("{} ({} B)", bytes(count), grouped(count)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_stand_in_threes() {
        let grouped: Vec<String> = [0, 999, 1000, 131_072, u64::MAX].map(super::grouped).into();
        assert_eq!(grouped, ["0", "999", "1,000", "131,072", "18,446,744,073,709,551,615"]);
    }

    #[test]
    fn bytes_have_the_largest_unit_that_fits() {
        let texts: Vec<String> = [0, 1023, 1024, 4_559_872, 1 << 30, u64::MAX].map(bytes).into();
        assert_eq!(texts, ["0 B", "1023 B", "1 KiB", "4.35 MiB", "1 GiB", "16 EiB"]);
        assert_eq!(exact_bytes(2048), "2 KiB (2,048 B)");
        assert_eq!(exact_bytes(100), "100 B");
    }
}
