//! Names the releases of Kubernetes that the harness builds, and chooses one of them.

use std::fmt;
use std::str::FromStr;

/// The variable that chooses another release than the default, by its minor version.
pub const KUBERNETES_VARIABLE: &str = "BURSAR_KUBERNETES";

/// A release of Kubernetes with a folder of pins below `e2e/kube`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KubernetesVersion {
    minor: u32,
    patch: u32,
    folder: &'static str,
    check: &'static str,
}

/// The releases, the default first. A test compares them with the pins.
pub const KUBERNETES_VERSIONS: &[KubernetesVersion] = &[
    KubernetesVersion {
        minor: 36,
        patch: 3,
        folder: "kubernetes",
        check: "main/kubernetes",
    },
    KubernetesVersion {
        minor: 34,
        patch: 4,
        folder: "kubernetes-1.34",
        check: "main/kubernetes-1.34",
    },
    KubernetesVersion {
        minor: 35,
        patch: 4,
        folder: "kubernetes-1.35",
        check: "main/kubernetes-1.35",
    },
    KubernetesVersion {
        minor: 37,
        patch: 2,
        folder: "kubernetes-1.37",
        check: "main/kubernetes-1.37",
    },
];

/// The repository has no pins of the release.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("failed to choose Kubernetes {asked}: e2e/kube has no pins of it; write one of {known}")]
pub struct UnknownVersion {
    asked: String,
    known: String,
}

impl KubernetesVersion {
    /// The release that `BURSAR_KUBERNETES` names, or the default.
    ///
    /// # Errors
    /// When the repository has no pins of it.
    pub fn chosen() -> Result<Self, UnknownVersion> {
        match std::env::var(KUBERNETES_VARIABLE) {
            Ok(text) => text.parse(),
            Err(_) => Ok(KUBERNETES_VERSIONS[0]),
        }
    }

    /// The number after `1.`.
    pub fn minor(self) -> u32 {
        self.minor
    }

    pub(crate) fn folder(self) -> &'static str {
        self.folder
    }

    /// The name of the check that runs the cluster's trials on a release other than the default.
    pub(crate) fn check(self) -> &'static str {
        self.check
    }
}

impl fmt::Display for KubernetesVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}.{}", self.minor, self.patch)
    }
}

impl FromStr for KubernetesVersion {
    type Err = UnknownVersion;

    /// Takes `1.34` or `1.34.4`.
    fn from_str(text: &str) -> Result<Self, UnknownVersion> {
        let is_named =
            |version: &&Self| text == version.to_string() || text == format!("1.{}", version.minor);
        let found = KUBERNETES_VERSIONS.iter().find(is_named);
        found.copied().ok_or_else(|| {
            let known = KUBERNETES_VERSIONS.iter().map(ToString::to_string);
            UnknownVersion {
                asked: text.to_owned(),
                known: known.collect::<Vec<_>>().join(", "),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::paths;

    #[test]
    fn releases_equal_the_pinned_ones() {
        for version in KUBERNETES_VERSIONS {
            let folder = paths::repository().join("e2e/kube").join(version.folder());
            let pins = fs::read_to_string(folder.join("go.mod")).unwrap();
            assert!(
                pins.contains(&format!("k8s.io/kubernetes v{version}\n")),
                "{version}"
            );
        }
    }

    #[test]
    fn release_is_named_with_or_without_its_patch() {
        let named = |text: &str| {
            text.parse::<KubernetesVersion>()
                .map(|version| version.to_string())
        };
        assert_eq!(named("1.34"), named("1.34.4"));
        assert_eq!(named("1.36").as_deref(), Ok("1.36.3"));
        for text in ["1.33", "1.34.0", "34", "", "1.3"] {
            assert!(named(text).is_err(), "{text}");
        }
    }
}
