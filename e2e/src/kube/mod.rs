//! Kubernetes and what it stands on, built from the Go modules pinned in `e2e/kube`.

mod build;
mod packages;
mod parts;
mod toolbox;

pub use build::{BuildError, build};
pub use packages::PackageError;
pub use toolbox::Toolbox;
