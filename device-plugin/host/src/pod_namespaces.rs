//! Finds the namespace of a pod on this node by its UID.
//!
//! The kubelet makes a folder of logs for each pod before it starts a container, with the name
//! `<namespace>_<name>_<uid>` (`BuildPodLogsDirectory`, `pkg/kubelet/kuberuntime/helpers.go`). Only
//! root on the node writes there.

use std::path::Path;

use bursar_ledger::units::PodUid;

/// The kubelet's folder of logs (`podLogsDir`).
const POD_LOGS: &str = "var/log/pods";

/// The most folders to read.
const MAX_FOLDERS: usize = 65_536;

/// The namespace of a pod; none where the kubelet has no folder of its logs. `host_root` is the
/// host's root.
pub fn namespace_of(host_root: &Path, pod: &PodUid) -> Option<String> {
    let folders = std::fs::read_dir(host_root.join(POD_LOGS)).ok()?.flatten();
    folders.take(MAX_FOLDERS).find_map(|folder| {
        let name = folder.file_name();
        let mut parts = name.to_str()?.splitn(3, '_');
        let namespace = parts.next()?;
        (parts.nth(1)? == pod.as_str()).then(|| namespace.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_is_that_of_the_folder_with_the_uid() {
        let root = tempfile::tempdir().unwrap();
        let uid: PodUid = "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap();
        assert_eq!(namespace_of(root.path(), &uid), None);
        let other = "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d12";
        for folder in [format!("a_b_{other}"), format!("team_train-0_{uid}")] {
            std::fs::create_dir_all(root.path().join(POD_LOGS).join(folder)).unwrap();
        }
        assert_eq!(namespace_of(root.path(), &uid), Some("team".to_owned()));
    }
}
