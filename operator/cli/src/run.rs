//! Runs a command: reads a snapshot, and prints what the pure functions make of it.

mod change;
mod explain;
mod installation;
mod roll;
mod show;

use std::io::Write;

use anyhow::{Context as _, bail};
use kube::Client;
use serde_json::Value;

use crate::act::resize::Resized;
use crate::args::{Command, Global, Output};
use crate::read::{self, Wanted};
use crate::snapshot::{Kind, Snapshot};
use crate::table::Terminal;

/// The command found a problem in the cluster, or its change was declined or is not confirmed.
pub const PROBLEM: u8 = 1;
/// The command line is wrong, or the API server refused.
pub const FAILED: u8 = 2;

/// The tools of a command besides its arguments.
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
        let selector = None;
        self.read_wanted(Wanted {
            kinds,
            namespace,
            selector,
        })
        .await
    }

    async fn read_wanted(&self, wanted: Wanted<'_>) -> anyhow::Result<Snapshot> {
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

    /// The objects of a kind as the API server has them, for an output that shows them whole.
    async fn whole(&self, kind: Kind, namespace: Option<&str>) -> anyhow::Result<Vec<Value>> {
        match self.global.output {
            Output::Json | Output::Yaml => read::objects(&self.client, kind, namespace)
                .await
                .with_context(|| format!("failed to read {}", kind.name())),
            Output::Table | Output::Wide | Output::Name => Ok(Vec::new()),
        }
    }

    /// Prints below a table the objects that could not be parsed.
    fn print_unreadable(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        if self.global.output.is_table() {
            for note in snapshot.unreadable_notes() {
                writeln!(self.out, "{note}")?;
            }
        }
        Ok(())
    }

    /// Prints below a table what could not be read.
    fn print_unread(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        if self.global.output.is_table() {
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
            Command::Explain { target, name } => self.explain(target, name.as_deref()).await,
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
                managed,
                dry_run,
                reset: _,
            } => {
                let resized = match managed {
                    true => Resized::Managed,
                    false => Resized::Device,
                };
                let quota = amount.as_deref().map(|amount| (resized, amount));
                self.resize(pod, quota, *dry_run).await
            }
            Command::Roll(arguments) => self.roll(arguments).await,
            Command::Events { since } => self.events(*since).await,
            Command::Support { file } => self.support(file).await,
            Command::Uninstall { notify: true, .. } => self.notify_of_uninstall().await,
            Command::Uninstall { .. } => self.uninstall().await,
            Command::Version { .. } => self.version().await,
            Command::Completion { .. } | Command::Complete { .. } => {
                bail!("this command needs no cluster")
            }
        }
    }

    /// Reads objects of all namespaces unless `-n` names one. A tenant that may not read all
    /// objects of `kind` gets those of its own namespace.
    async fn read_namespaces(
        &self,
        kinds: &[Kind],
        kind: Kind,
        selector: Option<&str>,
    ) -> anyhow::Result<Snapshot> {
        let read = |namespace| {
            self.read_wanted(Wanted {
                kinds,
                namespace,
                selector,
            })
        };
        let namespace = self.namespace();
        if self.global.namespace.is_some() && !self.global.all_namespaces {
            return read(Some(&namespace)).await;
        }
        let snapshot = read(None).await?;
        if snapshot.has_all(kind) || self.global.all_namespaces {
            return Ok(snapshot);
        }
        read(Some(&namespace)).await
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
