//! Runs the queries of the dashboards and the alerts in a Prometheus that scrapes agent and
//! operator of the cluster.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::process::Stdio;
use std::time::Duration;

use bursar_e2e::pods::PodBuilder;
use bursar_e2e::verify::DashboardQueries;
use bursar_e2e::wait::{self, Poll};
use bursar_e2e::{chart, paths, tools};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::{Client, Config, ResourceExt as _};
use libtest_mimic::{Failed, Trial};
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::placement::holder;
use crate::poison::with_context_policy;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, trial};

/// Prometheus scrapes and evaluates this often.
const INTERVAL: &str = "2s";
/// The timeout of the scrapes and evaluations after which each query has a series.
const TIMEOUT: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(500);
/// The alerts whose causes the trial plants, in order. They wait for their time.
const PLANTED_ALERTS: &[&str] = &["BursarContainerNotEnforced"];

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial(
        "surface/cluster/queries",
        async |context: &mut TrialContext| {
            with_context_policy(context, "Report", 3, queries_have_series).await
        },
    )]
}

async fn queries_have_series(context: &mut TrialContext) -> Result<(), Failed> {
    plant_causes(context).await?;
    let queries = DashboardQueries::read()?;
    let prometheus = Prometheus::start(context, &queries).await?;
    let poll = async || match prometheus.answers().await {
        Ok(answers) => answers.verdict(&queries),
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until("a series of each query", TIMEOUT, PAUSE, poll).await?;
    Ok(())
}

/// Creates pods that are denied memory, retain memory and fault, are not held to their quota, and
/// wait.
async fn plant_causes(context: &TrialContext) -> Result<(), Failed> {
    let probe = &context.environment.probe_image;
    let greedy = PodBuilder::new("greedy", probe).arguments(&["greedy"]);
    let faulty = PodBuilder::new("faulty", probe)
        .arguments(&[
            "fault",
            "--file=/count/faults",
            "--times=1",
            "--blind",
            "--retain=64Mi",
        ])
        .with_empty_dir("/count");
    let privileged = PodBuilder::new("privileged", probe)
        .arguments(&["hold", "--bytes=1Gi"])
        .privileged();
    for plan in [
        greedy.gib(10),
        holder(context, "holder", 10),
        faulty.gib(2),
        privileged.gib(2),
    ] {
        context.pods.create(&plan).await?;
        let pods = &context.pods;
        pods.wait_until_running(plan.name(), START_TIMEOUT).await?;
    }
    // The node has 8 GiB free, and its GPUs have at most 6 GiB.
    Ok(context.pods.create(&holder(context, "waiter", 7)).await?)
}

/// A Prometheus that scrapes through `kubectl proxy`.
struct Prometheus {
    client: Client,
    _folder: tempfile::TempDir,
    _proxy: Child,
    _process: Child,
}

/// The state of Prometheus' rules.
struct Answers {
    /// Each rule that has not been evaluated, or not without an error.
    failing: Vec<String>,
    /// The metrics of recording rules that have series.
    recorded: BTreeSet<String>,
    /// The alerts that wait or fire.
    alerts: BTreeSet<String>,
}

impl Prometheus {
    async fn start(context: &TrialContext, queries: &DashboardQueries) -> Result<Self, Failed> {
        let program = tools::prometheus()?;
        let (proxy, address) = start_proxy(context).await?;
        let objects = rendered_objects(context).await?;
        let of_kind = |kind| objects.iter().filter(move |object| object["kind"] == kind);
        let mut scrapes = Vec::new();
        for monitor in of_kind("PodMonitor") {
            scrapes.push(scrape_config(context, monitor, &address).await?);
        }
        let folder = tempfile::tempdir()?;
        let write = |name: &str, content: &Value| {
            let path = folder.path().join(name);
            fs::write(&path, content.to_string()).map(|()| path)
        };
        let mut rules = vec![write("queries.json", &queries.rules())?];
        for (number, rule) in of_kind("PrometheusRule").enumerate() {
            rules.push(write(&format!("alerts-{number}.json"), &rule["spec"])?);
        }
        let config = json!({
            "global": { "scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL },
            "scrape_configs": scrapes, "rule_files": rules,
        });
        let config = write("prometheus.json", &config)?;
        // Another process could take the port before Prometheus does, which then ends.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
            .local_addr()?
            .port();
        let log = folder.path().join("log");
        let mut process = Command::new(program)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .kill_on_drop(true)
            .spawn()?;
        let client = Client::try_from(Config::new(format!("http://127.0.0.1:{port}").parse()?))?;
        let ready = async || {
            let request = http::Request::get("/-/ready").body(Vec::new());
            let answer = match request {
                Ok(request) => client.request_text(request).await,
                Err(error) => return Poll::Failed(error.to_string()),
            };
            match (answer, process.try_wait()) {
                (Ok(_), _) => Poll::Ready(()),
                (Err(error), Ok(None)) => Poll::Pending(error.to_string()),
                (Err(_), ended) => {
                    let text = fs::read_to_string(&log).unwrap_or_default();
                    Poll::Failed(format!("it ended: {ended:?}\n{text}"))
                }
            }
        };
        wait::poll_until("Prometheus", START_TIMEOUT, PAUSE, ready).await?;
        Ok(Self {
            client,
            _folder: folder,
            _proxy: proxy,
            _process: process,
        })
    }

    async fn get(&self, path: &str) -> Result<Value, kube::Error> {
        let request = http::Request::get(path).body(Vec::new());
        let request = request.map_err(kube::Error::HttpError)?;
        self.client.request(request).await
    }

    async fn answers(&self) -> Result<Answers, kube::Error> {
        let rules = self.get("/api/v1/rules").await?;
        let groups = rules["data"]["groups"].as_array().into_iter().flatten();
        let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
        let failing = rules.filter(|rule| rule["health"] != "ok");
        let failing = failing.map(|rule| format!("{}: {}", rule["query"], rule["lastError"]));
        // The selector is {__name__=~"query:.+"}.
        let series = "/api/v1/query?query=%7B__name__%3D~%22query%3A.%2B%22%7D";
        let series = self.get(series).await?;
        let alerts = self.get("/api/v1/alerts").await?;
        Ok(Answers {
            failing: failing.collect(),
            recorded: texts(&series["data"]["result"], "/metric/__name__"),
            alerts: texts(&alerts["data"]["alerts"], "/labels/alertname"),
        })
    }
}

impl Answers {
    /// Returns whether each rule is evaluated, each query has a series, and the planted alerts are
    /// the active ones.
    fn verdict(self, queries: &DashboardQueries) -> Poll<()> {
        let mut problems: Vec<String> = queries
            .by_record()
            .filter(|(record, _)| !self.recorded.contains(record))
            .map(|(_, query)| format!("no series: {query}"))
            .collect();
        problems.extend(self.failing);
        if !self
            .alerts
            .iter()
            .map(String::as_str)
            .eq(PLANTED_ALERTS.iter().copied())
        {
            problems.push(format!("active alerts: {:?}", self.alerts));
        }
        match problems.is_empty() {
            true => Poll::Ready(()),
            false => Poll::Pending(format!("{problems:#?}")),
        }
    }
}

/// Returns the texts at `pointer` in each item of a list.
fn texts(list: &Value, pointer: &str) -> BTreeSet<String> {
    let items = list.as_array().into_iter().flatten();
    let texts = items.filter_map(|item| item.pointer(pointer)?.as_str());
    texts.map(str::to_owned).collect()
}

/// Starts `kubectl proxy`, and returns its address.
async fn start_proxy(context: &TrialContext) -> Result<(Child, String), Failed> {
    let mut proxy = Command::new(context.toolbox().program("kubectl"))
        .args(["proxy", "--port=0"])
        .env("KUBECONFIG", context.environment.cluster.kubeconfig())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let stdout = proxy.stdout.take().ok_or("kubectl proxy has no output")?;
    let mut lines = BufReader::new(stdout).lines();
    let line = tokio::time::timeout(START_TIMEOUT, lines.next_line()).await??;
    let line = line.ok_or("kubectl proxy ended")?;
    let address = line.rsplit(' ').next().unwrap_or_default().to_owned();
    Ok((proxy, address))
}

/// Returns the chart's objects for monitoring.
async fn rendered_objects(context: &TrialContext) -> Result<Vec<Value>, Failed> {
    let output = Command::new(context.toolbox().program("helm"))
        .args(["template", chart::RELEASE])
        .arg(paths::repository().join("charts/bursar"))
        .args(["--namespace", chart::NAMESPACE, chart::ANY_REGISTRY])
        .args(["--set", "monitoring.podMonitor.enabled=true"])
        .args(["--set", "monitoring.prometheusRule.enabled=true"])
        .args(["--show-only", "templates/monitoring.yaml"])
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(START_TIMEOUT, output).await??;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("helm template: {stderr}").into());
    }
    let documents = serde_yaml_ng::Deserializer::from_slice(&output.stdout);
    let objects = documents.map(Value::deserialize);
    Ok(objects.collect::<Result<_, _>>()?)
}

/// Returns the scrape configuration of a PodMonitor, as Prometheus' operator would write it, but
/// through the proxy at `address`.
async fn scrape_config(
    context: &TrialContext,
    monitor: &Value,
    address: &str,
) -> Result<Value, Failed> {
    let labels = monitor["spec"]["selector"]["matchLabels"].as_object();
    let labels = labels.into_iter().flatten();
    let labels: Vec<String> = labels
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    let pods: Api<Pod> = Api::namespaced(context.environment.cluster.client(), chart::NAMESPACE);
    let selected = ListParams::default().labels(&labels.join(","));
    let pods = pods.list(&selected).await?.items;
    let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
    let port_name = endpoint["port"]
        .as_str()
        .ok_or("the endpoint has no port")?;
    let relabelings = endpoint["relabelings"].as_array().into_iter().flatten();
    let relabelings: Vec<Value> = relabelings.map(with_snake_case_keys).collect();
    let targets = pods.iter().flat_map(|pod| {
        let spec = pod.spec.as_ref();
        let containers = spec.into_iter().flat_map(|spec| &spec.containers);
        let ports = containers.flat_map(|container| container.ports.iter().flatten());
        let ports = ports.filter(|port| port.name.as_deref() == Some(port_name));
        ports.map(move |port| {
            let (name, namespace) = (pod.name_any(), chart::NAMESPACE);
            let pod_and_port = format!("{name}:{}", port.container_port);
            json!({
                "targets": [address],
                "labels": {
                    "__metrics_path__": format!("/api/v1/namespaces/{namespace}/pods/{pod_and_port}/proxy/metrics"),
                    "__meta_kubernetes_pod_node_name": spec.and_then(|spec| spec.node_name.as_deref()),
                    "namespace": namespace, "pod": name, "endpoint": port_name,
                },
            })
        })
    });
    let targets: Vec<Value> = targets.collect();
    if targets.is_empty() {
        return Err(format!("no pod of {labels:?} has a port {port_name}").into());
    }
    Ok(json!({
        "job_name": monitor["metadata"]["name"], "honor_labels": endpoint["honorLabels"],
        "static_configs": targets, "relabel_configs": relabelings,
    }))
}

/// Returns an object of Prometheus' operator with the keys of Prometheus' own configuration.
fn with_snake_case_keys(object: &Value) -> Value {
    let entries = object.as_object().into_iter().flatten();
    let snake_case = |key: &String| {
        key.chars().fold(String::new(), |mut text, letter| {
            if letter.is_ascii_uppercase() {
                text.push('_');
            }
            text.push(letter.to_ascii_lowercase());
            text
        })
    };
    entries
        .map(|(key, value)| (snake_case(key), value.clone()))
        .collect()
}
