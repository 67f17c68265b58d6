//! Runs the commands that show tables.

use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::sleep;

use super::{FAILED, Session, required};
use crate::args::{Output, TopArgs, TopKind};
use crate::read::{self, Wanted};
use crate::show::{self, budgets, events, gpus, retained, top};
use crate::snapshot::{Kind, Snapshot};
use crate::table::terminal_width;

/// How often `-w` prints.
const WATCH: Duration = Duration::from_secs(2);

impl<W: Write> Session<'_, W> {
    /// Prints once, or every two seconds until the program is stopped. A later read that fails, as
    /// while an API server restarts, ends no watch.
    async fn repeat(
        &mut self,
        watch: bool,
        mut print: impl AsyncFnMut(&mut Self) -> anyhow::Result<u8>,
    ) -> anyhow::Result<u8> {
        let code = print(self).await?;
        if !watch || code != 0 {
            return Ok(code);
        }
        loop {
            self.pause().await?;
            match print(self).await {
                Err(failure) if failure.is::<std::io::Error>() => return Err(failure),
                Err(failure) => eprintln!("kubectl bursar: {}", read::message(&failure)),
                Ok(_) => {}
            }
        }
    }

    async fn pause(&mut self) -> anyhow::Result<()> {
        self.out.flush()?;
        sleep(WATCH).await;
        if self.terminal.width.is_some() {
            self.terminal.width = terminal_width().or(self.terminal.width);
        }
        let separator = match self.global.output {
            Output::Yaml => "---\n",
            // Home, and clear to the end of the screen.
            _ if self.terminal.clears => "\u{1b}[H\u{1b}[J",
            _ => "",
        };
        Ok(self.out.write_all(separator.as_bytes())?)
    }

    pub(super) async fn top(&mut self, arguments: &TopArgs) -> anyhow::Result<u8> {
        let print = async |session: &mut Self| session.print_top(arguments).await;
        self.repeat(arguments.watch, print).await
    }

    async fn print_top(&mut self, arguments: &TopArgs) -> anyhow::Result<u8> {
        let mut kinds = vec![Kind::Pods, Kind::GpuNodes];
        match arguments.what {
            TopKind::Namespaces => kinds.push(Kind::Budgets),
            TopKind::Pods if !arguments.no_usage => {
                kinds.extend([Kind::OwnPods, Kind::AgentMetrics])
            }
            TopKind::Pods => {}
        }
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
        let is_refused = !snapshot.has_all(Kind::Pods) && snapshot.pods.is_empty();
        Ok(if is_refused { FAILED } else { 0 })
    }

    pub(super) async fn gpus(&mut self, node: Option<&str>, watch: bool) -> anyhow::Result<u8> {
        self.repeat(watch, async |session: &mut Self| {
            session.print_gpus(node).await
        })
        .await
    }

    async fn print_gpus(&mut self, node: Option<&str>) -> anyhow::Result<u8> {
        let mut snapshot = self.read(&[Kind::GpuNodes], None).await?;
        required(&snapshot, Kind::GpuNodes)?;
        if gpus::needs_pods(&snapshot) {
            snapshot.pods = self.read(&[Kind::Pods], None).await?.pods;
        }
        if let Some(node) = node {
            let found = snapshot.gpu_node(node);
            let found = found.with_context(|| not_found(&snapshot, node))?;
            let text = gpus::without_gpus(found).filter(|_| self.global.output.is_table());
            if let Some(text) = text {
                writeln!(self.out, "{text}")?;
            }
        }
        let mut whole = self.whole(Kind::GpuNodes, None).await?;
        whole.retain(|object| node.is_none_or(|node| object["metadata"]["name"] == node));
        self.print(
            |terminal| gpus::render(&snapshot, node, terminal),
            || show::list(&whole),
            || gpus::names(&snapshot, node),
        )?;
        self.print_unreadable(&snapshot)?;
        Ok(0)
    }

    pub(super) async fn budgets(&mut self, watch: bool) -> anyhow::Result<u8> {
        self.repeat(watch, async |session: &mut Self| {
            session.print_budgets().await
        })
        .await
    }

    async fn print_budgets(&mut self) -> anyhow::Result<u8> {
        let kinds = [Kind::Budgets, Kind::GpuNodes, Kind::Nodes];
        let snapshot = self.read_namespaces(&kinds, Kind::Budgets, None).await?;
        required(&snapshot, Kind::Budgets)?;
        let namespace = snapshot.namespace.as_deref();
        let whole = self.whole(Kind::Budgets, namespace).await?;
        self.print(
            |terminal| budgets::render(&snapshot, terminal),
            || show::list(&whole),
            || budgets::names(&snapshot),
        )?;
        self.print_unreadable(&snapshot)?;
        Ok(0)
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

/// Why a node has no GpuNode to show.
fn not_found(snapshot: &Snapshot, node: &str) -> String {
    let mut unreadable = snapshot.unreadable.iter();
    match unreadable.find(|object| object.kind == Kind::GpuNodes && object.name == node) {
        Some(object) => format!(
            "failed to parse GpuNode {node}: {}; use the kubectl bursar of the chart's version",
            object.error
        ),
        None => format!("failed to find GpuNode {node}: no agent has written one"),
    }
}
