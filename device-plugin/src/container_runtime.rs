//! Decides whether the node's container runtime supports CDI devices.
//!
//! The kubelet reports the runtime in the Node's status (`nodeInfo.containerRuntimeVersion`, such
//! as `containerd://2.4.2`) and passes CDI names to every runtime. A runtime without CDI ignores
//! the names, and the container would start without its GPU.

/// The reason why a runtime of this version ignores CDI devices; `None` for others and unknown
/// ones.
pub(crate) fn missing_cdi_support(version: &str) -> Option<String> {
    let (name, number) = version.split_once("://")?;
    let mut parts = number
        .trim_start_matches('v')
        .split('.')
        .map(|part| part.parse::<u32>().ok());
    let (major, minor) = (parts.next()??, parts.next()??);
    let (enough, needed) = match name {
        "containerd" => (major >= 2, "containerd 2.0"),
        "cri-o" => ((major, minor) >= (1, 28), "CRI-O 1.28"),
        "docker" => (false, "containerd 2.0 or CRI-O 1.28"),
        _ => return None,
    };
    (!enough)
        .then(|| format!("the container runtime is {version}: CDI devices need {needed} or later"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_without_cdi_is_named_with_the_needed_version() {
        for version in [
            "containerd://1.7.27",
            "containerd://1.6.0",
            "cri-o://1.27.4",
            "docker://28.0.1",
        ] {
            let why = missing_cdi_support(version).unwrap();
            assert!(why.contains(version) && why.contains("or later"), "{why}");
        }
    }

    #[test]
    fn runtime_with_cdi_or_unknown_is_accepted() {
        for version in [
            "containerd://2.4.2",
            "containerd://v2.0.0-rc.1",
            "cri-o://1.34.0",
            "other://1.0",
            "",
            "containerd://x",
        ] {
            assert_eq!(missing_cdi_support(version), None, "{version}");
        }
    }
}
