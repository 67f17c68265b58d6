//! Commands of stream-ordered memory.
//!
//! ```text
//! asyncalloc BYTES STREAM     -> ok POINTER | err CODE
//! asyncfree POINTER STREAM    -> ok | err CODE
//! poolalloc POOL BYTES        -> ok POINTER | err CODE     (in stream 0)
//! pool KIND LOCATION HANDLES  -> ok POOL | err CODE        (of device 0 or the host)
//! pooldestroy POOL            -> ok | err CODE
//! pooltrim POOL KEEP          -> ok | err CODE
//! poolsizes POOL              -> ok RESERVED USED | err CODE
//! threshold POOL BYTES        -> ok | err CODE
//! poolexport POOL KIND        -> ok DESCRIPTOR | err CODE
//! devicepool DEVICE           -> ok POOL | err CODE        (what it allocates from)
//! setpool DEVICE POOL         -> ok | err CODE
//! defaultpool KIND            -> ok POOL | err CODE        (device 0's of that kind: CUDA 13)
//! stream                      -> ok STREAM | err CODE
//! sync STREAM                 -> ok | err CODE             (0: the context)
//! spin STREAM MILLISECONDS    -> ok | err CODE             (keeps the stream busy)
//! device NUMBER               -> ok | err CODE             (its primary context is current)
//! capture STREAM              -> ok | err CODE
//! unseencapture STREAM        -> ok | err CODE             (begun past the shim)
//! endcapture STREAM           -> ok GRAPH | err CODE
//! asyncchurn N BYTES          -> ok NANOSECONDS            (N times allocate and free)
//! asyncgreedy THREADS BYTES   -> ok COUNT CODE             (until each thread gets no more)
//! ```

use std::time::Instant;

use super::{Cuda, answer, say};

pub(crate) fn run(cuda: &Cuda, words: &[&str]) -> Option<String> {
    let number = |index: usize| words[index].parse::<u64>().expect("a number");
    let done = |code| say(answer(code, String::new()));
    let mut got = 0_u64;
    let result = match words[0] {
        "asyncalloc" => {
            say(allocate(cuda, number(1), number(2)).map(|pointer| pointer.to_string()))
        }
        "asyncfree" => done(free(cuda, number(1), number(2))),
        "poolalloc" => {
            let code = call!(cuda, c"cuMemAllocFromPoolAsync", (
                &raw mut got => *mut u64, number(2) => u64, number(1) => u64, 0 => u64
            ));
            say(answer(code, got.to_string()))
        }
        "pool" => {
            let mut properties = [0_i32; 22];
            (properties[0], properties[2]) = (number(1) as i32, number(2) as i32);
            properties[1] = number(3) as i32;
            let code = call!(cuda, c"cuMemPoolCreate", (
                &raw mut got => *mut u64, properties.as_ptr() => *const i32
            ));
            say(answer(code, got.to_string()))
        }
        "pooldestroy" => done(call!(cuda, c"cuMemPoolDestroy", (number(1) => u64))),
        "pooltrim" => done(call!(cuda, c"cuMemPoolTrimTo", (number(1) => u64, number(2) => u64))),
        "poolsizes" => {
            let mut used = 0_u64;
            let ask = |attribute: i32, value: *mut u64| call!(cuda, c"cuMemPoolGetAttribute", (number(1) => u64, attribute => i32, value => *mut u64));
            let code = ask(5, &raw mut got).max(ask(7, &raw mut used));
            say(answer(code, format!("{got} {used}")))
        }
        "threshold" => {
            got = number(2);
            done(
                call!(cuda, c"cuMemPoolSetAttribute", (number(1) => u64, 4 => i32, &raw mut got => *mut u64)),
            )
        }
        "poolexport" => {
            let mut descriptor = 0_i32;
            let code = call!(cuda, c"cuMemPoolExportToShareableHandle", (
                &raw mut descriptor => *mut i32, number(1) => u64, number(2) as i32 => i32, 0 => u64
            ));
            say(answer(code, descriptor.to_string()))
        }
        "devicepool" => {
            let code = call!(cuda, c"cuDeviceGetMemPool", (&raw mut got => *mut u64, number(1) as i32 => i32));
            say(answer(code, got.to_string()))
        }
        "setpool" => {
            done(call!(cuda, c"cuDeviceSetMemPool", (number(1) as i32 => i32, number(2) => u64)))
        }
        "defaultpool" => {
            let mut location = [1_i32, 0];
            let code = call!(cuda, c"cuMemGetDefaultMemPool", (
                &raw mut got => *mut u64, location.as_mut_ptr() => *mut i32, number(1) as i32 => i32
            ));
            say(answer(code, got.to_string()))
        }
        "stream" => {
            let code = call!(cuda, c"cuStreamCreate", (&raw mut got => *mut u64, 1 => u32));
            say(answer(code, got.to_string()))
        }
        "destroystream" => done(call!(cuda, c"cuStreamDestroy_v2", (number(1) => u64))),
        "sync" if number(1) == 0 => done(call!(cuda, c"cuCtxSynchronize", ())),
        "sync" => done(call!(cuda, c"cuStreamSynchronize", (number(1) => u64))),
        "spin" => done(spin(cuda, number(1), number(2))),
        "device" => done(cuda.use_device(number(1) as i32)),
        "capture" => done(call!(cuda, c"cuStreamBeginCapture_v2", (number(1) => u64, 0 => i32))),
        "unseencapture" => {
            // SAFETY: the tests put the driver there, and the shim has opened it.
            let driver =
                unsafe { libc::dlopen(c"/opt/bursar/drv/cuda.so.1".as_ptr(), libc::RTLD_NOW) };
            done(call!(Cuda(driver), c"cuStreamBeginCapture_v2", (number(1) => u64, 0 => i32)))
        }
        "endcapture" => {
            let code =
                call!(cuda, c"cuStreamEndCapture", (number(1) => u64, &raw mut got => *mut u64));
            say(answer(code, got.to_string()))
        }
        "asyncchurn" => {
            let start = Instant::now();
            for _ in 0..number(1) {
                let pointer = allocate(cuda, number(2), 0).expect("there is room");
                assert_eq!(free(cuda, pointer, 0), 0);
            }
            format!("ok {}", start.elapsed().as_nanos())
        }
        "asyncgreedy" => greedy(cuda, number(1), number(2)),
        _ => return None,
    };
    Some(result)
}

pub(crate) fn allocate(cuda: &Cuda, bytes: u64, stream: u64) -> Result<u64, i32> {
    let mut pointer = 0;
    let code = call!(cuda, c"cuMemAllocAsync", (&raw mut pointer => *mut u64, bytes => u64, stream => u64));
    answer(code, pointer)
}

fn free(cuda: &Cuda, pointer: u64, stream: u64) -> i32 {
    call!(cuda, c"cuMemFreeAsync", (pointer => u64, stream => u64))
}

/// Launches the simulated driver's kernel that only waits.
fn spin(cuda: &Cuda, stream: u64, milliseconds: u64) -> i32 {
    let (mut module, mut function, mut time) = (0_u64, 0_u64, milliseconds * 1_000_000);
    let mut arguments = [&raw mut time];
    let image = c"any image";
    let codes = [
        call!(cuda, c"cuModuleLoadData", (&raw mut module => *mut u64, image.as_ptr() => *const libc::c_char)),
        call!(cuda, c"cuModuleGetFunction", (
            &raw mut function => *mut u64, module => u64, c"spin".as_ptr() => *const libc::c_char
        )),
        call!(cuda, c"cuLaunchKernel", (
            function => u64, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32,
            stream => u64, arguments.as_mut_ptr() => *mut *mut u64, std::ptr::null_mut() => *mut u64
        )),
    ];
    codes.into_iter().find(|code| *code != 0).unwrap_or(0)
}

fn greedy(cuda: &Cuda, threads: u64, bytes: u64) -> String {
    let greedy = || {
        assert_eq!(cuda.use_device(0), 0);
        let mut count = 0;
        loop {
            match allocate(cuda, bytes, 0) {
                Ok(_) => count += 1,
                Err(code) => return (count, code),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(greedy)).collect();
        let ends = threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"));
        let (count, code) = ends.fold((0_u64, 0), |(sum, _), (count, code)| (sum + count, code));
        format!("ok {count} {code}")
    })
}
