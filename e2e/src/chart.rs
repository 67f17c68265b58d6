//! Installs the Helm chart, by helm or as manifests rendered before.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::images::Template;
use crate::paths;
use crate::sim;

/// The namespace of the operator and the agent.
pub const NAMESPACE: &str = "bursar-system";
/// The release's name.
pub const RELEASE: &str = "bursar";

/// Helm's setting for a rendering whose images are not pulled: the chart names no registry.
pub const ANY_REGISTRY: &str = r#"--set-json=global.imageRegistry="registry.example""#;

/// The chart, as a folder or as rendered manifests.
#[derive(Debug, Clone)]
pub enum Chart {
    /// A folder for helm.
    Helm {
        /// The helm program.
        helm: PathBuf,
        /// The chart's folder.
        folder: PathBuf,
    },
    /// Manifests for kubectl, rendered for simulated and for real GPUs.
    Rendered {
        /// The kubectl program.
        kubectl: PathBuf,
        /// The folder of both manifests.
        folder: PathBuf,
    },
}

/// The error of an installation of the chart.
#[derive(Debug, thiserror::Error)]
pub enum ChartError {
    /// The program could not be started.
    #[error("{program}: {source}")]
    Run {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The program exited with a failure.
    #[error("{program} failed ({status}): {stderr}")]
    Failed {
        /// The program.
        program: PathBuf,
        /// Its exit status.
        status: String,
        /// Its standard error.
        stderr: String,
    },
}

/// Splits an image reference into the repository and the tag of the chart's values.
fn image(reference: &str) -> Value {
    let (repository, tag) = reference.rsplit_once(':').unwrap_or((reference, ""));
    json!({"registry": "", "repository": repository, "tag": tag})
}

/// The seconds for which the operator waits for a disruption budget before it preempts for an
/// owner. A quarter of the default, because trials wait for it.
pub const DISRUPTION_GRACE_SECONDS: u64 = 15;

/// Returns the chart's values for our images, on nodes with simulated GPUs or with a real driver.
fn values(images: &Template, simulated: bool) -> Value {
    let mut values = json!({
        // The nodes of trials, and those of a user's cluster, may have no label of a GPU.
        "agent": {"image": image(&images.reference("agent")), "gpuNodeLabels": []},
        // Trials kill operators, and do not wait for a Lease of the killed one.
        "operator": {"image": image(&images.reference("operator")), "replicas": 1},
        // Pods of the trials mount volumes over the driver files, and the policies would reject
        // them.
        "policies": {"exemptNamespaces": ["trials"]},
        "placement": {"disruptionGraceSeconds": DISRUPTION_GRACE_SECONDS, "computeRound": "4ms"},
        // A trial has another plugin offer the GPUs of a node whose pods it still needs.
        "sharing": {"refuseBesideOtherPlugins": false},
    });
    if simulated {
        let folder = sim::FOLDER;
        values["driver"] = json!({
            "root": format!("{folder}/driver"),
            "devRoot": format!("{folder}/dev"),
            "extraMounts": [{"hostPath": folder, "containerPath": folder, "readOnly": false}],
        });
        // The agent process opens the simulated driver as well, and must see every GPU.
        values["agent"]["extraEnv"] =
            json!([{"name": "SIMGPU_DEV", "value": format!("{folder}/dev")}]);
        let volume = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path, "type": "Directory"}});
        let modules = format!("{folder}/sys/module");
        values["agent"]["extraVolumes"] =
            json!([volume("simgpu", folder), volume("simgpu-modules", &modules)]);
        values["agent"]["extraVolumeMounts"] = json!([
            {"name": "simgpu", "mountPath": folder},
            {"name": "simgpu-modules", "mountPath": "/sys/module", "readOnly": true},
        ]);
    }
    values
}

impl Chart {
    /// Returns the chart of this repository.
    pub fn of_repository(helm: PathBuf) -> Self {
        let folder = paths::repository().join("charts/bursar");
        Self::Helm { helm, folder }
    }

    /// Uses the chart in the folder `chosen`, if there is one and helm is available.
    pub fn replace(&mut self, chosen: Option<PathBuf>) {
        if let (Some(chosen), Self::Helm { folder, .. }) = (chosen, self) {
            *folder = chosen;
        }
    }

    /// Installs or upgrades the chart with these images on the cluster of `kubeconfig`. Rendered
    /// manifests keep the images that they were rendered with.
    ///
    /// # Errors
    /// When helm or kubectl fails, with its standard error.
    pub async fn install(
        &self,
        kubeconfig: &Path,
        images: &Template,
        simulated: bool,
    ) -> Result<(), ChartError> {
        match self {
            Self::Helm { helm, folder } => {
                let folder = folder.display().to_string();
                let values = set_json(&values(images, simulated));
                let release = ["upgrade", "--install", RELEASE, &folder];
                let namespace = ["--namespace", NAMESPACE, "--create-namespace", &values];
                let arguments = [release, namespace].concat();
                run(helm, &arguments, kubeconfig).await.map(drop)
            }
            Self::Rendered { kubectl, folder } => {
                let manifests = folder.join(Self::rendered_name(simulated));
                let file = format!("--filename={}", manifests.display());
                let apply = ["apply", "--server-side", "--force-conflicts", &file];
                run(kubectl, &apply, kubeconfig).await.map(drop)
            }
        }
    }

    /// Renders the manifests that helm would apply, and the namespace of their objects.
    ///
    /// # Errors
    /// When helm fails, or the chart is already rendered.
    pub async fn render(&self, images: &Template, simulated: bool) -> Result<String, ChartError> {
        let Self::Helm { helm, folder } = self else {
            return Err(ChartError::Run {
                program: PathBuf::from("helm"),
                source: io::Error::other("the chart was rendered before"),
            });
        };
        let folder = folder.display().to_string();
        let values = set_json(&values(images, simulated));
        let arguments = [
            "template",
            RELEASE,
            &folder,
            "--namespace",
            NAMESPACE,
            "--skip-tests",
            &values,
        ];
        let rendered = run(helm, &arguments, Path::new("/dev/null")).await?;
        Ok(format!(
            "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n---\n{rendered}"
        ))
    }

    /// Returns the file name of the manifests for simulated or for real GPUs.
    pub(crate) fn rendered_name(simulated: bool) -> &'static str {
        if simulated {
            "simulated.yaml"
        } else {
            "real.yaml"
        }
    }
}

/// Formats top-level values as helm's `--set-json=a={...},b={...}`.
fn set_json(values: &Value) -> String {
    let entries = values.as_object().into_iter().flatten();
    let entries: Vec<String> = entries
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    format!("--set-json={}", entries.join(","))
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
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_keeps_the_registrys_port() {
        assert_eq!(
            image("host:5000/a/b:c"),
            json!({"registry": "", "repository": "host:5000/a/b", "tag": "c"})
        );
    }
}
