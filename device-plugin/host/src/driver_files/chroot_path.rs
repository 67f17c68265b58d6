//! Resolves symbolic links as if a directory were the root of the file system.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};

/// The number of links before a path counts as a loop, as in the kernel (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Resolves `path` below `root` and returns the result relative to `root`.
///
/// Returns `None` for a missing file and for anything but a regular file. `..` never leaves the
/// root.
///
/// # Errors
/// The operating system's error, and `TooManyLinks` for a loop.
pub(super) fn resolve(root: &Path, path: &Path) -> io::Result<Option<PathBuf>> {
    let mut resolved = PathBuf::new();
    let mut remaining: VecDeque<OsString> = parts(path).collect();
    let mut links = 0;
    while let Some(part) = remaining.pop_front() {
        if part == ".." {
            resolved.pop();
            continue;
        }
        let candidate = root.join(&resolved).join(&part);
        let kind = match candidate.symlink_metadata() {
            Ok(metadata) => metadata.file_type(),
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        if !kind.is_symlink() {
            resolved.push(part);
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(io::Error::from(io::ErrorKind::TooManyLinks));
        }
        let target = candidate.read_link()?;
        if target.is_absolute() {
            resolved.clear();
        }
        parts(&target)
            .rev()
            .for_each(|part| remaining.push_front(part));
    }
    Ok(root.join(&resolved).is_file().then_some(resolved))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn parts(path: &Path) -> impl DoubleEndedIterator<Item = OsString> + '_ {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}
