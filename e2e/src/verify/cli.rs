//! Checks how users install and complete `kubectl bursar`.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::Value;

use super::named::{self, TestSelection};
use crate::cli_archive::{self, MANIFEST};
use crate::kube;
use crate::progress::Progress;
use crate::tools;
use crate::workspace::{self, Profile};

/// Completes command lines in bash and zsh on a pseudo-terminal, by kubectl's own mechanism and by
/// the scripts of the program.
pub(super) fn completion() -> anyhow::Result<()> {
    let shells = tools::shells()?;
    let toolbox = kube::build(&Progress::start())?;
    let tests = TestSelection::of_ignored(
        &["--test", "cli"],
        [
            "completion::completion_works_in_bash",
            "completion::completion_works_in_zsh",
        ],
    );
    let kubectl = toolbox.program("kubectl");
    let programs = [("BURSAR_SHELLS", shells), ("BURSAR_KUBECTL", kubectl)];
    named::run_with_programs(&tests, &programs)
}

/// Packs the program, and installs it by krew's steps. They are the manifest's entry for the
/// platform, the checksum, the listed files, and a link to the program on the PATH.
pub(super) fn archive() -> anyhow::Result<()> {
    let toolbox = kube::build(&Progress::start())?;
    let binaries = workspace::build(Profile::Dev, false)?;
    let program = binaries.get("kubectl-bursar");
    let program = program.ok_or_else(|| anyhow::anyhow!("the workspace has no kubectl-bursar"))?;
    let folder = tempfile::tempdir()?;
    let (release, store) = (folder.path().join("release"), folder.path().join("store"));
    cli_archive::write(
        program,
        &cli_archive::default_target(),
        cli_archive::VERSION,
        &release,
    )?;
    let manifest = fs::read_to_string(release.join(MANIFEST))?;
    let manifest: Value = serde_yaml_ng::from_str(&manifest)?;
    let spec = &manifest["spec"];
    let short = spec["shortDescription"].as_str().unwrap_or_default();
    anyhow::ensure!(
        manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
            && manifest["metadata"]["name"] == "bursar"
            && (1..=50).contains(&short.len()),
        "krew refuses this manifest: {manifest}"
    );
    let entry = &spec["platforms"][0];
    let uri = entry["uri"].as_str().unwrap_or_default();
    let path = release.join(uri.rsplit('/').next().unwrap_or_default());
    let sum = cli_archive::checksum(&path)?;
    anyhow::ensure!(
        entry["sha256"] == sum.as_str(),
        "{sum} is the checksum, not {entry}"
    );
    tar::Archive::new(flate2::read::GzDecoder::new(File::open(&path)?)).unpack(&store)?;
    for file in entry["files"].as_array().into_iter().flatten() {
        let from = store.join(file["from"].as_str().unwrap_or_default());
        anyhow::ensure!(from.is_file(), "the archive has no {}", from.display());
    }
    let bin = folder.path().join("bin");
    fs::create_dir(&bin)?;
    let installed = store.join(entry["bin"].as_str().unwrap_or_default());
    symlink(installed, bin.join("kubectl-bursar"))?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path)))?;
    let output = Command::new(toolbox.program("kubectl"))
        .args(["bursar", "version", "--client"])
        .env("PATH", path)
        .output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let version = format!("kubectl bursar   {}\n", env!("CARGO_PKG_VERSION"));
    anyhow::ensure!(
        output.status.success() && stdout == version,
        "kubectl bursar version --client: {output:?}"
    );
    print!("{stdout}");
    Ok(())
}
