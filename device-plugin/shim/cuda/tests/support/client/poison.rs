//! Calls around a fault of a kernel, and what an image is started with.
//!
//! ```text
//! streamquery, eventquery, copy POINTER -> ok | err CODE
//! launchex HANDLE, cooperative HANDLE, newstream, load, hostmemory -> ok | err CODE
//! launches N             -> ok NANOSECONDS (N times a kernel that fills nothing)
//! faultthreads N         -> ok CODES      (N threads synchronize after a fault: "early CODE" each)
//! children N SECONDS     -> ok            (starts as many; they ignore what they can)
//! image                  -> ok TEXT       (what this process was started with, and has of it)
//! disturb                -> ok            (changes all of that)
//! replace                -> ok            (its standard error, by another file)
//! ```

use std::fmt::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use super::{Cuda, answer, say};

/// Runs one line, if it is a command of this module.
pub(super) fn run(cuda: &Cuda, words: &[&str]) -> Option<String> {
    let number = |index: usize| words[index].parse::<u64>().expect("a number");
    let done = |code: i32| say(answer(code, String::new()));
    Some(match words[0] {
        "streamquery" => done(call!(cuda, c"cuStreamQuery", (0 => u64))),
        "eventquery" => {
            let mut event = 0_u64;
            call!(cuda, c"cuEventCreate", (&raw mut event => *mut u64, 0 => u32));
            done(call!(cuda, c"cuEventQuery", (event => u64)))
        }
        "copy" => {
            let mut byte = 0_u8;
            done(
                call!(cuda, c"cuMemcpyDtoH_v2", (&raw mut byte => *mut u8, number(1) => u64, 1 => usize)),
            )
        }
        "fillbytes" => done(call!(cuda, c"cuMemsetD8_v2", (
            number(1) => u64, number(2) as u8 => u8, number(3) as usize => usize
        ))),
        "countbytes" => {
            let mut bytes = vec![0_u8; number(3) as usize];
            let code = call!(cuda, c"cuMemcpyDtoH_v2", (
                bytes.as_mut_ptr() => *mut u8, number(1) => u64, bytes.len() => usize
            ));
            let found = bytes.iter().filter(|byte| u64::from(**byte) == number(2));
            say(answer(code, found.count().to_string()))
        }
        "launchex" => {
            // `CUlaunchConfig`: six sizes of 1, no shared memory, the default stream, no
            // attributes.
            let mut config = [0_u64; 7];
            config[..3].fill(1 | 1 << 32);
            done(call!(cuda, c"cuLaunchKernelEx", (
                config.as_ptr() => *const u64, number(1) => u64, 0 => u64, 0 => u64
            )))
        }
        "cooperative" => done(call!(cuda, c"cuLaunchCooperativeKernel", (
            number(1) => u64, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64, 0 => u64
        ))),
        "newstream" => {
            let mut stream = 0_u64;
            done(call!(cuda, c"cuStreamCreate", (&raw mut stream => *mut u64, 0 => u32)))
        }
        "load" => say(cuda.load(false).map(|_| String::new())),
        "hostmemory" => {
            let mut pointer = 0_u64;
            done(
                call!(cuda, c"cuMemHostAlloc", (&raw mut pointer => *mut u64, 64 => usize, 0 => u32)),
            )
        }
        "launches" => {
            // Looked up once, as programs do. SAFETY: the prototype is that of cuda.h.
            let launch = unsafe {
                std::mem::transmute::<*mut libc::c_void, Launch>(cuda.symbol(c"cuLaunchKernel"))
            };
            let function = cuda.kernel(false, "fill").expect("it has such a kernel");
            let (to, value, len) = (cuda.alloc(1).expect("there is room"), 0_u8, 0_u64);
            let arguments = [
                (&raw const to).addr(),
                (&raw const value).addr(),
                (&raw const len).addr(),
            ];
            let arguments = arguments.as_ptr().addr() as u64;
            let start = std::time::Instant::now();
            for _ in 0..number(1) {
                // SAFETY: the kernel's arguments are as it expects them.
                let code = unsafe { launch(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0) };
                assert_eq!(code, 0);
            }
            cuda.free(to);
            format!("ok {}", start.elapsed().as_nanos())
        }
        "faultthreads" => {
            let function = cuda.kernel(false, "fault").expect("it has such a kernel");
            cuda.launch(function);
            let codes: Vec<_> = std::thread::scope(|scope| {
                let synchronise = || {
                    cuda.retain();
                    let code = call!(cuda, c"cuCtxSynchronize", ());
                    println!("early {code}");
                    code
                };
                let threads: Vec<_> = (0..number(1)).map(|_| scope.spawn(synchronise)).collect();
                let joined = threads.into_iter().map(|thread| thread.join());
                joined
                    .map(|code| code.expect("no panic").to_string())
                    .collect()
            });
            format!("ok {}", codes.join(" "))
        }
        "children" => {
            for _ in 0..number(1) {
                let mut child = Command::new("sh");
                let script = format!("trap '' TERM INT HUP; sleep {}; :", words[2]);
                // Closed, because the test reads until the main process is gone.
                let child = child
                    .args(["-c", &script])
                    .stdout(std::process::Stdio::null());
                #[expect(clippy::zombie_processes, reason = "a restart of this process ends it")]
                child.process_group(0).spawn().expect("there is a shell");
            }
            "ok".to_owned()
        }
        "image" => format!("ok {}", image()),
        "disturb" => {
            disturb();
            "ok".to_owned()
        }
        "replace" => {
            // SAFETY: a string that ends with a zero, and numbers.
            unsafe { libc::dup2(libc::open(c"/dev/zero".as_ptr(), libc::O_RDWR), 2) };
            "ok".to_owned()
        }
        _ => return None,
    })
}

/// `cuLaunchKernel`.
type Launch = unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> i32;

/// Returns what exec restores and a program can change.
fn image() -> String {
    let mut text = String::new();
    let read = |file: &str| std::fs::read(format!("/proc/self/{file}")).expect("there is /proc");
    let status = String::from_utf8_lossy(&read("status")).into_owned();
    for field in ["Name", "Umask", "SigBlk", "SigIgn", "Cpus_allowed"] {
        let line = status
            .lines()
            .find(|line| line.starts_with(&format!("{field}:")));
        let _ = write!(text, "{} ", line.expect("it is there").replace('\t', ""));
    }
    let directory = std::env::current_dir().expect("there is one");
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("there is /proc");
    let mut inherited: Vec<_> = descriptors
        .flatten()
        .map(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .parse()
                .expect("a number")
        })
        // SAFETY: the call only returns a number.
        .filter(|fd| unsafe { libc::fcntl(*fd, libc::F_GETFD) } == 0)
        .collect();
    inherited.sort_unstable();
    let mut timer = std::mem::MaybeUninit::<libc::itimerval>::zeroed();
    // SAFETY: getitimer writes the structure, for which all zeros is a value.
    let timer = unsafe {
        libc::getitimer(libc::ITIMER_REAL, timer.as_mut_ptr());
        timer.assume_init()
    };
    let _ = write!(
        text,
        "{} pid {} fds {inherited:?} waits {} stderr {} timer {} {}",
        directory.display(),
        std::process::id(),
        // SAFETY: the call only returns a number.
        unsafe { libc::fcntl(1, libc::F_GETFL) } & libc::O_NONBLOCK == 0,
        std::fs::read_link("/proc/self/fd/2")
            .expect("it is open")
            .display(),
        timer.it_value.tv_sec > 0,
        std::env::args().collect::<Vec<_>>().join(" "),
    );
    let mut environment: Vec<_> = std::env::vars()
        .map(|(name, value)| name + "=" + &value)
        .collect();
    environment.sort_unstable();
    text + " " + &environment.join(" ").replace('\n', " ")
}

fn disturb() {
    std::env::set_current_dir("/").expect("there is a root");
    // SAFETY: no other thread of this program reads the environment, and the calls get whole
    // structures.
    unsafe {
        std::env::set_var("HOME", "/elsewhere");
        std::env::set_var("BURSAR_TEST", "1");
        libc::umask(0o777);
        let mut set = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGUSR1);
        libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        libc::prctl(libc::PR_SET_NAME, c"disturbed".as_ptr());
        libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
        libc::fcntl(1, libc::F_SETFL, libc::O_NONBLOCK);
        let mut first_cpu = std::mem::zeroed::<libc::cpu_set_t>();
        libc::CPU_SET(0, &mut first_cpu);
        libc::sched_setaffinity(0, size_of_val(&first_cpu), &raw const first_cpu);
        let hour = libc::timeval {
            tv_sec: 3600,
            tv_usec: 0,
        };
        let timer = libc::itimerval {
            it_interval: hour,
            it_value: hour,
        };
        libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut());
    }
}
