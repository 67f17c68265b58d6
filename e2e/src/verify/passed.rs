//! Remembers which checks of the long tier have passed on a committed tree, so that a run that
//! ended early resumes where it was.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::tree;
use crate::paths;

/// The names of the checks that have passed.
#[derive(Default)]
pub(super) struct PassedChecks {
    /// `None` for a tree with changes that are not committed: nothing is remembered of it.
    file: Option<PathBuf>,
    names: BTreeSet<String>,
}

impl PassedChecks {
    /// Reads what earlier runs have recorded of this tree.
    pub(super) fn of_tree() -> PassedChecks {
        let tree = tree::hash().filter(|_| tree::is_committed());
        PassedChecks::read(tree.map(|tree| paths::cache().join("passed").join(tree)))
    }

    fn read(file: Option<PathBuf>) -> PassedChecks {
        let text = file.as_ref().and_then(|file| fs::read_to_string(file).ok());
        let names = text.unwrap_or_default();
        PassedChecks {
            file,
            names: names.lines().map(str::to_owned).collect(),
        }
    }

    /// Returns whether the check has passed in this run or in an earlier one.
    pub(super) fn has(&self, check: &str) -> bool {
        self.names.contains(check)
    }

    /// Records that a check has passed.
    pub(super) fn add(&mut self, check: &str) {
        if !self.names.insert(check.to_owned()) {
            return;
        }
        if let Some(file) = &self.file
            && let Err(error) = append(file, check)
        {
            let file = file.display();
            eprintln!("failed to remember that {check} passed: {file}: {error}; it runs again");
        }
    }
}

fn append(file: &Path, line: &str) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut options = OpenOptions::new();
    let mut file = options.create(true).append(true).open(file)?;
    writeln!(file, "{line}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_checks_are_known_to_the_next_run_on_the_tree() {
        let folder = tempfile::tempdir().unwrap();
        let file = || Some(folder.path().join("passed/tree"));
        let mut first = PassedChecks::read(file());
        assert!(!first.has("main/histories"));
        first.add("main/histories");
        first.add("main/histories");
        assert!(PassedChecks::read(file()).has("main/histories"));
        assert!(!PassedChecks::read(Some(folder.path().join("other"))).has("main/histories"));
        assert_eq!(
            fs::read_to_string(file().unwrap()).unwrap(),
            "main/histories\n"
        );
    }

    #[test]
    fn nothing_is_remembered_of_a_changed_tree() {
        let mut changed = PassedChecks::read(None);
        changed.add("main/histories");
        assert!(changed.has("main/histories") && !PassedChecks::read(None).has("main/histories"));
    }
}
