//! Checks the capabilities of the agent, and the rights of the processes that load the driver for
//! it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use bursar_e2e::pods::PodBuilder;
use bursar_e2e::wait::{self, Poll};
use libtest_mimic::{Failed, Trial};
use rustix::thread::CapabilitySet;

use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

/// `driver.provisionerUser` of the chart.
const PROVISIONER_USER: u32 = 65531;
const PAUSE: Duration = Duration::from_millis(100);
/// The paths of the token in the agent's pod.
const TOKENS: [&str; 2] = [
    "var/run/secrets/kubernetes.io/serviceaccount/token",
    "run/secrets/kubernetes.io/serviceaccount/token",
];

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial("security/cluster/rights", confined)]
}

async fn confined(context: &mut TrialContext) -> Result<(), Failed> {
    let probe = context.environment.probe_image.clone();
    let retains = PodBuilder::new("retains", &probe)
        .arguments(&[
            "fault",
            "--file=/count/faults",
            "--retain=64Mi",
            "--times=1",
            "--after=600",
        ])
        .with_empty_dir("/count")
        .gib(4);
    context.pods.create(&retains).await?;
    context
        .pods
        .wait_for_log_line("retains", START_TIMEOUT, event_line("started"))
        .await?;
    let local = context.local()?;
    let provisioner = async || match local.processes_named("bursar-provisioner").first() {
        Some(provisioner) => Poll::Ready(*provisioner),
        None => Poll::Pending("there is none".to_owned()),
    };
    let provisioner = wait::poll_until("a provisioner", START_TIMEOUT, PAUSE, provisioner).await?;
    let agents = local.processes_named("bursar-agent");
    let agent = *agents.first().ok_or("there is no agent")?;

    let kept = bursar_confine::AGENT_CAPABILITIES.iter();
    let kept = kept.fold(CapabilitySet::empty(), |set, (_, one, _)| set | *one);
    // A privileged container has the machine's capabilities, which this process has too.
    let kept = kept & rustix::thread::capabilities(None)?.permitted;
    let calls_nvml = bursar_confine::NVML_CAPABILITIES & kept;
    let calls_nvml = format!("{:016x}", calls_nvml.bits());
    let nvml = local.processes_named("bursar-nvml");
    let nvml = *nvml.first().ok_or("no process calls NVML")?;
    let capabilities = format!("{:016x}", kept.bits());
    let none = "0".repeat(16);
    let own = PROVISIONER_USER.to_string();
    let users = [own.as_str(); 4].join("\t");
    for (process, field, expected) in [
        (agent, "CapEff", capabilities.as_str()),
        (agent, "CapPrm", &capabilities),
        (agent, "CapBnd", &capabilities),
        (agent, "NoNewPrivs", "1"),
        (agent, "Seccomp", "2"),
        (nvml, "CapEff", &calls_nvml),
        (nvml, "CapPrm", &calls_nvml),
        (nvml, "NoNewPrivs", "1"),
        (nvml, "Seccomp", "2"),
        (provisioner, "CapEff", &none),
        (provisioner, "CapPrm", &none),
        (provisioner, "NoNewPrivs", "1"),
        (provisioner, "Seccomp", "2"),
        (provisioner, "Uid", &users),
        (provisioner, "Gid", &users),
        (provisioner, "Groups", ""),
    ] {
        let is = status(process, field)?;
        if is != expected {
            return Err(format!("{field} of {process}: {is:?} and not {expected:?}").into());
        }
    }

    let root = format!("/proc/{provisioner}/root");
    let paths = TOKENS.map(|token| format!("{root}/{token}"));
    let token = paths.iter().find(|path| fs::metadata(path).is_ok());
    let token = token.ok_or("the agent's pod has no token")?;
    let metadata = fs::metadata(token)?;
    assert_eq!((metadata.uid(), metadata.mode() & 0o777), (0, 0o600));
    // The provisioner's user sees its root folder, but cannot read root's files in it.
    let program = format!("{root}/usr/local/bin/bursar-provisioner");
    assert!(reads(&program)?, "nothing is read there as the provisioner");
    assert!(!reads(token)?, "the token is read as the provisioner");
    assert!(!reads(&format!("/proc/{agent}/environ"))?);
    Ok(())
}

/// Reads a field of a process's status.
fn status(process: i32, field: &str) -> Result<String, Failed> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    Ok(value
        .ok_or_else(|| format!("no {field}"))?
        .trim()
        .to_owned())
}

/// Returns whether the provisioner's user can read a file.
fn reads(path: &str) -> Result<bool, Failed> {
    let mut cat = Command::new("cat");
    let output = cat
        .arg(path)
        .uid(PROVISIONER_USER)
        .gid(PROVISIONER_USER)
        .output()?;
    Ok(output.status.success())
}
