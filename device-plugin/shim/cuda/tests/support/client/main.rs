//! A CUDA program for the tests: does what its standard input says, a line a call.
//!
//! ```text
//! alloc BYTES     -> ok POINTER | err CODE
//! free POINTER    -> ok | err CODE
//! info            -> ok FREE TOTAL | err CODE
//! info-free, info-total -> ok BYTES | err CODE (one output of the call, with null for the other)
//! total           -> ok BYTES | err CODE
//! managed BYTES   -> ok POINTER | err CODE
//! host BYTES      -> ok POINTER            (ordinary host memory, which is never freed)
//! pitch W H       -> ok POINTER | err CODE
//! array W H D FLAGS  -> ok HANDLE | err CODE  (of 32-bit floats; flat where D and FLAGS are zero)
//! mipmap W H D LEVELS -> ok HANDLE | err CODE
//! unarray HANDLE, unmipmap HANDLE -> ok | err CODE
//! greedy BYTES    -> ok COUNT CODE
//! churn N BYTES   -> ok NANOSECONDS        (N times alloc and free)
//! churns T N BYTES -> ok NANOSECONDS       (the same in T threads)
//! query N         -> ok NANOSECONDS        (N times a forwarded call)
//! bare NAME       -> ok | err CODE         (a function, with null arguments)
//! missing         -> err CODE              (a function that the driver lacks)
//! reset           -> ok | err CODE         (the primary context, then a new one)
//! retain          -> ok | err CODE         (the primary context, once more)
//! release         -> ok | err CODE         (the primary context, once)
//! context         -> ok HANDLE | err CODE  (a new one, made current)
//! destroy HANDLE  -> ok | err CODE         (the primary context is current again)
//! current         -> ok HANDLE | err CODE
//! attach, detach HANDLE -> ok | err CODE   (the current context's users)
//! address NAME VERSION FLAGS -> ok 0|1 SYMBOL | err CODE  (whether cuGetProcAddress gave one of
//!                                          the library's own functions, and which)
//! limit BYTES     -> ok BYTES | err CODE   (the stack's; what it is then)
//! function NAME, kernel NAME -> ok HANDLE | err CODE  (of the simulated driver's kernels)
//! functions, kernels -> ok COUNT | err CODE  (all of them)
//! launch HANDLE   -> ok | err CODE         (a kernel without arguments)
//! green, ungreen HANDLE -> ok HANDLE, ok | err CODE
//! graph BYTES [CHILD] -> ok HANDLE | err CODE  (allocates and frees; zero: an empty node)
//! instantiate GRAPH, instantiateupload GRAPH -> ok HANDLE | err CODE
//! launchgraph HANDLE [STREAM], upload HANDLE, ungraph HANDLE, trim -> ok | err CODE
//! retains N       -> ok CODES              (N threads retain the primary context at once)
//! toggles N TIMES -> ok CODES              (N threads retain and release it, so many times)
//! start LINE      -> ok                    (another thread does the line, with the same context)
//! started         -> ok 0|1                (whether that thread is still at it)
//! join            -> the line's answer | late
//! early           -> early CODES ready     (a new image; what it is told before cuInit)
//! fork            -> ok CODE               (the child's cuMemGetInfo)
//! exec            -> ready                 (a new image of the same process)
//! ```
//!
//! More of them are in [`pools`], [`poison`], [`vmm`], [`chunks`] and [`storm`].

use std::ffi::CStr;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

/// Set for an image that calls CUDA before `cuInit`.
const EARLY: &str = "EARLY";

/// The driver that the loader finds.
struct Cuda(*mut libc::c_void);

// SAFETY: a handle of dlopen belongs to the process, not to a thread.
unsafe impl Sync for Cuda {}

macro_rules! call {
    ($cuda:expr, $name:expr, ($($argument:expr => $kind:ty),*)) => {{
        // SAFETY: the prototype is that of cuda.h.
        unsafe {
            let function = std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn($($kind),*) -> i32>(
                $cuda.symbol($name),
            );
            function($($argument),*)
        }
    }};
}

mod chunks;
mod poison;
mod pools;
mod storm;
mod vmm;

impl Cuda {
    fn start() -> Cuda {
        // SAFETY: the tests put the shim there.
        let cuda = Cuda(unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) });
        assert!(!cuda.0.is_null(), "the shim is in the loader's path");
        if std::env::var_os(EARLY).is_some() {
            let (mut got, properties) = (0_u64, [1, 0, 1, 0, 0, 0, 0, 0]);
            let managed = call!(cuda, c"cuMemAllocManaged", (&raw mut got => *mut u64, 4096 => u64, 1 => u32));
            let created = call!(cuda, c"cuMemCreate", (
                &raw mut got => *mut u64, 2 << 20 => u64, properties.as_ptr() => *const i32, 0 => u64
            ));
            println!("early {managed} {created}");
        }
        let mut device = 0;
        assert_eq!(call!(cuda, c"cuInit", (0 => u32)), 0);
        assert_eq!(
            call!(cuda, c"cuDeviceGet", (&raw mut device => *mut i32, 0 => i32)),
            0
        );
        // Where this is denied, the program's next call reports it.
        cuda.retain();
        cuda
    }

    /// Retains the primary context and makes it current.
    fn retain(&self) -> i32 {
        self.use_device(0)
    }

    /// Releases the primary context.
    fn release(&self) -> i32 {
        call!(self, c"cuDevicePrimaryCtxRelease_v2", (0 => i32))
    }

    fn current(&self) -> Result<u64, i32> {
        let mut context = 0;
        let code = call!(self, c"cuCtxGetCurrent", (&raw mut context => *mut u64));
        answer(code, context)
    }

    /// Retains the primary context of any device and makes it current.
    fn use_device(&self, device: i32) -> i32 {
        let mut context = 0_u64;
        match call!(self, c"cuDevicePrimaryCtxRetain", (&raw mut context => *mut u64, device => i32))
        {
            0 => call!(self, c"cuCtxSetCurrent", (context => u64)),
            code => code,
        }
    }

    fn symbol(&self, name: &CStr) -> *mut libc::c_void {
        // SAFETY: the handle is open, and the name ends with a zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?} is exported");
        address
    }

    /// Returns whether an address is in the same file as `cuInit`, and the symbol there.
    fn owner(&self, address: *mut libc::c_void) -> String {
        let asked = |address: *mut libc::c_void| {
            let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
            // SAFETY: dladdr writes the structure, for which all zeros is a value.
            unsafe {
                libc::dladdr(address, info.as_mut_ptr());
                info.assume_init()
            }
        };
        let (info, own) = (asked(address), asked(self.symbol(c"cuInit")));
        let name = if info.dli_sname.is_null() {
            "?".into()
        } else {
            // SAFETY: a string of the library's symbol table.
            unsafe { CStr::from_ptr(info.dli_sname) }.to_string_lossy()
        };
        format!("{} {name}", i32::from(info.dli_fbase == own.dli_fbase))
    }

    /// Creates a graph that allocates and frees, beside a child graph.
    fn graph(&self, bytes: u64, child: Option<u64>) -> Result<u64, i32> {
        let (mut graph, mut node) = (0_u64, 0_u64);
        let mut code = call!(self, c"cuGraphCreate", (&raw mut graph => *mut u64, 0 => u32));
        if bytes == 0 {
            code |= call!(self, c"cuGraphAddEmptyNode", (
                &raw mut node => *mut u64, graph => u64, 0 => u64, 0 => u64
            ));
        } else {
            // `CUDA_MEM_ALLOC_NODE_PARAMS`: pinned, of device 0; its size and then its address.
            let mut wanted = [0_u64; 15];
            (wanted[0], wanted[1], wanted[13]) = (1, 1, bytes);
            code |= call!(self, c"cuGraphAddMemAllocNode", (
                &raw mut node => *mut u64, graph => u64, 0 => u64, 0 => u64, wanted.as_mut_ptr() => *mut u64
            ));
            code |= call!(self, c"cuGraphAddMemFreeNode", (
                &raw mut node => *mut u64, graph => u64, 0 => u64, 0 => u64, wanted[14] => u64
            ));
        }
        if let Some(child) = child {
            code |= call!(self, c"cuGraphAddChildGraphNode", (
                &raw mut node => *mut u64, graph => u64, 0 => u64, 0 => u64, child => u64
            ));
        }
        answer(code, graph)
    }

    /// Loads a library or a module, of any image.
    fn load(&self, library: bool) -> Result<u64, i32> {
        let (mut handle, image) = (0, 0_u8);
        let code = if library {
            call!(self, c"cuLibraryLoadData", (
                &raw mut handle => *mut u64, &raw const image => *const u8, 0 => u64, 0 => u64, 0 => u32, 0 => u64,
                0 => u64, 0 => u32
            ))
        } else {
            call!(self, c"cuModuleLoadData", (&raw mut handle => *mut u64, &raw const image => *const u8))
        };
        answer(code, handle)
    }

    /// Returns a kernel's handle by its name, from a library or a module.
    fn kernel(&self, library: bool, name: &str) -> Result<u64, i32> {
        let from = self.load(library)?;
        let name = std::ffi::CString::new(name).expect("no zero in a name");
        let get = if library {
            c"cuLibraryGetKernel"
        } else {
            c"cuModuleGetFunction"
        };
        let mut handle = 0;
        let code = call!(self, get, (
            &raw mut handle => *mut u64, from => u64, name.as_ptr() => *const libc::c_char
        ));
        answer(code, handle)
    }

    /// Returns how many kernels a library or module has, after it got all handles.
    fn kernels(&self, library: bool) -> Result<usize, i32> {
        let from = self.load(library)?;
        let all = if library {
            c"cuLibraryEnumerateKernels"
        } else {
            c"cuModuleEnumerateFunctions"
        };
        let mut handles = [0_u64; 64];
        let code = call!(self, all, (handles.as_mut_ptr() => *mut u64, 64 => u32, from => u64));
        answer(code, handles.iter().filter(|handle| **handle != 0).count())
    }

    /// Launches a kernel that accesses memory, as kernels move managed memory to the device.
    fn touch(&self, pointer: u64, bytes: u64) -> Result<(), i32> {
        let function = self.kernel(false, "touch")?;
        let arguments = [&raw const pointer, &raw const bytes];
        let code = call!(self, c"cuLaunchKernel", (
            function => u64, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64,
            arguments.as_ptr() => *const *const u64, 0 => u64
        ));
        answer(code, ())
    }

    /// Launches a kernel without arguments.
    fn launch(&self, function: u64) -> i32 {
        call!(self, c"cuLaunchKernel", (
            function => u64, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64,
            0 => u64, 0 => u64
        ))
    }

    fn alloc(&self, bytes: u64) -> Result<u64, i32> {
        let mut pointer = 0;
        answer(
            call!(self, c"cuMemAlloc_v2", (&raw mut pointer => *mut u64, bytes => u64)),
            pointer,
        )
    }

    fn array(&self, width: u64, height: u64, depth: u64, flags: u32) -> Result<u64, i32> {
        let mut array = 0;
        let shape = shape(width, height, depth, flags);
        let code = if depth == 0 && flags == 0 {
            let flat = Flat(width, height, FLOAT, 1);
            call!(self, c"cuArrayCreate_v2", (&raw mut array => *mut u64, &raw const flat => *const Flat))
        } else {
            call!(self, c"cuArray3DCreate_v2", (&raw mut array => *mut u64, &raw const shape => *const Shape))
        };
        answer(code, array)
    }

    fn free(&self, pointer: u64) -> i32 {
        call!(self, c"cuMemFree_v2", (pointer => u64))
    }

    fn info(&self) -> Result<(u64, u64), i32> {
        let (mut free, mut total) = (0, 0);
        let code = call!(self, c"cuMemGetInfo_v2", (&raw mut free => *mut u64, &raw mut total => *mut u64));
        answer(code, (free, total))
    }
}

/// Makes a call from several threads at once. Returns their answers.
fn at_once(threads: u64, call: impl Fn() -> i32 + Sync) -> String {
    let codes: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(&call)).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"));
        joined.map(|code| code.to_string()).collect()
    });
    format!("ok {}", codes.join(" "))
}

/// A line that another thread runs.
#[derive(Default)]
struct Beside(Option<std::thread::JoinHandle<String>>);

impl Beside {
    /// Runs one line, if it is a command of this module.
    fn run(&mut self, cuda: &'static Cuda, line: &str) -> Option<String> {
        if let Some(line) = line.strip_prefix("start ") {
            let (line, context) = (line.to_owned(), cuda.current().expect("no error"));
            self.0 = Some(std::thread::spawn(move || {
                assert_eq!(call!(cuda, c"cuCtxSetCurrent", (context => u64)), 0);
                run(cuda, &line)
            }));
            return Some("ok".to_owned());
        }
        let is_at_it = || {
            self.0
                .as_ref()
                .is_some_and(|started| !started.is_finished())
        };
        match line.trim() {
            "started" => Some(format!("ok {}", i32::from(is_at_it()))),
            "join" => Some(self.join()),
            _ => None,
        }
    }

    fn join(&mut self) -> String {
        let start = Instant::now();
        let started = self.0.take().expect("a line was started");
        while !started.is_finished() {
            if start.elapsed() > LATE {
                return "late".to_owned();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        started.join().expect("no panic")
    }
}

/// How long a line of another thread may take.
const LATE: Duration = Duration::from_secs(10);

/// `CU_AD_FORMAT_FLOAT`.
const FLOAT: u32 = 0x20;

/// `CUDA_ARRAY_DESCRIPTOR`: width, height, format, channels.
#[repr(C)]
struct Flat(u64, u64, u32, u32);

/// `CUDA_ARRAY3D_DESCRIPTOR`: width, height, depth, format, channels, flags.
#[repr(C)]
struct Shape(u64, u64, u64, u32, u32, u32);

fn shape(width: u64, height: u64, depth: u64, flags: u32) -> Shape {
    Shape(width, height, depth, FLOAT, 1, flags)
}

fn answer<T>(code: i32, value: T) -> Result<T, i32> {
    if code == 0 { Ok(value) } else { Err(code) }
}

fn say(result: Result<String, i32>) -> String {
    result.map_or_else(
        |code| format!("err {code}"),
        |text| format!("ok {text}").trim_end().to_owned(),
    )
}

fn run(cuda: &Cuda, line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let others = [pools::run, vmm::run, poison::run, chunks::run];
    if let Some(answer) = others.iter().find_map(|run| run(cuda, &words)) {
        return answer;
    }
    let number = |index: usize| words[index].parse::<u64>().expect("a number");
    match words[0] {
        "alloc" => say(cuda.alloc(number(1)).map(|pointer| pointer.to_string())),
        "free" => say(answer(cuda.free(number(1)), String::new())),
        "info" => say(cuda.info().map(|(free, total)| format!("{free} {total}"))),
        "info-free" | "info-total" => {
            let (mut bytes, null) = (0_u64, std::ptr::null_mut());
            let place = &raw mut bytes;
            let (free, total) = if words[0] == "info-free" {
                (place, null)
            } else {
                (null, place)
            };
            let code = call!(cuda, c"cuMemGetInfo_v2", (free => *mut u64, total => *mut u64));
            say(answer(code, bytes.to_string()))
        }
        "total" => {
            let mut bytes = 0_u64;
            let code = call!(cuda, c"cuDeviceTotalMem_v2", (&raw mut bytes => *mut u64, 0 => i32));
            say(answer(code, bytes.to_string()))
        }
        "managed" => {
            let mut pointer = 0_u64;
            let code = call!(cuda, c"cuMemAllocManaged", (&raw mut pointer => *mut u64, number(1) => u64, 1 => u32));
            say(answer(code, pointer.to_string()))
        }
        "host" => {
            let memory = vec![0_u8; number(1) as usize].leak();
            say(Ok((memory.as_ptr() as u64).to_string()))
        }
        "touch" => say(cuda.touch(number(1), number(2)).map(|()| String::new())),
        "variable" => {
            let (mut module, image) = (0_u64, format!("managed {}\0", number(1)));
            let code = call!(cuda, c"cuModuleLoadData", (
                &raw mut module => *mut u64, image.as_ptr() => *const u8
            ));
            say(answer(code, module.to_string()))
        }
        "global" => {
            let (mut pointer, mut bytes) = (0_u64, 0_u64);
            let code = call!(cuda, c"cuModuleGetGlobal_v2", (
                &raw mut pointer => *mut u64, &raw mut bytes => *mut u64, number(1) => u64,
                c"managed".as_ptr() => *const libc::c_char
            ));
            say(answer(code, format!("{pointer} {bytes}")))
        }
        "unload" => say(answer(
            call!(cuda, c"cuModuleUnload", (number(1) => u64)),
            String::new(),
        )),
        // The form of CUDA 2, with 32-bit places.
        "global-v1" => {
            let (mut pointer, mut bytes) = (0_u32, 0_u32);
            let code = call!(cuda, c"cuModuleGetGlobal", (
                &raw mut pointer => *mut u32, &raw mut bytes => *mut u32, number(1) => u64,
                c"managed".as_ptr() => *const libc::c_char
            ));
            say(answer(code, format!("{pointer} {bytes}")))
        }
        "library" => {
            let (mut library, image) = (0_u64, format!("managed {}\0", number(1)));
            let code = call!(cuda, c"cuLibraryLoadData", (
                &raw mut library => *mut u64, image.as_ptr() => *const u8, 0 => u64, 0 => u64, 0 => u32,
                0 => u64, 0 => u64, 0 => u32
            ));
            say(answer(code, library.to_string()))
        }
        "library-global" | "library-managed" => {
            let (mut pointer, mut bytes) = (0_u64, 0_u64);
            let name = match words[0] {
                "library-global" => c"cuLibraryGetGlobal",
                _ => c"cuLibraryGetManaged",
            };
            let code = call!(cuda, name, (
                &raw mut pointer => *mut u64, &raw mut bytes => *mut u64, number(1) => u64,
                c"managed".as_ptr() => *const libc::c_char
            ));
            say(answer(code, format!("{pointer} {bytes}")))
        }
        "unload-library" => say(answer(
            call!(cuda, c"cuLibraryUnload", (number(1) => u64)),
            String::new(),
        )),
        "attribute" => {
            let mut value = -1_i32;
            let code = call!(cuda, c"cuDeviceGetAttribute", (
                &raw mut value => *mut i32, number(1) as i32 => i32, 0 => i32
            ));
            say(answer(code, value.to_string()))
        }
        "pitch" => {
            let (mut pointer, mut pitch) = (0_u64, 0_u64);
            let code = call!(cuda, c"cuMemAllocPitch_v2", (
                &raw mut pointer => *mut u64, &raw mut pitch => *mut u64, number(1) => u64, number(2) => u64, 4 => u32
            ));
            say(answer(code, pointer.to_string()))
        }
        "array" => say(cuda
            .array(number(1), number(2), number(3), number(4) as u32)
            .map(|array| array.to_string())),
        "mipmap" => {
            let shape = shape(number(1), number(2), number(3), 0);
            let mut array = 0_u64;
            let code = call!(cuda, c"cuMipmappedArrayCreate", (
                &raw mut array => *mut u64, &raw const shape => *const Shape, number(4) as u32 => u32
            ));
            say(answer(code, array.to_string()))
        }
        "unarray" => say(answer(
            call!(cuda, c"cuArrayDestroy", (number(1) => u64)),
            String::new(),
        )),
        "unmipmap" => say(answer(
            call!(cuda, c"cuMipmappedArrayDestroy", (number(1) => u64)),
            String::new(),
        )),
        "greedy" => {
            let mut count = 0;
            loop {
                match cuda.alloc(number(1)) {
                    Ok(_) => count += 1,
                    Err(code) => return format!("ok {count} {code}"),
                }
            }
        }
        "churn" => {
            let start = Instant::now();
            for _ in 0..number(1) {
                let pointer = cuda.alloc(number(2)).expect("there is room");
                assert_eq!(cuda.free(pointer), 0);
            }
            format!("ok {}", start.elapsed().as_nanos())
        }
        "churns" => {
            let (context, start) = (cuda.current().expect("no error"), Instant::now());
            at_once(number(1), || {
                call!(cuda, c"cuCtxSetCurrent", (context => u64));
                for _ in 0..number(2) {
                    let pointer = cuda.alloc(number(3)).expect("there is room");
                    assert_eq!(cuda.free(pointer), 0);
                }
                0
            });
            format!("ok {}", start.elapsed().as_nanos())
        }
        "query" => {
            // SAFETY: the prototype is that of cuda.h.
            let query = unsafe {
                std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*mut i32) -> i32>(
                    cuda.symbol(c"cuDriverGetVersion"),
                )
            };
            let (mut version, start) = (0, Instant::now());
            for _ in 0..number(1) {
                // SAFETY: the prototype is that of cuda.h.
                unsafe { query(&raw mut version) };
            }
            format!("ok {}", start.elapsed().as_nanos())
        }
        "reset" => {
            let code = call!(cuda, c"cuDevicePrimaryCtxReset_v2", (0 => i32));
            say(answer(code, ()).and_then(|()| answer(cuda.retain(), String::new())))
        }
        "retain" => say(answer(cuda.retain(), String::new())),
        "release" => say(answer(cuda.release(), String::new())),
        "context" => {
            let mut context = 0_u64;
            let code =
                call!(cuda, c"cuCtxCreate_v2", (&raw mut context => *mut u64, 0 => u32, 0 => i32));
            say(answer(code, context.to_string()))
        }
        "destroy" => {
            let code = call!(cuda, c"cuCtxDestroy_v2", (number(1) => u64));
            say(answer(code, String::new()))
        }
        "current" => say(cuda.current().map(|context| context.to_string())),
        "attach" => {
            let mut context = 0_u64;
            let code = call!(cuda, c"cuCtxAttach", (&raw mut context => *mut u64, 0 => u32));
            say(answer(code, String::new()))
        }
        "detach" => {
            let code = call!(cuda, c"cuCtxDetach", (number(1) => u64));
            say(answer(code, String::new()))
        }
        "address" => {
            let name = std::ffi::CString::new(words[1]).expect("no zero in a name");
            let mut found = std::ptr::null_mut::<libc::c_void>();
            let code = call!(cuda, c"cuGetProcAddress_v2", (
                name.as_ptr() => *const libc::c_char, &raw mut found => *mut *mut libc::c_void,
                number(2) as i32 => i32, number(3) => u64, std::ptr::null_mut() => *mut i32
            ));
            say(answer(code, ()).map(|()| cuda.owner(found)))
        }
        "bare" => {
            let name = std::ffi::CString::new(words[1]).expect("no zero in a name");
            let code =
                call!(cuda, name.as_c_str(), (0 => u64, 0 => u64, 0 => u64, 0 => u64, 0 => u64));
            say(answer(code, String::new()))
        }
        "table" => {
            let digits = words[1].as_bytes().chunks(2);
            let id: Vec<u8> = digits
                .map(|pair| std::str::from_utf8(pair).expect("ASCII"))
                .map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal digits"))
                .collect();
            let mut table = std::ptr::null::<libc::c_void>();
            let code = call!(cuda, c"cuGetExportTable", (
                &raw mut table => *mut *const libc::c_void, id.as_ptr() => *const u8
            ));
            say(answer(code, (!table.is_null()).to_string()))
        }
        "limit" => {
            let mut now = 0_u64;
            let code = call!(cuda, c"cuCtxSetLimit", (0 => i32, number(1) => u64));
            call!(cuda, c"cuCtxGetLimit", (&raw mut now => *mut u64, 0 => i32));
            say(answer(code, now.to_string()))
        }
        "function" => say(cuda
            .kernel(false, words[1])
            .map(|handle| handle.to_string())),
        "kernel" => say(cuda.kernel(true, words[1]).map(|handle| handle.to_string())),
        "functions" => say(cuda.kernels(false).map(|count| count.to_string())),
        "kernels" => say(cuda.kernels(true).map(|count| count.to_string())),
        "launch" => say(answer(cuda.launch(number(1)), String::new())),
        "green" => {
            let mut green = 0_u64;
            let code = call!(cuda, c"cuGreenCtxCreate", (
                &raw mut green => *mut u64, 0 => u64, 0 => i32, 1 => u32
            ));
            say(answer(code, green.to_string()))
        }
        "ungreen" => say(answer(
            call!(cuda, c"cuGreenCtxDestroy", (number(1) => u64)),
            String::new(),
        )),
        "graph" => say(cuda
            .graph(number(1), words.get(2).map(|_| number(2)))
            .map(|graph| graph.to_string())),
        "instantiate" => {
            let mut executable = 0_u64;
            let code = call!(cuda, c"cuGraphInstantiateWithFlags", (
                &raw mut executable => *mut u64, number(1) => u64, 0 => u64
            ));
            say(answer(code, executable.to_string()))
        }
        "instantiateupload" => {
            // `CUDA_GRAPH_INSTANTIATE_PARAMS` with `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
            let (mut executable, mut parameters) = (0_u64, [2_u64, 0, 0, 0]);
            let code = call!(cuda, c"cuGraphInstantiateWithParams", (
                &raw mut executable => *mut u64, number(1) => u64, parameters.as_mut_ptr() => *mut u64
            ));
            say(answer(code, executable.to_string()))
        }
        "launchgraph" => {
            let stream = words.get(2).map_or(0, |_| number(2));
            let code = call!(cuda, c"cuGraphLaunch", (number(1) => u64, stream => u64));
            say(answer(code, String::new()))
        }
        "upload" => {
            let code = call!(cuda, c"cuGraphUpload", (number(1) => u64, 0 => u64));
            say(answer(code, String::new()))
        }
        "ungraph" => say(answer(
            call!(cuda, c"cuGraphExecDestroy", (number(1) => u64)),
            String::new(),
        )),
        "trim" => say(answer(
            call!(cuda, c"cuDeviceGraphMemTrim", (0 => i32)),
            String::new(),
        )),
        "retains" => at_once(number(1), || cuda.retain()),
        "toggles" => at_once(number(1), || {
            let toggle = |_| match cuda.retain() {
                0 => cuda.release(),
                code => code,
            };
            (0..number(2)).map(toggle).max().unwrap_or(0)
        }),
        "missing" => format!(
            "err {}",
            call!(cuda, c"cuTexRefSetMipmapLevelBias", (0 => u64, 1.5 => f32))
        ),
        "fork" => {
            // SAFETY: the child only calls the driver and leaves.
            match unsafe { libc::fork() } {
                0 => {
                    let pooled = pools::allocate(cuda, 4096, 0).err().unwrap_or(0);
                    let code = cuda.alloc(4096).err().unwrap_or(0).min(pooled);
                    // SAFETY: ends the child at once.
                    unsafe { libc::_exit(code) }
                }
                child => {
                    let mut status = 0;
                    // SAFETY: waits for the child just made.
                    unsafe { libc::waitpid(child, &raw mut status, 0) };
                    assert!(
                        libc::WIFEXITED(status),
                        "the child was killed by signal {}",
                        libc::WTERMSIG(status)
                    );
                    format!("ok {}", libc::WEXITSTATUS(status))
                }
            }
        }
        "exec" => panic!("{}", std::process::Command::new("/proc/self/exe").exec()),
        "early" => panic!(
            "{}",
            std::process::Command::new("/proc/self/exe")
                .env(EARLY, "1")
                .exec()
        ),
        other => panic!("unknown command {other}"),
    }
}

fn main() {
    let mut out = std::io::stdout();
    // The program has much to do before it calls CUDA.
    if let Some(busy) = std::env::args_os().nth(1) {
        let busy = std::path::Path::new(&busy);
        if busy.exists() {
            writeln!(out, "busy").expect("stdout is open");
        }
        while busy.exists() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
    let cuda: &'static Cuda = Box::leak(Box::new(Cuda::start()));
    writeln!(out, "ready").expect("stdout is open");
    // Unbuffered, because after an exec the next image must find what was not read.
    let mut input = std::io::BufReader::with_capacity(1, std::io::stdin());
    let mut line = String::new();
    let (mut storm, mut beside) = (storm::Storm::default(), Beside::default());
    while input.read_line(&mut line).expect("stdin is text") > 0 {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = storm.run(cuda, &words);
        let answer = answer.or_else(|| beside.run(cuda, &line));
        writeln!(out, "{}", answer.unwrap_or_else(|| run(cuda, &line))).expect("stdout is open");
        line.clear();
    }
}
