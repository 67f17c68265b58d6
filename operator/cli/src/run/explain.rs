//! Runs `explain`.

use std::collections::BTreeSet;
use std::io::Write;

use anyhow::Context as _;
use kube::api::ListParams;
use kube::core::Request;

use super::{PROBLEM, Session};
use crate::act;
use crate::args::{Target, WorkloadKind};
use crate::explain::workload::Controlled;
use crate::explain::{self, Explanation, Verdict};
use crate::objects::{Event, ObjectRef, Pod, Workload};
use crate::read::{self, list_path};
use crate::show::gpus;
use crate::snapshot::{Kind, Snapshot};

/// The most victims that are read.
const MAX_VICTIMS: usize = 20;

/// Whether a text can be the name of a pod or a namespace.
fn is_name(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(is_allowed)
}

/// Drops the Events about a victim.
fn forget_victim(snapshot: &mut Snapshot, uid: &str) {
    let is_about = |event: &Event| explain::victim(event).is_some_and(|of| of.uid == uid);
    snapshot.events.retain(|event| !is_about(event));
}

impl<W: Write> Session<'_, W> {
    pub(super) async fn explain(
        &mut self,
        target: &Target,
        name: Option<&str>,
    ) -> anyhow::Result<u8> {
        let kind = target.kind;
        let name = match (&target.name, name) {
            (Some(name), None) => name,
            (None, Some(name)) => name,
            _ => anyhow::bail!("failed to explain: not one name; write pod NAME or pod/NAME"),
        };
        let namespace = self.namespace();
        let kinds = [
            Kind::GpuNodes,
            Kind::Budgets,
            Kind::Quotas,
            Kind::Nodes,
            Kind::AgentEvents,
            Kind::OperatorEvents,
            Kind::OwnPods,
        ];
        let mut snapshot = self.read(&kinds, Some(&namespace)).await?;
        if gpus::needs_pods(&snapshot) {
            let mut pods = self.read(&[Kind::Pods], None).await?;
            if !pods.has_all(Kind::Pods) {
                pods = self.read(&[Kind::Pods], Some(&namespace)).await?;
                let reason = "forbidden in other namespaces".to_owned();
                snapshot.unread.insert(Kind::Pods, reason);
            }
            snapshot.pods = pods.pods;
        }
        let explanation = match kind {
            WorkloadKind::Pod => self.explain_pod(&mut snapshot, &namespace, name).await?,
            _ => {
                self.explain_workload(&mut snapshot, kind, &namespace, name)
                    .await?
            }
        };
        self.print(
            |terminal| explanation.render(terminal),
            || explanation.json(),
            || {
                explanation
                    .causes
                    .iter()
                    .map(|cause| cause.as_str().to_owned())
                    .collect()
            },
        )?;
        Ok(if explanation.verdict == Verdict::Runs {
            0
        } else {
            PROBLEM
        })
    }

    async fn explain_pod(
        &self,
        snapshot: &mut Snapshot,
        namespace: &str,
        name: &str,
    ) -> anyhow::Result<Explanation> {
        let path = list_path(Kind::Pods, Some(namespace));
        let pod: Pod = act::get(&self.client, &path, name)
            .await
            .with_context(|| format!("failed to read pod {namespace}/{name}"))?;
        self.add_events(snapshot, namespace, &pod.metadata.uid)
            .await?;
        self.add_victims(snapshot, &[&pod]).await;
        self.add_metrics(snapshot, &[&pod]).await?;
        Ok(explain::explain_pod(snapshot, &pod))
    }

    async fn explain_workload(
        &self,
        snapshot: &mut Snapshot,
        kind: WorkloadKind,
        namespace: &str,
        name: &str,
    ) -> anyhow::Result<Explanation> {
        let (word, path) = match kind {
            WorkloadKind::Deployment => ("deployment", "/apis/apps/v1/namespaces/{}/deployments"),
            WorkloadKind::Statefulset => {
                ("statefulset", "/apis/apps/v1/namespaces/{}/statefulsets")
            }
            WorkloadKind::Replicaset => ("replicaset", "/apis/apps/v1/namespaces/{}/replicasets"),
            WorkloadKind::Job | WorkloadKind::Pod => ("job", "/apis/batch/v1/namespaces/{}/jobs"),
        };
        let workload: Workload = act::get(&self.client, &path.replace("{}", namespace), name)
            .await
            .with_context(|| format!("failed to read {word} {namespace}/{name}"))?;
        let mut creators = vec![workload.metadata.uid.clone()];
        if kind == WorkloadKind::Deployment {
            let path = format!("/apis/apps/v1/namespaces/{namespace}/replicasets");
            let sets: Vec<Workload> = self.list(&path, &ListParams::default()).await?;
            let own = sets
                .iter()
                .filter(|set| set.metadata.is_controlled_by(&workload.metadata.uid));
            // The newest ReplicaSet is the one that creates pods.
            let wanted = own.filter(|set| set.spec.replicas != Some(0));
            creators.extend(wanted.map(|set| set.metadata.uid.clone()));
        }
        for uid in &creators {
            self.add_events(snapshot, namespace, uid).await?;
        }
        let is_own = |pod: &Pod| {
            creators
                .iter()
                .any(|uid| pod.metadata.is_controlled_by(uid))
        };
        // The snapshot has only pods with GPU memory, and the workload counts all of its pods.
        let path = list_path(Kind::Pods, Some(namespace));
        let pods: Vec<Pod> = self
            .list(&path, &ListParams::default())
            .await
            .with_context(|| format!("failed to read the pods of {word} {namespace}/{name}"))?;
        let pods: Vec<Pod> = pods.into_iter().filter(is_own).collect();
        for pod in &pods {
            self.add_events(snapshot, namespace, &pod.metadata.uid)
                .await?;
        }
        let all: Vec<&Pod> = pods.iter().collect();
        self.add_victims(snapshot, &all).await;
        self.add_metrics(snapshot, &all).await?;
        let controlled = Controlled {
            kind: word,
            workload: &workload,
            creators,
            pods: all,
        };
        Ok(explain::workload::explain(snapshot, &controlled))
    }

    /// Adds the Events of all writers on one object.
    async fn add_events(
        &self,
        snapshot: &mut Snapshot,
        namespace: &str,
        uid: &str,
    ) -> anyhow::Result<()> {
        let path = list_path(Kind::AgentEvents, Some(namespace));
        let params = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
        match self.list::<Event>(&path, &params).await {
            Ok(found) => {
                let known: BTreeSet<String> = snapshot
                    .events
                    .iter()
                    .map(|event| event.metadata.uid.clone())
                    .collect();
                snapshot.events.extend(
                    found
                        .into_iter()
                        .filter(|event| !known.contains(&event.metadata.uid)),
                );
            }
            Err(error) => drop(
                snapshot
                    .unread
                    .insert(Kind::AgentEvents, read::reason(&error)),
            ),
        }
        Ok(())
    }

    /// Adds the victims that Events on these pods name. Only an admin may read those of other
    /// namespaces.
    async fn add_victims(&self, snapshot: &mut Snapshot, pods: &[&Pod]) {
        let of_pods = |event: &&Event| {
            let uid = &event.involved_object.uid;
            pods.iter().any(|pod| pod.metadata.uid == *uid)
        };
        let mut events: Vec<_> = snapshot.events.iter().filter(of_pods).collect();
        events.sort_by_key(|event| std::cmp::Reverse(event.time()));
        let victims = events.into_iter().filter_map(|event| {
            let ObjectRef {
                namespace,
                name,
                uid,
                ..
            } = explain::victim(event)?;
            // A tenant may write such an Event, and must not choose the path of a request.
            let is_pod = is_name(namespace) && is_name(name) && !uid.is_empty();
            is_pod.then(|| (namespace.clone(), name.clone(), uid.clone()))
        });
        let mut seen = BTreeSet::new();
        let mut victims: Vec<_> = victims
            .filter(|victim| seen.insert(victim.clone()))
            .collect();
        if victims.len() > MAX_VICTIMS {
            victims.truncate(MAX_VICTIMS);
            let reason = format!("only the {MAX_VICTIMS} newest in the way were read");
            snapshot.unread.insert(Kind::Pods, reason);
        }
        for (namespace, name, uid) in victims {
            let path = list_path(Kind::Pods, Some(&namespace));
            match act::get::<Pod>(&self.client, &path, &name).await {
                Ok(pod) if pod.metadata.uid == uid => snapshot.pods.push(pod),
                // The victim is gone. Another pod may have its name.
                Ok(_) => forget_victim(snapshot, &uid),
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    forget_victim(snapshot, &uid);
                }
                Err(error) => drop(snapshot.unread.insert(Kind::Pods, read::reason(&error))),
            }
        }
    }

    /// Adds the metrics of the agents on the nodes of these pods.
    async fn add_metrics(&self, snapshot: &mut Snapshot, pods: &[&Pod]) -> anyhow::Result<()> {
        let nodes: BTreeSet<&str> = pods.iter().map(|pod| pod.spec.node_name.as_str()).collect();
        read::read_metrics(&self.client, snapshot, |node| nodes.contains(node)).await;
        Ok(())
    }

    async fn list<T: serde::de::DeserializeOwned>(
        &self,
        path: &str,
        params: &ListParams,
    ) -> Result<Vec<T>, kube::Error> {
        #[derive(serde::Deserialize)]
        struct List<T> {
            #[serde(default = "Vec::new")]
            items: Vec<T>,
        }
        let request = Request::new(path)
            .list(params)
            .map_err(kube::Error::BuildRequest)?;
        let list: List<T> = self.client.request(request).await?;
        Ok(list.items)
    }
}
