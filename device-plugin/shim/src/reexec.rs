//! Executes the program again in its own process after a fault poisoned the process image.
//!
//! The new image is the container's main process as the container runtime started it. The library
//! saves the start state when the loader loads it, before the program's first instruction. Saved
//! are the program, arguments, environment, working directory, umask, CPU affinity, blocked and
//! ignored signals. Descriptors are the three standard ones that the process was given. A standard
//! descriptor that the program replaced leads to `/dev/null`, because the replacement may keep the
//! GPU's memory. Every other process of the pid namespace is killed. User and group, resource
//! limits, priority and files that the program wrote are not restored.
//!
//! Only the first process of a pid namespace does this. It is the main process of a container with
//! a pid namespace of its own, and may kill all others there. The agent checks the container, and
//! limits how often this happens.

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How the container's main process was started; empty in any other process.
static START_STATE: OnceLock<StartState> = OnceLock::new();

/// How long the other processes may take to exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// One more than the highest signal.
const SIGNAL_END: c_int = 65;

/// Higher descriptors are not closed where the kernel has no `close_range`.
const MAX_DESCRIPTORS: libc::rlim_t = 1 << 20;

/// `CLOSE_RANGE_CLOEXEC` (Linux 5.11).
const CLOSE_RANGE_CLOEXEC: c_int = 4;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

/// Saves the start state. Runs in every process that loads the library, so it does almost nothing
/// in all but one.
#[cfg_attr(test, allow(dead_code, reason = "the tests load no library"))]
extern "C" fn on_load() {
    if std::process::id() == 1
        && let Some(start) = StartState::read()
    {
        let _ = START_STATE.set(start);
    }
}

/// Returns whether this process could be executed again.
pub(crate) fn is_possible() -> bool {
    std::process::id() == 1 && START_STATE.get().is_some()
}

/// Executes the program again. Returns only where that is impossible.
pub(crate) fn execute() {
    if let Some(start) = START_STATE.get().filter(|_| is_possible()) {
        start.execute();
    }
}

/// How a process was started.
#[derive(Debug)]
struct StartState {
    /// The path that was executed (`AT_EXECFN`), from which the process has its name.
    exec_path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    cwd: CString,
    signals: Signals,
    umask: libc::mode_t,
    /// None for a descriptor that was not open.
    standard_fds: [Option<Descriptor>; 3],
    /// None on a machine with more CPUs than the set can hold.
    cpu_affinity: Option<libc::cpu_set_t>,
}

/// A descriptor as the process was given it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    inode: (libc::dev_t, libc::ino_t),
    /// Status flags of the open file, such as `O_NONBLOCK`, which outlive the image.
    flags: c_int,
}

/// Sets of signals: bit 0 is signal 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Signals {
    blocked: u64,
    ignored: u64,
}

impl StartState {
    /// Returns `None` where `/proc` cannot be read.
    fn read() -> Option<StartState> {
        let file = |name: &str| std::fs::read(format!("/proc/self/{name}")).ok();
        let (signals, umask) = parse_status(&String::from_utf8_lossy(&file("status")?))?;
        Some(StartState {
            exec_path: exec_filename(&file("auxv")?)?,
            arguments: Some(nul_terminated(&file("cmdline")?)).filter(|all| !all.is_empty())?,
            environment: nul_terminated(&file("environ")?),
            cwd: CString::new(std::env::current_dir().ok()?.into_os_string().into_vec()).ok()?,
            signals,
            umask,
            standard_fds: [0, 1, 2].map(Descriptor::read),
            cpu_affinity: cpu_affinity(),
        })
    }

    /// Returns the path to execute and its arguments.
    fn program(&self) -> (&CStr, &[CString]) {
        let same =
            |one: &CStr, other: &CStr| file_id(one).is_some_and(|it| Some(it) == file_id(other));
        if same(&self.exec_path, c"/proc/self/exe") {
            return (&self.exec_path, &self.arguments);
        }
        // For a script the kernel put the interpreter before its path, and will again.
        let script = self.arguments.iter().position(|one| *one == self.exec_path);
        if let Some(at) = script.filter(|_| is_script(&self.exec_path)) {
            return (&self.exec_path, &self.arguments[at..]);
        }
        // The file was deleted or replaced; the kernel still has it under this path.
        (c"/proc/self/exe", &self.arguments)
    }

    fn execute(&self) {
        let Some(here) = SavedCwd::change_to(&self.cwd) else {
            return;
        };
        // The path may be relative to that directory.
        let (program, arguments) = self.program();
        let pointers = |all: &[CString]| -> Vec<*const c_char> {
            let all = all.iter().map(|one| one.as_ptr());
            all.chain([std::ptr::null()]).collect()
        };
        let (arguments, environment) = (pointers(arguments), pointers(&self.environment));
        // SAFETY: the string is borrowed for the call.
        if unsafe { libc::access(program.as_ptr(), libc::X_OK) } != 0 {
            return here.restore();
        }
        let blocked = set_signal_mask(u64::MAX);
        kill_other_processes();
        close_nonstandard_descriptors();
        for (number, given) in (0..).zip(self.standard_fds) {
            Descriptor::restore(number, given);
        }
        stop_timers();
        self.signals.restore_ignored();
        // SAFETY: both calls take values, and the set is initialized.
        unsafe {
            libc::umask(self.umask);
            if let Some(processors) = &self.cpu_affinity {
                libc::sched_setaffinity(0, size_of_val(processors), processors);
            }
        }
        set_signal_mask(self.signals.blocked);
        // SAFETY: the strings outlive the call, in arrays that end with null.
        unsafe { libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
        set_signal_mask(blocked);
        here.restore();
    }
}

impl Descriptor {
    /// Returns `None` for a descriptor that is not open.
    fn read(number: c_int) -> Option<Descriptor> {
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: fstat writes the whole structure where it answers zero; the other call takes a
        // number.
        unsafe {
            let stat = (libc::fstat(number, stat.as_mut_ptr()) == 0).then(|| stat.assume_init())?;
            Some(Descriptor {
                inode: (stat.st_dev, stat.st_ino),
                flags: libc::fcntl(number, libc::F_GETFL),
            })
        }
    }

    /// Restores the descriptor that the process was given, for the new image.
    fn restore(number: c_int, given: Option<Descriptor>) {
        let same = Descriptor::read(number).map(|now| now.inode) == given.map(|given| given.inode);
        // SAFETY: system calls on numbers, and a string that ends with a zero.
        unsafe {
            match given {
                Some(given) if same => {
                    libc::fcntl(number, libc::F_SETFL, given.flags);
                }
                Some(_) => {
                    let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                    libc::dup2(nothing, number);
                }
                None => {
                    libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC);
                    return;
                }
            }
            libc::fcntl(number, libc::F_SETFD, 0);
        }
    }
}

impl Signals {
    /// Ignores exactly the signals that were ignored at the start. Handlers end with the image.
    fn restore_ignored(self) {
        for signal in 1..SIGNAL_END {
            let mut now = MaybeUninit::<libc::sigaction>::uninit();
            // SAFETY: sigaction writes the whole structure where it answers zero; the libc's own
            // signals are refused.
            let now = unsafe {
                match libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr()) {
                    0 => now.assume_init().sa_sigaction,
                    _ => continue,
                }
            };
            let wanted = match self.ignored >> (signal - 1) & 1 {
                1 => libc::SIG_IGN,
                _ => libc::SIG_DFL,
            };
            if now != wanted && (wanted == libc::SIG_IGN || now == libc::SIG_IGN) {
                // SAFETY: no handler of this library's.
                unsafe { libc::signal(signal, wanted) };
            }
        }
    }
}

/// The working directory to return to.
struct SavedCwd(c_int);

impl SavedCwd {
    /// Changes to a directory. Returns `None` where it no longer exists.
    fn change_to(to: &CStr) -> Option<SavedCwd> {
        // SAFETY: strings that end with a zero.
        unsafe {
            let here = libc::open(c".".as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
            if libc::chdir(to.as_ptr()) == 0 {
                return Some(SavedCwd(here));
            }
            libc::close(here);
            None
        }
    }

    fn restore(self) {
        // SAFETY: the descriptor is this value's own.
        unsafe {
            libc::fchdir(self.0);
            libc::close(self.0);
        }
    }
}

/// Blocks exactly these signals in this thread. Returns those that were blocked before.
fn set_signal_mask(signals: u64) -> u64 {
    let (mut before, mut set) = (0, MaybeUninit::<libc::sigset_t>::uninit());
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: libc functions initialize the sets before they are read.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigemptyset(old.as_mut_ptr());
        for signal in (1..SIGNAL_END).filter(|signal| signals >> (signal - 1) & 1 == 1) {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), old.as_mut_ptr());
        for signal in 1..SIGNAL_END {
            before |= u64::from(libc::sigismember(old.as_ptr(), signal) == 1) << (signal - 1);
        }
    }
    before
}

/// Kills every other process of the pid namespace, and reaps this process's children.
fn kill_other_processes() {
    let until = Instant::now() + KILL_TIMEOUT;
    loop {
        // SAFETY: neither call takes memory. The first process of a pid namespace signals no
        // process outside of it.
        let ended = unsafe {
            libc::kill(-1, libc::SIGKILL);
            libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL)
        };
        match ended {
            ..0 => return,
            0 if Instant::now() > until => return,
            0 => std::thread::sleep(Duration::from_millis(1)),
            _ => {}
        }
    }
}

/// Marks every descriptor but the standard ones as close-on-exec.
fn close_nonstandard_descriptors() {
    // SAFETY: system calls on numbers; a descriptor that is not open is an error without effect.
    unsafe {
        if libc::syscall(libc::SYS_close_range, 3, u32::MAX, CLOSE_RANGE_CLOEXEC) == 0 {
            return;
        }
        let mut limit = MaybeUninit::<libc::rlimit>::uninit();
        let most = match libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr()) {
            0 => limit.assume_init().rlim_cur.min(MAX_DESCRIPTORS),
            _ => MAX_DESCRIPTORS,
        };
        for descriptor in 3..c_int::try_from(most).unwrap_or(c_int::MAX) {
            libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
}

/// Stops the interval timers, which would outlive the image.
fn stop_timers() {
    for timer in [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF] {
        // SAFETY: all zeros is a timer that is off.
        unsafe { libc::setitimer(timer, &std::mem::zeroed(), std::ptr::null_mut()) };
    }
}

fn cpu_affinity() -> Option<libc::cpu_set_t> {
    // SAFETY: all zeros is an empty set, and the call gets its size.
    unsafe {
        let mut set = std::mem::zeroed();
        (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0).then_some(set)
    }
}

/// Returns the device and inode of the file that a path leads to.
fn file_id(path: &CStr) -> Option<(libc::dev_t, libc::ino_t)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path.to_str().ok()?).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

fn is_script(path: &CStr) -> bool {
    use std::io::Read;
    let mut begins = [0; 2];
    let file = path
        .to_str()
        .ok()
        .and_then(|path| std::fs::File::open(path).ok());
    file.is_some_and(|mut file| file.read_exact(&mut begins).is_ok()) && begins == *b"#!"
}

/// Splits bytes into strings that each end with a zero.
fn nul_terminated(bytes: &[u8]) -> Vec<CString> {
    let ended = bytes.split_inclusive(|byte| *byte == 0);
    ended
        .filter_map(|one| Some(CStr::from_bytes_with_nul(one).ok()?.to_owned()))
        .collect()
}

/// Returns the path by which the kernel executed this process, from pairs of a type and a value
/// (getauxval(3)). A loader that runs as the program changes its own copy, so this is the kernel's.
fn exec_filename(auxv: &[u8]) -> Option<CString> {
    let word = |bytes: &[u8]| Some(u64::from_ne_bytes(bytes.try_into().ok()?));
    let (pairs, _) = auxv.as_chunks::<16>();
    let value = pairs.iter().find_map(|pair| {
        let (kind, value) = pair.split_at(8);
        (word(kind)? == libc::AT_EXECFN).then(|| word(value))?
    })?;
    // SAFETY: the kernel put a string there, above the stack, and no code has run yet that could
    // have changed it.
    let name = unsafe { CStr::from_ptr(usize::try_from(value).ok()? as *const c_char) };
    Some(name.to_owned())
}

/// Parses `SigBlk`, `SigIgn` and `Umask` of `/proc/self/status` (Linux 4.7).
fn parse_status(status: &str) -> Option<(Signals, libc::mode_t)> {
    let field = |name: &str| {
        let mut lines = status.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(":")?.trim()))
    };
    let signals = |name| u64::from_str_radix(field(name)?, 16).ok();
    let of_process = Signals {
        blocked: signals("SigBlk")?,
        ignored: signals("SigIgn")?,
    };
    let umask = libc::mode_t::from_str_radix(field("Umask")?, 8).ok()?;
    Some((of_process, umask))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn c(text: &str) -> CString {
        CString::new(text).unwrap()
    }

    fn start(file: &str, arguments: &[&str]) -> StartState {
        StartState {
            exec_path: c(file),
            arguments: arguments.iter().map(|one| c(one)).collect(),
            ..StartState::read().unwrap()
        }
    }

    fn own_file() -> String {
        let path = std::fs::read_link("/proc/self/exe").unwrap();
        path.to_str().unwrap().to_owned()
    }

    #[test]
    fn start_state_is_read_from_proc() {
        let start = StartState::read().unwrap();
        let arguments: Vec<_> = std::env::args().map(|one| c(&one)).collect();
        assert_eq!(start.arguments, arguments);
        assert_eq!(file_id(&start.exec_path), file_id(c"/proc/self/exe"));
        assert!(!start.environment.is_empty());
        assert_eq!(start.program().0, start.exec_path.as_c_str());
    }

    #[test]
    fn empty_arguments_are_kept() {
        assert_eq!(nul_terminated(b"a\0\0b\0"), [c("a"), c(""), c("b")]);
        assert!(nul_terminated(b"").is_empty());
    }

    #[test]
    fn program_is_executed_by_its_original_path() {
        let file = own_file();
        let start = start(&file, &["other name", "x"]);
        assert_eq!(
            start.program(),
            (c(&file).as_c_str(), &[c("other name"), c("x")][..])
        );
    }

    #[test]
    fn script_is_executed_without_its_interpreter() {
        let folder = std::env::temp_dir().join(format!("bursar-script-{}", std::process::id()));
        std::fs::write(&folder, "#!/bin/sh -e\n").unwrap();
        let script = folder.to_str().unwrap();
        let start = start(script, &["/bin/sh", "-e", script, "x"]);
        assert_eq!(
            start.program(),
            (c(script).as_c_str(), &[c(script), c("x")][..])
        );
        std::fs::remove_file(&folder).unwrap();
        // The script was deleted: its interpreter, which is the program, is executed with the same
        // arguments.
        assert_eq!(start.program(), (c"/proc/self/exe", &start.arguments[..]));
    }

    #[test]
    fn replaced_program_is_executed_from_proc_self_exe() {
        let start = start("/dev/null", &["a"]);
        assert_eq!(start.program(), (c"/proc/self/exe", &[c("a")][..]));
    }

    #[test]
    fn signals_and_umask_are_parsed_from_status() {
        let status =
            "Name:\tSigIgn\nUmask:\t0027\nSigBlk:\t0000000000010000\nSigIgn:\t0000000000001000\n";
        let signals = Signals {
            blocked: 1 << 16,
            ignored: 1 << 12,
        };
        assert_eq!(parse_status(status), Some((signals, 0o027)));
        assert_eq!(parse_status("Umask:\t0022\n"), None);
    }

    #[test]
    fn signal_mask_is_restored_in_this_thread() {
        let usr1 = 1 << (libc::SIGUSR1 - 1);
        let before = set_signal_mask(usr1);
        assert_eq!(set_signal_mask(before), usr1);
    }

    #[test]
    fn execute_returns_when_the_process_is_not_pid_1() {
        assert!(!is_possible());
        // The call returns at once.
        execute();
    }
}
