//! Runs the node agent: creates the parts of the agent's crates, connects them by channels and runs
//! their tasks.
//!
//! | module | job |
//! |---|---|
//! | [`run`] | starts all tasks and stops them together |
//! | [`publisher`] | publishes status, events, metrics and readiness from the node's snapshots |
//! | [`relay`] | follows the plugin relay's registration with the kubelet |
//! | [`metrics`] | registers the metrics of all crates |
//! | [`api_client`] | connects to the API server with deadlines |
//! | [`http`] | serves metrics and probes |
//! | [`container_runtime`] | decides whether the container runtime supports CDI |

mod api_client;
mod container_runtime;
mod http;
mod metrics;
mod publisher;
mod relay;
mod run;

pub use api_client::connect_api_server;
pub use run::{AgentError, RunOptions, run};
