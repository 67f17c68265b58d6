//! Runs the commands that show tables.

use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::sleep;

use super::{FAILED, Session, required};
use crate::args::{TopArgs, TopKind};
use crate::read::Wanted;
use crate::show::{budgets, events, gpus, retained, top};
use crate::snapshot::Kind;

/// How often `-w` prints.
const WATCH: Duration = Duration::from_secs(2);

impl<W: Write> Session<'_, W> {
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

    pub(super) async fn top(&mut self, arguments: &TopArgs) -> anyhow::Result<u8> {
        let mut kinds = vec![Kind::Pods, Kind::GpuNodes];
        match arguments.what {
            TopKind::Namespaces => kinds.push(Kind::Budgets),
            TopKind::Pods if !arguments.no_usage => {
                kinds.extend([Kind::OwnPods, Kind::AgentMetrics])
            }
            TopKind::Pods => {}
        }
        loop {
            let selector = arguments.selector.as_deref();
            let snapshot = match arguments.what {
                TopKind::Pods => {
                    self.read_wanted(Wanted {
                        kinds: &kinds,
                        namespace: self.scope().as_deref(),
                        selector,
                    })
                    .await?
                }
                TopKind::Namespaces => self.read_namespaces(&kinds, Kind::Pods, selector).await?,
            };
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

    pub(super) async fn gpus(&mut self, node: Option<&str>, watch: bool) -> anyhow::Result<u8> {
        loop {
            let snapshot = self.read(&[Kind::GpuNodes, Kind::Pods], None).await?;
            required(&snapshot, Kind::GpuNodes)?;
            if let Some(node) = node {
                let found = snapshot.gpu_node(node);
                let found = found.with_context(|| {
                    format!("failed to find GpuNode {node}: no agent has written one")
                })?;
                let text = gpus::without_gpus(found).filter(|_| self.global.output.is_table());
                if let Some(text) = text {
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

    pub(super) async fn budgets(&mut self, watch: bool) -> anyhow::Result<u8> {
        loop {
            let kinds = [Kind::Budgets, Kind::GpuNodes, Kind::Nodes];
            let snapshot = self.read_namespaces(&kinds, Kind::Budgets, None).await?;
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

    pub(super) async fn retained(&mut self) -> anyhow::Result<u8> {
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

    pub(super) async fn events(&mut self, since: Option<i64>) -> anyhow::Result<u8> {
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
}
