//! One function a command.

use std::future::Future;
use std::process::ExitCode;

use anyhow::Context;
use bursar_e2e::chart::Chart;
use bursar_e2e::cluster::{self, Cluster, Local, Options, RunFolder};
use bursar_e2e::demo;
use bursar_e2e::kube;
use bursar_e2e::node;
use bursar_e2e::progress::Progress;
use bursar_e2e::scene::Scene;
use bursar_e2e::supplies::Supplies;
use bursar_e2e::verify;
use bursar_e2e::workspace::Profile;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{Args, Bursar, Command};

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let progress = Progress::start();
    match args.command {
        // Before any thread exists: it changes namespaces.
        Command::Node { cluster } => node::run(&RunFolder::of(&cluster.name)?)?,
        Command::Verify(args) => return Ok(verify::run(&args)?),
        Command::Build => {
            kube::build(&progress)?;
            progress.say("Kubernetes is built");
        }
        Command::Up {
            cluster,
            bare,
            bursar,
        } => interruptible(up(cluster.name, bare, bursar, progress))?,
        Command::Demo {
            cluster,
            keep,
            bursar,
        } => interruptible(demo(cluster.name, keep, bursar, progress))?,
        Command::Down { cluster } => {
            interruptible(async move { Ok(cluster::down(&cluster.name).await?) })?
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `work` until it is done or a signal asks to stop; either way what it holds is dropped,
/// which takes clusters down.
fn interruptible<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Runtime::new().context("runtime")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("signals")?;
        tokio::select! {
            result = work => result,
            _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted; everything is taken down"),
            _ = terminate.recv() => anyhow::bail!("terminated; everything is taken down"),
        }
    })
}

async fn up(name: String, bare: bool, bursar: Bursar, progress: Progress) -> anyhow::Result<()> {
    let harness = std::env::current_exe().context("this program's path")?;
    let local = if bare {
        let toolbox = kube::build(&progress)?;
        Local::up(
            Options {
                name,
                harness,
                toolbox,
            },
            &progress,
        )
        .await?
    } else {
        let supplies = supplies(bursar, &progress)?;
        match Scene::start(&supplies, &name, &progress).await?.cluster {
            Cluster::Ours(local) => *local,
            Cluster::Yours { .. } => {
                anyhow::bail!("`up` starts a cluster of its own; unset KUBECONFIG")
            }
        }
    };
    let folder = local.keep().await?;
    println!("export KUBECONFIG={}", folder.kubeconfig().display());
    Ok(())
}

async fn demo(name: String, keep: bool, bursar: Bursar, progress: Progress) -> anyhow::Result<()> {
    let supplies = supplies(bursar, &progress)?;
    let scene = Scene::start(&supplies, &name, &progress).await?;
    let table = demo::run(&scene, &progress).await?;
    println!("\n{table}");
    match scene.cluster {
        Cluster::Ours(local) if keep => {
            let folder = local.keep().await?;
            let kubectl = supplies.toolbox.program("kubectl");
            println!("The cluster is left running. To look around, and to end it:\n");
            println!("  export KUBECONFIG={}", folder.kubeconfig().display());
            println!("  {} get pods --all-namespaces", kubectl.display());
            println!("  cargo e2e down --name {name}");
        }
        Cluster::Ours(local) => {
            local.down()?;
            progress.say("everything is taken down");
        }
        Cluster::Yours { .. } => {}
    }
    Ok(())
}

fn supplies(bursar: Bursar, progress: &Progress) -> anyhow::Result<Supplies> {
    let harness = std::env::current_exe().context("this program's path")?;
    let profile = if bursar.release {
        Profile::Release
    } else {
        Profile::Dev
    };
    let mut supplies = Supplies::from_workspace(profile, harness, progress)?;
    if let (Some(chosen), Chart::Helm { folder, .. }) = (bursar.chart, &mut supplies.chart) {
        *folder = chosen;
    }
    Ok(supplies)
}
