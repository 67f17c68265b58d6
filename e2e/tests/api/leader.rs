//! Stops the operator's leading replica by a signal, and continues it after another replica leads.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use bursar_e2e::workspace::{self, Profile};
use libtest_mimic::Failed;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use crate::isolated_scope::IsolatedScope;
use crate::restored::built;
use crate::scenarios::{hard, in_force};
use crate::server::{Server, acquire_permit};
use crate::test_case::{GIVE_UP_AFTER, POLL_INTERVAL, until};

const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/bursar-system/leases/bursar-operator";
/// How long replicas leave an unchanged Lease to its holder.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// A continued replica has ended by then.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Runs on its own control plane, because the operator's process works on all namespaces.
pub(crate) async fn leader(shared: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let server = Server::named("leader", shared.progress.clone()).await?;
    let outcome = Box::pin(stopped_leader(&server)).await;
    server.control_plane.stop().await;
    outcome
}

async fn stopped_leader(server: &Server) -> Result<String, Failed> {
    let at = IsolatedScope::set_up(server, "leader").await?;
    let binaries = spawn_blocking(|| workspace::build(Profile::Dev, false)).await??;
    let program = &built(&binaries, "bursar-operator")?;
    let kubeconfig = server.control_plane.write_operator_kubeconfig()?;
    let mut first = replica(program, &kubeconfig, "first")?;
    until(POLL_INTERVAL, "the first replica leads", async || {
        leads(&at, "first").await
    })
    .await?;
    let other = replica(program, &kubeconfig, "other")?;
    at.create_budget("8Gi", "16Gi").await?;
    until(POLL_INTERVAL, "the budget is in force", async || {
        in_force(&at, "8", "16").await
    })
    .await?;

    let pid = first
        .id()
        .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    let pid = pid.ok_or("the first replica has ended")?;
    let stopped = Instant::now();
    kill_process(pid, Signal::STOP)?;
    until(POLL_INTERVAL, "the other replica leads", async || {
        leads(&at, "other").await
    })
    .await?;
    let took = stopped.elapsed();
    // The last renewal was up to 2 s before the signal.
    if took < LEASE_DURATION - Duration::from_secs(3) {
        return Err(format!("the other replica leads after {took:.1?}").into());
    }
    let guarantee = serde_json::json!({ "deviceMemory": { "guaranteed": "12Gi" } });
    at.patch_budget(guarantee).await?;
    until(POLL_INTERVAL, "the change is in force", async || {
        in_force(&at, "12", "16").await
    })
    .await?;

    let before = at.get(LEASE).await?;
    let continued = Instant::now();
    kill_process(pid, Signal::CONT)?;
    let ended = timeout(GIVE_UP_AFTER, first.wait()).await??;
    let ends = continued.elapsed();
    if ends > ENDS_WITHIN || ended.code() != Some(1) {
        return Err(format!("the first replica ended {ends:.1?} later: {ended}").into());
    }
    let lease = at.get(LEASE).await?;
    let taken = |lease: &Value| lease["spec"]["leaseTransitions"].clone();
    if !leads(&at, "other").await? || taken(&lease) != taken(&before) {
        return Err(format!("the first replica changed the Lease: {}", lease["spec"]).into());
    }
    // Ready may be false for a moment yet: it is written after the quotas.
    if hard(&at, "guaranteed").await? != "12" || hard(&at, "limit").await? != "16" {
        return Err("the first replica changed the budget".into());
    }
    drop(other);
    Ok(format!(
        "the other replica leads {took:.1?} after the signal; the first ended {ends:.1?} after it continued"
    ))
}

fn replica(program: &Path, kubeconfig: &Path, identity: &str) -> Result<Child, Failed> {
    let child = Command::new(program)
        .args(["--listen=127.0.0.1:0", "--probes=127.0.0.1:0"])
        .arg("--lease=bursar-system/bursar-operator")
        .arg(format!("--identity={identity}"))
        .env("KUBECONFIG", kubeconfig)
        .env_remove("KUBERNETES_SERVICE_HOST")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    Ok(child)
}

async fn leads(at: &IsolatedScope, identity: &str) -> Result<bool, Failed> {
    Ok(at.get(LEASE).await?["spec"]["holderIdentity"] == identity)
}
