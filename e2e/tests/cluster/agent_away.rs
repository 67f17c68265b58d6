//! Restarts the agent while clients create pods without pause, and checks that no pod fails.
//! Without a relay pods fail, which shows that the check would see one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bursar_e2e::chart;
use bursar_e2e::pods::PodState;
use bursar_e2e::wait::{self, Poll};
use futures::future::{try_join, try_join_all};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams};
use libtest_mimic::{Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};

use crate::cluster_state::call;
use crate::placement::{holder, run_each};
use crate::relay::RELAY;
use crate::restarts::{agent_pid, only_process, percentile};
use crate::shared_cluster::{RECLAIM_TIMEOUT, START_TIMEOUT, TrialContext, node_trial};

/// The time for which a stopped agent answers nothing.
const HUNG: Duration = Duration::from_secs(10);
/// Half of the pods run within this time of their creation.
const MEDIAN_START_SECONDS: f64 = 30.0;
const PAUSE: Duration = Duration::from_millis(500);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        node_trial("main/cluster/agent-away", async |context| {
            no_pod_fails_while_the_agent_is_away(context, 4, 3).await
        }),
        node_trial(
            "fleet/cluster/roll-relay",
            no_pod_fails_while_relays_are_rolled,
        ),
        node_trial(
            "fleet/cluster/out-of-memory",
            no_pod_fails_while_the_agent_lacks_memory,
        ),
        node_trial("main/cluster/agent-away-long", async |context| {
            no_pod_fails_while_the_agent_is_away(context, 8, 200).await
        }),
        node_trial("main/cluster/no-relay-long", pods_fail_without_a_relay),
    ]
}

/// The way in which the agent goes away.
#[derive(Clone, Copy)]
enum Outage {
    Killed,
    PodDeleted,
    Hung,
}

async fn no_pod_fails_while_the_agent_is_away(
    context: &mut TrialContext,
    clients: usize,
    times: usize,
) -> Result<(), Failed> {
    let begin = Instant::now();
    let progress = ClientProgress::default();
    let shared: &TrialContext = context;
    let clients = (0..clients).map(|client| create_pods(shared, client, &progress));
    let restarts = progress.until(end_agents(shared, times, &progress.ran));
    let (started, ()) = try_join(try_join_all(clients), restarts).await?;
    let mut seconds: Vec<f64> = started.into_iter().flatten().collect();
    seconds.sort_by(f64::total_cmp);
    context.progress.report(format_args!(
        "{} pods ran while the agent went away {times} times in {:.0?}: each after {:.1} s (median), {:.1} s (max)",
        seconds.len(),
        begin.elapsed(),
        percentile(&seconds, 50),
        percentile(&seconds, 100),
    ));
    assert!(
        percentile(&seconds, 50) < MEDIAN_START_SECONDS,
        "{seconds:?}"
    );
    context.history.check_none_failed_or_restarted().await?;
    context
        .node_files()?
        .wait_until_no_pod_state(RECLAIM_TIMEOUT)
        .await?;
    Ok(())
}

/// Replaces the relay twice by `kubectl bursar roll` while clients create pods.
async fn no_pod_fails_while_relays_are_rolled(context: &mut TrialContext) -> Result<(), Failed> {
    const ROLLS: usize = 2;
    let progress = ClientProgress::default();
    let shared: &TrialContext = context;
    let roll = async {
        for _ in 0..ROLLS {
            let before = only_process(shared, RELAY)?;
            let local = shared.environment.cluster.local();
            let node = local.ok_or("this needs a cluster of our own")?.node_name();
            let plugin = crate::harness().with_file_name("kubectl-bursar");
            let kubeconfig = shared.environment.cluster.kubeconfig();
            let rolled = call(&plugin, &["roll", "relay", node], &kubeconfig).await?;
            shared.progress.report(format_args!("{}", rolled.trim()));
            assert_ne!(only_process(shared, RELAY)?, before, "it is the same relay");
        }
        Ok(())
    };
    let clients = (0..4).map(|client| create_pods(shared, client, &progress));
    let (started, ()) = try_join(try_join_all(clients), progress.until(roll)).await?;
    let ran = started.iter().flatten().count();
    shared
        .progress
        .report(format_args!("{ran} pods ran meanwhile"));
    assert!(ran >= ROLLS, "{ran} pods ran");
    context.history.check_none_failed_or_restarted().await
}

/// Lets the kernel kill the agent for lack of memory in its container twice, before the limit goes.
async fn no_pod_fails_while_the_agent_lacks_memory(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    const AGENT: &str = "daemonset/bursar-agent";
    const IN_SYSTEM: [&str; 2] = ["--namespace", chart::NAMESPACE];
    run_each(context, &[("before", 4)]).await?;
    let bindings = context.node_files()?.cdi_files()?;
    let kubectl = async |arguments: &[&str]| {
        let arguments = [arguments, &IN_SYSTEM].concat();
        let output = context.run_kubectl(&arguments, Vec::new()).await?;
        Ok::<_, Failed>(String::from_utf8_lossy(&output).into_owned())
    };
    let is_rolled_out = ["rollout", "status", AGENT];
    let limits = "--limits=memory=64Mi";
    kubectl(&["set", "resources", AGENT, "--requests=memory=1Mi", limits]).await?;
    kubectl(&is_rolled_out).await?;
    exhaust_memory_of_agent(context).await?;
    exhaust_memory_of_agent(context).await?;
    let pods = &context.pods;
    pods.create(&holder(context, "meanwhile", 4)).await?;
    let ends = [
        "get",
        "pods",
        "--selector=app.kubernetes.io/component=agent",
        "--output=jsonpath={.items[*].status.containerStatuses[*].lastState.terminated.reason}",
    ];
    let is_told = async || match kubectl(&ends).await {
        Ok(reason) if reason == "OOMKilled" => Poll::Ready(()),
        Ok(reason) => Poll::Pending(format!("the agent's last end: {reason:?}")),
        Err(failed) => Poll::Pending(format!("{failed:?}")),
    };
    let what = "the kubelet to tell that the agent was killed for its memory";
    wait::poll_until(what, START_TIMEOUT, PAUSE, is_told).await?;
    kubectl(&["rollout", "undo", AGENT]).await?;
    pods.wait_until_running("meanwhile", START_TIMEOUT).await?;
    kubectl(&is_rolled_out).await?;
    let now = context.node_files()?.cdi_files()?;
    for (file, binding) in &bindings {
        assert_eq!(now.get(file), Some(binding), "{file:?}");
    }
    context.history.check_none_failed_or_restarted().await
}

/// Fills the memory of the agent's container until the kernel has killed the agent.
///
/// The agent's own use does not decide it: the kernel would kill the one process or the other.
async fn exhaust_memory_of_agent(context: &TrialContext) -> Result<(), Failed> {
    let running = async || match agent_pid(context) {
        Ok(pid) => Poll::Ready(pid),
        Err(failed) => Poll::Pending(format!("{failed:?}")),
    };
    let agent = wait::poll_until("the agent to run", START_TIMEOUT, PAUSE, running).await?;
    let process = Path::new("/proc").join(agent.as_raw_nonzero().to_string());
    let procs = memory_cgroup(&fs::read_to_string(process.join("cgroup"))?).join("cgroup.procs");
    fs::write(process.join("oom_score_adj"), "1000")?;
    // The last line of an endless one is kept in memory.
    let mut hog = tokio::process::Command::new("sh")
        .args(["-c", "echo $$ > \"$0\" && exec tail /dev/zero"])
        .arg(&procs)
        .kill_on_drop(true)
        .spawn()?;
    let is_gone = async || match agent_pid(context) {
        Ok(pid) if pid == agent => Poll::Pending(format!("{agent:?} runs")),
        Ok(_) | Err(_) => Poll::Ready(()),
    };
    let what = "the kernel to kill the agent for its memory";
    let killed = wait::poll_until(what, START_TIMEOUT, Duration::from_millis(10), is_gone).await;
    hog.kill().await?;
    Ok(killed?)
}

/// Returns the folder that limits the memory of a process with these lines in its `cgroup` file.
fn memory_cgroup(lines: &str) -> PathBuf {
    let of = |prefix: &str, root: &str| {
        let mut fields = lines.lines().filter_map(|line| line.split_once(':'));
        let path = fields.find_map(|(_, line)| line.strip_prefix(prefix))?;
        Some(format!("{root}{path}").into())
    };
    of("memory:", "/sys/fs/cgroup/memory")
        .or_else(|| of(":", "/sys/fs/cgroup"))
        .unwrap_or_default()
}

/// The kubelet fails pods that it admits while no plugin is registered.
async fn pods_fail_without_a_relay(context: &mut TrialContext) -> Result<(), Failed> {
    context.set_relay(false).await?;
    let counted = count_failed_without_a_relay(context).await;
    context.set_relay(true).await?;
    let (ran, failed) = counted?;
    let failures = failed.len();
    context.progress.report(format_args!(
        "without a relay {ran} pods ran and {failures} failed while the agent went away 20 times"
    ));
    assert!(!failed.is_empty(), "no pod failed");
    let is_unexpected = |reason: &&String| !reason.contains("UnexpectedAdmissionError");
    let unexpected: Vec<_> = failed.iter().filter(is_unexpected).collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
    Ok(())
}

/// Returns the number of pods that ran, and why others failed.
async fn count_failed_without_a_relay(
    context: &TrialContext,
) -> Result<(usize, Vec<String>), Failed> {
    let progress = ClientProgress::default();
    let clients = (0..8).map(|client| create_pods(context, client, &progress));
    let restarts = progress.until(end_agents(context, 20, &progress.ran));
    let (started, ()) = try_join(try_join_all(clients), restarts).await?;
    let records = context.history.records().into_iter();
    let failed = records.filter_map(|record| record.failed).collect();
    Ok((started.iter().flatten().count(), failed))
}

/// The clients' progress, and whether they go on.
#[derive(Default)]
struct ClientProgress {
    ran: AtomicUsize,
    done: AtomicBool,
}

impl ClientProgress {
    /// Lets the clients go on until the work has ended.
    async fn until(&self, work: impl Future<Output = Result<(), Failed>>) -> Result<(), Failed> {
        let ended = work.await;
        self.done.store(true, Ordering::Relaxed);
        ended
    }
}

/// Creates pods of 2 GiB one after another. Returns the seconds from the creation of each until it
/// ran. The history has the pods that failed.
async fn create_pods(
    context: &TrialContext,
    client: usize,
    progress: &ClientProgress,
) -> Result<Vec<f64>, Failed> {
    let pods = &context.pods;
    let mut seconds = Vec::new();
    for number in 0.. {
        if progress.done.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("away-{client}-{number}");
        let begin = Instant::now();
        pods.create(&holder(context, &name, 2)).await?;
        let started = |state: &PodState| state.running || state.phase == "Failed";
        let state = pods.wait_until(&name, "to run or fail", START_TIMEOUT, started);
        if state.await?.running {
            seconds.push(begin.elapsed().as_secs_f64());
            progress.ran.fetch_add(1, Ordering::Relaxed);
        }
        pods.delete(&name).await?;
        pods.wait_until_deleted(&name, START_TIMEOUT).await?;
    }
    Ok(seconds)
}

/// A process that is stopped until this value is dropped, also by a client's failure.
struct StoppedProcess(Pid);

impl StoppedProcess {
    fn new(pid: Pid) -> Result<Self, Failed> {
        kill_process(pid, Signal::STOP)?;
        Ok(Self(pid))
    }
}

impl Drop for StoppedProcess {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Ends or stops the agent so many times, each time after a pod has started since the time before.
async fn end_agents(context: &TrialContext, times: usize, ran: &AtomicUsize) -> Result<(), Failed> {
    let outages = [Outage::Killed, Outage::PodDeleted, Outage::Hung];
    for outage in outages.into_iter().cycle().take(times) {
        let already = ran.load(Ordering::Relaxed);
        let has_started = async || match ran.load(Ordering::Relaxed) > already {
            true => Poll::Ready(()),
            false => Poll::Pending("none has".to_owned()),
        };
        wait::poll_until(
            "a pod to start with the agent",
            START_TIMEOUT,
            PAUSE,
            has_started,
        )
        .await?;
        let before = agent_pid(context)?;
        match outage {
            Outage::Killed => kill_process(before, Signal::KILL)?,
            Outage::PodDeleted => delete_agent(context).await?,
            Outage::Hung => {
                let _stopped = StoppedProcess::new(before)?;
                tokio::time::sleep(HUNG).await;
                continue;
            }
        }
        wait_for_another_agent(context, before).await?;
    }
    Ok(())
}

/// Waits until a process of the agent replaces `before`.
pub(crate) async fn wait_for_another_agent(
    context: &TrialContext,
    before: Pid,
) -> Result<(), Failed> {
    let is_replaced = async || match agent_pid(context) {
        Ok(pid) if pid != before => Poll::Ready(()),
        Ok(_) => Poll::Pending("the former one runs".to_owned()),
        Err(failed) => Poll::Pending(format!("{failed:?}")),
    };
    Ok(wait::poll_until("another agent", START_TIMEOUT, PAUSE, is_replaced).await?)
}

pub(crate) async fn delete_agent(context: &TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let api: Api<Pod> = Api::namespaced(client, chart::NAMESPACE);
    let agents = ListParams::default().labels("app.kubernetes.io/component=agent");
    api.delete_collection(&DeleteParams::default(), &agents)
        .await?;
    Ok(())
}
