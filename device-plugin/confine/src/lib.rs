//! Drops the rights that a process of Bursar never needs, before it has threads.
//!
//! The device nodes need a privileged container, which has every capability and no seccomp filter.
//! So the agent restricts itself ([`restrict_agent`]), and so does each process that loads the
//! driver ([`restrict_driver_process`], [`restrict_nvml_process`]). The filters deny listed calls
//! and permit all others. NVIDIA's libraries are closed, so no list of permitted calls would be
//! right for the next driver.

mod filter;
mod hidden_files;

use std::io;
use std::path::Path;

use rustix::thread::{
    CapabilitySet, capabilities, capability_is_in_bounding_set,
    remove_capability_from_bounding_set, set_capabilities,
};

/// The capabilities that the agent keeps, each with the reason.
pub const AGENT_CAPABILITIES: &[(&str, CapabilitySet, &str)] = &[
    (
        "DAC_OVERRIDE",
        CapabilitySet::DAC_OVERRIDE,
        "join the cgroup of a container that another user owns",
    ),
    (
        "DAC_READ_SEARCH",
        CapabilitySet::DAC_READ_SEARCH,
        "read `/proc/<pid>` of other users' processes",
    ),
    ("KILL", CapabilitySet::KILL, "end processes of other users"),
    (
        "MKNOD",
        CapabilitySet::MKNOD,
        "NVML makes the device nodes that are missing",
    ),
    (
        "SETGID",
        CapabilitySet::SETGID,
        "start provisioners and scrub checks as `driver.provisionerUser`",
    ),
    (
        "SETUID",
        CapabilitySet::SETUID,
        "start provisioners and scrub checks as `driver.provisionerUser`",
    ),
    (
        "SYS_ADMIN",
        CapabilitySet::SYS_ADMIN,
        "NVIDIA's driver takes it for its administrator's right (memory limits); enter the host's cgroup namespace",
    ),
    (
        "SYS_PTRACE",
        CapabilitySet::SYS_PTRACE,
        "read mappings, open files and namespaces of tenant processes",
    ),
    (
        "SYSLOG",
        CapabilitySet::SYSLOG,
        "read `/dev/kmsg`, where the driver names the process of a fault",
    ),
];

/// The capabilities that a process which calls NVML keeps of the agent's.
pub const NVML_CAPABILITIES: CapabilitySet = CapabilitySet::MKNOD.union(CapabilitySet::SYS_ADMIN);

/// The folder of a pod's tokens.
const TOKENS: &str = "/var/run/secrets";

/// The step that failed, so that the process still has rights that it should lose.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The kernel refused to drop a capability.
    #[error("failed to drop capabilities: {0}")]
    Capabilities(#[source] io::Error),
    /// The kernel refused the filter.
    #[error("failed to install the seccomp filter: {0}; the kernel needs CONFIG_SECCOMP_FILTER")]
    Filter(#[from] seccompiler::Error),
    /// The kernel refused to hide files.
    #[error("failed to hide files: {0}")]
    Files(#[from] landlock::RulesetError),
}

/// Confines the agent and every process that it starts: [`AGENT_CAPABILITIES`] and no others,
/// `no_new_privs`, and no system calls of [`filter::AGENT_DENIED_SYSCALLS`].
///
/// # Errors
/// [`ConfineError`]; rights that were dropped before stay dropped.
pub fn restrict_agent() -> Result<(), ConfineError> {
    let kept = AGENT_CAPABILITIES
        .iter()
        .fold(CapabilitySet::empty(), |set, (_, capability, _)| {
            set | *capability
        });
    limit_capabilities_to(kept).map_err(ConfineError::Capabilities)?;
    Ok(filter::deny(filter::AGENT_DENIED_SYSCALLS)?)
}

/// Confines a process that is about to load the driver. It has no capability, `no_new_privs`, no
/// exec, only Unix sockets, no new namespace, and the limits of the agent.
///
/// # Errors
/// [`ConfineError`]; rights that were dropped before stay dropped.
pub fn restrict_driver_process() -> Result<(), ConfineError> {
    limit_capabilities_to(CapabilitySet::empty()).map_err(ConfineError::Capabilities)?;
    filter::deny(filter::AGENT_DENIED_SYSCALLS)?;
    Ok(filter::deny_to_driver_process()?)
}

/// Confines the process that speaks to the kernel module as other processes' clients: only
/// `CAP_SYS_PTRACE`, by which it duplicates their files, no exec, only Unix sockets, no new
/// namespace, and the limits of the agent.
///
/// # Errors
/// [`ConfineError`]; rights that were dropped before stay dropped.
pub fn restrict_compute_process() -> Result<(), ConfineError> {
    limit_capabilities_to(CapabilitySet::SYS_PTRACE).map_err(ConfineError::Capabilities)?;
    filter::deny(filter::AGENT_DENIED_SYSCALLS)?;
    Ok(filter::deny_to_driver_process()?)
}

/// Whether the kernel lets [`restrict_nvml_process`] hide files.
pub fn hides_files() -> bool {
    hidden_files::is_supported()
}

/// Confines a process that is about to load NVML: [`NVML_CAPABILITIES`], only Unix sockets, no new
/// namespace, and the limits of the agent. It opens no file below `hidden` and no token of its pod,
/// but those below `library`. On a kernel without Landlock it opens them.
///
/// Such a process stays root, because NVML makes device nodes that are missing.
///
/// # Errors
/// [`ConfineError`]; rights that were dropped before stay dropped.
pub fn restrict_nvml_process(hidden: &[&Path], library: &Path) -> Result<(), ConfineError> {
    limit_capabilities_to(NVML_CAPABILITIES).map_err(ConfineError::Capabilities)?;
    let hidden: Vec<&Path> = hidden.iter().copied().chain([TOKENS.as_ref()]).collect();
    hidden_files::hide_below(&hidden, library)?;
    filter::deny(filter::AGENT_DENIED_SYSCALLS)?;
    Ok(filter::deny_to_nvml_process()?)
}

/// Drops every capability but `kept`. A process that may not narrow its bounding set has none to
/// lose, and `no_new_privs` prevents gaining one by exec.
fn limit_capabilities_to(kept: CapabilitySet) -> io::Result<()> {
    let mut sets = capabilities(None)?;
    if sets.effective.contains(CapabilitySet::SETPCAP) {
        let others = CapabilitySet::all().difference(kept);
        for (_, capability) in others.iter_names() {
            // The kernel answers with an error for a capability that it does not know.
            if capability_is_in_bounding_set(capability).unwrap_or(false) {
                remove_capability_from_bounding_set(capability)?;
            }
        }
    }
    sets.effective &= kept;
    sets.permitted &= kept;
    sets.inheritable &= kept;
    Ok(set_capabilities(None, sets)?)
}
