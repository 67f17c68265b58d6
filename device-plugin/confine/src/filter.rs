//! Denies system calls with `EPERM`.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

/// Denied to the agent and each process that it starts: other processes' memory, mounts, kernel
/// code, keys, and calls that change the whole machine.
pub(crate) const AGENT_DENIED_SYSCALLS: &[i64] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_open_by_handle_at,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_personality,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
];

/// Denied in addition to a provisioner and a scrub check. NVML may execute `nvidia-modprobe`.
const EXEC_SYSCALLS: &[i64] = &[libc::SYS_execve, libc::SYS_execveat];

/// The bit of x32 calls, which a kernel may support beside those of the machine.
#[cfg(target_arch = "x86_64")]
const X32_SYSCALL_BIT: i64 = 0x4000_0000;

/// Every flag of clone(2) that makes a namespace.
const CLONE_NEW_NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

pub(crate) fn deny(calls: &[i64]) -> Result<(), seccompiler::Error> {
    let rules = calls.iter().map(|call| (*call, Vec::new())).collect();
    install(rules, libc::EPERM)
}

/// Denies the calls that a provisioner or a scrub check does not need, in addition to those of the
/// agent.
pub(crate) fn deny_to_driver_process() -> Result<(), seccompiler::Error> {
    deny_to_nvml_process()?;
    deny(EXEC_SYSCALLS)
}

/// Denies other namespaces, and all sockets except Unix sockets.
pub(crate) fn deny_to_nvml_process() -> Result<(), seccompiler::Error> {
    // The flags of clone3 are in memory, where a filter cannot read. The C library falls back on
    // clone(2).
    install(Rules::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)?;
    let mut rules = Rules::from([(libc::SYS_setns, Vec::new())]);
    let mut flags = Vec::new();
    for bit in (0..i32::BITS).map(|bit| 1_u64 << bit) {
        if CLONE_NEW_NAMESPACES as u64 & bit != 0 {
            let set = SeccompCmpOp::MaskedEq(bit);
            flags.push(rule(0, set, bit)?);
        }
    }
    rules.insert(libc::SYS_clone, flags);
    let another = rule(0, SeccompCmpOp::Ne, libc::AF_UNIX as u64)?;
    rules.insert(libc::SYS_socket, vec![another]);
    install(rules, libc::EPERM)
}

/// A rule about the lower half of one argument.
fn rule(argument: u8, is: SeccompCmpOp, value: u64) -> Result<SeccompRule, seccompiler::Error> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// Installs a filter for this thread and for all threads and processes that it starts. It also sets
/// `no_new_privs`.
fn install(rules: Rules, error: i32) -> Result<(), seccompiler::Error> {
    #[cfg(target_arch = "x86_64")]
    let (arch, rules) = {
        let x32: Rules = rules
            .iter()
            .map(|(call, rules)| (call | X32_SYSCALL_BIT, rules.clone()))
            .collect();
        (TargetArch::x86_64, rules.into_iter().chain(x32).collect())
    };
    #[cfg(target_arch = "aarch64")]
    let arch = TargetArch::aarch64;
    let errno = SeccompAction::Errno(error as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, errno, arch)?;
    let program = BpfProgram::try_from(filter)?;
    apply_filter(&program)
}
