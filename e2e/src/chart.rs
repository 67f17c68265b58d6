//! Puts the Helm chart on a cluster, with helm or as manifests that were rendered before.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::sim;

/// The namespace of the operator and the agent.
pub const NAMESPACE: &str = "bursar-system";
/// The release's name.
pub const RELEASE: &str = "bursar";

/// The chart in one of its forms.
#[derive(Debug, Clone)]
pub enum Chart {
    /// A folder for helm.
    Helm {
        /// The helm program.
        helm: PathBuf,
        /// The chart's folder.
        folder: PathBuf,
    },
    /// Rendered manifests for kubectl.
    Rendered {
        /// The kubectl program.
        kubectl: PathBuf,
        /// The file.
        manifests: PathBuf,
    },
}

/// Why the chart is not on the cluster.
#[derive(Debug, thiserror::Error)]
pub enum ChartError {
    /// The program could not be run.
    #[error("{program}: {source}")]
    Run {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It failed.
    #[error("{program} failed ({status}): {said}")]
    Failed {
        /// The program.
        program: PathBuf,
        /// How it ended.
        status: String,
        /// What it said.
        said: String,
    },
}

/// An image reference as the chart's values have it: repository and tag.
fn image(reference: &str) -> Value {
    let (repository, tag) = reference.rsplit_once(':').unwrap_or((reference, ""));
    json!({"repository": repository, "tag": tag})
}

/// The values for our images, on nodes with simulated GPUs or with a real driver.
pub fn values(agent: &str, operator: &str, simulated: bool) -> Value {
    let mut values = json!({
        "agent": {"image": image(agent)},
        "operator": {"image": image(operator)},
    });
    if simulated {
        let folder = sim::FOLDER;
        values["driver"] = json!({
            "root": format!("{folder}/driver"),
            "devRoot": format!("{folder}/dev"),
            "extraMounts": [{"hostPath": folder, "containerPath": folder, "readOnly": false}],
        });
        // The agent's own process opens the simulated driver as well, and sees every GPU.
        values["agent"]["extraEnv"] =
            json!([{"name": "SIMGPU_DEV", "value": format!("{folder}/dev")}]);
        values["agent"]["extraVolumes"] =
            json!([{"name": "simgpu", "hostPath": {"path": folder, "type": "Directory"}}]);
        values["agent"]["extraVolumeMounts"] = json!([{"name": "simgpu", "mountPath": folder}]);
    }
    values
}

impl Chart {
    /// Installs or upgrades the chart on the cluster of `kubeconfig`. `values` were given when the
    /// manifests were rendered, if they were.
    ///
    /// # Errors
    /// When helm or kubectl fails; with what it said.
    pub async fn install(&self, kubeconfig: &Path, values: &Value) -> Result<(), ChartError> {
        let values = format!("--set-json={}", set_json(values));
        match self {
            Self::Helm { helm, folder } => {
                let folder = folder.display().to_string();
                let arguments = [
                    "upgrade",
                    "--install",
                    RELEASE,
                    &folder,
                    "--namespace",
                    NAMESPACE,
                    "--create-namespace",
                    &values,
                ];
                run(helm, &arguments, kubeconfig).await.map(drop)
            }
            Self::Rendered { kubectl, manifests } => {
                let file = format!("--filename={}", manifests.display());
                let apply = ["apply", "--server-side", "--force-conflicts", &file];
                run(kubectl, &apply, kubeconfig).await.map(drop)
            }
        }
    }

    /// The manifests that helm would apply, and the namespace that they go to.
    ///
    /// # Errors
    /// When helm fails, or these are manifests already.
    pub async fn render(&self, values: &Value) -> Result<String, ChartError> {
        let Self::Helm { helm, folder } = self else {
            let source = io::Error::other("the chart was rendered before");
            return Err(ChartError::Run {
                program: PathBuf::from("helm"),
                source,
            });
        };
        let values = format!("--set-json={}", set_json(values));
        let folder = folder.display().to_string();
        let arguments = [
            "template",
            RELEASE,
            &folder,
            "--namespace",
            NAMESPACE,
            "--include-crds",
            &values,
        ];
        let rendered = run(helm, &arguments, Path::new("/dev/null")).await?;
        Ok(format!(
            "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n---\n{rendered}"
        ))
    }
}

/// `a={...},b={...}`, as helm's `--set-json` takes top-level keys.
fn set_json(values: &Value) -> String {
    let entries = values.as_object().into_iter().flatten();
    entries
        .map(|(key, value)| format!("{key}={value}"))
        .collect::<Vec<_>>()
        .join(",")
}

async fn run(program: &Path, arguments: &[&str], kubeconfig: &Path) -> Result<String, ChartError> {
    let output = tokio::process::Command::new(program)
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|source| ChartError::Run {
            program: program.to_path_buf(),
            source,
        })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(ChartError::Failed {
        program: program.to_path_buf(),
        status: output.status.to_string(),
        said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_with_a_port_keeps_it() {
        assert_eq!(
            image("host:5000/a/b:c"),
            json!({"repository": "host:5000/a/b", "tag": "c"})
        );
    }
}
