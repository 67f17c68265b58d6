//! Checks the rules of CONTRIBUTING.md for comments, as far as a program can.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use crate::paths;

/// The maximum width of a line with a comment, in columns.
const MAX_WIDTH: usize = 100;

/// First words of a comment that name no actor, or that refer to the comment before.
const NO_ACTOR: &[&str] = &[
    "Who", "Whom", "Whose", "Somebody", "Nobody", "It", "They", "The same", "As above", "Of it",
];

/// Documents that are not in the repository.
const OUTSIDE_DOCUMENTS: &[&str] = &["design, section", "design, \"", "Design, \""];

/// A violation of the rules by one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Violation {
    Wide,
    NoActor(&'static str),
    OutsideDocument,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wide => write!(f, "the comment is wider than {MAX_WIDTH} columns"),
            Self::NoActor(word) => write!(f, "the comment begins with {word:?}: name the actor"),
            Self::OutsideDocument => {
                f.write_str("the comment refers to a document outside the repository")
            }
        }
    }
}

/// Returns the violations of a source file with their line numbers.
fn violations(source: &str) -> Vec<(usize, Violation)> {
    let mut faults = Vec::new();
    let mut continues = false;
    for (number, line) in source.lines().enumerate() {
        let text = comment(line);
        let Some(text) = text else {
            continues = false;
            continue;
        };
        let mut note = |fault| faults.push((number + 1, fault));
        if line.chars().count() > MAX_WIDTH {
            note(Violation::Wide);
        }
        let begins = |word: &&&str| {
            let rest = text.strip_prefix(**word);
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '\''))
        };
        if let Some(word) = NO_ACTOR.iter().find(begins).filter(|_| !continues) {
            note(Violation::NoActor(word));
        }
        if OUTSIDE_DOCUMENTS.iter().any(|words| text.contains(words)) {
            note(Violation::OutsideDocument);
        }
        continues = !text.is_empty();
    }
    faults
}

/// Returns the text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let marked = line.trim_start().strip_prefix("//")?;
    Some(marked.trim_start_matches(['/', '!']).trim())
}

/// Finds the Rust files of a folder, without build outputs and hidden folders.
pub(super) fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                sources(&path, found)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// Fails on violations in any Rust file.
///
/// # Errors
/// Names each line and its violation, or the file that could not be read.
pub(super) fn check() -> anyhow::Result<()> {
    let repository = paths::repository();
    let mut paths = Vec::new();
    sources(&repository, &mut paths)?;
    let (mut seen, mut wrong) = (0, Vec::new());
    for path in paths {
        let name = path.strip_prefix(&repository)?.display().to_string();
        seen += 1;
        let said = |(line, fault)| format!("{name}:{line}: {fault}");
        wrong.extend(violations(&fs::read_to_string(path)?).into_iter().map(said));
    }
    anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{seen} files are written as CONTRIBUTING.md says");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violations_name_width_actor_and_outside_documents() {
        let wide = format!("    // {}", "word ".repeat(20));
        let source = [
            "/// Who goes is on record.",
            "fn a() {}",
            wide.trim_end(),
            "",
            "// See design, section 8.",
            "",
            "//! It.",
        ]
        .join("\n");
        let expected = [
            (1, Violation::NoActor("Who")),
            (3, Violation::Wide),
            (5, Violation::OutsideDocument),
            (7, Violation::NoActor("It")),
        ];
        assert_eq!(violations(&source), expected);
    }

    #[test]
    fn violations_skip_continued_sentences_and_longer_words() {
        let source =
            "/// The agent kills the process that hangs.\n/// It waits for its end.\n\n// Item.\n";
        assert_eq!(violations(source), []);
        assert_eq!(
            violations("let text = \"// no comment, and It is long\";"),
            []
        );
    }
}
