//! Lists the shared libraries of a program by asking its own loader.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why a program's libraries could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum ClosureError {
    /// `ldd` could not be run.
    #[error("ldd {program}: {source}")]
    Ldd {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The loader does not find a library on this machine.
    #[error("{program} needs {library}, which is not on this machine")]
    Missing {
        /// The program.
        program: PathBuf,
        /// The library's name.
        library: String,
    },
}

/// Returns the libraries of `program` by name with their paths on this machine, its loader
/// included.
///
/// # Errors
/// When `ldd` (glibc) fails or does not find a library.
pub(crate) fn libraries(program: &Path) -> Result<BTreeMap<String, PathBuf>, ClosureError> {
    let output = Command::new("ldd")
        .arg(program)
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("LD_PRELOAD")
        .output()
        .map_err(|source| ClosureError::Ldd {
            program: program.to_path_buf(),
            source,
        })?;
    parse(&String::from_utf8_lossy(&output.stdout)).map_err(|library| ClosureError::Missing {
        program: program.to_path_buf(),
        library,
    })
}

/// Parses `ldd`'s lines `name => path (address)` and `path (address)`; the error is the name of a
/// missing library.
fn parse(text: &str) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let (name, path) = match line.trim().split_once(" => ") {
            Some((name, rest)) if rest.starts_with("not found") => return Err(name.to_owned()),
            Some((name, rest)) => (name, rest.split(' ').next().unwrap_or_default()),
            None => {
                let path = line.trim().split(' ').next().unwrap_or_default();
                (path.rsplit('/').next().unwrap_or_default(), path)
            }
        };
        // The vdso (linux-vdso.so.1) has no file.
        if path.starts_with('/') {
            found.insert(name.to_owned(), PathBuf::from(path));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_lists_libraries_and_loader_but_not_the_vdso() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found = parse(text).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(
            found["libc.so.6"],
            Path::new("/lib/x86_64-linux-gnu/libc.so.6")
        );
        assert_eq!(
            found["ld-linux-x86-64.so.2"],
            Path::new("/lib64/ld-linux-x86-64.so.2")
        );
    }

    #[test]
    fn parse_names_a_missing_library() {
        assert_eq!(
            parse("\tlibx.so.1 => not found\n").unwrap_err(),
            "libx.so.1"
        );
    }
}
