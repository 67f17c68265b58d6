//! Asks git for the tree that is checked.

use std::process::Command;

use crate::paths;

/// Returns the hash of the committed tree; `None` outside of a git repository.
pub(super) fn hash() -> Option<String> {
    git(&["rev-parse", "HEAD^{tree}"])
}

/// Returns whether the working tree is the committed one.
pub(super) fn is_committed() -> bool {
    git(&["status", "--porcelain"]).is_some_and(|changes| changes.is_empty())
}

fn git(arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    git.args(arguments).current_dir(paths::repository());
    let output = git.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
