//! A small table printer: columns as wide as their widest cell, two spaces apart.

use std::fmt;

/// Which side of its column a cell stands on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// The left one: text.
    Left,
    /// The right one: numbers.
    Right,
}

/// Rows of text under headings.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(columns: &[(&'static str, Align)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; cells past the last column are not shown, missing ones are empty.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cell = |row: &[String], column: usize| row.get(column).cloned().unwrap_or_default();
        let headings: Vec<String> = self.columns.iter().map(|(heading, _)| (*heading).to_owned()).collect();
        let all = || std::iter::once(&headings).chain(&self.rows);
        let width = |column: usize| all().map(|row| cell(row, column).chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for row in all() {
            let mut line = String::new();
            for (column, ((_, align), &width)) in self.columns.iter().zip(&widths).enumerate() {
                let gap = if column > 0 { "  " } else { "" };
                let cell = cell(row, column);
                line += &match align {
                    Align::Left => format!("{gap}{cell:<width$}"),
                    Align::Right => format!("{gap}{cell:>width$}"),
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&[("NAME", Align::Left), ("BYTES", Align::Right), ("NOTE", Align::Left)]);
        table.row(["a".into(), "1,000,000".into(), String::new()]);
        table.row(["longer".into(), "1".into(), "\u{fc}".into()]);
        let expected = ["NAME        BYTES  NOTE", "a       1,000,000", "longer          1  \u{fc}", ""];
        assert_eq!(table.to_string(), expected.join("\n"));
    }
}
