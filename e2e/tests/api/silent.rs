//! Connections that die in silence: nothing arrives on them any more, and nobody closes them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use std::future::pending;

use futures::future::try_join;
use libtest_mimic::Failed;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::case::{Case, Outcome, PROMISED, Plan, SILENCE};
use crate::place::{Place, condition};
use crate::server::{Server, turn};
use bursar_sim_api::faults::{Doomed, Fate, Faults, Telling};

/// The operator's own times are 200 s for a watch and 5 s more of silence. In the shorter case a watch ends after 5 s, and
/// what is silent for longer is given up.
const WATCH_SECONDS: u32 = 5;
const SHORT_SILENCE: Duration = Duration::from_secs(8);
/// With its own times all is as it should be within 210 s.
const LATE: Duration = Duration::from_secs(210).saturating_sub(PROMISED);

/// A way to the API server that can go silent.
struct Line {
    /// How often it went silent.
    frozen: Arc<watch::Sender<u32>>,
    address: SocketAddr,
}

impl Line {
    async fn to(server: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let frozen = Arc::new(watch::Sender::new(0));
        let news = frozen.clone();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut frozen = news.subscribe();
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(server).await else {
                        return;
                    };
                    tokio::select! {
                        _ = copy_bidirectional(&mut near, &mut far) => {}
                        // Both ends stay open.
                        _ = frozen.changed() => pending().await,
                    }
                });
            }
        });
        Ok(Self { frozen, address })
    }

    /// Connections that there are die in silence.
    fn freeze(&self) {
        self.frozen.send_modify(|times| *times += 1);
    }
}

pub(crate) async fn silence(server: &Server) -> Result<String, Failed> {
    let (short, long) = try_join(Box::pin(short(server)), Box::pin(long(server))).await?;
    Ok(format!(
        "{}; with the operator's own times {}",
        short.lasted()?,
        long.lasted()?
    ))
}

/// A case on a line to the API server that can go silent, with such patience.
async fn on_a_line(
    server: &Server,
    name: &str,
    faults: Faults,
    silence: Duration,
) -> Result<(Line, Case), Failed> {
    let mut config = server.plane.operators();
    let port = config.cluster_url.port_u16().ok_or("no port")?;
    let line = Line::to(SocketAddr::from(([127, 0, 0, 1], port))).await?;
    config.cluster_url = format!("https://{}", line.address).parse()?;
    let plan = Plan {
        faults,
        doomed: Doomed::Nothing,
        killed: false,
        two: false,
    };
    let case = Case::over(server, turn().await, config, silence, name, plan).await?;
    Ok((line, case))
}

async fn is_ready(at: &Place) -> Result<bool, Failed> {
    let budget = at.budget().await?;
    let observed = budget["status"]["observedGeneration"] == budget["metadata"]["generation"];
    Ok(observed && condition(&budget, "Ready") == "True")
}

/// A budget is made, and raised in silence.
async fn raised(line: &Line, case: &mut Case) -> Result<(), Failed> {
    let made = async |at: &Place| at.declare("16Gi", "24Gi").await;
    case.through("a budget is made", made, is_ready).await?;
    let raised = async |at: &Place| {
        line.freeze();
        at.amend(json!({ "deviceMemory": { "guaranteed": "20Gi" } }))
            .await
    };
    case.through("it is raised in silence", raised, is_ready)
        .await
}

/// As it is in production.
async fn long(server: &Server) -> Result<Outcome, Failed> {
    let name = "silent-long";
    let faults = Faults::new(name, Fate::Lost, Telling::Plain);
    let (line, case) = on_a_line(server, name, faults, SILENCE).await?;
    let mut case = case.late_by(LATE);
    raised(&line, &mut case).await?;
    case.end(is_ready).await
}

async fn short(server: &Server) -> Result<Outcome, Failed> {
    let name = "silent";
    let faults = Faults::short_watches(name, WATCH_SECONDS);
    let (line, mut case) = on_a_line(server, name, faults, SHORT_SILENCE).await?;
    raised(&line, &mut case).await?;
    case.through(
        "a pod comes in silence",
        async |at| {
            line.freeze();
            Ok(at.pod("p", 3, false, false).await.map(drop)?)
        },
        async |at| Ok(at.budget().await?["status"]["deviceMemory"]["requested"]["quanta"] == 3),
    )
    .await?;
    let lost = async |at: &Place| {
        let labels = at.node_labels().await?;
        Ok(condition(&at.budget().await?, "Covered") == "False"
            && labels["bursar.dev/largest-gpu-gib"] == "8")
    };
    case.through(
        "the GPU is lost in silence",
        async |at| {
            line.freeze();
            at.report(8, &[]).await
        },
        lost,
    )
    .await?;
    case.end(lost).await
}
