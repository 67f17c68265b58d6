//! Runs `roll relay`.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::{Instant, sleep};

use super::{PROBLEM, Session, required};
use crate::act::{self, roll};
use crate::args::RollArgs;
use crate::objects::{COMPONENT_LABEL, Node, Pod};
use crate::read::{self, list_path};
use crate::snapshot::Kind;

/// How often a wait looks.
const LOOK: Duration = Duration::from_secs(1);
/// A state counts after so many looks in a row: the API server may have a pod a moment before the
/// kubelet, and a registration a moment after.
const LOOKS: usize = 5;

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
        let Some(set) = snapshot.daemon_set("relay") else {
            bail!(
                "failed to find the relays' DaemonSet: the cluster has none; see relay.enabled of the chart"
            );
        };
        let namespace = &set.metadata.namespace;
        let path = format!("/apis/apps/v1/namespaces/{namespace}/controllerrevisions");
        let selector = format!("app.kubernetes.io/name=bursar,{COMPONENT_LABEL}=relay");
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

    /// Replaces the relay of one node.
    async fn roll_one(&mut self, relay: &Pod, most: Duration) -> anyhow::Result<u8> {
        let node = relay.spec.node_name.as_str();
        if !self.has_agent(node).await? {
            writeln!(
                self.out,
                "{node}: nothing changed, because its agent is not Ready"
            )?;
            return Ok(PROBLEM);
        }
        let cordoned = self.cordon(node, true).await?;
        let undo = format!("kubectl uncordon {node}{}", self.global.connection());
        if cordoned {
            writeln!(self.out, "{node}: cordoned. Undo: {undo}")?;
        }
        let unchanged = match self.wait_for_admissions(node, most).await {
            None => self.delete_relay(relay, most).await,
            lack => lack,
        };
        if let Some(lack) = unchanged {
            self.uncordon_if(node, cordoned).await?;
            writeln!(self.out, "{node}: nothing changed: {lack}")?;
            return Ok(PROBLEM);
        }
        let (start, old) = (Instant::now(), &relay.metadata.uid);
        if let Some(lack) = self.wait_for_registration(node, old, most).await {
            writeln!(
                self.out,
                "{node}: lacks {lack}; the node stays cordoned, because pods would fail there. \
                 Afterwards: {undo}"
            )?;
            return Ok(PROBLEM);
        }
        self.uncordon_if(node, cordoned).await?;
        let seconds = start.elapsed().as_secs_f64();
        writeln!(
            self.out,
            "{node}: the relay is replaced, and has been registered for {}s after {seconds:.1}s",
            LOOKS
        )?;
        Ok(0)
    }

    /// Deletes a relay. Returns why it stays, if that is certain: a request without an answer may
    /// have deleted it, so it is sent again, and at last the relay is looked at.
    async fn delete_relay(&self, relay: &Pod, most: Duration) -> Option<String> {
        let path = list_path(Kind::OwnPods, Some(&relay.metadata.namespace));
        let (name, uid) = (&relay.metadata.name, &relay.metadata.uid);
        let (start, mut is_first) = (Instant::now(), true);
        let error = loop {
            let error = match act::delete(&self.client, &path, name, uid).await {
                Ok(()) => return None,
                Err(error) => error,
            };
            match &error {
                // The relay is gone, or another one has its name.
                kube::Error::Api(status) if matches!(status.code, 404 | 409) => return None,
                kube::Error::Api(status) if is_first && matches!(status.code, 400..=403 | 422) => {
                    break error;
                }
                _ if start.elapsed() >= most => match self.is_untouched(uid).await {
                    true => break error,
                    false => return None,
                },
                _ => {}
            }
            is_first = false;
            sleep(LOOK).await;
        };
        let reason = read::reason(&error);
        Some(format!("its relay cannot be deleted: {reason}"))
    }

    /// Whether the API server shows that a relay stays.
    async fn is_untouched(&self, uid: &str) -> bool {
        let own = self.read(&[Kind::OwnPods], None).await;
        own.is_ok_and(|own| {
            let mut pods = own.own_pods.iter();
            pods.any(|pod| pod.metadata.uid == uid && pod.metadata.deletion_timestamp.is_none())
        })
    }

    /// Waits until the kubelet admits no pod. Returns why it did not come to that.
    async fn wait_for_admissions(&self, node: &str, most: Duration) -> Option<String> {
        self.settle(most, async || match self.pods_on(node).await {
            Ok(pods) => {
                let waiting = roll::not_admitted(&pods);
                let waiting = (!waiting.is_empty()).then(|| waiting.join(", "));
                waiting.map(|pods| format!("the kubelet has not admitted {pods}"))
            }
            Err(error) => Some(read::message(&error)),
        })
        .await
    }

    /// Waits until pods may come again. Returns what the node lacks.
    async fn wait_for_registration(&self, node: &str, old: &str, most: Duration) -> Option<String> {
        self.settle(most, async || {
            let own = self.read(&[Kind::OwnPods], None);
            match (own.await, self.gpu_node(node).await) {
                (Ok(own), Ok(gpu_node)) => roll::lacks(&own.own_pods, &gpu_node, node, old),
                (Err(error), _) | (_, Err(error)) => Some(read::message(&error)),
            }
        })
        .await
    }

    /// Looks until nothing lacks for [`LOOKS`] looks in a row. Otherwise returns the last lack.
    async fn settle(
        &self,
        most: Duration,
        look: impl AsyncFn() -> Option<String>,
    ) -> Option<String> {
        let (start, mut looks) = (Instant::now(), 0);
        loop {
            let lack = look().await;
            looks = if lack.is_none() { looks + 1 } else { 0 };
            if looks == LOOKS {
                return None;
            }
            if start.elapsed() >= most {
                return Some(lack.unwrap_or_else(|| "time".to_owned()));
            }
            sleep(LOOK).await;
        }
    }

    async fn has_agent(&self, node: &str) -> anyhow::Result<bool> {
        let own = self.read(&[Kind::OwnPods], None).await?;
        Ok(own.agent_on(node).is_some_and(Pod::is_ready))
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
