//! Pushes layouts to a registry with `crane`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The error of a push.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// `crane` could not be started.
    #[error("failed to push {reference}: {program}: {source}")]
    Start {
        /// The reference.
        reference: String,
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The registry refused.
    #[error("failed to push {reference}: {stderr}; `crane auth login` stores credentials")]
    Refused {
        /// The reference.
        reference: String,
        /// The output of `crane`.
        stderr: String,
    },
    /// The registry has another content under this reference.
    #[error("failed to push {reference}: the registry has {found}, and not {expected}")]
    OtherDigest {
        /// The reference.
        reference: String,
        /// The registry's report.
        found: String,
        /// The digest of the layout.
        expected: String,
    },
}

/// Pushes the one entry of a layout, and checks the digest that the registry has then. `crane`
/// reads credentials from Docker's configuration, and uses plain http for loopback addresses.
///
/// # Errors
/// When `crane` or the registry fails, or the registry reports another digest.
pub(super) fn push(
    crane: &Path,
    layout: &Path,
    reference: &str,
    digest: &str,
) -> Result<(), PushError> {
    let crane = |arguments: &[&str]| -> Result<String, PushError> {
        let output = Command::new(crane)
            .args(arguments)
            .output()
            .map_err(|source| PushError::Start {
                reference: reference.to_owned(),
                program: crane.to_path_buf(),
                source,
            })?;
        if !output.status.success() {
            return Err(PushError::Refused {
                reference: reference.to_owned(),
                stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            });
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    crane(&["push", &layout.display().to_string(), reference])?;
    let found = crane(&["digest", reference])?;
    if found == digest {
        return Ok(());
    }
    Err(PushError::OtherDigest {
        reference: reference.to_owned(),
        found,
        expected: digest.to_owned(),
    })
}
