//! Renders tables: aligned columns, fitted to the terminal's width, with colours on request.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

/// Spaces between columns.
const GAP: usize = 3;

/// Where a table is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminal {
    /// Whether escape sequences of colours are written.
    pub colour: bool,
    /// The columns of characters; `None` for a file or a pipe, where nothing is cut.
    pub width: Option<usize>,
    /// Whether `-w` clears the screen before it prints again.
    pub clears: bool,
    /// Whether the columns of `-o wide` are shown.
    pub wide: bool,
    /// Whether the header is left out.
    pub no_headers: bool,
}

/// The width of standard output; `None` where it is no terminal.
pub fn terminal_width() -> Option<usize> {
    let out = std::io::stdout();
    let size = rustix::termios::tcgetwinsize(&out).ok();
    let width = size.map(|size| usize::from(size.ws_col));
    width.filter(|width| *width > 0 && out.is_terminal())
}

/// How a cell is shown on a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// As it is.
    #[default]
    Plain,
    /// Fine.
    Good,
    /// Not as it should be.
    Warning,
    /// Broken.
    Bad,
}

impl Style {
    fn code(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Good => Some("32"),
            Self::Warning => Some("33"),
            Self::Bad => Some("31"),
        }
    }

    /// The text with the style's escape sequences, if the terminal shows colours.
    pub fn paint(self, text: &str, terminal: Terminal) -> String {
        match self.code().filter(|_| terminal.colour) {
            Some(code) => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
            None => text.to_owned(),
        }
    }
}

/// Replaces the characters of a text that a tenant or a server may shape, which a terminal would
/// take for commands: control characters, and those that reverse the order of a line.
pub(crate) fn clean(text: String) -> String {
    match text.contains(commands_terminal) {
        true => text.replace(commands_terminal, " "),
        false => text,
    }
}

/// Control characters, and the Bidi_Control characters of Unicode's Bidirectional Algorithm (UAX
/// 9).
fn commands_terminal(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    /// A cell with a style. Control characters of names and messages do not reach the terminal.
    pub fn new(text: impl Into<String>, style: Style) -> Self {
        let text = clean(text.into());
        Self { text, style }
    }

    /// The cell of something unknown or absent.
    pub fn none() -> Self {
        Self::from("-")
    }

    /// The cell's text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text, Style::Plain)
    }
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The header; empty for notes.
    pub name: &'static str,
    /// Whether only `-o wide` shows the column.
    pub wide: bool,
    /// The order in which columns are left out on a narrow terminal, the highest first; never 0.
    pub expendable: u8,
}

/// A column that is always shown.
pub const fn column(name: &'static str) -> Column {
    Column {
        name,
        wide: false,
        expendable: 0,
    }
}

/// A column that a narrow terminal leaves out; those with a higher number go first.
pub const fn expendable(name: &'static str, expendable: u8) -> Column {
    Column {
        name,
        wide: false,
        expendable,
    }
}

/// A column of `-o wide`.
pub const fn wide(name: &'static str) -> Column {
    Column {
        name,
        wide: true,
        expendable: 0,
    }
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// An empty table.
    pub fn new(columns: &[Column]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row with a cell for each column.
    pub fn push(&mut self, row: Vec<Cell>) {
        debug_assert_eq!(row.len(), self.columns.len(), "a cell for each column");
        self.rows.push(row);
    }

    /// Whether the table has no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table as text, a line for each row.
    pub fn render(&self, terminal: Terminal) -> String {
        let shown = self.fitting_columns(terminal);
        let widths = self.widths(&shown, terminal);
        let mut text = String::new();
        if !terminal.no_headers && !self.rows.is_empty() {
            let header: Vec<Cell> = shown
                .iter()
                .map(|at| Cell::from(self.columns[*at].name))
                .collect();
            render_row(
                &mut text,
                &header.iter().collect::<Vec<_>>(),
                &widths,
                terminal,
            );
        }
        for row in &self.rows {
            let cells: Vec<&Cell> = shown.iter().filter_map(|at| row.get(*at)).collect();
            render_row(&mut text, &cells, &widths, terminal);
        }
        text
    }

    /// The shown columns: those of `-o wide` only if wanted, and as many as fit.
    fn fitting_columns(&self, terminal: Terminal) -> Vec<usize> {
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        shown.retain(|at| terminal.wide || !self.columns[*at].wide);
        let Some(width) = terminal.width else {
            return shown;
        };
        while total(&self.widths(&shown, terminal)) > width {
            let mut droppable: Vec<usize> = shown.clone();
            droppable.retain(|at| self.columns[*at].expendable > 0);
            let Some(least) = droppable
                .into_iter()
                .max_by_key(|at| self.columns[*at].expendable)
            else {
                break;
            };
            shown.retain(|at| *at != least);
        }
        shown
    }

    fn widths(&self, shown: &[usize], terminal: Terminal) -> Vec<usize> {
        let width = |at: &usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(*at));
            let widest = cells
                .map(|cell| cell.text.chars().count())
                .max()
                .unwrap_or(0);
            if terminal.no_headers {
                return widest;
            }
            widest.max(self.columns[*at].name.chars().count())
        };
        shown.iter().map(width).collect()
    }
}

fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

fn render_row(text: &mut String, cells: &[&Cell], widths: &[usize], terminal: Terminal) {
    let last = cells.iter().rposition(|cell| !cell.text.is_empty());
    let (mut line, mut column) = (String::new(), 0);
    for (at, (cell, width)) in cells.iter().zip(widths).enumerate() {
        if last.is_none_or(|last| at > last) {
            break;
        }
        let room = terminal
            .width
            .map_or(usize::MAX, |all| all.saturating_sub(column));
        let shown = cut(&cell.text, room);
        let length = shown.chars().count();
        line.push_str(&cell.style.paint(&shown, terminal));
        if Some(at) != last {
            let padding = width.saturating_sub(length) + GAP;
            line.extend(std::iter::repeat_n(' ', padding));
            column += length + padding;
        }
        if column >= terminal.width.unwrap_or(usize::MAX) {
            break;
        }
    }
    // A string takes every write.
    let _ = writeln!(text, "{}", line.trim_end_matches(' '));
}

/// Cuts a text to a width, with a mark at its end.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&[
            column("NAME"),
            expendable("MODEL", 1),
            expendable("PODS", 2),
            wide("UUID"),
            column(""),
        ]);
        table.push(vec![
            "a".into(),
            "H100".into(),
            "3".into(),
            "GPU-1".into(),
            "".into(),
        ]);
        table.push(vec![
            Cell::new("long-name", Style::Bad),
            "H100".into(),
            "12".into(),
            "GPU-2".into(),
            "restart the machine".into(),
        ]);
        table
    }

    #[test]
    fn columns_are_aligned_without_trailing_spaces() {
        let expected = "NAME        MODEL   PODS\n\
                        a           H100    3\n\
                        long-name   H100    12     restart the machine\n";
        assert_eq!(table().render(Terminal::default()), expected);
    }

    #[test]
    fn wide_shows_more_and_no_headers_less() {
        let terminal = Terminal {
            wide: true,
            no_headers: true,
            ..Terminal::default()
        };
        let rendered = table().render(terminal);
        assert!(
            rendered.starts_with("a           H100   3    "),
            "{rendered}"
        );
        assert!(rendered.contains("GPU-2"), "{rendered}");
    }

    #[test]
    fn narrow_terminal_drops_columns_and_cuts_the_rest() {
        let terminal = Terminal {
            width: Some(26),
            ..Terminal::default()
        };
        let expected = "NAME\na\nlong-name   restart the m…\n";
        assert_eq!(table().render(terminal), expected);
        let lines = table().render(Terminal {
            width: Some(5),
            ..Terminal::default()
        });
        assert!(
            lines.lines().all(|line| line.chars().count() <= 5),
            "{lines}"
        );
    }

    #[test]
    fn colour_is_written_only_on_request_and_outside_of_the_width() {
        let plain = table().render(Terminal::default());
        assert!(!plain.contains('\u{1b}'));
        let coloured = table().render(Terminal {
            colour: true,
            ..Terminal::default()
        });
        assert!(
            coloured.contains("\u{1b}[31mlong-name\u{1b}[0m   H100"),
            "{coloured}"
        );
        let bare = coloured.replace("\u{1b}[31m", "").replace("\u{1b}[0m", "");
        assert_eq!(bare, plain);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(Cell::from("a\u{1b}[2Jb\n").text(), "a [2Jb ");
        assert_eq!(Cell::from("a\u{202e}b\u{2066}c").text(), "a b c");
    }
}
