//! Parses the command line.
//!
//! No other module reads the environment, except the client for its access to the API server.

use std::net::SocketAddr;
use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::context_policy::ContextAction;
use clap::{ArgAction, Parser};

use crate::leader::{Election, LeaseName};
use crate::placement::PlacementOptions;
use crate::run::Options;

/// The command line.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "bursar-operator",
    version,
    about = "Keeps each namespace's GPU memory budget in force"
)]
pub struct Args {
    /// Address that serves /metrics
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:9401")]
    pub listen: SocketAddr,
    /// Address that serves /healthz and /readyz
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:9403")]
    pub probes: SocketAddr,
    /// Memory of one device id: 1Gi, 512Mi or 256Mi, the same as for the agents
    #[arg(long, value_name = "SIZE", default_value = "1Gi")]
    pub quantum: Quantum,
    /// Whether a pod that waits for a GPU may be evicted so that it is scheduled on a node with
    /// room
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub relocate_pending_pods: bool,
    /// Seconds for which a PodDisruptionBudget may block the eviction of a pod of lower priority
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=120))]
    pub disruption_grace: u64,
    /// Whether GPUs are drained while NVIDIA's operators change the driver or MIG instances
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub drain_for_nvidia: bool,
    /// Lease that chooses the replica that works, as NAMESPACE/NAME; without it every replica works
    #[arg(long, value_name = "LEASE", requires = "identity")]
    pub lease: Option<LeaseName>,
    /// Name of this replica in the lease: its pod's
    #[arg(long, value_name = "NAME")]
    pub identity: Option<String>,
    /// Namespace of the agents; the GpuNode of one that is away is reported as not Ready
    #[arg(long, value_name = "NAMESPACE")]
    pub agents: Option<String>,
    /// Action for poisoned contexts in namespaces whose budget names none, the same as the agents'
    #[arg(long, value_name = "ACTION", default_value = "Process")]
    pub context_policy_default: ContextAction,
    /// Log filter, as tracing directives
    #[arg(
        long,
        value_name = "FILTER",
        env = "BURSAR_LOG",
        default_value = "info"
    )]
    pub log: String,
    /// Log format
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
}

impl Args {
    /// The operator's options.
    pub fn options(&self) -> Options {
        let election = self.lease.clone().zip(self.identity.clone());
        Options {
            placement: PlacementOptions {
                quantum: self.quantum,
                relocate_pending_pods: self.relocate_pending_pods,
                disruption_grace: Duration::from_secs(self.disruption_grace),
                drain_for_nvidia: self.drain_for_nvidia,
            },
            default_action: self.context_policy_default,
            agents: self.agents.clone(),
            election: election.map(|(lease, identity)| Election { lease, identity }),
        }
    }
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Plain text.
    Text,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_the_chart_are_parsed() {
        let args = Args::try_parse_from([
            "bursar-operator",
            "--listen=[::]:9401",
            "--probes=[::]:9403",
            "--quantum=512Mi",
            "--relocate-pending-pods=false",
            "--disruption-grace=5",
            "--drain-for-nvidia=false",
            "--lease=bursar-system/bursar-operator",
            "--identity=bursar-operator-0",
            "--agents=bursar-system",
            "--log-format=json",
            "--context-policy-default=Report",
            "--log=info,kube=warn",
        ]);
        let options = args.unwrap().options();
        let election = options.election.unwrap();
        assert_eq!(election.lease.namespace, "bursar-system");
        assert_eq!(election.identity, "bursar-operator-0");
        let placement = PlacementOptions {
            quantum: Quantum::Mib512,
            relocate_pending_pods: false,
            disruption_grace: Duration::from_secs(5),
            drain_for_nvidia: false,
        };
        assert_eq!(options.placement, placement);
        assert_eq!(options.agents.as_deref(), Some("bursar-system"));
        assert_eq!(options.default_action, ContextAction::Report);
    }

    #[test]
    fn default_action_that_needs_a_budget_is_refused() {
        let args = ["bursar-operator", "--context-policy-default=Evict"];
        let refusal = Args::try_parse_from(args).unwrap_err().to_string();
        let message = "write one of InPlace, Process";
        assert!(refusal.contains(message), "{refusal}");
    }

    #[test]
    fn invalid_quantum_is_refused_with_the_valid_ones() {
        let refusal = Args::try_parse_from(["bursar-operator", "--quantum=2Gi"]).unwrap_err();
        assert!(
            refusal.to_string().contains("write 256Mi, 512Mi or 1Gi"),
            "{refusal}"
        );
    }
}
