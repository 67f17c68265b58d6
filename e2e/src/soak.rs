//! Lets pods come and go on a running cluster for hours, in parts, and compares what Bursar holds
//! after the first part and after the last.
//!
//! ```text
//! up --name NAME -> soak --name NAME -> soak --name NAME ... -> down --name NAME
//!                     a part of load, its end, a sample        the samples: NAME/soak.json
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::future::try_join_all;
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant as Tick, sleep, sleep_until};

use crate::chart;
use crate::cluster::{Cluster, RunFolder};
use crate::pods::{PodBuilder, Pods};
use crate::progress::Progress;
use crate::raw_api::RawApi;

/// The namespace of the load.
const NAMESPACE: &str = "soak";
/// Loops of pods beside each other. Each starts a pod every [`PACE`]: 30 pods a minute on one node,
/// three times the 10 a minute of a node whose pods live for minutes.
const LOOPS: usize = 4;
const PACE: Duration = Duration::from_secs(8);
/// The timeout of each step of a pod's life.
const TIMEOUT: Duration = Duration::from_secs(180);
/// How long nothing runs before a sample: the agent ends idle threads, and forgets ended pods.
const REST: Duration = Duration::from_secs(30);
/// Folders of the node in which Bursar keeps files.
const FOLDERS: &[&str] = &["/run/bursar", "/run/cdi", "/var/lib/bursar"];
/// The metrics ports of the agent and of the operator in the chart.
const METRICS: &[(&str, u16)] = &[("agent", 9445), ("operator", 9401)];

/// The amounts that Bursar holds while no pod runs, by name.
type Sample = BTreeMap<String, u64>;

/// The parts that have ended, in the file that a later part continues.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Parts {
    seconds: u64,
    pods: u64,
    samples: Vec<Sample>,
}

/// Runs a part on the cluster `name`, and returns the table of the first and the last sample.
///
/// # Errors
/// When the cluster is not up, a pod does not start or end, or a value has grown since the first
/// part.
pub async fn run(
    name: &str,
    length: Duration,
    probe: &str,
    progress: &Progress,
) -> anyhow::Result<String> {
    let folder = RunFolder::of(name)?;
    anyhow::ensure!(
        folder.is_up()?,
        "failed to soak cluster {name}: it is not up; start it by `cargo e2e up --name {name}`"
    );
    let file = folder.path().join("soak.json");
    let mut parts: Parts = match fs::read(&file) {
        Ok(text) => serde_json::from_slice(&text).context(file.display().to_string())?,
        Err(_) => Parts::default(),
    };
    let client = Cluster::external(folder.kubeconfig()).await?.client();
    let pods = Pods::in_namespace(&client, NAMESPACE).await?;
    let objects = RawApi::new(client.clone());
    make_budget(&objects).await?;

    let begin = Instant::now();
    let loops = (0..LOOPS).map(|of| come_and_go(of, begin + length, &pods, &objects, probe));
    let ran: u64 = try_join_all(loops).await?.into_iter().sum();
    parts.seconds += begin.elapsed().as_secs();
    parts.pods += ran;
    sleep(REST).await;
    let sample = sample(&client, &folder).await?;
    parts.samples.push(sample);
    fs::write(&file, serde_json::to_vec_pretty(&parts)?)?;
    progress.report(format_args!("{ran} pods came and went in this part"));

    let (table, grown) = compare(&parts);
    anyhow::ensure!(grown.is_empty(), "{table}\nhas grown: {}", grown.join(", "));
    Ok(table)
}

async fn make_budget(objects: &RawApi) -> anyhow::Result<()> {
    let budgets = format!("/apis/bursar.dev/v1alpha1/namespaces/{NAMESPACE}/gpumemorybudgets");
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": { "name": "default" },
        "spec": { "deviceMemory": { "guaranteed": "16Gi", "limit": "32Gi" } },
    });
    match objects.create(&budgets, &budget).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        created => Ok(created.map(drop)?),
    }
}

/// Runs pods one after another until `end`, and returns how many. One in four faults once, one in
/// four is denied memory, and with one in four the budget is edited.
async fn come_and_go(
    of: usize,
    end: Instant,
    pods: &Pods,
    objects: &RawApi,
    probe: &str,
) -> anyhow::Result<u64> {
    let budget =
        format!("/apis/bursar.dev/v1alpha1/namespaces/{NAMESPACE}/gpumemorybudgets/default");
    let (mut ran, mut next) = (0, Tick::now() + PACE * u32::try_from(of)? / LOOPS as u32);
    while Instant::now() < end {
        sleep_until(next).await;
        next = (next + PACE).max(Tick::now());
        let name = format!("soak-{of}-{ran}");
        let pod = PodBuilder::new(&name, probe).gib(1 + (ran % 4) as u32);
        let pod = match (ran + of as u64) % 4 {
            0 => pod
                .arguments(&[
                    "fault",
                    "--times=1",
                    "--file=/count/faults",
                    "--bytes=128Mi",
                ])
                .with_empty_dir("/count")
                .restart_always(),
            1 => pod.arguments(&["greedy"]),
            _ => pod.arguments(&["hold", "--bytes=256Mi"]),
        };
        if ran % 4 == 3 {
            let policy = json!({ "spec": { "contextPolicy": { "maxRestarts": 3 + ran % 2 } } });
            objects.merge_patch(&budget, &policy).await?;
        }
        pods.create(&pod).await?;
        pods.wait_until_running(&name, TIMEOUT).await?;
        pods.delete(&name).await?;
        pods.wait_until_deleted(&name, TIMEOUT).await?;
        ran += 1;
    }
    Ok(ran)
}

/// Reads what Bursar holds.
async fn sample(client: &Client, folder: &RunFolder) -> anyhow::Result<Sample> {
    let mut sample = Sample::new();
    let mut root = None;
    for pid in folder.cgroup()?.processes() {
        let process = PathBuf::from(format!("/proc/{pid}"));
        // The process may have ended.
        let Ok(program) = fs::read_to_string(process.join("comm")) else {
            continue;
        };
        let program = program.trim_end();
        if program == "kubelet" {
            root = Some(process.join("root"));
        }
        if program.starts_with("bursar-") && program != "bursar-e2e" {
            add_process(&mut sample, program, &process);
        }
    }
    let root = root.context("failed to find the cluster's kubelet: it does not run")?;
    for folder in FOLDERS {
        let files = count_files(&root.join(folder.trim_start_matches('/')));
        sample.insert(format!("files in {folder}"), files);
    }
    for (component, port) in METRICS {
        let text = metrics(client, component, *port).await?;
        let series = text.lines().filter(|line| !line.starts_with('#')).count();
        sample.insert(format!("series of the {component}"), series as u64);
    }
    let request = Request::get("/metrics").body(Vec::new())?;
    let text = client.request_text(request).await?;
    sample.insert("objects of the API server".to_owned(), count_objects(&text));
    Ok(sample)
}

/// Adds a process to the values of its program. A value that cannot be read is that of a process
/// that has ended.
fn add_process(sample: &mut Sample, program: &str, process: &Path) {
    let entries = |of: &str| fs::read_dir(process.join(of)).map_or(0, |all| all.count() as u64);
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = resident.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let values = [
        ("descriptors", entries("fd")),
        ("threads", entries("task")),
        ("KiB resident", kib.unwrap_or_default()),
    ];
    for (what, value) in values {
        *sample.entry(format!("{what} of {program}")).or_default() += value;
    }
}

fn count_files(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let count = |path: PathBuf| match path.is_dir() && !path.is_symlink() {
        true => 1 + count_files(&path),
        false => 1,
    };
    entries.map(|entry| count(entry.path())).sum()
}

/// Counts the objects in the API server's metrics. Events end by themselves.
fn count_objects(metrics: &str) -> u64 {
    let counts = metrics.lines().filter_map(|line| {
        let (series, count) = line.rsplit_once(' ')?;
        let is_count = series.starts_with("apiserver_resource_objects{")
            && !series.contains("resource=\"events\"");
        is_count.then(|| count.parse::<f64>().ok())?
    });
    counts.sum::<f64>() as u64
}

async fn metrics(client: &Client, component: &str, port: u16) -> anyhow::Result<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), chart::NAMESPACE);
    let label = format!("app.kubernetes.io/component={component}");
    let found = pods
        .list(&ListParams::default().labels(&label))
        .await?
        .items;
    let pod = found
        .first()
        .with_context(|| format!("no pod of the {component}"))?;
    let (namespace, pod) = (chart::NAMESPACE, pod.name_any());
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/metrics");
    Ok(client
        .request_text(Request::get(path).body(Vec::new())?)
        .await?)
}

/// Returns the table of the first and the last sample, and what has grown between them.
fn compare(parts: &Parts) -> (String, Vec<String>) {
    let (Some(first), Some(last)) = (parts.samples.first(), parts.samples.last()) else {
        return (String::new(), Vec::new());
    };
    let Parts {
        seconds,
        pods,
        samples,
    } = parts;
    let mut table = format!(
        "{pods} pods in {} min, {} parts\n\n| nothing runs | after the first part | after the last |\n|---|---|---|\n",
        seconds / 60,
        samples.len()
    );
    let mut grown = Vec::new();
    for (name, last) in last {
        let first = first.get(name).copied().unwrap_or_default();
        table += &format!("| {name} | {first} | {last} |\n");
        if *last > first + slack(name, first) {
            grown.push(name.clone());
        }
    }
    (table, grown)
}

/// The growth that is no leak. One for each pod or each minute exceeds this within an hour.
fn slack(name: &str, first: u64) -> u64 {
    match name.starts_with("KiB") {
        true => 4096 + first / 5,
        false => 10 + first / 50,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(values: &[u64]) -> Parts {
        let sample =
            |value: &u64| Sample::from([("descriptors of bursar-agent".to_owned(), *value)]);
        Parts {
            samples: values.iter().map(sample).collect(),
            ..Parts::default()
        }
    }

    #[test]
    fn growth_beyond_the_slack_is_named() {
        let grown = |values| compare(&parts(values)).1;
        assert!(grown(&[100]).is_empty());
        assert!(grown(&[100, 400, 112]).is_empty(), "the last part counts");
        assert_eq!(grown(&[100, 113]), ["descriptors of bursar-agent"]);
    }

    #[test]
    fn objects_are_counted_without_events() {
        let metrics = "# HELP apiserver_resource_objects x\n\
            apiserver_resource_objects{group=\"\",resource=\"pods\"} 12\n\
            apiserver_resource_objects{group=\"\",resource=\"events\"} 900\n\
            apiserver_resource_objects{group=\"apps\",resource=\"daemonsets\"} 3\n";
        assert_eq!(count_objects(metrics), 15);
    }
}
