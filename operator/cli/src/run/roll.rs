//! Runs `roll relay`.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::{Instant, sleep};

use super::{PROBLEM, Session, required};
use crate::act::{self, roll};
use crate::args::RollArgs;
use crate::objects::{Node, Pod};
use crate::read::{self, list_path};
use crate::snapshot::Kind;

/// How often a wait looks.
const LOOK: Duration = Duration::from_secs(1);
/// A state counts after so many looks in a row: the API server may have a pod a moment before the
/// kubelet, and a registration a moment after.
const LOOKS: usize = 3;

impl<W: Write> Session<'_, W> {
    pub(super) async fn roll(&mut self, arguments: &RollArgs) -> anyhow::Result<u8> {
        let RollArgs {
            part: _,
            nodes,
            dry_run,
            timeout,
        } = arguments;
        let snapshot = self.read(&[Kind::OwnPods, Kind::DaemonSets], None).await?;
        required(&snapshot, Kind::OwnPods)?;
        required(&snapshot, Kind::DaemonSets)?;
        let mut sets = snapshot.daemon_sets.iter();
        let set = sets.find(|set| {
            let labels = &set.metadata.labels;
            labels.get(roll::COMPONENT).is_some_and(|of| of == "relay")
        });
        let Some(set) = set else {
            bail!(
                "failed to find the relays' DaemonSet: the cluster has none; see relay.enabled of the chart"
            );
        };
        let namespace = &set.metadata.namespace;
        let path = format!("/apis/apps/v1/namespaces/{namespace}/controllerrevisions");
        let selector = format!("app.kubernetes.io/name=bursar,{}=relay", roll::COMPONENT);
        let mut revisions = Vec::new();
        read::list(&self.client, &path, (Some(&selector), None), |one| {
            revisions.push(one)
        })
        .await
        .with_context(|| format!("failed to read controllerrevisions of {namespace}"))?;
        let revision = roll::newest_revision(&revisions).unwrap_or_default();
        let relays = roll::relays(&snapshot.own_pods, revision, nodes);
        for node in nodes {
            if !relays.iter().any(|relay| relay.spec.node_name == *node) {
                bail!("failed to find the relay of node {node}: the node has none");
            }
        }
        if relays.is_empty() {
            writeln!(self.out, "Every relay is of the newest revision.")?;
        }
        let most = Duration::from_secs(u64::try_from(*timeout).unwrap_or(0));
        for relay in relays {
            match dry_run {
                true => writeln!(self.out, "{}: {}", relay.spec.node_name, relay.key())?,
                false => {
                    let code = self.roll_one(relay, most).await?;
                    if code != 0 {
                        return Ok(code);
                    }
                }
            }
        }
        Ok(0)
    }

    /// Replaces the relay of one node. The node stays cordoned where pods could fail on it.
    async fn roll_one(&mut self, relay: &Pod, most: Duration) -> anyhow::Result<u8> {
        let (node, start) = (relay.spec.node_name.as_str(), Instant::now());
        let cordoned = self.cordon(node, true).await?;
        let mut waited = Vec::new();
        let mut looks = 0;
        while looks < LOOKS && start.elapsed() < most {
            waited = roll::not_admitted(&self.pods_on(node).await?);
            looks = if waited.is_empty() { looks + 1 } else { 0 };
            sleep(LOOK).await;
        }
        if looks < LOOKS {
            self.uncordon_if(node, cordoned).await?;
            let pods = waited.join(", ");
            writeln!(
                self.out,
                "{node}: nothing changed, because the kubelet has not admitted {pods}"
            )?;
            return Ok(PROBLEM);
        }
        let path = list_path(Kind::OwnPods, Some(&relay.metadata.namespace));
        act::delete(
            &self.client,
            &path,
            &relay.metadata.name,
            &relay.metadata.uid,
        )
        .await
        .with_context(|| format!("failed to delete pod {}", relay.key()))?;
        let deleted = Instant::now();
        let (mut looks, mut lack) = (0, None);
        while looks < LOOKS && start.elapsed() < most {
            let snapshot = self.read(&[Kind::OwnPods], None).await?;
            let gpu_node = self.gpu_node(node).await?;
            lack = roll::lacks(&snapshot.own_pods, &gpu_node, node, &relay.metadata.uid);
            looks = if lack.is_none() { looks + 1 } else { 0 };
            sleep(LOOK).await;
        }
        if looks < LOOKS {
            let lack = lack.unwrap_or_else(|| "time".to_owned());
            writeln!(
                self.out,
                "{node}: the new relay lacks {lack}; the node stays cordoned, because pods would fail there. \
                 Afterwards: kubectl uncordon {node}"
            )?;
            return Ok(PROBLEM);
        }
        self.uncordon_if(node, cordoned).await?;
        let seconds = deleted.elapsed().as_secs_f64();
        writeln!(
            self.out,
            "{node}: the relay is replaced, and registered {seconds:.1}s later"
        )?;
        Ok(0)
    }

    /// Cordons a node, or ends that. Returns whether that changed it.
    async fn cordon(&self, node: &str, cordons: bool) -> anyhow::Result<bool> {
        let path = list_path(Kind::Nodes, None);
        act::change(&self.client, &path, node, |node: &Node| {
            Ok(roll::cordon_patch(node, cordons))
        })
        .await
        .with_context(|| format!("failed to cordon node {node}"))
    }

    /// An admin's own cordon stays.
    async fn uncordon_if(&self, node: &str, cordoned: bool) -> anyhow::Result<()> {
        if cordoned {
            self.cordon(node, false).await?;
        }
        Ok(())
    }

    async fn pods_on(&self, node: &str) -> anyhow::Result<Vec<Pod>> {
        let selector = format!("spec.nodeName={node}");
        let (path, mut pods) = (list_path(Kind::Pods, None), Vec::new());
        read::list(&self.client, &path, (None, Some(&selector)), |pod| {
            pods.push(pod)
        })
        .await
        .with_context(|| format!("failed to read the pods of node {node}"))?;
        Ok(pods)
    }
}
