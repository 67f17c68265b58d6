//! A program for the tests: does what its standard input says, a line a call.
//!
//! ```text
//! start               -> ok                          (CUDA with its first device)
//! alloc BYTES         -> ok POINTER | err CODE       (CUDA)
//! info                -> ok TOTAL FREE | err CODE    (CUDA)
//! init                -> ok | err CODE               (NVML)
//! instance            -> ok | err CODE               (selects the first MIG instance)
//! memory              -> ok TOTAL FREE USED | err CODE
//! memory2 VERSION     -> ok TOTAL FREE USED RESERVED | err CODE
//! list KIND VERSION ROOM -> ok COUNT [PID BYTES]... | err CODE COUNT
//! details MODE ROOM   -> ok COUNT [PID BYTES]... | err CODE COUNT
//! busy ROOM           -> ok COUNT [PID]... | err CODE COUNT
//! busy1 ROOM          -> the same, by the newer call
//! encoders            -> ok COUNT | err CODE
//! accounting          -> err CODE
//! error CODE          -> ok TEXT
//! call NAME           -> err CODE                    (a function of no arguments)
//! fork                -> ok TOTAL FREE USED | err CODE   (the child's `memory`)
//! pid                 -> ok PID
//! ```

use std::ffi::{CStr, CString, c_char, c_void};
use std::io::{BufRead, Write};

/// A library that the loader finds.
struct Library(*mut c_void);

macro_rules! call {
    ($library:expr, $name:expr, ($($argument:expr => $kind:ty),*)) => {{
        // SAFETY: the prototype is the header's.
        unsafe {
            let function = std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> i32>(
                $library.symbol($name),
            );
            function($($argument),*)
        }
    }};
}

impl Library {
    fn open(name: &CStr) -> Library {
        // SAFETY: the tests put the libraries there.
        let library = Library(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) });
        assert!(!library.0.is_null(), "{name:?} is in the loader's path");
        library
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is open, and the name ends with a zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?} is exported");
        address
    }
}

fn start_cuda(cuda: &Library) {
    let (mut device, mut context) = (0, 0_u64);
    assert_eq!(call!(cuda, c"cuInit", (0 => u32)), 0);
    assert_eq!(
        call!(cuda, c"cuDeviceGet", (&raw mut device => *mut i32, 0 => i32)),
        0
    );
    let retained =
        call!(cuda, c"cuDevicePrimaryCtxRetain", (&raw mut context => *mut u64, device => i32));
    assert_eq!(retained, 0);
    assert_eq!(call!(cuda, c"cuCtxSetCurrent", (context => u64)), 0);
}

/// A device of NVML.
struct Nvml<'a> {
    library: &'a Library,
    device: u64,
    /// The GPU instance and compute instance of its processes.
    instances: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: u32,
    bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessV2 {
    process: Process,
    instances: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Detail {
    process: ProcessV2,
    protected: u64,
}

#[repr(C)]
struct Details {
    version: u32,
    mode: u32,
    count: u32,
    places: *mut Detail,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sample {
    pid: u32,
    time: u64,
    engines: [u32; 4],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Info {
    time: u64,
    pid: u32,
    engines: [u32; 6],
}

#[repr(C)]
struct Infos {
    version: u32,
    count: u32,
    last_seen: u64,
    places: *mut Info,
}

/// A value in places that a call must not write.
const UNTOUCHED: u32 = 0xdead;

impl Nvml<'_> {
    fn memory(&self) -> String {
        let mut memory = Memory::default();
        let code = call!(self.library, c"nvmlDeviceGetMemoryInfo", (self.device => u64, &raw mut memory => *mut Memory));
        let Memory { total, free, used } = memory;
        match code {
            0 => format!("ok {total} {free} {used}"),
            code => {
                assert_eq!(total | free | used, 0, "nothing is told beside an error");
                format!("err {code}")
            }
        }
    }

    fn memory_2(&self, version: u32) -> String {
        let mut memory = MemoryV2 {
            version,
            ..MemoryV2::default()
        };
        let code = call!(self.library, c"nvmlDeviceGetMemoryInfo_v2", (self.device => u64, &raw mut memory => *mut MemoryV2));
        let MemoryV2 {
            total,
            reserved,
            free,
            used,
            ..
        } = memory;
        match code {
            0 => format!("ok {total} {free} {used} {reserved}"),
            code => {
                assert_eq!(total | free | used, 0, "nothing is told beside an error");
                format!("err {code}")
            }
        }
    }

    fn list(&self, kind: &str, version: u32, room: usize) -> String {
        let suffix = if version == 1 {
            String::new()
        } else {
            format!("_v{version}")
        };
        let name = format!("nvmlDeviceGet{kind}RunningProcesses{suffix}");
        let name = CString::new(name).expect("no zero in it");
        if version == 1 {
            let mut places = vec![
                Process {
                    pid: UNTOUCHED,
                    bytes: 0
                };
                room
            ];
            self.fill(&name, &mut places, |place| *place)
        } else {
            let place = ProcessV2 {
                process: Process {
                    pid: UNTOUCHED,
                    bytes: 0,
                },
                instances: [0; 2],
            };
            let mut places = vec![place; room];
            self.fill(&name, &mut places, |place| {
                let untouched = place.process.pid == UNTOUCHED;
                let expected = if untouched { [0; 2] } else { self.instances };
                assert_eq!(place.instances, expected);
                place.process
            })
        }
    }

    fn fill<T>(&self, name: &CStr, places: &mut [T], process: impl Fn(&T) -> Process) -> String {
        let mut count = places.len() as u32;
        let pointer = if places.is_empty() {
            std::ptr::null_mut()
        } else {
            places.as_mut_ptr()
        };
        let code = call!(self.library, name, (self.device => u64, &raw mut count => *mut u32, pointer => *mut T));
        listing(code, count, places.iter().map(process))
    }

    fn details(&self, mode: u32, room: usize) -> String {
        let mut places = vec![Detail::default(); room];
        let mut details = Details {
            version: size_of::<Details>() as u32 | 1 << 24,
            mode,
            count: room as u32,
            places: places.as_mut_ptr(),
        };
        let code = call!(self.library, c"nvmlDeviceGetRunningProcessDetailList", (self.device => u64, &raw mut details => *mut Details));
        listing(
            code,
            details.count,
            places.iter().map(|place| place.process.process),
        )
    }

    fn busy(&self, room: usize) -> String {
        let (mut places, mut count) = (vec![Sample::default(); room], room as u32);
        let code = call!(self.library, c"nvmlDeviceGetProcessUtilization", (
            self.device => u64, places.as_mut_ptr() => *mut Sample, &raw mut count => *mut u32, 0 => u64
        ));
        pids(code, count, places.iter().map(|place| place.pid))
    }

    fn busy_1(&self, room: usize) -> String {
        let mut places = vec![Info::default(); room];
        let mut infos = Infos {
            version: size_of::<Infos>() as u32 | 1 << 24,
            count: room as u32,
            last_seen: 0,
            places: places.as_mut_ptr(),
        };
        let code = call!(self.library, c"nvmlDeviceGetProcessesUtilizationInfo", (self.device => u64, &raw mut infos => *mut Infos));
        pids(code, infos.count, places.iter().map(|place| place.pid))
    }
}

fn listing(code: i32, count: u32, places: impl Iterator<Item = Process>) -> String {
    let places: Vec<Process> = places.collect();
    if code != 0 {
        assert!(
            places
                .iter()
                .all(|place| place.pid == UNTOUCHED || place.pid == 0)
        );
        return format!("err {code} {count}");
    }
    let listed = places.iter().take(count as usize);
    let listed: String = listed
        .map(|process| format!(" {} {}", process.pid, process.bytes))
        .collect();
    format!("ok {count}{listed}")
}

fn pids(code: i32, count: u32, places: impl Iterator<Item = u32>) -> String {
    let listed: String = places
        .take(count as usize)
        .map(|pid| format!(" {pid}"))
        .collect();
    match code {
        0 => format!("ok {count}{listed}"),
        code => format!("err {code} {count}"),
    }
}

fn run(cuda: &Library, nvml: &mut Nvml<'_>, line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |index: usize| words[index].parse::<u64>().expect("a number");
    let answer = |code: i32, text: String| match code {
        0 => format!("ok {text}").trim_end().to_owned(),
        code => format!("err {code}"),
    };
    match words[0] {
        "start" => {
            start_cuda(cuda);
            "ok".to_owned()
        }
        "alloc" => {
            let mut pointer = 0_u64;
            let code =
                call!(cuda, c"cuMemAlloc_v2", (&raw mut pointer => *mut u64, number(1) => u64));
            answer(code, pointer.to_string())
        }
        "info" => {
            let (mut free, mut total) = (0_u64, 0_u64);
            let code = call!(cuda, c"cuMemGetInfo_v2", (&raw mut free => *mut u64, &raw mut total => *mut u64));
            answer(code, format!("{total} {free}"))
        }
        "init" => {
            let code = call!(nvml.library, c"nvmlInit_v2", ());
            if code != 0 {
                return format!("err {code}");
            }
            let code = call!(nvml.library, c"nvmlDeviceGetHandleByIndex_v2", (0 => u32, &raw mut nvml.device => *mut u64));
            answer(code, String::new())
        }
        "instance" => {
            let (mut instance, mut number) = (0_u64, 0_u32);
            let code = call!(nvml.library, c"nvmlDeviceGetMigDeviceHandleByIndex", (
                nvml.device => u64, 0 => u32, &raw mut instance => *mut u64
            ));
            if code != 0 {
                return format!("err {code}");
            }
            nvml.device = instance;
            let code = call!(nvml.library, c"nvmlDeviceGetGpuInstanceId", (instance => u64, &raw mut number => *mut u32));
            nvml.instances = [number, 0];
            answer(code, String::new())
        }
        "memory" => nvml.memory(),
        "memory2" => nvml.memory_2(number(1) as u32),
        "list" => nvml.list(words[1], number(2) as u32, number(3) as usize),
        "details" => nvml.details(number(1) as u32, number(2) as usize),
        "busy" => nvml.busy(number(1) as usize),
        "busy1" => nvml.busy_1(number(1) as usize),
        "encoders" => {
            let mut count = 9_u32;
            let code = call!(nvml.library, c"nvmlDeviceGetEncoderSessions", (
                nvml.device => u64, &raw mut count => *mut u32, std::ptr::null_mut() => *mut c_void
            ));
            answer(code, count.to_string())
        }
        "accounting" => {
            let mut count = 9_u32;
            let code = call!(nvml.library, c"nvmlDeviceGetAccountingPids", (
                nvml.device => u64, &raw mut count => *mut u32, std::ptr::null_mut() => *mut c_void
            ));
            answer(code, count.to_string())
        }
        "error" => {
            // SAFETY: the prototype is nvml.h's, and the text is the library's own.
            let text = unsafe {
                let function = std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(u32) -> *const c_char,
                >(nvml.library.symbol(c"nvmlErrorString"));
                CStr::from_ptr(function(number(1) as u32))
            };
            format!("ok {}", text.to_string_lossy())
        }
        "call" => {
            let name = CString::new(words[1]).expect("no zero in it");
            answer(call!(nvml.library, &name, ()), String::new())
        }
        "fork" => in_child(|| nvml.memory()),
        "pid" => format!("ok {}", std::process::id()),
        other => panic!("{other} is no call"),
    }
}

/// Runs a closure in a forked child, and returns its text.
fn in_child(body: impl Fn() -> String) -> String {
    let mut ends = [0; 2];
    // SAFETY: the array has space for two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: this program has one thread.
    match unsafe { libc::fork() } {
        0 => {
            let text = body();
            // SAFETY: the pipe is open, and the text has the given length; then the child ends.
            unsafe {
                libc::write(ends[1], text.as_ptr().cast(), text.len());
                libc::_exit(0);
            }
        }
        child => {
            let (mut text, mut status) = ([0_u8; 256], 0);
            // SAFETY: the pipe is open, and the buffer has the given length.
            let length = unsafe {
                libc::close(ends[1]);
                let length = libc::read(ends[0], text.as_mut_ptr().cast(), text.len());
                libc::close(ends[0]);
                libc::waitpid(child, &raw mut status, 0);
                length
            };
            let length = usize::try_from(length).unwrap_or(0);
            String::from_utf8_lossy(&text[..length]).into_owned()
        }
    }
}

fn main() {
    let (cuda, library) = (
        Library::open(c"libcuda.so.1"),
        Library::open(c"libnvidia-ml.so.1"),
    );
    let mut nvml = Nvml {
        library: &library,
        device: 0,
        instances: [u32::MAX; 2],
    };
    println!("ready");
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        println!("{}", run(&cuda, &mut nvml, &line));
        let _ = std::io::stdout().flush();
    }
}
