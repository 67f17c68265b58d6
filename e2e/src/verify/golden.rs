//! Compares `e2e/compat` with the commit of version 0.1.0, so that a message and its golden frame
//! cannot change together.

use std::process::Command;

use crate::paths;
use crate::versions::FIRST;

const FOLDER: &str = "e2e/compat";

/// The only file that grows: each new message has a line.
const FRAMES: &str = "frames.txt";

/// Returns what differs by the lines of `git diff --numstat`: the added lines, the removed ones and
/// the file.
fn changes(numstat: &str, at_first: &str) -> Vec<String> {
    let was_there = |file: &str| at_first.lines().any(|line| line == file);
    let is_change = |line: &&str| {
        let words: Vec<&str> = line.split('\t').collect();
        let [added, removed, file] = words[..] else {
            return true;
        };
        removed != "0" || (added != "0" && !file.ends_with(FRAMES) && was_there(file))
    };
    let lines = numstat.lines().filter(is_change);
    lines.map(str::to_owned).collect()
}

/// Fails if a line or a file of version 0.1.0 is not there as it was.
///
/// # Errors
/// Names each changed file, or what git could not do.
pub(super) fn check() -> anyhow::Result<()> {
    let at_first = git(&["ls-tree", "-r", "--name-only", FIRST, FOLDER])?;
    anyhow::ensure!(at_first.contains(FRAMES), "commit {FIRST} has no {FOLDER}");
    let numstat = git(&["diff", "--no-renames", "--numstat", FIRST, "--", FOLDER])?;
    let changes = changes(&numstat, &at_first);
    anyhow::ensure!(
        changes.is_empty(),
        "golden files of 0.1.0 have changed (added, removed, file); give the message a new name \
         or number and restore them by `git checkout {FIRST} -- FILE`:\n{}",
        changes.join("\n")
    );
    println!(
        "{} golden files are as in {FIRST}",
        at_first.lines().count()
    );
    Ok(())
}

fn git(arguments: &[&str]) -> anyhow::Result<String> {
    let mut git = Command::new("git");
    let output = git
        .args(arguments)
        .current_dir(paths::repository())
        .output()?;
    anyhow::ensure!(
        output.status.success(),
        "failed to compare with commit {FIRST}: {}; a shallow clone lacks it: git fetch --unshallow",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_frames_and_files_are_no_change() {
        let at_first = "c/0.1.0/frames.txt\nc/0.1.0/state/cdi.json\n";
        let grown = "3\t0\tc/0.1.0/frames.txt\n9\t0\tc/0.1.0/state/new.json\n";
        assert!(changes(grown, at_first).is_empty());
        for changed in [
            "1\t1\tc/0.1.0/frames.txt",
            "0\t1\tc/0.1.0/state/cdi.json",
            "1\t0\tc/0.1.0/state/cdi.json",
            "-\t-\tc/0.1.0/state/cdi.json",
        ] {
            assert_eq!(changes(changed, at_first), [changed]);
        }
    }
}
