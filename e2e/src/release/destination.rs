//! Parses the version of a release and the places that it goes to.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

/// The version of this workspace, which every crate has.
const WORKSPACE: &str = env!("CARGO_PKG_VERSION");

/// A version of a release: that of the workspace, or a pre-release of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(String);

/// The version cannot be released from this source.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum VersionError {
    /// The version is not one that a tag of an image can hold.
    #[error(
        "failed to read the version {0}: it is not of the form 1.2.3 or 1.2.3-rc.1; write it without v and +"
    )]
    Form(String),
    /// The programs would report another version.
    #[error(
        "failed to release {asked}: the version in Cargo.toml is {WORKSPACE}; change it there first"
    )]
    Other {
        /// The version of the release.
        asked: String,
    },
}

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        let (core, pre) = text.split_once('-').unwrap_or((text, "0"));
        let numbers: Vec<&str> = core.split('.').collect();
        let is_number = |part: &&str| {
            !part.is_empty() && part.len() < 10 && part.bytes().all(|byte| byte.is_ascii_digit())
        };
        let fits = |part: &str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            !part.is_empty() && part.bytes().all(plain)
        };
        let valid = numbers.len() == 3
            && numbers.iter().all(is_number)
            && text.len() < 64
            && pre.split('.').all(fits);
        if !valid {
            return Err(VersionError::Form(text.to_owned()));
        }
        if core != WORKSPACE {
            return Err(VersionError::Other {
                asked: text.to_owned(),
            });
        }
        Ok(Self(text.to_owned()))
    }
}

impl Version {
    /// The version as tags and files have it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A place that a release is written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A registry with the path of the repositories below it, such as `registry.example/bursar`.
    Registry(String),
    /// A folder, for another machine to publish.
    Folder(PathBuf),
}

impl FromStr for Destination {
    type Err = Infallible;

    /// Takes a text for a registry if its first component is a host. A host has a dot or a port, or
    /// is `localhost`, as in references of images.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let host = text.split('/').next().unwrap_or_default();
        let is_host = !host.starts_with('.') && (host.contains(['.', ':']) || host == "localhost");
        Ok(if is_host {
            Self::Registry(text.trim_end_matches('/').to_owned())
        } else {
            Self::Folder(PathBuf::from(text))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_that_of_the_workspace_or_a_pre_release() {
        assert_eq!(WORKSPACE.parse::<Version>().unwrap().as_str(), WORKSPACE);
        assert!(format!("{WORKSPACE}-rc.1").parse::<Version>().is_ok());
        assert_eq!(
            "99.0.0".parse::<Version>(),
            Err(VersionError::Other {
                asked: "99.0.0".to_owned()
            })
        );
        for wrong in [
            "",
            "v1.2.3",
            "1.2",
            "1.2.3+build",
            "1.2.3-",
            "1.2.3-a..b",
            "1.2.3-/",
        ] {
            let read = wrong.parse::<Version>();
            assert!(matches!(read, Err(VersionError::Form(_))), "{wrong}");
        }
    }

    #[test]
    fn destination_is_a_registry_if_it_begins_with_a_host() {
        let of = |text: &str| text.parse::<Destination>().unwrap();
        for registry in [
            "registry.example/bursar",
            "127.0.0.1:5000/bursar",
            "localhost/bursar",
        ] {
            assert_eq!(of(registry), Destination::Registry(registry.to_owned()));
        }
        for folder in ["dist", "./dist", "../dist", "/tmp/a.b", "dist/a.b"] {
            assert_eq!(of(folder), Destination::Folder(folder.into()));
        }
    }
}
