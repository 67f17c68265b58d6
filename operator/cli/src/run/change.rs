//! Runs the commands that change objects: `drain`, `undrain`, `resize`.

use std::collections::BTreeSet;
use std::io::{BufRead as _, Write};
use std::time::Duration;

use anyhow::Context as _;
use bursar_crds::quantity::parse_bytes;
use bursar_crds::{GpuMemoryBudget, GpuNode};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::{PROBLEM, Session};
use crate::act::resize::{self, Resized};
use crate::act::{self, drain};
use crate::args::DrainArgs;
use crate::objects::Pod;
use crate::read::{self, list_path};
use crate::snapshot::Kind;

/// How often a wait looks.
const LOOK: Duration = Duration::from_secs(1);

/// How long one look may take.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long `resize` waits for the agent.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(30);

impl<W: Write> Session<'_, W> {
    pub(super) async fn gpu_node(&self, name: &str) -> anyhow::Result<GpuNode> {
        let path = list_path(Kind::GpuNodes, None);
        act::get(&self.client, &path, name)
            .await
            .with_context(|| format!("failed to read GpuNode {name}"))
    }

    /// Reads a GpuNode for a wait that has `left`.
    async fn read_node(&self, name: &str, left: Duration) -> Result<GpuNode, kube::Error> {
        let path = list_path(Kind::GpuNodes, None);
        let answer = act::get(&self.client, &path, name);
        // The first look gets its time even from a wait of none.
        timeout(left.clamp(LOOK, LOOK_TIMEOUT), answer)
            .await
            .unwrap_or_else(|elapsed| Err(kube::Error::Service(elapsed.into())))
    }

    async fn change_gpu_node(
        &self,
        name: &str,
        patch_of: impl Fn(&GpuNode) -> anyhow::Result<Option<Value>>,
    ) -> anyhow::Result<bool> {
        let path = list_path(Kind::GpuNodes, None);
        act::change(&self.client, &path, name, patch_of)
            .await
            .with_context(|| format!("failed to change GpuNode {name}"))
    }

    pub(super) async fn drain(&mut self, arguments: &DrainArgs) -> anyhow::Result<u8> {
        let DrainArgs {
            node: name,
            gpus: wanted,
            yes,
            dry_run,
            no_wait,
            timeout: seconds,
        } = arguments;
        let node = self.gpu_node(name).await?;
        let selected = drain::selected(&node, wanted)?;
        let patch = drain::drain_patch(&node, &selected);
        if *dry_run {
            return self.print_patch("gpunode", name, patch.as_ref());
        }
        let uuids: BTreeSet<&str> = selected.iter().map(|gpu| &*gpu.uuid).collect();
        let uuids: Vec<String> = uuids.into_iter().map(str::to_owned).collect();
        if patch.is_some() {
            let kinds = [Kind::GpuNodes, Kind::Pods, Kind::OwnPods];
            let mut snapshot = self.read(&kinds, None).await?;
            read::read_metrics(&self.client, &mut snapshot, |node| node == name).await;
            writeln!(self.out, "{}", drain::cost(&snapshot, &node, &selected))?;
            if !*yes && !self.confirm("Go on?")? {
                writeln!(self.out, "Nothing was changed.")?;
                return Ok(PROBLEM);
            }
            self.change_gpu_node(name, |node| {
                Ok(drain::drain_patch(node, &drain::selected(node, &uuids)?))
            })
            .await?;
        }
        writeln!(
            self.out,
            "Undo: kubectl bursar undrain {name} {}{}",
            uuids.join(" "),
            self.global.connection()
        )?;
        match *no_wait {
            true => Ok(0),
            false => self.wait_until_drained(name, &uuids, *seconds).await,
        }
    }

    async fn wait_until_drained(
        &mut self,
        name: &str,
        uuids: &[String],
        seconds: i64,
    ) -> anyhow::Result<u8> {
        let start = Instant::now();
        let most = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        loop {
            let left = match self
                .read_node(name, most.saturating_sub(start.elapsed()))
                .await
            {
                Ok(node) => drain::not_drained(&node, uuids),
                Err(error) => vec![format!(
                    "could not read its GpuNode: {}",
                    read::reason(&error)
                )],
            };
            if left.is_empty() {
                writeln!(
                    self.out,
                    "{name}: drained after {:.1}s. Other processes may have /dev/nvidia* open: fuser -v /dev/nvidia*",
                    start.elapsed().as_secs_f64()
                )?;
                return Ok(0);
            }
            if start.elapsed() >= most {
                writeln!(
                    self.out,
                    "{name} is not drained after {seconds}s: {}",
                    left.join(", ")
                )?;
                return Ok(PROBLEM);
            }
            sleep(LOOK).await;
        }
    }

    pub(super) async fn undrain(
        &mut self,
        name: &str,
        wanted: &[String],
        dry_run: bool,
    ) -> anyhow::Result<u8> {
        let patch_of = |node: &GpuNode| {
            let selected = match wanted {
                [] => None,
                wanted => Some(drain::drained(node, wanted)?),
            };
            Ok(drain::undrain_patch(node, selected.as_deref()))
        };
        if dry_run {
            let patch = patch_of(&self.gpu_node(name).await?)?;
            return self.print_patch("gpunode", name, patch.as_ref());
        }
        if !self.change_gpu_node(name, patch_of).await? {
            writeln!(self.out, "{name}: no such GPU is drained.")?;
            return Ok(0);
        }
        writeln!(
            self.out,
            "{name}: the agent probes the GPUs, and offers them to pods again."
        )?;
        Ok(0)
    }

    pub(super) async fn resize(
        &mut self,
        name: &str,
        quota: Option<(Resized, &str)>,
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
        let patch = resize::patch(&budget, &pod, quota)?;
        if dry_run {
            let kind = format!("gpumemorybudget -n {namespace}");
            return self.print_patch(&kind, "default", patch.as_ref());
        }
        act::change(&self.client, &path, "default", |budget| {
            Ok(resize::patch(budget, &pod, quota)?)
        })
        .await
        .with_context(|| format!("failed to change GpuMemoryBudget {namespace}/default"))?;
        let quota = match quota {
            Some((resized, amount)) => Some((resized, parse_bytes(amount)?)),
            None => None,
        };
        self.wait_until_resized(&pod, quota).await
    }

    async fn wait_until_resized(
        &mut self,
        pod: &Pod,
        quota: Option<(Resized, u64)>,
    ) -> anyhow::Result<u8> {
        let start = Instant::now();
        loop {
            let left = RESIZE_TIMEOUT.saturating_sub(start.elapsed());
            let unread = match self.read_node(&pod.spec.node_name, left).await {
                Ok(node) => {
                    if let Some(text) = resize::state(&node, pod, quota) {
                        writeln!(self.out, "{text}")?;
                        return Ok(0);
                    }
                    None
                }
                Err(error) => Some(error),
            };
            let is_late = start.elapsed() >= RESIZE_TIMEOUT;
            match unread {
                Some(error) if is_late || !is_transient(&error) => {
                    writeln!(
                        self.out,
                        "The budget is changed; whether the agent has applied it is not known: could not read the GpuNode: {}",
                        read::reason(&error)
                    )?;
                    return Ok(if is_late { PROBLEM } else { 0 });
                }
                None if is_late => {
                    writeln!(
                        self.out,
                        "The budget is changed, and the agent has not applied it after {}s: see kubectl bursar doctor",
                        RESIZE_TIMEOUT.as_secs()
                    )?;
                    return Ok(PROBLEM);
                }
                _ => sleep(LOOK).await,
            }
        }
    }

    fn print_patch(&mut self, kind: &str, name: &str, patch: Option<&Value>) -> anyhow::Result<u8> {
        match patch {
            // The object has another version by the time that the command is typed.
            Some(patch) => writeln!(
                self.out,
                "kubectl patch {kind} {name} --type merge -p '{}'",
                json!({ "spec": patch["spec"] })
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
}

/// Whether the same request may succeed later. The requests of a tenant that may not read GpuNodes
/// fail again.
fn is_transient(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        kube::Error::BuildRequest(_) => false,
        _ => true,
    }
}
