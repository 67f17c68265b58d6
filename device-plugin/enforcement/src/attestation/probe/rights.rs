//! Checks the rights of a container's first process, which limit those of all its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bursar_host::procfs::{Stat, bounding_capabilities};
use tracing::warn;

use super::grant::ContainerGrant;
use super::host_view::HostView;
use super::view::ContainerView;
use super::{MAX_AGE, PodAttestor, file_name};
use crate::attestation::device_access::{self, openable_nodes};
use crate::attestation::evaluate::{self, EnforcementGap};

/// The most names in a container's `/dev`.
const MAX_DEV_NAMES: usize = 16_384;

/// The agent's own program, even after its file was replaced.
const SELF_EXE: &str = "/proc/self/exe";

/// The result that changes only with a container's first process.
#[derive(Clone, Debug, Default)]
pub(super) struct RightsRecord {
    pub(super) gap: Option<EnforcementGap>,
    /// The gap that is reported only if the container has no other.
    pub(super) minor_gap: Option<EnforcementGap>,
    pub(super) device_check: Option<DeviceCheck>,
}

/// The GPUs that a container was checked for, and those that it may open.
#[derive(Clone, Debug)]
pub(super) struct DeviceCheck {
    other_gpus: BTreeMap<String, PathBuf>,
    /// The GPU nodes in the container's `/dev`.
    visible_gpus: BTreeSet<String>,
    /// None where the check gave no answer.
    openable: Option<BTreeSet<String>>,
    /// Since when the check gives no answer.
    unanswered_since: Option<Instant>,
}

impl DeviceCheck {
    fn gap(&self, now: Instant) -> Option<EnforcementGap> {
        if let Some(openable) = &self.openable {
            return evaluate::check_openable(openable);
        }
        // A container that just ended gives no answer either.
        let silent = self.unanswered_since?;
        (now.duration_since(silent) >= MAX_AGE)
            .then(|| EnforcementGap::not_attested("its cgroup prevents the check of device access"))
    }
}

impl PodAttestor {
    /// Checks the rights of a container's first process, which limit those of all its processes.
    pub(super) fn check_rights(
        &self,
        folder: &Path,
        first: (u32, Stat),
        view: &ContainerView,
        grant: &ContainerGrant,
        before: Option<DeviceCheck>,
        host: &HostView,
    ) -> RightsRecord {
        let device_check = before.clone();
        let with_gap = |gap: EnforcementGap| RightsRecord {
            gap: Some(gap),
            device_check,
            ..RightsRecord::default()
        };
        let (pid, _) = first;
        let bounding = match self.read_text(pid, "status") {
            Ok(status) => bounding_capabilities(&status),
            Err(error) if error.kind() == ErrorKind::FileTooLarge => {
                return with_gap(EnforcementGap::not_attested(
                    "its first process belongs to too many groups",
                ));
            }
            Err(_) => None,
        };
        // The process has ended.
        let Some(bounding) = bounding else {
            return RightsRecord::default();
        };
        let namespace = std::fs::read_link(self.proc_path(pid, "ns/user")).ok();
        let over_the_host = namespace.is_some() && namespace == host.user_namespace;
        if let Some(gap) = evaluate::check_capabilities(bounding, over_the_host) {
            return with_gap(gap);
        }
        let Some(visible) = self.visible_gpu_nodes(view) else {
            return with_gap(EnforcementGap::not_attested(
                "its /dev has too many names to be read",
            ));
        };
        let (mut gap, mut device_check) = (None, before);
        let other_gpus = host.other_gpu_nodes(&grant.nodes);
        let must_check =
            evaluate::needs_device_check(&grant.nodes, &visible, bounding, over_the_host);
        if must_check && !other_gpus.is_empty() {
            let now = self.check_devices(folder, (other_gpus, visible), device_check, host);
            gap = now.gap(host.now);
            device_check = Some(now);
        }
        RightsRecord {
            gap,
            minor_gap: evaluate::check_scheduling(bounding, over_the_host),
            device_check,
        }
    }

    /// Checks which of `other_gpus` a container may open, where `visible` are the GPU nodes in its
    /// `/dev`. A result is reused until either changes.
    fn check_devices(
        &self,
        folder: &Path,
        (other_gpus, visible): (BTreeMap<String, PathBuf>, BTreeSet<String>),
        before: Option<DeviceCheck>,
        host: &HostView,
    ) -> DeviceCheck {
        let same = |before: &DeviceCheck| {
            (&before.other_gpus, &before.visible_gpus) == (&other_gpus, &visible)
        };
        let answered = |before: &DeviceCheck| before.openable.is_some();
        if let Some(before) = before
            .as_ref()
            .filter(|before| same(before) && answered(before))
        {
            return before.clone();
        }
        let query = device_access::AccessQuery {
            proc: &self.paths.proc,
            cgroup_root: &self.paths.cgroup_root,
            container_cgroup: folder,
        };
        let openable = openable_nodes(Path::new(SELF_EXE), query, &other_gpus);
        let openable =
            openable.inspect_err(|error| warn!(%error, ?folder, "failed to check device access"));
        let openable = openable.ok();
        let silent = before.and_then(|before| before.unanswered_since);
        DeviceCheck {
            other_gpus,
            visible_gpus: visible,
            unanswered_since: openable.is_none().then(|| silent.unwrap_or(host.now)),
            openable,
        }
    }

    /// The names of GPU nodes in a container's `/dev`; none where `/dev` has too many names.
    fn visible_gpu_nodes(&self, view: &ContainerView) -> Option<BTreeSet<String>> {
        let of_the_kernel = |kind: &str| matches!(kind, "tmpfs" | "devtmpfs");
        let dev = view.mounts.resolve(Path::new("/dev"));
        if !dev.is_some_and(|(mount, _)| of_the_kernel(&mount.fs_type)) {
            return Some(BTreeSet::new());
        }
        let entries = std::fs::read_dir(view.folder.join("root/dev"));
        let (mut count, mut found) = (0, BTreeSet::new());
        for entry in entries.into_iter().flatten().flatten() {
            count += 1;
            let name = file_name(&entry.path());
            if evaluate::is_gpu_node(&name) {
                found.insert(name);
            }
            if count > MAX_DEV_NAMES {
                return None;
            }
        }
        Some(found)
    }
}
