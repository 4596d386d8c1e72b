//! Bytes in words, for what is said to people.

/// Bytes in the largest binary unit with two places, rounded down: for quantities that are compared.
pub fn exact_units(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match UNITS.iter().find(|&&(shift, _)| (bytes >> shift) >= 1) {
        Some((shift, unit)) => {
            let hundredths = (u128::from(bytes) * 100) >> shift;
            let (whole, part) = (hundredths / 100, hundredths % 100);
            if part == 0 { format!("{whole} {unit}") } else { format!("{whole}.{part:02} {unit}") }
        }
        None => format!("{bytes} B"),
    }
}

/// Bytes in the largest binary unit of which there are ten, without what is left over.
pub fn whole_units(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match UNITS.iter().find(|&&(shift, _)| (bytes >> shift) >= 10) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> *shift),
        None => format!("{bytes} B"),
    }
}
