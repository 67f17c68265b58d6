//! Counts the system calls of a program by number.

use std::collections::BTreeMap;
use std::process::Child;

/// How often each system call was made.
pub type Calls = BTreeMap<i64, usize>;

/// Traces a child that asked for it and is stopped at its `execve`, to its end.
pub fn calls(child: &mut Child) -> Calls {
    let pid = child.id().cast_signed();
    let mut calls = Calls::new();
    assert!(stopped(pid), "it stands at its execve");
    // SAFETY: the child is this process's own and is stopped.
    unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, pid, 0, libc::PTRACE_O_TRACESYSGOOD) };
    loop {
        // SAFETY: the child is this process's own and is stopped.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, pid, 0, 0) };
        if !stopped(pid) {
            return calls;
        }
        if let Some(number) = entered(pid) {
            *calls.entry(number).or_default() += 1;
        }
    }
}

/// Returns the system call that the child enters.
fn entered(pid: i32) -> Option<i64> {
    // SAFETY: every field is a number, for which zero is a value.
    let mut call: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    // SAFETY: the child is stopped, and the kernel writes no more than the given size.
    unsafe {
        libc::ptrace(
            libc::PTRACE_GET_SYSCALL_INFO,
            pid,
            size_of_val(&call),
            &raw mut call,
        )
    };
    // SAFETY: at an entry the union holds the number and the arguments.
    (call.op == libc::PTRACE_SYSCALL_INFO_ENTRY).then(|| unsafe { call.u.entry.nr.cast_signed() })
}

/// Returns whether the child stopped; false once it has ended.
fn stopped(pid: i32) -> bool {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    waited == pid && libc::WIFSTOPPED(status)
}
