//! The operator's arguments. Nothing else in it reads the environment, but the client for its access to
//! the API server.

use std::net::SocketAddr;

use bursar_crds::Quantum;
use clap::Parser;

/// The operator's arguments.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "bursar-operator",
    version,
    about = "Keeps each namespace's GPU memory budget in force"
)]
pub struct Args {
    /// Where /metrics, /healthz and /readyz are served
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:9401")]
    pub listen: SocketAddr,
    /// What one token stands for: 1Gi, 512Mi or 256Mi, the same as the agents'
    #[arg(long, value_name = "SIZE", default_value = "1Gi")]
    pub quantum: Quantum,
    /// Which log lines are written, as tracing filter directives
    #[arg(
        long,
        value_name = "FILTER",
        env = "BURSAR_LOG",
        default_value = "info"
    )]
    pub log: String,
    /// How log lines are written
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_that_the_chart_passes_are_understood() {
        let args = Args::try_parse_from([
            "bursar-operator",
            "--listen=0.0.0.0:9401",
            "--quantum=512Mi",
            "--log=info,kube=warn",
        ]);
        assert_eq!(args.unwrap().quantum, Quantum::Mib512);
    }

    #[test]
    fn a_wrong_quantum_is_refused_with_the_right_ones() {
        let refusal = Args::try_parse_from(["bursar-operator", "--quantum=2Gi"]).unwrap_err();
        assert!(
            refusal.to_string().contains("write 256Mi, 512Mi or 1Gi"),
            "{refusal}"
        );
    }
}
