//! Reads how the driver's kernel module for managed memory (`nvidia_uvm`) is configured.
//!
//! The parameters are those of NVIDIA's open kernel modules, release 595
//! (`kernel-open/nvidia-uvm`).

use std::collections::BTreeSet;
use std::path::Path;

use bursar_ledger::units::GpuUuid;

/// The first kernel that charges host pages of managed memory to the cgroup of their owner: it
/// exports `int_active_memcg`, which the module needs for that.
const KERNEL_THAT_CHARGES: (u32, u32) = (5, 14);

/// The module's parameters and the kernel's version; none where they cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UvmModule {
    /// `uvm_global_oversubscription`: whether other memory displaces managed memory.
    pub oversubscription: Option<bool>,
    /// `uvm_disable_hmm`: whether memory of `malloc` stays on the host.
    pub hmm_disabled: Option<bool>,
    /// `uvm_ats_mode`: whether the module uses address translation services where the platform has
    /// them.
    pub ats: Option<bool>,
    /// The kernel's major and minor version.
    pub kernel: Option<(u32, u32)>,
    /// The GPUs that cannot access managed memory at the same time as the host, which are those
    /// without CUDA's `concurrentManagedAccess`. No file has them: the GPUs' runtimes find them.
    pub not_concurrent: BTreeSet<GpuUuid>,
    /// Whether a GPU of the node awaits the first start of its runtime, which finds that.
    pub awaits_first_starts: bool,
}

/// Whether the driver may move host memory of programs to GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageableMemory {
    /// The module is not loaded.
    Unknown,
    /// Host memory stays on the host.
    OnHost,
    /// By heterogeneous memory management.
    Hmm,
    /// By address translation services.
    Ats,
}

/// Why a node must not offer managed memory beyond the quotas of its GPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvictionUnsafe {
    /// Managed memory on a GPU is pinned there.
    #[error(
        "the driver does not move managed memory out of the way; load nvidia_uvm with uvm_global_oversubscription=1"
    )]
    Pinned,
    /// The module does not tell whether it pins managed memory.
    #[error(
        "nvidia_uvm is not loaded; a program that uses a GPU loads it, as does nvidia-modprobe -u"
    )]
    NotLoaded,
    /// A GPU may hold managed memory, as long as its runtime has not reported otherwise.
    #[error("the agent is trying CUDA on the node's GPUs")]
    AwaitsFirstStarts,
    /// No cgroup pays for the host memory that backs managed memory.
    #[error(
        "Linux {}.{} does not count the host memory behind managed memory; upgrade to 5.14 or later", .0.0, .0.1
    )]
    Uncharged((u32, u32)),
    /// A GPU holds managed memory as long as programs use it there.
    #[error(
        "{0} cannot access managed memory together with the host, so the driver does not evict it there; \
         the quotas of GPUs cover managed memory on this node"
    )]
    NotConcurrent(GpuUuid),
}

impl UvmModule {
    /// Reads the parameters below `sys`, and the kernel's version below `proc`. Names no GPU.
    pub fn read(sys: &Path, proc: &Path) -> Self {
        let text = |path: &Path| bursar_host::procfs::read_small(path).ok();
        let parameters = sys.join("module/nvidia_uvm/parameters");
        let flag = |name: &str| parse_flag(&text(&parameters.join(name))?);
        Self {
            oversubscription: flag("uvm_global_oversubscription"),
            hmm_disabled: flag("uvm_disable_hmm"),
            ats: flag("uvm_ats_mode"),
            kernel: text(&proc.join("sys/kernel/osrelease")).and_then(|text| parse_release(&text)),
            not_concurrent: BTreeSet::new(),
            awaits_first_starts: false,
        }
    }

    /// Whether the driver may move host memory to GPUs. `has_ats` tells whether the platform can
    /// have address translation services; HMM is off on such platforms.
    pub fn pageable_memory(&self, has_ats: bool) -> PageableMemory {
        match (has_ats, self.ats, self.hmm_disabled) {
            (true, Some(true), _) => PageableMemory::Ats,
            (true, Some(false), _) | (false, _, Some(true)) => PageableMemory::OnHost,
            (false, _, Some(false)) => PageableMemory::Hmm,
            (true, None, _) | (false, _, None) => PageableMemory::Unknown,
        }
    }

    /// Checks that a neighbour's allocation can always displace managed memory, and that the pod
    /// which owns it pays for the host memory. A module may be loaded later with other parameters.
    /// After the first starts a GPU about which no runtime has reported is no reason.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check_eviction(&self) -> Result<(), EvictionUnsafe> {
        let not_concurrent = self.not_concurrent.first();
        match (self.kernel, self.oversubscription, not_concurrent) {
            (Some(kernel), _, _) if kernel < KERNEL_THAT_CHARGES => {
                Err(EvictionUnsafe::Uncharged(kernel))
            }
            (_, Some(false), _) => Err(EvictionUnsafe::Pinned),
            (_, _, Some(gpu)) => Err(EvictionUnsafe::NotConcurrent(gpu.clone())),
            _ if self.awaits_first_starts => Err(EvictionUnsafe::AwaitsFirstStarts),
            (_, None, None) => Err(EvictionUnsafe::NotLoaded),
            (_, Some(true), None) => Ok(()),
        }
    }
}

/// A module's parameter of type bool or int.
fn parse_flag(text: &str) -> Option<bool> {
    match text.trim() {
        "Y" | "1" => Some(true),
        "N" | "0" => Some(false),
        _ => None,
    }
}

/// `6.8.0-51-generic`: major, minor, anything.
fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().split(|end: char| !end.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(parameters: &[(&str, &str)], release: &str) -> UvmModule {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("module/nvidia_uvm/parameters");
        let kernel = folder.path().join("sys/kernel");
        std::fs::create_dir_all(&at).unwrap();
        std::fs::create_dir_all(&kernel).unwrap();
        for (name, value) in parameters {
            std::fs::write(at.join(name), value).unwrap();
        }
        std::fs::write(kernel.join("osrelease"), release).unwrap();
        UvmModule::read(folder.path(), folder.path())
    }

    #[test]
    fn hmm_is_known_by_the_modules_parameter() {
        let pageable =
            |value| machine(&[("uvm_disable_hmm", value)], "6.8.0\n").pageable_memory(false);
        assert_eq!(pageable("N\n"), PageableMemory::Hmm);
        assert_eq!(pageable("Y\n"), PageableMemory::OnHost);
        assert_eq!(pageable("?"), PageableMemory::Unknown);
        let not_loaded = UvmModule::read(Path::new("/nobody"), Path::new("/nobody"));
        assert_eq!(not_loaded.pageable_memory(false), PageableMemory::Unknown);
    }

    #[test]
    fn ats_counts_only_where_the_platform_has_it() {
        let with = |ats| machine(&[("uvm_ats_mode", ats), ("uvm_disable_hmm", "Y")], "6.8.0");
        assert_eq!(with("1").pageable_memory(true), PageableMemory::Ats);
        assert_eq!(with("0").pageable_memory(true), PageableMemory::OnHost);
        assert_eq!(with("1").pageable_memory(false), PageableMemory::OnHost);
    }

    #[test]
    fn eviction_is_unsafe_when_pinned_unknown_or_uncharged() {
        let check = |value, release| {
            machine(&[("uvm_global_oversubscription", value)], release).check_eviction()
        };
        assert_eq!(check("1", "5.14.0-427.el9.x86_64"), Ok(()));
        assert_eq!(check("1", "6.8.0-51-generic"), Ok(()));
        assert_eq!(check("0", "6.8.0"), Err(EvictionUnsafe::Pinned));
        let not_loaded = machine(&[], "6.8.0").check_eviction();
        assert_eq!(not_loaded, Err(EvictionUnsafe::NotLoaded));
        let old = check("1", "5.10.0-28-amd64");
        assert_eq!(old, Err(EvictionUnsafe::Uncharged((5, 10))));
        let message = old.unwrap_err().to_string();
        assert!(
            message.starts_with("Linux 5.10 does not count"),
            "{message}"
        );
        assert_eq!(check("1", "unknown"), Ok(()));
    }

    #[test]
    fn eviction_is_unsafe_on_a_gpu_without_concurrent_access() {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let check = |oversubscription, release| {
            let module = UvmModule {
                oversubscription,
                not_concurrent: [gpu.clone()].into(),
                ..machine(&[], release)
            };
            module.check_eviction()
        };
        let found = EvictionUnsafe::NotConcurrent(gpu.clone());
        assert_eq!(check(Some(true), "6.8.0"), Err(found.clone()));
        // A module that is loaded later changes nothing about the GPU.
        assert_eq!(check(None, "6.8.0"), Err(found.clone()));
        assert_eq!(check(Some(false), "6.8.0"), Err(EvictionUnsafe::Pinned));
        let awaits = UvmModule {
            oversubscription: Some(true),
            awaits_first_starts: true,
            ..machine(&[], "6.8.0")
        };
        let expected = Err(EvictionUnsafe::AwaitsFirstStarts);
        assert_eq!(awaits.check_eviction(), expected);
        let message = found.to_string();
        assert!(message.starts_with("GPU-a cannot access"), "{message}");
    }
}
