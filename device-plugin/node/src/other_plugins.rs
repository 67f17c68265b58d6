//! Looks for another device plugin that offers this node's GPUs.
//!
//! The kubelet lists the healthy devices of every plugin. A pod with a device of NVIDIA's plugin
//! gets a whole GPU, although Bursar has divided it, and neither plugin can prevent that.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_kubelet::pod_resources::PodResourcesClient;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

/// How often the kubelet is asked.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The owners of this node's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GpuOwners {
    /// The kubelet has not listed the devices of all plugins yet.
    #[default]
    Unknown,
    /// No other plugin offers GPUs.
    BursarAlone,
    /// Another plugin offers GPUs too.
    OtherPlugin {
        /// Its resource, such as `nvidia.com/gpu`.
        resource: String,
        /// The number of its devices.
        devices: usize,
    },
}

impl GpuOwners {
    /// Decides from the healthy devices of each resource: pure.
    fn of(offered: &BTreeMap<String, usize>) -> Self {
        let other = offered
            .iter()
            .find(|(name, devices)| **devices > 0 && is_gpu_resource(name));
        match other {
            Some((resource, devices)) => Self::OtherPlugin {
                resource: resource.clone(),
                devices: *devices,
            },
            None => Self::BursarAlone,
        }
    }
}

/// Whether NVIDIA's plugin or a fork gives out GPUs or MIG instances by this name. `gpu.shared` is
/// the name under time-slicing.
fn is_gpu_resource(name: &str) -> bool {
    name == "nvidia.com/gpu"
        || name.starts_with("nvidia.com/gpu.")
        || name.starts_with("nvidia.com/mig-")
}

/// Asks the kubelet until `stop`. While the kubelet does not answer, the last answer counts.
pub async fn run(
    kubelet: PodResourcesClient,
    owners: watch::Sender<GpuOwners>,
    stop: CancellationToken,
) {
    let mut ticker = interval(POLL_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticker.tick()).await.is_some() {
        let Some(offered) = stop.run_until_cancelled(kubelet.offered_devices()).await else {
            return;
        };
        match offered {
            Ok(offered) => {
                let now = GpuOwners::of(&offered);
                owners.send_if_modified(|before| {
                    let changed = *before != now;
                    if changed {
                        info!(owners = ?now, "read the owners of the node's gpus");
                        *before = now;
                    }
                    changed
                });
            }
            Err(error) => debug!(%error, "failed to read the devices of all plugins"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(offered: &[(&str, usize)]) -> GpuOwners {
        let offered = offered
            .iter()
            .map(|(name, devices)| ((*name).to_owned(), *devices));
        GpuOwners::of(&offered.collect())
    }

    #[test]
    fn plugin_with_healthy_gpus_is_another_owner() {
        for name in [
            "nvidia.com/gpu",
            "nvidia.com/gpu.shared",
            "nvidia.com/mig-1g.10gb",
        ] {
            let other = GpuOwners::OtherPlugin {
                resource: name.to_owned(),
                devices: 2,
            };
            let own = ("bursar.dev/gpu-memory-gib", 32);
            assert_eq!(owners(&[own, (name, 2)]), other);
            assert_eq!(owners(&[own, (name, 0)]), GpuOwners::BursarAlone);
        }
        let other_resources = [("nvidia.com/rdma", 1), ("smarter-devices/fuse", 1)];
        assert_eq!(owners(&other_resources), GpuOwners::BursarAlone);
    }
}
