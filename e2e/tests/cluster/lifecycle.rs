//! Checks that a cluster which ran a pod leaves nothing behind, neither after a stop nor after a
//! kill.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use bursar_e2e::cluster::{ClusterOptions, ClusterScope, LocalCluster, RunFolder};
use bursar_e2e::images;
use bursar_e2e::kube;
use bursar_e2e::pods::{PodBuilder, Pods};
use bursar_e2e::progress::Progress;
use libtest_mimic::{Failed, Trial};

use crate::shared_cluster;

const BOUND: Duration = Duration::from_secs(180);
const REAPING: Duration = Duration::from_secs(30);

pub(crate) fn trials() -> Vec<Trial> {
    let trials = vec![
        Trial::test("main/cluster/leaves-nothing", || {
            leaves_nothing(|local| Ok(local.down()?))
        }),
        Trial::test("main/cluster/swept", || {
            leaves_nothing(|local| {
                let pid = fs::read_to_string(local.folder().pid())?;
                let pid = pid
                    .trim()
                    .parse()
                    .ok()
                    .and_then(rustix::process::Pid::from_raw);
                rustix::process::kill_process(pid.ok_or("no pid")?, rustix::process::Signal::KILL)?;
                let folder = local.folder().clone();
                drop(local);
                Ok(folder.clean_up()?)
            })
        }),
    ];
    let yours = shared_cluster::kubeconfig().is_some();
    let ignored = |trial: Trial| trial.with_ignored_flag(yours);
    trials.into_iter().map(ignored).collect()
}

/// Starts a cluster, runs a pod and ends the cluster by `end`, and compares the machine before and
/// after.
fn leaves_nothing(end: impl FnOnce(LocalCluster) -> Result<(), Failed>) -> Result<(), Failed> {
    // The shared cluster would change the machine between both comparisons.
    shared_cluster::take_down();
    let progress = Progress::start();
    let toolbox = kube::build(&progress)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let before = SystemState::now("life")?;
    runtime.block_on(async {
        let options = ClusterOptions {
            name: "life".to_owned(),
            harness: crate::harness(),
            toolbox,
            scope: ClusterScope::WithNode,
        };
        let local = LocalCluster::up(options, &progress).await?;
        run_a_pod(&local).await?;
        end(local)
    })?;
    // The machine's first process reaps orphans with some delay.
    let until = Instant::now() + REAPING;
    let mut after = SystemState::now("life")?;
    while !after.leftovers_since(&before).is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
        after = SystemState::now("life")?;
    }
    let left = after.leftovers_since(&before);
    assert!(left.is_empty(), "changed by the cluster: {left:#?}");
    Ok(())
}

async fn run_a_pod(local: &LocalCluster) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let archive = images::write_pause(folder.path())?;
    local.import_image(&archive.path).await?;
    let pods = Pods::in_namespace(&local.client(), "default").await?;
    pods.create(&PodBuilder::new("plain", images::PAUSE))
        .await?;
    pods.wait_until_running("plain", BOUND).await?;
    Ok(())
}

/// The traces that a cluster could leave on this machine.
#[derive(Debug)]
struct SystemState {
    mounts: BTreeSet<String>,
    links: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    processes: BTreeSet<String>,
    folders: BTreeSet<String>,
    logs: BTreeSet<String>,
    settings: BTreeSet<String>,
}

impl SystemState {
    fn now(cluster: &str) -> Result<Self, Failed> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let run = RunFolder::of(cluster)?;
        let watched = [
            "/var/lib/kubelet",
            "/run/containerd",
            "/run/netns",
            "/var/lib/cni",
            "/run/cdi",
            "/etc/cni",
        ];
        let folders = watched.iter().map(Path::new).chain([run.path()]);
        let settings = [
            "vm/overcommit_memory",
            "kernel/panic",
            "kernel/panic_on_oops",
            "net/ipv4/ip_forward",
        ];
        Ok(Self {
            mounts: mounts.lines().map(str::to_owned).collect(),
            links: names("/sys/class/net")?,
            cgroups: cgroups(Path::new("/sys/fs/cgroup")),
            processes: processes(),
            folders: folders
                .filter(|path| path.exists())
                .map(|path| path.display().to_string())
                .collect(),
            logs: names("/var/log/containers").unwrap_or_default(),
            settings: settings
                .iter()
                .filter_map(|name| {
                    let value = fs::read_to_string(format!("/proc/sys/{name}")).ok()?;
                    Some(format!("{name} = {}", value.trim_end()))
                })
                .collect(),
        })
    }
}

impl SystemState {
    /// Returns the differences from `before`, with a `+` or a `-`.
    fn leftovers_since(&self, before: &Self) -> Vec<String> {
        let Self {
            mounts,
            links,
            cgroups,
            processes,
            folders,
            logs,
            settings,
        } = self;
        let pairs = [
            (mounts, &before.mounts),
            (links, &before.links),
            (cgroups, &before.cgroups),
            (folders, &before.folders),
            (logs, &before.logs),
            (settings, &before.settings),
        ];
        let mut found = Vec::new();
        for (now, then) in pairs {
            found.extend(now.difference(then).map(|new| format!("+ {new}")));
            found.extend(then.difference(now).map(|lost| format!("- {lost}")));
        }
        // Processes that existed before and have exited belong to others.
        let new = processes.difference(&before.processes);
        found.extend(new.map(|new| format!("+ {new}")));
        found
    }
}

fn names(folder: &str) -> Result<BTreeSet<String>, Failed> {
    let entries = fs::read_dir(folder)?.flatten();
    Ok(entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

/// Returns whether the path is that of another cluster of the harness, which may start and stop
/// meanwhile.
fn is_of_another_cluster(cgroup: &str) -> bool {
    cgroup.contains("bursar-e2e/") && !cgroup.contains("bursar-e2e/life")
}

/// Lists every cgroup with our name or the kubelet's in its path. Others appear and disappear by
/// themselves.
fn cgroups(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let path = entry.path().display().to_string();
            let is_own = path.contains("bursar-e2e/life") || path.contains("kubepods");
            if is_own && !is_of_another_cluster(&path) {
                found.insert(path);
            }
            found.append(&mut cgroups(&entry.path()));
        }
    }
    found
}

/// Lists every process of a program of the cluster, zombies included.
fn processes() -> BTreeSet<String> {
    const OURS: &[&str] = &["etcd", "kube-", "containerd", "runc", "pause", "bursar-e2e"];
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let cgroup = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        // The name of a test of the device plugin begins like the kubelet's.
        let is_ours =
            comm.trim_end() == "kubelet" || OURS.iter().any(|name| comm.starts_with(name));
        if is_ours && !is_of_another_cluster(&cgroup) {
            found.insert(format!("{pid} {}", comm.trim_end()));
        }
    }
    found
}
