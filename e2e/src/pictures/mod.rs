//! Writes the pictures of README and benchmarks, with the measured figures of
//! `docs/benchmarks.md` and the recorded output of `kubectl bursar`.

mod drawings;
mod figures;
mod svg;

use std::path::{Path, PathBuf};
use std::{fs, io};

use self::figures::{FigureError, Page};
use crate::paths;

/// The error of pictures that could not be drawn, written, or are not current.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// The benchmarks' page lacks a figure.
    #[error(transparent)]
    Figure(#[from] FigureError),
    /// A file could not be read or written.
    #[error("failed to access {path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A picture differs from what its sources give now.
    #[error("{path} is not current; `cargo e2e pictures` writes it", path = path.display())]
    Stale {
        /// The picture.
        path: PathBuf,
    },
}

fn read(path: &Path) -> Result<String, PictureError> {
    fs::read_to_string(path).map_err(|source| PictureError::File {
        path: path.to_owned(),
        source,
    })
}

/// Draws every picture, and returns it with its path.
fn draw() -> Result<Vec<(PathBuf, String)>, PictureError> {
    let docs = paths::repository().join("docs");
    let benchmarks = read(&docs.join("benchmarks.md"))?;
    let page = Page(&benchmarks);
    let folder = docs.join("pictures");
    // The output of kubectl bursar over recorded objects, which its own tests compare.
    let golden = paths::repository().join("operator/cli/tests/golden");
    let commands = [
        ("kubectl bursar top", read(&golden.join("top.txt"))?),
        (
            "kubectl bursar explain pod big-0 -n ml",
            read(&golden.join("explain-waiting-128.txt"))?,
        ),
    ];
    let pictures = [
        ("before-after.svg", drawings::before_after()),
        ("way-of-a-pod.svg", drawings::way_of_a_pod()),
        ("restart.svg", drawings::restart(&page)?),
        ("overhead.svg", drawings::overhead(&page)?),
        ("serving.svg", drawings::serving(&page)?),
        ("kubectl-bursar.svg", drawings::terminal(&commands)),
    ];
    Ok(pictures
        .map(|(name, text)| (folder.join(name), text))
        .into())
}

/// Writes every picture below `docs/pictures`.
///
/// # Errors
/// Names the missing figure, or the file that could not be read or written.
pub fn write() -> Result<(), PictureError> {
    for (path, text) in draw()? {
        fs::write(&path, text).map_err(|source| PictureError::File { path, source })?;
    }
    Ok(())
}

/// Fails if a picture differs from what its sources give.
///
/// # Errors
/// [`PictureError::Stale`] with the first such picture, or as [`write`].
pub(crate) fn check() -> Result<(), PictureError> {
    for (path, text) in draw()? {
        if read(&path)? != text {
            return Err(PictureError::Stale { path });
        }
    }
    Ok(())
}
