//! Runs each command of the harness.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use bursar_e2e::artifacts::Artifacts;
use bursar_e2e::chart::{self, Chart};
use bursar_e2e::cli_archive;
use bursar_e2e::cluster::{self, Cluster, ClusterOptions, ClusterScope, LocalCluster, RunFolder};
use bursar_e2e::demo;
use bursar_e2e::environment::{Environment, PROBE};
use bursar_e2e::images::Template;
use bursar_e2e::kube;
use bursar_e2e::node;
use bursar_e2e::pack;
use bursar_e2e::progress::Progress;
use bursar_e2e::release::{self, ReleaseOptions};
use bursar_e2e::soak;
use bursar_e2e::verify;
use bursar_e2e::workspace::Profile;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{Args, BursarArgs, ClusterName, Command, ExternalCluster};

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let progress = Progress::start();
    match args.command {
        // The node process changes namespaces, which requires that no thread exists.
        Command::Node { cluster } => node::run(&RunFolder::of(&cluster.name)?)?,
        Command::Verify(args) => return Ok(verify::run(&args)?),
        Command::Build => {
            kube::build(&progress)?;
            progress.report("Kubernetes is built");
        }
        Command::Up {
            cluster,
            bare,
            bursar,
        } => interruptible(up(cluster.name, bare, bursar, progress))?,
        Command::Demo {
            cluster,
            external:
                ExternalCluster {
                    kubeconfig: Some(kubeconfig),
                    images,
                },
            keep,
            bursar,
        } => {
            let ClusterName { name: _ } = cluster;
            block_on(demo_on_external_cluster(
                kubeconfig, images, keep, bursar, progress,
            ))?
        }
        Command::Demo {
            cluster,
            external:
                ExternalCluster {
                    kubeconfig: None,
                    images: _,
                },
            keep,
            bursar,
        } => interruptible(demo(cluster.name, keep, bursar, progress))?,
        Command::CliArchive { to, target } => write_cli_archive(&to, target, &progress)?,
        Command::Release(args) => make_release(&args.options(), &progress)?,
        Command::Pack { out } => interruptible(pack(out, progress))?,
        Command::Soak {
            cluster,
            minutes,
            images,
        } => {
            let length = Duration::from_secs(60 * minutes);
            let probe = images.reference(PROBE);
            let soak = soak::run(&cluster.name, length, &probe, &progress);
            println!("{}", block_on(soak)?);
        }
        Command::Down { cluster } => {
            interruptible(async move { Ok(cluster::down(&cluster.name).await?) })?
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn write_cli_archive(to: &Path, target: Option<String>, progress: &Progress) -> anyhow::Result<()> {
    let target = target.unwrap_or_else(cli_archive::default_target);
    let program = cli_archive::build(&target)?;
    let archive = cli_archive::write(&program, &target, cli_archive::VERSION, to)?;
    progress.report(format_args!(
        "{} for {target}, and {}",
        archive.display(),
        to.join(cli_archive::MANIFEST).display()
    ));
    Ok(())
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Runtime::new().context("runtime")?;
    runtime.block_on(work)
}

/// Runs `work` until it completes or the process receives a signal. Both drop the values of `work`,
/// which takes local clusters down.
fn interruptible<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    block_on(async {
        tokio::select! {
            result = work => result,
            stop = stop_signal() => anyhow::bail!("{}; everything is taken down", stop?),
        }
    })
}

/// Waits for Ctrl-C or SIGTERM, and returns which of them arrived.
async fn stop_signal() -> anyhow::Result<&'static str> {
    let mut terminate = signal(SignalKind::terminate()).context("signals")?;
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed.context("signals").map(|()| "interrupted"),
        _ = terminate.recv() => Ok("terminated"),
    }
}

async fn up(
    name: String,
    bare: bool,
    bursar: BursarArgs,
    progress: Progress,
) -> anyhow::Result<()> {
    let harness = std::env::current_exe().context("this program's path")?;
    let (images, local) = if bare {
        let toolbox = kube::build(&progress)?;
        let local = LocalCluster::up(
            ClusterOptions {
                name,
                harness,
                toolbox,
                scope: ClusterScope::WithNode,
            },
            &progress,
        );
        (None, local.await?)
    } else {
        let artifacts = open_or_build_artifacts(bursar, &progress)?;
        let environment = Environment::start(&artifacts, &name, &progress).await?;
        (Some(artifacts.image_template), into_local(environment)?)
    };
    let folder = local.detach().await?;
    println!("export KUBECONFIG={}", folder.kubeconfig().display());
    if let Some(images) = images {
        println!("export BURSAR_IMAGES='{images}'");
    }
    Ok(())
}

async fn demo(
    name: String,
    keep: bool,
    bursar: BursarArgs,
    progress: Progress,
) -> anyhow::Result<()> {
    let artifacts = open_or_build_artifacts(bursar, &progress)?;
    let environment = Environment::start(&artifacts, &name, &progress).await?;
    let table = demo::run(&environment, &progress).await?;
    println!("\n{table}");
    let local = into_local(environment)?;
    if !keep {
        local.down()?;
        progress.report("everything is taken down");
        return Ok(());
    }
    let folder = local.detach().await?;
    println!("The cluster is left running. To look around, and to end it:\n");
    println!("  export KUBECONFIG={}", folder.kubeconfig().display());
    let program = std::env::current_exe().context("this program's path")?;
    // kubectl, its plugin and helm, without the PATH of this process.
    let tools = artifacts.toolbox.folders();
    let tools = program.parent().into_iter().chain(tools);
    let tools: Vec<String> = tools.map(|folder| folder.display().to_string()).collect();
    println!("  export PATH={}:$PATH", tools.join(":"));
    let has_plugin = program.with_file_name("kubectl-bursar").exists();
    println!(
        "  kubectl {} -A",
        if has_plugin { "bursar top" } else { "get pods" }
    );
    println!("  kubectl delete namespace {}", demo::NAMESPACES.join(" "));
    let harness = match pack::unpacked_folder(&program) {
        Some(_) => program.display().to_string(),
        None => "cargo e2e".to_owned(),
    };
    println!("  {harness} down --name {name}");
    Ok(())
}

fn into_local(environment: Environment) -> anyhow::Result<LocalCluster> {
    match environment.cluster {
        Cluster::Local(local) => Ok(*local),
        Cluster::External { .. } => anyhow::bail!("the cluster that was started is not ours"),
    }
}

/// Runs the demo on the user's cluster. The harness deletes the demo's namespaces afterwards, even
/// after a failure; Bursar stays installed.
async fn demo_on_external_cluster(
    kubeconfig: PathBuf,
    images: Option<Template>,
    keep: bool,
    bursar: BursarArgs,
    progress: Progress,
) -> anyhow::Result<()> {
    let images = images.context(
        "failed to use the cluster: no --images, and no release is published; make a release by \
         docs/internals/release.md, and name its images, such as host/bursar/{name}:0.1.0-rc.1",
    )?;
    let program = std::env::current_exe().context("this program's path")?;
    let mut chart = match pack::unpacked_folder(&program) {
        Some(folder) => pack::open(&folder)?.chart,
        None => Chart::of_repository(kube::build(&progress)?.program("helm")),
    };
    chart.replace(bursar.chart);
    let environment = Environment::attach(kubeconfig, &chart, &images, &progress).await?;
    let outcome = tokio::select! {
        outcome = demo::run(&environment, &progress) => outcome.map_err(anyhow::Error::from),
        stop = stop_signal() => Err(anyhow::anyhow!(stop?)),
    };
    if let Ok(table) = &outcome {
        println!("\n{table}");
    }
    if keep {
        println!("Left as they are: {}", demo::NAMESPACES.join(", "));
    } else {
        demo::clean_up(&environment).await?;
        progress.report(format_args!(
            "the demo's namespaces are deleted; Bursar stays in {}",
            chart::NAMESPACE
        ));
    }
    outcome.map(drop)
}

async fn pack(out: PathBuf, progress: Progress) -> anyhow::Result<()> {
    let artifacts = Artifacts::for_archive(&progress)?;
    let bytes = pack::write(&artifacts, &out, &progress).await?;
    let mib = bytes as f64 / f64::from(1 << 20);
    progress.report(format_args!("{}: {mib:.1} MiB", out.display()));
    println!("On the other machine, as root:\n");
    println!(
        "  tar --extract --file {}",
        out.file_name().unwrap_or_default().display()
    );
    println!("  bursar-e2e/run demo");
    Ok(())
}

/// Makes a release of programs that are built for it, or of parts that are there.
fn make_release(options: &ReleaseOptions, progress: &Progress) -> anyhow::Result<()> {
    // A version without an entry is an error before the minutes of the build.
    release::changelog_entry(options.version.as_str())?;
    let programs = match options.parts.is_empty() {
        true => Some(release::build_programs(progress)?),
        false => None,
    };
    let release = release::make(options, programs.as_ref(), progress)?;
    for image in release.images.values() {
        println!("{image}");
    }
    if let Some(chart) = release.chart {
        println!("{chart}");
    }
    println!("{}", release.folder.display());
    Ok(())
}

fn open_or_build_artifacts(bursar: BursarArgs, progress: &Progress) -> anyhow::Result<Artifacts> {
    let harness = std::env::current_exe().context("this program's path")?;
    if let Some(folder) = pack::unpacked_folder(&harness) {
        return Ok(pack::open(&folder)?);
    }
    let profile = if bursar.release {
        Profile::Release
    } else {
        Profile::Dev
    };
    let mut artifacts = Artifacts::from_workspace(profile, harness, progress)?;
    artifacts.chart.replace(bursar.chart);
    Ok(artifacts)
}
