//! Builds Kubernetes, containerd, runc, CNI, helm, crane and cosign from the Go modules in
//! `e2e/kube`.

mod build;
mod packages;
mod parts;
mod toolbox;
mod version;

use crate::progress::Progress;

pub use build::{BuildError, build, build_cosign, build_crane};
pub use packages::PackageError;
pub use toolbox::Toolbox;
pub use version::{KUBERNETES_VARIABLE, KUBERNETES_VERSIONS, KubernetesVersion, UnknownVersion};

/// Returns the programs that a node needs, each with its links. Archives lack helm, because their
/// charts are rendered.
pub(crate) fn archived_programs() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    let kubernetes = parts::kubernetes(KUBERNETES_VERSIONS[0]);
    let others = parts::PARTS.iter().copied();
    let parts = std::iter::once(kubernetes).chain(others.filter(|part| part.name != "helm"));
    parts.flat_map(|part| {
        let names = move |number| if number == 0 { part.links } else { &[] };
        part.programs
            .iter()
            .enumerate()
            .map(move |(number, program)| (*program, names(number)))
    })
}

/// Installs the missing C compilers of the loader's tests.
pub(crate) fn require_compilers(progress: &Progress) -> Result<(), PackageError> {
    use packages::Package;
    packages::require(
        &[Package::GCC, Package::GCC_MULTILIB, Package::MUSL],
        progress,
    )
}

/// Installs `xz` if it is missing.
pub(crate) fn require_xz(progress: &Progress) -> Result<(), PackageError> {
    packages::require(&[packages::Package::XZ], progress)
}
