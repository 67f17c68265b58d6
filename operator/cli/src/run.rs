//! Runs a command: reads a snapshot, and prints what the pure functions make of it.

use std::collections::BTreeSet;
use std::io::{BufRead, Write};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bursar_crds::quantity::parse_bytes;
use bursar_crds::{GpuMemoryBudget, GpuNode};
use kube::Client;
use kube::api::ListParams;
use kube::core::Request;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::act::{self, drain, notify, resize};
use crate::amounts::count;
use crate::args::{
    Command, ConvertArgs, DrainArgs, Global, Output, TopArgs, TopKind, WorkloadKind,
};
use crate::convert::{self, Assumptions};
use crate::doctor::{self, Level, preflight};
use crate::explain::workload::Controlled;
use crate::explain::{self, Explanation, Verdict};
use crate::objects::{Event, Pod, Workload};
use crate::read::{self, Wanted, list_path};
use crate::show::{budgets, events, gpus, retained, top};
use crate::snapshot::{Kind, Snapshot};
use crate::table::Terminal;
use crate::{support, uninstall, version};

/// Something is amiss, as `doctor` and `explain` say.
pub const AMISS: u8 = 1;
/// The command line is wrong, or the API server refused.
pub const FAILED: u8 = 2;

/// How often a wait looks, and `-w` prints.
const LOOK: Duration = Duration::from_secs(1);
const WATCH: Duration = Duration::from_secs(2);
/// How long `resize` waits for the agent.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(30);
/// The lines of each log in an archive.
const LOG_LINES: u32 = 5000;

/// What a command needs besides its arguments.
pub struct Session<'a, W: Write> {
    /// The API server.
    pub client: Client,
    /// Options of every command.
    pub global: &'a Global,
    /// Where tables are shown.
    pub terminal: Terminal,
    /// Standard output.
    pub out: &'a mut W,
}

impl<W: Write> Session<'_, W> {
    /// The namespace to read; `None` is all.
    fn scope(&self) -> Option<String> {
        (!self.global.all_namespaces).then(|| self.namespace())
    }

    /// The namespace of a named object.
    fn namespace(&self) -> String {
        let default = || self.client.default_namespace().to_owned();
        self.global.namespace.clone().unwrap_or_else(default)
    }

    async fn read(&self, kinds: &[Kind], namespace: Option<&str>) -> anyhow::Result<Snapshot> {
        let wanted = Wanted {
            kinds,
            namespace,
            all_pods: false,
        };
        read::read(&self.client, &wanted).await.map_err(unreachable)
    }

    /// Prints a table, or the same as JSON, YAML or names.
    fn print(
        &mut self,
        table: impl FnOnce(Terminal) -> String,
        json: impl FnOnce() -> Value,
        names: impl FnOnce() -> Vec<String>,
    ) -> anyhow::Result<()> {
        let text = match self.global.output {
            Output::Table | Output::Wide => table(self.terminal),
            Output::Json => serde_json::to_string_pretty(&json())? + "\n",
            Output::Yaml => serde_yaml_ng::to_string(&json())?,
            Output::Name => names().iter().map(|name| format!("{name}\n")).collect(),
        };
        Ok(self.out.write_all(text.as_bytes())?)
    }

    /// Prints below a table what could not be read.
    fn print_unread(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        if matches!(self.global.output, Output::Table | Output::Wide) {
            for note in snapshot.unread_notes() {
                writeln!(self.out, "{note}")?;
            }
        }
        Ok(())
    }

    /// Runs a command and returns the exit code.
    ///
    /// # Errors
    /// When the API server does not answer or refuses what the command is for.
    pub async fn run(&mut self, command: &Command) -> anyhow::Result<u8> {
        match command {
            Command::Top(arguments) => self.top(arguments).await,
            Command::Gpus { node, watch } => self.gpus(node.as_deref(), *watch).await,
            Command::Budgets { watch } => self.budgets(*watch).await,
            Command::Retained => self.retained().await,
            Command::Explain { kind, name } => self.explain(*kind, name).await,
            Command::Doctor { preflight } => self.doctor(*preflight).await,
            Command::Drain(arguments) => self.drain(arguments).await,
            Command::Undrain {
                node,
                gpus,
                dry_run,
            } => self.undrain(node, gpus, *dry_run).await,
            Command::Resize {
                pod,
                amount,
                dry_run,
                ..
            } => self.resize(pod, amount.as_deref(), *dry_run).await,
            Command::Events { since } => self.events(*since).await,
            Command::Support { file } => self.support(file).await,
            Command::Uninstall { notify: true, .. } => self.notify_of_uninstall().await,
            Command::Uninstall { .. } => self.uninstall().await,
            Command::Version { .. } => self.version().await,
            Command::Convert(_) | Command::Completion { .. } | Command::Complete { .. } => {
                bail!("this command needs no cluster")
            }
        }
    }

    /// Reads objects of all namespaces unless `-n` names one. A tenant that may not read all
    /// objects of `kind` gets those of its own namespace.
    async fn read_namespaces(&self, kinds: &[Kind], kind: Kind) -> anyhow::Result<Snapshot> {
        if self.global.namespace.is_some() {
            return self.read(kinds, self.scope().as_deref()).await;
        }
        let snapshot = self.read(kinds, None).await?;
        if snapshot.has_all(kind) || self.global.all_namespaces {
            return Ok(snapshot);
        }
        self.read(kinds, Some(&self.namespace())).await
    }

    async fn pause(&mut self, watch: bool) -> anyhow::Result<bool> {
        if watch {
            self.out.flush()?;
            sleep(WATCH).await;
            // Home, and clear to the end of the screen.
            write!(
                self.out,
                "{}",
                if self.terminal.width.is_some() {
                    "\u{1b}[H\u{1b}[J"
                } else {
                    ""
                }
            )?;
        }
        Ok(watch)
    }

    async fn top(&mut self, arguments: &TopArgs) -> anyhow::Result<u8> {
        let mut kinds = vec![Kind::Pods, Kind::GpuNodes];
        match arguments.what {
            TopKind::Namespaces => kinds.push(Kind::Budgets),
            TopKind::Pods if !arguments.no_usage => {
                kinds.extend([Kind::OwnPods, Kind::AgentMetrics])
            }
            TopKind::Pods => {}
        }
        loop {
            let mut snapshot = match arguments.what {
                TopKind::Pods => self.read(&kinds, self.scope().as_deref()).await?,
                TopKind::Namespaces => self.read_namespaces(&kinds, Kind::Pods).await?,
            };
            if let Some(selector) = &arguments.selector {
                let selector = selector_of(selector)?;
                snapshot.pods.retain(|pod| {
                    selector
                        .iter()
                        .all(|(key, value)| pod.metadata.labels.get(key) == Some(value))
                });
            }
            match arguments.what {
                TopKind::Pods => self.print(
                    |terminal| top::render_pods(&snapshot, terminal),
                    || top::pods_json(&snapshot),
                    || top::pod_names(&snapshot),
                )?,
                TopKind::Namespaces => self.print(
                    |terminal| top::render_namespaces(&snapshot, terminal),
                    || top::namespaces_json(&snapshot),
                    || {
                        top::namespaces(&snapshot)
                            .iter()
                            .map(|row| format!("namespace/{}", row.namespace))
                            .collect()
                    },
                )?,
            }
            self.print_unread(&snapshot)?;
            if !snapshot.has_all(Kind::Pods) && snapshot.pods.is_empty() {
                return Ok(FAILED);
            }
            if !self.pause(arguments.watch).await? {
                return Ok(0);
            }
        }
    }

    async fn gpus(&mut self, node: Option<&str>, watch: bool) -> anyhow::Result<u8> {
        loop {
            let snapshot = self.read(&[Kind::GpuNodes, Kind::Pods], None).await?;
            required(&snapshot, Kind::GpuNodes)?;
            if let Some(node) = node {
                let found = snapshot.gpu_node(node);
                let found = found.with_context(|| {
                    format!("failed to find GpuNode {node}: no agent has written one")
                })?;
                if let Some(text) = gpus::without_gpus(found) {
                    writeln!(self.out, "{text}")?;
                }
            }
            self.print(
                |terminal| gpus::render(&snapshot, node, terminal),
                || gpus::json(&snapshot, node),
                || gpus::names(&snapshot, node),
            )?;
            if !self.pause(watch).await? {
                return Ok(0);
            }
        }
    }

    async fn budgets(&mut self, watch: bool) -> anyhow::Result<u8> {
        loop {
            let kinds = [Kind::Budgets, Kind::GpuNodes, Kind::Nodes];
            let snapshot = self.read_namespaces(&kinds, Kind::Budgets).await?;
            required(&snapshot, Kind::Budgets)?;
            self.print(
                |terminal| budgets::render(&snapshot, terminal),
                || budgets::json(&snapshot),
                || budgets::names(&snapshot),
            )?;
            if !self.pause(watch).await? {
                return Ok(0);
            }
        }
    }

    async fn retained(&mut self) -> anyhow::Result<u8> {
        let snapshot = self
            .read(&[Kind::GpuNodes, Kind::OwnPods, Kind::AgentMetrics], None)
            .await?;
        required(&snapshot, Kind::GpuNodes)?;
        self.print(
            |terminal| retained::render(&snapshot, terminal),
            || retained::json(&snapshot),
            || {
                retained::rows(&snapshot)
                    .iter()
                    .map(|row| row.uuid.clone())
                    .collect()
            },
        )?;
        self.print_unread(&snapshot)?;
        Ok(0)
    }

    async fn events(&mut self, since: Option<i64>) -> anyhow::Result<u8> {
        let scope = self.scope();
        let kinds = [Kind::AgentEvents, Kind::OperatorEvents];
        let snapshot = self.read(&kinds, scope.as_deref()).await?;
        required(&snapshot, Kind::AgentEvents)?;
        self.print(
            |terminal| events::render(&snapshot, since, terminal),
            || events::json(&snapshot, since),
            || {
                events::shown(&snapshot, since)
                    .iter()
                    .map(|event| format!("event/{}", event.metadata.name))
                    .collect()
            },
        )?;
        Ok(0)
    }

    async fn explain(&mut self, kind: WorkloadKind, name: &str) -> anyhow::Result<u8> {
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
        // Pods in the way are of other namespaces, which only an admin may read.
        let mut pods = self.read(&[Kind::Pods], None).await?;
        if !pods.has_all(Kind::Pods) {
            pods = self.read(&[Kind::Pods], Some(&namespace)).await?;
            let reason = "forbidden in other namespaces".to_owned();
            snapshot.unread.insert(Kind::Pods, reason);
        }
        snapshot.pods = pods.pods;
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
            AMISS
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
        let is_own = |pod: &&Pod| {
            creators
                .iter()
                .any(|uid| pod.metadata.is_controlled_by(uid))
        };
        let pods: Vec<Pod> = snapshot.pods.iter().filter(is_own).cloned().collect();
        for pod in &pods {
            self.add_events(snapshot, namespace, &pod.metadata.uid)
                .await?;
        }
        self.add_metrics(snapshot, &pods.iter().collect::<Vec<_>>())
            .await?;
        let controlled = Controlled {
            kind: word,
            workload: &workload,
            creators,
            pods: pods.iter().collect(),
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

    async fn doctor(&mut self, only_preflight: bool) -> anyhow::Result<u8> {
        let kinds: &[Kind] = if only_preflight {
            &[Kind::Nodes]
        } else {
            &[
                Kind::Nodes,
                Kind::GpuNodes,
                Kind::Budgets,
                Kind::Namespaces,
                Kind::OwnPods,
                Kind::DaemonSets,
                Kind::MutatingPolicies,
                Kind::NetworkPolicies,
                Kind::PodMonitors,
                Kind::Leases,
            ]
        };
        let mut snapshot = self.read(kinds, None).await?;
        let (server, clock) = read::server(&self.client).await.map_err(unreachable)?;
        snapshot.server_version = Some(server);
        snapshot.now = clock.unwrap_or(snapshot.now);
        let absent = "the API server does not have it";
        for optional in [Kind::PodMonitors, Kind::MutatingPolicies] {
            if snapshot
                .unread
                .get(&optional)
                .is_some_and(|reason| reason == absent)
            {
                snapshot.unread.remove(&optional);
            }
        }
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
            AMISS
        } else {
            0
        })
    }

    async fn gpu_node(&self, name: &str) -> anyhow::Result<GpuNode> {
        let path = list_path(Kind::GpuNodes, None);
        act::get(&self.client, &path, name)
            .await
            .with_context(|| format!("failed to read GpuNode {name}"))
    }

    async fn drain(&mut self, arguments: &DrainArgs) -> anyhow::Result<u8> {
        let DrainArgs {
            node: name,
            gpus: wanted,
            yes,
            dry_run,
            no_wait,
            timeout,
        } = arguments;
        let node = self.gpu_node(name).await?;
        let selected = drain::selected(&node, wanted)?;
        let patch = drain::drain_patch(&node, &selected);
        if *dry_run {
            return self.print_patch("gpunode", name, patch.as_ref());
        }
        if let Some(patch) = &patch {
            let kinds = [Kind::GpuNodes, Kind::Pods, Kind::OwnPods];
            let mut snapshot = self.read(&kinds, None).await?;
            read::read_metrics(&self.client, &mut snapshot, |node| node == name).await;
            writeln!(self.out, "{}", drain::cost(&snapshot, &node, &selected))?;
            if !*yes && !self.confirm("Go on?")? {
                writeln!(self.out, "Nothing was changed.")?;
                return Ok(AMISS);
            }
            let path = list_path(Kind::GpuNodes, None);
            let _: GpuNode = act::patch(&self.client, &path, name, patch)
                .await
                .with_context(|| format!("failed to change GpuNode {name}"))?;
        }
        let uuids: BTreeSet<String> = selected.iter().map(|gpu| gpu.uuid.clone()).collect();
        writeln!(
            self.out,
            "Undo: kubectl bursar undrain {name} {}",
            uuids.iter().cloned().collect::<Vec<_>>().join(" ")
        )?;
        if *no_wait {
            return Ok(0);
        }
        let start = Instant::now();
        let deadline = start + Duration::from_secs(u64::try_from(*timeout).unwrap_or(0));
        loop {
            let left = drain::not_drained(&self.gpu_node(name).await?, &uuids);
            if left.is_empty() {
                writeln!(
                    self.out,
                    "{name}: drained after {:.1}s. Other processes may have /dev/nvidia* open: fuser -v /dev/nvidia*",
                    start.elapsed().as_secs_f64()
                )?;
                return Ok(0);
            }
            if Instant::now() >= deadline {
                writeln!(
                    self.out,
                    "{name} is not drained after {timeout}s: {}",
                    left.join(", ")
                )?;
                return Ok(AMISS);
            }
            sleep(LOOK).await;
        }
    }

    async fn undrain(
        &mut self,
        name: &str,
        wanted: &[String],
        dry_run: bool,
    ) -> anyhow::Result<u8> {
        let node = self.gpu_node(name).await?;
        let selected = if wanted.is_empty() {
            None
        } else {
            Some(drain::selected(&node, wanted)?)
        };
        let patch = drain::undrain_patch(&node, selected.as_deref());
        if dry_run {
            return self.print_patch("gpunode", name, patch.as_ref());
        }
        let Some(patch) = patch else {
            writeln!(self.out, "{name}: no such GPU is drained.")?;
            return Ok(0);
        };
        let path = list_path(Kind::GpuNodes, None);
        let _: GpuNode = act::patch(&self.client, &path, name, &patch)
            .await
            .with_context(|| format!("failed to change GpuNode {name}"))?;
        writeln!(
            self.out,
            "{name}: the agent probes the GPUs, and offers them to pods again."
        )?;
        Ok(0)
    }

    async fn resize(
        &mut self,
        name: &str,
        amount: Option<&str>,
        dry_run: bool,
    ) -> anyhow::Result<u8> {
        let namespace = self.namespace();
        let pods = list_path(Kind::Pods, Some(&namespace));
        let pod: Pod = act::get(&self.client, &pods, name)
            .await
            .with_context(|| format!("failed to read pod {namespace}/{name}"))?;
        let path = list_path(Kind::Budgets, Some(&namespace));
        let budget: GpuMemoryBudget = act::get(&self.client, &path, "default").await.with_context(|| {
            format!("failed to read GpuMemoryBudget {namespace}/default, which has the quotas of running pods")
        })?;
        let patch = resize::patch(&budget, &pod, amount)?;
        if dry_run {
            let budget = format!("gpumemorybudget -n {namespace}");
            return self.print_patch(&budget, "default", patch.as_ref());
        }
        if let Some(patch) = &patch {
            let _: GpuMemoryBudget = act::patch(&self.client, &path, "default", patch)
                .await
                .with_context(|| format!("failed to change GpuMemoryBudget {namespace}/default"))?;
        }
        let bytes = amount.map(parse_bytes).transpose()?;
        let deadline = Instant::now() + RESIZE_TIMEOUT;
        let nodes = list_path(Kind::GpuNodes, None);
        loop {
            match act::get::<GpuNode>(&self.client, &nodes, &pod.spec.node_name).await {
                Ok(node) => {
                    if let Some(text) = resize::state(&node, &pod, bytes) {
                        writeln!(self.out, "{text}")?;
                        return Ok(0);
                    }
                }
                Err(error) => {
                    writeln!(
                        self.out,
                        "The budget is changed; whether the agent has applied it is not known: could not read the GpuNode: {}",
                        read::reason(&error)
                    )?;
                    return Ok(0);
                }
            }
            if Instant::now() >= deadline {
                writeln!(
                    self.out,
                    "The budget is changed, and the agent has not applied it after {}s: see kubectl bursar doctor",
                    RESIZE_TIMEOUT.as_secs()
                )?;
                return Ok(AMISS);
            }
            sleep(LOOK).await;
        }
    }

    fn print_patch(&mut self, kind: &str, name: &str, patch: Option<&Value>) -> anyhow::Result<u8> {
        match patch {
            Some(patch) => writeln!(
                self.out,
                "kubectl patch {kind} {name} --type merge -p '{patch}'"
            )?,
            None => writeln!(self.out, "Nothing would change.")?,
        }
        Ok(0)
    }

    fn confirm(&mut self, question: &str) -> anyhow::Result<bool> {
        write!(self.out, "{question} [y/N] ")?;
        self.out.flush()?;
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer)?;
        Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
    }

    async fn support(&mut self, file: &std::path::Path) -> anyhow::Result<u8> {
        let kinds = [
            Kind::GpuNodes,
            Kind::Budgets,
            Kind::Pods,
            Kind::OwnPods,
            Kind::DaemonSets,
            Kind::Deployments,
            Kind::Nodes,
            Kind::Namespaces,
            Kind::Quotas,
            Kind::AgentEvents,
            Kind::OperatorEvents,
        ];
        let mut snapshot = self.read(&kinds, None).await?;
        let (server, clock) = read::server(&self.client).await.map_err(unreachable)?;
        snapshot.server_version = Some(server);
        snapshot.now = clock.unwrap_or(snapshot.now);
        let mut configuration = None;
        if let Some(set) = snapshot
            .daemon_sets
            .iter()
            .find(|set| set.metadata.name.ends_with("-agent"))
        {
            let path = format!("/api/v1/namespaces/{}/configmaps", set.metadata.namespace);
            configuration = act::get::<Value>(&self.client, &path, &set.metadata.name)
                .await
                .ok();
        }
        let data = configuration
            .as_ref()
            .map(|configuration| &configuration["data"]);
        let mut files = support::files(&snapshot, data);
        for pod in &snapshot.own_pods {
            let request = http::Request::get(format!(
                "/api/v1/namespaces/{}/pods/{}/log?tailLines={LOG_LINES}",
                pod.metadata.namespace, pod.metadata.name
            ));
            let request = request.body(Vec::new()).map_err(kube::Error::HttpError)?;
            match self.client.request_text(request).await {
                Ok(log) => files.push(support::File::log(&pod.metadata.name, &log)),
                Err(error) => writeln!(
                    self.out,
                    "could not read the log of {}: {}",
                    pod.metadata.name,
                    read::reason(&error)
                )?,
            }
        }
        write!(self.out, "{}", support::listing(&files))?;
        self.print_unread(&snapshot)?;
        if file.as_os_str() != "-" {
            std::fs::write(file, support::archive(&files)?)
                .with_context(|| format!("failed to write {}", file.display()))?;
            writeln!(self.out, "wrote {}", file.display())?;
        }
        Ok(0)
    }

    async fn uninstall(&mut self) -> anyhow::Result<u8> {
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
        for kind in [Kind::GpuNodes, Kind::Budgets] {
            if snapshot
                .unread
                .get(&kind)
                .is_some_and(|reason| reason == "the API server does not have it")
            {
                snapshot.unread.remove(&kind);
            }
        }
        let text = uninstall::render(&snapshot, self.terminal);
        self.out.write_all(text.as_bytes())?;
        Ok(
            if uninstall::remainders(&snapshot).is_empty() && snapshot.unread.is_empty() {
                0
            } else {
                AMISS
            },
        )
    }

    /// Writes an Event for each running pod with GPU memory.
    async fn notify_of_uninstall(&mut self) -> anyhow::Result<u8> {
        let snapshot = self.read(&[Kind::Pods], None).await?;
        required(&snapshot, Kind::Pods)?;
        let (mut told, mut failed) = (0, 0);
        for pod in notify::pods(&snapshot) {
            let path = format!(
                "/apis/events.k8s.io/v1/namespaces/{}/events",
                pod.metadata.namespace
            );
            let event = notify::event(pod, snapshot.now);
            match act::create(&self.client, &path, &event).await {
                // An earlier run has told the pod.
                Err(kube::Error::Api(answer)) if answer.is_already_exists() => told += 1,
                Ok(()) => told += 1,
                Err(error) => {
                    failed += 1;
                    let reason = read::reason(&error);
                    writeln!(self.out, "{} could not be told: {reason}", pod.key())?;
                }
            }
        }
        let (told, reason) = (count(told, "pod"), notify::REASON);
        writeln!(self.out, "{told} with GPU memory told by an Event {reason}")?;
        Ok(if failed == 0 { 0 } else { AMISS })
    }

    async fn version(&mut self) -> anyhow::Result<u8> {
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

/// Fails where a command is of no use without a kind.
fn required(snapshot: &Snapshot, kind: Kind) -> anyhow::Result<()> {
    match snapshot.unread.get(&kind) {
        Some(reason) => bail!("failed to read {}: {reason}", kind.name()),
        None => Ok(()),
    }
}

fn unreachable(error: kube::Error) -> anyhow::Error {
    anyhow::anyhow!("failed to reach the API server: {}", read::reason(&error))
}

fn selector_of(text: &str) -> anyhow::Result<Vec<(String, String)>> {
    text.split(',')
        .map(|pair| {
            let (key, value) = pair.split_once('=').with_context(|| {
                format!("failed to parse selector {text}: write key=value, with commas between")
            })?;
            Ok((
                key.trim().to_owned(),
                value.trim_start_matches('=').trim().to_owned(),
            ))
        })
        .collect()
}

/// Rewrites a manifest. Needs no cluster.
///
/// # Errors
/// Names the field that has no counterpart, or the file that could not be read.
pub fn convert(arguments: &ConvertArgs, out: &mut impl Write) -> anyhow::Result<u8> {
    use std::io::Read as _;
    let mut text = String::new();
    let name = arguments.file.display();
    let input: Box<dyn std::io::Read> = if arguments.file.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        Box::new(
            std::fs::File::open(&arguments.file)
                .with_context(|| format!("failed to read {name}"))?,
        )
    };
    input
        .take(convert::MAX_BYTES + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("failed to read {name}"))?;
    if text.len() as u64 > convert::MAX_BYTES {
        bail!(
            "failed to read {name}: more than {} MiB",
            convert::MAX_BYTES >> 20
        );
    }
    let assumptions = Assumptions {
        gpu_memory: arguments
            .gpu_memory
            .as_deref()
            .map(parse_bytes)
            .transpose()?,
        replicas: arguments.replicas,
        quantum: arguments.quantum,
    };
    let converted = convert::convert(&text, assumptions)?;
    for note in &converted.notes {
        eprintln!("{note}");
    }
    out.write_all(converted.yaml.as_bytes())?;
    Ok(0)
}
