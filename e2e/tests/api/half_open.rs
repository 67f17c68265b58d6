//! Checks half-open connections: no data arrives on them, and no side closes them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use std::future::pending;

use bursar_sim_api::faults::{Faults, FaultyWrites, WatchFault, WriteFault};
use libtest_mimic::Failed;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::isolated_scope::{IsolatedScope, condition};
use crate::server::{Permit, Server, acquire_permit};
use crate::test_case::{FaultPlan, PROMISED_TIME, READ_TIMEOUT, TestCase};

/// In production a watch ends after 45 s, and its connection is dropped 5 s later. The short case
/// uses 5 s and 8 s.
const WATCH_SECONDS: u32 = 5;
const SHORT_SILENCE: Duration = Duration::from_secs(8);
/// With the timeouts of production the operator reaches the declared state within 55 s.
const EXTRA_DELAY: Duration = Duration::from_secs(55).saturating_sub(PROMISED_TIME);
/// A frozen connection delays that state by more than this. Without a freeze it takes seconds.
const LEAST_SILENCE: Duration = Duration::from_secs(30);

/// A proxy to the API server that can freeze its connections.
struct FreezableProxy {
    /// The number of freezes so far.
    frozen: Arc<watch::Sender<u32>>,
    address: SocketAddr,
}

impl FreezableProxy {
    async fn to_server(server: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let frozen = Arc::new(watch::Sender::new(0));
        let freezes = frozen.clone();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut frozen = freezes.subscribe();
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(server).await else {
                        return;
                    };
                    tokio::select! {
                        _ = copy_bidirectional(&mut near, &mut far) => {}
                        // Both sides of the connection stay open.
                        _ = frozen.changed() => pending().await,
                    }
                });
            }
        });
        Ok(Self { frozen, address })
    }

    /// Freezes the present connections without closing them.
    fn freeze(&self) {
        self.frozen.send_modify(|times| *times += 1);
    }
}

/// Starts a case whose operator connects through a proxy, with this read timeout. A case without a
/// permit runs beside any other.
async fn case_behind_proxy(
    server: &Server,
    permit: Option<Permit>,
    name: &str,
    faults: Faults,
    silence: Duration,
) -> Result<(FreezableProxy, TestCase), Failed> {
    let mut config = server.control_plane.operator_config();
    let port = config.cluster_url.port_u16().ok_or("no port")?;
    let proxy = FreezableProxy::to_server(SocketAddr::from(([127, 0, 0, 1], port))).await?;
    config.cluster_url = format!("https://{}", proxy.address).parse()?;
    let plan = FaultPlan {
        faults,
        faulty_writes: FaultyWrites::NoWrite,
        kill_operator: false,
        two_operators: false,
    };
    let case = TestCase::with_config(server, permit, config, silence, name, plan).await?;
    Ok((proxy, case))
}

async fn is_ready(at: &IsolatedScope) -> Result<bool, Failed> {
    let budget = at.budget().await?;
    let observed = budget["status"]["observedGeneration"] == budget["metadata"]["generation"];
    Ok(observed && condition(&budget, "Ready") == "True")
}

/// Creates a budget, and raises it right after a freeze.
async fn raise_budget_while_frozen(
    proxy: &FreezableProxy,
    case: &mut TestCase,
) -> Result<(), Failed> {
    let created = async |at: &IsolatedScope| at.create_budget("16Gi", "24Gi").await;
    case.transition("a budget is made", created, is_ready)
        .await?;
    let raised = async |at: &IsolatedScope| {
        proxy.freeze();
        at.patch_budget(json!({ "deviceMemory": { "guaranteed": "20Gi" } }))
            .await
    };
    case.transition("it is raised in silence", raised, is_ready)
        .await
}

/// Freezes connections of an operator with the timeouts of production.
pub(crate) async fn silence_with_production_timeouts(server: &Server) -> Result<String, Failed> {
    let name = "silent-long";
    let faults = Faults::new(name, WriteFault::RequestDropped, WatchFault::NoFault);
    // The case makes two changes in minutes, so that it needs no permit.
    let (proxy, case) = case_behind_proxy(server, None, name, faults, READ_TIMEOUT).await?;
    let mut case = case.allow_delay(EXTRA_DELAY);
    raise_budget_while_frozen(&proxy, &mut case).await?;
    let outcome = case.finish(is_ready).await?;
    let longest = outcome.longest;
    if longest < LEAST_SILENCE {
        return Err(format!("the proxy froze no watch: {longest:.1?} to a ready budget").into());
    }
    outcome.check_durations()
}

/// Freezes connections of an operator whose timeouts are seconds.
pub(crate) async fn silence(server: &Server) -> Result<String, Failed> {
    let name = "silent";
    let faults = Faults::with_watch_timeout(name, WATCH_SECONDS);
    let permit = Some(acquire_permit().await);
    let (proxy, mut case) = case_behind_proxy(server, permit, name, faults, SHORT_SILENCE).await?;
    raise_budget_while_frozen(&proxy, &mut case).await?;
    case.transition(
        "a pod comes in silence",
        async |at| {
            proxy.freeze();
            Ok(at.create_pod("p", 3, false, false).await.map(drop)?)
        },
        async |at| Ok(at.budget().await?["status"]["deviceMemory"]["requested"]["quanta"] == 3),
    )
    .await?;
    let lost = async |at: &IsolatedScope| {
        let labels = at.node_labels().await?;
        Ok(condition(&at.budget().await?, "Covered") == "False"
            && labels["bursar.dev/largest-gpu-gib"] == "8")
    };
    case.transition(
        "the GPU is lost in silence",
        async |at| {
            proxy.freeze();
            at.report_gpu(8, &[]).await
        },
        lost,
    )
    .await?;
    case.finish(lost).await?.check_durations()
}
