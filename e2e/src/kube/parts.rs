//! Lists the Go parts: the module, flags and programs of each.

use std::fs;
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::packages::Package;
use super::version::KubernetesVersion;

/// One folder of `e2e/kube`, which one `go build` compiles.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// Its folder below `e2e/kube`.
    pub(crate) name: &'static str,
    /// The argument of `go build`: `.` or the module's `tool` lines.
    target: &'static str,
    /// Whether C code is linked in.
    pub(crate) cgo: bool,
    tags: &'static str,
    /// The programs of the part.
    pub(crate) programs: &'static [&'static str],
    /// Links to the first program, which chooses its function by the name of its call.
    pub(crate) links: &'static [&'static str],
    /// The Debian packages that the build needs.
    pub(crate) packages: &'static [Package],
    /// The release of Kubernetes that its programs report, if they are Kubernetes.
    version: Option<KubernetesVersion>,
}

/// Kubernetes itself, the slowest part.
pub(crate) fn kubernetes(version: KubernetesVersion) -> Part {
    Part {
        name: version.folder(),
        target: ".",
        cgo: false,
        tags: "",
        programs: &["kubernetes"],
        links: &[
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kubectl",
        ],
        packages: &[],
        version: Some(version),
    }
}

/// Every other part.
pub(crate) const PARTS: &[Part] = &[
    Part {
        name: "containerd",
        target: "tool",
        cgo: false,
        tags: "no_btrfs no_zfs no_devmapper",
        programs: &["containerd", "containerd-shim-runc-v2", "ctr"],
        links: &[],
        packages: &[],
        version: None,
    },
    Part {
        name: "runc",
        target: "tool",
        cgo: true,
        // Without seccomp every unprivileged sandbox fails to start.
        tags: "seccomp netgo osusergo",
        programs: &["runc"],
        links: &[],
        packages: &[Package::GCC, Package::SECCOMP],
        version: None,
    },
    Part {
        name: "cni",
        target: "tool",
        cgo: false,
        tags: "",
        programs: &["bridge", "host-local", "loopback"],
        links: &[],
        packages: &[],
        version: None,
    },
    Part {
        name: "helm",
        target: "tool",
        cgo: false,
        tags: "",
        programs: &["helm"],
        links: &[],
        packages: &[],
        version: None,
    },
];

/// The client of registries, which only a release needs.
pub(crate) const CRANE: Part = Part {
    name: "crane",
    target: "tool",
    cgo: false,
    tags: "",
    programs: &["crane"],
    links: &[],
    packages: &[],
    version: None,
};

/// The signer of releases with a key.
pub(crate) const COSIGN: Part = Part {
    name: "cosign",
    programs: &["cosign"],
    ..CRANE
};

impl Part {
    /// Returns the arguments of `go` that build this part into `out`.
    pub(crate) fn arguments(&self, out: &Path) -> Vec<String> {
        let mut arguments = vec!["build".to_owned(), "-trimpath".to_owned()];
        if !self.tags.is_empty() {
            arguments.extend(["-tags".to_owned(), self.tags.to_owned()]);
        }
        arguments.extend(["-ldflags".to_owned(), self.linker_flags()]);
        let out = if self.target == "." {
            out.join(self.programs[0]).display().to_string()
        } else {
            format!("{}/", out.display())
        };
        arguments.extend(["-o".to_owned(), out, self.target.to_owned()]);
        arguments
    }

    fn linker_flags(&self) -> String {
        let mut flags = "-s -w".to_owned();
        if self.cgo {
            flags.push_str(" -extldflags -static");
        }
        if let Some(version) = self.version {
            let minor = version.minor();
            let package = "k8s.io/component-base/version";
            flags.push_str(&format!(
                " -X {package}.gitVersion=v{version} -X {package}.gitMajor=1 -X {package}.gitMinor={minor}"
            ));
        }
        flags
    }

    /// Returns the key of the part's build in the cache, a hash of sources, flags and compiler.
    ///
    /// # Errors
    /// When a pinned file cannot be read.
    pub(crate) fn key(&self, sources: &Path, go_version: &str) -> io::Result<String> {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        for file in ["go.mod", "go.sum", "main.go"] {
            match fs::read(sources.join(file)) {
                Ok(bytes) => part(&bytes),
                Err(error) if error.kind() == io::ErrorKind::NotFound && file == "main.go" => {
                    part(&[])
                }
                Err(error) => return Err(error),
            }
        }
        part(self.arguments(Path::new("out")).join("\0").as_bytes());
        part(go_version.as_bytes());
        let digest: String = hash
            .finalize()
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Ok(format!("{}-{digest}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::KUBERNETES_VERSIONS;

    #[test]
    fn cache_key_changes_with_the_pinned_version() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("go.mod"), "one").unwrap();
        fs::write(folder.path().join("go.sum"), "").unwrap();
        let part = kubernetes(KUBERNETES_VERSIONS[0]);
        let before = part.key(folder.path(), "go1").unwrap();
        assert_eq!(before, part.key(folder.path(), "go1").unwrap());
        assert_ne!(before, part.key(folder.path(), "go2").unwrap());
        fs::write(folder.path().join("go.mod"), "two").unwrap();
        assert_ne!(before, part.key(folder.path(), "go1").unwrap());
    }
}
