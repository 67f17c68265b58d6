//! Saves how the program was started, to start it so again.

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStringExt as _;

use super::{
    SIGNAL_END, SavedCwd, close_nonstandard_descriptors, cpu_affinity, kill_other_processes,
    set_signal_mask, stop_timers,
};

/// How a process was started.
#[derive(Debug)]
pub(super) struct StartState {
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

impl StartState {
    /// Returns `None` where `/proc` cannot be read.
    pub(super) fn read() -> Option<StartState> {
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
            |one: &CStr, other: &CStr| file_id(one).is_some_and(|id| Some(id) == file_id(other));
        if same(&self.exec_path, c"/proc/self/exe") {
            return (&self.exec_path, &self.arguments);
        }
        // For a script the kernel put the interpreter before its path, and will again.
        let script = self
            .arguments
            .iter()
            .position(|argument| *argument == self.exec_path);
        if let Some(position) = script.filter(|_| is_script(&self.exec_path)) {
            return (&self.exec_path, &self.arguments[position..]);
        }
        // The file was deleted or replaced; the kernel still has it under this path.
        (c"/proc/self/exe", &self.arguments)
    }

    pub(super) fn execute(&self) {
        let Some(here) = SavedCwd::change_to(&self.cwd) else {
            return;
        };
        // The path may be relative to that directory.
        let (program, arguments) = self.program();
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            let strings = strings.iter().map(|string| string.as_ptr());
            strings.chain([std::ptr::null()]).collect()
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

/// A descriptor as the process was given it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    inode: (libc::dev_t, libc::ino_t),
    /// Status flags of the open file, such as `O_NONBLOCK`, which outlive the image.
    flags: c_int,
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

/// Sets of signals: bit 0 is signal 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Signals {
    blocked: u64,
    ignored: u64,
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

/// Splits bytes into strings that each end with a zero.
fn nul_terminated(bytes: &[u8]) -> Vec<CString> {
    let strings = bytes.split_inclusive(|byte| *byte == 0);
    strings
        .filter_map(|string| Some(CStr::from_bytes_with_nul(string).ok()?.to_owned()))
        .collect()
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

/// Returns the device and inode of the file that a path leads to.
fn file_id(path: &CStr) -> Option<(libc::dev_t, libc::ino_t)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path.to_str().ok()?).ok()?;
    Some((metadata.dev(), metadata.ino()))
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
            arguments: arguments.iter().map(|argument| c(argument)).collect(),
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
        let arguments: Vec<_> = std::env::args().map(|argument| c(&argument)).collect();
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
}
