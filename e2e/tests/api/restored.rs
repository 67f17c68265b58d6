//! Restores etcd from a backup, under an operator and the API client of an agent.

use prometheus_client::registry::Registry;
use std::time::Duration;

use bursar_apiserver::ParsedSpec;
use bursar_apiserver::gpu_node::GpuNodeClient;
use bursar_apiserver::metrics::ApiMetrics;
use bursar_apiserver::spec_watch::{self, Observation, WatchOutput};
use bursar_gpu::drain::DrainState;
use bursar_gpu_node::publish::{Publisher, Rate};
use bursar_gpu_node::quota_overrides::AppliedSpec;
use bursar_gpu_node::{MemoryReport, NodeReport};
use bursar_ledger::units::{Quanta, Quantum};
use bursar_sim_api::WatchFault;
use bursar_watch::History;
use futures::try_join;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{Api, ListParams, PostParams};
use libtest_mimic::Failed;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::isolated_scope::IsolatedScope;
use crate::scenarios::in_force;
use crate::server::{Permit, Server};
use crate::test_case::{FaultPlan, Outcome, PROMISED_TIME, TestCase};

/// The agent's Node and GpuNode.
const NODE: &str = "restored-agent";

/// How many objects are created after the backup, before the events that the watches receive. Fewer
/// writes follow the restore, so the revisions of these events stay in the future.
const LOST: usize = 400;

/// How often the trial reads the agent's state.
const POLL: Duration = Duration::from_millis(100);

/// Runs on its own control plane, because a restore would revert the objects of other cases.
pub(crate) async fn etcd_restored(shared: &Server, permit: Permit) -> Result<String, Failed> {
    let server = Server::named("restored", shared.progress.clone()).await?;
    let outcome = Box::pin(through_a_restore(&server, permit)).await;
    server.control_plane.stop().await;
    let (outcome, agent) = outcome?;
    let operator = outcome.check_durations()?;
    Ok(format!(
        "operator: {operator}; agent: {agent:.1?} after the API server's return"
    ))
}

async fn through_a_restore(server: &Server, permit: Permit) -> Result<(Outcome, Duration), Failed> {
    let name = "restored";
    let plan = FaultPlan::with_telling(name, WatchFault::NoFault);
    let mut case = TestCase::with_permit(server, permit, name, plan).await?;
    let agent = FakeNodeAgent::start(&case.scope, server).await?;
    let declared = async |at: &IsolatedScope| at.create_budget("16Gi", "24Gi").await;
    let is_declared = async |at: &IsolatedScope| in_force(at, "16", "24").await;
    case.transition("a budget is made", declared, is_declared)
        .await?;
    agent.order("GPU-1").await?;
    agent.until_drained("GPU-1").await?;

    server.control_plane.back_up_etcd().await?;
    let configs = Api::<ConfigMap>::namespaced(server.control_plane.client(), name);
    for number in 0..LOST {
        let config = json!({ "metadata": { "name": format!("lost-{number}") } });
        let config = serde_json::from_value(config)?;
        configs.create(&PostParams::default(), &config).await?;
    }
    let raised = async |at: &IsolatedScope| {
        at.patch_budget(json!({ "deviceMemory": { "guaranteed": "22Gi", "limit": "30Gi" } }))
            .await
    };
    let is_raised = async |at: &IsolatedScope| in_force(at, "22", "30").await;
    case.transition("the budget is raised", raised, is_raised)
        .await?;
    agent.order("GPU-2").await?;
    agent.until_drained("GPU-2").await?;
    agent.report_free(7);
    agent.until_free(7).await?;
    let before = newest_revision(server).await?;

    server.control_plane.restore_etcd().await?;
    let returned = Instant::now();
    let after = newest_revision(server).await?;
    if after + LOST as u64 / 2 > before {
        let told = format!("revision {after} after {before}: etcd was not restored");
        return Err(told.into());
    }
    // The amendment's generation is that of the lost one.
    let amended = async |at: &IsolatedScope| {
        at.patch_budget(json!({ "deviceMemory": { "guaranteed": "20Gi" } }))
            .await
    };
    let is_amended = async |at: &IsolatedScope| in_force(at, "20", "24").await;
    let operator = case.transition("the budget is amended after a restore", amended, is_amended);
    let agent = async {
        agent.until_drained("GPU-1").await?;
        agent.until_free(7).await?;
        agent.order("GPU-3").await?;
        agent.until_drained("GPU-3").await?;
        Ok(returned.elapsed())
    };
    let ((), agent) = try_join!(operator, agent)?;
    if agent > PROMISED_TIME {
        return Err(format!("the agent followed after {agent:.1?}").into());
    }
    Ok((case.finish(is_amended).await?, agent))
}

async fn newest_revision(server: &Server) -> Result<u64, Failed> {
    let namespaces = Api::<Namespace>::all(server.control_plane.client());
    let list = namespaces.list_metadata(&ListParams::default()).await?;
    let revision = list.metadata.resource_version.unwrap_or_default();
    Ok(revision.parse()?)
}

/// The parts of an agent that speak with the API server, on a node without GPUs.
struct FakeNodeAgent {
    scope: IsolatedScope,
    reports: watch::Sender<NodeReport>,
    orders: watch::Receiver<Option<ParsedSpec>>,
    _stop: DropGuard,
}

impl FakeNodeAgent {
    async fn start(scope: &IsolatedScope, server: &Server) -> Result<Self, Failed> {
        let node = json!({ "metadata": { "name": NODE } });
        scope.create("/api/v1/nodes", node).await?;
        let (client, history) = (server.control_plane.client(), History::default());
        let (metrics, stop) = (
            ApiMetrics::new(&mut Registry::default()),
            CancellationToken::new(),
        );
        let (reports, reported) = watch::channel(report());
        let (orders, ordered) = watch::channel(None);
        let (seen, sees) = watch::channel(Observation::Pending);
        let publisher = Publisher {
            api: GpuNodeClient::new(client.clone(), NODE, history.clone()),
            reports: reported,
            observed: sees,
            spec: ordered.clone(),
            drain: watch::channel(DrainState::default()).1,
            rate: Rate::default(),
            unreachable_since: watch::channel(None).0,
            metrics: metrics.clone(),
        };
        tokio::spawn(publisher.run(stop.clone()));
        let told = WatchOutput {
            spec: orders,
            observed: seen,
            metrics,
        };
        let spec = spec_watch::run(client, NODE.to_owned(), history, told, stop.clone());
        tokio::spawn(spec);
        let agent = Self {
            scope: scope.clone(),
            reports,
            orders: ordered,
            _stop: stop.drop_guard(),
        };
        agent.until_free(32).await?;
        Ok(agent)
    }

    fn path() -> String {
        format!("/apis/bursar.dev/v1alpha1/gpunodes/{NODE}")
    }

    /// Requests a drain of this GPU alone.
    async fn order(&self, gpu: &str) -> Result<(), Failed> {
        let spec = json!({ "spec": { "drain": [gpu] } });
        self.scope.merge(&Self::path(), spec).await
    }

    fn report_free(&self, free: u32) {
        self.reports
            .send_modify(|report| report.device_memory.free = Quanta(free));
    }

    async fn until_drained(&self, gpu: &str) -> Result<(), Failed> {
        let drained = async || {
            let orders = self.orders.borrow();
            let drain = orders.iter().flat_map(|orders| &orders.drain);
            Ok(drain.map(ToString::to_string).eq([gpu]))
        };
        until(&format!("the order to drain {gpu}"), drained).await
    }

    async fn until_free(&self, free: u32) -> Result<(), Failed> {
        let written = async || {
            let object = self.scope.get(&Self::path()).await?;
            Ok(object["status"]["deviceMemory"]["free"] == free)
        };
        until(&format!("the status with {free} free"), written).await
    }
}

async fn until(what: &str, is: impl AsyncFn() -> Result<bool, Failed>) -> Result<(), Failed> {
    let begin = Instant::now();
    while !is().await? {
        if begin.elapsed() > PROMISED_TIME {
            return Err(format!("the agent has not seen {what} within {PROMISED_TIME:?}").into());
        }
        sleep(POLL).await;
    }
    Ok(())
}

fn report() -> NodeReport {
    NodeReport {
        boot_id: "b007".to_owned(),
        driver_version: None,
        quantum: Quantum::Gib1,
        device_memory: MemoryReport {
            allocatable: Quanta(32),
            free: Quanta(32),
            largest_free: Quanta(32),
        },
        managed_memory: MemoryReport::default(),
        gpus: Vec::new(),
        waiting: Vec::new(),
        not_enforced: Vec::new(),
        applied_spec: AppliedSpec::default(),
        faults: Vec::new(),
        namespaces: Vec::new(),
        conditions: Vec::new(),
    }
}
