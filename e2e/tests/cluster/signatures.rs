//! Checks a signed release with `cosign`, as its users do.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use bursar_e2e::images;
use bursar_e2e::kube;
use bursar_e2e::progress::Progress;
use bursar_e2e::workspace::{self, Profile};
use libtest_mimic::Failed;

use crate::registry::Registry;

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "-trial.1");

/// `cosign` with the public key of a release.
struct Verifier<'a> {
    cosign: &'a Path,
    keys: &'a Path,
}

impl Verifier<'_> {
    fn run(&self, command: &str, arguments: &[&str]) -> Result<Output, Failed> {
        let output = Command::new(self.cosign)
            .current_dir(self.keys)
            .args([command, "--key", "cosign.pub", "--insecure-ignore-tlog"])
            .args(arguments)
            .output()?;
        Ok(output)
    }

    fn accepts(&self, command: &str, arguments: &[&str]) -> Result<String, Failed> {
        let output = self.run(command, arguments)?;
        assert!(
            output.status.success(),
            "{command} {arguments:?}: {output:?}"
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    fn refuses(&self, command: &str, arguments: &[&str]) -> Result<(), Failed> {
        let output = self.run(command, arguments)?;
        assert!(
            !output.status.success(),
            "{command} {arguments:?}: {output:?}"
        );
        Ok(())
    }
}

/// Makes a pair of keys without a password, and returns the private one.
fn generate_keys(cosign: &Path, folder: &Path) -> Result<String, Failed> {
    fs::create_dir_all(folder)?;
    let output = Command::new(cosign)
        .arg("generate-key-pair")
        .current_dir(folder)
        .env("COSIGN_PASSWORD", "")
        .output()?;
    assert!(output.status.success(), "{output:?}");
    Ok(folder.join("cosign.key").display().to_string())
}

/// Signs a release into a registry. Verifies each signature and attestation by the public key, and
/// that another key and a changed file are refused.
pub(crate) async fn verify(progress: &Progress) -> Result<(), Failed> {
    let cosign = kube::build_cosign(progress)?.program("cosign");
    let folder = tempfile::tempdir()?;
    let (keys, other) = (folder.path().join("keys"), folder.path().join("other"));
    let key = generate_keys(&cosign, &keys)?;
    generate_keys(&cosign, &other)?;

    let programs = workspace::build(Profile::Dev, false)?;
    let registry = Registry::start().await?;
    let address = registry.address();
    let release = folder.path().join("release");
    let released = registry.release(&programs, VERSION, release, Some(key), progress)?;

    let verifier = Verifier {
        cosign: &cosign,
        keys: &keys,
    };
    let stranger = Verifier {
        keys: &other,
        ..verifier
    };
    for (name, image) in &released.images {
        verifier.accepts("verify", &[image])?;
        stranger.refuses("verify", &[image])?;
        let (_, manifests) = images::read_index(&released.folder.join("oci").join(name))?;
        for manifest in manifests {
            let digest = manifest["digest"].as_str().ok_or("no digest")?;
            let reference = format!("{address}/{name}@{digest}");
            for kind in ["cyclonedx", "slsaprovenance1"] {
                let output =
                    verifier.accepts("verify-attestation", &["--type", kind, &reference])?;
                assert!(
                    output.contains("payload"),
                    "{kind} of {reference}: {output}"
                );
                stranger.refuses("verify-attestation", &["--type", kind, &reference])?;
            }
        }
    }
    verifier.accepts("verify", &[&format!("{address}/charts/bursar:{VERSION}")])?;

    let sums = released.folder.join("SHA256SUMS").display().to_string();
    let bundle = ["--bundle".to_owned(), format!("{sums}.sigstore.json"), sums];
    let bundle = bundle.each_ref().map(String::as_str);
    verifier.accepts("verify-blob", &bundle)?;
    stranger.refuses("verify-blob", &bundle)?;
    fs::write(released.folder.join("SHA256SUMS"), "changed")?;
    verifier.refuses("verify-blob", &bundle)
}
