//! Hides files from a process, whatever user and capabilities it has (Landlock, Linux 5.13).
//!
//! Landlock's rules permit and never deny. So the rules permit every entry beside the hidden
//! folders. An entry that is created beside them later is hidden too.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    AccessFs, CompatLevel, Compatible as _, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetError,
};

/// Whether the kernel can hide files.
pub(crate) fn is_supported() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = ruleset.handle_access(AccessFs::ReadFile);
    ruleset.and_then(Ruleset::create).is_ok()
}

/// Denies this thread, and all threads and processes that it starts, to open the files below
/// `folders` for reading, except those below `visible`. Processes without these limits are out of
/// its reach: it traces none, and reads no `/proc/<pid>/root` of one.
pub(crate) fn hide_below(folders: &[&Path], visible: &Path) -> Result<(), RulesetError> {
    // A folder that does not exist has no files.
    let hidden: Vec<PathBuf> = folders.iter().flat_map(fs::canonicalize).collect();
    let mut permitted = vec![visible.to_owned()];
    // An entry that cannot be listed is not permitted.
    let _ = add_entries_beside(&hidden, Path::new("/"), &mut permitted);
    let rules = permitted
        .iter()
        .flat_map(PathFd::new)
        .map(|entry| Ok::<_, RulesetError>(PathBeneath::new(entry, AccessFs::ReadFile)));
    Ruleset::default()
        .handle_access(AccessFs::ReadFile)?
        .create()?
        .add_rules(rules)?
        .restrict_self()?;
    Ok(())
}

/// Adds the entries of `folder` that are not hidden. Of an entry above a hidden folder it adds the
/// entries.
fn add_entries_beside(
    hidden: &[PathBuf],
    folder: &Path,
    entries: &mut Vec<PathBuf>,
) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        let path = entry.path();
        // Another process may remove an entry meanwhile, which then has no type.
        let is_link = entry.file_type().map_or(true, |kind| kind.is_symlink());
        if is_link || hidden.contains(&path) {
            // A rule for a link would permit its target, which has rules of its own.
        } else if hidden.iter().any(|hidden| hidden.starts_with(&path)) {
            let _ = add_entries_beside(hidden, &path, entries);
        } else {
            entries.push(path);
        }
    }
    Ok(())
}
