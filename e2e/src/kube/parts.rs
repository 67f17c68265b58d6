//! Lists the Go parts: the module, flags and programs of each.

use std::fs;
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::packages::Package;

/// The Kubernetes release of `e2e/kube/kubernetes/go.mod`; a test compares both.
pub(crate) const KUBERNETES_VERSION: &str = "1.36.3";

/// One folder of `e2e/kube`, which one `go build` compiles.
#[derive(Debug)]
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
}

/// Every part, the slowest first.
pub(crate) const PARTS: &[Part] = &[
    Part {
        name: "kubernetes",
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
    },
    Part {
        name: "containerd",
        target: "tool",
        cgo: false,
        tags: "no_btrfs no_zfs no_devmapper",
        programs: &["containerd", "containerd-shim-runc-v2", "ctr"],
        links: &[],
        packages: &[],
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
    },
    Part {
        name: "cni",
        target: "tool",
        cgo: false,
        tags: "",
        programs: &["bridge", "host-local", "loopback"],
        links: &[],
        packages: &[],
    },
    Part {
        name: "helm",
        target: "tool",
        cgo: false,
        tags: "",
        programs: &["helm"],
        links: &[],
        packages: &[],
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
        if self.name == "kubernetes" {
            let version = "k8s.io/component-base/version";
            let mut numbers = KUBERNETES_VERSION.split('.');
            let (major, minor) = (numbers.next().unwrap_or(""), numbers.next().unwrap_or(""));
            flags.push_str(&format!(
                " -X {version}.gitVersion=v{KUBERNETES_VERSION} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
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
    use crate::paths;

    #[test]
    fn stamped_version_equals_the_pinned_version() {
        let pins =
            fs::read_to_string(paths::repository().join("e2e/kube/kubernetes/go.mod")).unwrap();
        assert!(pins.contains(&format!("k8s.io/kubernetes v{KUBERNETES_VERSION}\n")));
    }

    #[test]
    fn cache_key_changes_with_the_pinned_version() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("go.mod"), "one").unwrap();
        fs::write(folder.path().join("go.sum"), "").unwrap();
        let before = PARTS[0].key(folder.path(), "go1").unwrap();
        assert_eq!(before, PARTS[0].key(folder.path(), "go1").unwrap());
        assert_ne!(before, PARTS[0].key(folder.path(), "go2").unwrap());
        fs::write(folder.path().join("go.mod"), "two").unwrap();
        assert_ne!(before, PARTS[0].key(folder.path(), "go1").unwrap());
    }
}
