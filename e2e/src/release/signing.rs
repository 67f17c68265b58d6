//! Signs a release with `cosign`: its checksums, its images and the chart, and attests what each
//! image contains and how it was built.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cache::CacheError;
use crate::kube::{self, BuildError};
use crate::progress::Progress;

/// The arguments of each signature: by a key, and without a public log, which a registry inside a
/// company cannot use.
const BY_KEY_ALONE: &[&str] = &["--yes", "--use-signing-config=false", "--tlog-upload=false"];

/// The variable with the key's password.
const PASSWORD: &str = "COSIGN_PASSWORD";

/// The error of a signature.
#[derive(Debug, thiserror::Error)]
pub enum SigningError {
    /// `cosign` could not be started.
    #[error("failed to sign {object}: {program}: {source}")]
    Start {
        /// The file or the reference.
        object: String,
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// `cosign` or the registry refused.
    #[error(
        "failed to sign {object}: {stderr}; `cosign generate-key-pair` makes a key, and \
         COSIGN_PASSWORD has its password"
    )]
    Refused {
        /// The file or the reference.
        object: String,
        /// The output of `cosign`.
        stderr: String,
    },
}

/// A statement about an image.
#[derive(Debug, Clone, Copy)]
pub(super) enum Predicate {
    /// The bill of materials.
    CycloneDx,
    /// How the image was built (SLSA 1.0).
    Provenance,
}

/// Signs with one key.
#[derive(Debug)]
pub(super) struct Signer<'a> {
    cosign: PathBuf,
    key: &'a str,
}

impl<'a> Signer<'a> {
    /// Builds `cosign`, unless the cache has it. `key` is a file, or `env://NAME`.
    pub(super) fn new(key: &'a str, progress: &Progress) -> Result<Self, CacheError<BuildError>> {
        let cosign = kube::build_cosign(progress)?.program("cosign");
        Ok(Self { cosign, key })
    }

    /// Writes a bundle with the signature of a file beside it.
    pub(super) fn sign_file(&self, path: &Path) -> Result<(), SigningError> {
        let object = path.display().to_string();
        let bundle = format!("--bundle={object}.sigstore.json");
        self.run("sign-blob", &[&bundle, &object], &object)
    }

    /// Signs the content of a reference, with the images of all architectures.
    pub(super) fn sign(&self, reference: &str) -> Result<(), SigningError> {
        self.run("sign", &["--recursive", reference], reference)
    }

    /// Attests a statement about the content of a reference.
    pub(super) fn attest(
        &self,
        reference: &str,
        predicate: Predicate,
        statement: &Path,
    ) -> Result<(), SigningError> {
        let kind = match predicate {
            Predicate::CycloneDx => "--type=cyclonedx",
            Predicate::Provenance => "--type=slsaprovenance1",
        };
        let statement = format!("--predicate={}", statement.display());
        self.run("attest", &[kind, &statement, reference], reference)
    }

    fn run(&self, command: &str, arguments: &[&str], object: &str) -> Result<(), SigningError> {
        let output = Command::new(&self.cosign)
            .arg(command)
            .args(["--key", self.key])
            .args(BY_KEY_ALONE)
            .args(arguments)
            // Without the variable cosign asks a terminal, also for a key without a password.
            .env(PASSWORD, std::env::var_os(PASSWORD).unwrap_or_default())
            .stdin(Stdio::null())
            .output()
            .map_err(|source| SigningError::Start {
                object: object.to_owned(),
                program: self.cosign.clone(),
                source,
            })?;
        if output.status.success() {
            return Ok(());
        }
        Err(SigningError::Refused {
            object: object.to_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }
}
