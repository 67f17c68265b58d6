//! Runs the commands about the installation: `doctor`, `support`, `uninstall`, `version`.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;

use super::{PROBLEM, Session, required, unreachable};
use crate::act::{self, notify};
use crate::amounts::count;
use crate::doctor::{self, Level, preflight};
use crate::snapshot::{Kind, Snapshot};
use crate::{read, support, uninstall, version};

/// The lines of each log in an archive: so few that the limit in bytes seldom cuts the newest.
const LOG_LINES: u32 = 2000;

/// The kinds that `doctor` examines.
const EXAMINED: [Kind; 11] = [
    Kind::Nodes,
    Kind::GpuNodes,
    Kind::GpuNamespaces,
    Kind::Budgets,
    Kind::Namespaces,
    Kind::OwnPods,
    Kind::DaemonSets,
    Kind::MutatingPolicies,
    Kind::NetworkPolicies,
    Kind::PodMonitors,
    Kind::Leases,
];

impl<W: Write> Session<'_, W> {
    /// Reads these kinds with the API server's version and clock. A kind that the API server may
    /// lack counts as read; `doctor` judges whether it should have it.
    async fn read_installation(&self, kinds: &[Kind]) -> anyhow::Result<Snapshot> {
        let mut snapshot = self.read(kinds, None).await?;
        let (server, clock) = read::server(&self.client).await.map_err(unreachable)?;
        snapshot.server_version = Some(server);
        snapshot.now = clock.unwrap_or(snapshot.now);
        snapshot.allow_absent(&[
            Kind::PodMonitors,
            Kind::MutatingPolicies,
            Kind::GpuNodes,
            Kind::GpuNamespaces,
            Kind::Budgets,
        ]);
        Ok(snapshot)
    }

    pub(super) async fn doctor(&mut self, only_preflight: bool) -> anyhow::Result<u8> {
        let kinds: &[Kind] = if only_preflight {
            &[Kind::Nodes]
        } else {
            &EXAMINED
        };
        let snapshot = self.read_installation(kinds).await?;
        let findings = if only_preflight {
            preflight::examine(&snapshot)
        } else {
            doctor::examine(&snapshot)
        };
        self.print(
            |terminal| doctor::render(&findings, terminal),
            || doctor::json(&findings),
            || {
                findings
                    .iter()
                    .map(|finding| finding.check.to_owned())
                    .collect()
            },
        )?;
        Ok(if doctor::worst(&findings) >= Level::Warn {
            PROBLEM
        } else {
            0
        })
    }

    pub(super) async fn support(&mut self, file: &std::path::Path) -> anyhow::Result<u8> {
        // `doctor` takes a kind that was not read for one without objects.
        let mut kinds = EXAMINED.to_vec();
        kinds.extend([
            Kind::Pods,
            Kind::Deployments,
            Kind::Quotas,
            Kind::AgentEvents,
            Kind::OperatorEvents,
        ]);
        let snapshot = self.read_installation(&kinds).await?;
        let mut configuration = None;
        if let Some(set) = snapshot
            .daemon_sets
            .iter()
            .find(|set| set.metadata.name.ends_with("-agent"))
        {
            let path = format!(
                "/apis/apps/v1/namespaces/{}/daemonsets",
                set.metadata.namespace
            );
            let set = act::get::<Value>(&self.client, &path, &set.metadata.name).await;
            configuration = set.ok().and_then(|set| {
                let env = set.pointer("/spec/template/spec/containers/0/env")?;
                let config = |variable: &&Value| variable["name"] == "BURSAR_CONFIG";
                Some(env.as_array()?.iter().find(config)?["value"].clone())
            });
        }
        let mut files = support::files(&snapshot, configuration.as_ref());
        let left_out = self.add_logs(&snapshot, &mut files).await?;
        for reason in &left_out {
            writeln!(self.out, "{reason}")?;
        }
        write!(self.out, "{}", support::listing(&files))?;
        self.print_unread(&snapshot)?;
        if file.as_os_str() != "-" {
            write_new(file, &support::archive(&files)?).with_context(|| {
                let file = file.display();
                format!("failed to write {file}; name a file that does not exist")
            })?;
            writeln!(self.out, "wrote {}", file.display())?;
        }
        Ok(0)
    }

    /// Adds the logs of Bursar's own pods. Returns why others are left out.
    async fn add_logs(
        &self,
        snapshot: &Snapshot,
        files: &mut Vec<support::File>,
    ) -> anyhow::Result<Vec<String>> {
        let (logged, too_many) = support::logged(&snapshot.own_pods);
        let too_many = too_many.iter().map(|pod| {
            let (pod, most) = (&pod.metadata.name, logged.len());
            format!("left out the log of {pod}: it is beyond {most} pods")
        });
        let mut left_out: Vec<String> = too_many.collect();
        for pod in &logged {
            let request = http::Request::get(format!(
                "/api/v1/namespaces/{}/pods/{}/log?tailLines={LOG_LINES}&limitBytes={}",
                pod.metadata.namespace,
                pod.metadata.name,
                support::MAX_LOG_BYTES
            ));
            let request = request.body(Vec::new()).map_err(kube::Error::HttpError)?;
            match self.client.request_text(request).await {
                Ok(log) => files.push(support::File::log(&pod.metadata.name, &log)),
                Err(error) => left_out.push(format!(
                    "could not read the log of {}: {}",
                    pod.metadata.name,
                    read::reason(&error)
                )),
            }
        }
        if !left_out.is_empty() {
            files.push(support::File::left_out(&left_out));
        }
        Ok(left_out)
    }

    pub(super) async fn uninstall(&mut self) -> anyhow::Result<u8> {
        let kinds = [
            Kind::GpuNodes,
            Kind::Budgets,
            Kind::Pods,
            Kind::DaemonSets,
            Kind::Deployments,
            Kind::Nodes,
            Kind::Namespaces,
            Kind::Quotas,
        ];
        let mut snapshot = self.read(&kinds, None).await?;
        // Once the CRDs are gone, so are their objects.
        snapshot.allow_absent(&[Kind::GpuNodes, Kind::Budgets]);
        let text = uninstall::render(&snapshot, self.terminal);
        self.out.write_all(text.as_bytes())?;
        Ok(
            if uninstall::remainders(&snapshot).is_empty() && snapshot.unread.is_empty() {
                0
            } else {
                PROBLEM
            },
        )
    }

    /// Writes an Event for each running pod with GPU memory.
    pub(super) async fn notify_of_uninstall(&mut self) -> anyhow::Result<u8> {
        let snapshot = self.read(&[Kind::Pods], None).await?;
        required(&snapshot, Kind::Pods)?;
        let (mut notified, mut failed) = (0, 0);
        for pod in notify::pods(&snapshot) {
            let path = format!(
                "/apis/events.k8s.io/v1/namespaces/{}/events",
                pod.metadata.namespace
            );
            let event = notify::event(pod, snapshot.now);
            match act::create(&self.client, &path, &event).await {
                // An earlier run has notified the pod.
                Err(kube::Error::Api(answer)) if answer.is_already_exists() => notified += 1,
                Ok(()) => notified += 1,
                Err(error) => {
                    failed += 1;
                    let reason = read::reason(&error);
                    writeln!(self.out, "{} could not be told: {reason}", pod.key())?;
                }
            }
        }
        let (pods, reason) = (count(notified, "pod"), notify::REASON);
        writeln!(self.out, "{pods} with GPU memory told by an Event {reason}")?;
        Ok(if failed == 0 { 0 } else { PROBLEM })
    }

    pub(super) async fn version(&mut self) -> anyhow::Result<u8> {
        let mut snapshot = self
            .read(&[Kind::GpuNodes, Kind::OwnPods, Kind::DaemonSets], None)
            .await?;
        let (server, _) = read::server(&self.client).await.map_err(unreachable)?;
        snapshot.server_version = Some(server);
        self.print(
            |_| version::render(&snapshot),
            || version::json(&snapshot),
            || vec![version::CLIENT.to_owned()],
        )?;
        Ok(0)
    }
}

/// Writes a file that its owner alone can read, and follows no link: an archive has logs.
fn write_new(file: &Path, content: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).mode(0o600);
    options.open(file)?.write_all(content)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn archive_is_new_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("archive"), folder.path().join("link"));
        write_new(&file, b"logs").unwrap();
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        symlink(&file, &link).unwrap();
        for existing in [&file, &link] {
            let error = write_new(existing, b"other").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"logs");
    }
}
