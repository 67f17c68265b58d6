//! Checks the rules of CONTRIBUTING.md for comments and names, as far as a program can.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use syn::visit::{self, Visit};

use crate::paths;

/// The maximum width of a line with a comment, in columns.
const MAX_WIDTH: usize = 100;

/// First words of a comment that name no actor, or that refer to the comment before.
const NO_ACTOR: &[&str] = &[
    "Who", "Whom", "Whose", "What", "Somebody", "Nobody", "It", "They", "The same", "As above",
    "Of it",
];

/// Documents that are not in the repository.
const OUTSIDE_DOCUMENTS: &[&str] = &["design, section", "design, \"", "Design, \"", "../shared"];

/// Words that no identifier and no text may contain, because docs/internals/glossary.md replaces
/// each by the field's term.
const OLD_WORDS: &[&str] = &[
    "afresh",
    "amiss",
    "bed",
    "befell",
    "bell",
    "canaries",
    "desk",
    "dice",
    "doom",
    "doomed",
    "intruder",
    "intruders",
    "landscape",
    "leaver",
    "leavers",
    "obedient",
    "overstays",
    "residual",
    "roster",
    "seat",
    "seats",
    "shelf",
    "sickness",
    "sufferer",
    "tally",
    "tour",
    "tours",
    "vault",
    "witness",
];

/// The file with [`OLD_WORDS`].
const THIS_FILE: &str = "e2e/src/verify/style.rs";

/// One-letter names that every reader knows: two values of a comparison, a formatter, a count, a
/// function's variable.
const KNOWN_LETTERS: &[&str] = &["a", "b", "f", "n", "x"];

/// A violation of the rules by one line.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Violation {
    Wide,
    NoActor(&'static str),
    OutsideDocument,
    OldWord(&'static str),
    OneLetter(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wide => write!(f, "the comment is wider than {MAX_WIDTH} columns"),
            Self::NoActor(word) => write!(f, "the comment begins with {word:?}: name the actor"),
            Self::OutsideDocument => {
                f.write_str("the comment refers to a document outside the repository")
            }
            Self::OldWord(word) => write!(
                f,
                "docs/internals/glossary.md has another term for {word:?}"
            ),
            Self::OneLetter(name) => {
                write!(f, "{name:?} names a field or a parameter: use a word")
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

/// Returns the old words of a page with their line numbers, inside of identifiers too.
fn old_words(text: &str) -> Vec<(usize, Violation)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let mut words = words(line);
        let word = words.find_map(|word| OLD_WORDS.iter().find(|old| **old == word));
        found.extend(word.map(|word| (number + 1, Violation::OldWord(word))));
    }
    found
}

/// Splits a line into lower-case words: at each character that is no letter, and before each
/// capital that follows a small letter.
fn words(line: &str) -> impl Iterator<Item = String> {
    let mut spaced = String::with_capacity(line.len());
    let mut after_small = false;
    for letter in line.chars() {
        if !letter.is_alphabetic() || (letter.is_uppercase() && after_small) {
            spaced.push(' ');
        }
        if letter.is_alphabetic() {
            spaced.extend(letter.to_lowercase());
        }
        after_small = letter.is_lowercase();
    }
    let words: Vec<String> = spaced.split_whitespace().map(str::to_owned).collect();
    words.into_iter()
}

/// Collects the one-letter names of fields and parameters, except [`KNOWN_LETTERS`].
#[derive(Default)]
struct Letters(Vec<String>);

impl Letters {
    fn note(&mut self, name: &syn::Ident) {
        let name = name.to_string();
        if name.len() == 1 && !KNOWN_LETTERS.contains(&name.as_str()) {
            self.0.push(name);
        }
    }
}

impl<'ast> Visit<'ast> for Letters {
    fn visit_field(&mut self, field: &'ast syn::Field) {
        field.ident.iter().for_each(|name| self.note(name));
        visit::visit_field(self, field);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        // Functions of a foreign ABI pass words without a meaning of their own.
        if signature.abi.is_none() {
            visit::visit_signature(self, signature);
        }
    }

    fn visit_fn_arg(&mut self, argument: &'ast syn::FnArg) {
        if let syn::FnArg::Typed(argument) = argument
            && let syn::Pat::Ident(name) = &*argument.pat
        {
            self.note(&name.ident);
        }
        visit::visit_fn_arg(self, argument);
    }
}

/// Returns the one-letter names of a source file. They have no line numbers.
fn one_letter_names(source: &str) -> syn::Result<Vec<Violation>> {
    let mut letters = Letters::default();
    letters.visit_file(&syn::parse_file(source)?);
    Ok(letters.0.into_iter().map(Violation::OneLetter).collect())
}

/// Returns the text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let marked = line.trim_start().strip_prefix("//")?;
    Some(marked.trim_start_matches(['/', '!']).trim())
}

/// Finds the files with one of these extensions in a folder, without build outputs and hidden
/// folders.
pub(super) fn files(
    folder: &Path,
    extensions: &[&str],
    found: &mut Vec<PathBuf>,
) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                files(&path, extensions, found)?;
            }
        } else if extensions
            .iter()
            .any(|one| path.extension().is_some_and(|is| is == *one))
        {
            found.push(path);
        }
    }
    Ok(())
}

/// Finds the Rust files of a folder.
pub(super) fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    files(folder, &["rs"], found)
}

/// Fails on violations in any Rust file, and on old words in any other text.
///
/// # Errors
/// Names each line and its violation, or the file that could not be read.
pub(super) fn check() -> anyhow::Result<()> {
    let repository = paths::repository();
    let mut paths = Vec::new();
    let texts = [
        "rs", "md", "yaml", "tpl", "txt", "py", "c", "cpp", "cu", "h",
    ];
    files(&repository, &texts, &mut paths)?;
    let (mut seen, mut wrong) = (0, Vec::new());
    for path in paths {
        let name = path.strip_prefix(&repository)?.display().to_string();
        seen += 1;
        let text = fs::read_to_string(&path)?;
        let mut found = match name.as_str() {
            THIS_FILE => Vec::new(),
            _ => old_words(&text),
        };
        if path.extension().is_some_and(|is| is == "rs") {
            found.extend(violations(&text));
            let letters = one_letter_names(&text)
                .map_err(|error| anyhow::anyhow!("failed to parse {name}: {error}"))?;
            wrong.extend(letters.into_iter().map(|one| format!("{name}: {one}")));
        }
        let said = |(line, fault)| format!("{name}:{line}: {fault}");
        wrong.extend(found.into_iter().map(said));
    }
    anyhow::ensure!(
        seen > 800,
        "only {seen} files were found: the texts are not where they were"
    );
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

    #[test]
    fn old_words_are_found_in_names_and_texts() {
        let page = "struct LeaseDesk;\nthe vaulted hall\nTHE_SHELF\n";
        let expected = [
            (1, Violation::OldWord("desk")),
            (3, Violation::OldWord("shelf")),
        ];
        assert_eq!(old_words(page), expected);
    }

    #[test]
    fn one_letter_names_of_fields_and_parameters_are_found() {
        let source = "struct S { g: u64 } fn f(n: u32, p: &str) { let q = 1; }";
        let expected = ["g", "p"].map(|name| Violation::OneLetter(name.to_owned()));
        assert_eq!(one_letter_names(source).unwrap(), expected);
    }
}
