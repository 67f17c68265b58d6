//! Reads measured figures from the tables of `docs/benchmarks.md`.

/// The error of a page without an expected figure.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to read a figure of docs/benchmarks.md: {0}")]
pub struct FigureError(String);

/// The tables of a page in Markdown.
#[derive(Debug)]
pub(super) struct Page<'a>(pub(super) &'a str);

impl<'a> Page<'a> {
    /// Returns the newest figure of the first row that begins with `row`: the last one between
    /// semicolons. `column` is the heading of its column.
    pub(super) fn figure(&self, row: &str, column: &str) -> Result<f64, FigureError> {
        let cell = self.cell(row, column)?;
        let newest = cell.rsplit(';').next().unwrap_or(cell);
        let number = newest.trim_start_matches(|c: char| !c.is_ascii_digit());
        let is_part = |c: char| c.is_ascii_digit() || ".,".contains(c);
        let number = number.split(|c| !is_part(c)).next().unwrap_or_default();
        number
            .trim_end_matches(',')
            .replace(',', "")
            .parse()
            .map_err(|_| {
                FigureError(format!(
                    "{row:?} has no number in column {column:?}: {cell:?}"
                ))
            })
    }

    fn cell(&self, row: &str, column: &str) -> Result<&'a str, FigureError> {
        let missing = |what: &str| FigureError(format!("{what} of row {row:?}, column {column:?}"));
        let mut heading: Option<Vec<&str>> = None;
        let mut previous: Option<&str> = None;
        for line in self.0.lines() {
            if line.starts_with("|---") {
                heading = previous.map(cells);
            } else if !line.starts_with('|') {
                heading = None;
            } else if let Some(columns) = &heading
                && let Some(at) = columns.iter().position(|name| *name == column)
                && let Some(first) = cells(line).first()
                && first.starts_with(row)
            {
                return cells(line)
                    .get(at)
                    .copied()
                    .ok_or_else(|| missing("the cell"));
            }
            previous = Some(line);
        }
        Err(missing("no table"))
    }
}

fn cells(line: &str) -> Vec<&str> {
    line.trim_matches('|').split('|').map(str::trim).collect()
}

#[cfg(test)]
mod tests {
    use super::Page;

    const PAGE: Page<'static> = Page(
        "text\n\n| call | native | shim |\n|---|---|---|\n| `a` | 62; 56 us | 1.005x; 1.004x |\n\
         | `c` | 13,321, 282 ms | |\n\n\
         | call | other |\n|---|---|\n| `a` | 7 / 9 ms |\n",
    );

    #[test]
    fn figure_is_the_newest_of_its_cell() {
        assert_eq!(PAGE.figure("`a`", "shim"), Ok(1.004));
        assert_eq!(PAGE.figure("`a`", "native"), Ok(56.0));
        assert_eq!(PAGE.figure("`c`", "native"), Ok(13321.0));
        assert_eq!(PAGE.figure("`a`", "other"), Ok(7.0));
    }

    #[test]
    fn figure_is_an_error_without_its_row() {
        assert!(PAGE.figure("`b`", "shim").is_err());
        assert!(PAGE.figure("`a`", "nothing").is_err());
    }
}
