//! A cluster to run scenarios on: one of our own on this machine, or the user's by `KUBECONFIG`.

mod certs;
mod components;
mod control;
mod local;
mod run_folder;

pub use local::{Local, LocalError, Options, down};
pub use run_folder::{RunFolder, RunFolderError};
